"""ROC and its readings: closed forms, ties, refusals, thresholds of shadow models."""

import math

import numpy as np
import oracles
import pytest
from designs import study
from scipy.special import ndtr, ndtri

from attacks.exclusion import plan_exclusion
from attacks.lira import lira
from attacks.metrics import (
    advantage,
    auc,
    auc_and_tpr,
    balanced_accuracy,
    by_group,
    deciles,
    ppv,
    roc,
    tpr_at_fpr,
    transferred,
)


@pytest.mark.parametrize("shift", [0.0, 0.5, 2.0])
def test_gaussian_scores_give_the_closed_form(shift):
    n = 200_000
    rng = np.random.default_rng(0)
    scores = np.concatenate([rng.normal(shift, 1, n), rng.normal(0, 1, n)])
    membership = np.arange(2 * n) < n
    assert abs(auc(scores, membership) - ndtr(shift / math.sqrt(2))) < 4 / math.sqrt(6 * n)
    for alpha in (0.001, 0.01, 0.1):
        result = tpr_at_fpr(scores, membership, alpha)
        bar = ndtri(1 - alpha)
        expected = ndtr(shift - bar)
        slope = math.exp(shift * bar - shift**2 / 2)
        error = math.sqrt(expected * (1 - expected) / n + slope**2 * alpha * (1 - alpha) / n)
        assert abs(result.tpr - expected) < 4 * error
        assert result.realised_fpr <= alpha
        assert result.realised_fpr > alpha - 1.5 / n


def test_the_likelihood_ratio_of_known_gaussians_reaches_the_neyman_pearson_curve():
    """LiRA with many shadow models of one Gaussian pair comes to the closed-form AUC."""
    rng = np.random.default_rng(1)
    keep = rng.random((400, 300)) < 0.5
    scores = rng.normal(0, 1, (400, 300)) + 1.0 * keep
    from attacks.types import ScoreMatrix

    result = lira(ScoreMatrix(scores_MNQ=scores, keep_MN=keep))
    mean = np.mean([auc(s, y) for s, y in zip(result.scores_TN, keep, strict=True)])
    assert abs(mean - ndtr(1 / math.sqrt(2))) < 0.005


@pytest.mark.parametrize("levels", [2, 3, 10, 1000])
def test_ties_are_one_step(levels):
    rng = np.random.default_rng(levels)
    for _ in range(20):
        scores = rng.integers(0, levels, 60).astype(float)
        membership = rng.random(60) < 0.5
        assert auc(scores, membership) == pytest.approx(oracles.auc(scores, membership), abs=1e-12)
        for alpha in (0.05, 0.1, 0.3, 0.9):
            got = tpr_at_fpr(scores, membership, alpha)
            tpr, fpr = oracles.tpr_at_fpr(scores.tolist(), membership, alpha)
            assert got.tpr == tpr
            assert got.realised_fpr <= alpha
            assert got.realised_fpr == pytest.approx(fpr) or got.tpr == tpr
        curve = roc(scores, membership)
        assert np.all(np.diff(curve.fpr) >= 0)
        assert np.all(np.diff(curve.tpr) >= 0)
        area = np.sum(np.diff(curve.fpr) * (curve.tpr[1:] + curve.tpr[:-1]) / 2)
        assert area == pytest.approx(auc(scores, membership))
        assert curve.fpr.size == np.unique(scores).size + 1


def test_all_tied_scores_accept_nobody_at_a_low_rate():
    scores, membership = np.ones(40), np.arange(40) < 20
    assert auc(scores, membership) == 0.5
    result = tpr_at_fpr(scores, membership, 0.1)
    assert (result.tpr, result.realised_fpr, result.refused) == (0.0, 0.0, False)


def test_a_rate_that_cannot_be_resolved_is_refused_with_bounds():
    scores = np.array([5.0, 3.0, 1.0, 4.0, 2.0])
    membership = np.array([True, True, True, False, False])
    refused = tpr_at_fpr(scores, membership, 0.49)
    assert refused.refused
    assert math.isnan(refused.tpr)
    assert refused.bound == (1 / 3, 2 / 3)
    assert refused.n_out == 2
    exact = tpr_at_fpr(scores, membership, 0.5)
    assert (exact.refused, exact.tpr, exact.realised_fpr) == (False, 2 / 3, 0.5)


@pytest.mark.parametrize(
    ("alpha", "n_out", "allowed"), [(0.29, 100, 29), (0.1, 30, 3), (0.01, 100, 1)]
)
def test_rates_on_the_grid_are_reached_despite_rounding(alpha, n_out, allowed):
    scores = np.concatenate([np.arange(n_out) + 0.5, [n_out - allowed + 0.0, -1.0]])
    membership = np.arange(n_out + 2) >= n_out
    result = tpr_at_fpr(scores, membership, alpha)
    assert result.realised_fpr == allowed / n_out
    assert result.tpr == 0.5


