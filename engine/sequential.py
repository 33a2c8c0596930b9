"""The oracle: the same study one model at a time, in plain torch, as anybody would write it.

Nothing here is stacked or fused: torch.nn.functional, autograd and torch.optim.SGD. Networks are
those of `engine.models` with every layer swapped for its plain twin; only what comes before the
arithmetic (initial values, orders, batches, schedule) is shared with the stacked trainer.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models import layers
from engine.models.layers import lr_factors, take_penalty
from engine.plan import ModelRef, StudyData
from engine.schedule import relative_rate, scalars
from engine.signals import pictures
from engine.stack import initialised
from engine.study import Study
from engine.train import Lessons, maker

Batches = Iterator[tuple[Tensor, Tensor]]


class PlainConv(layers.Conv):
    """Conv by torch."""

    def forward(self, x: Tensor) -> Tensor:
        """F.conv2d."""
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding)


class PlainLinear(layers.Linear):
    """Linear by torch."""

    def forward(self, x: Tensor) -> Tensor:
        """F.linear."""
        return F.linear(x, self.weight, self.bias)


class PlainBatchNorm(layers.BatchNorm):
    """BatchNorm by torch; the penalty by autograd through the batch's variance."""

    def forward(
        self, x: Tensor, *, relu: bool = True, residual: Tensor | None = None, pool: int = 0
    ) -> Tensor:
        """F.batch_norm, + residual, F.relu, F.max_pool2d."""
        self.penalty = self._penalty(x) if self.training and self.penalty_form else None
        y = F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            self.momentum,
            self.eps,
        )
        return _finish(y, relu, residual, pool)

    def _penalty(self, x: Tensor) -> Tensor:
        assert self.penalty_form is not None
        dims = [d for d in range(x.dim()) if d != 1]
        sigma = (x.var(dims, unbiased=False) + self.eps).sqrt()
        if not self.penalty_form.through_sigma:
            sigma = sigma.detach()
        ratio = 1 / sigma if self.weight is None else self.weight / sigma
        if self.penalty_form.form == "hinge":
            ratio = F.relu(ratio.abs() - self.penalty_form.tau)
        return (ratio**2).mean()


class PlainGroupNorm(layers.GroupNorm):
    """GroupNorm by torch."""

    def forward(
        self, x: Tensor, *, relu: bool = True, residual: Tensor | None = None, pool: int = 0
    ) -> Tensor:
        """F.group_norm, + residual, F.relu, F.max_pool2d."""
        y = F.group_norm(x, self.groups, self.weight, self.bias, self.eps)
        return _finish(y, relu, residual, pool)


class PlainAffine(layers.Affine):
    """Affine by broadcasting."""

    def forward(
        self,
        x: Tensor,
        *,
        relu: bool = True,
        residual: Tensor | None = None,
        after: Tensor | None = None,
        pool: int = 0,
    ) -> Tensor:
        """x * scale + shift, + residual, F.relu, + after, F.max_pool2d."""
        if self.weight is not None:
            x = x * self.weight.reshape(-1, 1, 1)
        if self.bias is not None:
            x = x + self.bias.reshape(-1, 1, 1)
        x = _finish(x, relu, residual, 0)
        x = x if after is None else x + after
        return F.max_pool2d(x, pool) if pool else x


class PlainAvgPool(layers.AvgPool):
    """AvgPool by torch."""

    def forward(self, x: Tensor) -> Tensor:
        """F.avg_pool2d."""
        return F.avg_pool2d(x, self.size)


class PlainGlobalAvgPool(layers.GlobalAvgPool):
    """GlobalAvgPool by torch."""

    def forward(self, x: Tensor) -> Tensor:
        """The mean over H and W."""
        return x.mean((2, 3))


class PlainConcat(layers.Concat):
    """Concat by torch."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """torch.cat."""
        return torch.cat([first, second], 1)


def _finish(y: Tensor, relu: bool, residual: Tensor | None, pool: int) -> Tensor:
    if residual is not None:
        y = y + residual
    if relu:
        y = F.relu(y)
    return F.max_pool2d(y, pool) if pool else y


TWINS: dict[type[nn.Module], type[nn.Module]] = {
    layers.Conv: PlainConv,
    layers.Linear: PlainLinear,
    layers.BatchNorm: PlainBatchNorm,
    layers.GroupNorm: PlainGroupNorm,
    layers.Affine: PlainAffine,
    layers.AvgPool: PlainAvgPool,
    layers.GlobalAvgPool: PlainGlobalAvgPool,
    layers.Concat: PlainConcat,
}


def plain(net: nn.Module) -> nn.Module:
    """The same network, in place, with every layer of ours computing by plain torch."""
    for module in net.modules():
        module.__class__ = TWINS.get(type(module), type(module))
    return net


def optimiser(
    net: nn.Module, *, lr: float, weight_decay: float, momentum: float, nesterov: bool
) -> torch.optim.SGD:
    """torch's SGD with one parameter group for each learning-rate factor."""
    factors = lr_factors(net)
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in net.named_parameters():
        groups.setdefault(factors[name], []).append(parameter)
    return torch.optim.SGD(
        [{"params": group, "factor": factor} for factor, group in groups.items()],
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        nesterov=nesterov,
    )


def train_model(
    study: Study, ref: ModelRef, data: StudyData, *, channels_last: bool = False
) -> tuple[nn.Module, list[float]]:
    """Train one shadow model of a study on the CPU; the network and the loss of every step.

    The penalty's strength, the rate and the decay are the arm's, as in the stacked trainer.
    """
    dtype = torch.float64 if study.train.precision == "float64" else torch.float32
    layout = torch.channels_last if channels_last else torch.contiguous_format
    net = plain(initialised(maker(study, ref.arm, data), study.seed, ref.model_id))
    net = net.to(dtype=dtype, memory_format=layout)  # type: ignore[call-overload]
    lessons = Lessons(study, [ref], data, pictures(data, "cpu", dtype))
    own = scalars(study, [ref])
    sgd = optimiser(
        net,
        lr=own.rate_M[0],
        weight_decay=own.decay_M[0],
        momentum=study.train.momentum,
        nesterov=study.train.nesterov,
    )

    def batches() -> Batches:
        for epoch in range(study.train.epochs):
            for images_MBCHW, labels_MB in lessons.epoch(epoch):
                yield images_MBCHW[0].contiguous(memory_format=layout), labels_MB[0]

    def rate(step: int) -> float:
        return own.rate_M[0] * relative_rate(study.train, step, lessons.steps)

    return net, train(net, batches(), sgd, rate, own.lambda_M[0])


def train(
    net: nn.Module,
    batches: Batches,
    sgd: torch.optim.SGD,
    rate: Callable[[int], float],
    lambda_: float = 0.0,
) -> list[float]:
    """Train one network in place, one step a batch; the training loss of every step.

    Args:
        net: a network, made plain by `plain` or of plain torch layers.
        batches: (images, labels) pairs, one a step.
        sgd: the optimiser of `optimiser`.
        rate: step -> learning rate (before the groups' factors).
        lambda_: strength of the gamma/sigma penalty.
    """
    net.train()
    losses = []
    for step, (images, labels) in enumerate(batches):
        for group in sgd.param_groups:
            group["lr"] = rate(step) * group["factor"]
        sgd.zero_grad()
        loss = F.cross_entropy(net(images), labels)
        penalty = take_penalty(net)
        total = loss if penalty is None else loss + lambda_ * penalty
        total.backward()  # type: ignore[no-untyped-call]
        sgd.step()
        losses.append(loss.item())
    return losses
