"""The corners where public code gives NaN for everything, cuts samples, or leaks counts."""

import numpy as np
import pytest
from designs import paired, study

from attacks.lira import SPREAD_FLOOR, LiraParameters, lira
from attacks.metrics import auc
from attacks.population import Population
from attacks.rmia import RmiaParameters, rmia
from attacks.threshold import attack_p, attack_r, calibrated, loss
from attacks.types import Excluded, ScoreMatrix

VARIANCES = ("pooled", "per_example", "shrunk", "tf_fixed")


def matrix_of(scores, keep, design="auto"):
    return ScoreMatrix(scores_MNQ=scores, keep_MN=keep, design=design)


def all_attacks(matrix, population):
    yield "loss", lambda m, p: loss(m)
    yield "calibrated", lambda m, p: calibrated(m)
    yield "attack_p", attack_p
    yield "attack_r", lambda m, p: attack_r(m)
    yield "rmia_online", lambda m, p: rmia(m, p, RmiaParameters(online=True))
    yield "rmia_offline", lambda m, p: rmia(m, p)
    for variance in VARIANCES:
        for online in (True, False):
            parameters = LiraParameters(online=online, variance=variance)
            yield f"lira_{variance}_{online}", lambda m, p, c=parameters: lira(m, c)
    yield "lira_median", lambda m, p: lira(m, LiraParameters(centre="median"))


NAMES = [name for name, _ in all_attacks(None, None)]


def attack_named(name):
    return dict(all_attacks(None, None))[name]


def bernoulli_with(never, always):
    matrix = study(1, "bernoulli", 12, 60)
    keep = matrix.keep_MN.copy()
    keep[:, never], keep[:, always] = False, True
    return matrix_of(matrix.scores_MNQ, keep, "bernoulli")


@pytest.mark.parametrize("variance", VARIANCES)
def test_a_sample_never_in_or_never_out_is_excluded_alone(variance):
    matrix = bernoulli_with(never=3, always=8)
    online = lira(matrix, LiraParameters(variance=variance))
    assert (online.excluded_TN[:, 3] == Excluded.NO_IN).all()
    assert (online.excluded_TN[:, 8] == Excluded.NO_OUT).all()
    others = np.delete(online.scores_TN, [3, 8], axis=1)
    assert np.isfinite(others).mean() > 0.99
    offline = lira(matrix, LiraParameters(online=False, variance=variance))
    assert np.isfinite(offline.scores_TN[:, 3]).all(), "offline needs no IN model"
    assert (offline.excluded_TN[:, 8] == Excluded.NO_OUT).all()
    assert np.isnan(online.scores_TN).tolist() == (online.excluded_TN > 0).tolist()


def test_the_only_in_model_as_target_leaves_its_sample_out_for_itself_only():
    matrix = bernoulli_with(never=3, always=8)
    keep = matrix.keep_MN.copy()
    keep[5, 3] = True
    result = lira(matrix_of(matrix.scores_MNQ, keep, "bernoulli"))
    assert result.excluded_TN[5, 3] == Excluded.NO_IN
    assert (np.delete(result.excluded_TN[:, 3], 5) == 0).all()


def test_one_model_on_a_side_has_no_spread_of_its_own():
    matrix = bernoulli_with(never=3, always=8)
    keep = matrix.keep_MN.copy()
    keep[5, 3] = True
    lone = matrix_of(matrix.scores_MNQ, keep, "bernoulli")
    per_example = lira(lone, LiraParameters(variance="per_example"))
    assert (np.delete(per_example.excluded_TN[:, 3], 5) == Excluded.ONE_IN).all()
    assert np.isfinite(np.delete(lira(lone).scores_TN[:, 3], 5)).all(), "pooled borrows a spread"


