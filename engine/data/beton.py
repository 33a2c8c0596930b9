"""Every set travels through a .beton: written once by FFCV, verified, read back by FFCV.

The only file that imports ffcv, and only in a child process (this file run as a script). A child
keeps off us what FFCV 1.0.2 does to its process: five seconds of import, torch's thread count set
at every turn, threads and memory left behind, batches that are views of recycled buffers, garbage
for an index out of range, and above all a writer and a reader that wait for ever when one of their
workers raises. Arrays go to the child and come back in files, which are its stdin and stdout: in
memory, or on disk for sets that no process could hold. A child that takes too long is ended with
all its workers.

N images, H x W pixels, C channels.
"""

import dataclasses
import functools
import importlib.util
import json
import logging
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from engine.data.arrays import Dataset, ImageArrays
    from engine.study import Data

START_SECONDS = 300.0
"""Time allowed to a child before its first image: imports and compilation on a busy machine."""
IMAGES_PER_SECOND = 500.0
"""Slowest speed allowed after that, some 50 times below what was measured."""
BATCH = 1024
PAGES = 32 * 2**20
"""Bytes beside the images that a beton may take: FFCV writes whole pages, a few a worker."""

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
log = logging.getLogger(__name__)


def through_loader(dataset: "Dataset", data: "Data") -> tuple["Dataset", str]:
    """The same dataset as the loader of `data.loader` delivers it, and which one that was.

    "ffcv" goes through the beton in the cache and writes it first where it is not there, whole;
    "resident" keeps the arrays as they are; "auto" is ffcv where that works, else resident. Both
    deliver the same bytes: what FFCV read is compared with what it was given.

    Raises:
        RuntimeError: `data.loader` is "ffcv" and FFCV is not installed or fails.
    """
    if data.loader == "resident":
        return dataset, "resident: data.loader asks for it"
    try:
        delivered = _through_ffcv(dataset, data)
    except (RuntimeError, OSError) as error:
        if data.loader == "ffcv":
            raise RuntimeError(f"data.loader is 'ffcv', but {error}") from error
        log.warning("images are read by the resident loader: %s", error)
        return dataset, f"resident: {error}"
    return delivered, "ffcv"


@functools.cache
def installed() -> bool:
    """Whether FFCV can be found (it is not imported)."""
    return importlib.util.find_spec("ffcv") is not None


def _through_ffcv(dataset: "Dataset", data: "Data") -> "Dataset":
    from engine.data.arrays import cache_dir

    if not installed():
        raise RuntimeError("FFCV is not installed: run setup.sh, or set data.loader to 'resident'")
    file = cache_dir(data) / "betons" / f"{dataset.digest()}.beton"
    with memory() as into, memory() as scratch:
        images, labels = deliver(file, (dataset.train, dataset.test), into, scratch)
    first = len(dataset.train)
    train, test = slice(None, first), slice(first, None)
    return dataclasses.replace(
        dataset,
        train=dataclasses.replace(dataset.train, images_NHWC=images[train], labels_N=labels[train]),
        test=dataclasses.replace(dataset.test, images_NHWC=images[test], labels_N=labels[test]),
    )


def memory() -> BinaryIO:
    """A file that lives in memory and nowhere else."""
    return os.fdopen(os.memfd_create("shadow-engine-beton"), "w+b")


def deliver(
    file: Path, parts: "Sequence[ImageArrays]", into: BinaryIO, scratch: BinaryIO
) -> tuple[Images, Labels]:
    """What FFCV reads from `file`, which holds just these parts or is written anew.

    Safe under races: one process writes, the others wait for its lock and read. A file whose size
    or SHA-256 is not that of the day it was written (cut short, altered, foreign) is rewritten.

    Args:
        file: the beton.
        parts: images and labels, one after the other.
        into: an empty file for what was read: it then holds the images, mapped by those returned.
        scratch: an empty file to hand FFCV what it is to write.

    Raises:
        RuntimeError: FFCV fails, takes too long or gives back other images.
        OSError: the cache folder cannot be written.
    """
    from engine.data.readers import locked

    for part in parts:
        if part.labels_N.min() < 0 or part.labels_N.max() >= 2**31:
            raise RuntimeError("FFCV is given labels outside 0 to 2**31 - 1")
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.with_suffix(".lock")):
        if whole(file):
            try:
                return _compared(read(file, _shape(parts), into), parts, file)
            except RuntimeError as error:
                log.warning("%s: it is written anew", error)
        return _written(file, parts, into, scratch)


