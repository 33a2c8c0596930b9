"""Scores and masks in everybody's files, read from any layout (`attacks.export` writes three).

- `lira`, the LiRA research code (tensorflow/privacy, mi_lira_2021): one `experiment...` folder a
  model with `keep.npy` (N,) and `scores/EPOCH.npy` (N, Q), or `logits/EPOCH.npy` (N, 1, Q, K) with
  `y_train.npy` beside the folders;
- `lira_pytorch` (orientino): one folder a model with `keep.npy` and `scores.npy` (N, Q), or
  `logits.npy` (N, Q, K);
- `lira_analysis` (najeebjebreel): `keep_indices.npy` (M, N) and `model_I/scores/scores.npy` (N, Q),
  or `model_I/logits/logits.npy` (N, 1, Q, K);
- `privacy_meter`: `models/memberships.npy` (M, N) with `signals/..._signals.npy` (N, M) and
  `..._signals_pop.npy` (Z, M), probabilities of the label, or losses in `loss_signals.npy`;
- `datamodels` (MadryLab): `masks.npy` and `margins.npy` (M, N), `_completed.npy` (M,);
- `npz`: one file with `scores_MNQ` and `keep_MN`, if known `models_M`, `labels_N`,
  `population_scores_MZQ`, `correct_MN` and `kind_N`, each perhaps under `MIX/ARM/`.

Models carry numbers: the first integer of a folder's name, or the place in natural order where some
name has none; a row of an array has its index. Directory order never matters. Nothing is unpickled.
"""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from attacks.files import (
    as_mask,
    latest,
    load_npy,
    logit,
    natural_key,
    numbered,
    open_npz,
    phi_from_loss,
)
from attacks.loaded import Loaded, loaded
from attacks.npz import read_npz
from attacks.population import Population
from attacks.statistics import margin_from_logits, phi_from_logits
from attacks.types import Array, Bools, Ints, choose, require

LABEL_FILES = ("y_train.npy", "labels.npy")


def _labels(root: Path) -> Ints | None:
    for name in LABEL_FILES:
        if (root / name).is_file():
            labels = np.asarray(load_npy(root / name))
            require(
                np.issubdtype(labels.dtype, np.integer), f"{root / name} holds no integer labels"
            )
            return labels.ravel().astype(np.int64)
    return None


def _scores_of(
    scores: Path | None, logits: Path | None, labels: Ints | None, name: str
) -> tuple[Array, Bools | None]:
    """One model's scores (N, Q) from its score file, or from its logits and the labels.

    From logits also whether it predicts the label under the first query, (N,).
    """
    if scores is not None:
        array = load_npy(scores)
        require(
            array.ndim in (1, 2) and np.issubdtype(array.dtype, np.floating),
            f"{scores} has shape {array.shape} and type {array.dtype}: expected floating "
            "(samples, queries)",
        )
        rows: Array = array[:, None] if array.ndim == 1 else array
        return rows, None
    require(
        logits is not None,
        f"model folder {name} has neither scores nor logits: expected scores/*.npy or logits/*.npy "
        "in every folder of a model (a run of ours is named by its own directory)",
    )
    assert logits is not None
    require(
        labels is not None,
        f"model {name} has logits and no scores: put the labels beside the models as y_train.npy",
    )
    assert labels is not None
    array = load_npy(logits)
    if array.ndim == 4 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim == 2:
        array = array[:, None]
    require(
        array.ndim == 3,
        f"{logits} has shape {array.shape}: expected (samples, [1,] queries, classes)",
    )
    require(
        labels.size >= array.shape[0],
        f"{labels.size} labels for the {array.shape[0]} samples of {logits}",
    )
    labels = labels[: array.shape[0]]
    margin = margin_from_logits(array[:, 0], labels, axis=0)
    return phi_from_logits(array[None], labels)[0], margin > 0


def _stack(found: Mapping[str, tuple[Array, Bools | None]]) -> tuple[Array, Bools | None]:
    """All models' scores (M, N, Q), and their correctness (M, N) where all have it."""
    rows = {name: row for name, (row, _) in found.items()}
    known = [correct for _, correct in found.values() if correct is not None]
    shapes = {name: row.shape for name, row in rows.items()}
    first = next(iter(shapes.values()))
    other = [name for name, shape in shapes.items() if shape != first]
    require(
        not other,
        f"models disagree: {next(iter(shapes))} has scores of shape {first} and "
        f"{other[0] if other else ''} of {shapes[other[0]] if other else ''}",
    )
    stacked = np.empty((len(rows), *first), dtype=np.result_type(*rows.values()))
    for into, row in zip(stacked, rows.values(), strict=True):
        into[:] = row
    return stacked, np.stack(known) if len(known) == len(found) else None


