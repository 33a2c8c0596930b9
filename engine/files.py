"""Files that are either whole or absent: temporary name, fsync, rename."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_atomic(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a temporary neighbour of `path`, then rename it into place.

    Raises:
        OSError: nothing is left under `path` or beside it.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_text(path: Path, text: str) -> None:
    """`write_atomic` for text."""
    write_atomic(path, lambda stream: stream.write(text.encode()))


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
