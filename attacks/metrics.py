"""ROC and what is read off it: ties grouped, no interpolation, refusals instead of guesses.

Scores: higher means member. NaN scores mark excluded samples and are left out, with their number
in the result; infinite scores are ranked. A rate without members or non-members is NaN.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attacks.types import Array, AttackScores, Bools, Floats, require

PRIORS = (0.01, 0.1, 0.5)


@dataclass(frozen=True, kw_only=True)
class Roc:
    """One point for each distinct score, from (0, 0) to (1, 1): positives score >= threshold."""

    fpr: Floats
    tpr: Floats
    thresholds: Floats
    n_in: int
    n_out: int
    excluded: int


@dataclass(frozen=True, kw_only=True)
class TprAtFpr:
    """The largest TPR whose FPR is at most alpha, and what it rests on.

    tpr is NaN when refused (1 / n_out > alpha: the rate cannot be resolved); bound then holds the
    TPR without and with at most one false positive, which enclose it. Positives score > threshold.
    """

    alpha: float
    tpr: float
    realised_fpr: float
    threshold: float
    n_in: int
    n_out: int
    excluded: int
    refused: bool
    bound: tuple[float, float] | None


def _split(scores: Array, membership: Array) -> tuple[Floats, Floats, int]:
    """Sorted member and non-member scores, and how many are NaN."""
    values, labels = np.asarray(scores, dtype=np.float64).ravel(), np.asarray(membership).ravel()
    require(labels.dtype == np.bool_, f"membership is of type {labels.dtype}: expected bool")
    require(
        values.shape == labels.shape,
        f"{values.size} scores and {labels.size} membership labels: expected one each",
    )
    known = ~np.isnan(values)
    excluded = int(values.size - known.sum())
    return np.sort(values[known & labels]), np.sort(values[known & ~labels]), excluded


def roc(scores: Array, membership: Array) -> Roc:
    """The ROC curve with tied scores as one step.

    scores (n,) float, membership (n,) bool. Raises ValueError for other types or shapes.

    >>> curve = roc(np.array([3.0, 2.0, 2.0, 1.0]), np.array([True, True, False, False]))
    >>> curve.fpr.tolist(), curve.tpr.tolist()
    ([0.0, 0.0, 0.5, 1.0], [0.0, 0.5, 1.0, 1.0])
    """
    inside, outside, excluded = _split(scores, membership)
    distinct = np.unique(np.concatenate([inside, outside]))[::-1]
    thresholds = np.concatenate([[np.inf], distinct])
    above_in = inside.size - np.searchsorted(inside, distinct, side="left")
    above_out = outside.size - np.searchsorted(outside, distinct, side="left")
    with np.errstate(invalid="ignore"):
        tpr = np.concatenate([[0], above_in]) / np.float64(inside.size)
        fpr = np.concatenate([[0], above_out]) / np.float64(outside.size)
    return Roc(
        fpr=fpr,
        tpr=tpr,
        thresholds=thresholds,
        n_in=inside.size,
        n_out=outside.size,
        excluded=excluded,
    )


def auc(scores: Array, membership: Array) -> float:
    """P[score of a member > score of a non-member], ties half; NaN without either side.

    >>> auc(np.array([2.0, 1.0, 1.0]), np.array([True, True, False]))
    0.75
    """
    return auc_and_tpr(scores, membership, ())[0]


def rate_name(alpha: float, rate: str = "tpr") -> str:
    """The name of a metric at a false-positive rate, with as many digits as tell it apart.

    >>> rate_name(0.001), rate_name(0.1234567), rate_name(np.float64(0.01), "fpr")
    ('tpr@0.001', 'tpr@0.1234567', 'fpr@0.01')
    """
    return f"{rate}@{float(alpha)!r}"


def allowed_false_positives(alpha: float, n_out: int) -> int:
    """The largest count f with f / n_out <= alpha."""
    count = min(n_out, int(alpha * n_out) + 1)
    while count and count / n_out > alpha:
        count -= 1
    return count


def _rate_above(values: Floats, threshold: float) -> float:
    if not values.size:
        return float("nan")
    return float((values.size - np.searchsorted(values, threshold, side="right")) / values.size)


def _threshold(outside: Floats, allowed: int) -> float:
    """The score that positives must exceed so that at most `allowed` non-members do."""
    return float(outside[outside.size - 1 - allowed]) if allowed < outside.size else -np.inf


def tpr_at_fpr(scores: Array, membership: Array, alpha: float) -> TprAtFpr:
    """The largest TPR with FPR <= alpha, its realised FPR, or a refusal with bounds.

    scores (n,) float, membership (n,) bool, alpha between 0 and 1. Tied scores are accepted or
    rejected together.

    >>> result = tpr_at_fpr(np.array([3.0, 2.0, 2.0, 1.0]), np.array([1, 1, 0, 0], dtype=bool), 0.5)
    >>> result.tpr, result.realised_fpr
    (1.0, 0.5)
    >>> tpr_at_fpr(np.array([2.0, 1.0]), np.array([True, False]), 0.1).bound
    (1.0, 1.0)
    """
    require(0 < alpha < 1, f"alpha is {alpha}: expected a rate between 0 and 1")
    inside, outside, excluded = _split(scores, membership)
    refused = not inside.size or not outside.size or 1 / outside.size > alpha
    tpr = fpr = threshold = float("nan")
    bound = None
    if not refused:
        threshold = _threshold(outside, allowed_false_positives(alpha, outside.size))
        tpr, fpr = _rate_above(inside, threshold), _rate_above(outside, threshold)
    elif inside.size and outside.size:
        bound = (
            _rate_above(inside, _threshold(outside, 0)),
            _rate_above(inside, _threshold(outside, 1)),
        )
    return TprAtFpr(
        alpha=alpha,
        tpr=tpr,
        realised_fpr=fpr,
        threshold=threshold,
        n_in=inside.size,
        n_out=outside.size,
        excluded=excluded,
        refused=refused,
        bound=bound,
    )


def auc_and_tpr(scores: Array, membership: Array, alphas: Sequence[float]) -> list[float]:
    """`auc`, then `tpr_at_fpr(...).tpr` at each alpha (NaN where refused), from one sort.

    >>> auc_and_tpr(np.array([3.0, 2.0, 1.0]), np.array([True, False, False]), [0.5, 0.1])
    [1.0, 1.0, nan]
    """
    inside, outside, _ = _split(scores, membership)
    if not inside.size or not outside.size:
        return [float("nan")] * (1 + len(alphas))
    below = np.searchsorted(outside, inside, side="left").sum()
    up_to = np.searchsorted(outside, inside, side="right").sum()
    found = [float((below + up_to) / (2 * inside.size * outside.size))]
    for alpha in alphas:
        refused = 1 / outside.size > alpha
        bar = _threshold(outside, allowed_false_positives(alpha, outside.size))
        found.append(float("nan") if refused else _rate_above(inside, bar))
    return found


def balanced_accuracy(scores: Array, membership: Array) -> float:
    """The best (TPR + 1 - FPR) / 2 over thresholds, read off the same scores (hence optimistic)."""
    curve = roc(scores, membership)
    if not curve.n_in or not curve.n_out:
        return float("nan")
    return float(np.max(curve.tpr + 1 - curve.fpr) / 2)


def advantage(scores: Array, membership: Array) -> float:
    """The best TPR - FPR over thresholds (Yeom et al., CSF 2018): 2 * balanced accuracy - 1."""
    return 2 * balanced_accuracy(scores, membership) - 1


def ppv(tpr: float, fpr: float, prior: float) -> float:
    """Precision when a share `prior` of the attacked are members; NaN when nothing is accepted.

    >>> round(ppv(0.5, 0.01, 0.5), 4)
    0.9804
    """
    require(0 < prior < 1, f"the prior is {prior}: expected between 0 and 1")
    positive = prior * tpr + (1 - prior) * fpr
    return prior * tpr / positive if positive > 0 else float("nan")


@dataclass(frozen=True, kw_only=True)
class Transferred:
    """Rates of each target at a threshold that its shadow models set, and precision by prior."""

    alpha: float
    threshold_T: Floats
    tpr_T: Floats
    fpr_T: Floats
    ppv_PT: Floats
    priors: tuple[float, ...]


def transferred(
    attacked: AttackScores,
    alpha: float,
    partner_M: Array | None = None,
    priors: Sequence[float] = PRIORS,
) -> Transferred:
    """TPR, FPR and PPV of each target at the median threshold of the other models.

    attacked: scores of two targets at least. A target's threshold is the median over the other
    targets, without its complement (partner_M of `attacks.exclusion`), of the score that each needs
    for FPR <= alpha; its own membership plays no part.
    """
    require(len(attacked.targets_T) >= 2, "a transferred threshold needs two targets at least")
    own = np.array(
        [
            tpr_at_fpr(scores, membership, alpha).threshold
            for scores, membership in zip(attacked.scores_TN, attacked.membership_TN, strict=True)
        ]
    )
    thresholds, tprs, fprs = np.full((3, own.size), np.nan)
    for i, target in enumerate(attacked.targets_T.tolist()):
        others = attacked.targets_T != target
        if partner_M is not None:
            others &= attacked.targets_T != partner_M[target]
        known = own[others & ~np.isnan(own)]
        if known.size:
            inside, outside, _ = _split(attacked.scores_TN[i], attacked.membership_TN[i])
            thresholds[i] = np.median(known)
            tprs[i], fprs[i] = (_rate_above(side, thresholds[i]) for side in (inside, outside))
    precision = [
        [ppv(t, f, prior) for t, f in zip(tprs.tolist(), fprs.tolist(), strict=True)]
        for prior in priors
    ]
    return Transferred(
        alpha=alpha,
        threshold_T=thresholds,
        tpr_T=tprs,
        fpr_T=fprs,
        ppv_PT=np.array(precision),
        priors=tuple(priors),
    )


def by_group(
    attacked: AttackScores, groups: Mapping[str, Bools], alphas: Sequence[float] = (0.001, 0.01)
) -> dict[str, list[dict[str, float]]]:
    """For each group of samples and target: AUC, balanced accuracy, advantage and TPR at alphas.

    groups: name to a bool mask over samples (clean, flipped, a class, a memorization decile, ...).
    """
    table: dict[str, list[dict[str, float]]] = {}
    for name, mask in groups.items():
        require(
            mask.shape == attacked.scores_TN.shape[1:],
            f"group '{name}' has shape {mask.shape}: expected one flag for each sample",
        )
        rows = []
        for scores, membership in zip(attacked.scores_TN, attacked.membership_TN, strict=True):
            s, y = scores[mask], membership[mask]
            row = {
                "auc": auc(s, y),
                "balanced_accuracy": balanced_accuracy(s, y),
                "advantage": advantage(s, y),
            }
            for alpha in alphas:
                result = tpr_at_fpr(s, y, alpha)
                row |= {rate_name(alpha): result.tpr, rate_name(alpha, "fpr"): result.realised_fpr}
            known = ~np.isnan(s)
            row |= {"n_in": float((y & known).sum()), "n_out": float((~y & known).sum())}
            rows.append(row | {"excluded": float((~known).sum())})
        table[name] = rows
    return table


def deciles(values_N: Floats, parts: int = 10) -> dict[str, Bools]:
    """Groups of samples by rank of a per-sample value (memorization), the lowest first.

    Samples with equal values stay together (by their mean rank), so groups are of equal size only
    where values are distinct, and may be empty; NaN is in none.

    >>> [group.tolist() for group in deciles(np.array([5.0, 1.0, 1.0, 7.0]), 2).values()]
    [[False, True, True, False], [True, False, False, True]]
    """
    known = np.flatnonzero(~np.isnan(values_N))
    _, index, counts = np.unique(values_N[known], return_inverse=True, return_counts=True)
    middle = (np.cumsum(counts) - counts / 2)[index]
    part_N = np.full(values_N.size, -1, dtype=np.int64)
    part_N[known] = np.ceil(parts * middle / max(known.size, 1)).astype(np.int64) - 1
    return {f"decile_{i + 1}": part_N == i for i in range(parts)}
