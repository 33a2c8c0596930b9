"""Who is left out: complements, the opposite side, nobody; the same under any reordering."""

import numpy as np
import pytest
from designs import balanced, bernoulli, paired

from attacks.exclusion import CHANCE, plan_exclusion


def test_paired_masks_leave_out_the_complement_wherever_it_stands():
    rng = np.random.default_rng(0)
    keep = paired(rng, 10, 50)
    order = rng.permutation(10)
    plan = plan_exclusion(keep[order])
    assert plan.design == "paired"
    for m, partner in enumerate(plan.partner_M.tolist()):
        assert np.array_equal(keep[order][partner], ~keep[order][m])


def test_an_odd_last_model_is_left_out_alone():
    plan = plan_exclusion(paired(np.random.default_rng(1), 9, 50))
    assert plan.design == "paired"
    assert plan.partner_M.tolist() == [1, 0, 3, 2, 5, 4, 7, 6, -1]
    assert not plan.opposite_M.any()
    assert sorted(plan.deletion_groups()) == [(0, 1), (2, 3), (4, 5), (6, 7), (8,)] or sorted(
        tuple(sorted(g)) for g in plan.deletion_groups()
    ) == [(0, 1), (2, 3), (4, 5), (6, 7), (8,)]


@pytest.mark.parametrize("pkeep", [0.5, 0.25])
def test_balanced_masks_leave_counts_that_do_not_depend_on_the_label(pkeep):
    keep = balanced(np.random.default_rng(2), 12, 400, pkeep)
    members = round(12 * pkeep)
    plan = plan_exclusion(keep, "auto", np.random.default_rng(3).normal(size=(12, 400, 1)))
    assert plan.design == "balanced"
    alive = np.ones(12, dtype=bool)
    for t in range(12):
        gone = plan.opposite(t, 0, 400, alive)
        assert (keep[gone, np.arange(400)] != keep[t]).all()
        left = keep.sum(axis=0) - keep[t] - keep[gone, np.arange(400)]
        assert (left == members - 1).all()
        used = np.delete(np.bincount(gone, minlength=12), t)
        assert used.sum() == 400
        # Uniform among the candidates: a chi-square of 10 degrees of freedom.
        assert ((used - 400 / 11) ** 2 / (400 / 11)).sum() < 40


def test_the_choice_of_the_opposite_model_follows_models_and_samples_when_they_move():
    rng = np.random.default_rng(3)
    keep = balanced(rng, 10, 300)
    scores = rng.normal(size=(10, 300, 2))
    alive = np.ones(10, dtype=bool)
    models, samples = rng.permutation(10), rng.permutation(300)
    moved = plan_exclusion(keep[models][:, samples], "auto", scores[models][:, samples])
    plan = plan_exclusion(keep, "auto", scores)
    for place, t in enumerate(models.tolist()):
        before = plan.opposite(t, 0, 300, alive)[samples]
        after = models[moved.opposite(place, 0, 300, alive)]
        assert np.array_equal(before, after)


def test_the_opposite_choice_is_made_among_models_alive_and_by_blocks_alike():
    keep = balanced(np.random.default_rng(4), 8, 100)
    plan = plan_exclusion(keep)
    alive = np.ones(8, dtype=bool)
    whole = plan.opposite(2, 0, 100, alive)
    parts = np.concatenate([plan.opposite(2, a, a + 25, alive) for a in range(0, 100, 25)])
    assert np.array_equal(whole, parts)
    alive[whole[0]] = False
    fewer = plan.opposite(2, 0, 100, alive)
    assert (fewer != whole[0]).all()
    stayed = whole != whole[0]
    assert np.array_equal(fewer[stayed], whole[stayed]), "a choice changed that need not"


def test_bernoulli_masks_leave_out_the_target_alone():
    plan = plan_exclusion(bernoulli(np.random.default_rng(5), 8, 100))
    assert plan.design == "bernoulli"
    assert (plan.partner_M == -1).all()
    assert sorted(plan.deletion_groups()) == [(m,) for m in range(8)]


def test_pairs_and_bernoulli_models_may_be_mixed():
    rng = np.random.default_rng(6)
    keep = np.concatenate([paired(rng, 6, 100), bernoulli(rng, 3, 100)])
    plan = plan_exclusion(keep)
    assert plan.design == "mixed"
    assert (plan.partner_M[:6] >= 0).all()
    assert (plan.partner_M[6:] == -1).all()
    assert not plan.opposite_M.any()


def test_balanced_masks_are_deleted_two_by_two_in_the_same_groups_however_ordered():
    rng = np.random.default_rng(7)
    keep = balanced(rng, 9, 200)
    groups = plan_exclusion(keep).deletion_groups()
    assert sorted(len(g) for g in groups) == [1, 2, 2, 2, 2]
    order = rng.permutation(9)
    moved = plan_exclusion(keep[order]).deletion_groups()
    assert [tuple(order[list(g)]) for g in moved] == list(groups)


def test_twins_of_one_mask_are_paired_one_to_one_and_stay_so_when_reordered():
    """Two pairs share their masks: scores decide who goes with whom, not positions."""
    rng = np.random.default_rng(8)
    row = rng.random(40) < 0.5
    keep = np.stack([row, ~row, row, ~row])
    scores = rng.normal(size=(4, 40, 1))
    plan = plan_exclusion(keep, "auto", scores)
    assert sorted(plan.partner_M.tolist()) == [0, 1, 2, 3]
    order = np.array([2, 3, 0, 1])
    moved = plan_exclusion(keep[order], "auto", scores[order])
    assert np.array_equal(order[moved.partner_M], plan.partner_M[order])


def test_a_stated_design_must_fit_the_mask():
    rng = np.random.default_rng(9)
    with pytest.raises(ValueError, match="not paired: 8 of 8 models have no complement"):
        plan_exclusion(bernoulli(rng, 8, 100), "paired")
    with pytest.raises(ValueError, match="not balanced: samples differ"):
        plan_exclusion(bernoulli(rng, 8, 100), "balanced")
    with pytest.raises(ValueError, match="unknown mask design 'halves': known are auto, paired"):
        plan_exclusion(bernoulli(rng, 8, 100), "halves")


@pytest.mark.parametrize(
    ("drawn", "found"), [(paired, "complements"), (balanced, "the same number of members")]
)
def test_coins_are_refused_for_masks_that_no_accident_explains(drawn, found):
    keep = drawn(np.random.default_rng(10), 8, CHANCE)
    with pytest.raises(ValueError, match=f"the mask is not bernoulli: it has {found}"):
        plan_exclusion(keep, "bernoulli")
    few = plan_exclusion(keep[:, : CHANCE - 1], "bernoulli")
    assert few.design == "bernoulli"
    assert (few.partner_M == -1).all()
    one = plan_exclusion(keep[:1], "bernoulli")
    assert one.design == "bernoulli"
