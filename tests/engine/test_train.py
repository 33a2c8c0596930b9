"""Stacked training: equal to the oracle, independent of the stack, and able to learn."""

import numpy as np
import pytest
import tolerances
import torch
from small_studies import CELLS, LARGE, digits_data, refs, study_of

from engine import schedule, train
from engine.sequential import train_model
from engine.study import Arm, Membership, Penalty, Query, Train

STEPS = 20


def cells(slow):
    """All nets and norms, the given nets on request only."""
    marked = pytest.mark.slow
    return [pytest.param(n, norm, marks=[marked] if n in slow else []) for n, norm in CELLS]


def quiet(epoch):
    """Progress that nobody watches."""


def arm_of(net, norm):
    penalty = Penalty(form="hinge", lambda_=0.01, tau=0.5) if norm == "batch" else None
    return Arm(net=net, norm=norm, penalty=penalty)


def twenty_steps(net, norm, precision="float32", **changed):
    """A study of 20 steps: five epochs of four batches, augmented, on coloured digits.

    Large nets take 16x16 images: on 8x8 ones their last batch norms see four numbers a channel,
    which magnifies rounding without bounds.
    """
    scale, lr = (2, 0.02) if net in LARGE else (1, 0.05)
    recipe = Train(
        epochs=5, batch=4, lr=lr, warmup=1.0, crop=1, flip=True, precision=precision, **changed
    )
    study = study_of({"arm": arm_of(net, norm)}, recipe)
    return study, digits_data(study, samples=34, population=10, scale=scale, channels=3)


def losses_of(study, data, ids):
    """(M, 20) training losses by the stacked trainer."""
    these = refs("arm", ids)
    dtype = torch.float64 if study.train.precision == "float64" else torch.float32
    skeleton, state = train.start(study, these, data)
    state = state.to("cpu", dtype)
    lessons = train.Lessons(study, these, data, train.signals.pictures(data, "cpu", dtype))
    descent = train.Descent(study, these, skeleton.train(), state, lessons.steps)
    found = [descent.step(*pair) for epoch in range(5) for pair in lessons.epoch(epoch)]
    return torch.stack(found).double().mean(2).T.numpy()


@pytest.mark.parametrize(("net", "norm"), cells(LARGE))
def test_twenty_steps_equal_the_oracle_in_float64(net, norm):
    study, data = twenty_steps(net, norm, "float64")
    ids = [1, 4]
    stacked = losses_of(study, data, ids)
    assert stacked.shape == (2, STEPS)
    for row, ref in zip(stacked, refs("arm", ids), strict=True):
        _, alone = train_model(study, ref, data)
        error = np.linalg.norm(row - alone) / np.linalg.norm(alone)
        assert error < tolerances.FLOAT64, ref.model_id


@pytest.mark.parametrize(("net", "norm"), cells((*LARGE, "resnet20", "densenet")))
def test_twenty_steps_in_float32_are_as_near_as_plain_torch(net, norm):
    ids = [0, 1, 2, 3, 4]
    exact_study, data = twenty_steps(net, norm, "float64")
    study, _ = twenty_steps(net, norm)
    truth = np.array([train_model(exact_study, ref, data)[1] for ref in refs("arm", ids)])
    scale = np.linalg.norm(truth, axis=1)
    torchs = [
        [train_model(study, ref, data, channels_last=last)[1] for ref in refs("arm", ids)]
        for last in (False, True)
    ]
    own = np.linalg.norm(np.array(torchs) - truth, axis=2) / scale
    error = np.linalg.norm(losses_of(study, data, ids) - truth, axis=1) / scale
    assert (error <= tolerances.FLOAT32_FACTOR * own.max()).all(), (error, own)


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize(
    "changed", [{"nesterov": True}, {"momentum": 0.0, "schedule": "constant"}, {"cutout": 4}]
)
def test_optimiser_and_augmentation_options_equal_the_oracle(changed, precision):
    study, data = twenty_steps("resnet8", "fixup", precision, **changed)
    _, alone = train_model(study, refs("arm", [2])[0], data)
    tolerance = tolerances.FLOAT64 if precision == "float64" else 1e-4
    np.testing.assert_allclose(losses_of(study, data, [2])[0], alone, rtol=tolerance)


