"""Memorization, influence, exposure and vulnerability against loops and closed forms."""

import math

import numpy as np
import oracles
import pytest
from designs import DESIGNS, bernoulli, paired, study

from attacks import memorization as module
from attacks.exclusion import plan_exclusion
from attacks.memorization import (
    exposure,
    influence,
    memorization,
    memorization_without,
    vulnerability,
    vulnerability_stability,
)
from attacks.metrics import auc, deciles
from attacks.types import ScoreMatrix


def test_memorization_agrees_with_the_loops_and_is_undefined_without_a_side():
    rng = np.random.default_rng(0)
    keep = bernoulli(rng, 9, 40)
    keep[:, 3], keep[:, 4] = True, False
    keep[:, 5] = np.arange(9) == 2
    correct = rng.random(keep.shape) < 0.4 + 0.4 * keep
    got = memorization(correct, keep)
    for n in range(40):
        score, se = oracles.memorization(correct.tolist(), keep.tolist(), n)
        np.testing.assert_allclose([got.score_N[n], got.se_N[n]], [score, se], atol=1e-12)
    assert np.isnan(got.score_N[3:5]).all()
    assert np.isfinite(got.score_N[5])
    assert math.isnan(got.se_N[5])
    assert (got.n_in_N + got.n_out_N == 9).all()


def test_the_standard_error_is_that_of_repeated_studies():
    rng = np.random.default_rng(1)
    keep = np.repeat(paired(rng, 20, 1), 40_000, axis=1)
    correct = rng.random(keep.shape) < np.where(keep, 0.9, 0.3)
    got = memorization(correct, keep)
    assert got.score_N.mean() == pytest.approx(0.6, abs=0.005)
    assert np.sqrt((got.se_N**2).mean()) == pytest.approx(got.score_N.std(), rel=0.02)


def test_influence_on_the_training_sample_itself_is_its_memorization():
    rng = np.random.default_rng(2)
    keep = bernoulli(rng, 12, 15)
    correct = rng.random(keep.shape) < 0.6
    score, se = influence(correct, keep)
    own = memorization(correct, keep)
    np.testing.assert_allclose(np.diagonal(score), own.score_N)
    np.testing.assert_allclose(np.diagonal(se), own.se_N)
    some, _ = influence(correct, keep, samples=[4, 2])
    np.testing.assert_array_equal(some, score[[4, 2]])


def test_exposure_of_a_canary_by_rank_among_its_own_kind():
    phi = np.array([[5.0, 1.0, 2.0, 3.0, 9.0, 8.0, 5.0]])
    keep = np.array([[True, False, False, False, False, True, False]])
    kind = np.array([1, 1, 1, 1, 2, 2, 0])
    got = exposure(phi, keep, kind)
    assert got[0, 0] == math.log2(4)
    assert got[0, 5] == math.log2(2) - math.log2(2)
    assert np.isnan(got[0, [1, 2, 3, 4, 6]]).all()
    tied = exposure(np.array([[1.0, 1.0, 1.0, 0.0]]), keep[:, :4], np.ones(4, int))
    assert tied[0, 0] == math.log2(4) - math.log2(2)


