"""Turn the files that fetch.sh brought into one .npz a set.

to_npz.py FILES NPZ                 decodes what FILES holds
to_npz.py --torchvision FILES NPZ   lets torchvision download the sets into FILES first
"""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # spelt so in the package
SPRITES = {"train": [f"data_batch_{i}.png" for i in range(1, 6)], "test": ["test_batch.png"]}
TORCHVISION = {"cifar10": "CIFAR10", "mnist": "MNIST", "fashion_mnist": "FashionMNIST"}


def cifar10(folder: Path) -> dict[str, np.ndarray]:
    """Sprites of 10,000 rows x 1,024 pixels: one RGB image a row."""
    arrays = {}
    for split, names in SPRITES.items():
        sheets = [np.asarray(Image.open(folder / name).convert("RGB")) for name in names]
        arrays[f"{split}_images"] = np.concatenate([s.reshape(-1, 32, 32, 3) for s in sheets])
        labels = json.loads((folder / LABELS[split]).read_text())
        arrays[f"{split}_labels"] = np.array(labels, dtype=np.int64)
    return arrays


def idx(path: Path) -> np.ndarray:
    """An IDX file of unsigned bytes, plain or gzipped."""
    raw = path.read_bytes()
    raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
    dims = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * len(dims)).reshape(dims)


def mnist_like(folder: Path, suffix: str) -> dict[str, np.ndarray]:
    """The four IDX files of MNIST, or of a set that comes like it."""
    arrays = {}
    for split, stem in {"train": "train", "test": "t10k"}.items():
        arrays[f"{split}_images"] = idx(folder / f"{stem}-images-idx3-ubyte{suffix}")[..., None]
        labels = idx(folder / f"{stem}-labels-idx1-ubyte{suffix}")
        arrays[f"{split}_labels"] = labels.astype(np.int64)
    return arrays


def torchvision_set(folder: Path, name: str) -> dict[str, np.ndarray]:
    """The same set, as torchvision downloads it."""
    from torchvision import datasets

    arrays = {}
    for split in ("train", "test"):
        part = getattr(datasets, name)(folder, train=split == "train", download=True)
        images = np.asarray(part.data)
        arrays[f"{split}_images"] = images if images.ndim == 4 else images[..., None]
        arrays[f"{split}_labels"] = np.asarray(part.targets, dtype=np.int64)
    return arrays


def main() -> None:
    """Write each set under a temporary name, then rename."""
    Image.MAX_IMAGE_PIXELS = None
    *flags, source, target = (Path(argument) for argument in sys.argv[1:])
    if flags:
        sets = {name: torchvision_set(source, kind) for name, kind in TORCHVISION.items()}
    else:
        sets = {
            "cifar10": cifar10(source / "cifar10"),
            "mnist": mnist_like(source / "mnist", ""),
            "fashion_mnist": mnist_like(source / "fashion_mnist", ".gz"),
        }
    for name, arrays in sets.items():
        part = target / f".{name}.part.npz"
        np.savez(part, **arrays)
        part.rename(target / f"{name}.npz")
        print(name, {key: array.shape for key, array in arrays.items()})


if __name__ == "__main__":
    main()
