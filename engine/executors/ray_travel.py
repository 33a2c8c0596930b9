"""What travels to workers by value, so that it is the driver's whatever they have. Imports no Ray.

All else of this package travels by name: a worker imports its own. `launch` makes sure before that
the sources there are the driver's. Hence only the standard library is used here.
"""

import hashlib
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = ("engine", "kernels", "attacks")

_same: list[str] = []
"""In a worker: the digest that this process was found to share."""


class Ticket(NamedTuple):
    """What a worker must agree with. digest, folder: of the driver's sources.

    path: where workers on the driver's own machine import from, in place of what Ray decides.
    """

    digest: str
    folder: str
    path: Sequence[str] | None


def ticket(*, own_path: bool) -> Ticket:
    """The driver's. own_path: workers import exactly as the driver does."""
    path = [os.path.abspath(place) for place in sys.path] if own_path else None
    return Ticket(*sources(), path)


def sources() -> tuple[str, str]:
    """A digest of this package's own .py files, by content alone, and the folder they lie in."""
    seen, folders = hashlib.sha256(), []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        found = [] if spec is None else spec.submodule_search_locations or [str(spec.origin)]
        for place in map(Path, sorted(found)):
            folders.append(str(place.parent))
            for file in sorted(place.rglob("*.py")):
                text = file.read_bytes()
                seen.update(f"{name}/{file.relative_to(place).as_posix()} {len(text)}\n".encode())
                seen.update(text)
    return seen.hexdigest(), " and ".join(dict.fromkeys(folders)) or "nowhere"


def launch(agreed: tuple[Any, ...], function: str, pickled: Sequence[bytes], *others: Any) -> Any:
    """Runs in a worker: call `function` (module:name) with what was pickled, and `others`.

    Nothing of this package is imported, not even to unpickle, before its sources were compared,
    once a process. agreed: a ticket. A node that cannot run the driver's code answers with a dict
    of `node` and `refused`, a sentence.
    """
    digest, folder, path = agreed
    if path is not None:
        sys.path[:] = path
    sentence = "" if digest in _same else _other_sources(digest, folder)
    if not sentence:
        try:
            module, name = function.split(":")
            call = getattr(importlib.import_module(module), name)
            return call(*map(pickle.loads, pickled), *others)
        except ImportError as error:
            sentence = (
                f"it cannot import what training needs ({error}): install the same release with "
                "the same extras on every node"
            )
    ray: Any = importlib.import_module("ray")
    return {"node": ray.get_runtime_context().get_node_id(), "refused": sentence}


def _other_sources(wanted: str, folder: str) -> str:
    """Why this process must not train, or nothing."""
    digest, here = sources()
    if digest == wanted:
        _same.append(digest)
        return ""
    if here == folder:
        return (
            f"engine, kernels and attacks in {here} are not those that the driver was started "
            "with: if they were changed meanwhile, run the same command again, otherwise install "
            "the driver's release there"
        )
    return (
        f"its workers import engine, kernels and attacks from {here}, which are not those of the "
        f"driver in {folder}: install the driver's release on every node and start the run "
        "outside of other checkouts, or submit it as a job, which takes its sources along"
    )


def launching(agreed: tuple[Any, ...], function: str, *pickled: bytes) -> Callable[..., Any]:
    """`launch` with its last pickled arguments given: what is the same for all calls travels once
    to every worker.
    """

    def launched(first: bytes, *others: Any) -> Any:
        return launch(agreed, function, [first, *pickled], *others)

    launched.__qualname__ = launch.__qualname__  # what `ray status` and `ps` show
    return launched


def put_down(pid: int) -> None:
    """Kill a worker of this node that no longer answers."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return
    if title.startswith(b"ray::"):
        os.kill(pid, signal.SIGKILL)


class Board:
    """The actor that remembers every shard's latest sign of life."""

    def __init__(self) -> None:
        self._heard: dict[int, tuple[dict[str, Any], float]] = {}

    def hear(self, number: int, epochs: int, node: str, pid: int, over: bool = False) -> None:
        """A beat of a worker; the last one says that it is over."""
        if number in self._heard:  # a beat may come late
            over = over or self._heard[number][0]["over"]
        sign = {"epochs": epochs, "node": node, "pid": pid, "over": over}
        self._heard[number] = (sign, time.monotonic())

    def signs(self, wanted: list[int]) -> dict[int, dict[str, Any]]:
        """What was heard of these attempts, as fields of `Sign`; the others are forgotten."""
        now, known = time.monotonic(), set(wanted)
        self._heard = {n: heard for n, heard in self._heard.items() if n in known}
        return {
            number: {**sign, "age": now - heard} for number, (sign, heard) in self._heard.items()
        }
