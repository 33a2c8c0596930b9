"""Layers of one model, spelt so that a block is few ops: convolution, norm, ReLU and pooling.

Ordinary modules on logical (N, C, H, W) tensors; the arithmetic is that of `kernels`, whose ops
stack under torch.func.vmap. Every layer draws its initial values from one generator, weight before
bias, so that the same layer starts alike in all arms of a study (see engine.stack).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

import kernels

Init = Literal["torch", "he", "zero"]


class Layer(nn.Module):
    """A layer whose initial values are a function of one generator.

    `lr_factor` scales the learning rate of the layer's own parameters; it is how parameter groups
    are made, by layer and never by name.
    """

    lr_factor = 1.0

    def draw(self, generator: torch.Generator | None) -> None:
        """Set the layer's own parameters to initial values; None draws like torch's own layers."""
        raise NotImplementedError


class Conv(Layer):
    """A convolution.

    init: "he" (normal, variance 2 / fan_in, times `scale`, zero bias), "torch" (torch's default:
    uniform weights and biases of +-1 / sqrt(fan_in)) or "zero".
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int = 3,
        *,
        stride: int = 1,
        padding: int | None = None,
        bias: bool = False,
        init: Init = "he",
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, size, size))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.stride, self.padding = stride, size // 2 if padding is None else padding
        self.init: Init = init
        self.scale = scale
        self.draw(None)

    def draw(self, generator: torch.Generator | None) -> None:
        """Draw the weight, then the bias."""
        _draw(self.weight, self.bias, self.init, self.scale, generator)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, O, H', W')."""
        return kernels.conv2d(x, self.weight, self.bias, stride=self.stride, padding=self.padding)


class Linear(Layer):
    """A dense layer; `init` as in Conv."""

    def __init__(self, inputs: int, outputs: int, *, init: Init = "torch") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.init: Init = init
        self.draw(None)

    def draw(self, generator: torch.Generator | None) -> None:
        """Draw the weight, then the bias."""
        _draw(self.weight, self.bias, self.init, 1.0, generator)

    def forward(self, x: Tensor) -> Tensor:
        """(N, F) -> (N, O)."""
        return kernels.linear(x, self.weight, self.bias)


def _draw(
    weight: Tensor,
    bias: Tensor | None,
    init: Init,
    scale: float,
    generator: torch.Generator | None,
) -> None:
    fan_in = weight[0].numel()
    with torch.no_grad():
        if init == "zero":
            weight.zero_()
        elif init == "he":
            weight.normal_(0.0, scale * math.sqrt(2.0 / fan_in), generator=generator)
        else:
            bound = 1.0 / math.sqrt(fan_in)
            weight.uniform_(-bound, bound, generator=generator)
            if bias is not None:
                bias.uniform_(-bound, bound, generator=generator)
                return
        if bias is not None:
            bias.zero_()


class Norm(Layer):
    """What follows a convolution: the maxima of pool x pool windows of act(norm(x) + residual)."""

    def forward(
        self, x: Tensor, *, relu: bool = True, residual: Tensor | None = None, pool: int = 0
    ) -> Tensor:
        """(N, C, H, W) -> the same shape; with `pool` H and W divided by it, rounded down."""
        raise NotImplementedError


class BatchNorm(Norm):
    """Batch norm with an optional gamma/sigma penalty and an optional gamma frozen at 1.

    After a training-mode forward, `penalty` holds the layer's mean_c phi(gamma_c / sigma_c) with
    the batch's sigma (engine.train collects it); running statistics move in separate, exactly
    rounded steps, so that they do not depend on how models are stacked.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        channels: int,
        *,
        gamma: float = 1.0,
        penalty: kernels.PenaltyForm | None = None,
        freeze_gamma: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.weight = None if freeze_gamma else nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.gamma, self.momentum, self.eps = gamma, momentum, eps
        self.penalty_form = penalty
        self.penalty: Tensor | None = None
        self.draw(None)

    def draw(self, generator: torch.Generator | None) -> None:
        """Constant initial values; nothing is drawn."""
        _constant(self.weight, self.gamma)
        _constant(self.bias, 0.0)

    def forward(
        self, x: Tensor, *, relu: bool = True, residual: Tensor | None = None, pool: int = 0
    ) -> Tensor:
        """Normalise by the batch's moments in training, by the running ones in eval mode."""
        out = kernels.batch_norm(
            x,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            training=self.training,
            momentum=self.momentum,
            eps=self.eps,
            relu=relu,
            residual=residual,
            penalty=self.penalty_form if self.training else None,
            pool=pool,
        )
        if self.training:
            count = x.numel() // x.shape[1]
            unbiased = out.var_C * (count / (count - 1))
            self.running_mean.mul_(1 - self.momentum).add_(out.mean_C * self.momentum)
            self.running_var.mul_(1 - self.momentum).add_(unbiased * self.momentum)
            self.penalty = out.penalty
        return out.y