def _shape(parts: "Sequence[ImageArrays]") -> tuple[int, ...]:
    return (sum(map(len, parts)), *parts[0].images_NHWC.shape[1:])


def _written(
    file: Path, parts: "Sequence[ImageArrays]", into: BinaryIO, scratch: BinaryIO
) -> tuple[Images, Labels]:
    """Write under a temporary name, read back, note size and hash, rename. Needs the lock."""
    from engine.files import sha256, write_text

    count, need = _shape(parts)[0], sum(part.images_NHWC.nbytes for part in parts)
    free = shutil.disk_usage(file.parent).free
    if free < 1.1 * (need + 64 * count) + PAGES:
        raise RuntimeError(
            f"{file.parent} has {free / 1e6:.1f} MB free, and the set needs {need / 1e6:.1f}: free "
            "space or set data.cache"
        )
    for stale in file.parent.glob(f"{file.stem}.*.part"):
        stale.unlink(missing_ok=True)
    for part in parts:
        for rows in batches(len(part)):
            scratch.write(part.images_NHWC[rows].tobytes())
    for part in parts:
        scratch.write(part.labels_N.tobytes())
    scratch.flush()
    part_file = file.with_suffix(f".{os.getpid()}.part")
    try:
        back = _compared(_asked("write", part_file, _shape(parts), scratch, into), parts, file)
        with open(part_file, "rb") as stream:
            os.fsync(stream.fileno())
        note = {"bytes": part_file.stat().st_size, "sha256": sha256(part_file)}
        part_file.replace(file)
        write_text(file.with_suffix(".json"), json.dumps(note))
    finally:
        part_file.unlink(missing_ok=True)
    return back


def read(file: Path, shape: tuple[int, ...], into: BinaryIO) -> tuple[Images, Labels]:
    """All images and labels of a beton; `into` then holds the images, mapped by those returned.

    Raises:
        RuntimeError: FFCV fails, takes too long, or finds another number of images.
    """
    with open(os.devnull, "rb") as nothing:
        return _asked("read", file, shape, nothing, into)


def _asked(
    task: str, file: Path, shape: tuple[int, ...], source: BinaryIO, into: BinaryIO
) -> tuple[Images, Labels]:
    """What a child reads from the file (after writing it, if that is the task)."""
    count, size = shape[0], int(np.prod(shape))
    into.seek(0)
    into.truncate()
    _child(task, file, shape, source, into)
    if os.fstat(into.fileno()).st_size != size + 8 * count:
        raise RuntimeError(f"FFCV found images of another number or size in {file}")
    into.seek(size)
    labels = np.frombuffer(bytearray(into.read()), np.int64)
    into.truncate(size)
    images = np.frombuffer(mmap.mmap(into.fileno(), size), np.uint8).reshape(shape)
    return images, labels


def _compared(
    back: tuple[Images, Labels], parts: "Sequence[ImageArrays]", file: Path
) -> tuple[Images, Labels]:
    """What came back, if it is what was given."""
    images, labels = back
    first, equal = 0, np.array_equal(labels, np.concatenate([part.labels_N for part in parts]))
    for part in parts:
        own = images[first : first + len(part)]
        equal = equal and all(
            np.array_equal(own[rows], part.images_NHWC[rows]) for rows in batches(len(part))
        )
        first += len(part)
    if not equal:
        raise RuntimeError(f"FFCV gave back other images than it was given ({file})")
    return back


def batches(count: int) -> Iterator[slice]:
    """Rows in pieces that fit in memory."""
    return (slice(first, first + BATCH) for first in range(0, count, BATCH))