@pytest.mark.parametrize("block", [1, 1 << 22])
def test_vulnerability_agrees_with_all_pairs(block, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", block)
    rng = np.random.default_rng(3)
    keep = bernoulli(rng, 11, 30)
    keep[:, 2] = False
    phi = rng.integers(0, 4, keep.shape).astype(float)
    got = vulnerability(ScoreMatrix(scores_MNQ=phi, keep_MN=keep))
    want = [oracles.vulnerability(phi.tolist(), keep.tolist(), n) for n in range(30)]
    np.testing.assert_allclose(got, want)
    assert math.isnan(got[2])


def test_vulnerability_is_one_half_without_signal_and_leaves_out_what_is_not_finite():
    matrix = study(4, "paired", 16, 4000, gap=0.0)
    got = vulnerability(matrix)
    assert abs(got.mean() - 0.5) < 4 * got.std() / math.sqrt(4000)
    scores = matrix.scores_MNQ.copy()
    scores[3] = np.nan
    rest = [m for m in range(16) if m != 3]
    want = vulnerability(matrix, rest)
    dirty = ScoreMatrix(scores_MNQ=scores, keep_MN=matrix.keep_MN)
    np.testing.assert_array_equal(vulnerability(dirty), want)


def test_vulnerability_repeats_between_halves_where_samples_differ():
    rng = np.random.default_rng(5)
    keep = paired(rng, 64, 500)
    gap = rng.exponential(2.0, 500)
    scores = rng.normal(size=(64, 500)) + gap * keep
    halves, whole = vulnerability_stability(ScoreMatrix(scores_MNQ=scores, keep_MN=keep))
    assert halves > 0.7
    assert whole == pytest.approx(2 * halves / (1 + halves))
    noise = rng.normal(size=(64, 500))
    none, _ = vulnerability_stability(ScoreMatrix(scores_MNQ=noise, keep_MN=keep))
    assert abs(none) < 0.15


def test_bad_correctness_is_refused():
    keep = np.zeros((3, 4), dtype=bool)
    with pytest.raises(ValueError, match="outside 0 to 1"):
        memorization(np.full((3, 4), 2.0), keep)
    with pytest.raises(ValueError, match="expected 3 models"):
        memorization(np.zeros((2, 4)), keep)
    with pytest.raises(ValueError, match="disagree in shape"):
        memorization(np.zeros((3, 5)), keep)


@pytest.mark.parametrize("design", DESIGNS)
def test_memorization_without_a_target_is_a_loop_over_the_models_that_stay(design):
    matrix = study(5, design, 10, 40)
    correct = np.random.default_rng(0).random((10, 40)) < 0.5
    plan = plan_exclusion(matrix.keep_MN, matrix.design)
    models = [m for m in range(10) if m != 3]
    got = memorization_without(correct, matrix.keep_MN, [0, 7], models=models, plan=plan)
    alive = np.isin(np.arange(10), models)
    counts = plan.counts(np.array([0, 7]), alive)
    for row, target, (n_in, n_out) in zip(got, (0, 7), counts, strict=True):
        companion = plan.companions(target, alive)
        for n in range(40):
            stay = [m for m in models if m not in (target, companion[n])]
            inside = [correct[m, n] for m in stay if matrix.keep_MN[m, n]]
            outside = [correct[m, n] for m in stay if not matrix.keep_MN[m, n]]
            assert (n_in[n], n_out[n]) == (len(inside), len(outside))
            if inside and outside:
                assert row[n] == pytest.approx(np.mean(inside) - np.mean(outside))
            else:
                assert np.isnan(row[n])


@pytest.mark.parametrize("design", DESIGNS)
def test_deciles_of_memorization_leak_nothing_only_without_the_target(design):
    """Where nothing leaks, the top tenth by everybody's memorization looks as if it did."""
    honest, naive = [], []
    for seed in range(60):
        matrix = study(seed, design, 8, 200, gap=0.0)
        phi = matrix.scores_MNQ[:, :, 0]
        correct = phi > np.median(phi, axis=0)
        everybody = deciles(memorization(correct, matrix.keep_MN).score_N)["decile_10"]
        apart = memorization_without(correct, matrix.keep_MN, np.arange(8))
        for t in range(8):
            own = deciles(apart[t])["decile_10"]
            for group, values in ((everybody, naive), (own, honest)):
                if group.any():
                    values.append(auc(phi[t, group], matrix.keep_MN[t, group]))
    honest, naive = np.array(honest), np.array(naive)
    honest, naive = honest[~np.isnan(honest)], naive[~np.isnan(naive)]
    assert abs(honest.mean() - 0.5) < 3 * honest.std() / np.sqrt(honest.size)
    assert naive.mean() > 0.6
