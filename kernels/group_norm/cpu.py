"""Group norm on a CPU: one sample of one model after another, compiled.

M models, N samples, C channels, G groups.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import numpy as np
import torch
from torch import Tensor

from kernels._channels import constants, flat, flat_or
from kernels._channels import cpu as channels
from kernels._channels.cpu import (
    ZERO,
    behind,
    floor_of,
    gather,
    lane_map,
    lane_products,
    lane_slope,
    lane_squares,
    lane_sums,
    mapped,
    products,
    repeat,
    sloped,
    squares,
    sums,
)
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


LANES = 256
"""Elements of a tile: constants change from sample to sample, so few copies of them are made."""


@kernel
def _means(total_C, number, mean_C, mean_G):
    """Per-group means from per-channel sums, for the groups and for each of their channels."""
    groups, inside = mean_G.size, mean_C.size // mean_G.size
    for g in range(groups):
        total = 0.0
        for c in range(g * inside, (g + 1) * inside):
            total += total_C[c]
            total_C[c] = 0.0
        mean_G[g] = total / number
        for c in range(g * inside, (g + 1) * inside):
            mean_C[c] = mean_G[g]


@kernel
def _scales(square_C, number, eps, weight_C, sigma_G, scale_C):
    """sigma of each group from per-channel sums of squares, gamma / sigma of each channel."""
    groups, inside = sigma_G.size, scale_C.size // sigma_G.size
    for g in range(groups):
        square = 0.0
        for c in range(g * inside, (g + 1) * inside):
            square += square_C[c]
            square_C[c] = 0.0
        sigma_G[g] = np.sqrt(square / number + eps)
        for c in range(g * inside, (g + 1) * inside):
            scale_C[c] = weight_C[c] / sigma_G[g]


@kernel
def group_norm_stack(
    x_all, x_pitch, rest_all, rest_pitch, y_all, y_pitch, mean_all, mean_pitch, sigma_all,
    sigma_pitch, weight_MC, bias_MC, groups, samples, last, extra, relu, eps, count,
):  # fmt: skip
    """Group norm of every model, one sample after another; sigma includes eps."""
    models, channels = weight_MC.shape
    sample = count // max(1, samples)
    number, floor = sample // groups, floor_of(relu)
    mean_C, scale_C = np.empty(channels, np.float32), np.empty(channels, np.float32)
    total_C = np.zeros(channels)
    lanes = channels * max(1, LANES // channels)
    lane, mean = np.zeros(lanes, np.float32), np.empty(lanes, np.float32)
    scale, shift = np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    for m in range(models):
        repeat(bias_MC[m], shift)
        for n in range(samples):
            a = n * sample
            x = x_all[m * x_pitch + a : m * x_pitch + a + sample]
            rest = rest_all[m * rest_pitch + a : m * rest_pitch + a + sample]
            y = y_all[m * y_pitch + a : m * y_pitch + a + sample]
            at = m * mean_pitch + n * groups
            mean_G = mean_all[at : at + groups]
            at = m * sigma_pitch + n * groups
            sigma_G = sigma_all[at : at + groups]
            if last:
                lane_sums(x, lane)
                gather(lane, total_C)
                _means(total_C, number, mean_C, mean_G)
                repeat(mean_C, mean)
                lane_squares(x, mean, lane)
                gather(lane, total_C)
                _scales(total_C, number, eps, weight_MC[m], sigma_G, scale_C)
                repeat(scale_C, scale)
                lane_map(x, rest, mean, scale, shift, ZERO, extra, floor, y)
            else:
                sums(x, channels, last, total_C)
                _means(total_C, number, mean_C, mean_G)
                squares(x, mean_C, last, total_C)
                _scales(total_C, number, eps, weight_MC[m], sigma_G, scale_C)
                mapped(x, rest, mean_C, scale_C, bias_MC[m], ZERO, 1, last, extra, relu, y)


@kernel
def _coefficients(
    total_1_C, total_2_C, number, weight_C, sigma_G, scale_C, along_C, shift_C, weight_sum_C,
    bias_sum_C,
):  # fmt: skip
    """What dx is made of from the sums over a sample, which are added to gamma's and beta's."""
    groups, inside = sigma_G.size, scale_C.size // sigma_G.size
    for g in range(groups):
        sigma, level, tilt = np.float64(sigma_G[g]), 0.0, 0.0
        for c in range(g * inside, (g + 1) * inside):
            weight_sum_C[c] += total_2_C[c] / sigma
            bias_sum_C[c] += total_1_C[c]
            level += weight_C[c] * total_1_C[c]
            tilt += weight_C[c] * total_2_C[c]
            total_1_C[c] = total_2_C[c] = 0.0
        for c in range(g * inside, (g + 1) * inside):
            scale_C[c] = weight_C[c] / sigma
            along_C[c] = -tilt / (number * sigma**3)
            shift_C[c] = -level / (number * sigma)


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
    scratch = np.empty(sample if relu and not keep else 0, np.float32)
    mean_C, scale_C = np.empty(channels, np.float32), np.empty(channels, np.float32)
    along_C, shift_C = np.empty(channels, np.float32), np.empty(channels, np.float32)
    total_1, total_2 = np.zeros(channels), np.zeros(channels)
    lanes = channels * max(1, LANES // channels)
    lane_1, lane_2 = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)
    mean, scale = np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    along, shift = np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    for m in range(models):
        weight_sum, bias_sum = np.zeros(channels), np.zeros(channels)
        for n in range(samples):
            a = n * sample
            x = x_all[m * x_pitch + a : m * x_pitch + a + sample]
            y = y_all[m * y_pitch + a : m * y_pitch + a + sample]
            grad = grad_all[m * grad_pitch + a : m * grad_pitch + a + sample]
            rest = rest_all[m * rest_pitch + a : m * rest_pitch + a + sample]
            dx = dx_all[m * dx_pitch + a : m * dx_pitch + a + sample]
            slope = behind(grad, y, 0, sample, ZERO, relu, keep, rest, scratch)
            for c in range(channels):
                mean_C[c] = mean_MNG[m, n, c // inside]
            if last:
                repeat(mean_C, mean)
                lane_products(slope, x, mean, lane_1, lane_2)
                gather(lane_1, total_1)
                gather(lane_2, total_2)
            else:
                products(slope, x, mean_C, last, total_1, total_2)
            _coefficients(
                total_1, total_2, number, weight_MC[m], sigma_MNG[m, n], scale_C, along_C,
                shift_C, weight_sum, bias_sum,
            )  # fmt: skip
            if last:
                repeat(scale_C, scale)
                repeat(along_C, along)
                repeat(shift_C, shift)
                lane_slope(slope, x, mean, scale, along, shift, dx)
            else:
                sloped(slope, slope, x, mean_C, scale_C, along_C, shift_C, 1, last, False, dx)
        both_2MC[0, m], both_2MC[1, m] = weight_sum, bias_sum
