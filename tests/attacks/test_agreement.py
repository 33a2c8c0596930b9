"""Every attack against the textbook loops, to 1e-6, on every mask design."""

import itertools

import numpy as np
import oracles
import pytest
from designs import gone_of, memo, study

from attacks.exclusion import plan_exclusion
from attacks.lira import LiraParameters, lira
from attacks.population import Population
from attacks.quantile import QuantileParameters, quantile
from attacks.rmia import RmiaParameters, rmia
from attacks.threshold import attack_p, attack_r, calibrated, loss
from attacks.types import ScoreMatrix

TOLERANCE = 1e-6
CASES = [
    ("paired", 8, 12, 1, 0.5),
    ("paired", 9, 8, 2, 0.5),
    ("paired", 16, 10, 18, 0.5),
    ("paired", 8, 12, 2, 0.3),
    ("balanced", 8, 12, 2, 0.5),
    ("balanced", 12, 10, 1, 0.25),
    ("bernoulli", 10, 12, 3, 0.5),
    ("bernoulli", 16, 10, 1, 0.3),
    ("paired", 128, 24, 1, 0.5),
    ("bernoulli", 129, 6, 1, 0.5),
]
LIRA = [
    *itertools.product((True, False), ("pooled", "per_example", "shrunk", "tf_fixed"), ("mean",)),
    (True, "pooled", "median"),
    (True, "per_example", "median"),
    (False, "pooled", "median"),
    (True, "tf_fixed", "median"),
]


