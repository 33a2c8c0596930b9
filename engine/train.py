"""Train a stack: M models of one architecture, step by step together, each on its own members.

M models, N samples, B batch, S steps an epoch, E epochs. A model's result is a function of the
study, its mix, its arm and its id; nothing here reads how many models share the stack.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import kernels
from engine import schedule, seeds, signals, stack
from engine.models import build
from engine.models.layers import lr_factors
from engine.plan import ModelRef, ModelResult, StudyData, family
from engine.probes import Watch
from engine.signals import Arrays, Pictures
from engine.stack import StackedState, Tensors
from engine.study import Study

logger = logging.getLogger("engine")

Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained stack and what was noted on the way, one dict of arrays a model."""

    skeleton: nn.Module
    state: StackedState
    shown: Pictures
    noted: list[Arrays]


def run_stack(
    study: Study,
    refs: Sequence[ModelRef],
    data: StudyData,
    device: torch.device | str,
    progress: Progress,
) -> list[ModelResult]:
    """Train a stack and ask it about every sample and population image.

    Args:
        study: the study, resolved.
        refs: the models of the stack; their arms may differ in scalars only.
        data: images, sample tables and keep masks.
        device: where to train.
        progress: called with the number of epochs done, after each.

    Returns:
        One result a ref, in order. A model whose loss became non-finite is marked `diverged`.
    """
    trained = train_stack(study, refs, data, device, progress)
    answers = signals.query_stack(study, refs, data, trained.skeleton, trained.state, trained.shown)
    results = []
    for ref, said, noted in zip(refs, answers, trained.noted, strict=True):
        arrays = {**said, **noted}
        finite = np.isfinite(arrays["phi_NQ"]).all() and np.isfinite(arrays["train_loss_E"]).all()
        arrays["diverged"] = np.array(not finite)
        if not finite:
            logger.warning("%s/%s model %d diverged", ref.mix, ref.arm, ref.model_id)
        dense = {name: np.array(value, order="C") for name, value in arrays.items()}
        results.append(ModelResult(ref=ref, arrays=dense))
    return results


def train_stack(
    study: Study,
    refs: Sequence[ModelRef],
    data: StudyData,
    device: torch.device | str,
    progress: Progress,
) -> Trained:
    """Train the models of a stack from their initial values to the last epoch."""
    dtype = torch.float64 if study.train.precision == "float64" else torch.float32
    skeleton, state = start(study, refs, data)
    state = state.to(device, dtype)
    shown = signals.pictures(data, device, dtype)
    lessons = Lessons(study, refs, data, shown)
    descent = Descent(study, refs, skeleton, state, lessons.steps)
    watch = Watch(study, refs, data)
    kept: list[list[Arrays]] = []
    for epoch in range(study.train.epochs):
        skeleton.train()
        loss_MB = torch.zeros(len(refs), study.train.batch, dtype=torch.float64, device=device)
        for images_MBCHW, labels_MB in lessons.epoch(epoch):
            loss_MB += descent.step(images_MBCHW, labels_MB)
        train_loss_M = _rowwise_mean(loss_MB) / lessons.steps
        watch.after_epoch(skeleton, state, shown, train_loss_M)
        if epoch + 1 in study.query.keep_epochs:
            kept.append(signals.query_stack(study, refs, data, skeleton, state, shown))
        progress(epoch + 1)
    noted = [{**watch.arrays(slot), **_kept(kept, slot)} for slot in range(len(refs))]
    return Trained(skeleton=skeleton, state=state, shown=shown, noted=noted)


def start(
    study: Study, refs: Sequence[ModelRef], data: StudyData
) -> tuple[nn.Module, StackedState]:
    """The untrained stack of some models.

    Raises:
        ValueError: the refs are of different architectures.
    """
    families = {family(study, ref.arm) for ref in refs}
    if len(families) != 1:
        raise ValueError(f"a stack holds one architecture, these models are of {len(families)}")
    make = maker(study, refs[0].arm, data)
    return stack.build_stack(make, study.seed, [ref.model_id for ref in refs])


def maker(study: Study, arm_name: str, data: StudyData) -> Callable[[], nn.Module]:
    """What builds one network of an arm, for the study's images and classes."""
    arm = study.arms[arm_name]
    _, height, width, channels = data.images_RHWC.shape
    if height != width:
        raise ValueError(f"images are {height}x{width}: the networks need square ones")
    return functools.partial(
        build,
        arm.net,
        norm=arm.norm,
        classes=data.classes,
        channels=channels,
        size=height,
        penalty=arm.penalty,
        freeze_gamma=arm.freeze_gamma,
    )


