"""A study made concrete: pools, the sample left out, resident images, digest."""

import dataclasses

import numpy as np
import pytest

from engine.outliers import OOD
from engine.prepare import prepare
from engine.studyfile import load_study


def study(*overrides):
    base = ["data.loader=resident", "data.limit=200", "models=4", "train.batch=16"]
    return load_study("digits_bn_vs_nobn", [*base, *overrides])


def test_of_an_odd_pool_one_sample_stays_out_and_is_counted():
    odd, even = prepare(study("data.limit=201")), prepare(study())
    assert odd.facts["pool"] == even.facts["pool"] == 200
    assert len(odd.facts["left_out"]) == 1
    assert even.facts["left_out"] == []
    (mask,) = {id(mask): mask for mask in odd.masks.values()}.values()
    assert (mask.sum(1) == 100).all()
    bernoulli = prepare(study("data.limit=201", "membership.design=bernoulli"))
    assert bernoulli.facts["pool"] == 201


def test_an_odd_number_of_models_is_no_error():
    prepared = prepare(study("models=5"))
    assert prepared.masks["flip5"].shape == (5, 200)


def test_mixes_share_masks_images_and_order():
    prepared = prepare(
        study("mixes.clean.kind=clean", "mixes.flip1.kind=flipped", "mixes.flip1.share=0.01")
    )
    tables = prepared.data.tables
    assert (tables["clean"].keep_MN == tables["flip5"].keep_MN).all()
    assert (tables["clean"].image_N == np.arange(200)).all()
    flipped = {name: np.flatnonzero(t.kind_N) for name, t in tables.items()}
    assert len(flipped["clean"]) == 0
    assert set(flipped["flip1"]) < set(flipped["flip5"])
    assert (tables["flip5"].label_N != tables["clean"].label_N).sum() == 10


def test_ood_images_come_from_the_source_and_keep_n(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, 8, 8, 1), dtype=np.uint8)
    labels = np.arange(40) % 10
    np.savez(
        tmp_path / "other.npz",
        train_images=images,
        train_labels=labels,
        test_images=images,
        test_labels=labels,
    )
    ood = [
        "mixes.ood.kind=ood",
        "mixes.ood.share=0.05",
        f"mixes.ood.source={tmp_path / 'other.npz'}",
    ]
    prepared = prepare(study(*ood))
    table, data = prepared.data.tables["ood"], prepared.data
    rows = table.image_N[table.kind_N == OOD]
    assert len(rows) == 10
    sources = {image.tobytes() for image in images}
    assert all(data.images_RHWC[row].tobytes() in sources for row in rows)
    assert (np.sort(rows) == np.arange(200, 210)).all()
    assert data.population_rows_Z[0] == 210
    assert len(data.images_RHWC) == 210 + 445
    assert (table.true_label_N[table.kind_N == OOD] == -1).all()


def test_images_are_normalised_by_the_pool_alone():
    data = prepare(study()).data
    pool = data.images_RHWC[:200].astype(np.float64) / 255
    assert data.mean_C[0] == pytest.approx(pool.mean(), abs=1e-12)
    assert data.std_C[0] == pytest.approx(pool.std(), abs=1e-12)


def test_the_digest_follows_every_image_and_label(tmp_path):
    base = prepare(study())
    assert prepare(study()).digest == base.digest
    assert prepare(study("models=8", "resources.stack=1")).digest == base.digest
    assert prepare(study("data.limit=198")).digest != base.digest
    assert prepare(study("query.population=100")).digest != base.digest
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, 8, 8, 1), dtype=np.uint8)
    arrays = {"train_images": images, "train_labels": np.arange(40) % 4}
    arrays |= {"test_images": images, "test_labels": np.arange(40) % 4}
    own = ["data.name=npz", f"data.path={tmp_path / 'set.npz'}", "data.limit=0", "train.batch=4"]
    digests = []
    for change in (0, 1):
        images[3, 2, 1, 0] ^= change
        np.savez(tmp_path / "set.npz", **arrays)
        digests.append(prepare(study(*own)).digest)
    assert digests[0] != digests[1]


def test_a_batch_larger_than_the_members_is_refused():
    with pytest.raises(ValueError, match=r"train\.batch is 101, but a model has only 100 members"):
        prepare(study("train.batch=101"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.crop=8", "train.crop is 8, but images are 8 x 8"),
        ("train.cutout=50", "train.cutout is 50, but images are 8 x 8"),
        ("mixes.flip5.share=0.001", r"mixes.flip5.share is 0.001: that is no sample of 200"),
        ("query.population=9999", "ask for fewer, or 0 for all"),
    ],
)
def test_what_does_not_fit_the_data_is_refused_before_anything_is_written(override, words):
    with pytest.raises(ValueError, match=words):
        prepare(study(override))


def test_the_population_is_drawn_by_seed():
    first, second = (
        prepare(dataclasses.replace(study("query.population=50"), seed=seed)) for seed in (0, 1)
    )
    assert len(first.data.population_labels_Z) == 50
    tail = [p.data.images_RHWC[p.data.population_rows_Z] for p in (first, second)]
    assert (tail[0] != tail[1]).any()
