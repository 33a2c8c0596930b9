"""Batch norm on a CPU: statistics and normalisation of one model after another, compiled.

M models, N samples, C channels.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import numpy as np
import torch
from torch import Tensor

from kernels._channels import constants, flat, flat_or
from kernels._channels import cpu as channels
from kernels._channels.cpu import ZERO, mapped, moments, reduced, sloped
from kernels._compiled.cpu import compiler
from kernels._layout import as_activation, channels_last, empty_activation, nothing
from kernels.pool import cpu as pool

kernel = compiler(__file__, channels.__file__)

FORMS = {"": 0, "square": 1, "hinge": 2}


def batch_norm(
    out: tuple[Tensor, ...],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    residual: Tensor | None,
    probe: Tensor | None,
    eps: float,
    relu: bool,
    form: str,
    tau: float,
    through_sigma: bool,
) -> None:
    """Fill y, mean, var and penalty."""
    y, mean, var, penalty = out
    training = running_mean is None
    if running_mean is not None and running_var is not None:
        mean.copy_(running_mean)
        var.copy_(running_var)
    x = as_activation(x)
    rest = None if residual is None else as_activation(residual)
    batch_norm_stack(
        *flat(x),
        *flat_or(rest, x),
        *flat(y),
        *flat(mean),
        *flat(var),
        *flat(penalty),
        constants(weight, x, 1.0),
        constants(bias, x, 0.0),
        x.shape[1],
        channels_last(x.device, x.shape[2]),
        training,
        rest is not None,
        relu,
        eps,
        FORMS[form],
        tau,
        x[0].numel(),
    )


def batch_norm_backward(
    out: tuple[Tensor, ...],
    grad_y: Tensor,
    grad_penalty: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    var: Tensor,
    y: Tensor | None,
    training: bool,
    eps: float,
    form: str,
    tau: float,
    through_sigma: bool,
    need_x: bool,
    need_bias: bool,
    need_residual: bool,
    need_probe: bool,
    bias: Tensor | None,
    added: bool,
) -> object:
    """Fill the gradients of x, weight, bias and residual; the probe is the reference's."""
    if need_probe or not need_x:
        return NotImplemented
    grad_x, grad_weight, grad_bias, grad_residual, _ = out
    grad_y, x = as_activation(grad_y), as_activation(x)
    activated = None if y is None else as_activation(y)
    models, width = x.shape[0], x.shape[2]
    slope = torch.zeros(models) if grad_penalty is None else grad_penalty.detach().contiguous()
    both = np.empty((2, models, width), np.float32)
    batch_norm_backward_stack(
        *flat(grad_y),
        *flat_or(activated, x),
        *flat(x),
        *flat(grad_x),
        *flat_or(grad_residual if need_residual else None, x),
        mean.detach().contiguous().numpy(),
        var.detach().contiguous().numpy(),
        constants(weight, x, 1.0),
        slope.numpy(),
        both,
        x.shape[1],
        channels_last(x.device, width),
        training,
        y is not None,
        need_residual,
        eps,
        FORMS[form] if grad_penalty is not None else 0,
        tau,
        through_sigma,
        x[0].numel(),
    )
    if weight is not None:
        grad_weight.copy_(torch.from_numpy(both[0]))
    if need_bias:
        grad_bias.copy_(torch.from_numpy(both[1]))
    return None


def batch_norm_pool(
    out: tuple[Tensor, ...],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    probe: Tensor | None,
    eps: float,
    relu: bool,
    form: str,
    tau: float,
    through_sigma: bool,
) -> object:
    """Norm and pooling one after the other."""
    if not out[0].numel():
        return NotImplemented
    whole = empty_activation(x, x.shape[0], x.shape[1:])
    places = empty_activation(x, x.shape[0], out[0].shape[1:], torch.uint8)
    running = (running_mean, running_var)
    batch_norm((whole, *out[1:]), x, weight, bias, *running, None, probe, eps, relu, form, tau,
               through_sigma)  # fmt: skip
    pool.max_pool((out[0], places), whole, 2)
    return out