class Lessons:
    """The batches of every model of a stack: its own members in its own order, augmented."""

    def __init__(
        self, study: Study, refs: Sequence[ModelRef], data: StudyData, shown: Pictures
    ) -> None:
        tables = [data.tables[ref.mix] for ref in refs]
        self.study, self.refs, self.shown = study, refs, shown
        self.members = [
            np.flatnonzero(table.keep_MN[ref.model_id])
            for table, ref in zip(tables, refs, strict=True)
        ]
        self.steps = schedule.steps_per_epoch(study, len(tables[0].label_N))
        device = shown.images_RHWC.device
        self.image_MN = torch.from_numpy(np.stack([t.image_N for t in tables])).to(device)
        self.label_MN = torch.from_numpy(np.stack([t.label_N for t in tables])).to(device)

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The (images_MBCHW, labels_MB) of one epoch, a pair a step."""
        batch, seed = self.study.train.batch, self.study.seed
        sample_MX = np.stack(
            [
                schedule.epoch_batches(seed, ref.model_id, epoch, members, self.steps * batch)
                for ref, members in zip(self.refs, self.members, strict=True)
            ]
        )
        keys = [
            seeds.key(seed, "augment", model_id=ref.model_id, counter=epoch) for ref in self.refs
        ]
        device = self.image_MN.device
        key_M = torch.tensor(keys, dtype=torch.int64, device=device)
        for sample_MB in torch.split(torch.from_numpy(sample_MX).to(device), batch, dim=1):
            yield self.batch(sample_MB, key_M)

    def batch(self, sample_MB: Tensor, key_M: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of some samples."""
        train, shown = self.study.train, self.shown
        images_MBCHW = kernels.augment(
            shown.images_RHWC,
            self.image_MN.gather(1, sample_MB),
            sample_MB,
            key_M,
            shown.mean_C,
            shown.std_C,
            pad=train.crop,
            flip=train.flip,
            cutout=train.cutout,
            dtype=shown.dtype,
        )
        return images_MBCHW, self.label_MN.gather(1, sample_MB)


class Descent:
    """SGD on a stack, in place: every model at its own rate, decay and penalty strength."""

    def __init__(
        self,
        study: Study,
        refs: Sequence[ModelRef],
        skeleton: nn.Module,
        state: StackedState,
        steps: int,
    ) -> None:
        self.train, self.steps, self.done = study.train, steps, 0
        self.skeleton, self.state = skeleton, state
        self.momenta = stack.zeros(state.params)
        self.groups: dict[float, list[str]] = {}
        for name, factor in lr_factors(skeleton).items():
            self.groups.setdefault(factor, []).append(name)
        own = schedule.scalars(study, refs)
        like = next(iter(state.params.values()))
        self.rate_M = np.array(own.rate_M)
        self.decay_M = torch.tensor(own.decay_M, dtype=like.dtype, device=like.device)
        self.lambda_M = torch.tensor(own.lambda_M, dtype=like.dtype, device=like.device)

    def step(self, images_MBCHW: Tensor, labels_MB: Tensor) -> Tensor:
        """One step of every model; its losses before the step, (M, B)."""
        loss_MB, grads = stack.gradients(
            self.skeleton, self.state, images_MBCHW, labels_MB, self.lambda_M
        )
        now = schedule.relative_rate(self.train, self.done, self.steps)
        for factor, names in self.groups.items():
            rate_M = torch.from_numpy(self.rate_M * (now * factor)).to(self.lambda_M)
            kernels.sgd.step(
                _only(self.state.params, names),
                _only(grads, names),
                _only(self.momenta, names),
                rate_M,
                self.decay_M,
                self.train.momentum,
                self.train.nesterov,
            )
        self.done += 1
        return loss_MB


def _only(tensors: Tensors, names: Sequence[str]) -> Tensors:
    return {name: tensors[name] for name in names}


def _rowwise_mean(value_MB: Tensor) -> npt.NDArray[np.float64]:
    return np.array([row.mean() for row in value_MB.cpu().numpy()])


def _kept(kept: Sequence[Sequence[Arrays]], slot: int) -> Arrays:
    if not kept:
        return {}
    return {
        "kept_phi_ENQ": np.stack([epoch[slot]["phi_NQ"] for epoch in kept]),
        "kept_population_phi_EZQ": np.stack([epoch[slot]["population_phi_ZQ"] for epoch in kept]),
    }