def _model_folders(root: Path) -> list[Path]:
    """Folders below that hold a keep.npy."""
    return [file.parent for file in root.rglob("keep.npy") if file.parent != root]


def _warn_of_unfinished(root: Path, folders: Mapping[str, Path]) -> None:
    """Name folders that look like those of models but say nothing about membership."""
    outputs = ("scores", "logits", "scores.npy", "logits.npy")
    poor = [
        folder.name
        for folder in sorted(root.iterdir(), key=lambda f: natural_key(f.name))
        if folder.name not in folders and any((folder / name).exists() for name in outputs)
    ]
    if poor:
        warnings.warn(
            f"{root}: {', '.join(poor[:4])}{', ...' if len(poor) > 4 else ''} without keep.npy: "
            f"left out, {len(folders)} models stay",
            stacklevel=2,
        )


def _read_folders(root: Path, layout: str) -> Loaded:
    """`lira` and `lira_pytorch`: one folder a model, its mask inside."""
    labels = _labels(root)
    folders = {folder.name: folder for folder in _model_folders(root) if folder.parent == root}
    require(bool(folders), f"{root} has no folder of a model with its keep.npy")
    _warn_of_unfinished(root, folders)
    numbers = numbered(list(folders))
    rows, masks = {}, {}
    for name in numbers:
        folder = folders[name]
        if layout == "lira":
            found = latest(folder / "scores"), latest(folder / "logits")
        else:
            found = tuple(  # type: ignore[assignment]
                file if file.is_file() else None
                for file in (folder / "scores.npy", folder / "logits.npy")
            )
        rows[name] = _scores_of(*found, labels, name)
        masks[name] = as_mask(load_npy(folder / "keep.npy"), f"{name}/keep.npy").ravel()
    scores, correct = _stack(rows)
    sizes = {mask.size for mask in masks.values()}
    require(len(sizes) == 1, f"the models' keep.npy have {len(sizes)} different lengths: {sizes}")
    keep = np.stack(list(masks.values()))
    if keep.shape[1] > scores.shape[1]:
        warnings.warn(
            f"keep.npy has {keep.shape[1]} flags for {scores.shape[1]} scored samples: the first "
            "ones are taken",
            stacklevel=2,
        )
        keep = keep[:, : scores.shape[1]]
    return loaded(scores, keep, list(numbers.values()), layout, labels, correct=correct)


def _read_lira_analysis(root: Path) -> Loaded:
    keep = as_mask(load_npy(root / "keep_indices.npy"), "keep_indices.npy")
    labels = _labels(root)
    folders = {
        folder.name: folder
        for folder in root.glob("model_*")
        if (folder / "scores").is_dir() or (folder / "logits").is_dir()
    }
    require(bool(folders), f"{root} has keep_indices.npy and no model_I/scores or model_I/logits")
    numbers = numbered(list(folders))
    rows = {
        name: _scores_of(
            latest(folders[name] / "scores"), latest(folders[name] / "logits"), labels, name
        )
        for name in numbers
    }
    chosen = list(numbers.values())
    require(
        keep.ndim == 2 and max(chosen) < keep.shape[0],
        f"keep_indices.npy has shape {keep.shape}: no row for model {max(chosen)}",
    )
    scores, correct = _stack(rows)
    return loaded(scores, keep[chosen], chosen, "lira_analysis", labels, correct=correct)


def _read_privacy_meter(root: Path) -> Loaded:
    memberships = root / "memberships.npy"
    if not memberships.is_file():
        memberships = root / "models/memberships.npy"
    keep = as_mask(load_npy(memberships), "memberships.npy")
    files = sorted({*root.glob("*signals*.npy"), *(root / "signals").glob("*.npy")})
    own = [file for file in files if not file.stem.endswith("_pop")]
    own = [file for file in own if not _holds_losses(file)] or own
    require(
        len(own) == 1,
        f"{root} has {len(own)} signal files ({', '.join(f.name for f in own)}): expected one",
    )
    phi = _phi_of_signals(own[0])
    require(
        phi.ndim == 2 and phi.shape[::-1] == keep.shape,
        f"{own[0].name} has shape {phi.shape} beside memberships {keep.shape}: expected "
        "(samples, models) and (models, samples)",
    )
    population = None
    beside = own[0].with_name(own[0].stem + "_pop.npy")
    if beside.is_file():
        population = Population(scores_MZQ=_phi_of_signals(beside).T.copy())
    models = list(range(keep.shape[0]))
    return loaded(phi.T.copy(), keep, models, "privacy_meter", population=population)


def _holds_losses(signals: Path) -> bool:
    """Privacy Meter's LOSS algorithm stores losses, the others probabilities of the label."""
    return signals.name.startswith("loss")


