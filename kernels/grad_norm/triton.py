"""Per-sample gradient norms on a GPU: chooses the form by a layer's shape, launches its kernels.

M models, N samples, C channels, O outputs, F features.
"""
# mypy: disable-error-code="no-untyped-call"

import torch
import triton
from torch import Tensor

from kernels._launch import activation, power_of_2, tiles
from kernels.grad_norm import triton_passes as passes
from kernels.grad_norm.cost import COST
from kernels.grad_norm.cpu import probed_conv2d, probed_linear


def conv_norms(
    out: tuple[Tensor, ...],
    x: Tensor,
    grad: Tensor,
    kernel: int,
    stride: int,
    padding: int,
    bias: bool,
    form: str,
) -> object:
    """Fill norm²_N; leaves empty batches."""
    (norm,) = out
    models, samples, channels, height, width = x.shape
    outputs, out_height, out_width = grad.shape[2:]
    if norm.numel() == 0 or grad.numel() == 0 or x.numel() == 0:
        return NotImplemented
    positions = out_height * out_width
    form = form or COST.choose(positions, channels * kernel * kernel, outputs)
    x = activation(x, tiles(samples * height * width, channels).pitch)
    grad = activation(grad, tiles(samples * positions, outputs).pitch)
    side = 32 if x.dtype is torch.float32 else 64
    cols = min(side, max(16, power_of_2(min(channels, outputs))))
    tile = min(side, max(16, power_of_2(positions)))
    shape = {"H": height, "W": width, "C": channels, "OUT_W": out_width, "T": positions}
    shape |= {"OUTS": outputs, "K": kernel, "STRIDE": stride, "PAD": padding, "BIAS": bias}
    shape |= {"TILE": tile, "COLS": cols}
    rows = triton.cdiv(positions, tile)
    if form == "gram":
        parts = rows * rows
    else:
        parts = kernel * kernel * triton.cdiv(channels, cols) * triton.cdiv(outputs, cols)
    part = torch.empty((models, samples, parts), dtype=torch.float32, device=x.device)
    grid, pitches = (parts, samples, models), (samples, x.stride(0), grad.stride(0))
    with torch.cuda.device_of(x):
        if form == "gram":
            passes.gram[grid](x, grad, part, *pitches, TILES=rows, **shape)
        else:
            passes.square[grid](x, grad, part, *pitches, **shape)
        wide = min(64, power_of_2(parts))
        passes.merge[(triton.cdiv(samples, 1024 // wide), models)](
            part, norm, samples, norm.stride(0), PARTS=parts, ROWS=1024 // wide, COLS=wide
        )
    return out


def linear_norms(out: tuple[Tensor, ...], x: Tensor, grad: Tensor, bias: bool) -> object:
    """Fill norm²_N; leaves empty batches."""
    (norm,) = out
    if x.numel() == 0 or grad.numel() == 0:
        return NotImplemented
    x, grad = (t if t[0].is_contiguous() else t.contiguous() for t in (x, grad))
    samples, features = x.shape[1:]
    cols = min(128, power_of_2(max(features, grad.shape[2])))
    rows = max(1, 1024 // cols)
    with torch.cuda.device_of(x):
        passes.linear[(triton.cdiv(samples, rows), x.shape[0])](
            x, grad, norm, samples, x.stride(0), grad.stride(0), norm.stride(0), F=features,
            OUTS=grad.shape[2], BIAS=bias, ROWS=rows, COLS=cols, num_warps=2,
        )  # fmt: skip
    return out


__all__ = ["conv_norms", "linear_norms", "probed_conv2d", "probed_linear"]
