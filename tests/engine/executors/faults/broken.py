"""Real training that goes wrong inside, for one model: what causes it is put into the worker."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from unittest import mock

from engine import train as training
from engine.executors.base import Job, Stack
from engine.executors.ray_worker import Train
from engine.plan import ModelResult


def raises(model_id: int) -> AbstractContextManager[object]:
    """From the second epoch on the model is given a label that no class has."""
    plain, given = training.Lessons.batch, []

    def batch(lessons, sample_MB, key_M):
        images_MBCHW, labels_MB = plain(lessons, sample_MB, key_M)
        given.append(lessons)
        if given.count(lessons) > lessons.steps:
            labels_MB[slots(lessons.refs, model_id)] = 10
        return images_MBCHW, labels_MB

    return mock.patch.object(training.Lessons, "batch", batch)


def diverges(model_id: int) -> AbstractContextManager[object]:
    """The model takes steps so long that its loss becomes NaN."""
    plain = training.Descent.__init__

    def start(descent, study, refs, *others):
        plain(descent, study, refs, *others)
        descent.rate_M[slots(refs, model_id)] = 1e30

    return mock.patch.object(training.Descent, "__init__", start)


def slots(refs: Stack, model_id: int) -> list[int]:
    return [slot for slot, ref in enumerate(refs) if ref.model_id == model_id]


@dataclass(frozen=True, kw_only=True)
class Broken:
    """Trains with the cause in place. cause: `raises` or `diverges`."""

    train: Train
    cause: Callable[[int], AbstractContextManager[object]]
    model_id: int

    def __call__(self, job: Job, stack: Stack, on_epoch) -> list[ModelResult]:
        with self.cause(self.model_id):
            return self.train(job, stack, on_epoch)