def small_run(net="lenet", norm="batch", models=64, mixes=None):
    recipe = Train(epochs=2, batch=11, lr=0.05, crop=1, cutout=2)
    query = Query(views=3, keep_epochs=(1,))
    study = study_of({"arm": arm_of(net, norm)}, recipe, models=models, query=query)
    return study, digits_data(study, samples=54, population=37)


SMALL_NETS = [("lenet", "batch"), ("lenet", "none"), ("conv4", "group"), ("resnet8", "fixup")]


@pytest.mark.parametrize(("net", "norm"), SMALL_NETS)
def test_exported_arrays_do_not_depend_on_the_stack(net, norm):
    study, data = small_run(net, norm)
    ids = list(range(32))
    whole = train.run_stack(study, refs("arm", ids), data, "cpu", quiet)
    permuted = [int(i) for i in np.random.default_rng(1).permutation(32)]
    stacks = [[5], [31], [3, 1, 31, 5], permuted[:8], permuted]
    for stack in stacks:
        for result in train.run_stack(study, refs("arm", stack), data, "cpu", quiet):
            same(result, whole[result.ref.model_id], stack)


@pytest.mark.parametrize(("net", "norm"), cells(LARGE))
def test_exported_arrays_of_every_net_do_not_depend_on_the_stack(net, norm):
    study, data = small_run(net, norm)
    whole = train.run_stack(study, refs("arm", [0, 1, 2]), data, "cpu", quiet)
    for result in train.run_stack(study, refs("arm", [2]), data, "cpu", quiet):
        same(result, whole[2], "alone")


def same(one, other, where):
    assert one.arrays.keys() == other.arrays.keys()
    assert one.ref == other.ref
    for name, value in one.arrays.items():
        assert value.dtype == other.arrays[name].dtype
        np.testing.assert_array_equal(value, other.arrays[name], err_msg=f"{name} in {where}")


def test_a_run_exports_every_array_with_its_shape():
    study, data = small_run()
    (result,) = train.run_stack(study, refs("arm", [4]), data, "cpu", quiet)
    shapes = {name: value.shape for name, value in result.arrays.items()}
    assert shapes == {
        "phi_NQ": (54, 3),
        "correct_N": (54,),
        "population_phi_ZQ": (37, 3),
        "population_correct_Z": (37,),
        "kept_phi_ENQ": (1, 54, 3),
        "kept_population_phi_EZQ": (1, 37, 3),
        "curve_loss_EG": (2, 5),
        "curve_accuracy_EG": (2, 5),
        "train_loss_E": (2,),
        "gamma_EL": (2, 2),
        "sigma_EL": (2, 2),
        "gamma_over_sigma_EL": (2, 2),
        "weight_norm_EL": (2, 2),
        "diverged": (),
    }
    assert not result.arrays["diverged"]


def test_a_diverged_model_is_marked_and_leaves_the_others_alone(caplog):
    study, data = small_run(norm="none")
    arms = {"arm": study.arms["arm"], "wild": Arm(net="lenet", norm="none", lr=1e4)}
    study = study_of(arms, study.train)
    these = [*refs("arm", [0]), *refs("wild", [1]), *refs("arm", [2])]
    first, wild, second = train.run_stack(study, these, data, "cpu", quiet)
    assert wild.arrays["diverged"]
    assert "flip10/wild model 1 diverged" in caplog.text
    assert np.isnan(wild.arrays["phi_NQ"]).any()
    assert not wild.arrays["correct_N"][np.isnan(wild.arrays["phi_NQ"][:, 0])].any()
    for result in (first, second):
        (alone,) = train.run_stack(study, [result.ref], data, "cpu", quiet)
        same(result, alone, "beside a diverged model")


