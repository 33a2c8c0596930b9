"""The images of a set too large for memory: one file of bytes a machine, mapped by its processes.

Every machine makes the file from its own copy of the beton, which FFCV reads, and checks both by
SHA-256. What is mapped is held by the kernel's page cache: once for all processes, and only as far
as there is room.

R images of the table: the set's training split, its test split, then E extra ones.
"""

import contextlib
import dataclasses
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from engine.data import beton
from engine.data.arrays import Dataset, cache_dir, digest
from engine.data.readers import large, locked
from engine.files import sha256, write_text
from engine.plan import ImageTable
from engine.study import Data

Images = npt.NDArray[np.uint8]


def wanted(dataset: Dataset, data: Data) -> bool:
    """Whether the images are mapped from a file instead of held in memory.

    `data.spread` decides; "auto" is "beton" for sets that take over a quarter of the memory
    available, where FFCV is installed and `data.loader` allows it.

    Raises:
        RuntimeError: "beton" is asked for and FFCV is not installed.
    """
    if data.spread == "beton" and not beton.installed():
        raise RuntimeError("data.spread is 'beton', but FFCV is not installed: run setup.sh")
    if data.spread != "auto":
        return data.spread == "beton"
    nbytes = sum(part.images_NHWC.nbytes for part in (dataset.train, dataset.test))
    return large(nbytes) and data.loader != "resident" and beton.installed()


def made(dataset: Dataset, extra: Sequence[Images], data: Data) -> ImageTable:
    """Make the table of this machine; returns what every machine needs to open its own.

    The beton is written first where it is not there, whole.

    Raises:
        RuntimeError: FFCV fails, or there is no room in the cache.
    """
    parts = (dataset.train, dataset.test)
    extra_EHWC = np.concatenate([dataset.train.images_NHWC[:0], *extra])
    count = len(dataset.train) + len(dataset.test) + len(extra_EHWC)
    table = ImageTable(
        beton=dataset.digest(),
        beton_sha256="",
        digest="",
        shape=(count, *extra_EHWC.shape[1:]),
        extra_EHWC=extra_EHWC,
    )
    file, source = _paths(table, data)
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.with_name(f"{file.name}.lock")):
        known = _noted(file) and beton.whole(source)
        if not known:
            _require_room(file.parent, 3 * int(np.prod(table.shape)))
            with tempfile.TemporaryFile(dir=file.parent) as scratch, _anew(file, table) as into:
                beton.deliver(source, parts, into, scratch)
            known = beton.whole(source)
        return dataclasses.replace(table, beton_sha256=known, digest=_noted(file))


def opened(table: ImageTable, data: Data) -> Images:
    """The table on this machine, made from its own copy of the beton where that was not done yet.

    Writing to it changes nothing but this process's memory.

    Raises:
        ValueError: there is no copy, or a different one.
        RuntimeError: FFCV fails, or gives other images.
    """
    file, source = _paths(table, data)
    if not source.is_file():
        raise ValueError(
            f"it has no copy of {source}: copy that file from the driver's machine to every node, "
            "or set data.spread to 'memory'"
        )
    with locked(file.with_name(f"{file.name}.lock")):
        if _noted(file) != table.digest:
            _require_copy(source, table)
            _require_room(file.parent, int(np.prod(table.shape)))
            shape = (table.shape[0] - len(table.extra_EHWC), *table.shape[1:])
            with _anew(file, table) as into:
                beton.read(source, shape, into)
        if _noted(file) != table.digest:
            raise RuntimeError(f"FFCV reads other images from {source} than on the driver's side")
        return _mapped(file, table)


def _paths(table: ImageTable, data: Data) -> tuple[Path, Path]:
    """Of the table and of the beton on this machine."""
    folder = cache_dir(data).absolute() / "betons"
    own = f"-{digest([table.extra_EHWC])[:12]}" if len(table.extra_EHWC) else ""
    return folder / f"{table.beton}{own}.images", folder / f"{table.beton}.beton"


def _mapped(file: Path, table: ImageTable) -> Images:
    size = int(np.prod(table.shape))
    with open(file, "rb") as stream:
        memory = mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_COPY)
    return np.frombuffer(memory, np.uint8).reshape(table.shape)


def _noted(file: Path) -> str:
    """The SHA-256 of a table as it was made, if nobody touched it since; else nothing."""
    try:
        note, found = json.loads(file.with_name(f"{file.name}.json").read_text()), file.stat()
        if (note["bytes"], note["changed"]) == (found.st_size, found.st_mtime_ns):
            return str(note["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return ""


@contextlib.contextmanager
def _anew(file: Path, table: ImageTable) -> Iterator[BinaryIO]:
    """A new table under a temporary name, to be filled from the beton; the rest is done here."""
    for stale in file.parent.glob(f"{file.name}.*.new"):
        stale.unlink(missing_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.new")
    try:
        with open(part, "w+b") as into:
            yield into
            into.seek(0, os.SEEK_END)
            into.write(table.extra_EHWC.tobytes())
            into.flush()
            os.fsync(into.fileno())
        made, hashed = part.stat(), sha256(part)
        part.replace(file)
        note = {"bytes": made.st_size, "changed": made.st_mtime_ns, "sha256": hashed}
        write_text(file.with_name(f"{file.name}.json"), json.dumps(note))
    finally:
        part.unlink(missing_ok=True)


def _require_copy(file: Path, table: ImageTable) -> None:
    if sha256(file) != table.beton_sha256:
        raise ValueError(
            f"its {file} is not the driver's (SHA-256 {table.beton_sha256[:12]}…): copy that file "
            "from the driver's machine again"
        )


def _require_room(folder: Path, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < 1.1 * need:
        raise RuntimeError(
            f"{folder} has {free / 1e9:.1f} GB free, and the images need {need / 1e9:.1f} there: "
            "free space or set data.cache"
        )
