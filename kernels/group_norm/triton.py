"""Group norm on a GPU: launches the kernels of `triton_passes` over stacked activations.

M models, N samples, C channels, G groups.
"""
# mypy: disable-error-code="no-untyped-call"

import torch
import triton
from torch import Tensor

from kernels._launch import TILE, activation, power_of_2, tiles, unit_stride
from kernels._layout import as_activation
from kernels.group_norm import triton_passes as passes
from kernels.group_norm import triton_pool as pooled
from kernels.pool.triton_warps import warps

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
        _merge(part, dweight, dbias, weight is not None, need_bias)
    return out


def _windows(x: Tensor, cut: dict[str, int]) -> tuple[dict[str, int], int]:
    """The cut in windows of four pixels, and the threads that take 128 bits a pixel each."""
    height, width = x.shape[3:]
    windows = power_of_2((height // 2) * (width // 2))
    few = min(max(1, cut["ROWS"] // x.element_size()), windows)
    layer = {name: size for name, size in cut.items() if name not in ("HW", "ROWS")}
    threads = few * cut["COLS"] * x.element_size() // 16
    return layer | {"H": height, "W": width, "FEW": few}, max(32, min(128, threads))


def group_norm_pool(
    out: tuple[Tensor, ...],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    relu: bool,
) -> object:
    """Fill the windows' maxima and every group's mean and sigma; leaves empty batches."""
    y, mean, sigma = out
    if y.numel() == 0:
        return NotImplemented
    cut, pitch = _cut(x, groups), tiles(x[0, :, 0].numel(), x.shape[2]).pitch
    layer, threads = _windows(x, cut)
    x = activation(x, pitch)
    gamma = mean if weight is None else unit_stride(weight)
    beta = mean if bias is None else unit_stride(bias)
    with torch.cuda.device_of(x):
        pooled.forward_pooled[(x.shape[1], triton.cdiv(x.shape[2], cut["WIDTH"]), x.shape[0])](
            x, y, gamma, beta, mean, sigma, pitch, y.stride(0), gamma.stride(0), beta.stride(0),
            mean.stride(0), eps, ROWS=max(1, cut["ROWS"] // 2), WEIGHT=weight is not None,
            BIAS=bias is not None, RELU=relu, num_warps=warps(threads), **layer,
        )  # fmt: skip
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
    """Fill the gradients of x, weight and bias from that of the windows' maxima."""
    dx, dweight, dbias = out
    if grad.numel() == 0:
        return NotImplemented
    models, samples, channels = x.shape[:3]
    cut, pitch = _cut(x, groups), tiles(x[0, :, 0].numel(), channels).pitch
    layer, threads = _windows(x, cut)
    x, dy = activation(x, pitch), as_activation(grad)
    gamma = mean if weight is None else unit_stride(weight)
    beta = mean if bias is None else unit_stride(bias)
    if not (mean[0].is_contiguous() and mean.stride() == sigma.stride()):
        mean, sigma = mean.contiguous(), sigma.contiguous()
    part = mean.new_empty((models, samples, 2, channels), dtype=torch.float32)
    with torch.cuda.device_of(x):
        pooled.backward_pooled[(samples, triton.cdiv(channels, cut["WIDTH"]), models)](
            dy, x, dx, gamma, beta, mean, sigma, part, samples, pitch, dy.stride(0),
            gamma.stride(0), beta.stride(0), mean.stride(0), WEIGHT=weight is not None,
            BIAS=bias is not None, RELU=relu, num_warps=warps(threads), **layer,
        )  # fmt: skip
        _merge(part, dweight, dbias, weight is not None, need_bias)
    return out


def _merge(part: Tensor, dweight: Tensor, dbias: Tensor, weight: bool, bias: bool) -> None:
    """dgamma and dbeta from every sample's channel sums."""
    if not (weight or bias):
        return
    models, samples, _, channels = part.shape
    step = tiles(samples, channels)
    passes.merge[(step.blocks, models)](
        part, dweight, dbias, samples, dweight.stride(0), dbias.stride(0), C=channels,
        STEP=step.rows, COLS=step.cols, WEIGHT=weight, BIAS=bias,
    )  # fmt: skip
