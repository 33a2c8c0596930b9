"""Score matrices in the layouts of other people's tools: LiRA research, lira_analysis, .npz."""

import json
from pathlib import Path

import numpy as np

from attacks.loaded import Loaded, brief
from attacks.types import require


def write_npz(path: Path, loaded: Loaded) -> Path:
    """The matrix as one .npz file: scores_MNQ, keep_MN, models_M and what else is known."""
    arrays = {
        "scores_MNQ": loaded.matrix.scores_MNQ,
        "keep_MN": loaded.matrix.keep_MN,
        "models_M": loaded.numbers_M,
    }
    if loaded.labels_N is not None:
        arrays["labels_N"] = loaded.labels_N
    if loaded.correct_MN is not None:
        arrays["correct_MN"] = loaded.correct_MN
    if loaded.kind_N is not None:
        arrays["kind_N"] = loaded.kind_N
    if loaded.population is not None:
        arrays["population_scores_MZQ"] = loaded.population.scores_MZQ
    require(path.suffix == ".npz", f"{path}: expected a name that ends in .npz")
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def write_lira(path: Path, loaded: Loaded, *, epoch: int = 0) -> Path:
    """The layout of the LiRA research code: experiment-I_M/keep.npy and scores/EPOCH.npy."""
    _fresh(path)
    models = loaded.matrix.models
    for m, number in enumerate(loaded.numbers_M.tolist()):
        folder = path / f"experiment-{number}_{models}"
        (folder / "scores").mkdir(parents=True)
        np.save(folder / "keep.npy", loaded.matrix.keep_MN[m])
        np.save(folder / "scores" / f"{epoch:010d}.npy", loaded.matrix.scores_MNQ[m])
        facts = {"expid": number, "num_experiments": models}
        (folder / "hparams.json").write_text(json.dumps(facts) + "\n")
    if loaded.labels_N is not None:
        np.save(path / "y_train.npy", loaded.labels_N)
    return path


def write_lira_analysis(path: Path, loaded: Loaded) -> Path:
    """The layout of lira_analysis: keep_indices.npy and model_I/scores/scores.npy, I from 0."""
    _fresh(path)
    numbers = loaded.numbers_M.tolist()
    require(
        numbers == list(range(len(numbers))),
        f"lira_analysis numbers models from 0 on, these are {brief(numbers)}",
    )
    np.save(path / "keep_indices.npy", loaded.matrix.keep_MN)
    for m in numbers:
        folder = path / f"model_{m}" / "scores"
        folder.mkdir(parents=True)
        np.save(folder / "scores.npy", loaded.matrix.scores_MNQ[m])
    if loaded.labels_N is not None:
        np.save(path / "y_train.npy", loaded.labels_N)
    return path


def _fresh(path: Path) -> None:
    require(not path.exists() or path.is_dir(), f"{path} is a file: name a folder")
    require(not path.exists() or not any(path.iterdir()), f"{path} is not empty: name a new folder")
    path.mkdir(parents=True, exist_ok=True)
