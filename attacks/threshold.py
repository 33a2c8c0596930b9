"""Attacks that compare one number: the loss, its calibration, and ranks among others.

All take phi (logit-scaled confidence, higher for members) and return higher for members; a loss
is larger exactly where phi is smaller. Scores under several queries are averaged.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from attacks.exclusion import Exclusion
from attacks.leave_out import Block, Problem, Targets
from attacks.outcome import attack_scores, enter, need_models
from attacks.population import Population
from attacks.types import Array, AttackScores, Codes, Excluded, Floats, ScoreMatrix


def _empty(problem: Problem) -> tuple[Floats, Codes]:
    shape = (problem.targets_T.size, problem.matrix.samples)
    return np.zeros(shape), np.zeros(shape, dtype=np.uint8)


@np.errstate(over="ignore", invalid="ignore")
def _of_target_alone(
    problem: Problem, value: Callable[[int, int, Floats, Codes], Floats]
) -> AttackScores:
    """The sum over queries of what `value` makes of (target, query, its own phi, its codes)."""
    scores, codes = _empty(problem)
    for i, target in enumerate(problem.targets_T.tolist()):
        for query in range(problem.matrix.queries):
            own = np.asarray(
                problem.read(target, 0, problem.matrix.samples, query), dtype=np.float64
            )
            enter(codes[i], Excluded.TARGET_NOT_FINITE, ~np.isfinite(own))
            scores[i] += value(target, query, own, codes[i])
    return attack_scores(problem, scores, codes)


def loss(
    matrix: ScoreMatrix,
    targets: Targets = None,
    *,
    models: npt.ArrayLike | None = None,
    plan: Exclusion | None = None,
) -> AttackScores:
    """The target's own phi: one threshold for all samples (Yeom et al., CSF 2018).

    Arguments as for `attacks.lira.lira`. Needs one model.
    """
    problem = Problem(matrix, targets, models=models, plan=plan)
    return _of_target_alone(problem, lambda _t, _q, own, _c: np.where(np.isfinite(own), own, 0))


@np.errstate(over="ignore", invalid="ignore")
def calibrated(
    matrix: ScoreMatrix,
    targets: Targets = None,
    *,
    models: npt.ArrayLike | None = None,
    plan: Exclusion | None = None,
) -> AttackScores:
    """phi_t - mean phi over the OUT models that stay (Watson et al., ICLR 2022).

    Arguments as for `attacks.lira.lira`. Raises ValueError when a target has no sample with OUT
    models.
    """
    problem = Problem(matrix, targets, models=models, plan=plan)
    scores, codes = _empty(problem)
    for start, stop in problem.blocks():
        for query in range(matrix.queries):
            block = Block(problem, start, stop, query)
            for part in problem.parts(stop - start):
                left = block.leave_out(part)
                out = left.side(False)
                code = codes[part, start:stop]
                enter(code, Excluded.TARGET_NOT_FINITE, ~np.isfinite(left.own_TB))
                enter(code, Excluded.NO_OUT, out.count_TB < 1)
                scores[part, start:stop] += left.own_TB - out.mean_TB
    need_models(problem, codes, "the calibrated attack")
    return attack_scores(problem, scores, codes)


def attack_p(
    matrix: ScoreMatrix,
    population: Population,
    targets: Targets = None,
    *,
    models: npt.ArrayLike | None = None,
    plan: Exclusion | None = None,
) -> AttackScores:
    """The share of the population on which the target's loss is larger (Ye et al., CCS 2022).

    population: the same models' scores on samples outside all training sets. Needs one model.
    Raises ValueError when the population contains members or does not fit.
    """
    problem = Problem(matrix, targets, models=models, plan=plan)
    population.check(problem)

    def share(target: int, query: int, own: Floats, code: Codes) -> Floats:
        others = np.sort(population.of(problem, target, query))
        if not np.isfinite(others).all():
            enter(code, Excluded.POPULATION_NOT_FINITE, np.ones(own.size, dtype=np.bool_))
        return np.searchsorted(others, own, side="left") / others.size

    return _of_target_alone(problem, share)


def attack_r(
    matrix: ScoreMatrix,
    targets: Targets = None,
    *,
    models: npt.ArrayLike | None = None,
    plan: Exclusion | None = None,
) -> AttackScores:
    """The share of OUT models in which the sample's loss is larger, ties half (Ye et al., 2022).

    Arguments as for `attacks.lira.lira`. Raises ValueError when a target has no sample with OUT
    models.
    """
    problem = Problem(matrix, targets, models=models, plan=plan)
    scores, codes = _empty(problem)
    for start, stop in problem.blocks():
        for query in range(matrix.queries):
            for i, (share, code) in enumerate(_ranks(problem, start, stop, query)):
                scores[i, start:stop] += share
                for reason in (Excluded.TARGET_NOT_FINITE, Excluded.NO_OUT):
                    enter(codes[i, start:stop], reason, code == reason)
    need_models(problem, codes, "attack R")
    return attack_scores(problem, scores, codes)


def _ranks(problem: Problem, start: int, stop: int, query: int) -> list[tuple[Floats, Codes]]:
    """Each target's share of OUT models with a smaller phi (ties half), and reason codes."""
    separate = problem.targets_T[problem.row_A[problem.targets_T] < 0]
    rows = np.concatenate([problem.shadows_S, separate])
    x = np.stack(
        [np.asarray(problem.read(m, start, stop, query), dtype=np.float64) for m in rows.tolist()]
    )
    finite = np.isfinite(x)
    out = ~problem.keep_AN[rows, start:stop] & finite
    out[problem.shadows_S.size :] = False
    below = _counts_below(np.where(finite, x, np.inf), out)
    place = {int(m): r for r, m in enumerate(rows.tolist())}
    count = out.sum(axis=0)
    columns = np.arange(stop - start)
    results = []
    for target in problem.targets_T.tolist():
        own = place[target]
        wins = below[own] - out[own] / 2
        left = count - out[own]
        companion = problem.companions(np.array([target]), start, stop)
        index = np.broadcast_to(companion[0], columns.shape)
        there = (index >= 0) & out[index, columns]
        other = x[index, columns]
        wins -= there * ((other < x[own]) + (other == x[own]) / 2)
        left = left - there
        code = np.zeros(stop - start, dtype=np.uint8)
        enter(code, Excluded.TARGET_NOT_FINITE, ~finite[own])
        enter(code, Excluded.NO_OUT, left < 1)
        results.append((wins / np.maximum(left, 1), code))
    return results


def _counts_below(x_RB: Floats, out_RB: Array) -> Floats:
    """In each column, for each entry, the OUT entries below it plus half of those equal to it."""
    order = np.argsort(x_RB, axis=0, kind="stable")
    x = np.take_along_axis(x_RB, order, axis=0)
    up_to = np.cumsum(np.take_along_axis(out_RB, order, axis=0), axis=0, dtype=np.float64)
    below = np.zeros_like(up_to)
    for r in range(1, len(x)):
        np.copyto(below[r], np.where(x[r] == x[r - 1], below[r - 1], up_to[r - 1]))
    for r in range(len(x) - 2, -1, -1):
        np.copyto(up_to[r], up_to[r + 1], where=x[r] == x[r + 1])
    result = np.empty_like(below)
    np.put_along_axis(result, order, (below + up_to) / 2, axis=0)
    return result
