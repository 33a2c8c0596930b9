"""Samples that no model trained on, asked of the same models."""

from dataclasses import dataclass

import numpy as np

from attacks.leave_out import Problem
from attacks.types import Array, Bools, Floats, require


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

    def of(self, problem: Problem, target: int, query: int) -> Floats:
        """A target's own scores on the population, float64 (Z,)."""
        models = problem.matrix.models
        if target < models:
            return np.asarray(self.scores_MZQ[target, :, query], dtype=np.float64)
        assert self.targets_TZQ is not None
        return np.asarray(self.targets_TZQ[target - models, :, query], dtype=np.float64)