@pytest.mark.parametrize("variance", VARIANCES)
@pytest.mark.parametrize("online", [True, False])
def test_spread_of_zero_has_a_floor(variance, online):
    matrix = study(2, "paired", 12, 30)
    scores = matrix.scores_MNQ.copy()
    scores[:, 4] = 1.25
    one = lira(matrix_of(scores, matrix.keep_MN), LiraParameters(online=online, variance=variance))
    assert np.isfinite(one.scores_TN).all()
    if not online:
        np.testing.assert_allclose(one.scores_TN[:, 4], np.log(0.5), atol=1e-6)
    elif variance in ("per_example", "tf_fixed"):
        np.testing.assert_allclose(one.scores_TN[:, 4], 0, atol=1e-6)
    flat = np.where(matrix.keep_MN, 2.0, 1.0)[:, :, None]
    every = lira(matrix_of(flat, matrix.keep_MN), LiraParameters(online=online, variance=variance))
    assert np.isfinite(every.scores_TN).all()
    assert auc(every.scores_TN, every.membership_TN) == 1.0
    if online and variance != "tf_fixed":
        np.testing.assert_allclose(
            np.abs(every.scores_TN), 0.5 / SPREAD_FLOOR**2, rtol=1e-6, err_msg="floor"
        )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", NAMES)
def test_a_score_that_is_not_finite_takes_out_itself_and_nothing_else(name, value):
    matrix = study(3, "paired", 12, 40, 2)
    z = np.random.default_rng(0).normal(size=(12, 9, 2))
    population = Population(scores_MZQ=z)
    scores = matrix.scores_MNQ.copy()
    scores[5, 7, 1] = value
    run = attack_named(name)
    clean, dirty = run(matrix, population), run(matrix_of(scores, matrix.keep_MN), population)
    limit = name.startswith("rmia") and np.isinf(value)
    if not limit:
        assert dirty.excluded_TN[5, 7] == Excluded.TARGET_NOT_FINITE
        dirty.excluded_TN[5, 7] = 0
    assert not dirty.excluded_TN.any()
    local = name in ("loss", "calibrated", "attack_p", "attack_r") or name.startswith("rmia")
    elsewhere = np.delete(np.arange(40), 7)
    if local or "per_example" in name:
        assert np.array_equal(clean.scores_TN[:, elsewhere], dirty.scores_TN[:, elsewhere])
    assert np.isfinite(dirty.scores_TN[:, elsewhere]).all()


def test_a_shadow_without_a_finite_score_is_left_out_of_that_sample_only():
    matrix = study(4, "bernoulli", 12, 30)
    scores = matrix.scores_MNQ.copy()
    scores[2, 6] = np.nan
    got = lira(
        matrix_of(scores, matrix.keep_MN, "bernoulli"), LiraParameters(variance="per_example")
    )
    rest = [m for m in range(12) if m != 2]
    want = lira(
        matrix_of(matrix.scores_MNQ[rest], matrix.keep_MN[rest], "bernoulli"),
        LiraParameters(variance="per_example"),
    )
    np.testing.assert_allclose(got.scores_TN[rest, 6], want.scores_TN[:, 6], rtol=1e-9)


def test_a_model_that_diverged_is_no_shadow_and_no_target():
    matrix = study(5, "paired", 12, 30)
    scores = matrix.scores_MNQ.copy()
    scores[3] = np.nan
    result = lira(matrix_of(scores, matrix.keep_MN))
    assert (result.excluded_TN[3] == Excluded.TARGET_NOT_FINITE).all()
    assert result.exclusions() == {"target_not_finite": 30}
    assert np.isfinite(np.delete(result.scores_TN, 3, axis=0)).all()


@pytest.mark.parametrize("variance", VARIANCES)
def test_one_absurd_score_costs_the_others_no_digits(variance):
    """Down-dating a sum that holds 1e9 would lose nine digits of the rest."""
    matrix = study(6, "paired", 12, 30)
    scores = matrix.scores_MNQ.copy()
    scores[4, 9] = 1e9
    rest = [m for m in range(12) if m not in (4, (4 ^ 1))]
    parameters = LiraParameters(variance=variance)
    for target in (4, 5):
        want = lira(
            matrix_of(scores[rest], matrix.keep_MN[rest]),
            parameters,
            matrix_of(scores[[target]], matrix.keep_MN[[target]]),
        )
        got = lira(matrix_of(scores, matrix.keep_MN), parameters, [target])
        known = np.arange(30) != 9
        np.testing.assert_allclose(
            got.scores_TN[0, known], want.scores_TN[0, known], rtol=1e-7, atol=1e-7
        )
        if target == 5:
            np.testing.assert_allclose(got.scores_TN[0, 9], want.scores_TN[0, 9], rtol=1e-7)