def test_arms_that_differ_in_scalars_share_a_stack():
    penalties = {f"l{i}": Penalty(form="square", lambda_=v) for i, v in enumerate((0.0, 0.5))}
    arms = {n: Arm(net="lenet", norm="batch", penalty=p) for n, p in penalties.items()}
    arms["slow"] = Arm(
        net="lenet", norm="batch", penalty=penalties["l0"], lr=0.001, weight_decay=0.1
    )
    study = study_of(arms, Train(epochs=3, batch=8, lr=0.05))
    data = digits_data(study, samples=80, population=20)
    these = [ref for name in arms for ref in refs(name, [6])]
    together = train.run_stack(study, these, data, "cpu", quiet)
    for result in together:
        (alone,) = train.run_stack(study, [result.ref], data, "cpu", quiet)
        same(result, alone, "a stack of three arms")
    free, penalised, slow = (result.arrays for result in together)
    ratio = "gamma_over_sigma_EL"
    assert (penalised[ratio][-1] < free[ratio][-1]).all()
    assert slow["train_loss_E"][-1] > free["train_loss_E"][-1]


def test_different_architectures_are_refused():
    study = study_of(
        {"bn": Arm(net="lenet", norm="batch"), "no": Arm(net="lenet", norm="none")},
        Train(epochs=1, batch=4, lr=0.1),
    )
    data = digits_data(study, samples=40, population=10)
    with pytest.raises(ValueError, match="one architecture, these models are of 2"):
        train.run_stack(study, [*refs("bn", [0]), *refs("no", [0])], data, "cpu", quiet)


def test_a_batch_larger_than_the_members_is_refused():
    study = study_of({"arm": arm_of("lenet", "none")}, Train(epochs=1, batch=64, lr=0.1))
    data = digits_data(study, samples=100, population=10)
    with pytest.raises(ValueError, match="batch is 64, but a model has 50 members"):
        train.run_stack(study, refs("arm", [0]), data, "cpu", quiet)


def test_a_model_sees_its_own_members_once_an_epoch_in_a_new_order():
    study, data = small_run()
    ref = refs("arm", [3])[0]
    members = np.flatnonzero(data.tables["flip10"].keep_MN[3])
    first, second = (schedule.epoch_batches(study.seed, 3, e, members, 22) for e in (0, 1))
    assert len(set(first)) == len(set(second)) == 22
    assert set(first) | set(second) <= set(members)
    assert list(first) != list(second)
    assert ref.model_id == 3


def test_too_few_members_of_a_bernoulli_mask_start_over():
    seen = schedule.epoch_batches(0, 0, 0, np.array([5, 6, 7]), 8)
    assert len(seen) == 8
    assert sorted(seen[:3]) == [5, 6, 7]
    np.testing.assert_array_equal(seen[3:6], seen[:3])
    study = study_of({"arm": arm_of("lenet", "none")}, Train(epochs=1, batch=8, lr=0.1))
    bernoulli = Membership(design="bernoulli", pkeep=0.3)
    assert schedule.steps_per_epoch(study, 100) == 6
    object.__setattr__(study, "membership", bernoulli)
    assert schedule.steps_per_epoch(study, 100) == 3


@pytest.mark.parametrize("kind", ["cosine", "one_cycle", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 2.0])
def test_rates_rise_over_the_warm_up_and_fall_to_nearly_nothing(kind, warmup):
    recipe = Train(epochs=8, batch=2, lr=1.0, schedule=kind, warmup=warmup)
    rates = np.array([schedule.relative_rate(recipe, step, 10) for step in range(80)])
    assert rates.max() == 1.0
    assert (rates > 0).all()
    peak = int(rates.argmax())
    rising = 20 if kind == "one_cycle" or warmup else 0
    assert peak == max(rising - 1, 0)
    assert (np.diff(rates[: peak + 1]) > 0).all()
    if kind == "constant":
        assert (rates[peak:] == 1).all()
    else:
        assert (np.diff(rates[peak + 1 :]) < 0).all()
        assert rates[-1] < 0.02
