"""What goes between the parts of the library: score matrices in, attack scores out.

Shape suffixes: M models, S shadow models, T targets, N samples, Q queries (views) a sample,
Z population samples, K classes. Scores are of any floating type; a memory map is never read whole.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.uint8]

Design = Literal["auto", "paired", "balanced", "bernoulli"]
DESIGNS = ("auto", "paired", "balanced", "bernoulli")


def require(condition: bool, sentence: str) -> None:
    """Raise ValueError with one sentence unless the condition holds."""
    if not condition:
        raise ValueError(sentence)


def choose(what: str, given: str, known: tuple[str, ...]) -> None:
    """Raise ValueError, with the list of what exists, for a name that does not."""
    require(given in known, f"unknown {what} '{given}': known are {', '.join(known)}")


class Excluded(IntEnum):
    """Why a sample has no attack score for a target; 0 means it has one, the smallest code wins."""

    USED = 0
    TARGET_NOT_FINITE = 1
    NO_IN = 2
    NO_OUT = 3
    ONE_IN = 4
    ONE_OUT = 5
    SCORE_NOT_FINITE = 6
    POPULATION_NOT_FINITE = 7


def mask_of(keep_MN: Array, name: str = "keep_MN") -> Bools:
    """The mask itself when it is a boolean matrix, else ValueError."""
    keep = np.asarray(keep_MN)
    require(
        keep.dtype == np.bool_,
        f"{name} is of type {keep.dtype}: expected bool, as {name}.astype(bool) gives",
    )
    require(keep.ndim == 2, f"{name} has shape {keep.shape}: expected (models, samples)")
    return keep


@dataclass(frozen=True, kw_only=True)
class ScoreMatrix:
    """Scores of M models on N samples under Q queries, and who trained on what.

    scores_MNQ: logit-scaled confidences phi for the attacks that model them (LiRA, RMIA), or any
    score that is higher for members. Shape (M, N, Q), or (M, N) for one query, floating.
    keep_MN: bool, True where the model trained on the sample.
    design: how the mask was drawn, found from the mask by "auto" (see `attacks.exclusion`).

    Raises ValueError when shapes disagree or a type is wrong.
    """

    scores_MNQ: Array
    keep_MN: Bools
    design: Design = "auto"

    def __post_init__(self) -> None:
        scores = self.scores_MNQ
        require(
            isinstance(scores, np.ndarray) and np.issubdtype(scores.dtype, np.floating),
            f"scores_MNQ is of type {getattr(scores, 'dtype', type(scores).__name__)}: expected a "
            "floating NumPy array",
        )
        if scores.ndim == 2:
            object.__setattr__(self, "scores_MNQ", scores[:, :, None])
        require(
            scores.ndim in (2, 3),
            f"scores_MNQ has shape {scores.shape}: expected (models, samples, queries)",
        )
        keep = mask_of(self.keep_MN)
        require(
            keep.shape == scores.shape[:2],
            f"scores_MNQ has shape {scores.shape} and keep_MN {keep.shape}: expected the same "
            "models and samples",
        )
        require(min(self.scores_MNQ.shape) >= 1, f"scores_MNQ is empty: shape {scores.shape}")
        choose("mask design", self.design, DESIGNS)

    @property
    def models(self) -> int:
        """M."""
        return int(self.keep_MN.shape[0])

    @property
    def samples(self) -> int:
        """N."""
        return int(self.keep_MN.shape[1])

    @property
    def queries(self) -> int:
        """Q."""
        return int(self.scores_MNQ.shape[2])


@dataclass(frozen=True, kw_only=True)
class AttackScores:
    """The verdicts of one attack: higher means more likely a member.

    scores_TN: float64, NaN exactly where excluded. membership_TN: bool, the truth.
    excluded_TN: uint8 codes of `Excluded`. targets_T: which models were attacked.
    """

    scores_TN: Floats
    membership_TN: Bools
    excluded_TN: Codes
    targets_T: Ints

    def __post_init__(self) -> None:
        shape = self.scores_TN.shape
        require(
            shape == self.membership_TN.shape == self.excluded_TN.shape
            and self.targets_T.shape == shape[:1],
            "attack scores, membership, reason codes and targets disagree in shape",
        )

    def exclusions(self) -> dict[str, int]:
        """How many (target, sample) entries each reason code took out."""
        counts = np.bincount(self.excluded_TN.ravel(), minlength=len(Excluded))
        return {code.name.lower(): int(counts[code]) for code in Excluded if code and counts[code]}


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A confidence interval and how it was made; NaN bounds and the reason where there is none."""

    low: float
    high: float
    level: float
    method: str
    reason: str = ""

    @property
    def given(self) -> bool:
        """Whether there is an interval at all."""
        return not self.reason


def no_interval(level: float, method: str, reason: str) -> Interval:
    """An interval that is not there, and why."""
    return Interval(low=float("nan"), high=float("nan"), level=level, method=method, reason=reason)


def resolve_targets(targets: "npt.ArrayLike | None", models: int) -> Ints:
    """Target indices from None (all), or a list of distinct model indices; ValueError otherwise."""
    if targets is None:
        return np.arange(models, dtype=np.int64)
    chosen = np.asarray(targets)
    require(
        chosen.ndim == 1 and chosen.size > 0 and np.issubdtype(chosen.dtype, np.integer),
        f"targets has shape {chosen.shape} and type {chosen.dtype}: expected a list of indices",
    )
    strange = chosen[(chosen < 0) | (chosen >= models)]
    require(
        not strange.size,
        f"targets names model {strange[0] if strange.size else ''}: expected indices from 0 to "
        f"{models - 1}",
    )
    require(np.unique(chosen).size == chosen.size, "targets names a model twice")
    return chosen.astype(np.int64)
