"""Two-dimensional convolution of one model, plain torch."""

import torch
from torch import Tensor


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """y[n, o] = bias[o] + sum_i weight[o, i] * x[n, i], cross-correlated."""
    return torch.conv2d(x, weight, bias, stride, padding)


def conv2d_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: int,
    padding: int,
    need_x: bool,
    need_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x (where needed), weight and bias (where there is one)."""
    sizes, one, zero = [weight.shape[0]], [1, 1], [0, 0]
    needs = [need_x, True, need_bias]
    strides, pads = [stride, stride], [padding, padding]
    grads: tuple[Tensor | None, Tensor | None, Tensor | None] = (
        torch.ops.aten.convolution_backward.default(
            grad, x, weight, sizes, strides, pads, one, False, zero, 1, needs
        )
    )
    return grads
