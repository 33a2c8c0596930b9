"""A training that sleeps: arrays of real names and sizes, a function of the model alone."""

import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.executors.base import Job, Stack
from engine.executors.ray_worker import OTHER_MACHINES, Train, WrongMachine
from engine.plan import ModelRef, ModelResult


def mark(marks: str, stack: Stack) -> int:
    """Leave a file that says: this stack is trained from now on; how often it was before."""
    name = f"{stack[0].mix}-{stack[0].arm}-" + "-".join(str(ref.model_id) for ref in stack)
    before = len(list(Path(marks).glob(f"{name}.*")))
    (Path(marks) / f"{name}.{time.time_ns()}.{os.getpid()}").touch()
    return before


@dataclass(frozen=True, kw_only=True)
class Marked:
    """Real training that leaves marks as well."""

    marks: str
    train: Train

    def __call__(self, job: Job, stack: Stack, on_epoch) -> list[ModelResult]:
        mark(self.marks, stack)
        return self.train(job, stack, on_epoch)


@dataclass(frozen=True, kw_only=True)
class FakeTrain:
    """Takes `seconds` a stack, leaves a mark for every start, and misbehaves where asked to.

    raises: a model that no stack can be trained with. mib: what every model of a stack occupies.
    bound_mib: what the process can allocate at most, 0 for no limit.
    refuses: this machine is of another kind than the study's.
    cuts: scores of one sample are missing.
    diverges: a model whose scores are NaN. freezes: a model whose worker stops, the first time.
    """

    marks: str
    seconds: float = 0.5
    raises: int = -1
    diverges: int = -1
    freezes: int = -1
    refuses: bool = False
    cuts: bool = False
    mib: int = 0
    bound_mib: int = 0
    ballast_mb: int = 0

    def __call__(self, job: Job, stack: Stack, on_epoch) -> list[ModelResult]:
        ids = [ref.model_id for ref in stack]
        before = mark(self.marks, stack)
        if self.raises in ids:
            raise ValueError(f"model {self.raises} cannot be trained")
        if self.refuses:
            raise WrongMachine(f"isa is AVX2, the run has AVX512: {OTHER_MACHINES}")
        if self.freezes in ids and not before:
            os.kill(os.getpid(), signal.SIGSTOP)
        epochs = job.study.train.epochs
        held = self.occupy(len(stack))
        for done in range(epochs):
            time.sleep(self.seconds / epochs)
            on_epoch(done + 1)
        del held
        return [self.result(job, ref) for ref in stack]

    def occupy(self, models: int) -> list[np.ndarray]:
        """Memory that is touched, too."""
        before = resource.getrlimit(resource.RLIMIT_AS)
        if self.bound_mib:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            bound = pages * resource.getpagesize() + self.bound_mib * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (bound, before[1]))
        try:
            return [np.ones(self.mib * 2**20, np.uint8) for _ in range(models)]
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    def result(self, job: Job, ref: ModelRef) -> ModelResult:
        table = job.data.tables[ref.mix]
        seed = [ref.model_id, *f"{ref.mix}/{ref.arm}".encode()]
        random = np.random.default_rng(seed)
        samples, views = len(table.label_N), job.study.query.views
        population, epochs = len(job.data.population_labels_Z), job.study.train.epochs
        phi_NQ = random.normal(size=(samples, views)).astype(np.float32)
        if ref.model_id == self.diverges:
            phi_NQ[:] = np.nan
        arrays = {
            "phi_NQ": phi_NQ,
            "correct_N": random.random(samples) < 0.5,
            "population_phi_ZQ": random.normal(size=(population, views)).astype(np.float32),
            "population_correct_Z": random.random(population) < 0.5,
            "train_loss_E": random.random(epochs).astype(np.float32),
            "diverged": np.array(ref.model_id == self.diverges),
        }
        if self.cuts:
            arrays["phi_NQ"] = phi_NQ[1:]
        if self.ballast_mb:
            arrays["ballast_X"] = random.random(self.ballast_mb * 131_072)
        return ModelResult(ref=ref, arrays=arrays, seconds=self.seconds / 2)
