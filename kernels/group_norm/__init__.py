"""Group norm with ReLU, residual and pooling as one op: the arm without batch coupling.

N samples, C channels, G groups.
"""

from typing import Any

from torch import Tensor

from kernels._layout import accumulated, empty, empty_activation, nothing
from kernels._register import differentiate, refuse_functional_grad, register
from kernels.group_norm import pooled
from kernels.pool import fuses, max_pool


def _allocate(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    models, groups = x.shape[0], rest[-3]
    per_group, wide = (x.shape[1], groups), accumulated(x.dtype)
    y = empty_activation(x, models, x.shape[1:])
    return y, empty(x, models, per_group, wide), empty(x, models, per_group, wide)


def _allocate_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    models, channels = x.shape[0], x.shape[2]
    need_bias, need_residual, bias = rest[-4:-1]
    kind = x.dtype if bias is None else bias.dtype
    return (
        empty_activation(x, models, x.shape[1:]),
        nothing(x, models) if weight is None else empty(x, models, (channels,), weight.dtype),
        empty(x, models, (channels,), kind) if need_bias else nothing(x, models),
        empty_activation(x, models, x.shape[1:]) if need_residual else nothing(x, models),
    )


_forward = register(
    "group_norm",
    "group_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, int groups, float eps, bool relu)"
    " -> (Tensor, Tensor, Tensor)",
    _allocate,
)
_backward = register(
    "group_norm",
    "group_norm_backward",
    "(Tensor grad_y, Tensor x, Tensor? weight, Tensor mean, Tensor sigma, Tensor? y, int groups,"
    " bool need_bias, bool need_residual, Tensor? bias, bool added)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _allocate_backward,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, residual, ctx.groups, _, relu = inputs
    y, mean, sigma = output
    ctx.mark_non_differentiable(mean, sigma)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, mean, sigma, y if relu else None, bias)
    ctx.added = residual is not None
    ctx.needs = (bias is not None, residual is not None and bool(ctx.needs_input_grad[3]))


def _gradients(ctx: Any, call: Any, grad_y: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad_y is None:
        return (None,) * 7
    *saved, bias = ctx.saved_tensors
    grads = call(grad_y, *saved, ctx.groups, *ctx.needs, bias, ctx.added)
    wanted = (True, saved[1] is not None, *ctx.needs)
    given = (grad if want else None for grad, want in zip(grads, wanted, strict=True))
    return (*given, None, None, None)


differentiate(_forward, _backward, setup=_setup, gradients=_gradients)


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    relu: bool = False,
    residual: Tensor | None = None,
    pool: int = 0,
) -> Tensor:
    """Normalise each sample's groups of channels of x (N, C, H, W); gamma, beta, residual, ReLU.

    With `pool` the maxima of size × size windows, as in batch_norm.

    Raises ValueError where the channels cannot be split evenly.
    """
    if x.dim() != 4 or groups < 1 or x.shape[1] % groups:
        raise ValueError(
            f"group_norm got x {tuple(x.shape)} and {groups} groups: expected (N, C, H, W) with C "
            "a multiple of the groups"
        )
    refuse_functional_grad()
    if fuses(x, pool, residual):
        y: Tensor = pooled._forward(x, weight, bias, groups, eps, relu)[0]
        return y
    y = _forward(x, weight, bias, residual, groups, eps, relu)[0]
    return max_pool(y, pool) if pool else y