def batch_norm_pool_backward(
    out: tuple[Tensor, ...],
    grad: Tensor,
    grad_penalty: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    training: bool,
    eps: float,
    relu: bool,
    form: str,
    tau: float,
    through_sigma: bool,
    need_x: bool,
    need_bias: bool,
    need_probe: bool,
) -> object:
    """The output again, the places of its maxima, then both gradients one after the other."""
    if not grad.numel():
        return NotImplemented
    models, shape = x.shape[0], x.shape[1:]
    whole, spread = empty_activation(x, models, shape), empty_activation(x, models, shape)
    y, where = (empty_activation(x, models, grad.shape[1:], t) for t in (x.dtype, torch.uint8))
    rest = (torch.empty_like(mean), torch.empty_like(var), mean.new_empty(models))
    batch_norm((whole, *rest), x, weight, bias, mean, var, None, None, eps, relu, "", tau, False)
    pool.max_pool((y, where), whole, 2)
    pool.max_pool_backward((spread,), grad, where, 2, *shape[2:])
    saved = (x, weight, mean, var, whole if relu else None, training, eps, form, tau)
    needs = (need_x, need_bias, False, need_probe)
    five = (*out[:3], nothing(x, models), out[3])
    return batch_norm_backward(
        five, spread, grad_penalty, *saved, through_sigma, *needs, bias, False
    )


@kernel
def _penalty_slope(ratio, form, tau):
    """phi'(r) of r² (form 1) or max(0, |r| - tau)² (form 2); phi is phi'² / 4 for both."""
    if form == 1:
        return 2 * ratio
    excess = max(0.0, abs(ratio) - tau)
    return 2 * excess if ratio > 0 else -2 * excess


@kernel
def batch_norm_stack(
    x_all, x_pitch, rest_all, rest_pitch, y_all, y_pitch, mean_all, mean_pitch, var_all, var_pitch,
    penalty_all, penalty_pitch, weight_MC, bias_MC, samples, last, training, extra, relu, eps,
    form, tau, count,
):  # fmt: skip
    """Batch norm of every model; `count` elements each. In evaluation mean and var are given."""
    models, channels = weight_MC.shape
    scale_C = np.empty(channels, np.float32)
    for m in range(models):
        x = x_all[m * x_pitch : m * x_pitch + count]
        rest = rest_all[m * rest_pitch : m * rest_pitch + count]
        y = y_all[m * y_pitch : m * y_pitch + count]
        mean_C = mean_all[m * mean_pitch : m * mean_pitch + channels]
        var_C = var_all[m * var_pitch : m * var_pitch + channels]
        if training:
            moments(x, samples, channels, last, mean_C, var_C)
        penalty = 0.0
        for c in range(channels):
            ratio = weight_MC[m, c] / np.sqrt(np.float64(var_C[c]) + eps)
            scale_C[c] = ratio
            if form:
                penalty += _penalty_slope(ratio, form, tau) ** 2 / 4
        penalty_all[m * penalty_pitch] = penalty / channels
        mapped(x, rest, mean_C, scale_C, bias_MC[m], ZERO, samples, last, extra, relu, y)


@kernel
def batch_norm_backward_stack(
    grad_all, grad_pitch, y_all, y_pitch, x_all, x_pitch, dx_all, dx_pitch, rest_all, rest_pitch,
    mean_MC, var_MC, weight_MC, slope_M, both_2MC, samples, last, training, relu, keep, eps,
    form, tau, through_sigma, count,
):  # fmt: skip
    """Gradients of every model: dx, the residual's (`keep`), gamma's and beta's in both_2MC."""
    models, channels = weight_MC.shape
    scale_C, along_C = np.empty(channels, np.float32), np.empty(channels, np.float32)
    shift_C = np.empty(channels, np.float32)
    rows = count // channels
    for m in range(models):
        x = x_all[m * x_pitch : m * x_pitch + count]
        y = y_all[m * y_pitch : m * y_pitch + count]
        grad = grad_all[m * grad_pitch : m * grad_pitch + count]
        rest = rest_all[m * rest_pitch : m * rest_pitch + count]
        dx = dx_all[m * dx_pitch : m * dx_pitch + count]
        total_1, total_2 = np.zeros(channels), np.zeros(channels)
        reduced(grad, y, x, mean_MC[m], samples, last, relu, keep, rest, total_1, total_2)
        for c in range(channels):
            sigma = np.sqrt(np.float64(var_MC[m, c]) + eps)
            ratio = weight_MC[m, c] / sigma
            slope = 0.0
            if form:
                slope = slope_M[m] / channels * _penalty_slope(ratio, form, tau)
            both_2MC[0, m, c] = total_2[c] / sigma + slope / sigma
            both_2MC[1, m, c] = total_1[c]
            scale_C[c] = ratio
            along_C[c] = shift_C[c] = ZERO
            if training:
                through = slope * ratio / sigma if through_sigma else 0.0
                along_C[c] = -(ratio * total_2[c] / sigma + through) / (sigma * rows)
                shift_C[c] = -ratio * total_1[c] / rows
        slope_here = rest if keep else grad
        sloped(
            slope_here, y, x, mean_MC[m], scale_C, along_C, shift_C, samples, last,
            relu and not keep, dx,
        )  # fmt: skip
