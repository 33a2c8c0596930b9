"""Small sets of images, laid out the ways that readers know."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from engine.data import beton
from engine.study import Data

with_ffcv = pytest.mark.skipif(not beton.installed(), reason="FFCV is not installed (setup.sh)")

KEYS = ("train_images", "train_labels", "test_images", "test_labels")


def split(path: Path, train: int, test: int) -> dict[str, np.ndarray]:
    """The first images of a real set."""
    with np.load(path) as arrays:
        counts = {"train": train, "test": test}
        return {key: arrays[key][: counts[key.partition("_")[0]]] for key in KEYS}


def small(**changes: np.ndarray) -> dict[str, np.ndarray]:
    """A sound set of two classes, 3 x 5 pixels, but for the changes."""
    rng = np.random.default_rng(0)
    arrays = {
        "train_images": rng.integers(0, 256, (6, 3, 5, 3)).astype(np.uint8),
        "train_labels": np.array([0, 1, 0, 1, 0, 1]),
        "test_images": rng.integers(0, 256, (4, 3, 5, 3)).astype(np.uint8),
        "test_labels": np.array([0, 1, 0, 1]),
    }
    return arrays | changes


def saved(folder: Path, arrays: dict[str, np.ndarray], name: str = "set.npz") -> Path:
    """These arrays as an .npz."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / name, **arrays)
    return folder / name


def npz(path: Path, **fields: object) -> Data:
    """A study's data from an .npz of one's own."""
    return Data(name="npz", path=str(path), **fields)


def idx(array: np.ndarray) -> bytes:
    """An IDX file of bytes."""
    head = bytes([0, 0, 8, array.ndim])
    sides = b"".join(side.to_bytes(4, "big") for side in array.shape)
    return head + sides + array.astype(np.uint8).tobytes()


def save_idx(root: Path, folder: str, arrays: dict[str, np.ndarray], zipped: bool = False) -> Path:
    """The four files of MNIST or Fashion-MNIST as torchvision lays them out; their folder."""
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    for part, stem in (("train", "train"), ("test", "t10k")):
        for kind, suffix in (("images", "images-idx3-ubyte"), ("labels", "labels-idx1-ubyte")):
            array = arrays[f"{part}_{kind}"]
            packed = idx(array[..., 0] if kind == "images" else array)
            file = raw / f"{stem}-{suffix}{'.gz' if zipped else ''}"
            file.write_bytes(gzip.compress(packed) if zipped else packed)
    return raw


def same(left: np.ndarray, right: np.ndarray) -> bool:
    """Equal in type, shape and value."""
    return left.dtype == right.dtype and np.array_equal(left, right)
