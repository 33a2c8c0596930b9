"""Batch norm on a GPU: launches the passes of `triton_passes` over stacked activations.

M models, N samples, C channels.
"""
# mypy: disable-error-code="no-untyped-call"

import torch
import triton
from torch import Tensor

from kernels._launch import Tiles, activation, rounds, sample_tiles, tiles, unit_stride
from kernels._layout import as_activation, empty_activation
from kernels.batch_norm import triton_passes as passes
from kernels.batch_norm import triton_pool as pooled
from kernels.pool.triton_warps import warps


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
) -> object:
    """Fill y, mean, biased variance and penalty of stacked models; leaves empty batches."""
    y, mean, var, penalty = out
    channels, rows = x.shape[2], x.shape[1] * x.shape[3] * x.shape[4]
    if y.numel() == 0:
        return NotImplemented
    cut = tiles(rows, channels)
    x = activation(x, cut.pitch)
    add = x if residual is None else activation(residual, cut.pitch)
    gamma = mean if weight is None else unit_stride(weight)
    beta = mean if bias is None else unit_stride(bias)
    if running_mean is not None and running_var is not None:
        mean.copy_(running_mean)
        var.copy_(running_var)
    part = _partial_sums(x, cut)
    with torch.cuda.device_of(x):
        for first, models in rounds(x, 2 if residual is None else 3):
            if running_mean is None:
                _statistics(x, part, mean, var, first, models, cut)
            passes.apply[(part.shape[1], cut.blocks, models)](
                x, add, y, gamma, beta, mean, var, penalty, penalty.stride(0), first, cut.pitch,
                gamma.stride(0), beta.stride(0), mean.stride(0), rows, eps, tau, C=channels,
                CHUNK=cut.chunk, COLS=cut.cols, ROWS=cut.rows, WEIGHT=weight is not None,
                BIAS=bias is not None, RELU=relu, RESIDUAL=residual is not None, FORM=form,
            )  # fmt: skip
    return out


def _partial_sums(x: Tensor, cut: Tiles) -> Tensor:
    """Room for the two sums of every model, chunk of rows and channel."""
    chunks = triton.cdiv(x[0, :, 0].numel(), cut.chunk)
    return x.new_empty((x.shape[0], chunks, 2, x.shape[2]), dtype=torch.float32)


