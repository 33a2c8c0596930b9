"""When and at what rate: steps an epoch, orders, learning rates. Shared by stack and oracle.

M models, N samples, B batch, S steps an epoch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine import seeds
from engine.plan import ModelRef
from engine.study import Study, Train

Ints = npt.NDArray[np.int64]


def steps_per_epoch(study: Study, samples: int) -> int:
    """Full batches of the members a model has by design; the remainder is dropped.

    Raises:
        ValueError: a batch is larger than that.
    """
    members = int(samples * study.membership.pkeep)
    steps = members // study.train.batch
    if not steps:
        raise ValueError(
            f"train.batch is {study.train.batch}, but a model has {members} members: "
            "lower the batch or take more data"
        )
    return steps


def epoch_batches(study_seed: int, model_id: int, epoch: int, members: Ints, shape: int) -> Ints:
    """The members a model sees in one epoch, in order: the first `shape` of its own permutation.

    A model with fewer members than that (bernoulli masks) starts over with the same permutation.
    """
    order = seeds.permutation(
        seeds.key(study_seed, "order", model_id=model_id, counter=epoch), len(members)
    )
    return members[np.resize(order, shape)]


def relative_rate(train: Train, step: int, steps: int) -> float:
    """The learning rate of a step over its peak.

    cosine: half a cosine from 1 to 0 over the steps after the warm-up, one value a step.
    one_cycle: linear up over the warm-up (a quarter of training by default), linear down to 0.
    constant: 1. A warm-up of w epochs rises linearly from 1 / (w * steps).

    Args:
        train: schedule, warm-up and epochs.
        step: counted from 0 over all of training.
        steps: steps an epoch.

    >>> train = Train(epochs=2, batch=2, lr=0.1)
    >>> [round(relative_rate(train, step, 2), 3) for step in range(4)]
    [1.0, 0.854, 0.5, 0.146]
    """
    total = train.epochs * steps
    warm = train.warmup * steps
    if train.schedule == "one_cycle" and not warm:
        warm = total / 4
    if step + 1 <= warm:
        return (step + 1) / warm
    if train.schedule == "constant":
        return 1.0
    through = (step - warm) / (total - warm)
    if train.schedule == "one_cycle":
        return 1 - through
    return 0.5 * (1 + math.cos(math.pi * through))


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """What differs between the models of a stack: peak rates, decays and penalty strengths."""

    rate_M: tuple[float, ...]
    decay_M: tuple[float, ...]
    lambda_M: tuple[float, ...]


def scalars(study: Study, refs: Sequence[ModelRef]) -> Scalars:
    """The arm's own values where it has them, else those of `train`."""
    arms = [study.arms[ref.arm] for ref in refs]
    train = study.train
    return Scalars(
        rate_M=tuple(train.lr if a.lr is None else a.lr for a in arms),
        decay_M=tuple(
            train.weight_decay if a.weight_decay is None else a.weight_decay for a in arms
        ),
        lambda_M=tuple(0.0 if a.penalty is None else a.penalty.lambda_ for a in arms),
    )
