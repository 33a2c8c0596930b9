"""Small readers for other people's files: arrays, masks, numbers in names. Nothing is unpickled."""

import re
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from attacks.types import Array, Bools, require

MOST_NUMBER = 2**63 - 1
"""The largest number that a model can have."""


def load_npy(path: Path) -> Array:
    """A .npy file, memory-mapped; ValueError in one sentence where it cannot be read."""
    require(path.is_file(), f"{path} is not there")
    try:
        loaded: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no readable .npy file of numbers: {error}") from error
    if isinstance(loaded, np.lib.npyio.NpzFile):
        loaded.close()
        raise ValueError(f"{path} is a .npz archive: expected one array, as np.save writes it")
    return loaded


def as_mask(array: Array, source: str) -> Bools:
    """A membership mask as bool; integers 0 and 1 are converted with a warning."""
    if array.dtype == np.bool_:
        return np.asarray(array)
    values = np.asarray(array)
    require(
        np.issubdtype(values.dtype, np.integer) and bool(((values == 0) | (values == 1)).all()),
        f"{source} is of type {values.dtype} and no mask of 0 and 1: expected bool, one flag for "
        "each sample (not the indices of members)",
    )
    warnings.warn(f"{source} is of type {values.dtype}: converted to bool", stacklevel=2)
    return values.astype(np.bool_)


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts a2 before a10."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)


def numbered(names: list[str]) -> dict[str, int]:
    """Each name's number, ascending: its first integer, or all by natural order if one has none.

    >>> numbered(["m10", "m9"]), numbered(["b", "a2"])
    ({'m9': 9, 'm10': 10}, {'a2': 0, 'b': 1})
    """
    found = {name: re.search(r"\d+", name) for name in names}
    if all(found.values()):
        numbers = {name: int(hit.group()) for name, hit in found.items() if hit}
        for name, number in numbers.items():
            require(
                number <= MOST_NUMBER,
                f"{name} names a model by a number above {MOST_NUMBER}: rename its folder",
            )
        twice = [n for n in names if list(numbers.values()).count(numbers[n]) > 1]
        require(
            not twice,
            f"two models have one number: {', '.join(sorted(twice)[:4])}; rename their folders",
        )
        return dict(sorted(numbers.items(), key=lambda item: item[1]))
    return {name: i for i, name in enumerate(sorted(names, key=natural_key))}


def latest(folder: Path) -> Path | None:
    """The .npy file of the highest epoch in a folder (by the last integer of its name)."""
    files = sorted(folder.glob("*.npy"), key=lambda file: natural_key(file.name))
    epochs = {file: re.findall(r"\d+", file.stem) for file in files}
    if not files:
        return None
    return max(files, key=lambda file: (int(epochs[file][-1]) if epochs[file] else -1, file.name))


def open_npz(path: Path) -> Any:
    """An opened .npz file; ValueError in one sentence where it cannot be read."""
    require(path.is_file(), f"{path} is no file: expected one .npz file")
    require(zipfile.is_zipfile(path), f"{path} is no readable .npz file: it is no zip archive")
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is no readable .npz file: {error}") from error


def read_member(stored: Any, name: str, path: Path) -> Array:
    """One array of an opened .npz file; ValueError in one sentence where it cannot be read."""
    try:
        array: Array = stored[name]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: {name} is no readable array of numbers ({error})") from error
    return array


def logit(p: Array, source: str) -> Array:
    """phi of stored probabilities; those that saturate are held at the type's last step."""
    values = np.asarray(p, dtype=np.float64)
    require(
        bool(((values >= 0) & (values <= 1)).all()),
        f"{source} holds values outside 0 to 1: expected probabilities of the label",
    )
    step = float(np.finfo(p.dtype).epsneg)
    _warn_of_saturated(source, "probabilities", (values > 1 - step) | (values == 0))
    values = np.clip(values, float(np.finfo(p.dtype).tiny), 1 - step)
    return np.asarray(np.log(values) - np.log1p(-values))


def phi_from_loss(loss: Array, source: str) -> Array:
    """phi of stored cross-entropies; a loss of 0 is held at the type's first step.

    >>> bool(np.isclose(phi_from_loss(np.array([np.log1p(np.exp(-3.0))]), "x")[0], 3))
    True
    """
    values = np.asarray(loss, dtype=np.float64)
    step = float(np.finfo(loss.dtype).epsneg)
    _warn_of_saturated(source, "losses", values < step)
    values = np.maximum(values, step)
    return np.asarray(-values - np.log(-np.expm1(-values)))


def _warn_of_saturated(source: str, what: str, saturated: Array) -> None:
    count = int(saturated.sum())
    if count:
        warnings.warn(
            f"{source}: {count} of {saturated.size} {what} are saturated to the last digit (0"
            f"{' or 1' if what == 'probabilities' else ''}); their phi is held at the last step of "
            "the type",
            stacklevel=3,
        )
