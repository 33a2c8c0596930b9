"""Batch norm with ReLU, residual, pooling and the gamma/sigma penalty as one op.

y = relu(gamma * (x - mu) / sigma + beta + residual), sigma = sqrt(v + eps), v the biased variance.
The formulas of the backward pass and of the penalty are those of docs/science.md, "Batch norm,
exactly" (checked there against float64 autograd): the penalty costs no extra pass over memory.

N samples, C channels.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kernels._layout import accumulated, empty, empty_activation, nothing
from kernels._register import differentiate, refuse_functional_grad, register
from kernels.batch_norm import pooled
from kernels.pool import fuses, max_pool


@dataclass(frozen=True, kw_only=True)
class PenaltyForm:
    """phi(r) = r² ("square") or max(0, |r| - tau)² ("hinge"), r = gamma / sigma.

    `through_sigma` lets the gradient flow through the batch's sigma as well as through gamma.
    """

    form: Literal["square", "hinge"]
    tau: float = 1.0
    through_sigma: bool = True

    def __post_init__(self) -> None:
        if self.form not in ("square", "hinge"):
            raise ValueError(f"penalty form is '{self.form}': expected 'square' or 'hinge'")


class BatchNormOut(NamedTuple):
    """What batch_norm returns; `mean_C` and `var_C` (biased) are not differentiable."""

    y: Tensor
    mean_C: Tensor
    var_C: Tensor
    penalty: Tensor | None


def _allocate(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    models, channels, wide = x.shape[0], x.shape[2], accumulated(x.dtype)
    y = empty_activation(x, models, x.shape[1:])
    mean, var = (empty(x, models, (channels,), wide) for _ in range(2))
    return y, mean, var, empty(x, models, (), wide)


def _allocate_backward(
    grad_y: Tensor,
    grad_penalty: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    models, samples, channels = x.shape[:3]
    need_x, need_bias, need_residual, need_probe, bias = rest[-6:-1]
    whole, wide = x.shape[1:], accumulated(x.dtype)
    kind = x.dtype if bias is None else bias.dtype
    return (
        empty_activation(x, models, whole) if need_x else nothing(x, models),
        nothing(x, models) if weight is None else empty(x, models, (channels,), weight.dtype),
        empty(x, models, (channels,), kind) if need_bias else nothing(x, models),
        empty_activation(x, models, whole) if need_residual else nothing(x, models),
        empty(x, models, (samples,), wide) if need_probe else nothing(x, models),
    )


_forward = register(
    "batch_norm",
    "batch_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var,"
    " Tensor? residual, Tensor? probe, float eps, bool relu, str form, float tau,"
    " bool through_sigma) -> (Tensor, Tensor, Tensor, Tensor)",
    _allocate,
)
_backward = register(
    "batch_norm",
    "batch_norm_backward",
    "(Tensor grad_y, Tensor? grad_penalty, Tensor x, Tensor? weight, Tensor mean, Tensor var,"
    " Tensor? y, bool training, float eps, str form, float tau, bool through_sigma, bool need_x,"
    " bool need_bias, bool need_residual, bool need_probe, Tensor? bias, bool added)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _allocate_backward,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, running_mean, _, residual, probe, eps, relu, form, tau, through = inputs
    y, mean, var, _ = output
    ctx.mark_non_differentiable(mean, var)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, mean, var, y if relu else None, bias)
    ctx.added = residual is not None
    ctx.static = (running_mean is None, eps, form, tau, through)
    ctx.needs = (
        bool(ctx.needs_input_grad[0]),
        bias is not None,
        residual is not None and bool(ctx.needs_input_grad[5]),
        probe is not None and bool(ctx.needs_input_grad[6]),
    )


def _gradients(
    ctx: Any, call: Any, grad_y: Tensor | None, _mean: Any, _var: Any, grad_penalty: Tensor | None
) -> tuple[Any, ...]:
    x, weight, mean, var, y, bias = ctx.saved_tensors
    if grad_y is None:
        grad_y = torch.zeros_like(x)
    if not ctx.static[2]:
        grad_penalty = None
    saved = (x, weight, mean, var, y)
    grads = call(grad_y, grad_penalty, *saved, *ctx.static, *ctx.needs, bias, ctx.added)
    need_x, need_bias, need_residual, need_probe = ctx.needs
    wanted = (need_x, weight is not None, need_bias, need_residual, need_probe)
    grad_x, grad_weight, grad_bias, grad_residual, grad_probe = (
        grad if want else None for grad, want in zip(grads, wanted, strict=True)
    )
    front = (grad_x, grad_weight, grad_bias, None, None, grad_residual, grad_probe)
    return (*front, None, None, None, None, None)


differentiate(_forward, _backward, setup=_setup, gradients=_gradients)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    relu: bool = False,
    residual: Tensor | None = None,
    penalty: PenaltyForm | None = None,
    probe_B: Tensor | None = None,
    pool: int = 0,
) -> BatchNormOut:
    """Normalise x (N, C, H, W) or (N, C) per channel, then gamma, beta, residual and ReLU.

    In training by the batch's statistics, else by the running ones, which are constants then (the
    statistics of a batch, passed as running ones, give the frozen-batch mode). The op is
    functional: the caller updates running statistics from `mean_C` and `var_C` (times R/(R-1)),
    so `momentum` is not used here. `penalty` is mean_c phi(gamma_c / sigma_c), unscaled by lambda.
    `probe_B`, zeros (N,) that require a gradient, receives each sample's squared share of the
    gradients of gamma and beta; it leaves the outputs as they are. With `pool` y is the maxima of
    its size × size windows (`max_pool`): on a GPU one op does all where the size is 2 and nothing
    is added, elsewhere the two ops follow each other.

    Raises ValueError on other dimensions, or where training=False lacks running statistics.

    >>> x = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    >>> batch_norm(x, None, None, None, None, training=True, eps=0.0).y.flatten().tolist()
    [-1.0, 1.0]
    """
    if x.dim() not in (2, 4):
        raise ValueError(f"batch_norm got x {tuple(x.shape)}: expected (N, C, H, W) or (N, C)")
    if not training and (running_mean is None or running_var is None):
        raise ValueError("batch_norm with training=False needs running_mean and running_var")
    refuse_functional_grad()
    flat = x.dim() == 2
    if flat:
        x = x[:, :, None, None]
        residual = None if residual is None else residual[:, :, None, None]
    form = penalty or PenaltyForm(form="square")
    inputs = (x, weight, bias, *((None, None) if training else (running_mean, running_var)))
    options = (eps, relu, form.form if penalty else "", form.tau, form.through_sigma)
    if fuses(x, pool, residual):
        y, mean_C, var_C, value = pooled._forward(*inputs, probe_B, *options)
    else:
        y, mean_C, var_C, value = _forward(*inputs, residual, probe_B, *options)
        y = max_pool(y, pool) if pool else y
    return BatchNormOut(y[:, :, 0, 0] if flat else y, mean_C, var_C, value if penalty else None)
