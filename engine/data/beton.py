"""Every set travels through a .beton: written once by FFCV, verified, read back by FFCV.

The only file that imports ffcv, and only in a child process (this file run as a script). A child
keeps off us what FFCV 1.0.2 does to its process: five seconds of import, torch's thread count set
at every turn, threads and memory left behind, batches that are views of recycled buffers, garbage
for an index out of range, and above all a writer and a reader that wait for ever when one of their
workers raises. Arrays go to the child and come back through pipes; a child that takes too long is
ended with all its workers.

N images, H x W pixels, C channels.
"""

import dataclasses
import functools
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
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
    parts = (dataset.train, dataset.test)
    images = np.concatenate([part.images_NHWC for part in parts])
    labels = np.concatenate([part.labels_N for part in parts])
    back = deliver(file, images, labels)
    first = len(dataset.train)
    return dataclasses.replace(
        dataset, train=_rows(back, slice(None, first)), test=_rows(back, slice(first, None))
    )


def _rows(arrays: tuple[Images, Labels], rows: slice) -> "ImageArrays":
    from engine.data.arrays import ImageArrays

    return ImageArrays(images_NHWC=arrays[0][rows], labels_N=arrays[1][rows])


def deliver(file: Path, images_NHWC: Images, labels_N: Labels) -> tuple[Images, Labels]:
    """What FFCV reads from `file`, which holds just these images or is written anew.

    Safe under races: one process writes, the others wait for its lock and read. A file whose size
    or SHA-256 is not that of the day it was written (cut short, altered, foreign) is rewritten.

    Raises:
        RuntimeError: FFCV fails, takes too long or gives back other images.
        OSError: the cache folder cannot be written.
    """
    from engine.data.readers import locked

    if labels_N.min() < 0 or labels_N.max() >= 2**31:
        raise RuntimeError("FFCV is given labels outside 0 to 2**31 - 1")
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.with_suffix(".lock")):
        if _whole(file):
            try:
                return _asked("read", file, images_NHWC, labels_N)
            except RuntimeError as error:
                log.warning("%s: it is written anew", error)
        return _written(file, images_NHWC, labels_N)


def _written(file: Path, images_NHWC: Images, labels_N: Labels) -> tuple[Images, Labels]:
    """Write under a temporary name, read back, note size and hash, rename. Needs the lock."""
    from engine.files import sha256, write_text

    need, free = images_NHWC.nbytes + 64 * len(labels_N), shutil.disk_usage(file.parent).free
    if free < 1.1 * need + PAGES:
        raise RuntimeError(
            f"{file.parent} has {free / 1e6:.1f} MB free, and the set needs {need / 1e6:.1f}: free "
            "space or set data.cache"
        )
    for stale in file.parent.glob(f"{file.stem}.*.part"):
        stale.unlink(missing_ok=True)
    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        back = _asked("write", part, images_NHWC, labels_N)
        with open(part, "rb") as stream:
            os.fsync(stream.fileno())
        note = {"bytes": part.stat().st_size, "sha256": sha256(part)}
        part.replace(file)
        write_text(file.with_suffix(".json"), json.dumps(note))
    finally:
        part.unlink(missing_ok=True)
    return back


def _asked(task: str, file: Path, images_NHWC: Images, labels_N: Labels) -> tuple[Images, Labels]:
    """What a child reads from the file (after writing it, if that is the task), compared."""
    shape, split = images_NHWC.shape, images_NHWC.size
    payload = images_NHWC.tobytes() + labels_N.tobytes() if task == "write" else b""
    raw = bytearray(_child(task, file, shape, payload))  # bytes would make read-only arrays
    if len(raw) == split + 8 * len(labels_N):
        images = np.frombuffer(raw, np.uint8, count=split).reshape(shape)
        labels = np.frombuffer(raw[split:], np.int64)
        if np.array_equal(images, images_NHWC) and np.array_equal(labels, labels_N):
            return images, labels
    raise RuntimeError(f"FFCV gave back other images than it was given ({task} {file})")


def _whole(file: Path) -> bool:
    """Whether the file is still the one that was written, by size and SHA-256."""
    from engine.files import sha256

    try:
        note = json.loads(file.with_suffix(".json").read_text())
        whole = file.stat().st_size == note["bytes"] and sha256(file) == str(note["sha256"])
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError):
        whole = False  # the note itself is damaged
    if not whole:
        log.warning("%s is damaged: it is written anew", file)
    return whole


def _child(task: str, file: Path, shape: tuple[int, ...], payload: bytes) -> bytes:
    """Run this file as a script in a session of its own; end it and its workers when time is up."""
    limit = START_SECONDS + shape[0] / IMAGES_PER_SECOND
    quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    child = subprocess.Popen(
        [sys.executable, __file__, task, str(file), str(os.getpid()), *map(str, shape)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | quiet,
        start_new_session=True,
    )
    try:
        out, said = child.communicate(payload, timeout=limit)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"FFCV took over {limit:.0f} s to {task} {file}") from None
    finally:
        if child.returncode != 0:
            _end(child)
    if child.returncode != 0:
        last = said.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise RuntimeError(f"FFCV failed to {task} {file}: {last[0]}")
    return out


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End the whole session: first gently, so that Python's tracker removes shared memory."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
            child.wait(5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


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


def _child_write(file: str, shape: tuple[int, ...], source: BinaryIO) -> None:
    import multiprocessing

    from ffcv.fields import IntField, NDArrayField
    from ffcv.writer import DatasetWriter

    # FFCV's writer was made for fork; with one worker the bytes of the file repeat.
    multiprocessing.set_start_method("fork", force=True)
    count, *image = shape
    images = np.frombuffer(source.read(int(np.prod(shape))), np.uint8).reshape(shape)
    labels = np.frombuffer(source.read(8 * count), np.int64)
    if len(labels) != count:
        raise EOFError("the parent ended before all images were sent")
    fields = {"image": NDArrayField(np.dtype("uint8"), tuple(image)), "label": IntField()}
    writer = DatasetWriter(file, fields, num_workers=1)
    writer.from_indexed_dataset(list(zip(images, labels.tolist(), strict=True)), chunksize=1000)


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
        _child_write(file, shape, sys.stdin.buffer)
    _child_read(file, sink)
    sink.close()


if __name__ == "__main__":
    _child_main(*sys.argv[1:])
