"""Small real studies for tests of training: digits, shrunken or coloured to what a net needs."""

from collections.abc import Mapping
from functools import cache

import numpy as np
from sklearn.datasets import load_digits

from engine.membership import keep_mask
from engine.models.catalog import NETS
from engine.outliers import sample_table
from engine.plan import MixTable, ModelRef, StudyData
from engine.study import Arm, Data, Mix, Query, Study, Train

CELLS = tuple((net, norm) for net, norms in NETS.items() for norm in norms)
LARGE = ("resnet18", "resnet9")
MIXES = {"flip10": Mix(kind="flipped", share=0.1)}


def study_of(
    arms: Mapping[str, Arm],
    train: Train,
    *,
    mixes: Mapping[str, Mix] = MIXES,
    models: int = 32,
    query: Query | None = None,
) -> Study:
    return Study(
        name="small",
        question="?",
        data=Data(name="digits"),
        mixes=mixes,
        arms=arms,
        models=models,
        train=train,
        seed=5,
        query=query or Query(),
    )


@cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    digits = load_digits()
    images = (digits.images * (255 / 16)).astype(np.uint8)[..., None]
    order = np.random.default_rng(0).permutation(len(images))
    return images[order], digits.target.astype(np.int64)[order]


def digits_data(
    study: Study, *, samples: int, population: int, scale: int = 1, channels: int = 1
) -> StudyData:
    """Digits, every pixel `scale` wide, in `channels` different shades."""
    images, labels = (part[: samples + population] for part in _digits())
    images = images.repeat(scale, 1).repeat(scale, 2)
    images = np.concatenate([images // (1 + c) for c in range(channels)], -1)
    tables = {}
    for name, mix in study.mixes.items():
        table = sample_table(mix, study.seed, labels[:samples], 10)
        keep_MN = keep_mask(study.membership, study.seed, study.models, table.kind_N)
        tables[name] = MixTable(
            label_N=table.label_N,
            true_label_N=table.true_label_N,
            kind_N=table.kind_N,
            image_N=np.arange(samples),
            keep_MN=keep_MN,
        )
    pool = images[:samples] / 255
    return StudyData(
        images_RHWC=images,
        population_rows_Z=np.arange(samples, samples + population),
        population_labels_Z=labels[samples:],
        tables=tables,
        classes=10,
        mean_C=tuple(pool.mean((0, 1, 2)).tolist()),
        std_C=tuple(pool.std((0, 1, 2)).tolist()),
    )


def refs(arm: str, ids: range | list[int], mix: str = "flip10") -> list[ModelRef]:
    return [ModelRef(mix=mix, arm=arm, model_id=i) for i in ids]
