"""Concatenation of channels, in the strides of activations (dense nets)."""

from typing import Any

from torch import Tensor

from kernels._layout import empty_activation
from kernels._register import differentiate, refuse_functional_grad, register


def _allocate(first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    models, samples, channels, height, width = first.shape
    shape = (samples, channels + second.shape[2], height, width)
    return (empty_activation(first, models, shape),)


def _allocate_backward(grad: Tensor, channels: int) -> tuple[Tensor, ...]:
    models, samples, both, height, width = grad.shape
    sizes = (channels, both - channels)
    first, second = (empty_activation(grad, models, (samples, c, height, width)) for c in sizes)
    return first, second


_forward = register("concat", "concat", "(Tensor first, Tensor second) -> Tensor", _allocate)
_backward = register(
    "concat",
    "concat_backward",
    "(Tensor grad, int channels) -> (Tensor, Tensor)",
    _allocate_backward,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.channels = inputs[0].shape[-3]


def _gradients(ctx: Any, call: Any, grad: Tensor) -> Any:
    return call(grad, ctx.channels)


differentiate(_forward, _backward, setup=_setup, gradients=_gradients)


def concat(first: Tensor, second: Tensor) -> Tensor:
    """The channels of `first` (N, C, H, W), then those of `second` (N, D, H, W).

    Raises ValueError where samples or image sizes differ.
    """
    sizes = [(*t.shape[:1], *t.shape[2:]) for t in (first, second)]
    if first.dim() != 4 or sizes[0] != sizes[1]:
        raise ValueError(
            f"concat got {tuple(first.shape)} and {tuple(second.shape)}: expected (N, C, H, W) and "
            "(N, D, H, W)"
        )
    refuse_functional_grad()
    y: Tensor = _forward(first, second)
    return y
