"""RMIA: how many population samples does the target favour less than this one?

r(x) = p_t(x) / p(x), where p is the probability of the label (sigmoid of phi) and p(x) its level
without the target: online (mean over IN + mean over OUT) / 2, each side over its own models after
leaving the pair out; offline ((1 + a) * mean over OUT + 1 - a) / 2. The population is OUT for every
model: its level is the mean over all references, put through the same line when offline. The score
is the share of population samples z with r(x) / r(z) > gamma, averaged over queries. Infinite phi
stand for p = 0 and 1. Source: Zarifzadeh, Liu & Shokri, "Low-Cost High-Power Membership
Inference Attacks", ICML 2024.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from attacks.exclusion import Exclusion
from attacks.leave_out import Block, LeftOut, Problem, Targets
from attacks.metrics import auc
from attacks.outcome import attack_scores, enter, need_models
from attacks.population import Population
from attacks.types import AttackScores, Codes, Excluded, Floats, ScoreMatrix, require

TINY = np.finfo(np.float64).tiny
"""The smallest level p(x) divided by."""

GRID: tuple[float, ...] = tuple(i / 10 for i in range(11))


@dataclass(frozen=True, kw_only=True)
class RmiaParameters:
    """online or offline; gamma; the offline line's a, or "tuned" on the other models.

    references: reference models on each side of a sample (0: all there are). So many pairs are
    taken, in an order that the mask gives, without the target's own; from masks without pairs so
    many models that the mean number of OUT ones is that. It is capped at what there is.
    """

    online: bool = False
    gamma: float = 2.0
    a: float | Literal["tuned"] = 0.3
    references: int = 0

    def __post_init__(self) -> None:
        require(self.gamma > 0, f"gamma is {self.gamma}: expected above 0")
        require(self.references >= 0, f"references is {self.references}: expected 0 or more")
        if isinstance(self.a, str):
            require(self.a == "tuned", f"a is '{self.a}': expected a number or 'tuned'")
            require(not self.online, "a is used offline only: leave it out")
        else:
            require(0 <= self.a <= 1, f"a is {self.a}: expected 0 to 1, or 'tuned'")


@np.errstate(over="ignore", invalid="ignore")
def rmia(
    matrix: ScoreMatrix,
    population: Population,
    parameters: RmiaParameters | None = None,
    targets: Targets = None,
    *,
    models: npt.ArrayLike | None = None,
    plan: Exclusion | None = None,
) -> AttackScores:
    """RMIA scores in [0, 1], higher for members.

    matrix: phi (M, N, Q) and the mask; population: phi of the same models (M, Z, Q); other
    arguments as for `attacks.lira.lira`. A tuned a is the one of GRID with the best AUC when the
    next model that is neither the target nor its complement stands in as the target. Raises
    ValueError when the population contains members or does not fit, or when models are too few:
    four with paired masks, six to tune.
    """
    parameters = parameters or RmiaParameters()
    problem = Problem(matrix, targets, models=models, plan=plan)
    population.check(problem)
    if parameters.a == "tuned":
        return _tuned(problem, population, parameters)
    if parameters.references:
        scores, codes = _few_references(problem, population, parameters)
    else:
        scores, codes = _scores(problem, population, parameters)
    need_models(problem, codes, "RMIA")
    return attack_scores(problem, scores, codes)


def _few_references(
    problem: Problem, population: Population, parameters: RmiaParameters
) -> tuple[Floats, Codes]:
    """Scores from the first groups of models only, one more where the target's own is there."""
    groups = [[m for m in group if problem.alive_A[m]] for group in problem.plan.deletion_groups()]
    groups = [group for group in groups if group]
    size = parameters.references
    if problem.plan.design != "paired":
        share = max(1 - float(problem.plan.keep_MN.mean()), 1e-9)
        size = int(np.ceil(size / share / np.mean([len(group) for group in groups])))
    shape = (problem.targets_T.size, problem.matrix.samples)
    scores, codes = np.zeros(shape), np.zeros(shape, dtype=np.uint8)
    own = np.isin(problem.targets_T, [m for group in groups[:size] for m in group])
    for chosen, count in ((own, size + 1), (~own, size)):
        if chosen.any():
            serve = [m for group in groups[:count] for m in group]
            part = problem.only(chosen, serve)
            scores[chosen], codes[chosen] = _scores(part, population, parameters)
    return scores, codes


def _scores(
    problem: Problem, population: Population, parameters: RmiaParameters
) -> tuple[Floats, Codes]:
    shape = (problem.targets_T.size, problem.matrix.samples)
    scores, codes = np.zeros(shape), np.zeros(shape, dtype=np.uint8)
    for query in range(problem.matrix.queries):
        bars_TZ = _bars(problem, population, parameters, query)
        for start, stop in problem.blocks():
            block = Block(problem, start, stop, query, transform=_probability)
            for part in problem.parts(stop - start):
                ratios = _ratio(block.leave_out(part), parameters, codes[part, start:stop])
                for i, ratio in enumerate(ratios, start=part.start):
                    wins = np.searchsorted(bars_TZ[i], ratio, side="left")
                    scores[i, start:stop] += wins / bars_TZ.shape[1]
        unknown = np.isnan(bars_TZ).any(axis=1, keepdims=True)
        enter(codes, Excluded.POPULATION_NOT_FINITE, np.broadcast_to(unknown, shape))
    return scores, codes


