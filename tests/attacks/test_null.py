"""Without signal every attack is at one half; without the pair rule it is not; signal is found."""

import numpy as np
import pytest
from designs import DESIGNS, study

from attacks import exclusion
from attacks.lira import LiraParameters, lira
from attacks.metrics import auc
from attacks.population import Population
from attacks.quantile import QuantileParameters, quantile
from attacks.rmia import RmiaParameters, rmia
from attacks.threshold import attack_p, attack_r, calibrated, loss
from attacks.types import ScoreMatrix

ATTACKS = {
    "loss": lambda m, p: loss(m),
    "calibrated": lambda m, p: calibrated(m),
    "attack_p": attack_p,
    "attack_r": lambda m, p: attack_r(m),
    "rmia_online": lambda m, p: rmia(m, p, RmiaParameters(online=True, gamma=1.0)),
    "rmia_offline": lambda m, p: rmia(m, p, RmiaParameters(gamma=1.0)),
    "lira_pooled": lambda m, p: lira(m),
    "lira_per_example": lambda m, p: lira(m, LiraParameters(variance="per_example")),
    "lira_shrunk": lambda m, p: lira(m, LiraParameters(variance="shrunk")),
    "lira_tf_fixed": lambda m, p: lira(m, LiraParameters(variance="tf_fixed")),
    "lira_median": lambda m, p: lira(m, LiraParameters(centre="median")),
    "lira_offline": lambda m, p: lira(m, LiraParameters(online=False)),
    "lira_offline_per_example": lambda m, p: lira(
        m, LiraParameters(online=False, variance="per_example")
    ),
}


def a_quantile(matrix, population):
    """Linear, on one feature: the mean phi over the other models that did not train on it."""
    level = loss(matrix).scores_TN - calibrated(matrix).scores_TN
    level = np.where(np.isnan(level), 0, level)
    z = population.scores_MZQ[..., 0]
    parameters = QuantileParameters(alpha=0.2, regressor="linear")
    return quantile(
        matrix, population, lambda t: (level[t][:, None], z.mean(0)[:, None]), None, parameters
    )


ATTACKS["quantile"] = a_quantile
SAMPLES = 300
DRAWS = {8: 80, 16: 60, 32: 30}


def mean_aucs(attack, design, models, draws, stated=None, gap=0.0):
    """One mean AUC over targets for each independent study."""
    values = []
    for seed in range(draws):
        matrix = study(1000 + seed, design, models, SAMPLES, gap=gap)
        if stated:
            matrix = ScoreMatrix(
                scores_MNQ=matrix.scores_MNQ, keep_MN=matrix.keep_MN, design=stated
            )
        z = np.random.default_rng(seed).normal(0, 2, (models, 40))
        result = ATTACKS[attack](matrix, Population(scores_MZQ=z))
        rows = zip(result.scores_TN, result.membership_TN, strict=True)
        values.append(np.mean([auc(s, y) for s, y in rows]))
    return np.array(values)


def standard_error(values):
    return values.std(ddof=1) / np.sqrt(values.size)


@pytest.mark.parametrize("models", [8, 16, 32])
@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_null_auc_is_one_half(attack, design, models):
    draws = DRAWS[models] // (3 if attack == "quantile" else 1)
    values = mean_aucs(attack, design, models, draws)
    assert standard_error(values) < 0.005
    assert abs(values.mean() - 0.5) < 3 * standard_error(values)


@pytest.mark.parametrize(("attack", "about"), [("lira_pooled", 0.474), ("lira_per_example", 0.433)])
def test_without_the_rule_the_counts_leak(attack, about, monkeypatch):
    """The control: leaving the target alone out of a balanced mask shows, as the science says."""
    monkeypatch.setattr(exclusion, "CHANCE", 10**9)
    values = mean_aucs(attack, "balanced", 8, draws=60, stated="bernoulli")
    assert abs(values.mean() - about) < 0.006
    assert values.mean() < 0.5 - 6 * standard_error(values)


@pytest.mark.parametrize("design", DESIGNS)
def test_models_that_differ_in_level_do_not_give_membership_away(design):
    """A biased choice of the model left out would leave some models on one side more often."""
    values = []
    for seed in range(120):
        matrix = study(seed, design, 8, SAMPLES, gap=0.0)
        level = np.random.default_rng(seed).normal(0, 3, (8, 1, 1))
        moved = ScoreMatrix(
            scores_MNQ=matrix.scores_MNQ + level, keep_MN=matrix.keep_MN, design=matrix.design
        )
        result = lira(moved)
        rows = zip(result.scores_TN, result.membership_TN, strict=True)
        values.append(np.mean([auc(s, y) for s, y in rows]))
    values = np.array(values)
    assert abs(values.mean() - 0.5) < 3 * standard_error(values)


@pytest.mark.parametrize("online", [True, False])
@pytest.mark.parametrize("design", DESIGNS)
def test_rmia_is_not_inflated_with_four_models(design, online):
    values = []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        matrix = study(seed, design, 4, SAMPLES, gap=0.0)
        z = rng.normal(0, 2, (4, 40))
        parameters = RmiaParameters(online=online, gamma=1.0)
        result = rmia(matrix, Population(scores_MZQ=z), parameters)
        rows = zip(result.scores_TN, result.membership_TN, strict=True)
        values.append(np.mean([auc(s, y) for s, y in rows]))
    values = np.array(values)
    assert abs(values.mean() - 0.5) < 3 * standard_error(values)


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_planted_signal_is_found_the_right_way_round(attack, design):
    values = mean_aucs(attack, design, 16, draws=4, gap=2.0)
    assert values.min() > 0.55


@pytest.mark.parametrize("design", DESIGNS)
def test_with_signal_leaving_the_pair_out_equals_an_independent_target(design):
    """A target that no shadow model knows of scores the same on average."""
    inside, outside = [], []
    for seed in range(40):
        matrix = study(seed, design, 12, SAMPLES, gap=1.0)
        result = lira(matrix)
        rows = zip(result.scores_TN, result.membership_TN, strict=True)
        inside.append(np.mean([auc(s, y) for s, y in rows]))
        rng = np.random.default_rng(10_000 + seed)
        fresh = study(seed, design, 12, SAMPLES, gap=1.0)
        keep = rng.random((4, SAMPLES)) < 0.5
        level = np.random.default_rng(seed)
        DESIGNS[design](level, 12, SAMPLES)
        centre, spread = level.normal(0, 2, (1, SAMPLES, 1)), level.uniform(0.5, 2, (1, SAMPLES, 1))
        scores = centre + spread * rng.normal(size=(4, SAMPLES, 1)) + keep[:, :, None]
        # Two shadows fewer, as many as a target of the study has.
        pool = ScoreMatrix(scores_MNQ=fresh.scores_MNQ[:10], keep_MN=fresh.keep_MN[:10])
        apart = lira(pool, targets=ScoreMatrix(scores_MNQ=scores, keep_MN=keep, design="bernoulli"))
        rows = zip(apart.scores_TN, apart.membership_TN, strict=True)
        outside.append(np.mean([auc(s, y) for s, y in rows]))
    away = np.array(inside) - np.array(outside)
    assert abs(away.mean()) < 3 * standard_error(away) + 0.005
