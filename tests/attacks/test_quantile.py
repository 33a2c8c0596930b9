"""Quantile regression: its own quantiles, a signal that one threshold misses, refusals."""

import numpy as np
import pytest
import sklearn.ensemble  # noqa: F401 - loads the OpenMP that its regressors use
from designs import paired
from threadpoolctl import threadpool_info, threadpool_limits

from attacks.metrics import auc
from attacks.population import Population
from attacks.quantile import QuantileParameters, quantile
from attacks.threshold import loss
from attacks.types import Excluded, ScoreMatrix


def levels(seed, samples=400, gap=1.5):
    """phi whose level is a feature: hopeless for one threshold, easy given the feature."""
    rng = np.random.default_rng(seed)
    keep = paired(rng, 6, samples)
    feature, of_population = rng.uniform(-20, 20, samples), rng.uniform(-20, 20, 500)
    scores = feature + rng.normal(size=(6, samples)) + gap * keep
    population = Population(scores_MZQ=of_population + rng.normal(size=(6, 500)))
    matrix = ScoreMatrix(scores_MNQ=scores, keep_MN=keep)
    return matrix, population, feature[:, None], of_population[:, None]


@pytest.mark.parametrize("regressor", ["linear", "boosting"])
def test_the_feature_explains_the_level(regressor):
    matrix, population, features, of_population = levels(0)
    parameters = QuantileParameters(alpha=0.1, regressor=regressor)
    result = quantile(matrix, population, features, of_population, parameters)
    plain = loss(matrix)
    found = np.mean([auc(s, y) for s, y in zip(result.scores_TN, matrix.keep_MN, strict=True)])
    blind = np.mean([auc(s, y) for s, y in zip(plain.scores_TN, matrix.keep_MN, strict=True)])
    assert found > 0.7
    assert blind < 0.6
    false = (result.scores_TN > 0)[~matrix.keep_MN].mean()
    assert false == pytest.approx(0.1, abs=0.05 if regressor == "linear" else 0.12)


def test_a_linear_fit_of_a_constant_is_the_sample_quantile():
    matrix, population, features, of_population = levels(1)
    parameters = QuantileParameters(alpha=0.25, regressor="linear")
    result = quantile(matrix, population, 0 * features, 0 * of_population, parameters, [2])
    bar = matrix.scores_MNQ[2, :, 0] - result.scores_TN[0]
    others = population.scores_MZQ[2, :, 0]
    assert np.ptp(bar) < 1e-9
    assert (others <= bar[0] + 1e-9).mean() >= 0.75
    assert (others < bar[0] - 1e-9).mean() <= 0.75


def test_features_may_depend_on_the_target():
    matrix, population, features, of_population = levels(2)
    asked = []

    def of(target):
        asked.append(target)
        return features, of_population

    first = quantile(matrix, population, of, targets=[3, 1])
    second = quantile(matrix, population, features, of_population, targets=[3, 1])
    assert asked == [3, 1]
    assert np.array_equal(first.scores_TN, second.scores_TN)


def test_what_is_not_finite_has_its_reason():
    matrix, population, features, of_population = levels(3)
    matrix.scores_MNQ[2, 5] = np.inf
    population.scores_MZQ[4, 7] = np.nan
    result = quantile(matrix, population, features, of_population)
    assert result.excluded_TN[2, 5] == Excluded.TARGET_NOT_FINITE
    assert (result.excluded_TN[4] == Excluded.POPULATION_NOT_FINITE).all()
    assert np.isfinite(np.delete(result.scores_TN[2], 5)).all()


def test_bad_features_are_refused():
    matrix, population, features, of_population = levels(4)
    with pytest.raises(ValueError, match="need population_features_ZF"):
        quantile(matrix, population, features)
    with pytest.raises(ValueError, match="features have shapes"):
        quantile(matrix, population, features[:5], of_population)
    with pytest.raises(ValueError, match="not all finite"):
        quantile(matrix, population, features * np.nan, of_population)
    with pytest.raises(ValueError, match="needs 1000 at least"):
        quantile(matrix, population, features, of_population, QuantileParameters(alpha=0.001))
    with pytest.raises(ValueError, match="unknown regressor 'forest'"):
        QuantileParameters(regressor="forest")
    with pytest.raises(ValueError, match="seed is 4294967296: expected 0 to 4294967295"):
        QuantileParameters(seed=2**32)


class Spy:
    """Stands in for a regressor; knows how many OpenMP threads it was given."""

    def __init__(self, seen):
        self.seen = seen

    def fit(self, features, values):
        pools = [pool for pool in threadpool_info() if pool["user_api"] == "openmp"]
        assert pools
        self.seen.append({pool["num_threads"] for pool in pools})

    def predict(self, features):
        return np.zeros(len(features))


def test_small_fits_run_in_one_thread_and_leave_the_threads_as_they_were(monkeypatch):
    matrix, population, features, of_population = levels(5)
    seen = []
    monkeypatch.setattr("attacks.quantile._regressor", lambda parameters: Spy(seen))
    with threadpool_limits(2, user_api="openmp"):
        quantile(matrix, population, features, of_population, targets=[0])
        assert seen.pop() == {1}
        monkeypatch.setattr("attacks.quantile.SMALL", of_population.size - 1)
        quantile(matrix, population, features, of_population, targets=[0])
        assert seen.pop() == {2}
