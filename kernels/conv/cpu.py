"""Convolution on a CPU: one oneDNN call a model, activations in the strides that suit it."""

import torch
from torch import Tensor

from kernels._layout import as_activation, as_dense
from kernels.conv import reference


def conv2d(
    out: tuple[Tensor, ...],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    padding: int,
) -> None:
    """Fill y, one model after another."""
    x, weight = as_activation(x), as_dense(weight)
    for m in range(x.shape[0]):
        bias_m = None if bias is None else bias[m]
        out[0][m].copy_(torch.conv2d(x[m], weight[m], bias_m, stride, padding))


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
    grad, x, weight = as_activation(grad), as_activation(x), as_dense(weight)
    for m in range(x.shape[0]):
        grads = reference.conv2d_backward(
            grad[m], x[m], weight[m], stride, padding, need_x, need_bias
        )
        for target, value in zip(out, grads, strict=True):
            if value is not None:
                target[m].copy_(value)
