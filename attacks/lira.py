"""The likelihood-ratio attack (LiRA), online and offline, all targets at once.

For target t, sample n and query q, the scores of the models that stay (see `attacks.exclusion`)
have a centre and a spread on each side. Online: log N(phi; IN) - log N(phi; OUT). Offline:
log Phi((phi - mu_out) / s_out). The score is the mean over queries. Source: Carlini et al.,
"Membership Inference Attacks From First Principles", S&P 2022, sections V-VI.

Spreads: `per_example` takes each sample's own standard deviation (divided by the count, as in the
literature); `pooled` sqrt(sum of squared residuals / sum of (count - 1)) over samples, one per
side, query and target; `shrunk` the per-example variance drawn to the pooled one,
(d * pooled + squares) / (d + count - 1) with d = `shrinkage`; `tf_fixed` one standard deviation of
all IN scores over samples and queries around their grand mean, on both sides, as the widely used
reference code does: for comparison with published tables only. No spread falls below SPREAD_FLOOR.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr

from attacks.exclusion import Exclusion
from attacks.leave_out import Block, LeftOut, Moments, Problem, Targets
from attacks.outcome import all_coded, attack_scores, cause, enter
from attacks.types import AttackScores, Bools, Codes, Excluded, Floats, ScoreMatrix, choose, require

SPREAD_FLOOR = 1e-6
"""The smallest standard deviation used, in units of phi."""

Pooled = tuple[Floats, Floats]
_KEPT_BYTES = 1 << 27
_FEW = [Excluded.NO_IN, Excluded.NO_OUT, Excluded.ONE_IN, Excluded.ONE_OUT]
VARIANCES = ("pooled", "per_example", "shrunk", "tf_fixed")
CENTRES = ("mean", "median")


@dataclass(frozen=True, kw_only=True)
class LiraParameters:
    """online or offline; the spread and the centre by name; shrinkage in degrees of freedom."""

    online: bool = True
    variance: Literal["pooled", "per_example", "shrunk", "tf_fixed"] = "pooled"
    centre: Literal["mean", "median"] = "mean"
    shrinkage: float = 8.0

    def __post_init__(self) -> None:
        choose("variance", self.variance, VARIANCES)
        choose("centre", self.centre, CENTRES)
        require(self.shrinkage > 0, f"shrinkage is {self.shrinkage}: expected above 0")


def lira(
    matrix: ScoreMatrix,
    parameters: LiraParameters | None = None,
    targets: Targets = None,
    *,
    models: npt.ArrayLike | None = None,
    plan: Exclusion | None = None,
) -> AttackScores:
    """LiRA scores of the targets, higher for members; NaN with a reason code where there is none.

    matrix: scores (M, N, Q) of phi and the mask (M, N). targets: None (each model in turn), model
    indices, or a ScoreMatrix of separate target models. models: the models that exist (others count
    as deleted). plan: the exclusion rule, if it was made before. A shadow score that is not finite
    leaves that model out for that sample and query; a target's leaves the sample out.

    Raises ValueError when, for some target, no sample has two models on a side that is needed: six
    models at least with paired masks.

    >>> rng = np.random.default_rng(0)
    >>> half = rng.random((8, 400)) < 0.5
    >>> keep = np.concatenate([half, ~half])
    >>> phi = rng.normal(size=(16, 400)) + 4 * keep
    >>> scores = lira(ScoreMatrix(scores_MNQ=phi, keep_MN=keep))
    >>> bool(scores.scores_TN[keep].mean() > scores.scores_TN[~keep].mean() + 5)
    True
    """
    parameters = parameters or LiraParameters()
    problem = Problem(matrix, targets, models=models, plan=plan)
    with np.errstate(all="ignore"):
        blocks = _Blocks(problem, parameters.centre == "median")
        spreads = None
        if parameters.variance == "tf_fixed":
            spreads = _spreads(problem, parameters, _Blocks(problem, False))
        elif parameters.variance != "per_example":
            spreads = _spreads(problem, parameters, blocks)
        scores, codes = _scores(problem, parameters, spreads, blocks)
    return attack_scores(problem, scores, codes)


@dataclass(frozen=True)
class _Spreads:
    """Variances over samples, one per target and query; NaN where a side is not needed."""

    in_TQ: Floats
    out_TQ: Floats

    def of(self, part: slice, query: int) -> Pooled:
        """IN and OUT variances of some targets, each (T, 1)."""
        return self.in_TQ[part, query][:, None], self.out_TQ[part, query][:, None]


class _Blocks:
    """The blocks of a problem under every query, kept between passes where they are small."""

    def __init__(self, problem: Problem, median: bool) -> None:
        self._problem, self._median = problem, median
        entries = problem.shadows_S.size * problem.matrix.samples * problem.matrix.queries
        self._keep = 4 * 8 * entries <= _KEPT_BYTES
        self._kept: list[Block] = []

    def __iter__(self) -> Iterator[Block]:
        if self._kept:
            yield from self._kept
            return
        for start, stop in self._problem.blocks():
            for query in range(self._problem.matrix.queries):
                block = Block(self._problem, start, stop, query, median=self._median)
                if self._keep:
                    self._kept.append(block)
                yield block


def _spreads(problem: Problem, parameters: LiraParameters, blocks: _Blocks) -> _Spreads:
    """One pass over the scores for what is pooled over samples, and the refusal."""
    shape = (problem.targets_T.size, problem.matrix.queries)
    squares, freedom = np.zeros((2, *shape)), np.zeros((2, *shape))
    grand = np.zeros((3, shape[0]))
    offset: float | None = None
    fixed = parameters.variance == "tf_fixed"
    sides = (True, False) if parameters.online else (False,)
    for block in blocks:
        if offset is None:
            offset = float(block.inside.centre_B.mean())
        for part in problem.parts(block.stop - block.start):
            left = block.leave_out(part)
            for inside in sides:
                moments = left.side(inside)
                spare = np.maximum(moments.count_TB - 1, 0)
                squares[int(inside), part, block.query] += moments.squares_TB.sum(axis=1)
                freedom[int(inside), part, block.query] += spare.sum(axis=1)
            if fixed:
                moments = left.side(True)
                away = moments.mean_TB - offset
                weighted = moments.count_TB * away
                grand[0, part] += moments.count_TB.sum(axis=1)
                grand[1, part] += weighted.sum(axis=1)
                grand[2, part] += (moments.squares_TB + weighted * away).sum(axis=1)
    for inside in sides:
        _refuse(problem, (freedom[int(inside)] == 0).any(axis=1), [inside])
    if fixed:
        variance = grand[2] / grand[0] - (grand[1] / grand[0]) ** 2
        return _Spreads(*(np.repeat(variance[:, None], shape[1], axis=1) for _ in range(2)))
    return _Spreads(squares[1] / freedom[1], squares[0] / freedom[0])


def _refuse(problem: Problem, poor_T: Bools, sides: Sequence[bool]) -> None:
    """Raise ValueError when some target has no sample with two models on a side (True: IN)."""
    if poor_T.any():
        side = " and ".join("IN" if inside else "OUT" for inside in sides)
        raise ValueError(
            f"LiRA needs two {side} models for some sample after leaving target "
            f"{int(problem.names_T[poor_T.argmax()])} and its complement out, and "
            f"{cause(problem, sides, 6)}"
        )


def _scores(
    problem: Problem, parameters: LiraParameters, spreads: _Spreads | None, blocks: _Blocks
) -> tuple[Floats, Codes]:
    shape = (problem.targets_T.size, problem.matrix.samples)
    scores, codes = np.zeros(shape), np.zeros(shape, dtype=np.uint8)
    for block in blocks:
        here = slice(block.start, block.stop)
        for part in problem.parts(block.stop - block.start):
            left = block.leave_out(part)
            pooled = spreads.of(part, block.query) if spreads else None
            scores[part, here] += _log_ratio(left, parameters, pooled, codes[part, here])
    if spreads is None:
        _refuse(problem, all_coded(codes, _FEW), (True, False) if parameters.online else (False,))
    return scores, codes


def _log_ratio(
    left: LeftOut, parameters: LiraParameters, pooled: Pooled | None, codes_TB: Codes
) -> Floats:
    """One query's log-ratio; reason codes are entered, the smallest of several staying."""
    spread = parameters.variance in ("per_example", "shrunk")
    out = left.side(False, spread=spread)
    into = left.side(True, spread=spread) if parameters.online else None
    first: list[tuple[Excluded, Bools]] = []
    if not left.own_is_finite:
        first.append((Excluded.TARGET_NOT_FINITE, ~np.isfinite(left.own_TB)))
    sides = [(into, Excluded.NO_IN, Excluded.ONE_IN), (out, Excluded.NO_OUT, Excluded.ONE_OUT)]
    for side, none, one in sides:
        if side is not None and side.least < 2:
            first.append((none, side.count_TB < 1))
            if parameters.variance == "per_example":
                first.append((one, side.count_TB == 1))
    for code, where in first:
        enter(codes_TB, code, where)
    if into is not None:
        ratio = _log_density(left.own_TB, into, parameters, pooled and pooled[0])
        ratio -= _log_density(left.own_TB, out, parameters, pooled and pooled[1])
        return ratio
    away = left.own_TB - out.mean_TB
    away /= np.sqrt(_variance(out, parameters, pooled and pooled[1]))
    return np.asarray(log_ndtr(away), dtype=np.float64)


def _variance(moments: Moments, parameters: LiraParameters, pooled: Floats | None) -> Floats:
    """(T, B), or (T, 1) where it is the same for all samples."""
    floor = SPREAD_FLOOR**2
    if parameters.variance == "per_example":
        return np.maximum(moments.squares_TB / np.maximum(moments.count_TB, 1), floor)
    assert pooled is not None
    if parameters.variance == "shrunk":
        d = parameters.shrinkage
        freedom = np.maximum(moments.count_TB - 1, 0)
        return np.maximum((d * pooled + moments.squares_TB) / (d + freedom), floor)
    return np.maximum(pooled, floor)


def _log_density(
    own_TB: Floats, moments: Moments, parameters: LiraParameters, pooled: Floats | None
) -> Floats:
    """log N(own; centre, variance) without the constant that cancels."""
    variance = _variance(moments, parameters, pooled)
    away = own_TB - moments.mean_TB
    away *= away
    if variance.shape[1] == 1:
        away *= -0.5 / variance
        away -= 0.5 * np.log(variance)
        return away
    away /= variance
    away += np.log(variance)
    away *= -0.5
    return away
