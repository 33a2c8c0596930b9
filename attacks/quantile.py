"""Quantile regression: a threshold of its own for every sample, learnt from non-members.

The score is phi_t(x) minus the conditional (1 - alpha) quantile of non-members' phi given features
of x, fitted on a population that no model trained on. Source: Bertran et al., "Scalable Membership
Inference Attacks via Quantile Regression", NeurIPS 2023.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from attacks.exclusion import Exclusion
from attacks.leave_out import Problem, Targets
from attacks.outcome import attack_scores, enter
from attacks.population import Population
from attacks.types import Array, AttackScores, Excluded, Floats, ScoreMatrix, choose, require

MOST_SEED = 2**32 - 1
"""The largest seed that scikit-learn takes."""
SMALL = 1 << 17
"""So many features of the population, over all its samples, are fitted in one thread."""

Features = Array | Callable[[int], tuple[Array, Array]]


@dataclass(frozen=True, kw_only=True)
class QuantileParameters:
    """alpha: the false-positive rate aimed at; the regressor by name; its seed."""

    alpha: float = 0.05
    regressor: Literal["boosting", "linear"] = "boosting"
    seed: int = 0

    def __post_init__(self) -> None:
        require(0 < self.alpha < 1, f"alpha is {self.alpha}: expected between 0 and 1")
        require(0 <= self.seed <= MOST_SEED, f"seed is {self.seed}: expected 0 to {MOST_SEED}")
        choose("regressor", self.regressor, ("boosting", "linear"))


@np.errstate(over="ignore", invalid="ignore")
def quantile(
    matrix: ScoreMatrix,
    population: Population,
    features: Features,
    population_features_ZF: Array | None = None,
    parameters: QuantileParameters | None = None,
    targets: Targets = None,
    *,
    models: npt.ArrayLike | None = None,
    plan: Exclusion | None = None,
) -> AttackScores:
    """phi minus the fitted quantile, one regression for each target and query.

    features: (N, F) with population_features_ZF (Z, F), or a function of the target's index that
    returns both, for features that depend on it; they must not depend on the target's membership.
    Raises ValueError for features that do not fit or are not finite, and for a population of fewer
    than 1 / alpha samples.
    """
    parameters = parameters or QuantileParameters()
    problem = Problem(matrix, targets, models=models, plan=plan)
    population.check(problem)
    needed = int(np.ceil(1 / parameters.alpha))
    samples = population.scores_MZQ.shape[1]
    require(
        samples >= needed,
        f"the population has {samples} samples: alpha {parameters.alpha} needs {needed} at least",
    )
    shape = (problem.targets_T.size, matrix.samples)
    scores, codes = np.zeros(shape), np.zeros(shape, dtype=np.uint8)
    for i, target in enumerate(problem.targets_T.tolist()):
        of_samples, of_population = _features(
            features, population_features_ZF, target, (matrix.samples, samples)
        )
        for query in range(matrix.queries):
            own = np.asarray(problem.read(target, 0, matrix.samples, query), dtype=np.float64)
            others = population.of(problem, target, query)
            enter(codes[i], Excluded.TARGET_NOT_FINITE, ~np.isfinite(own))
            if not np.isfinite(others).all():
                enter(codes[i], Excluded.POPULATION_NOT_FINITE, np.ones(shape[1], dtype=np.bool_))
                continue
            bar = _bar(parameters, of_population, others, of_samples)
            scores[i] += np.where(np.isfinite(own), own, 0) - bar
    return attack_scores(problem, scores, codes)


def _features(
    features: Features, of_population: Array | None, target: int, sizes: tuple[int, int]
) -> tuple[Floats, Floats]:
    if callable(features):
        pair = features(target)
    else:
        require(of_population is not None, "features of samples need population_features_ZF too")
        assert of_population is not None
        pair = (features, of_population)
    first, second = (np.asarray(part, dtype=np.float64) for part in pair)
    require(
        first.ndim == second.ndim == 2
        and (first.shape[0], second.shape[0]) == sizes
        and first.shape[1] == second.shape[1] >= 1,
        f"features have shapes {first.shape} and {second.shape}: expected ({sizes[0]}, F) and "
        f"({sizes[1]}, F)",
    )
    require(
        bool(np.isfinite(first).all() and np.isfinite(second).all()), "features are not all finite"
    )
    return first, second


def _bar(
    parameters: QuantileParameters, of_population: Floats, others: Floats, of_samples: Floats
) -> Floats:
    """The fitted quantile at each sample.

    Small fits run in one thread: many teams of threads for microseconds of work each wait for one
    another longer than they work, above all where other programs use the cores. The fit is the
    same bit for bit.
    """
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    threads = 1 if of_population.size <= SMALL else None
    with threadpool_limits(threads, user_api="openmp"):
        regressor = _regressor(parameters)
        regressor.fit(of_population, others)
        return np.asarray(regressor.predict(of_samples), dtype=np.float64)


def _regressor(parameters: QuantileParameters) -> Any:
    level = 1 - parameters.alpha
    if parameters.regressor == "linear":
        from sklearn.linear_model import QuantileRegressor

        return QuantileRegressor(quantile=level, alpha=0, solver="highs")
    from sklearn.ensemble import HistGradientBoostingRegressor

    return HistGradientBoostingRegressor(
        loss="quantile", quantile=level, early_stopping=False, random_state=parameters.seed
    )
