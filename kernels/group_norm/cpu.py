"""Group norm on a CPU: one sample of one model after another, compiled.

M models, N samples, C channels, G groups.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import numpy as np
import torch
from torch import Tensor

from kernels._channels import constants, flat, flat_or
from kernels._channels import cpu as channels
from kernels._channels.cpu import mapped, reduced, sloped, squares, sums
from kernels._compiled.cpu import compiler
from kernels._layout import as_activation, channels_last, empty_activation, nothing
from kernels.pool import cpu as pool

kernel = compiler(__file__, channels.__file__)


def group_norm(
    out: tuple[Tensor, ...],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    groups: int,
    eps: float,
    relu: bool,
) -> None:
    """Fill y, mean and sigma."""
    y, mean, sigma = out
    x = as_activation(x)
    rest = None if residual is None else as_activation(residual)
    group_norm_stack(
        *flat(x),
        *flat_or(rest, x),
        *flat(y),
        *flat(mean),
        *flat(sigma),
        constants(weight, x, 1.0),
        constants(bias, x, 0.0),
        groups,
        x.shape[1],
        channels_last(x.device, x.shape[2]),
        rest is not None,
        relu,
        eps,
        x[0].numel(),
    )


def group_norm_backward(
    out: tuple[Tensor, ...],
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    sigma: Tensor,
    y: Tensor | None,
    groups: int,
    need_bias: bool,
    need_residual: bool,
    bias: Tensor | None,
    added: bool,
) -> None:
    """Fill the gradients of x, weight, bias and residual."""
    grad_x, grad_weight, grad_bias, grad_residual = out
    grad_y, x = as_activation(grad_y), as_activation(x)
    activated = None if y is None else as_activation(y)
    both = np.empty((2, x.shape[0], x.shape[2]), np.float32)
    group_norm_backward_stack(
        *flat(grad_y),
        *flat_or(activated, x),
        *flat(x),
        *flat(grad_x),
        *flat_or(grad_residual if need_residual else None, x),
        mean.detach().contiguous().numpy(),
        sigma.detach().contiguous().numpy(),
        constants(weight, x, 1.0),
        both,
        channels_last(x.device, x.shape[2]),
        y is not None,
        need_residual,
        x[0].numel(),
    )
    if weight is not None:
        grad_weight.copy_(torch.from_numpy(both[0]))
    if need_bias:
        grad_bias.copy_(torch.from_numpy(both[1]))


def group_norm_pool(
    out: tuple[Tensor, ...],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    relu: bool,
) -> object:
    """Norm and pooling one after the other."""
    if not out[0].numel():
        return NotImplemented
    whole = empty_activation(x, x.shape[0], x.shape[1:])
    places = empty_activation(x, x.shape[0], out[0].shape[1:], torch.uint8)
    group_norm((whole, *out[1:]), x, weight, bias, None, groups, eps, relu)
    pool.max_pool((out[0], places), whole, 2)
    return out


def group_norm_pool_backward(
    out: tuple[Tensor, ...],
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    sigma: Tensor,
    groups: int,
    eps: float,
    relu: bool,
    need_bias: bool,
) -> object:
    """The output again, the places of its maxima, then both gradients one after the other."""
    if not grad.numel():
        return NotImplemented
    models, shape = x.shape[0], x.shape[1:]
    whole, spread = empty_activation(x, models, shape), empty_activation(x, models, shape)
    y, where = (empty_activation(x, models, grad.shape[1:], t) for t in (x.dtype, torch.uint8))
    rest = (torch.empty_like(mean), torch.empty_like(sigma))
    group_norm((whole, *rest), x, weight, bias, None, groups, eps, relu)
    pool.max_pool((y, where), whole, 2)
    pool.max_pool_backward((spread,), grad, where, 2, *shape[2:])
    saved = (x, weight, mean, sigma, whole if relu else None, groups)
    four = (*out, nothing(x, models))
    group_norm_backward(four, spread, *saved, need_bias, False, bias, False)
    return out


@kernel
def group_norm_stack(
    x_all, x_pitch, rest_all, rest_pitch, y_all, y_pitch, mean_all, mean_pitch, sigma_all,
    sigma_pitch, weight_MC, bias_MC, groups, samples, last, extra, relu, eps, count,
):  # fmt: skip
    """Group norm of every model, one sample after another; sigma includes eps."""
    models, channels = weight_MC.shape
    inside, sample = channels // groups, count // max(1, samples)
    number = sample // groups
    mean_C, scale_C = np.empty(channels, np.float32), np.empty(channels, np.float32)
    for m in range(models):
        for n in range(samples):
            a = n * sample
            x = x_all[m * x_pitch + a : m * x_pitch + a + sample]
            rest = rest_all[m * rest_pitch + a : m * rest_pitch + a + sample]
            total, square = np.zeros(channels), np.zeros(channels)
            sums(x, channels, last, total)
            for g in range(groups):
                first = g * inside
                mean_C[first : first + inside] = total[first : first + inside].sum() / number
            squares(x, mean_C, last, square)
            for g in range(groups):
                first = g * inside
                var = square[first : first + inside].sum() / number
                sigma = np.float32(np.sqrt(var + eps))
                mean_all[m * mean_pitch + n * groups + g] = mean_C[first]
                sigma_all[m * sigma_pitch + n * groups + g] = sigma
                for c in range(first, first + inside):
                    scale_C[c] = weight_MC[m, c] / sigma
            y = y_all[m * y_pitch + a : m * y_pitch + a + sample]
            mapped(x, rest, mean_C, scale_C, bias_MC[m], 1, last, extra, relu, y)


@kernel
def group_norm_backward_stack(
    grad_all, grad_pitch, y_all, y_pitch, x_all, x_pitch, dx_all, dx_pitch, rest_all, rest_pitch,
    mean_MNG, sigma_MNG, weight_MC, both_2MC, last, relu, keep, count,
):  # fmt: skip
    """Gradients of every model: dx, the residual's (`keep`), gamma's and beta's in both_2MC."""
    models, samples, groups = mean_MNG.shape
    channels = weight_MC.shape[1]
    inside, sample = channels // groups, count // max(1, samples)
    number = sample // groups
    mean_C, scale_C = np.empty(channels, np.float32), np.empty(channels, np.float32)
    along_C, shift_C = np.empty(channels, np.float32), np.empty(channels, np.float32)
    for m in range(models):
        weight_sum, bias_sum = np.zeros(channels), np.zeros(channels)
        for n in range(samples):
            a = n * sample
            x = x_all[m * x_pitch + a : m * x_pitch + a + sample]
            y = y_all[m * y_pitch + a : m * y_pitch + a + sample]
            grad = grad_all[m * grad_pitch + a : m * grad_pitch + a + sample]
            rest = rest_all[m * rest_pitch + a : m * rest_pitch + a + sample]
            for c in range(channels):
                mean_C[c] = mean_MNG[m, n, c // inside]
            total_1, total_2 = np.zeros(channels), np.zeros(channels)
            reduced(grad, y, x, mean_C, 1, last, relu, keep, rest, total_1, total_2)
            bias_sum += total_1
            for g in range(groups):
                first, sigma = g * inside, np.float64(sigma_MNG[m, n, g])
                level, tilt = 0.0, 0.0
                for c in range(first, first + inside):
                    weight_sum[c] += total_2[c] / sigma
                    level += weight_MC[m, c] * total_1[c]
                    tilt += weight_MC[m, c] * total_2[c]
                for c in range(first, first + inside):
                    scale_C[c] = weight_MC[m, c] / sigma
                    along_C[c] = -tilt / (number * sigma**3)
                    shift_C[c] = -level / (number * sigma)
            dx = dx_all[m * dx_pitch + a : m * dx_pitch + a + sample]
            slope_here = rest if keep else grad
            sloped(
                slope_here, y, x, mean_C, scale_C, along_C, shift_C, 1, last, relu and not keep, dx
            )
        both_2MC[0, m], both_2MC[1, m] = weight_sum, bias_sum
