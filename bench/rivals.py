"""The arms of bench/throughput.py and the processes that run them, one a core.

M models, B batch. Heavy imports sit inside functions: the parent only sends names.
"""

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from engine.plan import ModelRef, StudyData
    from engine.study import Study

ARMS = ("stacked", "sequential", "best-loop", "best-loop-last")
CHECKED_STEPS = 3
"""Losses of so many first steps are handed back for comparison between arms."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every process trains: a network on `steps` batches of random or given images."""

    net: str
    norm: str
    batch: int
    steps: int
    stack: int
    data: str


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One process's share of one repeat of one arm."""

    wall: float
    cpu: float
    first_losses: list[list[float]]


def workload(job: Job, models: int) -> tuple["Study", "StudyData"]:
    """A study of one arm with exactly `steps` batches a model, without outliers."""
    from engine.membership import keep_mask
    from engine.plan import MixTable, StudyData
    from engine.study import Arm, Data, Mix, Study, Train

    study = Study(
        name="bench",
        question="how fast?",
        data=Data(name="digits"),
        mixes={"clean": Mix()},
        arms={"arm": Arm(net=job.net, norm=job.norm)},
        models=models,
        train=Train(epochs=1, batch=job.batch, lr=0.01, schedule="constant"),
    )
    samples = 2 * job.batch * job.steps
    images, labels, classes = _images(job, samples)
    pool = images / 255.0
    table = MixTable(
        label_N=labels,
        true_label_N=labels,
        kind_N=np.zeros(samples, dtype=np.uint8),
        image_N=np.arange(samples),
        keep_MN=keep_mask(study.membership, study.seed, models, np.zeros(samples, dtype=np.int64)),
    )
    data = StudyData(
        images_RHWC=images,
        population_rows_Z=np.zeros(0, dtype=np.int64),
        population_labels_Z=np.zeros(0, dtype=np.int64),
        tables={"clean": table},
        classes=classes,
        mean_C=tuple(pool.mean((0, 1, 2)).tolist()),
        std_C=tuple(pool.std((0, 1, 2)).tolist()),
    )
    return study, data


def _images(job: Job, samples: int) -> tuple[Any, Any, int]:
    if not job.data:
        side, channels = (28, 1) if job.net == "lenet" else (32, 3)
        random = np.random.default_rng(0)
        images = random.integers(0, 256, (samples, side, side, channels), dtype=np.uint8)
        return images, random.integers(0, 10, samples), 10
    with np.load(job.data) as file:
        images, labels = file["train_images"], file["train_labels"].astype(np.int64)
    if images.ndim == 3:
        images = images[..., None]
    chosen = np.resize(np.arange(len(images)), samples)
    return np.ascontiguousarray(images[chosen]), labels[chosen], int(labels.max()) + 1


def train_stacked(
    job: Job, study: "Study", data: "StudyData", refs: Sequence["ModelRef"]
) -> Iterator[list["Tensor"]]:
    """Train stack after stack; yields nothing but the losses (M, B) of every step at each end."""
    import torch

    from engine import signals, train

    for first in range(0, len(refs), job.stack):
        chosen = refs[first : first + job.stack]
        skeleton, state = train.start(study, chosen, data)
        shown = signals.pictures(data, "cpu", torch.float32)
        lessons = train.Lessons(study, chosen, data, shown)
        descent = train.Descent(study, chosen, skeleton.train(), state, lessons.steps)
        losses = [descent.step(*pair) for pair in lessons.epoch(0)]
        yield from zip(*(loss_MB.mean(1) for loss_MB in losses[:CHECKED_STEPS]), strict=True)


def train_sequential(
    job: Job, study: "Study", data: "StudyData", refs: Sequence["ModelRef"]
) -> Iterator[list[float]]:
    """The oracle, model after model."""
    from engine.sequential import train_model

    for ref in refs:
        yield train_model(study, ref, data)[1][:CHECKED_STEPS]


def train_best_loop(
    job: Job, study: "Study", data: "StudyData", refs: Sequence["ModelRef"], *, last: bool
) -> Iterator[list["Tensor"]]:
    """Rival B: everything resident, nothing read back, torch's fused SGD."""
    import torch
    import torch.nn.functional as F

    from engine import schedule
    from engine.sequential import plain
    from engine.stack import initialised
    from engine.train import maker

    layout = torch.channels_last if last else torch.contiguous_format
    mean, std = (torch.tensor(v, dtype=torch.float32) for v in (data.mean_C, data.std_C))
    pixels = (torch.from_numpy(data.images_RHWC) / 255 - mean) / std
    images = pixels.permute(0, 3, 1, 2).contiguous(memory_format=layout)
    table = data.tables["clean"]
    labels = torch.from_numpy(table.label_N)
    for ref in refs:
        net = plain(initialised(maker(study, "arm", data), study.seed, ref.model_id))
        net = net.to(memory_format=layout).train()
        sgd = torch.optim.SGD(
            net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True
        )
        members = np.flatnonzero(table.keep_MN[ref.model_id])
        order = schedule.epoch_batches(study.seed, ref.model_id, 0, members, job.steps * job.batch)
        first = []
        for step, index in enumerate(torch.split(torch.from_numpy(order), job.batch)):
            sgd.zero_grad()
            loss = F.cross_entropy(net(images[index]), labels[index])
            loss.backward()  # type: ignore[no-untyped-call]
            sgd.step()
            if step < CHECKED_STEPS:
                first.append(loss.detach())
        yield first


def run_arm(job: Job, arm: str, study: "Study", data: "StudyData", ids: Sequence[int]) -> Timing:
    """Train the given models by one arm in this process."""
    from engine.plan import ModelRef

    refs = [ModelRef(mix="clean", arm="arm", model_id=i) for i in ids]
    wall, cpu = time.perf_counter(), time.process_time()
    if arm == "stacked":
        losses: list[Any] = list(train_stacked(job, study, data, refs))
    elif arm == "sequential":
        losses = list(train_sequential(job, study, data, refs))
    else:
        last = arm == "best-loop-last"
        losses = list(train_best_loop(job, study, data, refs, last=last))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Timing(wall=wall, cpu=cpu, first_losses=[[float(v) for v in one] for one in losses])


def worker(pipe: Any, job: Job, models: int, ids: Sequence[int]) -> None:
    """Serve runs of arms until told to stop; all arms keep freed memory, as training does."""
    import torch

    import kernels

    torch.set_num_threads(1)
    kernels.keep_memory()
    study, data = workload(job, models)
    while (request := pipe.recv()) is not None:
        arm, some = request
        pipe.send(run_arm(job, arm, study, data, ids[: some or None]))


class Team:
    """One process a core, each with its share of the models."""

    def __init__(self, job: Job, models: int, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        shares = [list(range(p, models, processes)) for p in range(processes)]
        self.pipes, self.members = [], []
        for share in shares:
            mine, theirs = context.Pipe()
            member = context.Process(target=worker, args=(theirs, job, models, share), daemon=True)
            member.start()
            self.pipes.append(mine)
            self.members.append(member)

    def run(self, arm: str, some: int = 0) -> list[Timing]:
        """All processes at once run an arm on all (or the first `some`) of their models."""
        for pipe in self.pipes:
            pipe.send((arm, some))
        return [pipe.recv() for pipe in self.pipes]

    def close(self) -> None:
        """Let the processes end."""
        for pipe, member in zip(self.pipes, self.members, strict=True):
            pipe.send(None)
            member.join()
