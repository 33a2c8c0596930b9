"""The files of `engine attack`: nothing that is there already is written over."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from attacks.types import Interval
from engine import files
from engine.attack.figures import draw_all
from engine.attack.means import Mean
from engine.attack.page import render
from engine.attack.result import Result

ROWS, MEANS, SCORES, PAGE, FIGURES = (
    "attacks.parquet",
    "means.json",
    "scores.npz",
    "attacks.html",
    "figures",
)


def prepare(out: Path) -> None:
    """Make the folder, before anything is computed.

    Raises:
        ValueError: it is a file, or holds results, or is the current folder and holds anything.
        RuntimeError: a package that the files need is not installed.
    """
    if out == Path() and any(out.iterdir()):
        raise ValueError(
            "--out is empty or the current folder, which holds files: name a new folder"
        )
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: name a folder")
    there = [name for name in (ROWS, MEANS, SCORES, PAGE, FIGURES) if (out / name).exists()]
    if there:
        raise ValueError(f"--out {out} holds {' and '.join(there)} already: name a new folder")
    _packages()
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".{os.getpid()}.part"
        probe.touch()
        probe.unlink()
    except OSError as error:
        told = (error.strerror or str(error)).lower()
        raise ValueError(f"--out {out} cannot be written ({told}): name another folder") from None


def write(out: Path, result: Result) -> list[Path]:
    """Write everything, the numbers first; the paths of the files."""
    pyarrow, parquet = _packages()
    table = pyarrow.Table.from_pylist(list(result.rows))
    typed = [
        field.with_type(pyarrow.float64()) if pyarrow.types.is_null(field.type) else field
        for field in table.schema
    ]
    table = table.cast(pyarrow.schema(typed))
    files.write_atomic(out / ROWS, lambda stream: parquet.write_table(table, stream))
    means = [_plain(mean) for mean in result.means]
    files.write_text(out / MEANS, json.dumps(means, indent=1, allow_nan=False) + "\n")
    files.write_atomic(
        out / SCORES,
        lambda stream: np.savez(stream, **result.arrays),  # type: ignore[arg-type]
    )
    drawings = draw_all(result)
    (out / FIGURES).mkdir(exist_ok=True)
    figures = [out / FIGURES / f"{drawing.name}.svg" for drawing in drawings]
    for path, drawing in zip(figures, drawings, strict=True):
        files.write_text(path, drawing.svg)
    files.write_text(out / PAGE, render(result, drawings))
    return [out / ROWS, out / MEANS, out / SCORES, *figures, out / PAGE]


def _packages() -> tuple[Any, Any]:
    """pyarrow and its parquet module; RuntimeError where they or matplotlib are missing."""
    try:
        import matplotlib  # noqa: F401
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"--out needs {error.name}, which is not installed: "
            "pip install 'shadow-engine[report]', or leave --out away"
        ) from None
    return pyarrow, pyarrow.parquet


def _plain(mean: Mean) -> dict[str, object]:
    """A mean without its curve, NaN as null."""
    row = {name: value for name, value in asdict(mean).items() if name not in ("roc", "rates")}
    rates = [
        {"alpha": rate.alpha, "tpr": _number(rate.tpr), "interval": _bounds(rate.interval)}
        for rate in mean.rates
    ]
    return {**row, "auc": _number(mean.auc), "interval": _bounds(mean.interval), "rates": rates}


def _bounds(interval: Interval) -> dict[str, object]:
    bounds = {"low": _number(interval.low), "high": _number(interval.high)}
    return {**asdict(interval), **bounds}


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def names(paths: Sequence[Path]) -> list[str]:
    """What was written, with the figures in one line."""
    figures = [path for path in paths if path.parent.name == FIGURES]
    shown = [str(path) for path in paths if path not in figures]
    if figures:
        inside = ", ".join(path.name for path in figures)
        shown.insert(-1, f"{figures[0].parent}/ ({inside})")
    return shown