class GroupNorm(Norm):
    """Group norm: at least three channels a group and at most eight groups."""

    def __init__(self, channels: int, *, gamma: float = 1.0, eps: float = 1e-5) -> None:
        super().__init__()
        self.groups = max(g for g in (1, 2, 4, 8) if channels % g == 0 and channels >= 3 * g)
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.gamma, self.eps = gamma, eps
        self.draw(None)

    def draw(self, generator: torch.Generator | None) -> None:
        """Constant initial values; nothing is drawn."""
        _constant(self.weight, self.gamma)
        _constant(self.bias, 0.0)

    def forward(
        self, x: Tensor, *, relu: bool = True, residual: Tensor | None = None, pool: int = 0
    ) -> Tensor:
        """Normalise each sample by its own groups' moments."""
        return kernels.group_norm(
            x,
            self.groups,
            self.weight,
            self.bias,
            eps=self.eps,
            relu=relu,
            residual=residual,
            pool=pool,
        )


class Affine(Norm):
    """A scale and a shift without normalising: per channel, or one scalar of each (Fixup).

    Fixup's scalars learn at a tenth of the learning rate (Zhang, Dauphin, Ma 2019, section 4).
    """

    def __init__(
        self, channels: int | None, *, scale: bool = True, shift: bool = True, gamma: float = 1.0
    ) -> None:
        super().__init__()
        shape = () if channels is None else (channels,)
        self.lr_factor = 0.1 if channels is None else 1.0
        self.weight = nn.Parameter(torch.empty(shape)) if scale else None
        self.bias = nn.Parameter(torch.empty(shape)) if shift else None
        self.gamma = gamma
        self.draw(None)

    def draw(self, generator: torch.Generator | None) -> None:
        """Constant initial values; nothing is drawn."""
        _constant(self.weight, self.gamma)
        _constant(self.bias, 0.0)

    def forward(
        self,
        x: Tensor,
        *,
        relu: bool = True,
        residual: Tensor | None = None,
        after: Tensor | None = None,
        pool: int = 0,
    ) -> Tensor:
        """act(scale * x + shift + residual) + after; torch's ReLU where there is nothing else."""
        if self.weight is None and self.bias is None and residual is None and after is None:
            y = torch.relu(x) if relu else x
        else:
            y = kernels.affine(x, self.weight, self.bias, relu, residual, after)
        return kernels.max_pool(y, pool) if pool else y


def _constant(parameter: Tensor | None, value: float) -> None:
    if parameter is not None:
        with torch.no_grad():
            parameter.fill_(value)


class ReLU(nn.Module):
    """max(x, 0)."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return torch.relu(x)


class AvgPool(nn.Module):
    """Means of size x size windows, without overlap."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H / size, W / size), rounded down."""
        return kernels.avg_pool(x, self.size)


class GlobalAvgPool(nn.Module):
    """The mean of each map."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C)."""
        return kernels.global_avg_pool(x)


class Concat(nn.Module):
    """The channels of two inputs, one after the other."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """(N, C, H, W), (N, D, H, W) -> (N, C + D, H, W)."""
        return kernels.concat(first, second)


@dataclass(frozen=True, kw_only=True)
class NormChoice:
    """The norm of a network, chosen by name, and the options of batch norm."""

    name: str
    penalty: kernels.PenaltyForm | None = None
    freeze_gamma: bool = False

    @property
    def conv_bias(self) -> bool:
        """Whether convolutions carry a bias: only where no norm shifts their output."""
        return self.name in ("none", "fixup")

    def layer(self, channels: int, *, gamma: float = 1.0) -> Norm:
        """A norm over `channels` with the given initial gamma (a frozen gamma stays 1)."""
        if self.name == "batch":
            return BatchNorm(
                channels, gamma=gamma, penalty=self.penalty, freeze_gamma=self.freeze_gamma
            )
        if self.name == "group":
            return GroupNorm(channels, gamma=gamma)
        if self.name == "affine":
            return Affine(channels, gamma=gamma)
        return Affine(channels, scale=False, shift=False)


class ConvNormAct(nn.Module):
    """Convolution, norm, residual, ReLU and pooling: one block, few ops."""

    def __init__(self, conv: Conv, norm: Norm, *, relu: bool = True, pool: int = 0) -> None:
        super().__init__()
        self.conv, self.norm, self.relu, self.pool = conv, norm, relu, pool

    def forward(
        self, x: Tensor, residual: Tensor | None = None, after: Tensor | None = None
    ) -> Tensor:
        """pool(act(norm(conv(x)) + residual)); an Affine adds the scalar `after` behind act."""
        more = {} if after is None else {"after": after}
        y: Tensor = self.norm(
            self.conv(x), relu=self.relu, residual=residual, pool=self.pool, **more
        )
        return y


def take_penalty(net: nn.Module) -> Tensor | None:
    """The sum of the layers' penalties of the last forward pass, handed over once."""
    total: Tensor | None = None
    for module in net.modules():
        if isinstance(module, BatchNorm) and module.penalty is not None:
            total = module.penalty if total is None else total + module.penalty
            module.penalty = None
    return total


def lr_factors(net: nn.Module) -> dict[str, float]:
    """Parameter name -> the factor on its learning rate, by the layer that owns it."""
    return {
        f"{path}.{name}".lstrip("."): getattr(module, "lr_factor", 1.0)
        for path, module in net.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }
