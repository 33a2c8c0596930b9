"""Every net learns real images with every norm, above all without batch norm."""

import numpy as np
import pytest
from small_studies import CELLS, digits_data, refs, study_of

from engine import train
from engine.plan import MixTable, StudyData
from engine.study import Arm, Mix, Train

RATES = {"densenet": 0.02, "resnet9": 0.02}
CLEAN = {"clean": Mix()}
IN_THE_TIER = ("lenet", "conv4")


def learn(study, data, models):
    results = train.run_stack(
        study, refs("arm", range(models), "clean"), data, "cpu", lambda epoch: None
    )
    losses = np.array([result.arrays["train_loss_E"] for result in results])
    accuracy = np.array([result.arrays["population_correct_Z"].mean() for result in results])
    return losses, accuracy


@pytest.mark.parametrize(
    ("net", "norm"),
    [
        pytest.param(n, norm, marks=[] if n in IN_THE_TIER else [pytest.mark.slow])
        for n, norm in CELLS
    ],
)
def test_digits_are_learnt_in_a_few_epochs(net, norm):
    recipe = Train(epochs=10, batch=16, lr=RATES.get(net, 0.05), warmup=1.0)
    study = study_of({"arm": Arm(net=net, norm=norm)}, recipe, mixes=CLEAN, models=2)
    losses, accuracy = learn(study, digits_data(study, samples=800, population=300), 2)
    assert (losses[:, -1] < 0.1 * np.log(10)).all(), losses
    assert (accuracy > 0.88).all(), accuracy


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["batch", "none", "group", "affine"])
def test_the_pilots_lenet_learns_fashion(norm, real_data):
    with np.load(real_data("fashion_mnist")) as file:
        images, labels = file["train_images"][:6000], file["train_labels"][:6000].astype(np.int64)
    images = images if images.ndim == 4 else images[..., None]
    recipe = Train(epochs=10, batch=64, lr=0.05)
    study = study_of({"arm": Arm(net="lenet", norm=norm)}, recipe, mixes=CLEAN, models=2)
    keep_MN = np.arange(4000) % 2 == np.arange(2)[:, None]
    table = MixTable(
        label_N=labels[:4000],
        true_label_N=labels[:4000],
        kind_N=np.zeros(4000, dtype=np.uint8),
        image_N=np.arange(4000),
        keep_MN=keep_MN,
    )
    pool = images[:4000] / 255
    data = StudyData(
        images_RHWC=images,
        population_rows_Z=np.arange(4000, 6000),
        population_labels_Z=labels[4000:],
        tables={"clean": table},
        classes=10,
        mean_C=tuple(pool.mean((0, 1, 2)).tolist()),
        std_C=tuple(pool.std((0, 1, 2)).tolist()),
    )
    losses, accuracy = learn(study, data, 2)
    assert (losses[:, -1] < 0.5).all(), losses
    assert (accuracy > 0.79).all(), accuracy
