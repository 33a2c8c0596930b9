"""Batch norm, ReLU and 2×2 max-pool as one op, for devices that have an implementation of it.

Fused, the block moves 5¾ activations where batch norm and pooling one after the other move 10½
(`triton_pool`), and keeps x alone for the backward pass. A CPU runs the two ops instead.

N samples, C channels.
"""

from typing import Any

from torch import Tensor

from kernels._layout import accumulated, empty, empty_activation, nothing
from kernels._register import differentiate, register
from kernels.pool import FUSED


def _allocate(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    models, samples, channels, height, width = x.shape
    wide = accumulated(x.dtype)
    y = empty_activation(x, models, (samples, channels, height // FUSED, width // FUSED))
    mean, var = (empty(x, models, (channels,), wide) for _ in range(2))
    return y, mean, var, empty(x, models, (), wide)


def _allocate_backward(
    grad: Tensor,
    grad_penalty: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    models, samples, channels = x.shape[:3]
    need_x, need_bias, need_probe = rest[-3:]
    kind = x.dtype if bias is None else bias.dtype
    return (
        empty_activation(x, models, x.shape[1:]) if need_x else nothing(x, models),
        nothing(x, models) if weight is None else empty(x, models, (channels,), weight.dtype),
        empty(x, models, (channels,), kind) if need_bias else nothing(x, models),
        empty(x, models, (samples,), accumulated(x.dtype)) if need_probe else nothing(x, models),
    )


_forward = register(
    "batch_norm",
    "batch_norm_pool",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var,"
    " Tensor? probe, float eps, bool relu, str form, float tau, bool through_sigma)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _allocate,
)
_backward = register(
    "batch_norm",
    "batch_norm_pool_backward",
    "(Tensor grad, Tensor? grad_penalty, Tensor x, Tensor? weight, Tensor? bias, Tensor mean,"
    " Tensor var, bool training, float eps, bool relu, str form, float tau, bool through_sigma,"
    " bool need_x, bool need_bias, bool need_probe) -> (Tensor, Tensor, Tensor, Tensor)",
    _allocate_backward,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, running_mean, _, probe, eps, relu, form, tau, through = inputs
    y, mean, var, _ = output
    ctx.mark_non_differentiable(mean, var)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, mean, var)
    ctx.shape = y.shape
    ctx.static = (running_mean is None, eps, relu, form, tau, through)
    ctx.needs = (
        bool(ctx.needs_input_grad[0]),
        bias is not None,
        probe is not None and bool(ctx.needs_input_grad[5]),
    )


def _gradients(
    ctx: Any, call: Any, grad: Tensor | None, _mean: Any, _var: Any, grad_penalty: Tensor | None
) -> tuple[Any, ...]:
    x, weight, bias, mean, var = ctx.saved_tensors
    if grad is None:
        grad = x.new_zeros(ctx.shape)
    if not ctx.static[3]:
        grad_penalty = None
    grads = call(grad, grad_penalty, x, weight, bias, mean, var, *ctx.static, *ctx.needs)
    need_x, need_bias, need_probe = ctx.needs
    wanted = (need_x, weight is not None, need_bias, need_probe)
    grad_x, grad_weight, grad_bias, grad_probe = (
        grad if want else None for grad, want in zip(grads, wanted, strict=True)
    )
    front = (grad_x, grad_weight, grad_bias, None, None, grad_probe)
    return (*front, None, None, None, None, None)


differentiate(_forward, _backward, setup=_setup, gradients=_gradients)
