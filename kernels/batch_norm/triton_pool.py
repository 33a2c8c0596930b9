"""Batch norm, ReLU and 2×2 max-pool in Triton: the output before pooling is never in memory.

forward   statistics (reads x) → merge → apply (reads x, writes the maxima: a quarter)
backward  reduce (reads x and the maxima's gradient) → merge → apply (reads both, writes dx)

In units of the activation: 5¾ passes, where norm and pooling one after the other take 10½ and the
places of the maxima. Those are not kept: both backward passes find them again in x, which they
read anyway. Statistics and merges are those of `triton_passes`. Rows and columns that fill no
window take part in the statistics, and receive the gradient that comes through them.

M models, N samples, C channels, H×W pixels, of which windows make ⌊H/2⌋×⌊W/2⌋.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from kernels.batch_norm.triton_passes import _AS_IT_IS, _penalty, _vectors


@triton.jit
def _take(value, best, mine, chosen):
    """The later of a window takes over, and what is known of it, where it is larger or NaN."""
    takes = (value > best) | (value != value)
    return tl.where(takes, value, best), tl.where(takes, mine, chosen)


@triton.jit
def _away(x_ptr, at, mask, mean):
    return tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) - mean


@triton.jit(do_not_specialize=_AS_IT_IS)
def apply_pooled(x_ptr, y_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr, penalty_ptr, penalty_pitch,
                 first, pitch, out_pitch, weight_pitch, bias_pitch, stat_pitch, windows, eps, tau,
                 H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr,
                 ROWS: tl.constexpr, COLS: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
                 RELU: tl.constexpr, FORM: tl.constexpr):  # fmt: skip
    """y = max over a window of gamma·(x − mean)/sigma + beta, behind the ReLU; and P."""
    chunk, block = tl.program_id(0), tl.program_id(1)
    model = tl.cast(tl.program_id(2) + first, tl.int64)
    if (chunk == 0) & (block == 0):
        penalty = 0.0
        if FORM != "":
            penalty = _penalty(weight_ptr, var_ptr, model, weight_pitch, stat_pitch, eps, tau,
                               C, COLS, FORM, WEIGHT)  # fmt: skip
        tl.store(penalty_ptr + model * penalty_pitch, penalty)
    col = block * COLS + tl.arange(0, COLS)
    mean, _, scale, shift = _vectors(weight_ptr, bias_ptr, mean_ptr, var_ptr, model, col,
                                     weight_pitch, bias_pitch, stat_pitch, eps, C, COLS, WEIGHT,
                                     BIAS)  # fmt: skip
    for i in range(0, CHUNK, ROWS):
        window = chunk * CHUNK + i + tl.arange(0, ROWS)
        mask = (window < windows)[:, None] & (col < C)[None, :]
        sample, inner = window // (H // 2 * (W // 2)), window % (H // 2 * (W // 2))
        pixel = sample * (H * W) + inner // (W // 2) * (2 * W) + inner % (W // 2) * 2
        at = model * pitch + (tl.cast(pixel, tl.int64) * C)[:, None] + col[None, :]
        best = _away(x_ptr, at, mask, mean[None, :]) * scale[None, :] + shift[None, :]
        for k in tl.static_range(1, 4):
            place = at + (k // 2 * W + k % 2) * C
            y = _away(x_ptr, place, mask, mean[None, :]) * scale[None, :] + shift[None, :]
            best = tl.where((y > best) | (y != y), y, best)
        if RELU:
            best = tl.where(best < 0, 0.0, best)
        out = model * out_pitch + (tl.cast(window, tl.int64) * C)[:, None] + col[None, :]
        tl.store(y_ptr + out, best.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_AS_IT_IS)
def reduce_pooled(dy_ptr, x_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr, part_ptr, norm_ptr, first,
                  pitch, dy_pitch, weight_pitch, bias_pitch, stat_pitch, samples, groups, eps,
                  H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr,
                  SAMPLES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                  WEIGHT: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr,
                  NORMS: tl.constexpr):  # fmt: skip
    """Σ dz and Σ dz·x̂ over a group of whole samples; dz is dy at each window's largest."""
    group, block = tl.program_id(0), tl.program_id(1)
    model = tl.cast(tl.program_id(2) + first, tl.int64)
    col = block * COLS + tl.arange(0, COLS)
    mean, rstd, scale, shift = _vectors(weight_ptr, bias_ptr, mean_ptr, var_ptr, model, col,
                                        weight_pitch, bias_pitch, stat_pitch, eps, C, COLS, WEIGHT,
                                        BIAS)  # fmt: skip
    mean, scale, shift = mean[None, None, :], scale[None, None, :], shift[None, None, :]
    inner = tl.arange(0, ROWS)
    lane = tl.arange(0, SAMPLES)
    wide: tl.constexpr = H // 2 * (W // 2)
    limit = tl.minimum(samples - group * GROUP, GROUP)
    sum1 = tl.zeros([COLS], tl.float32)
    sum2 = tl.zeros([COLS], tl.float32)
    for start in range(0, GROUP, SAMPLES):
        by_row1 = tl.zeros([SAMPLES, ROWS, COLS], tl.float32)
        by_row2 = tl.zeros([SAMPLES, ROWS, COLS], tl.float32)
        sample = tl.cast(group * GROUP + start + lane, tl.int64)
        here = (lane + start < limit)[:, None, None] & (col < C)[None, None, :]
        for row in range(0, wide, ROWS):
            window = inner + row
            mask = here & (window < wide)[None, :, None]
            pixel = window // (W // 2) * (2 * W) + window % (W // 2) * 2
            at = (model * pitch + sample * (H * W * C))[:, None, None]
            at += (pixel * C)[None, :, None] + col[None, None, :]
            chosen = _away(x_ptr, at, mask, mean)
            best = chosen * scale + shift
            for k in tl.static_range(1, 4):
                away = _away(x_ptr, at + (k // 2 * W + k % 2) * C, mask, mean)
                best, chosen = _take(away * scale + shift, best, away, chosen)
            at = (model * dy_pitch + sample * (wide * C))[:, None, None]
            at += (window * C)[None, :, None] + col[None, None, :]
            dz = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
            if RELU:
                dz = tl.where(best <= 0, 0.0, dz)
            by_row1 += dz
            by_row2 += dz * (chosen * rstd[None, None, :])
        by_sample1 = tl.sum(by_row1, 1)
        by_sample2 = tl.sum(by_row2, 1)
        if NORMS:
            square = by_sample1 * by_sample1 + by_sample2 * by_sample2
            at = (model * samples + sample) * tl.num_programs(1) + block
            tl.store(norm_ptr + at, tl.sum(square, 1), mask=lane + start < limit)
        sum1 += tl.sum(by_sample1, 0)
        sum2 += tl.sum(by_sample2, 0)
    out = part_ptr + (model * groups + group) * (2 * C) + col
    tl.store(out, sum1, mask=col < C)
    tl.store(out + C, sum2, mask=col < C)


@triton.jit(do_not_specialize=_AS_IT_IS)
def apply_backward_pooled(dy_ptr, x_ptr, dx_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr, coef_ptr,
                          first, pitch, dy_pitch, weight_pitch, bias_pitch, stat_pitch, windows,
                          eps, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
                          CHUNK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                          WEIGHT: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr,
                          TRAINING: tl.constexpr):  # fmt: skip
    """dx of every pixel, by windows of which the last may be cut off by the border."""
    chunk, model = tl.program_id(0), tl.cast(tl.program_id(2) + first, tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mean, rstd, scale, shift = _vectors(weight_ptr, bias_ptr, mean_ptr, var_ptr, model, col,
                                        weight_pitch, bias_pitch, stat_pitch, eps, C, COLS, WEIGHT,
                                        BIAS)  # fmt: skip
    mean_dz = tl.zeros([COLS], tl.float32)
    along = tl.zeros([COLS], tl.float32)
    if TRAINING:
        coef = coef_ptr + model * (2 * C) + col
        mean_dz = tl.load(coef, mask=col < C, other=0.0)
        along = tl.load(coef + C, mask=col < C, other=0.0) * rstd
    mean, scale, shift = mean[None, :], scale[None, :], shift[None, :]
    tall: tl.constexpr = (H + 1) // 2
    wide: tl.constexpr = (W + 1) // 2
    for i in range(0, CHUNK, ROWS):
        window = chunk * CHUNK + i + tl.arange(0, ROWS)
        sample, inner = window // (tall * wide), window % (tall * wide)
        row, column = inner // wide, inner % wide
        here = (window < windows)[:, None] & (col < C)[None, :]
        right = here & (2 * column + 1 < W)[:, None]
        below = here & (2 * row + 1 < H)[:, None]
        pixel = sample * (H * W) + row * (2 * W) + column * 2
        at = model * pitch + (tl.cast(pixel, tl.int64) * C)[:, None] + col[None, :]
        away0 = _away(x_ptr, at, here, mean)
        away1 = _away(x_ptr, at + C, right, mean)
        away2 = _away(x_ptr, at + W * C, below, mean)
        away3 = _away(x_ptr, at + (W + 1) * C, right & below, mean)
        best = away0 * scale + shift
        place = tl.zeros([ROWS, COLS], tl.int32)
        best, place = _take(away1 * scale + shift, best, 1, place)
        best, place = _take(away2 * scale + shift, best, 2, place)
        best, place = _take(away3 * scale + shift, best, 3, place)
        out = sample * (H // 2 * (W // 2)) + row * (W // 2) + column
        out = model * dy_pitch + (tl.cast(out, tl.int64) * C)[:, None] + col[None, :]
        dz = tl.load(dy_ptr + out, mask=right & below, other=0.0).to(tl.float32)
        if RELU:
            dz = tl.where(best <= 0, 0.0, dz)
        kind = dx_ptr.dtype.element_ty
        dx = scale * (tl.where(place == 0, dz, 0.0) - mean_dz[None, :]) + away0 * along[None, :]
        tl.store(dx_ptr + at, dx.to(kind), mask=here)
        dx = scale * (tl.where(place == 1, dz, 0.0) - mean_dz[None, :]) + away1 * along[None, :]
        tl.store(dx_ptr + at + C, dx.to(kind), mask=right)
        dx = scale * (tl.where(place == 2, dz, 0.0) - mean_dz[None, :]) + away2 * along[None, :]
        tl.store(dx_ptr + at + W * C, dx.to(kind), mask=below)
        dx = scale * (tl.where(place == 3, dz, 0.0) - mean_dz[None, :]) + away3 * along[None, :]
        tl.store(dx_ptr + at + (W + 1) * C, dx.to(kind), mask=right & below)
