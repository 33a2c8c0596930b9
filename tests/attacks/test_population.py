"""Populations: no members, no copies of them, numbers; coarse scores pass for no copies."""

import numpy as np
import pytest
from designs import study

from attacks.population import Population
from attacks.rmia import rmia
from attacks.threshold import attack_p
from attacks.types import Excluded, ScoreMatrix


def matrix_of(scores, keep, design="auto"):
    return ScoreMatrix(scores_MNQ=scores, keep_MN=keep, design=design)


def bernoulli_with(never, always):
    matrix = study(1, "bernoulli", 12, 60)
    keep = matrix.keep_MN.copy()
    keep[:, never], keep[:, always] = False, True
    return matrix_of(matrix.scores_MNQ, keep, "bernoulli")


def test_a_population_with_members_is_an_error():
    keep = np.zeros((6, 5), dtype=bool)
    keep[2, 3] = True
    with pytest.raises(ValueError, match="contains members: 1 of 5 samples"):
        Population(scores_MZQ=np.zeros((6, 5)), keep_MZ=keep)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("attack", [attack_p, rmia])
def test_a_population_of_copies_of_members_is_an_error(attack, kind):
    matrix = study(20, "paired", 8, 60, 2)
    rows = np.random.default_rng(0).permutation(60)[:50]
    copied = matrix.scores_MNQ[:, rows].astype(kind)
    matrix = matrix_of(matrix.scores_MNQ.astype(np.promote_types(kind, np.float32)), matrix.keep_MN)
    with pytest.raises(ValueError, match="contains samples that were trained on: 50 of 50 have"):
        attack(matrix, Population(scores_MZQ=copied))
    fresh = np.random.default_rng(1).normal(size=(8, 11, 2)).astype(kind)
    most = np.concatenate([copied[:, :40], fresh[:, :10]], axis=1)
    with pytest.raises(ValueError, match="40 of 50 have"):
        attack(matrix, Population(scores_MZQ=most))
    attack(matrix, Population(scores_MZQ=np.concatenate([copied[:, :39], fresh], axis=1)))
    other = copied.copy()
    other[7, :, 1] += kind(1)
    attack(matrix, Population(scores_MZQ=other))


def test_copies_of_samples_that_no_model_trained_on_are_a_population():
    matrix = bernoulli_with(never=slice(0, 20), always=59)
    attack_p(matrix, Population(scores_MZQ=matrix.scores_MNQ[:, :20].copy()))
    with pytest.raises(ValueError, match="20 of 20 have the very scores"):
        attack_p(matrix, Population(scores_MZQ=matrix.scores_MNQ[:, 20:40].copy()))


def test_coarse_scores_of_one_model_pass_for_no_copies():
    """At one sample a step of the grid, a third of a population meets exactly one sample."""
    met = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        samples, size = 200, 17 + seed
        matrix = matrix_of(rng.integers(0, 200, (1, samples)) / 8, np.ones((1, samples), bool))
        z = rng.integers(0, 200, (1, size)) / 8
        attack_p(matrix, Population(scores_MZQ=z))
        counts = np.bincount((8 * matrix.scores_MNQ.ravel()).astype(int), minlength=200)
        met.append((counts[(8 * z.ravel()).astype(int)] == 1).mean())
    assert np.mean(met) == pytest.approx(np.exp(-1), abs=0.02)


def test_a_population_score_that_is_not_finite_is_not_dropped_silently():
    matrix = study(16, "paired", 8, 20)
    z = np.random.default_rng(0).normal(size=(8, 9, 1))
    z[2, 4] = np.nan
    for result in (
        attack_p(matrix, Population(scores_MZQ=z)),
        rmia(matrix, Population(scores_MZQ=z)),
    ):
        assert (result.excluded_TN[2] == Excluded.POPULATION_NOT_FINITE).all()
        assert not np.delete(result.excluded_TN, 2, axis=0).any()
