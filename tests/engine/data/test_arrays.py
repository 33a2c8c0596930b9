import re

import numpy as np
import pytest
import sets_on_disk as sets

from engine.data import arrays
from engine.data.arrays import cache_dir, load, load_source
from engine.study import Data

DIGITS = Data(name="digits")


def read(data, seed=0):
    return load(data, offline=True, seed=seed)


def test_digits_are_the_same_everywhere_and_for_every_seed():
    dataset = read(DIGITS)
    assert dataset.train.images_NHWC.shape == (1352, 8, 8, 1)
    assert dataset.digest() == read(DIGITS, seed=5).digest()
    assert dataset.digest() == "d874f800616132a242d128e4699d48467f5b95744a13ef9983e159118f27a169"
    share = np.bincount(dataset.test.labels_N) / np.bincount(
        np.concatenate([dataset.train.labels_N, dataset.test.labels_N])
    )
    assert share == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10"])
def test_named_sets_come_whole_from_an_npz(name, real_data):
    dataset = read(Data(name=name, path=str(real_data(name))))
    assert dataset.classes == 10
    assert dataset.train.images_NHWC.shape[1:] == arrays.SHAPES[name]
    assert (np.bincount(dataset.test.labels_N) > 800).all()
    with np.load(real_data(name)) as raw:
        assert sets.same(dataset.train.images_NHWC, raw["train_images"])
        assert sets.same(dataset.test.labels_N, raw["test_labels"])


def test_an_npz_of_ones_own_has_the_classes_of_its_labels(tmp_path):
    raw = sets.small()
    dataset = read(sets.npz(sets.saved(tmp_path, raw)))
    assert dataset.classes == 2
    assert sets.same(dataset.train.images_NHWC, raw["train_images"])