def test_saturated_logits_are_ranked():
    matrix = study(7, "paired", 16, 50)
    scores = matrix.scores_MNQ + 3000 * matrix.keep_MN[:, :, None]
    result = lira(matrix_of(scores, matrix.keep_MN))
    assert np.isfinite(result.scores_TN).all()
    assert auc(result.scores_TN, result.membership_TN) == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_all_scores_tied_give_half(name):
    keep = paired(np.random.default_rng(8), 12, 40)
    population = Population(scores_MZQ=np.full((12, 5), 0.7))
    result = attack_named(name)(matrix_of(np.full((12, 40), 0.7), keep), population)
    assert not result.excluded_TN.any()
    assert auc(result.scores_TN, result.membership_TN) == 0.5


@pytest.mark.parametrize("design", ["paired", "balanced", "bernoulli"])
@pytest.mark.parametrize("name", NAMES)
def test_models_in_another_order_change_no_bit(name, design):
    matrix = study(9, design, 14, 200, 2)
    rng = np.random.default_rng(10)
    z = rng.normal(size=(14, 20, 2))
    order = rng.permutation(14)
    run = attack_named(name)
    before = run(matrix, Population(scores_MZQ=z))
    moved = matrix_of(matrix.scores_MNQ[order], matrix.keep_MN[order], matrix.design)
    after = run(moved, Population(scores_MZQ=z[order]))
    assert np.array_equal(before.scores_TN[order], after.scores_TN, equal_nan=True)
    assert np.array_equal(before.excluded_TN[order], after.excluded_TN)


def test_reordering_models_that_share_a_mask_changes_no_bit():
    rng = np.random.default_rng(11)
    row = rng.random((2, 60)) < 0.5
    keep = np.concatenate([row, row, ~row, ~row, row, ~row])
    scores = rng.normal(size=(12, 60))
    order = rng.permutation(12)
    before, after = lira(matrix_of(scores, keep)), lira(matrix_of(scores[order], keep[order]))
    assert np.array_equal(before.scores_TN[order], after.scores_TN)


def test_unequal_out_counts_cut_nothing():
    """Nine tenths of the models hold sample 0, one tenth sample 1: both are scored."""
    rng = np.random.default_rng(12)
    keep = rng.random((40, 50)) < np.linspace(0.9, 0.1, 50)
    scores = rng.normal(size=(40, 50)) + 3 * keep
    result = lira(matrix_of(scores, keep, "bernoulli"), LiraParameters(variance="per_example"))
    assert (result.excluded_TN == 0).mean() > 0.99
    assert auc(result.scores_TN, result.membership_TN) > 0.9


@pytest.mark.parametrize(
    ("attack", "sentence"),
    [
        (lira, "LiRA needs two .* models .* 2 models give none: train at least six"),
        (calibrated, "needs OUT models .* 2 models give none: train at least four"),
        (attack_r, "needs OUT models .* 2 models give none: train at least four"),
    ],
)
def test_two_models_are_too_few_and_it_says_so(attack, sentence):
    matrix = study(13, "paired", 2, 40)
    with pytest.raises(ValueError, match=sentence):
        attack(matrix)


def test_four_models_suffice_for_rmia_and_not_for_lira():
    matrix = study(14, "paired", 4, 40)
    population = Population(scores_MZQ=np.random.default_rng(0).normal(size=(4, 9)))
    assert not rmia(matrix, population, RmiaParameters(online=True)).excluded_TN.any()
    for variance in VARIANCES:
        with pytest.raises(ValueError, match="at least six"):
            lira(matrix, LiraParameters(variance=variance))
    with pytest.raises(ValueError, match="tuning a needs six models: 4 are there"):
        rmia(matrix, population, RmiaParameters(a="tuned"))
    two = study(14, "paired", 2, 40)
    with pytest.raises(ValueError, match="train at least four"):
        rmia(two, Population(scores_MZQ=np.zeros((2, 9))))


LACKS = {
    "never in": (lambda k: k & False, lambda s, k: s, [True]),
    "never out": (lambda k: k | True, lambda s, k: s, [True, False]),
    "in infinite": (lambda k: k, lambda s, k: np.where(k, np.inf, s), [True]),
    "out unknown": (lambda k: k, lambda s, k: np.where(k, s, np.nan), [True, False]),
    "one out": (lambda k: np.arange(60) != np.arange(8)[:, None], lambda s, k: s, [True, False]),
}
TOLD = {
    "never in": "no model is IN on any sample: train each on a random half",
    "never out": "no model is OUT on any sample: train each on a random half",
    "in infinite": "no IN model has a finite score of any sample",
    "out unknown": "no OUT model has a finite score of any sample",
    "one out": "8 models give none: a sample has at most 1 OUT models with a finite score",
}


