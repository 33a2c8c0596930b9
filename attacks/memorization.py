"""How much of a sample each model keeps: memorization, influence, exposure, vulnerability.

All are undefined (NaN, never 0) for a sample that lacks IN or OUT models.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attacks.exclusion import Exclusion, plan_exclusion
from attacks.types import (
    Array,
    Bools,
    Floats,
    Ints,
    ScoreMatrix,
    mask_of,
    require,
    resolve_targets,
)

_BLOCK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Memorization:
    """score_N = P[correct | IN] - P[correct | OUT] over models, se_N its standard error."""

    score_N: Floats
    se_N: Floats
    n_in_N: Ints
    n_out_N: Ints


def _difference(count_in: Array, sum_in: Array, count_out: Array, sum_out: Array) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(sum_in / count_in - sum_out / count_out, dtype=np.float64)


def _variance(count: Array, total: Array, squares: Array) -> Array:
    """Variance of a mean, from counts, sums and sums of squares; NaN below two."""
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.maximum(squares - total**2 / count, 0) / (count - 1)
        return np.where(count >= 2, spread / count, np.nan)


def _checked(correct: Array, keep_MN: Bools, what: str) -> Floats:
    values = np.asarray(correct)
    require(
        values.ndim == 2 and values.shape[0] == keep_MN.shape[0],
        f"{what} has shape {values.shape}: expected {keep_MN.shape[0]} models in the first axis",
    )
    numbers = values.astype(np.float64)
    require(
        bool(((numbers >= 0) & (numbers <= 1)).all()),
        f"{what} holds values outside 0 to 1: expected correctness, or a probability of it",
    )
    return numbers


def memorization(correct_MN: Array, keep_MN: Bools) -> Memorization:
    """The memorization score of every sample (Feldman & Zhang, NeurIPS 2020, eq. 1).

    correct_MN: bool, or probabilities of being correct; keep_MN: bool. The standard error is that
    of a difference of two means over independent models, with unbiased variances: NaN where a side
    has fewer than two models.

    >>> keep = np.array([[True], [True], [False], [False]])
    >>> memorization(keep.copy(), keep).score_N.tolist()
    [1.0]
    """
    keep = mask_of(keep_MN)
    correct = _checked(correct_MN, keep, "correct_MN")
    require(correct.shape == keep.shape, "correct_MN and keep_MN disagree in shape")
    n_in = keep.sum(axis=0)
    n_out = keep.shape[0] - n_in
    sum_in, sum_out = (np.where(side, correct, 0).sum(axis=0) for side in (keep, ~keep))
    squares_in, squares_out = (np.where(side, correct**2, 0).sum(axis=0) for side in (keep, ~keep))
    variance = _variance(n_in, sum_in, squares_in) + _variance(n_out, sum_out, squares_out)
    return Memorization(
        score_N=_difference(n_in, sum_in, n_out, sum_out),
        se_N=np.sqrt(variance),
        n_in_N=n_in.astype(np.int64),
        n_out_N=n_out.astype(np.int64),
    )


def memorization_without(
    correct_MN: Array,
    keep_MN: Bools,
    targets: npt.ArrayLike,
    *,
    models: npt.ArrayLike | None = None,
    plan: Exclusion | None = None,
) -> Floats:
    """Memorization scores as seen without each target and the model left out beside it. (T, N).

    For grouping samples by memorization when a target is attacked: scores from all models know
    the target's membership, and its AUC in the highest tenth would be above one half without any
    leak. Arguments as for `memorization` and `attacks.lira.lira`; NaN without IN or OUT models.
    """
    keep = mask_of(keep_MN)
    correct = _checked(correct_MN, keep, "correct_MN")
    plan = plan_exclusion(keep) if plan is None else plan
    chosen = resolve_targets(targets, keep.shape[0])
    alive = np.zeros(keep.shape[0], dtype=np.bool_)
    alive[resolve_targets(models, keep.shape[0])] = True
    sum_in = np.where(keep, correct, 0)[alive].sum(axis=0)
    sum_out = np.where(keep, 0, correct)[alive].sum(axis=0)
    columns = np.arange(keep.shape[1])
    result = np.empty((chosen.size, keep.shape[1]))
    counted = plan.counts(chosen, alive)
    for i, (target, (n_in, n_out)) in enumerate(zip(chosen.tolist(), counted, strict=True)):
        companion = plan.companions(target, alive)
        less_in, less_out = sum_in.copy(), sum_out.copy()
        for model, gone in (
            (np.full_like(companion, target), alive[target]),
            (companion, companion >= 0),
        ):
            inside = keep[model, columns]
            value = np.where(gone, correct[model, columns], 0)
            less_in -= np.where(inside, value, 0)
            less_out -= np.where(inside, 0, value)
        result[i] = _difference(n_in, less_in, n_out, less_out)
    return result


def influence(
    correct_MZ: Array, keep_MN: Bools, samples: npt.ArrayLike | None = None
) -> tuple[Floats, Floats]:
    """How training on sample n changes P[correct] on query sample z, and its standard error.

    correct_MZ: correctness of each model on the query samples; samples: which n (default all).
    Returns two arrays (len(samples), Z). Source: Feldman & Zhang, NeurIPS 2020, eq. 2.
    """
    keep = mask_of(keep_MN)
    correct = _checked(correct_MZ, keep, "correct_MZ")
    if samples is not None:
        keep = keep[:, np.asarray(samples, dtype=np.int64)]
    inside = keep.T.astype(np.float64)
    outside = 1 - inside
    n_in, n_out = inside.sum(axis=1)[:, None], outside.sum(axis=1)[:, None]
    sum_in, sum_out = inside @ correct, outside @ correct
    square = correct**2
    variance = _variance(n_in, sum_in, inside @ square)
    variance = variance + _variance(n_out, sum_out, outside @ square)
    return _difference(n_in, sum_in, n_out, sum_out), np.sqrt(variance)


def exposure(phi_MN: Array, keep_MN: Bools, kind_N: Array) -> Floats:
    """Exposure of the canaries a model trained on; NaN where it did not.

    exposure = log2 |R| - log2 rank of its phi (1: highest, ties half) among R = the same model's
    OUT samples of the same kind, itself included. phi_MN: (M, N); kind_N: one code a sample, 0 for
    no canary. Source: Carlini et al., "The Secret Sharer", USENIX Security 2019.

    >>> phi = np.array([[9.0, 1.0, 2.0, 3.0]])
    >>> exposure(phi, np.array([[True, False, False, False]]), np.ones(4, int))[0, 0].item()
    2.0
    """
    keep = mask_of(keep_MN)
    phi = np.asarray(phi_MN, dtype=np.float64)
    require(phi.shape == keep.shape, f"phi_MN has shape {phi.shape} and keep_MN {keep.shape}")
    result = np.full(phi.shape, np.nan)
    for kind in np.unique(kind_N[kind_N != 0]):
        for m in range(keep.shape[0]):
            same = (kind_N == kind) & np.isfinite(phi[m])
            canaries = np.flatnonzero(same & keep[m])
            others = np.sort(phi[m, same & ~keep[m]])
            above = others.size - np.searchsorted(others, phi[m, canaries], side="right")
            from_tie = others.size - np.searchsorted(others, phi[m, canaries], side="left")
            rank = 1 + (above + from_tie) / 2
            result[m, canaries] = np.log2(others.size + 1) - np.log2(rank)
    return result


def vulnerability(matrix: ScoreMatrix, models: npt.ArrayLike | None = None) -> Floats:
    """Per sample P[phi_IN > phi_OUT] of its own phi over pairs of models, ties half. Shape (N,).

    Queries are averaged. Models whose score is not finite for the sample are left out of it; NaN
    where a side is empty. Never the AUC over targets of leave-one-out scores, which is biased.

    >>> keep = np.array([[True], [True], [False], [False]])
    >>> vulnerability(ScoreMatrix(scores_MNQ=np.array([[3.], [1.], [2.], [0.]]), keep_MN=keep))
    array([0.75])
    """
    chosen = np.arange(matrix.models) if models is None else np.asarray(models)
    result = np.empty(matrix.samples)
    size = max(1, _BLOCK // chosen.size)
    for start in range(0, matrix.samples, size):
        block = slice(start, min(matrix.samples, start + size))
        phi = np.stack(
            [matrix.scores_MNQ[m, block].mean(axis=-1, dtype=np.float64) for m in chosen.tolist()]
        )
        keep = matrix.keep_MN[chosen, block]
        finite = np.isfinite(phi)
        result[block] = _mann_whitney(np.where(finite, phi, 0), keep & finite, ~keep & finite)
    return result


def _mann_whitney(x_SB: Floats, in_SB: Bools, out_SB: Bools) -> Floats:
    """P[in > out] + P[in = out] / 2 in each column."""
    order = np.argsort(np.where(in_SB | out_SB, x_SB, np.inf), axis=0, kind="stable")
    x = np.take_along_axis(x_SB, order, axis=0)
    inside = np.take_along_axis(in_SB, order, axis=0)
    outside = np.take_along_axis(out_SB, order, axis=0)
    below: Array = np.cumsum(outside, axis=0) - outside
    wins, run = np.zeros((2, x.shape[1]))
    ties = np.zeros(x.shape[1])
    in_run, out_run = np.zeros((2, x.shape[1]))
    for s in range(x.shape[0]):
        fresh = (x[s] != x[s - 1]) if s else np.ones(x.shape[1], dtype=np.bool_)
        run = np.where(fresh, below[s], run)
        in_run = np.where(fresh, 0, in_run)
        out_run = np.where(fresh, 0, out_run)
        wins += inside[s] * run
        ties += inside[s] * out_run + outside[s] * in_run
        in_run = in_run + inside[s]
        out_run = out_run + outside[s]
    with np.errstate(invalid="ignore"):
        return np.asarray((wins + ties / 2) / (in_SB.sum(axis=0) * out_SB.sum(axis=0)))


def halves(plan: Exclusion, seed: int = 0) -> tuple[Ints, Ints]:
    """Two halves of the models made of whole deletion groups, drawn by seed."""
    groups = plan.deletion_groups()
    require(len(groups) >= 2, "halves need two groups of models at least")
    drawn = np.random.default_rng(seed).permutation(len(groups))
    cut = len(groups) // 2
    parts = []
    for part in (drawn[:cut], drawn[cut:]):
        parts.append(np.sort(np.concatenate([groups[g] for g in part.tolist()])).astype(np.int64))
    return parts[0], parts[1]


def vulnerability_stability(matrix: ScoreMatrix, seed: int = 0) -> tuple[float, float]:
    """How well per-sample vulnerability repeats: Spearman correlation between halves of the models.

    Returns the correlation of the halves, and its Spearman-Brown value for all models; NaN when a
    half is constant or no sample has both sides in both halves.
    """
    first, second = halves(plan_exclusion(matrix.keep_MN, matrix.design), seed)
    a, b = vulnerability(matrix, first), vulnerability(matrix, second)
    known = ~np.isnan(a) & ~np.isnan(b)
    if known.sum() < 3:
        return float("nan"), float("nan")
    ranks = [_midranks(values[known]) for values in (a, b)]
    if any(np.ptp(rank) == 0 for rank in ranks):
        return float("nan"), float("nan")
    r = float(np.corrcoef(ranks[0], ranks[1])[0, 1])
    return r, 2 * r / (1 + r) if r > -1 else float("nan")


def _midranks(values: Floats) -> Floats:
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[index], dtype=np.float64)