BAD = [
    ({"train_images": np.zeros((6, 3, 5, 3), np.float32)}, "train_images are float32, expected"),
    ({"train_images": np.zeros((6, 3, 5), np.uint8)}, "train_images have shape (6, 3, 5), expect"),
    ({"test_images": np.zeros((4, 3, 8, 8), np.uint8)}, "test_images have shape (4, 3, 8, 8), exp"),
    ({"train_images": np.zeros((6, 0, 5, 3), np.uint8)}, "have shape (6, 0, 5, 3), expected"),
    ({"train_images": np.zeros((5, 3, 5, 3), np.uint8)}, "train_labels have shape (6,), but there"),
    ({"train_labels": np.zeros((6, 1), int)}, "train_labels have shape (6, 1), but there are 6"),
    ({"train_labels": np.array([0, 1, 0, 1, 0, 1.0])}, "train_labels are float64, expected integ"),
    ({"train_labels": np.array([0, 1, 0, 1, 0, -1])}, "train_labels go down to -1, expected 0"),
    ({"test_labels": np.array([0, 1, 0, 2**40])}, "test_labels go up to 1099511627776, expected"),
    ({"test_labels": np.array([0, 1, 0, 2])}, "train: class 2 has no image (2 of 3 classes"),
    ({"test_labels": np.array([1, 1, 1, 1])}, "test: class 0 has no image (1 of 2 classes"),
    ({"train_labels": np.array([0, 3, 0, 3, 0, 3])}, "train: class 1 has no image (2 of 4"),
    (
        {"train_labels": np.zeros(6, int), "test_labels": np.zeros(4, int)},
        "every label is 0, but a study needs two classes or more",
    ),
    (
        {"test_images": np.zeros((4, 3, 6, 3), np.uint8)},
        "train images are 3 x 5 x 3, test images 3",
    ),
    (
        {"test_images": np.zeros((0, 3, 5, 3), np.uint8), "test_labels": np.zeros(0, int)},
        "test_images are empty",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
def test_bad_arrays_are_named_in_one_sentence(tmp_path, changes, sentence):
    path = sets.saved(tmp_path, sets.small(**changes))
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        read(sets.npz(path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_named_set_must_look_like_itself(tmp_path, real_data):
    with pytest.raises(ValueError, match="are 32 x 32 x 3, but mnist has 28 x 28 x 1"):
        read(Data(name="mnist", path=str(real_data("cifar10"))))
    raw = sets.split(real_data("mnist"), 100, 100)
    raw["train_labels"][7] = 10
    with pytest.raises(ValueError, match="a label is 10, but mnist has labels 0 to 9"):
        read(Data(name="mnist", path=str(sets.saved(tmp_path, raw))))


def test_limit_keeps_a_draw_by_seed_in_the_original_order():
    whole, one = read(DIGITS), read(Data(name="digits", limit=300))
    rows = {image.tobytes(): row for row, image in enumerate(whole.train.images_NHWC)}
    kept = [rows[image.tobytes()] for image in one.train.images_NHWC]
    assert len(kept) == 300
    assert kept == sorted(set(kept))
    assert (whole.train.labels_N[kept] == one.train.labels_N).all()
    assert sets.same(one.test.images_NHWC, whole.test.images_NHWC)
    assert read(Data(name="digits", limit=300)).digest() == one.digest()
    assert read(Data(name="digits", limit=300), seed=1).digest() != one.digest()


def test_a_limit_out_of_reach_is_named():
    with pytest.raises(ValueError, match=r"limit is 5000, but digits has only 1352 training"):
        read(Data(name="digits", limit=5000))
    with pytest.raises(ValueError, match=r"the 4 images kept by data.limit: class \d has no image"):
        read(Data(name="digits", limit=4))


def test_the_digest_is_of_every_byte_and_label(tmp_path):
    raw = sets.small()
    digests = set()
    for key in ("", *sets.KEYS):
        changed = {name: array.copy() for name, array in raw.items()}
        if "images" in key:
            changed[key][1, 2, 3, 0] ^= 1
        elif key:
            changed[key][:2] = changed[key][:2][::-1]
        digests.add(read(sets.npz(sets.saved(tmp_path, changed))).digest())
    assert len(digests) == 5


def source(name, like, **fields):
    return load_source(str(name), data=Data(name="digits", **fields), like=like, offline=True)


def test_a_source_is_the_other_sets_training_images(real_data):
    images = source(real_data("mnist"), (28, 28, 1))
    with np.load(real_data("mnist")) as raw:
        assert sets.same(images, raw["train_images"])


def test_a_source_takes_the_pools_size_and_channels(tmp_path, real_data):
    path = sets.saved(tmp_path, sets.split(real_data("cifar10"), 50, 50))
    with np.load(path) as raw:
        colour = raw["train_images"]
    grey = source(path, (8, 8, 1))
    assert grey.shape == (50, 8, 8, 1)
    luma = (colour @ np.array([0.299, 0.587, 0.114])).reshape(50, 8, 4, 8, 4).mean((2, 4))
    assert np.abs(grey[..., 0] - luma).mean() < 6
    assert np.abs(grey[..., 0].mean((1, 2)) - luma.mean((1, 2))).max() < 3
    digits = source("digits", (32, 32, 3))
    assert digits.shape == (1352, 32, 32, 3)
    assert (digits == digits[..., :1]).all()


def test_colour_from_grey_of_the_same_size_keeps_every_byte(real_data, tmp_path):
    path = sets.saved(tmp_path, sets.split(real_data("fashion_mnist"), 100, 100))
    images = source(path, (28, 28, 3))
    with np.load(path) as raw:
        assert sets.same(images, np.repeat(raw["train_images"], 3, axis=3))


def test_unknown_and_absent_sources_are_named(tmp_path):
    with pytest.raises(ValueError, match="unknown source 'minst': did you mean 'mnist'"):
        source("minst", (8, 8, 1))
    with pytest.raises(ValueError, match=r"there is no file .*gone\.npz"):
        source(tmp_path / "gone.npz", (8, 8, 1))
    with pytest.raises(ValueError, match=r"cifar10 is not in .* and --offline forbids"):
        source("cifar10", (8, 8, 1), cache=str(tmp_path))


def test_the_cache_is_where_the_study_or_the_user_wants_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir(Data(name="digits", cache=str(tmp_path / "own"))) == tmp_path / "own"
    assert cache_dir(DIGITS) == tmp_path / "xdg" / "shadow-engine"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir(DIGITS) == tmp_path / ".cache" / "shadow-engine"
