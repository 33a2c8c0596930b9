"""Intervals that cover, differences that are paired, and reasons where there is no interval."""

import math

import numpy as np
import pytest
from designs import DESIGNS, study

from attacks.evaluate import difference, evaluate, lira_attack, measure
from attacks.intervals import (
    clopper_pearson,
    given_these_shadows,
    jackknife,
    keep_digest,
    permutation_null,
)
from attacks.lira import LiraParameters, lira
from attacks.metrics import auc, rate_name, tpr_at_fpr
from attacks.types import ScoreMatrix


def everyone(matrix):
    return {"all": np.ones(matrix.samples, dtype=bool)}


def mean_auc(attacked, mask):
    rows = zip(attacked.scores_TN[:, mask], attacked.membership_TN[:, mask], strict=True)
    return np.mean([auc(s, y) for s, y in rows])


@pytest.mark.parametrize("design", ["paired", "balanced", "bernoulli"])
def test_replicates_are_studies_without_the_group(design):
    """Deleting a group gives what the metrics say of the attack run without those models."""
    matrix = study(1, design, 10, 120, 2)
    rng = np.random.default_rng(0)
    groups = {"all": np.ones(120, dtype=bool), "some": rng.random(120) < 0.6}
    result = evaluate(matrix, lira_attack(), groups, alphas=(0.1,))
    full = lira(matrix)
    for g, mask in enumerate(groups.values()):
        assert result.value_GK[g, 0] == pytest.approx(mean_auc(full, mask), abs=1e-14)
        for t in range(10):
            row, truth = full.scores_TN[t, mask], full.membership_TN[t, mask]
            assert result.targets_TGK[t, g, 1] == tpr_at_fpr(row, truth, 0.1).tpr
    for r, deleted in enumerate(result.deletions):
        stays = [m for m in range(10) if m not in deleted]
        if design == "balanced":
            continue  # without the deleted models the mask is balanced no longer: same rule kept
        without = ScoreMatrix(
            scores_MNQ=matrix.scores_MNQ[stays],
            keep_MN=matrix.keep_MN[stays],
            design=matrix.design,
        )
        attacked = lira(without)
        for g, mask in enumerate(groups.values()):
            want = mean_auc(attacked, mask)
            assert result.replicates_RGK[r, g, 0] == pytest.approx(want, abs=1e-12)


def test_the_fast_metrics_are_the_plain_ones_with_ties_too():
    matrix = study(2, "paired", 8, 200)
    coarse = ScoreMatrix(scores_MNQ=np.round(matrix.scores_MNQ), keep_MN=matrix.keep_MN)
    for one in (matrix, coarse):
        attacked = lira(one, LiraParameters(online=False))
        scores = np.round(attacked.scores_TN, 1) if one is coarse else attacked.scores_TN
        result = evaluate(
            one,
            lambda *_, s=scores, a=attacked: replace_scores(a, s),
            everyone(one),
            alphas=(0.02, 0.3, 0.004),
            replicates=False,
        )
        for t in range(8):
            truth = attacked.membership_TN[t]
            assert result.targets_TGK[t, 0, 0] == pytest.approx(auc(scores[t], truth), abs=1e-14)
            for k, alpha in enumerate((0.02, 0.3, 0.004), start=1):
                want = tpr_at_fpr(scores[t], truth, alpha).tpr
                np.testing.assert_equal(result.targets_TGK[t, 0, k], want)


def replace_scores(attacked, scores):
    from dataclasses import replace

    return replace(attacked, scores_TN=scores)


def coverage(design, models, studies, samples=60):
    """Shares of 95 % intervals of the AUC, and of a paired difference, that cover the truth.

    Masks, shadow models and targets are redrawn; the samples stay what they are.
    """
    fixed = np.random.default_rng(0)
    level, spread = fixed.normal(0, 2, samples), fixed.uniform(0.5, 2, samples)
    values, intervals = [], []
    for seed in range(studies):
        rng = np.random.default_rng(seed)
        keep = DESIGNS[design](rng, models, samples)
        shared = rng.normal(size=keep.shape)
        stated = "bernoulli" if design == "bernoulli" else "auto"
        results = []
        for gap in (1.5, 0.7):
            noise = (shared + rng.normal(size=keep.shape)) / math.sqrt(2)
            phi = level + spread * noise + gap * keep
            arm = ScoreMatrix(scores_MNQ=phi, keep_MN=keep, design=stated)
            results.append(evaluate(arm, lira_attack(), everyone(arm), alphas=()))
        pair = (results[0], difference(*results))
        values.append([r.value("all", "auc") for r in pair])
        intervals.append([r.interval("all", "auc") for r in pair])
    truth = np.mean(values, axis=0)
    return [np.mean([row[i].low <= truth[i] <= row[i].high for row in intervals]) for i in range(2)]


@pytest.mark.parametrize("design", ["paired", "balanced", "bernoulli"])
def test_intervals_cover(design):
    """Below 93.5 % minus three standard errors is a fault (bench has 2,000 studies)."""
    studies = 250 if design == "paired" else 120
    assert min(coverage(design, 8, studies)) > 0.935 - 3 * math.sqrt(0.935 * 0.065 / studies)


@pytest.mark.slow
@pytest.mark.parametrize("models", [8, 16, 32])
@pytest.mark.parametrize("design", ["paired", "balanced", "bernoulli"])
def test_intervals_cover_in_two_thousand_studies(design, models):
    assert min(coverage(design, models, 2000)) >= 0.935


