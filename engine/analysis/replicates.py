"""Numbers that carry their leave-a-pair-out replicates, so that differences stay paired.

M models, G deletion groups (pairs of complementary models, or single models; see
`attacks.exclusion`). The interval is the delete-a-group jackknife with t quantiles.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from attacks.types import Interval, no_interval
from engine.analysis.findings import ANY, Curve, Estimate, Range

Floats = npt.NDArray[np.float64]
Groups = Sequence[tuple[int, ...]]

METHOD = "delete-a-pair jackknife, t quantiles"
FEWEST_GROUPS = 3


@dataclass(frozen=True, kw_only=True)
class Replicated:
    """A value and the same value without each deletion group; `undefined` says why it is NaN.

    possible: what the value can be at all.
    """

    value: float
    replicates_G: Floats
    undefined: str = ""
    possible: Range = ANY

    def __sub__(self, other: "Replicated") -> "Replicated":
        return Replicated(
            value=self.value - other.value,
            replicates_G=self.replicates_G - other.replicates_G,
            undefined=self.undefined or other.undefined,
            possible=(self.possible[0] - other.possible[1], self.possible[1] - other.possible[0]),
        )

    def relative_to(self, other: "Replicated") -> "Replicated":
        """(self - other) / other, of rates."""
        return Replicated(
            value=self.value / other.value - 1,
            replicates_G=self.replicates_G / other.replicates_G - 1,
            undefined=self.undefined or other.undefined,
            possible=(-1.0, math.inf),
        )

    def estimate(self, level: float) -> Estimate:
        """The value with its jackknife interval, or the reason why there is none."""
        if math.isnan(self.value):
            reason = self.undefined or "there is nothing to average"
            missing = no_interval(level, METHOD, reason)
            return Estimate(value=math.nan, interval=missing, undefined=reason)
        error, degrees, reason = _standard_error(self.replicates_G)
        if reason:
            return Estimate(value=self.value, interval=no_interval(level, METHOD, reason))
        half = float(stats.t.ppf((1 + level) / 2, degrees)) * error
        interval = Interval(
            low=self.value - half, high=self.value + half, level=level, method=METHOD
        )
        return Estimate(
            value=self.value,
            interval=interval,
            standard_error=error,
            degrees=degrees,
            possible=self.possible,
        )


def undefined(reason: str) -> Replicated:
    """A number that is not there, and why."""
    return Replicated(value=math.nan, replicates_G=np.full(1, math.nan), undefined=reason)


def mean(
    values_M: npt.NDArray[np.floating], groups: Groups, reason: str = "", possible: Range = ANY
) -> Replicated:
    """The mean of a per-model number over models, with its replicates.

    NaN stands for a model in which the number is undefined: then the mean is undefined as well,
    and `reason` says why.
    """
    values = np.asarray(values_M, dtype=np.float64)
    value, replicates = _means(values[:, None], groups)
    told = reason if math.isnan(value[0]) else ""
    return Replicated(
        value=float(value[0]), replicates_G=replicates[:, 0], undefined=told, possible=possible
    )


def mean_curve(values_ME: npt.NDArray[np.floating], groups: Groups, level: float) -> Curve:
    """The mean over models for each epoch, with its pointwise interval."""
    values = np.asarray(values_ME, dtype=np.float64)
    value_E, replicates_GE = _means(values, groups)
    low_E, high_E = np.full_like(value_E, math.nan), np.full_like(value_E, math.nan)
    if len(groups) >= FEWEST_GROUPS:
        half_E = stats.t.ppf((1 + level) / 2, len(groups) - 1) * _errors(replicates_GE)
        low_E, high_E = value_E - half_E, value_E + half_E
    return Curve(value_E=value_E, low_E=low_E, high_E=high_E)


def _means(values_MK: Floats, groups: Groups) -> tuple[Floats, Floats]:
    """Means over models, of all and without each group."""
    total_K, count = values_MK.sum(0), len(values_MK)
    if not count:
        nothing = np.full(values_MK.shape[1], math.nan)
        return nothing, np.full((len(groups), values_MK.shape[1]), math.nan)
    replicates = [
        (total_K - values_MK[list(group)].sum(0)) / (count - len(group))
        if count > len(group)
        else np.full_like(total_K, math.nan)
        for group in groups
    ]
    return total_K / count, np.reshape(replicates, (len(groups), -1))


def _errors(replicates_GK: Floats) -> Floats:
    """Jackknife standard errors of K numbers."""
    count = len(replicates_GK)
    centred = replicates_GK - replicates_GK.mean(0)
    return np.asarray(np.sqrt((count - 1) / count * (centred**2).sum(0)))


def _standard_error(replicates_G: Floats) -> tuple[float, int, str]:
    """Standard error, degrees of freedom, and the reason where there is none."""
    count = len(replicates_G)
    if count < FEWEST_GROUPS:
        units = "pair" if count == 1 else "pairs"
        return (
            math.nan,
            0,
            f"{count} {units} of models: an interval needs {FEWEST_GROUPS} at least",
        )
    if not np.isfinite(replicates_G).all():
        reason = "too few models: without one more pair the attack is undefined"
        return math.nan, 0, reason
    return float(_errors(replicates_G[:, None])[0]), count - 1, ""