def test_one_non_member_is_enough_for_auc_and_not_for_a_rate():
    scores, membership = np.array([3.0, 2.0, 1.0]), np.array([True, False, True])
    assert auc(scores, membership) == 0.5
    assert tpr_at_fpr(scores, membership, 0.1).refused
    assert math.isnan(auc(scores, np.ones(3, dtype=bool)))
    assert tpr_at_fpr(scores, np.ones(3, dtype=bool), 0.1).bound is None


def test_excluded_samples_are_counted_and_infinite_scores_ranked():
    scores = np.array([np.nan, np.inf, 1.0, -np.inf, np.nan])
    membership = np.array([True, True, False, False, False])
    result = tpr_at_fpr(scores, membership, 0.5)
    assert (result.excluded, result.n_in, result.n_out) == (2, 1, 2)
    assert (auc(scores, membership), result.tpr) == (1.0, 1.0)
    assert roc(scores, membership).excluded == 2


def test_accuracy_advantage_and_precision():
    scores = np.array([4.0, 3.0, 2.0, 1.0])
    membership = np.array([True, False, True, False])
    assert balanced_accuracy(scores, membership) == 0.75
    assert advantage(scores, membership) == 0.5
    assert ppv(0.9, 0.1, 0.5) == pytest.approx(0.9)
    assert ppv(0.1, 0.001, 0.01) == pytest.approx(0.001 / (0.001 + 0.99 * 0.001))
    assert math.isnan(ppv(0.0, 0.0, 0.5))
    with pytest.raises(ValueError, match="the prior is 1"):
        ppv(0.5, 0.5, 1)


def test_transferred_thresholds_ignore_the_target_and_its_complement():
    matrix = study(3, "paired", 8, 500, gap=1.5)
    attacked = lira(matrix)
    partner = plan_exclusion(matrix.keep_MN).partner_M
    before = transferred(attacked, 0.05, partner)
    attacked.scores_TN[2] += 100
    attacked.scores_TN[3] -= 100
    after = transferred(attacked, 0.05, partner)
    assert np.array_equal(before.threshold_T[2:4], after.threshold_T[2:4])
    assert after.tpr_T[2] == 1
    assert after.tpr_T[3] == 0
    assert before.fpr_T.mean() == pytest.approx(0.05, abs=0.02)
    for p, prior in enumerate(before.priors):
        want = ppv(before.tpr_T[0], before.fpr_T[0], prior)
        assert before.ppv_PT[p, 0] == want


def test_groups_see_their_own_samples_only():
    matrix = study(4, "paired", 8, 400)
    attacked = lira(matrix)
    mask = np.arange(400) < 100
    table = by_group(attacked, {"some": mask}, alphas=(0.1,))
    row = table["some"][5]
    scores, membership = attacked.scores_TN[5, :100], attacked.membership_TN[5, :100]
    assert row["auc"] == auc(scores, membership)
    assert row["tpr@0.1"] == tpr_at_fpr(scores, membership, 0.1).tpr
    assert row["n_in"] + row["n_out"] == 100
    with pytest.raises(ValueError, match="expected one flag for each sample"):
        by_group(attacked, {"some": mask[:50]})


def test_deciles_split_the_known_values_by_rank():
    values = np.array([5.0, np.nan, 1.0, 2.0, 9.0, 7.0])
    groups = deciles(values, parts=2)
    assert groups["decile_1"].tolist() == [True, False, True, True, False, False]
    assert groups["decile_2"].tolist() == [False, False, False, False, True, True]


def test_equal_values_share_a_decile_whatever_their_order():
    values = np.repeat([0.0, 0.5, 1.0], [70, 20, 10])
    order = np.random.default_rng(0).permutation(100)
    groups, shuffled = deciles(values), deciles(values[order])
    for name, mask in groups.items():
        assert np.array_equal(mask[order], shuffled[name])
        assert np.unique(values[mask]).size <= 1
    assert [int(mask.sum()) for mask in groups.values()] == [0, 0, 0, 70, 0, 0, 0, 20, 0, 10]


@pytest.mark.parametrize("levels", [3, 1_000_000])
def test_one_sort_gives_what_the_plain_functions_give(levels):
    rng = np.random.default_rng(levels)
    alphas = (0.003, 0.01, 0.25, 0.5)
    for size in (1, 7, 400):
        scores = rng.integers(0, levels, size).astype(float)
        scores[rng.random(size) < 0.1] = np.nan
        membership = rng.random(size) < 0.4
        expected = [auc(scores, membership)]
        expected += [tpr_at_fpr(scores, membership, alpha).tpr for alpha in alphas]
        np.testing.assert_array_equal(auc_and_tpr(scores, membership, alphas), expected)
