"""Lower bounds on differential privacy from attack scores, refused where their proofs do not hold.

A bound is about one trained model, its canaries and one attack: it is at most the true parameter
with the stated confidence, and 0 says nothing. Scores are attack scores, higher for members.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import bdtr, bdtrc, betaincinv, ndtr, ndtri

from attacks.exclusion import plan_exclusion
from attacks.types import Array, Bools, Floats, mask_of, require

MAX_EPSILON = 50.0
_UNFAIR = 1e-6


@dataclass(frozen=True, kw_only=True)
class PrivacyBound:
    """A lower bound (epsilon at delta, or mu) with the rates or guesses behind it.

    tested: how many (threshold, direction) or guess counts the level was shared among.
    """

    value: float
    delta: float
    level: float
    tested: int
    method: str
    detail: str


def _one_target(scores: Array, membership: Array) -> tuple[Floats, Bools]:
    values, labels = np.asarray(scores, dtype=np.float64), np.asarray(membership)
    require(
        values.ndim == 1,
        f"scores have shape {values.shape}: a bound is about one target, give its own",
    )
    require(
        labels.dtype == np.bool_ and labels.shape == values.shape,
        f"membership is {labels.dtype} {labels.shape}: expected bool {values.shape}",
    )
    known = ~np.isnan(values)
    return values[known], labels[known]


def _level(level: float, delta: float) -> None:
    require(0 < level < 1, f"the level is {level}: expected between 0 and 1")
    require(0 <= delta < 1, f"delta is {delta}: expected 0 to 1")


def _lowest(hits: int, trials: int, error: float) -> float:
    """One-sided Clopper-Pearson lower bound of a rate."""
    return float(betaincinv(hits, trials - hits + 1, error)) if hits else 0.0


def _rates(
    scores: Array, membership: Array, thresholds: Sequence[float], level: float
) -> list[tuple[float, float, str]]:
    """For each threshold and direction (lower bound of the hit rate, upper of the false one)."""
    values, labels = _one_target(scores, membership)
    n_in, n_out = int(labels.sum()), int((~labels).sum())
    require(min(n_in, n_out) > 0, "a bound needs members and non-members with scores")
    require(len(thresholds) > 0, "a bound needs a threshold fixed without these scores")
    error = (1 - level) / (4 * len(thresholds))
    rates = []
    for threshold in thresholds:
        tp, fp = int((values[labels] > threshold).sum()), int((values[~labels] > threshold).sum())
        for hits, of, false, among, name in (
            (tp, n_in, fp, n_out, "members"),
            (n_out - fp, n_out, n_in - tp, n_in, "non-members"),
        ):
            highest = 1 - _lowest(among - false, among, error)
            text = f"{name} at {threshold:g}: {hits}/{of} hits, {false}/{among} false"
            rates.append((_lowest(hits, of, error), highest, text))
    return rates


def epsilon_lower_bound(
    scores: Array,
    membership: Array,
    thresholds: Sequence[float],
    *,
    delta: float = 0.0,
    level: float = 0.95,
) -> PrivacyBound:
    """The largest epsilon that TPR and FPR at thresholds fixed beforehand refute.

    scores, membership (n,): one target's canaries, independent trials; NaN scores are left out.
    thresholds: chosen without these scores (see `thresholds_from`). Any (epsilon, delta)-private
    training has TPR <= e^epsilon FPR + delta and 1 - FPR <= e^epsilon (1 - TPR) + delta; all rates
    enter by one-sided Clopper-Pearson bounds whose errors sum to 1 - level over both directions and
    all thresholds. Source: Kairouz et al., ICML 2015; Nasr et al., S&P 2021.

    >>> perfect = np.arange(400) < 200
    >>> rate = (0.05 / 4) ** (1 / 200)
    >>> bound = epsilon_lower_bound(perfect.astype(float), perfect, [0.5]).value
    >>> round(bound, 9) == round(math.log(rate / (1 - rate)), 9)
    True
    """
    _level(level, delta)
    best, detail = 0.0, "no threshold separates"
    rates = _rates(scores, membership, thresholds, level)
    for low, high, text in rates:
        epsilon = math.log((low - delta) / high) if low > delta and high > 0 else 0.0
        if epsilon > best:
            best, detail = epsilon, text
    return PrivacyBound(
        value=best,
        delta=delta,
        level=level,
        tested=len(rates),
        method="rates at fixed thresholds",
        detail=detail,
    )


def thresholds_from(other_scores: Array, count: int = 10) -> list[float]:
    """Thresholds spread over the upper and lower tails of other models' scores.

    Half of them at the top (quantiles 1 - 2^-k), half at the bottom; NaN is left out.
    """
    values = np.asarray(other_scores, dtype=np.float64).ravel()
    values = values[np.isfinite(values)]
    require(values.size > 0, "no finite score of another model to take thresholds from")
    tails = 0.5 ** np.arange(1, max(1, count // 2) + 1)
    quantiles = np.unique(np.concatenate([tails, 1 - tails]))
    return [float(bar) for bar in np.unique(np.quantile(values, quantiles))]


def gdp_delta(mu: float, epsilon: float) -> float:
    """delta(epsilon) of mu-Gaussian differential privacy (Dong, Roth & Su, JRSS-B 2022, cor. 1).

    >>> round(gdp_delta(1.0, 0.0), 6) == round(2 * float(ndtr(0.5)) - 1, 6)
    True
    """
    require(mu >= 0 and epsilon >= 0, f"mu is {mu} and epsilon {epsilon}: expected 0 or more")
    if mu == 0:
        return 0.0
    second = math.exp(epsilon) * float(ndtr(-epsilon / mu - mu / 2))
    return max(0.0, float(ndtr(-epsilon / mu + mu / 2)) - second)


def gdp_epsilon(mu: float, delta: float) -> float:
    """The epsilon at which mu-GDP has this delta, by bisection; MAX_EPSILON at most."""
    require(0 < delta < 1, f"delta is {delta}: expected between 0 and 1")
    return _bisect(lambda epsilon: gdp_delta(mu, epsilon) > delta)


def _bisect(above: Callable[[float], bool]) -> float:
    """The end of the range from 0 in which a condition holds."""
    low, high = 0.0, MAX_EPSILON
    if not above(low):
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if above(middle) else (low, middle)
    return low


def mu_lower_bound(
    scores: Array,
    membership: Array,
    thresholds: Sequence[float],
    *,
    mechanism: str,
    level: float = 0.95,
) -> PrivacyBound:
    """The largest mu that the rates refute, for training that is a Gaussian mechanism.

    mechanism: must be "gaussian": mu-GDP bounds the trade-off curve of (compositions of) Gaussian
    mechanisms only, so ordinary training is refused; use `epsilon_lower_bound` there. Other
    arguments as there. mu >= Phi^-1(TPR) - Phi^-1(FPR).
    """
    require(
        mechanism == "gaussian",
        f"mu-GDP does not apply to mechanism '{mechanism}': only to 'gaussian' (noisy gradients); "
        "bound epsilon instead",
    )
    _level(level, 0.0)
    best, detail = 0.0, "no threshold separates"
    rates = _rates(scores, membership, thresholds, level)
    for low, high, text in rates:
        mu = float(ndtri(low) - ndtri(high)) if low > 0 and high < 1 else 0.0
        if mu > best:
            best, detail = mu, text
    return PrivacyBound(
        value=best,
        delta=0.0,
        level=level,
        tested=len(rates),
        method="mu-GDP, rates at fixed thresholds",
        detail=detail,
    )


def one_run_p_value(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """P[at least v of r guesses right] at most, over (epsilon, delta)-private training.

    m canaries by independent fair coins, r guesses, v right. Source: Steinke, Nasr & Jagielski,
    "Privacy Auditing with One (1) Training Run", NeurIPS 2023, theorem 5.2 and appendix D.

    >>> round(one_run_p_value(10, 10, 10, 0.0, 0.0), 10) == round(2.0**-10, 10)
    True
    """
    require(0 <= v <= r <= m, f"{v} right of {r} guesses on {m} canaries: expected v <= r <= m")
    q = 1 / (1 + math.exp(-epsilon))
    tail = float(bdtrc(v - 1, r, q)) if v > 0 else 1.0
    if delta == 0 or v == 0:
        return min(1.0, tail)
    i = np.arange(1, v + 1)
    below = np.where(v - i - 1 >= 0, bdtr(np.maximum(v - i - 1, 0), r, q), 0.0)
    between = float(bdtr(v - 1, r, q)) - below
    return min(1.0, tail + float((between / i).max()) * delta * 2 * m)


def one_run(
    scores: Array,
    keep_MN: Bools,
    target: int,
    canaries: npt.ArrayLike | None = None,
    *,
    delta: float = 0.0,
    level: float = 0.95,
    shares: Sequence[float] = (0.05, 0.1, 0.25, 0.5, 1.0),
) -> PrivacyBound:
    """Epsilon from one model's canaries: guess the highest IN and the lowest OUT, abstain between.

    scores (N,): the target's attack scores (NaN: abstained from). keep_MN: the whole mask, target:
    its row. canaries: which samples count (all). shares: the numbers of guesses tried, as shares of
    the canaries; the level is shared among them. Raises ValueError unless each canary was put in by
    an independent fair coin: paired and balanced masks, and unfair coins, are refused.
    """
    _level(level, delta)
    keep = mask_of(keep_MN)
    require(0 <= target < keep.shape[0], f"target {target} of {keep.shape[0]} models")
    _refuse_unless_coins(keep, target)
    values = np.asarray(scores, dtype=np.float64)
    require(values.shape == keep.shape[1:], f"scores have shape {values.shape}: one target only")
    chosen = np.arange(values.size) if canaries is None else np.asarray(canaries)
    values, members = values[chosen], keep[target, chosen]
    m = values.size
    require(m > 0 and len(shares) > 0, "the one-run auditor needs canaries and numbers of guesses")
    require(
        2 * min(float(bdtr(members.sum(), m, 0.5)), float(bdtrc(members.sum() - 1, m, 0.5)))
        > _UNFAIR,
        f"{int(members.sum())} of {m} canaries are members: the coins were not fair, which the "
        "one-run auditor needs",
    )
    ranked = np.flatnonzero(~np.isnan(values))
    ranked = ranked[np.argsort(values[ranked], kind="stable")]
    best, detail = 0.0, "no number of guesses tells"
    for share in shares:
        half = min(round(share * m), ranked.size) // 2
        right = int(members[ranked[ranked.size - half :]].sum() if half else 0)
        right += int((~members[ranked[:half]]).sum())
        error = (1 - level) / len(shares)
        epsilon = _refuted(m, 2 * half, right, delta, error)
        if epsilon > best:
            best, detail = epsilon, f"{right} of {2 * half} guesses right, {m} canaries"
    return PrivacyBound(
        value=best, delta=delta, level=level, tested=len(shares), method="one run", detail=detail
    )


def _refuted(m: int, r: int, v: int, delta: float, error: float) -> float:
    """The largest epsilon that v right guesses of r refute at this error."""
    return _bisect(lambda epsilon: one_run_p_value(m, r, v, epsilon, delta) < error)


def _refuse_unless_coins(keep_MN: Bools, target: int) -> None:
    plan = plan_exclusion(keep_MN)
    tied = plan.partner_M[target] >= 0 or bool(plan.opposite_M[target])
    fixed = keep_MN.shape[0] > 2 and bool((keep_MN.sum(axis=1) == keep_MN[target].sum()).all())
    require(
        not tied and not fixed,
        f"the one-run auditor needs independent coins (Bernoulli masks): this mask is "
        f"{plan.design if tied else 'of a fixed number of members a model'}",
    )
