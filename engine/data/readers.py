"""Where images come from: the digits, torchvision's sets, .npz files, folders of class folders.

Readers return raw arrays and check only what they need; `arrays` checks the rest. Nothing here is
unpickled but CIFAR's archives, whose files torchvision checks by MD5 before it opens them.
"""

import contextlib
import fcntl
import gzip
import mmap
import os
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.cost import available_memory

if TYPE_CHECKING:
    import PIL.Image

Splits = dict[str, npt.NDArray[np.generic]]
"""train_images, train_labels, test_images, test_labels."""

KEYS = ("train_images", "train_labels", "test_images", "test_labels")
CLASS_NAMES = {
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".pgm", ".ppm", ".tif", ".tiff")
COLOUR_MODES = ("P", "RGB", "RGBA")
GREY_MODES = ("1", "L")
LARGE = 0.25
"""Share of the memory available from which on images had better stay on disk."""


def large(nbytes: int) -> bool:
    """Whether that many bytes of images are better mapped than read."""
    return nbytes > LARGE * available_memory()


def digits() -> Splits:
    """Scikit-learn's 1,797 digits of 8 x 8 pixels, levels 0 to 16 spread over 0 to 255.

    Of every class each fourth image, in the order of the file, is a test image: 1,352 train, 445
    test.

    >>> {key: array.shape for key, array in digits().items() if "images" in key}
    {'train_images': (1352, 8, 8, 1), 'test_images': (445, 8, 8, 1)}
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = bunch.target.astype(np.int64)
    is_test = np.zeros(len(labels), bool)
    for label in range(10):
        is_test[np.flatnonzero(labels == label)[3::4]] = True
    return {
        "train_images": images[~is_test],
        "train_labels": labels[~is_test],
        "test_images": images[is_test],
        "test_labels": labels[is_test],
    }


def npz(path: Path) -> Splits:
    """The four arrays of an .npz file; arrays of Python objects are refused.

    Large ones are mapped from the file, which numpy.savez writes uncompressed, and not read.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path} (looked in {Path.cwd()})")
    try:
        with open(path, "rb") as stream:
            if not zipfile.is_zipfile(stream):
                raise ValueError("it is no whole archive of arrays")
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as archive:
                missing = [key for key in KEYS if key not in archive.files]
                if not missing:
                    return {key: _member(path, archive, key) for key in KEYS}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, struct.error) as error:
        raise ValueError(f"{path} cannot be read as .npz: {error}") from error
    raise ValueError(f"{path} lacks {', '.join(missing)} (expected: {', '.join(KEYS)})")


def _member(path: Path, archive: "np.lib.npyio.NpzFile", key: str) -> npt.NDArray[np.generic]:
    mapped = _mapped(path, f"{key}.npy")
    return archive[key] if mapped is None else mapped


