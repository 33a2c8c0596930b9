"""Labelled images in memory: what a study asks for, read, checked and cut to size.

N images, H x W pixels, C channels. Images are uint8 NHWC with 1 or 3 channels, labels int64.
"""

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine import seeds
from engine.data import readers
from engine.study import TORCHVISION_SETS, Data, unknown

DATA_PATH = "set data.path to a torchvision folder or an .npz"
"""What to do where a set cannot be downloaded."""
CLASSES = {"digits": 10, "mnist": 10, "fashion_mnist": 10, "cifar10": 10, "cifar100": 100}
"""Set name -> number of classes. Sets of one's own have as many as their labels say."""

SHAPES = {
    "digits": (8, 8, 1),
    "mnist": (28, 28, 1),
    "fashion_mnist": (28, 28, 1),
    "cifar10": (32, 32, 3),
    "cifar100": (32, 32, 3),
}
"""Set name -> (H, W, C)."""


@dataclass(frozen=True, kw_only=True)
class ImageArrays:
    """Images (uint8, N x H x W x C) and their labels (int64, N), C-contiguous."""

    images_NHWC: npt.NDArray[np.uint8]
    labels_N: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels_N)

    def take(self, rows: npt.NDArray[np.int64]) -> "ImageArrays":
        """These rows, in this order."""
        return ImageArrays(images_NHWC=self.images_NHWC[rows], labels_N=self.labels_N[rows])


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A training split (the pool), a test split (the population) and what their labels mean."""

    train: ImageArrays
    test: ImageArrays
    classes: int
    name: str

    def digest(self) -> str:
        """SHA-256 over both splits' images and labels, and nothing else."""
        splits = (self.train, self.test)
        return digest([array for s in splits for array in (s.images_NHWC, s.labels_N)])


def digest(arrays: Sequence[npt.NDArray[np.generic]]) -> str:
    """SHA-256 over types, shapes and values.

    >>> digest([np.zeros(2)]) == digest([np.zeros((2, 1))])
    False
    """
    hasher = hashlib.sha256()
    for array in arrays:
        hasher.update(f"{array.dtype.str}{array.shape}".encode())
        hasher.update(np.ascontiguousarray(array).data)
    return hasher.hexdigest()


