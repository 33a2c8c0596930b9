"""Keep masks and outliers: balance, complements, strata, nesting, growth, independence."""

import numpy as np
import pytest

from attacks.exclusion import plan_exclusion
from engine.membership import keep_mask, odd_one_out, without_complement
from engine.outliers import CLEAN, FLIPPED, OOD, sample_table
from engine.study import Membership, Mix

PAIRED = Membership()
LABELS = np.arange(400, dtype=np.int64) % 10


def strata(count=400, outliers=21):
    kinds = np.zeros(count, dtype=np.int64)
    kinds[::19][:outliers] = 1
    return kinds


@pytest.mark.parametrize("models", [2, 6, 8])
def test_paired_masks_are_complementary_and_exactly_balanced(models):
    keep_MN = keep_mask(PAIRED, 0, models, strata())
    assert (keep_MN[0::2] == ~keep_MN[1::2]).all()
    assert (keep_MN.sum(0) == models // 2).all()
    assert (keep_MN.sum(1) == 200).all()


def test_halves_are_stratified_by_kind_to_within_one():
    kinds = strata()
    keep_MN = keep_mask(PAIRED, 3, 20, kinds)
    for code in (0, 1):
        members = keep_MN[:, kinds == code].sum(1)
        assert np.abs(members - (kinds == code).sum() / 2).max() <= 0.5


def test_masks_grow_by_pairs_and_an_odd_last_model_keeps_its_half():
    small, large = (keep_mask(PAIRED, 1, models, strata()) for models in (5, 12))
    assert (large[:5] == small).all()
    assert (large[5] == ~small[4]).all()


@pytest.mark.parametrize("models", [8, 9])
def test_a_model_without_complement_counts_as_is_said(models):
    plan = plan_exclusion(keep_mask(PAIRED, 0, models, strata()), "paired")
    alone = without_complement("paired", models)
    assert np.flatnonzero(plan.partner_M < 0).tolist() == alone
    assert bool(odd_one_out("paired", models)) == bool(alone)
    assert [group for group in plan.deletion_groups() if len(group) == 1] == [(m,) for m in alone]
    for m in alone:  # scored from all others
        assert (plan.companions(m, np.ones(models, dtype=bool)) == -1).all()
    assert odd_one_out("bernoulli", models) == ""


def test_pairs_are_independent_draws():
    keep_MN = keep_mask(PAIRED, 0, 200, strata())[0::2]
    agreement = (keep_MN[:, None] == keep_MN[None]).mean(-1)
    off_diagonal = agreement[~np.eye(100, dtype=bool)]
    assert abs(off_diagonal.mean() - 0.5) < 0.005
    assert off_diagonal.max() < 0.65


def test_balanced_masks_keep_every_sample_in_half_of_the_models_without_complements():
    keep_MN = keep_mask(Membership(design="balanced"), 0, 8, strata())
    assert (keep_MN.sum(0) == 4).all()
    complements = (keep_MN[:, None] == ~keep_MN[None]).all(-1)
    assert not complements.any()
    with pytest.raises(ValueError, match="even number of models"):
        keep_mask(Membership(design="balanced"), 0, 7, strata())


def test_bernoulli_masks_have_their_rate_and_grow():
    design = Membership(design="bernoulli", pkeep=0.3)
    keep_MN = keep_mask(design, 0, 50, strata())
    assert abs(keep_MN.mean() - 0.3) < 4 * (0.3 * 0.7 / keep_MN.size) ** 0.5
    assert (keep_mask(design, 0, 9, strata()) == keep_MN[:9]).all()


def test_flips_are_always_wrong_uniform_and_nested():
    one, five = (
        sample_table(Mix(kind="flipped", share=share), 0, LABELS, 10) for share in (0.05, 0.25)
    )
    flipped = five.kind_N == FLIPPED
    assert flipped.sum() == 100
    assert (one.kind_N == FLIPPED).sum() == 20
    assert flipped[one.kind_N == FLIPPED].all()
    assert (one.label_N == five.label_N)[one.kind_N == FLIPPED].all()
    assert (five.label_N[flipped] != LABELS[flipped]).all()
    assert (five.label_N[~flipped] == LABELS[~flipped]).all()
    assert (five.true_label_N == LABELS).all()
    shifts = np.bincount((five.label_N - LABELS)[flipped] % 10, minlength=10)
    assert shifts[0] == 0
    assert (shifts[1:] > 0).all()


def test_ood_images_replace_and_keep_the_number_of_samples():
    table = sample_table(Mix(kind="ood", share=0.05, source="x"), 0, LABELS, 10, source_count=30)
    ood = table.kind_N == OOD
    assert ood.sum() == 20
    assert len(set(table.source_N[ood].tolist())) == 20
    assert table.source_N[ood].max() < 30
    assert (table.true_label_N[ood] == -1).all()
    assert (table.source_N[~ood] == np.arange(400)[~ood]).all()
    assert (table.kind_N[~ood] == CLEAN).all()
    with pytest.raises(ValueError, match="lower its share"):
        sample_table(Mix(kind="ood", share=0.05, source="x"), 0, LABELS, 10, source_count=19)
