"""What an executor is: it trains stacks somewhere and hands every result back to the caller.

Only the caller writes files. An executor knows nothing of the run directory.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Who is told how the work goes: sentences for people, figures for `engine status`."""

    say: Callable[[str], None]
    figures: Callable[[Mapping[str, Any]], None]


class Place(Protocol):
    """Where stacks will be trained, as far as planning must know before anything is trained."""

    device: str

    def workers(self, study: Study) -> int:
        """How many stacks are trained at once."""

    def fit(self, study: Study, workers: int) -> Study:
        """The study with a memory limit that holds here, for planning only."""

    def numerics(self) -> Mapping[str, Any]:
        """What decides a model's bits there; see engine.manifest.numerics."""

    def hardware(self) -> Mapping[str, Any]:
        """Processors and GPUs, for the manifest."""

    def executor(self, workers: int, watch: Watch) -> Executor:
        """What trains there."""


def timed_run(job: Job, stack: Stack, on_epoch: Callable[[int], None]) -> list[ModelResult]:
    """Train one stack in this process; every result carries its share of the time."""
    from engine.train import run_stack

    start = time.perf_counter()
    results = run_stack(job.study, stack, job.data, job.device, on_epoch)
    share = (time.perf_counter() - start) / len(stack)
    return [dataclasses.replace(result, seconds=share) for result in results]
