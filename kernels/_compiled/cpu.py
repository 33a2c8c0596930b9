"""Compiled loops: numba with a cache that knows every source a loop is made from."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
FAST = {"contract", "reassoc", "nsz"}
"""Licence to fuse and reorder: the same code for the same shape, so the same bits for a model."""

ENTRIES = ("_stack", "_model")
"""How the names of functions end that are called from Python."""


def compiler(*sources: str, exact: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """A decorator like numba.njit(cache=True) for functions made from these source files.

    Numba's own cache looks at the date of the decorated function's file alone, and goes stale
    when a function it calls changes elsewhere; here the stamp is a digest of all the sources. A
    numba without that stamp, or a read-only disk, compiles without a cache rather than with a
    stale one. `exact` rounds every operation as written.

    Only functions called from Python, those named ENTRIES, are cached; all others are inlined into
    them. A helper left as a symbol of its own would be called in whichever compiled copy the
    process holds, and the copies are fused and reordered differently: bits would depend on what
    was compiled here and what came from the cache.
    """
    joined = b"".join(Path(source).read_bytes() for source in (__file__, *sources))
    stamp = hashlib.sha256(joined).hexdigest()
    options = OPTIONS if exact else {**OPTIONS, "fastmath": FAST}

    def decorate(function: Callable[..., Any]) -> Any:
        if not function.__name__.endswith(ENTRIES):
            return numba.njit(forceinline=True, **options)(function)
        try:
            compiled = numba.njit(cache=True, **options)(function)
            compiled._cache._cache_file._source_stamp = stamp
        except (AttributeError, RuntimeError):
            return numba.njit(**options)(function)
        return compiled

    return decorate
