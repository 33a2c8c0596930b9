"""Training on this machine: a pool of one-thread processes over the cores, or one GPU.

One process a core with one torch thread each beats threads inside a process and keeps a model's
bits independent of the machine's core count.
"""

import dataclasses
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import SimpleQueue
from typing import Any

from engine import manifest
from engine.executors.base import Job, OnProgress, OnResult, Stack, Watch, timed_run
from engine.executors.shared import SharedStudyData, attach
from engine.plan import ModelResult
from engine.study import Study

POLL_SECONDS = 0.25

_worker: dict[str, Any] = {}
"""What the initializer leaves for the tasks of a worker process."""


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


class LocalPlace:
    """This machine: every core it may use, or its GPU."""

    def __init__(self, device: str) -> None:
        self.device = device

    def workers(self, study: Study) -> int:
        """One on a GPU, else as many as asked for or as there are cores."""
        wanted = study.resources.processes
        return 1 if self.device == "cuda" else usable_cores() if wanted == "auto" else wanted

    def fit(self, study: Study, workers: int) -> Study:
        """The study as it is: the planner asks this machine for its memory."""
        return study

    def numerics(self) -> dict[str, Any]:
        """Implementations, ISA or SM and versions here."""
        return manifest.numerics(self.device)

    def hardware(self) -> dict[str, Any]:
        """Processor, cores and GPU."""
        return manifest.hardware(self.device)

    def executor(self, workers: int, watch: Watch) -> "LocalExecutor":
        """Worker processes, or this process on a GPU."""
        return LocalExecutor(workers)


class LocalExecutor:
    """Worker processes on the CPU, or the calling process on a GPU."""

    name = "local"

    def __init__(self, processes: int) -> None:
        self.processes = processes

    def run(
        self, job: Job, stacks: Sequence[Stack], on_result: OnResult, on_progress: OnProgress
    ) -> None:
        """Train every stack; see `Executor.run`."""
        if job.device == "cpu":
            self._run_pool(job, stacks, on_result, on_progress)
        else:
            _run_here(job, stacks, on_result, on_progress)

    def _run_pool(
        self, job: Job, stacks: Sequence[Stack], on_result: OnResult, on_progress: OnProgress
    ) -> None:
        context = multiprocessing.get_context("spawn")
        progress: SimpleQueue[tuple[int, int]] = context.SimpleQueue()
        shared = SharedStudyData(job.data)
        light = dataclasses.replace(job, data=shared.light)
        workers = min(self.processes, len(stacks))
        arguments = (light, shared.where, progress, os.getpid())
        pool = ProcessPoolExecutor(workers, context, _start_worker, arguments)
        try:
            waiting = {pool.submit(_train, i, stack) for i, stack in enumerate(stacks)}
            while waiting:
                finished, waiting = wait(waiting, POLL_SECONDS, FIRST_COMPLETED)
                while not progress.empty():
                    on_progress(*progress.get())
                for future in finished:
                    on_result(_outcome(future))
        finally:
            _end(pool)
            shared.close()


def _run_here(
    job: Job, stacks: Sequence[Stack], on_result: OnResult, on_progress: OnProgress
) -> None:
    """One GPU: stacks one after the other in this process."""
    import kernels

    kernels.adopt(job.kernel_plan)
    for index, stack in enumerate(stacks):
        on_result(timed_run(job, stack, functools.partial(on_progress, index)))


def _outcome(future: "Future[list[ModelResult]]") -> list[ModelResult]:
    try:
        return future.result()
    except BrokenProcessPool:
        raise RuntimeError(
            "a training process was killed (out of memory?): finished models are kept; run the "
            "same command again, with a smaller --set resources.stack=… if memory was short"
        ) from None


def _end(pool: ProcessPoolExecutor) -> None:
    """Stop at once: what is not handed over by now is given up."""
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()


def _start_worker(
    light: Job, where: Any, progress: "SimpleQueue[tuple[int, int]]", parent: int
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    import torch

    import kernels

    torch.set_num_threads(1)
    kernels.keep_memory()
    kernels.adopt(light.kernel_plan)
    _worker["job"] = dataclasses.replace(light, data=attach(light.data, where, light.study.data))
    _worker["progress"] = progress


def _follow(parent: int) -> None:
    """End with the parent, however it ends."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def _train(index: int, stack: Stack) -> list[ModelResult]:
    progress = _worker["progress"]
    return timed_run(_worker["job"], stack, lambda done: progress.put((index, done)))
