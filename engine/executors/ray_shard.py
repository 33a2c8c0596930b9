"""A shard, an attempt to train it, and how patient the driver is; plain facts. Imports no Ray."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.executors.base import Stack


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How much patience a fault gets.

    retries: how often a shard is trained again after its worker or node was lost.
    silence: seconds without a sign of life after which a running shard is given up, or of
        waiting after shards submitted later began.
    straggling: times the median, after which a running shard is reported, once it runs for
        `noticeable` seconds.
    fetch: seconds after which a worker stops waiting for the study's data.
    hopeless: failed shards, with none done, after which the study is given up.
    """

    retries: int = 3
    silence: float = 90.0
    straggling: float = 3.0
    noticeable: float = 60.0
    fetch: float = 300.0
    hopeless: int = 3


@dataclass(frozen=True, kw_only=True)
class Sign:
    """A worker's latest sign of life.

    age: seconds since it was heard. over: whether it told that it is done with the shard.
    """

    epochs: int
    node: str
    pid: int
    age: float
    over: bool = False

    @property
    def worker(self) -> str:
        """A short name: node and process."""
        return f"{self.node[:6]}/{self.pid}"


@dataclass(eq=False)
class Shard:
    """A stack and its history. origin: index of the caller's stack that it is part of.

    epochs: how many of them any attempt has reached. killed: whether a worker process was killed
    while it trained this, as by a kernel that is out of memory.
    """

    origin: int
    stack: Stack
    epochs: int = 0
    crashes: int = 0
    killed: bool = False
    halved: bool = False
    state: str = "waiting"


@dataclass(eq=False)
class Attempt:
    """One training of a shard, from submission to its outcome.

    avoids: nodes that it keeps off. most: models that the nodes it may go to can train at once, 0
    for any number; attempts of one `most` wait for the same nodes.
    """

    shard: Shard
    submitted: float
    avoids: frozenset[str] = frozenset()
    most: int = 0
    begun: float | None = None
    overtaken: float | None = None
    sign: Sign | None = None
    abandoned: bool = False


def describe(stack: Stack) -> str:
    """A stack in words.

    >>> from engine.plan import ModelRef
    >>> describe(tuple(ModelRef(mix="clean", arm="bn", model_id=m) for m in (4, 5, 6)))
    'clean/bn models 4-6'
    """
    cells: dict[tuple[str, str], list[int]] = {}
    for ref in stack:
        cells.setdefault((ref.mix, ref.arm), []).append(ref.model_id)
    return ", ".join(f"{mix}/{arm} {_numbers(ids)}" for (mix, arm), ids in cells.items())


def _numbers(ids: Sequence[int]) -> str:
    if len(ids) == 1:
        return f"model {ids[0]}"
    if list(ids) == list(range(ids[0], ids[-1] + 1)):
        return f"models {ids[0]}-{ids[-1]}"
    return "models " + ", ".join(map(str, ids))