def _probability(phi: Floats) -> Floats:
    return np.asarray(expit(phi))


def _ratio(left: LeftOut, parameters: RmiaParameters, codes_TB: Codes) -> Floats:
    """p_t(x) / p(x), (T, B)."""
    out = left.side(False)
    enter(codes_TB, Excluded.TARGET_NOT_FINITE, ~np.isfinite(left.own_TB))
    level = out.mean_TB
    if parameters.online:
        into = left.side(True)
        enter(codes_TB, Excluded.NO_IN, into.count_TB < 1)
        level = (level + into.mean_TB) / 2
    else:
        level = _line(level, parameters)
    enter(codes_TB, Excluded.NO_OUT, out.count_TB < 1)
    return np.asarray(left.own_TB / np.maximum(level, TINY))


def _line(level: Floats, parameters: RmiaParameters) -> Floats:
    assert not isinstance(parameters.a, str)
    return ((1 + parameters.a) * level + (1 - parameters.a)) / 2


def _bars(
    problem: Problem, population: Population, parameters: RmiaParameters, query: int
) -> Floats:
    """gamma * r(z), sorted, for each target; NaN where a target's own score is not finite."""
    samples = population.scores_MZQ.shape[1]
    total, count = np.zeros((2, samples))
    for m in problem.shadows_S.tolist():
        p = population.scores_MZQ[m, :, query].astype(np.float64)
        total += np.where(np.isnan(p), 0, _probability(p))
        count += ~np.isnan(p)
    bars = np.empty((problem.targets_T.size, samples))
    for i, target in enumerate(problem.targets_T.tolist()):
        own = population.of(problem, target, query)
        left, less = total.copy(), count.copy()
        partner = int(problem.plan.partner_M[target])
        gone = [m for m in (target, partner) if m >= 0 and problem.row_A[m] >= 0]
        for m in gone:
            p = population.scores_MZQ[m, :, query].astype(np.float64)
            left -= np.where(np.isnan(p), 0, _probability(p))
            less -= ~np.isnan(p)
        lost = np.flatnonzero(left < 1e-6 * total)
        if lost.size:
            left[lost] = _afresh(problem, population, query, lost, gone)
        level = left / np.maximum(less, 1)
        if not parameters.online:
            level = _line(level, parameters)
        bars[i] = parameters.gamma * _probability(own) / np.maximum(level, TINY)
        bars[i, (less < 1) | np.isnan(own)] = np.nan
        bars[i].sort()
    return bars


def _afresh(
    problem: Problem,
    population: Population,
    query: int,
    lost: npt.NDArray[np.int64],
    gone: list[int],
) -> Floats:
    """Sums over the references that stay, where the subtraction lost its digits."""
    total = np.zeros(lost.size)
    for m in problem.shadows_S.tolist():
        if m not in gone:
            p = population.scores_MZQ[m, lost, query].astype(np.float64)
            total += np.where(np.isnan(p), 0, _probability(p))
    return total


def _tuned(problem: Problem, population: Population, parameters: RmiaParameters) -> AttackScores:
    """Each target with the a that suits another model best, found without the target."""
    rows = []
    chosen: dict[tuple[int, ...], float] = {}
    for target, name in zip(problem.targets_T.tolist(), problem.names_T.tolist(), strict=True):
        away = tuple(sorted({target, int(problem.plan.partner_M[target])}))
        if away not in chosen:
            chosen[away] = _best_a(problem, population, parameters, away)
        one = problem.only(problem.targets_T == target)
        fixed = RmiaParameters(online=False, gamma=parameters.gamma, a=chosen[away])
        scores, codes = _scores(one, population, fixed)
        need_models(one, codes, f"RMIA (target {name})")
        rows.append((scores, codes))
    return attack_scores(
        problem, np.concatenate([r[0] for r in rows]), np.concatenate([r[1] for r in rows])
    )


def _best_a(
    problem: Problem, population: Population, parameters: RmiaParameters, away: tuple[int, ...]
) -> float:
    stays = [m for m in problem.shadows_S.tolist() if m not in away]
    require(len(stays) >= 4, f"tuning a needs six models: {problem.shadows_S.size} are there")
    matrix = ScoreMatrix(
        scores_MNQ=problem.matrix.scores_MNQ,
        keep_MN=problem.matrix.keep_MN,
        design=problem.matrix.design,
    )
    plan = problem.plan if problem.separate is None else None
    stand_in = Problem(matrix, [stays[0]], models=stays, plan=plan)
    best, best_auc = 0.0, -1.0
    for a in GRID:
        fixed = RmiaParameters(online=False, gamma=parameters.gamma, a=a)
        scores, codes = _scores(stand_in, population, fixed)
        known = codes[0] == 0
        value = auc(scores[0][known], stand_in.membership_TN[0][known])
        if value > best_auc:
            best, best_auc = a, value
    return best
