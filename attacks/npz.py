"""Score matrices in .npz files: one, or several under prefixes like MIX/ARM/."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from attacks.files import MOST_NUMBER, as_mask, open_npz, read_member
from attacks.loaded import Loaded, loaded
from attacks.population import Population
from attacks.types import Array, require


def read_npz(path: Path, group: str = "") -> Loaded:
    """One score matrix of a .npz file. Raises ValueError where it has none under that name."""
    with open_npz(path) as stored:
        prefix = f"{group}/" if group else ""
        held = {name.removeprefix(prefix): name for name in stored.files if name.startswith(prefix)}

        def get(*names: str) -> Array | None:
            for name in names:
                if name in held:
                    return read_member(stored, held[name], path)
            return None

        scores, keep = get("scores_MNQ", "scores"), get("keep_MN", "keep")
        require(
            scores is not None and keep is not None,
            f"{path} has no {prefix}scores_MNQ and {prefix}keep_MN: it holds "
            f"{', '.join(stored.files[:8]) or 'nothing'}",
        )
        assert scores is not None
        assert keep is not None
        numbers, labels = get("models_M", "model_ids"), get("labels_N", "labels")
        others, correct = get("population_scores_MZQ"), get("correct_MN")
        kind = get("kind_N")
    _check_companions(path, prefix, scores.shape, numbers, labels, correct, kind)
    numbers = np.arange(scores.shape[0]) if numbers is None else numbers.astype(np.int64)
    population = None if others is None else Population(scores_MZQ=others)
    mask = as_mask(keep, f"{prefix}keep_MN")
    if correct is not None:
        correct = as_mask(correct, f"{prefix}correct_MN")
    found = loaded(scores, mask, numbers.tolist(), "npz", labels, population, correct, kind)
    return found if (numbers[1:] > numbers[:-1]).all() else _ordered(found)


def _check_companions(
    path: Path,
    prefix: str,
    shape: tuple[int, ...],
    numbers: Array | None,
    labels: Array | None,
    correct: Array | None,
    kind: Array | None,
) -> None:
    """What stands beside the scores of a .npz fits them; ValueError otherwise."""
    for what, array, expected in (
        ("models_M", numbers, shape[:1]),
        ("labels_N", labels, shape[1:2]),
        ("kind_N", kind, shape[1:2]),
        ("correct_MN", correct, shape[:2]),
    ):
        if array is None:
            continue
        require(
            array.shape == expected,
            f"{path} has {prefix}{what} of shape {array.shape} beside scores {shape}: expected "
            f"{expected}",
        )
        require(
            what == "correct_MN" or np.issubdtype(array.dtype, np.integer),
            f"{path} has {prefix}{what} of type {array.dtype}: expected integers",
        )
        require(
            array.dtype != np.uint64 or bool((array <= MOST_NUMBER).all()),
            f"{path} has {prefix}{what} above {MOST_NUMBER}: expected integers of 64 bits, signed",
        )
    if numbers is not None:
        require(
            np.unique(numbers).size == numbers.size,
            f"{path}: {prefix}models_M gives two models one number",
        )


def _ordered(found: Loaded) -> Loaded:
    """The same models in ascending order of their numbers."""
    order = np.argsort(found.numbers_M, kind="stable")
    matrix, z = found.matrix, found.population
    return replace(
        found,
        matrix=replace(matrix, scores_MNQ=matrix.scores_MNQ[order], keep_MN=matrix.keep_MN[order]),
        numbers_M=found.numbers_M[order],
        population=None if z is None else Population(scores_MZQ=z.scores_MZQ[order]),
        correct_MN=None if found.correct_MN is None else found.correct_MN[order],
    )
