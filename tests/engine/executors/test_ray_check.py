"""Only what a worker should send is stored."""

import dataclasses

import numpy as np
import pytest

from engine.executors.base import Job
from engine.executors.ray_check import checked
from engine.plan import MixTable, ModelRef, ModelResult, StudyData
from engine.study import Arm, Data, Mix, Study, Train

STACK = tuple(ModelRef(mix="clean", arm="bn", model_id=m) for m in range(2))


@pytest.fixture
def job():
    study = Study(
        name="s",
        question="?",
        data=Data(name="digits"),
        mixes={"clean": Mix()},
        arms={"bn": Arm(net="lenet", norm="batch")},
        models=2,
        train=Train(epochs=3, batch=2, lr=0.1),
    )
    table = MixTable(
        label_N=np.zeros(5, np.int64),
        true_label_N=np.zeros(5, np.int64),
        kind_N=np.zeros(5, np.uint8),
        image_N=np.arange(5),
        keep_MN=np.ones((2, 5), bool),
    )
    data = StudyData(
        images_RHWC=np.zeros((7, 8, 8, 1), np.uint8),
        population_rows_Z=np.arange(5, 7),
        population_labels_Z=np.zeros(2, np.int64),
        tables={"clean": table},
        classes=10,
        mean_C=(0.5,),
        std_C=(0.5,),
    )
    return Job(study=study, data=data, device="cpu", kernel_plan={})


def result(ref, **changed):
    arrays = {
        "phi_NQ": np.zeros((5, 1), np.float32),
        "population_phi_ZQ": np.zeros((2, 1), np.float32),
        "curve_loss_EG": np.zeros((3, 5), np.float32),
        "diverged": np.array(False),
        **changed,
    }
    return ModelResult(ref=ref, arrays=arrays, seconds=1.0)


def test_good_results_pass_unchanged(job):
    sent = [result(ref) for ref in STACK]
    passed = checked(sent, STACK, job)
    assert [r.ref for r in passed] == list(STACK)
    for before, after in zip(sent, passed, strict=True):
        for name, values in before.arrays.items():
            np.testing.assert_array_equal(after.arrays[name], values)


class Sneaky(np.ndarray):
    pass


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"phi_NQ": np.zeros((4, 1), np.float32)}, "phi_NQ has shape"),
        ({"phi_NQ": np.zeros(5, np.float32)}, "phi_NQ has shape"),
        ({"phi_NQ": np.array([[None]] * 5)}, "no array of numbers"),
        ({"phi_NQ": [[0.0]] * 5}, "no array of numbers"),
        ({"phi_NQ": np.zeros((5, 1), ">f4")}, "byte order"),
        ({"phi_NQ": np.zeros((5, 1), np.float32).view(Sneaky)}, "no array of numbers"),
        ({"phi_NQ": np.zeros((1, 5), np.float32).repeat(2, 1)[:, ::2].T}, "not contiguous"),
        ({"../phi_NQ": np.zeros((5, 1), np.float32)}, "the name"),
        ({"kept_phi_ENQ": np.zeros((3, 5, 1), np.float32)}, "kept_phi_ENQ has shape"),
        ({"curve_loss_EG": np.zeros((3, 4), np.float32)}, "different names or shapes"),
    ],
)
def test_anything_else_is_refused(job, changed, words):
    with pytest.raises(ValueError, match=words):
        checked([result(STACK[0]), result(STACK[1], **changed)], STACK, job)


def test_results_of_other_models_or_of_another_number_are_refused(job):
    good = [result(ref) for ref in STACK]
    for sent in (good[::-1], good[:1], tuple(good), None):
        with pytest.raises(ValueError, match="expected"):
            checked(sent, STACK, job)
    with pytest.raises(ValueError, match="seconds"):
        checked([good[0], dataclasses.replace(good[1], seconds="1")], STACK, job)