def cache_dir(data: Data) -> Path:
    """Where downloads and betons live: `data.cache`, else the user's own cache folder."""
    if data.cache:
        return Path(data.cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "shadow-engine"


def load(data: Data, *, offline: bool, seed: int) -> Dataset:
    """Read, check and limit the images of a study.

    `data.limit` keeps that many training images, a uniform draw by seed (not stratified), in their
    original order; the test split stays whole.

    Raises:
        ValueError: the data is missing or unfit; one sentence says what was found and expected.
    """
    where, raw = _read(data.name, data.path, cache_dir(data), offline=offline)
    dataset = _checked(raw, data.name, where)
    if data.limit:
        dataset = _limited(dataset, data.limit, seed, where)
    return dataset


def load_source(
    source: str, *, data: Data, like: tuple[int, ...], offline: bool
) -> npt.NDArray[np.uint8]:
    """The training images of another set, in the pool's size and channels (`like` = H, W, C).

    `source` is the name of a set that comes without a path, an .npz, or a folder of class folders.
    Sizes change by Pillow's antialiased bilinear filter (integer arithmetic: the same bytes on
    every machine); colours become grey by ITU-R 601 luma, and grey fills three equal channels.

    Raises:
        ValueError: there is no such set, or it is unfit.
    """
    path = Path(source).expanduser()
    if source in CLASSES:
        name, at = source, ""
    elif path.suffix == ".npz" or path.exists():
        name, at = ("npz" if path.suffix == ".npz" else "folder"), source
    else:
        known = unknown("source", source, tuple(CLASSES))
        raise ValueError(f"{known}, or the path of an .npz or of a folder of class folders")
    instead = "set the mix's source to an .npz or a folder of class folders"
    where, raw = _read(name, at, cache_dir(data), offline=offline, instead=instead)
    images = _checked(raw, name, where).train.images_NHWC
    return _converted(images, like)


def _read(
    name: str, path: str, cache: Path, *, offline: bool, instead: str = DATA_PATH
) -> tuple[str, readers.Splits]:
    """What to call the data in a sentence, and its raw arrays."""
    if name == "digits":
        return "digits", readers.digits()
    if path.endswith(".npz") or name == "npz":
        return path, readers.npz(Path(path).expanduser())
    if name == "folder":
        return path, readers.class_folders(Path(path).expanduser(), cache)
    if name not in TORCHVISION_SETS:
        raise ValueError(unknown("data.name", name, (*CLASSES, "npz", "folder")))
    if path:
        root = Path(path).expanduser()
    else:
        root = readers.downloaded(name, cache, offline=offline, instead=instead)
    return f"{name} in {root}", readers.torchvision_set(name, root)


def _checked(raw: readers.Splits, name: str, where: str) -> Dataset:
    """The raw arrays as a Dataset, or one sentence that says why not."""
    splits = {}
    for split in ("train", "test"):
        images, labels = raw[f"{split}_images"], raw[f"{split}_labels"]
        splits[split] = _checked_split(images, labels, f"{where}: {split}")
    train, test = splits["train"], splits["test"]
    shape, test_shape = (s.images_NHWC.shape[1:] for s in (train, test))
    if shape != test_shape:
        raise ValueError(f"{where}: train images are {_by(shape)}, test images {_by(test_shape)}")
    if name in SHAPES and shape != SHAPES[name]:
        raise ValueError(
            f"{where}: images are {_by(shape)}, but {name} has {_by(SHAPES[name])} "
            "(data.name is 'npz' for a set of your own)"
        )
    top = max(int(s.labels_N.max()) for s in (train, test))
    classes = CLASSES.get(name, top + 1)
    if top >= classes:
        raise ValueError(f"{where}: a label is {top}, but {name} has labels 0 to {classes - 1}")
    if classes < 2:
        raise ValueError(f"{where}: every label is 0, but a study needs two classes or more")
    for split, arrays in splits.items():
        _require_all_classes(arrays.labels_N, classes, f"{where}: {split}", "check the labels")
    return Dataset(train=train, test=test, classes=classes, name=name)


def _checked_split(
    images: npt.NDArray[np.generic], labels: npt.NDArray[np.generic], where: str
) -> ImageArrays:
    if images.dtype != np.uint8:
        raise ValueError(f"{where}_images are {images.dtype}, expected uint8 (0 to 255)")
    if images.ndim != 4 or images.shape[3] not in (1, 3) or 0 in images.shape[1:]:
        raise ValueError(
            f"{where}_images have shape {images.shape}, expected N x H x W x C with C = 1 or 3"
        )
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"{where}_labels are {labels.dtype}, expected integers")
    if labels.shape != images.shape[:1]:
        raise ValueError(
            f"{where}_labels have shape {labels.shape}, but there are {len(images)} images"
        )
    if len(labels) == 0:
        raise ValueError(f"{where}_images are empty")
    low, high = int(labels.min()), int(labels.max())
    if low < 0:
        raise ValueError(f"{where}_labels go down to {low}, expected 0 or more")
    if high >= 2**31:
        raise ValueError(f"{where}_labels go up to {high}, expected class numbers from 0")
    return ImageArrays(
        images_NHWC=np.ascontiguousarray(images, dtype=np.uint8),
        labels_N=np.ascontiguousarray(labels, dtype=np.int64),
    )


def _require_all_classes(
    labels_N: npt.NDArray[np.int64], classes: int, where: str, advice: str
) -> None:
    present = np.unique(labels_N)
    if len(present) == classes:
        return
    gap = np.flatnonzero(present != np.arange(len(present)))
    first = int(gap[0]) if len(gap) else len(present)
    raise ValueError(
        f"{where}: class {first} has no image ({len(present)} of {classes} classes are there): "
        f"{advice}"
    )


def _limited(dataset: Dataset, limit: int, seed: int, where: str) -> Dataset:
    count = len(dataset.train)
    if limit > count:
        raise ValueError(f"data.limit is {limit}, but {where} has only {count} training images")
    rows = np.sort(seeds.permutation(seeds.key(seed, "limit"), count)[:limit])
    train = dataset.train.take(rows)
    advice = "raise the limit or change the seed"
    place = f"the {limit} images kept by data.limit"
    _require_all_classes(train.labels_N, dataset.classes, place, advice)
    return dataclasses.replace(dataset, train=train)


def _converted(images_NHWC: npt.NDArray[np.uint8], like: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    from PIL import Image

    height, width, channels = like
    if images_NHWC.shape[1:] == (height, width, channels):
        return images_NHWC
    out = np.empty((len(images_NHWC), height, width, channels), np.uint8)
    for row, image_HWC in enumerate(images_NHWC):
        picture = Image.fromarray(image_HWC if image_HWC.shape[2] == 3 else image_HWC[:, :, 0])
        if picture.size != (width, height):
            picture = picture.resize((width, height), Image.Resampling.BILINEAR)
        picture = picture.convert("RGB" if channels == 3 else "L")
        out[row] = np.asarray(picture).reshape(height, width, channels)
    return out


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(str(side) for side in shape)
