"""Files that are either whole or absent: temporary name, fsync, rename."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

PIECE = 2**20
"""Bytes of a single write. Linux looks for huge pages for one of two megabytes, which can take it
four times as long."""


def write_atomic(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a temporary neighbour of `path`, then rename it into place.

    Raises:
        OSError: nothing is left under `path` or beside it.
    """
    write_together({path: write})


def write_together(writes: Mapping[Path, Callable[[BinaryIO], object]]) -> None:
    """`write_atomic` for files of one folder, renamed when all are filled, the last one first.

    Where the first file is in place, so are the others.

    Raises:
        OSError: none of the temporary files is left.
    """
    parts = {path: path.with_name(f".{path.name}.{os.getpid()}.part") for path in writes}
    try:
        for path, write in writes.items():
            with open(parts[path], "wb") as stream:
                write(stream)
                stream.flush()
                os.fsync(stream.fileno())
        for path in reversed(parts):
            parts[path].replace(path)
    except BaseException:
        for part in parts.values():
            part.unlink(missing_ok=True)
        raise
    folder = os.open(next(iter(writes)).parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_hashed(stream: BinaryIO, blocks: Iterable[npt.NDArray[Any]]) -> str:
    """Write the bytes of contiguous arrays; returns their SHA-256 in hex."""
    seen = hashlib.sha256()
    for block in blocks:
        flat = block.reshape(-1).view(np.uint8)
        for start in range(0, len(flat), PIECE):
            piece = flat[start : start + PIECE].data
            seen.update(piece)
            stream.write(piece)
    return seen.hexdigest()


def write_text(path: Path, text: str) -> None:
    """`write_atomic` for text."""
    write_atomic(path, lambda stream: stream.write(text.encode()))


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
