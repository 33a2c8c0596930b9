"""Probed layers on a CPU: the plain layers' own implementations, so a probe changes no bit."""

import torch
from torch import Tensor

from kernels._register import choose


def probed_conv2d(
    out: tuple[Tensor, ...],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    probe: Tensor,
    stride: int,
    padding: int,
) -> object:
    """Fill as the plain convolution does."""
    plain = choose("conv", "conv2d", x.device.type, torch.float32)
    return NotImplemented if plain is None else plain(out, x, weight, bias, stride, padding)


def probed_linear(
    out: tuple[Tensor, ...], x: Tensor, weight: Tensor, bias: Tensor | None, probe: Tensor
) -> object:
    """Fill as the plain linear layer does."""
    plain = choose("linear", "linear", x.device.type, torch.float32)
    return NotImplemented if plain is None else plain(out, x, weight, bias)
