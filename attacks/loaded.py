"""A score matrix as found on disk, with what stands beside it."""

import warnings
from dataclasses import dataclass

import numpy as np

from attacks.population import Population
from attacks.types import Array, Bools, Ints, ScoreMatrix, require


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """One score matrix as found on disk; models in ascending order of their numbers.

    numbers_M: what the models are called. Where the files have them: labels_N, a population,
    correct_MN (whether the model predicts the label; known from logits, of the first query) and
    kind_N (0 clean, 1 flipped, 2 ood).
    """

    matrix: ScoreMatrix
    numbers_M: Ints
    layout: str
    labels_N: Ints | None = None
    population: Population | None = None
    correct_MN: Bools | None = None
    kind_N: Array | None = None

    def indices(self, numbers: list[int]) -> list[int]:
        """Rows of the models with these numbers. Raises ValueError for one that is not there."""
        known = {int(number): m for m, number in enumerate(self.numbers_M)}
        for number in numbers:
            require(
                number in known,
                f"there is no model {number}: models are numbered {brief(sorted(known))}",
            )
        return [known[number] for number in numbers]


def brief(numbers: list[int]) -> str:
    """Model numbers as a short text."""
    if len(numbers) > 8 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def loaded(
    scores: Array,
    keep: Bools,
    numbers: list[int],
    layout: str,
    labels: Array | None = None,
    population: Population | None = None,
    correct: Bools | None = None,
    kind: Array | None = None,
) -> Loaded:
    """From arrays as files have them; labels beyond the samples are cut.

    Warns of a model that is there twice.
    """
    known = None if labels is None else np.asarray(labels).ravel()[: scores.shape[1]]
    matrix = ScoreMatrix(scores_MNQ=scores, keep_MN=keep)
    _warn_of_twins(matrix, numbers)
    return Loaded(
        matrix=matrix,
        numbers_M=np.array(numbers, dtype=np.int64),
        layout=layout,
        labels_N=None if known is None else known.astype(np.int64),
        population=population,
        correct_MN=correct,
        kind_N=kind,
    )


def _warn_of_twins(matrix: ScoreMatrix, numbers: list[int]) -> None:
    """Equal scores for equal members; a few columns are compared first, as files may be large."""
    scores, keep = matrix.scores_MNQ, matrix.keep_MN
    few = slice(None, None, max(1, scores.shape[1] // 64))
    alike: dict[tuple[bytes, bytes], list[int]] = {}
    twins = []
    for m in range(matrix.models):
        glance = np.ascontiguousarray(scores[m, few]).tobytes(), np.packbits(keep[m]).tobytes()
        others = alike.setdefault(glance, [])
        twin = next((o for o in others if np.array_equal(scores[o], scores[m], equal_nan=True)), m)
        if twin == m:
            others.append(m)
        else:
            twins.append(f"{numbers[twin]} and {numbers[m]}")
    if twins:
        more = f" (and {len(twins) - 3} more pairs)" if len(twins) > 3 else ""
        warnings.warn(
            f"models {', '.join(twins[:3])}{more} have the same members and scores: if one was "
            "given twice, leave it out, as attacks look surer with it",
            stacklevel=3,
        )
