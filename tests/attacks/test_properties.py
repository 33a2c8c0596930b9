"""What must hold for any scores and masks."""

import numpy as np
from designs import DESIGNS, study
from hypothesis import given, settings
from hypothesis import strategies as st

from attacks.lira import LiraParameters, lira
from attacks.metrics import auc, tpr_at_fpr
from attacks.population import Population
from attacks.rmia import RmiaParameters, rmia
from attacks.threshold import attack_r, calibrated
from attacks.types import ScoreMatrix

PARAMETERS = [
    LiraParameters(online=online, variance=variance, centre=centre)
    for online in (True, False)
    for variance in ("pooled", "per_example", "shrunk", "tf_fixed")
    for centre in ("mean", "median")
]
designs = st.sampled_from(sorted(DESIGNS))
parameters = st.sampled_from(PARAMETERS)
seeds = st.integers(0, 10_000)
ranked = st.lists(st.tuples(st.integers(-50, 50), st.booleans()), min_size=4, max_size=60).filter(
    lambda rows: 0 < sum(y for _, y in rows) < len(rows)
)
increasing = st.sampled_from(
    [
        lambda s: 3 * s + 7,
        lambda s: s**3,
        lambda s: np.exp(s / 8),
        np.arctan,
        lambda s: np.sign(s) * np.sqrt(np.abs(s)),
    ]
)


def remade(matrix, scores, keep=None):
    kept = matrix.keep_MN if keep is None else keep
    return ScoreMatrix(scores_MNQ=scores, keep_MN=kept, design=matrix.design)


def same(first, second):
    np.testing.assert_allclose(first.scores_TN, second.scores_TN, rtol=1e-6, atol=1e-7)
    assert np.array_equal(first.excluded_TN, second.excluded_TN)


@given(rows=ranked, transform=increasing, alpha=st.floats(0.01, 0.99))
def test_increasing_transforms_leave_the_metrics_alone(rows, transform, alpha):
    scores = np.array([float(s) for s, _ in rows])
    membership = np.array([y for _, y in rows])
    moved = transform(scores)
    assert auc(scores, membership) == auc(moved, membership)
    before, after = (tpr_at_fpr(s, membership, alpha) for s in (scores, moved))
    assert (before.refused, before.bound) == (after.refused, after.bound)
    np.testing.assert_equal(before.tpr, after.tpr)
    np.testing.assert_equal(before.realised_fpr, after.realised_fpr)


@given(rows=ranked)
def test_negated_scores_turn_the_auc_round(rows):
    scores = np.array([float(s) for s, _ in rows])
    membership = np.array([y for _, y in rows])
    assert abs(auc(scores, membership) + auc(-scores, membership) - 1) < 1e-12


@settings(max_examples=40, deadline=None)
@given(seed=seeds, design=designs, chosen=parameters, constant=st.floats(-1000, 1000))
def test_a_constant_added_to_all_phi_leaves_lira_alone(seed, design, chosen, constant):
    matrix = study(seed, design, 10, 25, 2)
    same(lira(matrix, chosen), lira(remade(matrix, matrix.scores_MNQ + constant), chosen))


@settings(max_examples=40, deadline=None)
@given(seed=seeds, design=designs, chosen=parameters, queries=st.integers(1, 3))
def test_duplicating_every_query_leaves_lira_alone(seed, design, chosen, queries):
    matrix = study(seed, design, 10, 25, queries)
    twice = remade(matrix, np.concatenate([matrix.scores_MNQ] * 2, axis=2))
    same(lira(matrix, chosen), lira(twice, chosen))


@settings(max_examples=40, deadline=None)
@given(seed=seeds, design=designs, chosen=parameters)
def test_permuting_samples_permutes_the_output(seed, design, chosen):
    matrix = study(seed, design, 10, 25, 2)
    order = np.random.default_rng(seed).permutation(25)
    moved = remade(matrix, matrix.scores_MNQ[:, order], matrix.keep_MN[:, order])
    z = np.random.default_rng(seed).normal(size=(10, 6, 2))
    for attack in (
        lambda m: lira(m, chosen),
        calibrated,
        attack_r,
        lambda m: rmia(m, Population(scores_MZQ=z), RmiaParameters(online=True)),
    ):
        before, after = attack(matrix), attack(moved)
        np.testing.assert_allclose(
            before.scores_TN[:, order], after.scores_TN, rtol=1e-9, atol=1e-9
        )


@settings(max_examples=25, deadline=None)
@given(seed=seeds, design=designs, chosen=parameters)
def test_blocks_of_samples_change_nothing(seed, design, chosen):
    import attacks.leave_out as module

    matrix = study(seed, design, 10, 1300, 1)
    whole = lira(matrix, chosen)
    before = module.Problem.blocks.__defaults__
    module.Problem.blocks.__defaults__ = (1,)
    try:
        blocks = lira(matrix, chosen)
    finally:
        module.Problem.blocks.__defaults__ = before
    np.testing.assert_allclose(whole.scores_TN, blocks.scores_TN, rtol=1e-9, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, design=designs, share=st.floats(0, 0.4))
def test_excluded_and_nan_are_the_same_entries_whatever_is_not_finite(seed, design, share):
    matrix = study(seed, design, 10, 25, 2)
    rng = np.random.default_rng(seed)
    scores = matrix.scores_MNQ.copy()
    bad = rng.random(scores.shape) < share
    scores[bad] = rng.choice([np.nan, np.inf, -np.inf], bad.sum())
    result = lira(remade(matrix, scores), LiraParameters(online=False))
    assert np.array_equal(np.isnan(result.scores_TN), result.excluded_TN > 0)
    assert np.array_equal(result.excluded_TN == 1, bad.any(axis=2))
