"""Intervals that a referee accepts: the models are the sample, not the targets.

Targets share shadow models, so resampling targets alone is far too narrow. The delete-a-group
jackknife deletes a group of models (a pair of complements) as targets and as shadows, recomputes,
and takes t quantiles; simulated coverage of its 95 % intervals is at or above nominal
(bench/results). The samples are taken as given: an interval is about other models trained on the
same pool, not about other pools. Source: Efron & Stein, Ann. Stat. 1981.
"""

import hashlib
import math
from collections.abc import Callable

import numpy as np
from scipy.special import betaincinv, stdtrit

from attacks.types import Array, Bools, Floats, Interval, mask_of, no_interval, require

JACKKNIFE = "delete-a-group jackknife, t"


def keep_digest(keep_MN: Bools) -> str:
    """16 hex digits that name a mask: its shape and every bit."""
    keep = mask_of(keep_MN)
    text = repr(keep.shape).encode() + np.packbits(keep).tobytes()
    return hashlib.sha256(text).hexdigest()[:16]


def jackknife_se(replicates_R: Array) -> float:
    """Standard error from the R estimates that each leave one group out."""
    values = np.asarray(replicates_R, dtype=np.float64)
    count = values.size
    return float(np.sqrt((count - 1) / count * ((values - values.mean()) ** 2).sum()))


def jackknife(
    value: float, replicates_R: Array, *, level: float = 0.95, targets: int = 2
) -> Interval:
    """value -/+ t * se with R - 1 degrees of freedom.

    value: the estimate from all models; replicates_R: the same without each group in turn. With
    fewer than three groups, one target, or a replicate that is undefined there is no interval, and
    its reason says why.

    For a mean it is the ordinary t interval, here of 1, 2 and 6:

    >>> interval = jackknife(3.0, np.array([4.0, 3.5, 1.5]))
    >>> reach = 4.302653 * np.std([1, 2, 6], ddof=1) / 3**0.5
    >>> bool(abs(3.0 - interval.low - reach) < 1e-6)
    True
    """
    require(0 < level < 1, f"the level is {level}: expected between 0 and 1")
    replicates = np.asarray(replicates_R, dtype=np.float64)
    if replicates.size < 3:
        return no_interval(level, JACKKNIFE, f"{replicates.size} groups of models: three needed")
    if targets < 2:
        return no_interval(level, JACKKNIFE, "one target: its interval needs more models")
    if not np.isfinite(value):
        return no_interval(level, JACKKNIFE, "the estimate itself is undefined")
    if not np.isfinite(replicates).all():
        return no_interval(level, JACKKNIFE, "the estimate is undefined without some of the models")
    reach = float(stdtrit(replicates.size - 1, (1 + level) / 2)) * jackknife_se(replicates)
    return Interval(low=value - reach, high=value + reach, level=level, method=JACKKNIFE)


def clopper_pearson(successes: int, trials: int, *, level: float = 0.95) -> Interval:
    """The exact interval of a binomial rate: for independent trials at a threshold fixed before.

    >>> interval = clopper_pearson(0, 10)
    >>> round(interval.low, 4), round(interval.high, 4)
    (0.0, 0.3085)
    """
    require(0 <= successes <= trials, f"{successes} successes in {trials} trials")
    require(0 < level < 1, f"the level is {level}: expected between 0 and 1")
    if not trials:
        return no_interval(level, "clopper-pearson", "no trials")
    tail = (1 - level) / 2
    low = float(betaincinv(successes, trials - successes + 1, tail)) if successes else 0.0
    high = (
        float(betaincinv(successes + 1, trials - successes, 1 - tail))
        if successes < trials
        else 1.0
    )
    return Interval(low=low, high=high, level=level, method="clopper-pearson")


def given_these_shadows(
    values_T: Array, *, level: float = 0.95, draws: int = 2000, seed: int = 0
) -> Interval:
    """Percentile bootstrap of a mean over targets that share shadow models: too narrow by design.

    It answers "other targets, these shadows", covers 73-93 % for the question usually asked, and
    never carries a verdict. NaN values (undefined targets) are left out.
    """
    values = np.asarray(values_T, dtype=np.float64)
    values = values[~np.isnan(values)]
    if values.size < 2:
        return no_interval(level, "given_these_shadows", "fewer than two targets")
    rng = np.random.default_rng(seed)
    means = values[rng.integers(0, values.size, (draws, values.size))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(low=float(low), high=float(high), level=level, method="given_these_shadows")


def permutation_null(
    statistic: Callable[[Bools], float], keep_MN: Bools, *, draws: int = 99, seed: int = 0
) -> tuple[float, Floats]:
    """One-sided p-value of a statistic against masks whose rows went to other models.

    statistic: from a mask (M, N) to a number, larger for more leakage, e.g. the mean AUC of an
    attack. Under the null the models do not depend on their rows, so whole rows are exchangeable:
    p = (1 + #{null >= observed}) / (1 + draws). Returns p and the null statistics.
    """
    keep = mask_of(keep_MN)
    require(draws >= 1, f"draws is {draws}: expected 1 or more")
    rng = np.random.default_rng(seed)
    observed = statistic(keep)
    null = np.array([statistic(keep[rng.permutation(keep.shape[0])]) for _ in range(draws)])
    require(
        math.isfinite(observed) and bool(np.isfinite(null).all()), "the statistic is not finite"
    )
    return float((1 + (null >= observed).sum()) / (1 + draws)), null
