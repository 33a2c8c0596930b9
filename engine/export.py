"""Hand a run's scores over to other tools, as one .npz or in the folder layout of LiRA research.

M models, N samples, Q queries, Z population images. Exports of the same models have the same
bytes, whatever trained them and whenever; one cell is in memory at a time.
"""

import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from engine import files
from engine.store import Cell, Run
from engine.study import unknown

FORMATS = ("npz", "tf")
_EPOCH_ZERO = (1980, 1, 1, 0, 0, 0)
"""The one time stamp that zip archives always get here."""

Array = npt.NDArray[Any]


def export(run: Run, format: str, out: str | Path) -> Path:
    """Write the scores, masks and labels of every cell of a finished run.

    npz: one file with keys MIX/ARM/NAME for NAME in scores_MNQ (phi, float32), keep_MN, correct_MN,
    labels_N (trained on), true_labels_N (-1: none), kind_N (0 clean, 1 flipped, 2 ood) and
    population_scores_MZQ.

    tf: a folder MIX/ARM/experiment-I_M a model, with keep.npy (N,) and scores/EPOCHS.npy (N, Q),
    and MIX/ARM/y_train.npy: the layout that the research code of Carlini et al. (2022) reads.

    Args:
        run: a run directory whose models are all finished.
        format: "npz" or "tf".
        out: the file (npz) or the folder (tf) to write: a new one, or an empty folder.

    Raises:
        ValueError: an unknown format, an unfit `out`, or models that are missing.
    """
    if format not in FORMATS:
        raise ValueError(unknown("export format", format, FORMATS))
    out = Path(out)
    if format == "npz":
        return _export_npz(run, out)
    return _export_tf(run, out)


def arrays_of(cell: Cell) -> dict[str, Array]:
    """The exported arrays of a cell, by name."""
    return {
        "scores_MNQ": cell.arrays["phi_NQ"],
        "keep_MN": cell.keep_MN,
        "correct_MN": cell.arrays["correct_N"],
        "labels_N": cell.samples.label_N,
        "true_labels_N": cell.samples.true_label_N,
        "kind_N": cell.samples.kind_N,
        "population_scores_MZQ": cell.arrays["population_phi_ZQ"],
    }


def _cells(run: Run) -> Iterator[tuple[str, str, Cell]]:
    for mix in run.study.mixes:
        for arm in run.study.arms:
            yield mix, arm, run.load(mix, arm)


def _export_npz(run: Run, out: Path) -> Path:
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder: name the .npz file to write")
    if out.suffix != ".npz":
        raise ValueError(f"--out {out}: expected a name that ends in .npz")
    if out.exists():
        raise ValueError(f"--out {out} is there already: name a new file")
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomic(out, lambda stream: _write_npz(run, stream))
    return out


def _write_npz(run: Run, stream: BinaryIO) -> None:
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for mix, arm, cell in _cells(run):
            for name, values in arrays_of(cell).items():
                member = zipfile.ZipInfo(f"{mix}/{arm}/{name}.npy", _EPOCH_ZERO)
                with archive.open(member, "w", force_zip64=True) as part:
                    np.lib.format.write_array(part, np.ascontiguousarray(values))


def _export_tf(run: Run, out: Path) -> Path:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out} is there already: name a new or an empty folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        for mix, arm, cell in _cells(run):
            _write_tf_cell(run, part / mix / arm, arm, cell)
        if out.exists():
            out.rmdir()
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return out


def _write_tf_cell(run: Run, folder: Path, arm: str, cell: Cell) -> None:
    models, epochs = len(cell.keep_MN), run.study.train.epochs
    net = run.study.arms[arm]
    facts = {
        "arch": net.net,
        "norm": net.norm,
        "epochs": epochs,
        "num_experiments": models,
        "digest": run.digest,
    }
    for m in range(models):
        experiment = folder / f"experiment-{m}_{models}"
        (experiment / "scores").mkdir(parents=True)
        np.save(experiment / "keep.npy", cell.keep_MN[m])
        np.save(experiment / "scores" / f"{epochs:010d}.npy", cell.arrays["phi_NQ"][m])
        (experiment / "hparams.json").write_text(json.dumps({**facts, "expid": m}) + "\n")
    np.save(folder / "y_train.npy", cell.samples.label_N)
