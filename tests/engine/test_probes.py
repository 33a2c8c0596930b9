"""Probes: which images, which groups, and what is read from batch norm layers."""

import numpy as np
import pytest
import torch
from small_studies import digits_data, refs, study_of

from engine import probes, signals, stack, train
from engine.models import build
from engine.probes import GROUPS, batch_norms, group_masks, probe_set
from engine.study import Arm, Mix, Train

BRIEF = Train(epochs=2, batch=16, lr=0.05)
ARMS = {"bn": Arm(net="lenet", norm="batch"), "nobn": Arm(net="lenet", norm="none")}


def test_probes_are_all_outliers_as_many_clean_samples_and_the_population():
    study = study_of(ARMS, BRIEF)
    data = digits_data(study, samples=200, population=40)
    table = data.tables["flip10"]
    chosen = probe_set(study.seed, table, data)
    pool = chosen.sample_P[chosen.sample_P >= 0]
    assert len(set(pool)) == len(pool) == 40
    assert (table.kind_N[pool] != 0).sum() == (table.kind_N != 0).sum() == 20
    assert len(chosen.sample_P) == 40 + 40
    np.testing.assert_array_equal(chosen.label_P[:40], table.label_N[pool])
    np.testing.assert_array_equal(chosen.row_P[40:], data.population_rows_Z)
    masks_GP = group_masks(chosen, table.kind_N, table.keep_MN[3])
    assert (masks_GP.sum(0) == 1).all()
    assert masks_GP[GROUPS.index("outlier_in")].sum() == 10


def test_a_clean_mix_has_clean_probes_and_empty_outlier_groups():
    study = study_of(ARMS, BRIEF, mixes={"clean": Mix()})
    data = digits_data(study, samples=700, population=40)
    chosen = probe_set(study.seed, data.tables["clean"], data)
    assert (chosen.sample_P >= 0).sum() == 500
    result = train.run_stack(study, refs("nobn", [0], "clean"), data, "cpu", lambda epoch: None)[0]
    accuracy_EG = result.arrays["curve_accuracy_EG"]
    assert accuracy_EG.shape == (2, len(GROUPS))
    assert np.isnan(accuracy_EG[:, 2:4]).all()
    assert not np.isnan(accuracy_EG[:, [0, 1, 4]]).any()


def test_the_last_curves_agree_with_the_scores_of_the_trained_model():
    study = study_of(ARMS, BRIEF)
    data = digits_data(study, samples=200, population=40)
    table = data.tables["flip10"]
    for result in train.run_stack(study, refs("bn", [0, 3]), data, "cpu", lambda epoch: None):
        keep_N = table.keep_MN[result.ref.model_id]
        chosen = probe_set(study.seed, table, data)
        masks_GP = group_masks(chosen, table.kind_N, keep_N)
        for g, mask in enumerate(masks_GP[:4]):
            samples = chosen.sample_P[mask]
            loss = signals.loss(result.arrays["phi_NQ"][samples, 0]).mean()
            assert result.arrays["curve_loss_EG"][-1, g] == pytest.approx(loss, rel=1e-4)
            right = result.arrays["correct_N"][samples].mean()
            assert result.arrays["curve_accuracy_EG"][-1, g] == pytest.approx(right)
        right = result.arrays["population_correct_Z"].mean()
        assert result.arrays["curve_accuracy_EG"][-1, 4] == pytest.approx(right)


@pytest.mark.parametrize("freeze_gamma", [False, True])
def test_gamma_sigma_and_weights_are_medians_over_channels(freeze_gamma):
    def make():
        return build(
            "lenet", norm="batch", classes=10, channels=1, size=8, freeze_gamma=freeze_gamma
        )

    skeleton, state = stack.build_stack(make, 0, [0, 1])
    if not freeze_gamma:
        state.params["block1.norm.weight"][1] = torch.tensor([-3.0, 2, 1, 0, -5, 4])
    state.buffers["block1.norm.running_var"][1] = torch.tensor([1.0, 4, 9, 16, 25, 36])
    found = batch_norms(skeleton, state)
    gamma = np.ones(6) if freeze_gamma else np.array([3.0, 2, 1, 0, 5, 4])
    sigma = np.arange(1, 7)
    assert found["gamma_EL"][1, 0] == np.median(gamma)
    assert found["sigma_EL"][1, 0] == pytest.approx(3.5, rel=1e-4)
    assert found["gamma_over_sigma_EL"][1, 0] == pytest.approx(np.median(gamma / sigma), rel=1e-4)
    weight = state.params["block2.conv.weight"][0]
    assert found["weight_norm_EL"][0, 1] == pytest.approx(weight.norm().item(), rel=1e-6)
    plain, state = stack.build_stack(lambda: torch.nn.Linear(2, 2), 0, [0])
    assert probes.batch_norms(plain, state) == {}