def _statistics(
    x: Tensor, part: Tensor, mean: Tensor, var: Tensor, first: int, models: int, cut: Tiles
) -> None:
    """Fill mean and biased variance of a round of models."""
    rows, chunks = x[0, :, 0].numel(), part.shape[1]
    shape = {"C": x.shape[2], "CHUNK": cut.chunk, "COLS": cut.cols}
    passes.statistics[(chunks, cut.blocks, models)](
        x, part, first, cut.pitch, rows, chunks, ROWS=cut.rows, **shape
    )
    passes.merge_statistics[(cut.blocks, models)](
        part, mean, var, first, mean.stride(0), rows, chunks, STEP=cut.rows, **shape
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
    """Fill the gradients of x, weight, bias, residual and probe; y is given behind a ReLU."""
    dx, dweight, dbias, dz, dprobe = out
    samples, channels, pixels = x.shape[1], x.shape[2], x.shape[3] * x.shape[4]
    if x.numel() == 0:
        return NotImplemented
    cut = tiles(samples * pixels, channels)
    group, tile_samples, tile_rows = sample_tiles(pixels, cut)
    groups, chunks = triton.cdiv(samples, group), triton.cdiv(samples * pixels, cut.chunk)
    mask = "" if y is None else "y" if added else "x"
    x, dy = activation(x, cut.pitch), activation(grad_y, cut.pitch)
    y = activation(y, cut.pitch) if y is not None and mask == "y" else x
    write_dz = need_residual or mask == "y"
    if write_dz and not need_residual:
        dz = empty_activation(x, x.shape[0], x.shape[1:])
    mean, var, gamma, beta = _vectors(mean, var, weight, bias)
    part, coef, norm = (
        torch.empty((x.shape[0], *shape), dtype=torch.float32, device=x.device)
        for shape in ((groups, 2, channels), (2, channels), (samples * need_probe, cut.blocks))
    )
    slope = mean if grad_penalty is None else grad_penalty
    pitches = (gamma.stride(0), beta.stride(0), mean.stride(0))
    flags = {"C": channels, "COLS": cut.cols, "WEIGHT": weight is not None}
    with torch.cuda.device_of(x):
        for first, models in rounds(x, 4 if write_dz else 3):
            passes.reduce[(groups, cut.blocks, models)](
                dy, x, y, dz, dx, gamma, beta, mean, var, part, norm, first, cut.pitch, *pitches,
                samples, groups, eps, HW=pixels, GROUP=group, SAMPLES=tile_samples,
                ROWS=tile_rows, BIAS=bias is not None, MASK=mask, WRITE_DZ=write_dz,
                WRITE_DX=need_x and not training, NORMS=need_probe, **flags,
            )  # fmt: skip
            passes.merge_sums[(cut.blocks, models)](
                part, coef, gamma, var, slope, dweight, dbias, norm, dprobe, first, pitches[0],
                mean.stride(0), slope.stride(0), dprobe.stride(0), dweight.stride(0),
                dbias.stride(0), samples, samples * pixels, groups, eps, tau, STEP=cut.rows,
                BIAS=need_bias, FORM=form if grad_penalty is not None else "",
                THROUGH=through_sigma and training, NORMS=need_probe, **flags,
            )  # fmt: skip
            if need_x and training:
                passes.apply_backward[(chunks, cut.blocks, models)](
                    dz if write_dz else dy, x, dx, gamma, beta, mean, var, coef, first, cut.pitch,
                    *pitches, samples * pixels, eps, CHUNK=cut.chunk, ROWS=cut.rows,
                    BIAS=bias is not None, MASK=mask == "x", **flags,
                )  # fmt: skip
    return out


def _windows(cut: Tiles, x: Tensor) -> Tiles:
    """The cut of a layer in windows of four pixels: 128 bits a pixel for each of 128 threads."""
    rows = max(1, cut.rows // x.element_size())
    return cut._replace(rows=rows, chunk=max(rows, cut.chunk // 4))


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
    """Fill the windows' maxima, mean, biased variance and penalty; leaves empty batches."""
    y, mean, var, penalty = out
    samples, channels, height, width = x.shape[1:]
    rows, windows = samples * height * width, samples * (height // 2) * (width // 2)
    if y.numel() == 0:
        return NotImplemented
    cut = tiles(rows, channels)
    few = _windows(cut, x)
    x = activation(x, cut.pitch)
    gamma = mean if weight is None else unit_stride(weight)
    beta = mean if bias is None else unit_stride(bias)
    if running_mean is not None and running_var is not None:
        mean.copy_(running_mean)
        var.copy_(running_var)
    part = _partial_sums(x, cut)
    with torch.cuda.device_of(x):
        for first, models in rounds(x, 2):
            if running_mean is None:
                _statistics(x, part, mean, var, first, models, cut)
            pooled.apply_pooled[(triton.cdiv(windows, few.chunk), cut.blocks, models)](
                x, y, gamma, beta, mean, var, penalty, penalty.stride(0), first, cut.pitch,
                y.stride(0), gamma.stride(0), beta.stride(0), mean.stride(0), windows, eps, tau,
                H=height, W=width, C=channels, COLS=cut.cols, CHUNK=few.chunk, ROWS=few.rows,
                WEIGHT=weight is not None, BIAS=bias is not None, RELU=relu, FORM=form,
                num_warps=warps(128),
            )  # fmt: skip
    return out


def batch_norm_pool_backward(
    out: tuple[Tensor, ...],
    grad_y: Tensor,
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
    """Fill the gradients of x, weight, bias and probe from that of the windows' maxima."""
    dx, dweight, dbias, dprobe = out
    samples, channels, height, width = x.shape[1:]
    rows, windows = samples * height * width, samples * -(-height // 2) * -(-width // 2)
    if grad_y.numel() == 0:
        return NotImplemented
    cut = tiles(rows, channels)
    few = _windows(cut, x)
    group, tile_samples, tile_rows = sample_tiles((height // 2) * (width // 2), few)
    groups = triton.cdiv(samples, group)
    x, dy = activation(x, cut.pitch), as_activation(grad_y)
    mean, var, gamma, beta = _vectors(mean, var, weight, bias)
    part, coef, norm = (
        torch.empty((x.shape[0], *shape), dtype=torch.float32, device=x.device)
        for shape in ((groups, 2, channels), (2, channels), (samples * need_probe, cut.blocks))
    )
    slope = mean if grad_penalty is None else grad_penalty
    pitches = (dy.stride(0), gamma.stride(0), beta.stride(0), mean.stride(0))
    flags = {"C": channels, "COLS": cut.cols, "WEIGHT": weight is not None}
    layer = {"H": height, "W": width, "BIAS": bias is not None, "RELU": relu}
    layer["num_warps"] = warps(128)
    with torch.cuda.device_of(x):
        for first, models in rounds(x, 3):
            pooled.reduce_pooled[(groups, cut.blocks, models)](
                dy, x, gamma, beta, mean, var, part, norm, first, cut.pitch, *pitches, samples,
                groups, eps, GROUP=group, SAMPLES=tile_samples, ROWS=tile_rows, NORMS=need_probe,
                **layer, **flags,
            )  # fmt: skip
            passes.merge_sums[(cut.blocks, models)](
                part, coef, gamma, var, slope, dweight, dbias, norm, dprobe, first, pitches[1],
                mean.stride(0), slope.stride(0), dprobe.stride(0), dweight.stride(0),
                dbias.stride(0), samples, rows, groups, eps, tau, STEP=cut.rows,
                BIAS=need_bias, FORM=form if grad_penalty is not None else "",
                THROUGH=through_sigma and training, NORMS=need_probe, **flags,
            )  # fmt: skip
            if need_x:
                pooled.apply_backward_pooled[(triton.cdiv(windows, few.chunk), cut.blocks, models)](
                    dy, x, dx, gamma, beta, mean, var, coef, first, cut.pitch, *pitches, windows,
                    eps, CHUNK=few.chunk, ROWS=few.rows, TRAINING=training, **layer, **flags,
                )  # fmt: skip
    return out


def _vectors(
    mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Statistics of equal strides, gamma and beta (or a stand-in that is not read)."""
    if var.stride() != mean.stride() or mean.stride(1) != 1:
        mean, var = mean.contiguous(), var.contiguous()
    gamma = mean if weight is None else unit_stride(weight)
    return mean, var, gamma, mean if bias is None else unit_stride(bias)
