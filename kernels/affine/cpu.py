"""Scale, shift, residual, ReLU and second shift on a CPU: one model after another, compiled.

M models, N samples, C channels.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels._channels import constants, flat, flat_or
from kernels._channels import cpu as channels
from kernels._channels.cpu import ZERO, behind, mapped, products, run_of, sums
from kernels._compiled.cpu import compiler
from kernels._layout import as_activation, channels_last

kernel = compiler(__file__, channels.__file__)


def affine(
    out: tuple[Tensor, ...],
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    after: Tensor | None,
    relu: bool,
) -> None:
    """Fill y."""
    x = as_activation(x)
    rest = None if residual is None else as_activation(residual)
    affine_stack(
        *flat(x),
        *flat_or(rest, x),
        *flat(out[0]),
        constants(scale, x, 1.0),
        constants(shift, x, 0.0),
        _scalars(after, x),
        x.shape[1],
        channels_last(x.device, x.shape[2]),
        rest is not None,
        relu,
        x[0].numel(),
    )


def affine_backward(
    out: tuple[Tensor, ...],
    grad_y: Tensor,
    x: Tensor | None,
    scale: Tensor | None,
    y: Tensor | None,
    after: Tensor | None,
    need_x: bool,
    shift_shape: list[int] | None,
    need_residual: bool,
) -> None:
    """Fill the gradients of x, scale, shift, residual and after."""
    grad_x, grad_scale, grad_shift, grad_residual, grad_after = out
    grad = as_activation(grad_y)
    activated = None if y is None else as_activation(y)
    both = np.empty((2, grad.shape[0], grad.shape[2]), np.float32)
    whole = np.empty((3, grad.shape[0]), np.float32)
    affine_backward_stack(
        *flat(grad),
        *flat_or(activated, grad),
        *flat_or(None if x is None else as_activation(x), grad),
        *flat_or(grad_x if need_x else None, grad),
        *flat_or(grad_residual if need_residual else None, grad),
        constants(scale, grad, 1.0),
        _scalars(after, grad),
        both,
        whole,
        grad.shape[1],
        channels_last(grad.device, grad.shape[2]),
        y is not None,
        need_residual,
        shift_shape is not None,
        after is not None,
        need_x,
        scale is not None,
        grad[0].numel(),
    )
    if scale is not None:
        grad_scale.copy_(torch.from_numpy(both[0] if scale.dim() == 2 else whole[0]))
    if shift_shape is not None:
        grad_shift.copy_(torch.from_numpy(both[1] if shift_shape else whole[1]))
    if after is not None:
        grad_after.copy_(torch.from_numpy(whole[2]))


def _scalars(value: Tensor | None, like: Tensor) -> npt.NDArray[np.float32]:
    """One number a model, 0 where there is none."""
    if value is None:
        return np.zeros(like.shape[0], np.float32)
    array: npt.NDArray[np.float32] = value.detach().contiguous().numpy()
    return array


@kernel
def affine_stack(
    x_all, x_pitch, rest_all, rest_pitch, y_all, y_pitch, scale_MC, shift_MC, after_M, samples,
    last, extra, relu, count,
):  # fmt: skip
    """relu(scale x + shift + residual) + after of every model."""
    models, channels = scale_MC.shape
    mean_C = np.zeros(channels, np.float32)
    for m in range(models):
        x = x_all[m * x_pitch : m * x_pitch + count]
        rest = rest_all[m * rest_pitch : m * rest_pitch + count]
        y = y_all[m * y_pitch : m * y_pitch + count]
        scale_C, shift_C = scale_MC[m], shift_MC[m]
        mapped(x, rest, mean_C, scale_C, shift_C, after_M[m], samples, last, extra, relu, y)


@kernel
def affine_backward_stack(
    grad_all, grad_pitch, y_all, y_pitch, x_all, x_pitch, dx_all, dx_pitch, rest_all, rest_pitch,
    scale_MC, after_M, both_2MC, whole_3M, samples, last, relu, keep, shifted, offset, need_x,
    scaled, count,
):  # fmt: skip
    """Gradients of every model, a run of samples after another while it is in a near cache.

    Per channel and whole: sums of the product with x and of the gradient; of `after`'s whole ones.
    """
    models, channels = scale_MC.shape
    zero_C, run = np.zeros(channels, np.float32), run_of(count, samples, last)
    scratch = np.empty(run if relu and not keep else 0, np.float32)
    for m in range(models):
        total_1, total_2, total_3 = np.zeros(channels), np.zeros(channels), np.zeros(channels)
        grad_m = grad_all[m * grad_pitch : m * grad_pitch + count]
        y_m = y_all[m * y_pitch : m * y_pitch + count]
        rest_m = rest_all[m * rest_pitch : m * rest_pitch + count]
        for first in range(0, count, run):
            stop = min(first + run, count)
            if offset:
                sums(grad_m[first:stop], channels, last, total_3)
            slope = behind(grad_m, y_m, first, stop, after_M[m], relu, keep, rest_m, scratch)
            if scaled:
                x = x_all[m * x_pitch + first : m * x_pitch + stop]
                products(slope, x, zero_C, last, total_1, total_2)
            elif shifted:
                sums(slope, channels, last, total_1)
            if need_x:
                dx = dx_all[m * dx_pitch + first : m * dx_pitch + stop]
                here = max(1, slope.size * samples // count)
                scale_C = scale_MC[m]
                mapped(slope, slope, zero_C, scale_C, zero_C, ZERO, here, last, False, False, dx)
        both_2MC[0, m], both_2MC[1, m] = total_2, total_1
        whole_3M[0, m], whole_3M[1, m] = total_2.sum(), total_1.sum()
        whole_3M[2, m] = total_3.sum()
