"""Group norm, ReLU and 2×2 max-pool as one op, as batch norm has it: the arms stay comparable.

N samples, C channels, G groups.
"""

from typing import Any

from torch import Tensor

from kernels._layout import accumulated, empty, empty_activation, nothing
from kernels._register import differentiate, register
from kernels.pool import FUSED


def _allocate(x: Tensor, weight: Any, bias: Any, groups: int, *_: Any) -> tuple[Tensor, ...]:
    models, samples, channels, height, width = x.shape
    per_group, wide = (samples, groups), accumulated(x.dtype)
    y = empty_activation(x, models, (samples, channels, height // FUSED, width // FUSED))
    return y, empty(x, models, per_group, wide), empty(x, models, per_group, wide)


def _allocate_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    models, channels = x.shape[0], x.shape[2]
    kind = x.dtype if bias is None else bias.dtype
    return (
        empty_activation(x, models, x.shape[1:]),
        nothing(x, models) if weight is None else empty(x, models, (channels,), weight.dtype),
        empty(x, models, (channels,), kind) if rest[-1] else nothing(x, models),
    )


_forward = register(
    "group_norm",
    "group_norm_pool",
    "(Tensor x, Tensor? weight, Tensor? bias, int groups, float eps, bool relu)"
    " -> (Tensor, Tensor, Tensor)",
    _allocate,
)
_backward = register(
    "group_norm",
    "group_norm_pool_backward",
    "(Tensor grad, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor sigma, int groups,"
    " float eps, bool relu, bool need_bias) -> (Tensor, Tensor, Tensor)",
    _allocate_backward,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, *ctx.static = inputs
    _, mean, sigma = output
    ctx.mark_non_differentiable(mean, sigma)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, mean, sigma)


def _gradients(ctx: Any, call: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 6
    saved = ctx.saved_tensors
    grads = call(grad, *saved, *ctx.static, saved[2] is not None)
    wanted = (True, saved[1] is not None, saved[2] is not None)
    given = (grad if want else None for grad, want in zip(grads, wanted, strict=True))
    return (*given, None, None, None)


differentiate(_forward, _backward, setup=_setup, gradients=_gradients)
