"""Samples that no model trained on, asked of the same models."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attacks.leave_out import Problem
from attacks.types import Array, Bools, Floats, Ints, require


@dataclass(frozen=True, kw_only=True)
class Population:
    """Scores of the models of a ScoreMatrix on Z samples outside every training set.

    scores_MZQ: (M, Z, Q) or (M, Z), the same statistic as the matrix. keep_MZ: who trained on them,
    if that is known: any True is an error. targets_TZQ: scores of separate target models, where the
    attack is given such.
    """

    scores_MZQ: Array
    keep_MZ: Bools | None = None
    targets_TZQ: Array | None = None

    def __post_init__(self) -> None:
        for name in ("scores_MZQ", "targets_TZQ"):
            scores = getattr(self, name)
            if scores is None:
                continue
            require(
                isinstance(scores, np.ndarray)
                and np.issubdtype(scores.dtype, np.floating)
                and scores.ndim in (2, 3)
                and min(scores.shape) >= 1,
                f"population {name} is no floating array of (models, samples, queries)",
            )
            if scores.ndim == 2:
                object.__setattr__(self, name, scores[:, :, None])
        if self.keep_MZ is not None:
            members = np.asarray(self.keep_MZ).any(axis=0)
            require(
                not members.any(),
                f"the population contains members: {int(members.sum())} of {members.size} samples "
                "were trained on by some model; leave them out",
            )

    def check(self, problem: Problem) -> None:
        """Raise ValueError unless the population fits the problem's models and queries."""
        shape, matrix = self.scores_MZQ.shape, problem.matrix
        require(
            shape[0] == matrix.models and shape[2] == matrix.queries,
            f"the population has shape {shape} beside scores {matrix.scores_MNQ.shape}: expected "
            "the same models and queries",
        )
        if problem.separate is not None:
            require(
                self.targets_TZQ is not None
                and self.targets_TZQ.shape == (problem.separate.models, *shape[1:]),
                "separate targets need population targets_TZQ: their own scores on the population",
            )
        copies = self._copies_of_members(problem)
        require(
            not copies,
            f"the population contains samples that were trained on: {copies} of {shape[1]} have "
            "the very scores of one of them in every model; give scores of samples that no model "
            "trained on",
        )

    def _copies_of_members(self, problem: Problem) -> int:
        """How many of the population are copies of samples trained on; 0 unless most are.

        A copy has a sample's scores bit for bit in every model and query. Rounded scores agree by
        accident too, but not with exactly one sample: of N samples that fall on so coarse a grid
        that a population sample meets lambda of them on average, it meets exactly one with
        probability lambda * exp(-lambda) <= 0.37. Half and two roots more is over four standard
        deviations away; of fewer than 17 no number is.
        """
        size = self.scores_MZQ.shape[1]
        most = size / 2 + 2 * math.sqrt(size)
        if most >= size:
            return 0
        ours, theirs = problem.matrix.scores_MNQ, self.scores_MZQ
        kind = min(ours.dtype, theirs.dtype, key=lambda dtype: dtype.itemsize)
        mine_Z = np.zeros(theirs.shape[1], dtype=np.int64)
        samples_N = np.zeros(ours.shape[1], dtype=np.int64)
        for m in range(len(ours)):
            for query in range(ours.shape[2]):
                both = (samples_N, ours[m, :, query]), (mine_Z, theirs[m, :, query])
                joined = [_joined(before, row, kind) for before, row in both]
                _, numbers = np.unique(np.concatenate(joined), return_inverse=True)
                samples_N, mine_Z = numbers[: samples_N.size], numbers[samples_N.size :]
                if np.isin(mine_Z, samples_N).sum() <= most:
                    return 0
        trained_N = problem.matrix.keep_MN.any(axis=0)
        met = np.bincount(samples_N, minlength=int(mine_Z.max()) + 1)[mine_Z]
        copies = int(((met == 1) & np.isin(mine_Z, samples_N[trained_N])).sum())
        return copies if copies > most else 0

    def of(self, problem: Problem, target: int, query: int) -> Floats:
        """A target's own scores on the population, float64 (Z,)."""
        models = problem.matrix.models
        if target < models:
            return np.asarray(self.scores_MZQ[target, :, query], dtype=np.float64)
        assert self.targets_TZQ is not None
        return np.asarray(self.targets_TZQ[target - models, :, query], dtype=np.float64)


def _joined(before: Ints, row: Array, kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """A sample's number so far beside its next score, comparable as one; NaN equals itself."""
    pairs = np.empty(row.size, dtype=[("before", np.int64), ("bits", np.int64)])
    pairs["before"] = before
    with np.errstate(over="ignore"):
        pairs["bits"] = (row.astype(kind).astype(np.float64) + 0.0).view(np.int64)
    return pairs
