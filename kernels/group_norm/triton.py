"""Group norm on a GPU: launches the kernels of `triton_passes` over stacked activations.

M models, N samples, C channels, G groups.
"""
# mypy: disable-error-code="no-untyped-call"

import torch
import triton
from torch import Tensor

from kernels._launch import TILE, activation, power_of_2, tiles, unit_stride
from kernels.group_norm import triton_passes as passes

WIDTH = 64
"""Channels of a program at most, unless a single group is wider."""

WARP_BYTES = 1024
"""Bytes of a tile for one warp: two 128-bit accesses a thread, and no register spilled."""


def _cut(x: Tensor, groups: int) -> dict[str, int]:
    """A program's block of whole groups, and its tile: depends on one sample's shape alone."""
    channels = x.shape[2]
    size = channels // groups
    width = size * min(groups, max(1, WIDTH // size))
    cols = power_of_2(width)
    rows = min(max(1, TILE // cols), power_of_2(x.shape[3] * x.shape[4]))
    names = ("C", "GROUPS", "SIZE", "WIDTH", "COLS", "ROWS", "HW")
    values = (channels, groups, size, width, cols, rows, x.shape[3] * x.shape[4])
    return dict(zip(names, values, strict=True))


def _warps(cut: dict[str, int], x: Tensor) -> int:
    return max(1, min(4, cut["ROWS"] * cut["COLS"] * x.element_size() // WARP_BYTES))


def group_norm(
    out: tuple[Tensor, ...],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    groups: int,
    eps: float,
    relu: bool,
) -> object:
    """Fill y and every group's mean and sigma; leaves empty batches."""
    y, mean, sigma = out
    if y.numel() == 0:
        return NotImplemented
    cut, pitch = _cut(x, groups), tiles(x[0, :, 0].numel(), x.shape[2]).pitch
    x = activation(x, pitch)
    add = x if residual is None else activation(residual, pitch)
    gamma = mean if weight is None else unit_stride(weight)
    beta = mean if bias is None else unit_stride(bias)
    with torch.cuda.device_of(x):
        passes.forward[(x.shape[1], triton.cdiv(x.shape[2], cut["WIDTH"]), x.shape[0])](
            x, add, y, gamma, beta, mean, sigma, pitch, gamma.stride(0), beta.stride(0),
            mean.stride(0), eps, WEIGHT=weight is not None, BIAS=bias is not None, RELU=relu,
            RESIDUAL=residual is not None, num_warps=_warps(cut, x), **cut,
        )  # fmt: skip
    return out


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
) -> object:
    """Fill the gradients of x, weight, bias and residual; y is given behind a ReLU."""
    dx, dweight, dbias, dz = out
    if x.numel() == 0:
        return NotImplemented
    models, samples, channels = x.shape[:3]
    cut, pitch = _cut(x, groups), tiles(x[0, :, 0].numel(), channels).pitch
    x, dy = activation(x, pitch), activation(grad_y, pitch)
    mask = "" if y is None else "y" if added else "x"
    y = activation(y, pitch) if y is not None and mask == "y" else x
    gamma = mean if weight is None else unit_stride(weight)
    beta = mean if bias is None else unit_stride(bias)
    if not (mean[0].is_contiguous() and mean.stride() == sigma.stride()):
        mean, sigma = mean.contiguous(), sigma.contiguous()
    part = mean.new_empty((models, samples, 2, channels), dtype=torch.float32)
    with torch.cuda.device_of(x):
        passes.backward[(samples, triton.cdiv(channels, cut["WIDTH"]), models)](
            dy, x, y, dz, dx, gamma, beta, mean, sigma, part, samples, pitch, gamma.stride(0),
            beta.stride(0), mean.stride(0), WEIGHT=weight is not None, BIAS=bias is not None,
            MASK=mask, WRITE_DZ=need_residual, num_warps=_warps(cut, x), **cut,
        )  # fmt: skip
        if weight is not None or need_bias:
            step = tiles(samples, channels)
            passes.merge[(step.blocks, models)](
                part, dweight, dbias, samples, dweight.stride(0), dbias.stride(0), C=channels,
                STEP=step.rows, COLS=step.cols, WEIGHT=weight is not None, BIAS=need_bias,
            )  # fmt: skip
    return out
