"""Scale, shift, residual and ReLU on a CPU: one model after another, compiled.

M models, N samples, C channels.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import numpy as np
import torch
from torch import Tensor

from kernels._channels import constants, flat, flat_or
from kernels._channels import cpu as channels
from kernels._channels.cpu import mapped, mask, reduced, sloped, summed
from kernels._compiled.cpu import compiler
from kernels._layout import as_activation, channels_last

kernel = compiler(__file__, channels.__file__)


def affine(
    out: tuple[Tensor, ...],
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
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
    need_x: bool,
    shift_shape: list[int] | None,
    need_residual: bool,
) -> None:
    """Fill the gradients of x, scale, shift and residual."""
    grad_x, grad_scale, grad_shift, grad_residual = out
    grad = as_activation(grad_y)
    activated = None if y is None else as_activation(y)
    both = np.empty((2, grad.shape[0], grad.shape[2]), np.float32)
    whole = np.empty((2, grad.shape[0]), np.float32)
    affine_backward_stack(
        *flat(grad),
        *flat_or(activated, grad),
        *flat_or(None if x is None else as_activation(x), grad),
        *flat_or(grad_x if need_x else None, grad),
        *flat_or(grad_residual if need_residual else None, grad),
        constants(scale, grad, 1.0),
        both,
        whole,
        grad.shape[1],
        channels_last(grad.device, grad.shape[2]),
        y is not None,
        need_residual,
        scale is not None or shift_shape is not None,
        need_x,
        scale is not None,
        grad[0].numel(),
    )
    if scale is not None:
        grad_scale.copy_(torch.from_numpy(both[0] if scale.dim() == 2 else whole[0]))
    if shift_shape is not None:
        grad_shift.copy_(torch.from_numpy(both[1] if shift_shape else whole[1]))


@kernel
def affine_stack(
    x_all, x_pitch, rest_all, rest_pitch, y_all, y_pitch, scale_MC, shift_MC, samples, last, extra,
    relu, count,
):  # fmt: skip
    """relu(scale x + shift + residual) of every model."""
    models, channels = scale_MC.shape
    mean_C = np.zeros(channels, np.float32)
    for m in range(models):
        x = x_all[m * x_pitch : m * x_pitch + count]
        rest = rest_all[m * rest_pitch : m * rest_pitch + count]
        y = y_all[m * y_pitch : m * y_pitch + count]
        mapped(x, rest, mean_C, scale_MC[m], shift_MC[m], samples, last, extra, relu, y)


@kernel
def affine_backward_stack(
    grad_all, grad_pitch, y_all, y_pitch, x_all, x_pitch, dx_all, dx_pitch, rest_all, rest_pitch,
    scale_MC, both_2MC, whole_2M, samples, last, relu, keep, sums_too, need_x, scaled, count,
):  # fmt: skip
    """Gradients of every model; per-channel sums of the gradient and of its product with x."""
    models, channels = scale_MC.shape
    zero_C = np.zeros(channels, np.float32)
    for m in range(models):
        x = x_all[m * x_pitch : m * x_pitch + count]
        y = y_all[m * y_pitch : m * y_pitch + count]
        grad = grad_all[m * grad_pitch : m * grad_pitch + count]
        rest = rest_all[m * rest_pitch : m * rest_pitch + count]
        if sums_too:
            total_1, total_2 = np.zeros(channels), np.zeros(channels)
            if scaled:
                reduced(grad, y, x, zero_C, samples, last, relu, keep, rest, total_1, total_2)
            else:
                summed(grad, y, samples, last, relu, keep, rest, total_1)
            both_2MC[0, m], both_2MC[1, m] = total_2, total_1
            whole_2M[0, m], whole_2M[1, m] = total_2.sum(), total_1.sum()
        elif keep and relu:
            mask(grad, y, rest)
        elif keep:
            rest[:] = grad
        if keep:
            grad = rest
        if need_x:
            dx = dx_all[m * dx_pitch : m * dx_pitch + count]
            if scaled and (keep or not relu):
                mapped(grad, grad, zero_C, scale_MC[m], zero_C, samples, last, False, False, dx)
            elif scaled:
                sloped(grad, y, x, zero_C, scale_MC[m], zero_C, zero_C, samples, last, True, dx)
            elif relu and not keep:
                mask(grad, y, dx)
            else:
                dx[:] = grad