def _mapped(path: Path, name: str) -> npt.NDArray[np.generic] | None:
    """A large array of an archive, mapped after its checksum was compared; None where it must be
    read: small, compressed, or not in C order."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or not large(info.file_size):
        return None
    with open(path, "rb") as stream:
        stream.seek(info.header_offset)
        start = info.header_offset + 30 + sum(struct.unpack("<26xHH", stream.read(30)))
        stream.seek(start)
        checksum, left = 0, info.file_size
        while left and (chunk := stream.read(min(left, 2**20))):
            checksum, left = zlib.crc32(chunk, checksum), left - len(chunk)
        if left or checksum != info.CRC:
            raise zipfile.BadZipFile(f"Bad CRC-32 for file {info.filename!r}")
        stream.seek(start)
        version = np.lib.format.read_magic(stream)
        header = {(1, 0): np.lib.format.read_array_header_1_0}.get(
            version, np.lib.format.read_array_header_2_0
        )
        shape, fortran, dtype = header(stream)
        if fortran or dtype.hasobject:
            return None
        return np.memmap(path, dtype, "r", stream.tell(), shape)


def class_folders(path: Path, scratch: Path) -> Splits:
    """Images in path/train/CLASS and path/test/CLASS; classes are numbered by sorted name.

    All images have one size. They are grey if every one of them is, else RGB (transparency is
    dropped). Many of them are kept on disk, in a nameless file in the folder `scratch`.
    """
    names = {}
    for split in ("train", "test"):
        if not (path / split).is_dir():
            raise ValueError(f"there is no folder {path / split} of class folders")
        found = sorted(p.name for p in (path / split).iterdir() if p.is_dir())
        names[split] = [name for name in found if not name.startswith(".")]
    if names["train"] != names["test"]:
        odd = sorted(set(names["train"]) ^ set(names["test"]))
        raise ValueError(f"{path}: class '{odd[0]}' is in only one of train and test")
    if not names["train"]:
        raise ValueError(f"{path / 'train'} has no class folders")
    files: dict[str, list[Path]] = {"train": [], "test": []}
    labels: dict[str, list[int]] = {"train": [], "test": []}
    for split in files:
        for label, name in enumerate(names[split]):
            inside = _class_files(path / split / name)
            files[split] += inside
            labels[split] += [label] * len(inside)
    shapes = {_shape(file) for file in files["train"] + files["test"]}
    sizes = sorted({shape[:2] for shape in shapes})
    if len(sizes) != 1:
        found_sizes = ", ".join(f"{h} x {w}" for h, w in sizes[:3])
        raise ValueError(f"{path}: images must all have one size, found {found_sizes}")
    image = max(shapes)
    raw: Splits = {}
    for split in files:
        images = _space((len(files[split]), *image), scratch)
        for row, file in enumerate(files[split]):
            images[row] = _picture(file)
        raw[f"{split}_images"] = images
        raw[f"{split}_labels"] = np.array(labels[split], np.int64)
    return raw


def _class_files(folder: Path) -> list[Path]:
    """The images of a class, in the order of their file names; other files are passed over."""
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)
    seen = [file for file in files if not file.name.startswith(".")]
    if not seen:
        raise ValueError(f"{folder} holds no image (looked for {', '.join(SUFFIXES)})")
    return seen


def _space(shape: tuple[int, ...], scratch: Path) -> npt.NDArray[np.uint8]:
    """Room for images: in memory, or for many of them in a file without a name."""
    size = int(np.prod(shape))
    if not large(size):
        return np.empty(shape, np.uint8)
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=scratch) as stream:
        os.posix_fallocate(stream.fileno(), 0, size)  # a full disk is told now, in words
        return np.frombuffer(mmap.mmap(stream.fileno(), size), np.uint8).reshape(shape)


def _shape(file: Path) -> tuple[int, int, int]:
    """Height, width and channels of an image file, from its head."""
    with _opened(file) as image:
        return image.height, image.width, 1 if image.mode in GREY_MODES else 3


def _picture(file: Path) -> npt.NDArray[np.uint8]:
    """One image file as H x W x 1 or H x W x 3."""
    with _opened(file) as image:
        if image.mode in GREY_MODES:
            return np.asarray(image.convert("L"))[..., None]
        return np.asarray(image.convert("RGB"))


@contextlib.contextmanager
def _opened(file: Path) -> Iterator["PIL.Image.Image"]:
    """An image file of a mode we take, or one sentence that says why not."""
    from PIL import Image

    mode = ""
    try:
        with Image.open(file) as image:
            mode = image.mode
            if mode in GREY_MODES + COLOUR_MODES:
                yield image
                return
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{file} cannot be read as an image: {error}") from error
    raise ValueError(f"{file} has mode {mode}: expected 8-bit grey or colour")


def torchvision_set(name: str, root: Path) -> Splits:
    """A set in a folder laid out by torchvision."""
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}: data.path is torchvision's, or an .npz")
    if name in ("mnist", "fashion_mnist"):
        # torchvision itself would open older, pickled copies if it found some: read the raw files.
        return _idx_set(root / CLASS_NAMES[name] / "raw")
    raw: Splits = {}
    for split in ("train", "test"):
        try:
            part = _torchvision_class(name)(root, train=split == "train", download=False)
        except RuntimeError as error:
            raise ValueError(
                f"{root} does not hold {name} as torchvision lays it out, whole and unaltered: "
                "leave out data.path to download it"
            ) from error
        raw[f"{split}_images"] = np.asarray(part.data)
        raw[f"{split}_labels"] = np.asarray(part.targets, dtype=np.int64)
    return raw


def _idx_set(folder: Path) -> Splits:
    raw: Splits = {}
    for split, stem in (("train", "train"), ("test", "t10k")):
        raw[f"{split}_images"] = _idx(folder / f"{stem}-images-idx3-ubyte", 3)[..., None]
        raw[f"{split}_labels"] = _idx(folder / f"{stem}-labels-idx1-ubyte", 1).astype(np.int64)
    return raw


def _idx(file: Path, ndim: int) -> npt.NDArray[np.uint8]:
    """An IDX file of unsigned bytes, plain or (with .gz appended to its name) gzipped."""
    zipped = file.with_name(f"{file.name}.gz")
    try:
        if file.is_file():
            raw = file.read_bytes()
        elif zipped.is_file():
            raw = gzip.decompress(zipped.read_bytes())
        else:
            raise ValueError(f"there is no file {file}: leave out data.path to download it")
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    shape = np.frombuffer(raw[4 : 4 + 4 * ndim], ">u4").tolist()
    start = 4 + 4 * ndim
    if raw[:4] != bytes([0, 0, 8, ndim]) or len(raw) - start != np.prod(shape, dtype=np.int64):
        raise ValueError(f"{file} is damaged: it is no whole IDX file of bytes")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def downloaded(name: str, cache: Path, *, offline: bool, instead: str) -> Path:
    """The cached torchvision folder of a set; downloads it once, whole or not at all.

    `instead` is what to do where it cannot be had.
    """
    root = cache / "torchvision" / name
    if root.is_dir():
        return root
    if offline:
        raise ValueError(f"{name} is not in {root} and --offline forbids to download it: {instead}")
    part = root.with_name(f"{name}.part")
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with locked(root.with_name(f"{name}.lock")):
            if not root.is_dir():
                shutil.rmtree(part, ignore_errors=True)
                _torchvision_class(name)(part, train=True, download=True)
                part.rename(root)
    except (OSError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{name} could not be downloaded into {root} ({error}): {instead}"
        ) from error
    return root


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold an advisory lock: whoever comes second waits, and a process that dies lets go."""
    with open(file, "ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _torchvision_class(name: str) -> Any:
    try:
        from torchvision import datasets
    except ImportError as error:
        raise ValueError(
            f"{name} is read through torchvision, which is not installed: "
            "pip install 'shadow-engine[vision]', or set data.path to an .npz"
        ) from error
    return getattr(datasets, CLASS_NAMES[name])
