"""What runs in a Ray worker: one stack trained, signs of life on the way.

Workers import this by name, after `ray_travel.launch` compared their sources with the driver's.
"""

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from engine.data.table import opened
from engine.executors.base import Job, Stack, timed_run
from engine.plan import ModelResult

BEAT_SECONDS = 2.0

_process: dict[str, Any] = {}
"""The study that this worker process serves, with its own copy of the data."""


class Train(Protocol):
    """Trains a stack in the worker's process, calling back with the number of epochs done."""

    def __call__(
        self, job: Job, stack: Stack, on_epoch: Callable[[int], None]
    ) -> list[ModelResult]:
        """The results of a stack, in order."""


class OutOfMemory(Exception):
    """Memory of host or GPU ran out; the process itself survived."""


class WrongMachine(Exception):
    """This machine cannot run the numeric plan, or lacks the images; says what to do."""


OTHER_MACHINES = "use nodes like those the run was started on, or --out for a fresh run"


@dataclass(frozen=True, kw_only=True)
class Order:
    """One shard to train. run: names the study for the worker's copy of the data."""

    run: str
    number: int
    stack: Stack
    node: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainStack:
    """Training proper. numerics: device, ISA or SM and versions that the study started with."""

    numerics: Mapping[str, Any]

    def __call__(
        self, job: Job, stack: Stack, on_epoch: Callable[[int], None]
    ) -> list[ModelResult]:
        """Train, after making sure once a process that this machine's models are comparable."""
        if _process.get("adopted") != job.kernel_plan:
            self._adopt(job)
            _process["adopted"] = job.kernel_plan
        return timed_run(job, stack, on_epoch)

    def _adopt(self, job: Job) -> None:
        import torch

        import kernels
        from engine.manifest import numerics

        torch.set_num_threads(1)
        kernels.keep_memory()
        here = numerics(job.device)
        for name in ("device", "isa", "versions"):
            if here[name] != self.numerics[name]:
                raise WrongMachine(
                    f"{name} is {here[name]}, the run has {self.numerics[name]}: {OTHER_MACHINES}"
                )
        try:
            kernels.adopt(job.kernel_plan)
        except (ValueError, RuntimeError) as error:
            raise WrongMachine(str(error)) from None


def task(order: Order, train: Train, shared: list[Any], board: Any) -> list[ModelResult]:
    """What the driver submits. `shared` holds the reference to the job inside a list, so that Ray
    does not ask the node that has a copy, maybe a frozen one, for a place first; and the patience.
    """
    import ray

    node = ray.get_runtime_context().get_node_id()
    try:
        here = dataclasses.replace(order, node=node)
        return train_order(lambda: ray.get(shared[0], timeout=shared[1]), here, train, board)
    except WrongMachine as error:
        raise WrongMachine(node, str(error)) from None


def train_order(
    fetch: Callable[[], Job], order: Order, train: Train, board: Any
) -> list[ModelResult]:
    """Train one shard. fetch: reads the job, once a process."""
    with _Pulse(board, order) as pulse:
        try:
            return train(_own(order.run, fetch), order.stack, pulse.epoch)
        except MemoryError as error:
            raise OutOfMemory(str(error) or "host memory") from None
        except RuntimeError as error:
            if type(error).__name__ not in ("OutOfMemoryError", "OutOfMemory"):
                raise
            _free_gpu()
            raise OutOfMemory(str(error).split("\n")[0][:200]) from None


def sent(job: Job) -> Job:
    """What travels: all of it, but for images of which every node has its own copy."""
    if job.data.table is None:
        return job
    return dataclasses.replace(job, data=job.data.without_images())


def _own(run: str, fetch: Callable[[], Job]) -> Job:
    """The job with private images and tables: those of the object store are read-only."""
    if _process.get("run") != run:
        _process.clear()
        job = fetch()
        tables = {
            name: dataclasses.replace(
                table, **{f.name: getattr(table, f.name).copy() for f in dataclasses.fields(table)}
            )
            for name, table in job.data.tables.items()
        }
        data = dataclasses.replace(
            job.data,
            images_RHWC=_images(job),
            population_rows_Z=job.data.population_rows_Z.copy(),
            population_labels_Z=job.data.population_labels_Z.copy(),
            tables=tables,
        )
        _process.update(run=run, job=dataclasses.replace(job, data=data))
    own: Job = _process["job"]
    return own


def _images(job: Job) -> npt.NDArray[np.uint8]:
    if job.data.table is None:
        return job.data.images_RHWC.copy()
    try:
        return opened(job.data.table, job.study.data)
    except (ValueError, RuntimeError, OSError) as error:
        raise WrongMachine(str(error)) from None


def _free_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Pulse:
    """Beats while a shard is trained, from a thread: silence means a frozen machine."""

    def __init__(self, board: Any, order: Order) -> None:
        self._board, self._order, self._epochs = board, order, 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> "_Pulse":
        self._tell()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._tell()

    def epoch(self, done: int) -> None:
        """Note progress; tell it, unless that was done just now."""
        self._epochs = done
        if time.monotonic() - self._told > BEAT_SECONDS / 4:
            self._tell()

    def _beat(self) -> None:
        while not self._end.wait(BEAT_SECONDS):
            self._tell()

    def _tell(self) -> None:
        self._told = time.monotonic()
        try:
            place, over = (self._order.node, os.getpid()), self._end.is_set()
            self._board.hear.remote(self._order.number, self._epochs, *place, over)
        except Exception:  # a lost board turns progress off, never training
            return