def whole(file: Path) -> str:
    """The SHA-256 of a beton if it is still the one that was written; else nothing."""
    from engine.files import sha256

    try:
        note = json.loads(file.with_suffix(".json").read_text())
        if file.stat().st_size == note["bytes"] and sha256(file) == note["sha256"]:
            return str(note["sha256"])
    except FileNotFoundError:
        return ""
    except (ValueError, KeyError, TypeError):
        pass  # the note itself is damaged
    log.warning("%s is damaged: it is written anew", file)
    return ""


def _child(task: str, file: Path, shape: tuple[int, ...], source: BinaryIO, sink: BinaryIO) -> None:
    """Run this file as a script in a session of its own; end it and its workers when time is up."""
    limit = START_SECONDS + shape[0] / IMAGES_PER_SECOND
    quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            [sys.executable, __file__, task, str(file), str(os.getpid()), *map(str, shape)],
            stdin=source,
            stdout=sink,
            stderr=said,
            env=os.environ | quiet,
            start_new_session=True,
        )
        try:
            child.wait(limit)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"FFCV took over {limit:.0f} s to {task} {file}") from None
        finally:
            if child.returncode != 0:
                _end(child)
        if child.returncode != 0:
            said.seek(0)
            last = said.read().decode(errors="replace").strip().splitlines()[-1:]
            words = last[0] if last else "it said nothing"
            raise RuntimeError(f"FFCV failed to {task} {file}: {words}")


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End the whole session: first gently, so that Python's tracker removes shared memory."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
            child.wait(5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


# From here on: the child's side.


def _import_ffcv() -> None:
    """Import it without its two compilations, which would cost more than all the work.

    At import its table of two JPEG modes compiles a numba dictionary (3 to 5 s; a dict holds them
    as well, and there are no JPEGs here), and each loader compiles its decoders (1.5 to 3 s), which
    are as fast without for images of this size.
    """
    import numba.typed

    numba_dict, numba.typed.Dict = numba.typed.Dict, dict
    import ffcv  # noqa: F401
    from ffcv.pipeline.compiler import Compiler

    numba.typed.Dict = numba_dict
    Compiler.set_enabled(False)


class _Given:
    """The images and labels on stdin, one by one."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        given, size = mmap.mmap(0, 0, access=mmap.ACCESS_READ), int(np.prod(shape))
        self.images = np.frombuffer(given, np.uint8, size).reshape(shape)
        self.labels = np.frombuffer(given, np.int64, shape[0], size)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Images, int]:
        return self.images[row], int(self.labels[row])


def _child_write(file: str, shape: tuple[int, ...]) -> None:
    import multiprocessing

    from ffcv.fields import IntField, NDArrayField
    from ffcv.writer import DatasetWriter

    # FFCV's writer was made for fork; with one worker the bytes of the file repeat.
    multiprocessing.set_start_method("fork", force=True)
    fields = {"image": NDArrayField(np.dtype("uint8"), shape[1:]), "label": IntField()}
    writer = DatasetWriter(file, fields, num_workers=1)
    writer.from_indexed_dataset(_Given(shape), chunksize=1000)


def _child_read(file: str, sink: BinaryIO) -> None:
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.decoders import NDArrayDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import ToTensor

    loader = Loader(
        file,
        batch_size=BATCH,
        num_workers=1,
        order=OrderOption.SEQUENTIAL,
        drop_last=False,
        seed=0,
        pipelines={"image": [NDArrayDecoder(), ToTensor()], "label": [IntDecoder(), ToTensor()]},
    )
    labels = []
    iterator = iter(loader)
    try:
        for image, label in iterator:
            sink.write(image.numpy().tobytes())
            labels.append(label.numpy().reshape(-1).astype(np.int64))
    finally:
        iterator.close()
        iterator.join(10)
    sink.write(np.concatenate(labels).tobytes())


def _end_with(parent: int) -> None:
    """End this session as soon as the parent is gone: nobody would wait for a child that hangs."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def _child_main(task: str, file: str, parent: str, *sides: str) -> None:
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    shape = tuple(int(side) for side in sides)
    # What FFCV prints must not mix with the images.
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _import_ffcv()
    if task == "write":
        _child_write(file, shape)
    _child_read(file, sink)
    sink.close()


if __name__ == "__main__":
    _child_main(*sys.argv[1:])