def some_targets(matrix):
    return sorted({0, 1, matrix.models // 2, matrix.models - 1})


def close(actual, expected, name):
    np.testing.assert_allclose(
        actual, np.array(expected), rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
    )


def case_id(case):
    design, models, samples, queries, pkeep = case
    return f"{design}-M{models}-N{samples}-Q{queries}-p{pkeep}"


@pytest.mark.parametrize("case", CASES, ids=case_id)
@pytest.mark.parametrize(("online", "variance", "centre"), LIRA)
def test_lira_agrees_with_the_loops(case, online, variance, centre):
    design, models, samples, queries, pkeep = case
    matrix = study(7, design, models, samples, queries, pkeep)
    targets = some_targets(matrix)
    parameters = LiraParameters(online=online, variance=variance, centre=centre)
    result = lira(matrix, parameters, targets)
    scores, keep = matrix.scores_MNQ.tolist(), matrix.keep_MN.tolist()
    for row, t in zip(result.scores_TN, targets, strict=True):
        expected = oracles.lira(
            scores,
            keep,
            t,
            memo(gone_of(matrix, t)),
            online=online,
            variance=variance,
            centre=centre,
        )
        close(row, expected, f"{variance} of target {t}")


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_other_attacks_agree_with_the_loops(case):
    design, models, samples, queries, pkeep = case
    matrix = study(8, design, models, samples, queries, pkeep)
    rng = np.random.default_rng(1)
    z = rng.normal(0, 2, (models, 7, queries))
    population = Population(scores_MZQ=z)
    targets = some_targets(matrix)[:2] if models > 100 else some_targets(matrix)
    scores, keep = matrix.scores_MNQ.tolist(), matrix.keep_MN.tolist()
    online = RmiaParameters(online=True, gamma=1.3)
    offline = RmiaParameters(online=False, gamma=0.8, a=0.4)
    results = {
        "loss": loss(matrix, targets),
        "calibrated": calibrated(matrix, targets),
        "attack_p": attack_p(matrix, population, targets),
        "attack_r": attack_r(matrix, targets),
        "rmia online": rmia(matrix, population, online, targets),
        "rmia offline": rmia(matrix, population, offline, targets),
    }
    for i, t in enumerate(targets):
        gone = memo(gone_of(matrix, t))
        references = [m for m in range(models) if m not in oracles.left_out(keep, t)]
        if matrix.design == "bernoulli" or len(references) == models - 1:
            references = [m for m in range(models) if m != t]
        expected = {
            "loss": oracles.loss(scores, t),
            "calibrated": oracles.calibrated(scores, keep, t, gone),
            "attack_p": oracles.attack_p(scores, z.tolist(), t),
            "attack_r": oracles.attack_r(scores, keep, t, gone),
            "rmia online": oracles.rmia(
                scores, keep, z.tolist(), t, gone, online=True, gamma=1.3, a=0
            ),
            "rmia offline": oracles.rmia(
                scores, keep, z.tolist(), t, gone, online=False, gamma=0.8, a=0.4
            ),
        }
        for name, rows in expected.items():
            close(results[name].scores_TN[i], rows, f"{name} of target {t}")


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_quantile_regression_agrees_with_every_vertex_tried(case):
    design, models, samples, queries, pkeep = case
    matrix = study(9, design, models, samples, queries, pkeep)
    rng = np.random.default_rng(2)
    features, of_population = rng.normal(size=samples), rng.normal(size=15)
    z = of_population[:, None] + rng.normal(0, 2, (models, 15, queries))
    targets = some_targets(matrix)[:2]
    result = quantile(
        matrix,
        Population(scores_MZQ=z),
        features[:, None],
        of_population[:, None],
        QuantileParameters(alpha=0.17, regressor="linear"),
        targets,
    )
    for i, t in enumerate(targets):
        expected = oracles.quantile(
            matrix.scores_MNQ.tolist(), z.tolist(), features, of_population, t, 0.17
        )
        close(result.scores_TN[i], expected, f"quantile of target {t}")


@pytest.mark.parametrize(("dtype", "error"), [(np.float32, 1e-5), (np.float16, 5e-2)])
def test_narrow_input_costs_only_its_rounding(dtype, error):
    matrix = study(3, "paired", 32, 200, 2)
    narrow = ScoreMatrix(scores_MNQ=matrix.scores_MNQ.astype(dtype), keep_MN=matrix.keep_MN)
    exact = ScoreMatrix(scores_MNQ=narrow.scores_MNQ.astype(np.float64), keep_MN=matrix.keep_MN)
    assert np.array_equal(lira(narrow).scores_TN, lira(exact).scores_TN)
    away = np.abs(lira(narrow).scores_TN - lira(matrix).scores_TN)
    assert 0 < away.max() < error


@pytest.mark.parametrize("attack", ["lira", "calibrated", "attack_r", "rmia"])
@pytest.mark.parametrize("design", ["paired", "balanced", "bernoulli"])
def test_separate_targets_score_as_if_they_had_been_shadows_left_out(attack, design):
    """A target held apart gives what the same model gives when it is left out of all models."""
    whole = study(5, design, 12, 40, 2)
    z = np.random.default_rng(2).normal(0, 2, (12, 9, 2))
    run = {
        "lira": (lambda m, p, **k: lira(m, LiraParameters(variance="shrunk"), **k)),
        "calibrated": (lambda m, p, **k: calibrated(m, **k)),
        "attack_r": (lambda m, p, **k: attack_r(m, **k)),
        "rmia": (lambda m, p, **k: rmia(m, p, RmiaParameters(online=True), **k)),
    }[attack]
    for t in (3, 10):
        rest = [m for m in range(12) if m != t]
        shadows, single = (
            ScoreMatrix(
                scores_MNQ=whole.scores_MNQ[chosen],
                keep_MN=whole.keep_MN[chosen],
                design=whole.design,
            )
            for chosen in (rest, [t])
        )
        outside = Population(scores_MZQ=z[rest], targets_TZQ=z[[t]])
        apart = run(shadows, outside, targets=single)
        among = run(whole, Population(scores_MZQ=z), targets=[t])
        np.testing.assert_allclose(apart.scores_TN, among.scores_TN, rtol=1e-12, atol=1e-12)
        assert np.array_equal(apart.membership_TN, among.membership_TN)


@pytest.mark.parametrize("design", ["paired", "bernoulli"])
@pytest.mark.parametrize("references", [1, 2, 100])
def test_rmia_with_few_references_is_rmia_on_those_models(design, references):
    """The references are pairs (or models) of one fixed order, never the target's own."""
    matrix = study(6, design, 12, 25)
    z = np.random.default_rng(3).normal(0, 2, (12, 8))
    few = RmiaParameters(references=references)
    result = rmia(matrix, Population(scores_MZQ=z), few)
    groups = [list(g) for g in plan_exclusion(matrix.keep_MN, matrix.design).deletion_groups()]
    share = 1 - matrix.keep_MN.mean()
    size = references if design == "paired" else int(np.ceil(references / share))
    for t in range(12):
        serve = [g for g in groups if t not in g][:size]
        chosen = [m for g in serve for m in g]
        shadows = ScoreMatrix(
            scores_MNQ=matrix.scores_MNQ[chosen],
            keep_MN=matrix.keep_MN[chosen],
            design=matrix.design,
        )
        alone = ScoreMatrix(
            scores_MNQ=matrix.scores_MNQ[[t]], keep_MN=matrix.keep_MN[[t]], design=matrix.design
        )
        population = Population(scores_MZQ=z[chosen], targets_TZQ=z[[t]])
        want = rmia(shadows, population, RmiaParameters(), targets=alone)
        np.testing.assert_allclose(result.scores_TN[t], want.scores_TN[0], atol=1e-12)
    if references == 100:
        whole = rmia(matrix, Population(scores_MZQ=z), RmiaParameters())
        np.testing.assert_allclose(result.scores_TN, whole.scores_TN, atol=1e-12)
