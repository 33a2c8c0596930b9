"""Batch norm on stacked channels-last activations, in Triton: every pass streams memory once.

forward   statistics (reads x) → merge → apply (reads x [, residual], writes y)
backward  reduce (reads x, dy [, y; writes dz]) → merge → apply (reads x, dy or dz; writes dx)

Kernels see models of R·C numbers, `pitch` apart; the model is a grid axis, and no number of a model
depends on how many there are. Statistics are sums shifted by the mean of the chunk's first tile,
merged as Chan et al. (1983) do, in float32 and in a fixed order; there are no atomics. dz is dy
behind the ReLU's mask, which is redone from x; with a residual it is the residual's gradient, made
from y, written once and read back. Penalty and per-sample norms ride on sums that exist anyway.

M models, N samples, C channels, R = N·H·W rows a model.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

_AS_IT_IS = ["first"]


@triton.jit
def _vectors(weight_ptr, bias_ptr, mean_ptr, var_ptr, model, col, weight_pitch, bias_pitch,
             stat_pitch, eps, C: tl.constexpr, COLS: tl.constexpr, WEIGHT: tl.constexpr,
             BIAS: tl.constexpr):  # fmt: skip
    """A model's mean, 1/sigma, gamma/sigma and beta of a block of channels."""
    inside = col < C
    mean = tl.load(mean_ptr + model * stat_pitch + col, mask=inside, other=0.0).to(tl.float32)
    var = tl.load(var_ptr + model * stat_pitch + col, mask=inside, other=1.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(var + eps)
    scale = rstd
    if WEIGHT:
        weight = tl.load(weight_ptr + model * weight_pitch + col, mask=inside, other=0.0)
        scale = rstd * weight.to(tl.float32)
    shift = tl.zeros([COLS], tl.float32)
    if BIAS:
        shift = tl.load(bias_ptr + model * bias_pitch + col, mask=inside, other=0.0).to(tl.float32)
    return mean, rstd, scale, shift


@triton.jit(do_not_specialize=_AS_IT_IS)
def statistics(x_ptr, part_ptr, first, pitch, rows, chunks, C: tl.constexpr, CHUNK: tl.constexpr,
               ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Mean and summed squared deviation of one chunk of rows, per channel."""
    chunk, model = tl.program_id(0), tl.cast(tl.program_id(2) + first, tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    lane = tl.arange(0, ROWS)
    inside = (col < C)[None, :]
    count = tl.minimum(rows - chunk * CHUNK, CHUNK)
    base = x_ptr + (model * pitch + tl.cast(chunk, tl.int64) * (CHUNK * C))
    tile = lane[:, None] * C + col[None, :]
    mask = (lane < count)[:, None] & inside
    x = tl.load(base + tile, mask=mask, other=0.0).to(tl.float32)
    shift = tl.sum(x, 0) / tl.minimum(count, ROWS).to(tl.float32)
    away = tl.where(mask, x - shift[None, :], 0.0)
    total = away
    square = away * away
    for i in range(ROWS, CHUNK, ROWS):
        mask = (lane + i < count)[:, None] & inside
        x = tl.load(base + i * C + tile, mask=mask, other=0.0).to(tl.float32)
        away = tl.where(mask, x - shift[None, :], 0.0)
        total += away
        square += away * away
    offset = tl.sum(total, 0) / count.to(tl.float32)
    spread = tl.sum(square, 0) - offset * offset * count.to(tl.float32)
    out = part_ptr + (model * chunks + chunk) * (2 * C) + col
    tl.store(out, shift + offset, mask=col < C)
    tl.store(out + C, tl.maximum(spread, 0.0), mask=col < C)


@triton.jit(do_not_specialize=_AS_IT_IS)
def merge_statistics(part_ptr, mean_ptr, var_ptr, first, stat_pitch, rows, chunks,
                     C: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
                     COLS: tl.constexpr):  # fmt: skip
    """Chan's merge of the chunks' moments, in a fixed order."""
    model = tl.cast(tl.program_id(1) + first, tl.int64)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    lane = tl.arange(0, STEP)
    part = part_ptr + model * chunks * (2 * C) + col[None, :]
    total = tl.zeros([STEP, COLS], tl.float32)
    for i in range(0, chunks, STEP):
        mask = (lane + i < chunks)[:, None] & (col < C)[None, :]
        weight = tl.minimum(rows - (lane + i) * CHUNK, CHUNK).to(tl.float32)[:, None]
        mean = tl.load(part + (lane + i)[:, None] * (2 * C), mask=mask, other=0.0)
        total += tl.where(mask, mean * weight, 0.0)
    centre = tl.sum(total, 0) / tl.cast(rows, tl.float32)
    total = tl.zeros([STEP, COLS], tl.float32)
    for i in range(0, chunks, STEP):
        mask = (lane + i < chunks)[:, None] & (col < C)[None, :]
        weight = tl.minimum(rows - (lane + i) * CHUNK, CHUNK).to(tl.float32)[:, None]
        mean = tl.load(part + (lane + i)[:, None] * (2 * C), mask=mask, other=0.0)
        spread = tl.load(part + (lane + i)[:, None] * (2 * C) + C, mask=mask, other=0.0)
        away = mean - centre[None, :]
        total += tl.where(mask, spread + away * away * weight, 0.0)
    out = model * stat_pitch + col
    tl.store(mean_ptr + out, centre, mask=col < C)
    tl.store(var_ptr + out, tl.sum(total, 0) / tl.cast(rows, tl.float32), mask=col < C)


@triton.jit
def _penalty(weight_ptr, var_ptr, model, weight_pitch, stat_pitch, eps, tau, C: tl.constexpr,
             COLS: tl.constexpr, FORM: tl.constexpr, WEIGHT: tl.constexpr):  # fmt: skip
    """mean_c phi(gamma_c / sigma_c) of one model, over its channels in a fixed order."""
    total = tl.zeros([COLS], tl.float32)
    for start in range(0, C, COLS):
        col = start + tl.arange(0, COLS)
        var = tl.load(var_ptr + model * stat_pitch + col, mask=col < C, other=1.0)
        ratio = 1.0 / tl.sqrt_rn(var.to(tl.float32) + eps)
        if WEIGHT:
            weight = tl.load(weight_ptr + model * weight_pitch + col, mask=col < C, other=0.0)
            ratio *= weight.to(tl.float32)
        if FORM == "hinge":
            ratio = tl.maximum(tl.abs(ratio) - tau, 0.0)
        total += tl.where(col < C, ratio * ratio, 0.0)
    return tl.sum(total, 0) / C


@triton.jit(do_not_specialize=_AS_IT_IS)
def apply(x_ptr, residual_ptr, y_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr, penalty_ptr,
          penalty_pitch, first, pitch, weight_pitch, bias_pitch, stat_pitch, rows, eps, tau,
          C: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
          WEIGHT: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, RESIDUAL: tl.constexpr,
          FORM: tl.constexpr):  # fmt: skip
    """y = relu(gamma·(x − mean)/sigma + beta + residual); a model's first program adds P."""
    chunk, block = tl.program_id(0), tl.program_id(1)
    model = tl.cast(tl.program_id(2) + first, tl.int64)
    if (chunk == 0) & (block == 0):
        penalty = 0.0
        if FORM != "":
            penalty = _penalty(weight_ptr, var_ptr, model, weight_pitch, stat_pitch, eps, tau,
                               C, COLS, FORM, WEIGHT)  # fmt: skip
        tl.store(penalty_ptr + model * penalty_pitch, penalty)
    col = block * COLS + tl.arange(0, COLS)
    lane = tl.arange(0, ROWS)
    mean, _, scale, shift = _vectors(weight_ptr, bias_ptr, mean_ptr, var_ptr, model, col,
                                     weight_pitch, bias_pitch, stat_pitch, eps, C, COLS, WEIGHT,
                                     BIAS)  # fmt: skip
    start = chunk * CHUNK
    base = model * pitch + tl.cast(start, tl.int64) * C
    tile = lane[:, None] * C + col[None, :]
    for i in range(0, CHUNK, ROWS):
        mask = (lane + (i + start) < rows)[:, None] & (col < C)[None, :]
        x = tl.load(x_ptr + base + i * C + tile, mask=mask, other=0.0).to(tl.float32)
        y = (x - mean[None, :]) * scale[None, :] + shift[None, :]
        if RESIDUAL:
            y += tl.load(residual_ptr + base + i * C + tile, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            y = tl.where(y < 0, 0.0, y)
        tl.store(y_ptr + base + i * C + tile, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_AS_IT_IS)
def reduce(dy_ptr, x_ptr, y_ptr, dz_ptr, dx_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr, part_ptr,
           norm_ptr, first, pitch, weight_pitch, bias_pitch, stat_pitch, samples, groups, eps,
           HW: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, SAMPLES: tl.constexpr,
           ROWS: tl.constexpr, COLS: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
           MASK: tl.constexpr, WRITE_DZ: tl.constexpr, WRITE_DX: tl.constexpr,
           NORMS: tl.constexpr):  # fmt: skip
    """s1 = Σ dz and s2 = Σ dz·x̂ over a group of whole samples; writes dz and, in eval mode, dx.

    Tiles are (samples, rows of one sample, channels): the sums exist by sample on the way, and
    their squares over channels are the sample's norm² of the gamma and beta gradients.
    """
    group, block = tl.program_id(0), tl.program_id(1)
    model = tl.cast(tl.program_id(2) + first, tl.int64)
    col = block * COLS + tl.arange(0, COLS)
    mean, rstd, scale, shift = _vectors(weight_ptr, bias_ptr, mean_ptr, var_ptr, model, col,
                                        weight_pitch, bias_pitch, stat_pitch, eps, C, COLS, WEIGHT,
                                        BIAS)  # fmt: skip
    lane = tl.arange(0, ROWS)
    sample = tl.arange(0, SAMPLES)
    base = model * pitch + tl.cast(group, tl.int64) * (GROUP * HW * C)
    limit = tl.minimum(samples - group * GROUP, GROUP)
    tile = sample[:, None, None] * (HW * C) + lane[None, :, None] * C + col[None, None, :]
    sum1 = tl.zeros([COLS], tl.float32)
    sum2 = tl.zeros([COLS], tl.float32)
    for start in range(0, GROUP, SAMPLES):
        by_row1 = tl.zeros([SAMPLES, ROWS, COLS], tl.float32)
        by_row2 = tl.zeros([SAMPLES, ROWS, COLS], tl.float32)
        here = (sample + start < limit)[:, None, None] & (col < C)[None, None, :]
        for row in range(0, HW, ROWS):
            mask = here & (lane + row < HW)[None, :, None]
            at = base + start * (HW * C) + row * C + tile
            dz = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
            away = x - mean[None, None, :]
            if MASK == "y":
                y = tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
                dz = tl.where(y <= 0, 0.0, dz)
            if MASK == "x":
                dz = tl.where(away * scale[None, None, :] + shift[None, None, :] <= 0, 0.0, dz)
            if WRITE_DZ:
                tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=mask)
            if WRITE_DX:
                dx = dz * scale[None, None, :]
                tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            by_row1 += dz
            by_row2 += dz * (away * rstd[None, None, :])
        by_sample1 = tl.sum(by_row1, 1)
        by_sample2 = tl.sum(by_row2, 1)
        if NORMS:
            square = by_sample1 * by_sample1 + by_sample2 * by_sample2
            at = (model * samples + (group * GROUP + start + sample)) * tl.num_programs(1) + block
            tl.store(norm_ptr + at, tl.sum(square, 1), mask=sample + start < limit)
        sum1 += tl.sum(by_sample1, 0)
        sum2 += tl.sum(by_sample2, 0)
    out = part_ptr + (model * groups + group) * (2 * C) + col
    tl.store(out, sum1, mask=col < C)
    tl.store(out + C, sum2, mask=col < C)


@triton.jit(do_not_specialize=_AS_IT_IS)
def merge_sums(part_ptr, coef_ptr, weight_ptr, var_ptr, slope_ptr, dweight_ptr, dbias_ptr,
               norm_ptr, probe_ptr, first, weight_pitch, stat_pitch, slope_pitch, probe_pitch,
               dweight_pitch, dbias_pitch, samples, rows, groups, eps, tau, C: tl.constexpr,
               STEP: tl.constexpr, COLS: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
               FORM: tl.constexpr, THROUGH: tl.constexpr, NORMS: tl.constexpr):  # fmt: skip
    """dgamma, dbeta, the two coefficients of dx, and the norms summed over blocks of channels."""
    block, model = tl.program_id(0), tl.cast(tl.program_id(1) + first, tl.int64)
    col = block * COLS + tl.arange(0, COLS)
    lane = tl.arange(0, STEP)
    part = part_ptr + model * groups * (2 * C) + col[None, :]
    total1 = tl.zeros([STEP, COLS], tl.float32)
    total2 = tl.zeros([STEP, COLS], tl.float32)
    for i in range(0, groups, STEP):
        mask = (lane + i < groups)[:, None] & (col < C)[None, :]
        at = (lane + i)[:, None] * (2 * C)
        total1 += tl.load(part + at, mask=mask, other=0.0)
        total2 += tl.load(part + at + C, mask=mask, other=0.0)
    sum1 = tl.sum(total1, 0)
    sum2 = tl.sum(total2, 0)
    _, rstd, scale, _ = _vectors(weight_ptr, weight_ptr, var_ptr, var_ptr, model, col,
                                 weight_pitch, weight_pitch, stat_pitch, eps, C, COLS, WEIGHT,
                                 False)  # fmt: skip
    count = tl.cast(rows, tl.float32)
    along = -scale * (sum2 / count)
    if FORM != "":
        slope = 2.0 * scale
        if FORM == "hinge":
            over = 2.0 * tl.maximum(tl.abs(scale) - tau, 0.0)
            slope = tl.where(scale < 0, -over, over)
        slope *= tl.load(slope_ptr + model * slope_pitch).to(tl.float32) / C
        if THROUGH:
            along -= slope * scale * rstd / count
        sum2 += slope * rstd
    coef = coef_ptr + model * (2 * C) + col
    tl.store(coef, sum1 / count, mask=col < C)
    tl.store(coef + C, along, mask=col < C)
    if WEIGHT:
        dweight = sum2.to(dweight_ptr.dtype.element_ty)
        tl.store(dweight_ptr + model * dweight_pitch + col, dweight, mask=col < C)
    if BIAS:
        dbias = sum1.to(dbias_ptr.dtype.element_ty)
        tl.store(dbias_ptr + model * dbias_pitch + col, dbias, mask=col < C)
    if NORMS:  # noqa: SIM102  (NORMS is decided at compile time)
        if block == 0:
            for i in range(0, samples, STEP):
                mask = lane + i < samples
                norm = tl.zeros([STEP], tl.float32)
                for j in range(0, C, COLS):
                    at = (model * samples + (lane + i)) * tl.num_programs(0) + j // COLS
                    norm += tl.load(norm_ptr + at, mask=mask, other=0.0)
                out = norm.to(probe_ptr.dtype.element_ty)
                tl.store(probe_ptr + model * probe_pitch + lane + i, out, mask=mask)


@triton.jit(do_not_specialize=_AS_IT_IS)
def apply_backward(dz_ptr, x_ptr, dx_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr, coef_ptr,
                   first, pitch, weight_pitch, bias_pitch, stat_pitch, rows, eps,
                   C: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                   WEIGHT: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """dx = (gamma/sigma)(dz − mean dz) + x̂·along; dz is read, or dy is and the mask is redone."""
    chunk, model = tl.program_id(0), tl.cast(tl.program_id(2) + first, tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    lane = tl.arange(0, ROWS)
    mean, rstd, scale, shift = _vectors(weight_ptr, bias_ptr, mean_ptr, var_ptr, model, col,
                                        weight_pitch, bias_pitch, stat_pitch, eps, C, COLS, WEIGHT,
                                        BIAS)  # fmt: skip
    coef = coef_ptr + model * (2 * C) + col
    mean_dz = tl.load(coef, mask=col < C, other=0.0)
    along = tl.load(coef + C, mask=col < C, other=0.0) * rstd
    start = chunk * CHUNK
    base = model * pitch + tl.cast(start, tl.int64) * C
    tile = lane[:, None] * C + col[None, :]
    for i in range(0, CHUNK, ROWS):
        mask = (lane + (i + start) < rows)[:, None] & (col < C)[None, :]
        at = base + i * C + tile
        dz = tl.load(dz_ptr + at, mask=mask, other=0.0).to(tl.float32)
        away = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) - mean[None, :]
        if MASK:
            dz = tl.where(away * scale[None, :] + shift[None, :] <= 0, 0.0, dz)
        dx = scale[None, :] * (dz - mean_dz[None, :]) + away * along[None, :]
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