def _phi_of_signals(signals: Path) -> Array:
    stored = load_npy(signals)
    losses = _holds_losses(signals)
    expected = f"expected {'losses, 0 or more' if losses else 'probabilities of the label, 0 to 1'}"
    require(
        np.issubdtype(stored.dtype, np.floating),
        f"{signals} is of type {stored.dtype}: {expected}, floating",
    )
    unknown = int(np.isnan(stored).sum())
    require(not unknown, f"{signals} holds {unknown} NaN of {stored.size} values: {expected}")
    if not losses:
        return logit(stored, signals.name)
    require(bool((np.asarray(stored) >= 0).all()), f"{signals} holds negative losses: {expected}")
    return phi_from_loss(stored, signals.name)


def _read_datamodels(root: Path) -> Loaded:
    masks, margins = (load_npy(root / f"{name}.npy") for name in ("masks", "margins"))
    require(
        masks.ndim == 2 and margins.shape[:2] == masks.shape,
        f"margins.npy has shape {margins.shape} and masks.npy {masks.shape}: an attack needs the "
        "margins of the very samples that the masks are about",
    )
    done = np.ones(masks.shape[0], dtype=np.bool_)
    if (root / "_completed.npy").is_file():
        done = np.asarray(load_npy(root / "_completed.npy")).astype(np.bool_).ravel()
        require(
            done.size == masks.shape[0],
            f"_completed.npy has {done.size} flags for {masks.shape[0]} models",
        )
    chosen = np.flatnonzero(done)
    require(chosen.size > 0, f"{root}: no model is completed")
    scores = margins if chosen.size == done.size else margins[chosen]
    return loaded(scores, as_mask(masks[chosen], "masks.npy"), chosen.tolist(), "datamodels")


READERS: dict[str, Callable[[Path], Loaded]] = {
    "lira": lambda root: _read_folders(root, "lira"),
    "lira_pytorch": lambda root: _read_folders(root, "lira_pytorch"),
    "lira_analysis": _read_lira_analysis,
    "privacy_meter": _read_privacy_meter,
    "datamodels": _read_datamodels,
}


def recognise(path: Path) -> str:
    """Which layout a path holds. Raises ValueError, naming what is read, when none."""
    require(path.exists(), f"{path} does not exist")
    if path.is_file():
        require(path.suffix == ".npz", f"{path} is no .npz file and no folder")
        return "npz"
    if (path / "keep_indices.npy").is_file():
        return "lira_analysis"
    if (path / "masks.npy").is_file() and (path / "margins.npy").is_file():
        return "datamodels"
    if (path / "memberships.npy").is_file() or (path / "models/memberships.npy").is_file():
        return "privacy_meter"
    for folder in _model_folders(path):
        if (folder / "scores").is_dir() or (folder / "logits").is_dir():
            return "lira"
        if (folder / "scores.npy").is_file() or (folder / "logits.npy").is_file():
            return "lira_pytorch"
    raise ValueError(
        f"{path} holds no scores that are known: expected a run folder, a .npz file with "
        f"scores_MNQ and keep_MN, or one of the layouts {', '.join(READERS)}"
    )


def groups(path: Path, layout: str = "auto") -> list[str]:
    """The score matrices that a path holds, by name (MIX/ARM); [""] where there is just one.

    A .npz file groups by the prefix of its keys, folders of models by the folder they lie in.
    """
    layout = recognise(path) if layout == "auto" else layout
    if layout == "npz":
        with open_npz(path) as stored:
            names = [n for n in stored.files if n.rpartition("/")[2] in ("scores_MNQ", "scores")]
        found = {name.rpartition("/")[0] for name in names}
    elif layout in ("lira", "lira_pytorch"):
        parents = {folder.parent.relative_to(path) for folder in _model_folders(path)}
        found = {"" if str(parent) == "." else parent.as_posix() for parent in parents}
    else:
        found = {""}
    return sorted(found, key=natural_key) or [""]


def read(path: Path, layout: str = "auto", group: str | None = None) -> Loaded:
    """One score matrix of a folder in any layout, or of a .npz file.

    group: which of several (see `groups`). Raises ValueError, in one sentence, for files that are
    missing, unreadable or disagree, and where several matrices leave the choice open.
    """
    if layout == "auto":
        layout = recognise(path)
    choose("layout", layout, (*READERS, "npz"))
    held = groups(path, layout)
    if group is None:
        require(
            len(held) == 1, f"{path} holds {len(held)} score matrices: choose {', '.join(held)}"
        )
        group = held[0]
    require(group in held, f"{path} holds no '{group}': there are {', '.join(held)}")
    return read_npz(path, group) if layout == "npz" else READERS[layout](path / group)
