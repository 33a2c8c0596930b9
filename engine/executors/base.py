"""What an executor is: it trains stacks somewhere and hands every result back to the caller.

Only the caller writes files. An executor knows nothing of the run directory.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.plan import ModelRef, ModelResult, StudyData
from engine.study import Study


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything a worker needs that is not a stack: study, data, device, numeric plan."""

    study: Study
    data: StudyData
    device: str
    kernel_plan: dict[str, str]


Stack = tuple[ModelRef, ...]
OnResult = Callable[[Sequence[ModelResult]], None]
OnProgress = Callable[[int, int], None]
"""Called with (index of the stack, epochs done)."""


class Executor(Protocol):
    """Trains every stack once; calls `on_result` in the caller's process as each one ends."""

    name: str

    def run(
        self, job: Job, stacks: Sequence[Stack], on_result: OnResult, on_progress: OnProgress
    ) -> None:
        """Return when every stack is trained and its result was handed over.

        Raises:
            RuntimeError: a worker died or a stack failed; results handed over before stay valid.
        """


def timed_run(job: Job, stack: Stack, on_epoch: Callable[[int], None]) -> list[ModelResult]:
    """Train one stack in this process; every result carries its share of the time."""
    from engine.train import run_stack

    start = time.perf_counter()
    results = run_stack(job.study, stack, job.data, job.device, on_epoch)
    share = (time.perf_counter() - start) / len(stack)
    return [dataclasses.replace(result, seconds=share) for result in results]