@pytest.mark.parametrize("variance", VARIANCES)
@pytest.mark.parametrize("what", LACKS)
def test_a_refusal_names_what_is_lacking_and_not_the_number_of_models(what, variance):
    masked, scored, modes = LACKS[what]
    if variance == "per_example" and what in ("in infinite", "out unknown"):
        modes = []  # No refusal: these targets' own scores are not finite, which excludes them.
    fine = study(17, "bernoulli", 8, 60)
    keep = masked(fine.keep_MN)
    scores = scored(fine.scores_MNQ[..., 0], keep)
    for online in modes:
        parameters = LiraParameters(online=online, variance=variance)
        with pytest.raises(ValueError) as caught:
            lira(matrix_of(scores, keep, "bernoulli"), parameters)
        told = str(caught.value)
        both = "8 models give none: a sample has at most"
        assert TOLD[what] in told or (what == "one out" and both in told)
        assert "at least six" not in told
    if what == "never out":
        with pytest.raises(ValueError, match=r"attack R needs OUT models .* no model is OUT"):
            attack_r(matrix_of(scores, keep, "bernoulli"))


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_scores_at_the_end_of_the_type_warn_of_nothing(name, queries):
    """Warnings are errors here: what overflows has its code instead."""
    fine = study(18, "paired", 8, 60, queries)
    signs = np.where(fine.keep_MN, 1.0, -1.0)[:, :, None]
    scores = np.broadcast_to(1.7e308 * signs, fine.scores_MNQ.shape).copy()
    population = Population(scores_MZQ=1e306 * study(19, "paired", 8, 9, queries).scores_MNQ)
    result = attack_named(name)(matrix_of(scores, fine.keep_MN), population)
    known = result.excluded_TN == 0
    assert np.isfinite(result.scores_TN[known]).all()
    codes = set(result.excluded_TN[~known].tolist())
    assert codes <= {int(Excluded.SCORE_NOT_FINITE)}


def test_six_paired_models_suffice_for_lira():
    for variance in VARIANCES:
        result = lira(study(15, "paired", 6, 40), LiraParameters(variance=variance))
        assert not result.excluded_TN.any()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"keep_MN": np.zeros((8, 19), bool)}, "expected the same models and samples"),
        ({"keep_MN": np.zeros((8, 20), int)}, "keep_MN is of type int64: expected bool"),
        (
            {"scores_MNQ": np.zeros((8, 20), int)},
            "scores_MNQ is of type int64: expected a floating",
        ),
        ({"scores_MNQ": np.zeros(8)}, "expected \\(models, samples, queries\\)"),
        ({"scores_MNQ": [[1.0]]}, "scores_MNQ is of type list"),
    ],
)
def test_bad_matrices_are_refused_in_one_sentence(change, sentence):
    good = {"scores_MNQ": np.zeros((8, 20)), "keep_MN": np.zeros((8, 20), bool)}
    with pytest.raises(ValueError, match=sentence) as caught:
        ScoreMatrix(**(good | change))
    assert "\n" not in str(caught.value)


def test_bad_targets_and_parameters_are_refused():
    matrix = study(17, "paired", 8, 20)
    with pytest.raises(ValueError, match="names model 8: expected indices from 0 to 7"):
        lira(matrix, targets=[0, 8])
    with pytest.raises(ValueError, match="names a model twice"):
        lira(matrix, targets=[1, 1])
    with pytest.raises(ValueError, match="unknown variance 'global': known are pooled"):
        LiraParameters(variance="global")
    with pytest.raises(ValueError, match="expected the same samples and queries"):
        lira(matrix, targets=study(17, "paired", 8, 21))
    with pytest.raises(ValueError, match="expected the same models and queries"):
        attack_p(matrix, Population(scores_MZQ=np.zeros((7, 5))))
    with pytest.raises(ValueError, match="gamma is 0"):
        RmiaParameters(gamma=0)
    with pytest.raises(ValueError, match="targets_TZQ"):
        attack_p(matrix, Population(scores_MZQ=np.zeros((8, 5))), targets=matrix)
