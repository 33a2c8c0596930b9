"""Convolution on a CPU: one oneDNN call a model, activations in the strides that suit it."""

import torch
from torch import Tensor

from kernels._layout import PLANES_FROM, as_activation, as_weight
from kernels.conv import reference

SMALL_MAP = 64
"""Pixels up to which a wide map is convolved as planes."""


def conv2d(
    out: tuple[Tensor, ...],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    padding: int,
) -> None:
    """Fill y, one model after another."""
    x, weight = as_activation(x), as_weight(weight)
    planes = _as_planes(x)
    for m in range(x.shape[0]):
        x_m = x[m].contiguous() if planes else x[m]
        bias_m = None if bias is None else bias[m]
        out[0][m].copy_(torch.conv2d(x_m, weight[m], bias_m, stride, padding))


def conv2d_backward(
    out: tuple[Tensor, ...],
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: int,
    padding: int,
    need_x: bool,
    need_bias: bool,
) -> None:
    """Fill the gradients of x, weight and bias, one model after another."""
    grad, x, weight = as_activation(grad), as_activation(x), as_weight(weight)
    planes = _as_planes(x)
    for m in range(x.shape[0]):
        grad_m, x_m = (t[m].contiguous() if planes else t[m] for t in (grad, x))
        grads = reference.conv2d_backward(
            grad_m, x_m, weight[m], stride, padding, need_x, need_bias
        )
        for target, value in zip(out, grads, strict=True):
            if value is not None:
                target[m].copy_(value)


def _as_planes(x: Tensor) -> bool:
    """Whether x (M, N, C, H, W) is wide and small enough that oneDNN prefers planes.

    Its channels-last kernels walk over one image at a time and read all weights for each: with 512
    channels of 4 x 4 pixels planes take .7 of the time, copies included.
    """
    return x.shape[2] >= PLANES_FROM and x.shape[3] * x.shape[4] <= SMALL_MAP
