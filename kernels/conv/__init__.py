"""Convolution: per-model library calls behind one stacked op.

N samples, C channels, O output channels.
"""

from typing import Any

from torch import Tensor

from kernels._layout import empty, empty_activation, empty_weight, nothing
from kernels._register import differentiate, refuse_functional_grad, register


def _allocate(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int
) -> tuple[Tensor, ...]:
    models, samples, _, height, width = x.shape
    rows = (height + 2 * padding - weight.shape[3]) // stride + 1
    columns = (width + 2 * padding - weight.shape[4]) // stride + 1
    return (empty_activation(x, models, (samples, weight.shape[1], rows, columns)),)


def _allocate_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: int,
    padding: int,
    need_x: bool,
    need_bias: bool,
) -> tuple[Tensor, ...]:
    models = x.shape[0]
    grad_x = empty_activation(x, models, x.shape[1:]) if need_x else nothing(x, models)
    grad_bias = empty(x, models, weight.shape[1:2]) if need_bias else nothing(x, models)
    return grad_x, empty_weight(x, models, weight.shape[1:]), grad_bias


_forward = register(
    "conv",
    "conv2d",
    "(Tensor x, Tensor weight, Tensor? bias, int stride, int padding) -> Tensor",
    _allocate,
)
_backward = register(
    "conv",
    "conv2d_backward",
    "(Tensor grad, Tensor x, Tensor weight, int stride, int padding, bool need_x, bool need_bias)"
    " -> (Tensor, Tensor, Tensor)",
    _allocate_backward,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, ctx.stride, ctx.padding = inputs
    ctx.save_for_backward(x, weight)
    ctx.biased = bias is not None


def _gradients(ctx: Any, call: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    need_x = ctx.needs_input_grad[0]
    grad_x, grad_weight, grad_bias = call(
        grad, x, weight, ctx.stride, ctx.padding, need_x, ctx.biased
    )
    return (
        grad_x if need_x else None,
        grad_weight,
        grad_bias if ctx.biased else None,
        None,
        None,
    )


differentiate(_forward, _backward, setup=_setup, gradients=_gradients)


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0
) -> Tensor:
    """Convolve x (N, C, H, W) with weight (O, C, kh, kw) and add bias (O,), as torch.conv2d does.

    Raises ValueError where channels or dimensions do not fit.
    """
    if x.dim() != 4 or weight.dim() != 4 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"conv2d got x {tuple(x.shape)} and weight {tuple(weight.shape)}: "
            "expected (N, C, H, W) and (O, C, kh, kw)"
        )
    refuse_functional_grad()
    y: Tensor = _forward(x, weight, bias, stride, padding)
    return y
