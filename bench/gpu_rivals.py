"""Rivals of a stacked training step on one GPU, all in plain torch (gate G1).

M models, B batch.
"""

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

Step = Callable[[], None]


@dataclass(frozen=True)
class Workload:
    """One network and its batch; small enough to be sent to another process."""

    net: str
    batch: int
    device: str

    def build(self) -> nn.Module:
        """The network as anybody would write it, with torch's own batch norm."""
        from engine.models import build
        from engine.sequential import plain

        net = plain(build(self.net, norm="batch", classes=10, channels=3, size=32))
        return net.to(self.device).train()

    def images(self, models: int) -> tuple[Tensor, Tensor]:
        """Images (M, B, 3, 32, 32) and labels (M, B)."""
        images = torch.randn(models, self.batch, 3, 32, 32, device=self.device)
        return images, torch.zeros(models, self.batch, dtype=torch.int64, device=self.device)


def one_net(work: Workload) -> Step:
    """A training step of one network, channels-last, that can be captured as a CUDA graph."""
    last = torch.channels_last
    net = work.build().to(memory_format=last)
    images, labels = work.images(1)
    batch = images[0].contiguous(memory_format=last)
    optimiser = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9, foreach=True)

    def step() -> None:
        optimiser.zero_grad()
        F.cross_entropy(net(batch), labels[0]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


def plain_vmap(work: Workload, models: int) -> Step:
    """A step of a stack by torch.func alone: vmap over torch's own layers, foreach SGD."""
    nets = [work.build() for _ in range(models)]
    params, buffers = torch.func.stack_module_state(nets)
    images, labels = work.images(models)
    optimiser = torch.optim.SGD(params.values(), 1e-3, momentum=0.9, foreach=True)

    def loss(params: Any, buffers: Any, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(nets[0], (params, buffers), (images,)), labels)

    def step() -> None:
        optimiser.zero_grad()
        torch.func.vmap(loss)(params, buffers, images, labels).sum().backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


def processes(work: Workload, count: int, seconds: float) -> float:
    """Seconds a step and model of `count` processes that train at once on one GPU.

    They share it as the driver lets them: in turns, or at once where an MPS daemon runs.
    """
    context = multiprocessing.get_context("spawn")
    start, answers = context.Barrier(count), context.SimpleQueue()
    team = [
        context.Process(target=_train, args=(work, seconds, start, answers), daemon=True)
        for _ in range(count)
    ]
    for member in team:
        member.start()
    for member in team:
        member.join()
    if any(member.exitcode for member in team):
        return float("nan")
    rates: list[float] = [answers.get() for _ in team]
    return 1 / sum(rates)


def _train(work: Workload, seconds: float, start: Any, answers: Any) -> None:
    """Steps a second of this process, while the others train too."""
    if work.device == "cpu":
        torch.set_num_threads(1)
    try:
        step = one_net(work)
        step()
        _finish(work.device)
        start.wait(60)
    except BaseException:
        start.abort()
        raise
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        step()
        _finish(work.device)
        steps += 1
    answers.put(steps / (time.perf_counter() - began))


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