def test_a_difference_needs_the_same_masks():
    first, second = study(3, "paired", 8, 60), study(4, "paired", 8, 60)
    results = [evaluate(m, lira_attack(), everyone(m)) for m in (first, second)]
    with pytest.raises(ValueError, match="needs the same masks"):
        difference(*results)
    assert keep_digest(first.keep_MN) != keep_digest(second.keep_MN)
    same = ScoreMatrix(scores_MNQ=first.scores_MNQ + 0.0, keep_MN=first.keep_MN)
    nothing = difference(results[0], evaluate(same, lira_attack(), everyone(same)))
    interval = nothing.interval("all", "auc")
    assert (nothing.value("all", "auc"), interval.low, interval.high) == (0, 0, 0)
    with pytest.raises(ValueError, match="same groups"):
        difference(results[0], evaluate(first, lira_attack(), {"x": np.ones(60, dtype=bool)}))


def test_where_there_is_no_interval_it_says_why():
    six = study(5, "paired", 6, 80)
    result = evaluate(six, lira_attack(), everyone(six), alphas=(0.001,))
    assert math.isfinite(result.value("all", "auc"))
    interval = result.interval("all", "auc")
    assert not interval.given
    assert "LiRA needs two" in interval.reason
    assert "2 groups" in jackknife(0.5, np.array([0.4, 0.6])).reason
    assert "one target" in jackknife(0.5, np.array([0.4, 0.6, 0.5]), targets=1).reason
    assert "undefined" in jackknife(0.5, np.array([0.4, np.nan, 0.5])).reason
    assert math.isnan(result.value("all", "tpr@0.001"))
    with pytest.raises(ValueError, match="unknown metric 'f1'"):
        result.value("all", "f1")


def test_merged_groups_hold_every_model_once():
    matrix = study(6, "paired", 20, 50)
    result = evaluate(matrix, lira_attack(), everyone(matrix), max_groups=4, threads=2)
    assert len(result.deletions) == 4
    assert sorted(m for group in result.deletions for m in group) == list(range(20))
    assert result.interval("all", "auc").given


def test_an_empty_group_is_undefined_and_does_no_harm():
    matrix = study(7, "paired", 8, 60)
    groups = {"all": np.ones(60, dtype=bool), "none": np.zeros(60, dtype=bool)}
    result = evaluate(matrix, lira_attack(), groups)
    assert math.isnan(result.value("none", "auc"))
    assert not result.interval("none", "auc").given
    assert result.interval("all", "auc").given


def test_clopper_pearson_covers_exactly_enough():
    rng = np.random.default_rng(0)
    for rate, trials in ((0.02, 50), (0.5, 12), (0.97, 100)):
        hits = rng.binomial(trials, rate, 4000)
        inside = [clopper_pearson(int(k), trials) for k in hits]
        assert np.mean([i.low <= rate <= i.high for i in inside]) > 0.945
    assert clopper_pearson(10, 10).high == 1
    assert not clopper_pearson(0, 0).given


def test_the_bootstrap_says_what_it_is():
    interval = given_these_shadows(np.array([0.4, 0.5, np.nan, 0.6]))
    assert interval.method == "given_these_shadows"
    assert interval.low < 0.5 < interval.high
    assert not given_these_shadows(np.array([0.5])).given


def test_the_permutation_null_is_exact_under_the_null_and_finds_a_signal():
    def p_value(gap, seed):
        matrix = study(seed, "paired", 8, 40, gap=gap)

        def statistic(keep):
            scores = matrix.scores_MNQ[..., 0]
            return float(np.mean([auc(s, y) for s, y in zip(scores, keep, strict=True)]))

        return permutation_null(statistic, matrix.keep_MN, draws=19, seed=seed)[0]

    nulls = np.array([p_value(0.0, seed) for seed in range(100)])
    assert (nulls <= 0.05).mean() <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 100)
    assert abs(nulls.mean() - 0.525) < 4 * math.sqrt(1 / 12 / 100)
    assert p_value(2.0, 0) == 0.05


def test_measuring_scores_that_are_there_gives_the_same_means():
    matrix = study(3, "paired", 10, 120)
    groups = {"all": np.ones(120, dtype=bool), "few": np.arange(120) < 30}
    full = evaluate(matrix, lira_attack(), groups, alphas=(0.05, 0.1), replicates=False)
    attacked = lira(matrix)
    again = measure(attacked, groups, (0.05, 0.1))
    np.testing.assert_array_equal(again.targets_TGK, full.targets_TGK)
    assert not again.interval("all", "auc").given
    own = {name: np.tile(mask, (10, 1)) for name, mask in groups.items()}
    own["few"][4] = False
    by_target = measure(attacked, own, (0.05, 0.1))
    assert np.isnan(by_target.targets_TGK[4, 1]).all()
    full.targets_TGK[4, 1] = np.nan
    np.testing.assert_array_equal(by_target.targets_TGK, full.targets_TGK)


def test_two_rates_that_print_alike_stay_two_metrics():
    matrix = study(0, "paired", 8, 200)
    everything = {"all": np.ones(200, dtype=bool)}
    rates = (0.0449999, 0.045, 0.4, 0.40000001)
    found = evaluate(matrix, lira_attack(), everything, alphas=rates)
    assert len(set(found.metrics)) == 1 + len(rates)
    assert [found.value("all", rate_name(rate)) for rate in rates] == found.value_GK[0, 1:].tolist()
    assert "tpr@0.045" in found.metrics
