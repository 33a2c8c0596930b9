"""Group norm, ReLU and 2×2 max-pool in Triton: the output before pooling is never in memory.

As `kernels.batch_norm.triton_pool` with one program for a sample's block of whole groups: forward
it reads x twice and writes the maxima, backward it reads x and the maxima's gradient twice and
writes dx. Rows and columns that fill no window take part in the statistics and in the gradient.

M models, N samples, C channels, G groups, H×W pixels.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl

from kernels.batch_norm.triton_pool import _away, _take
from kernels.group_norm.triton_passes import _channels, _within, moments


@triton.jit
def forward_pooled(x_ptr, y_ptr, weight_ptr, bias_ptr, mean_ptr, sigma_ptr, pitch, out_pitch,
                   weight_pitch, bias_pitch, stat_pitch, eps, H: tl.constexpr, W: tl.constexpr,
                   C: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
                   ROWS: tl.constexpr, FEW: tl.constexpr, COLS: tl.constexpr,
                   WEIGHT: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr):  # fmt: skip
    """The windows' maxima of one sample's block of groups, `FEW` windows at a time."""
    sample, block = tl.program_id(0), tl.program_id(1)
    model = tl.cast(tl.program_id(2), tl.int64)
    lane, col, inside, same, gamma, beta = _channels(
        block, weight_ptr, bias_ptr, model, weight_pitch, bias_pitch, C, WIDTH, COLS, SIZE, WEIGHT,
        BIAS)  # fmt: skip
    base = model * pitch + tl.cast(sample, tl.int64) * (H * W * C)
    mean, sigma = moments(x_ptr, base, col, inside, same, eps, H * W, C, SIZE, ROWS, COLS)
    group = model * stat_pitch + sample * GROUPS + col // SIZE
    first = inside & (lane % SIZE == 0)
    tl.store(mean_ptr + group, mean, mask=first)
    tl.store(sigma_ptr + group, sigma, mask=first)
    scale = (gamma / sigma)[None, :]
    windows: tl.constexpr = H // 2 * (W // 2)
    out = model * out_pitch + tl.cast(sample, tl.int64) * (windows * C)
    for i in range(0, windows, FEW):
        window = tl.arange(0, FEW) + i
        mask = (window < windows)[:, None] & inside[None, :]
        pixel = window // (W // 2) * (2 * W) + window % (W // 2) * 2
        at = base + (pixel * C)[:, None] + col[None, :]
        best = _away(x_ptr, at, mask, mean[None, :]) * scale + beta[None, :]
        for k in tl.static_range(1, 4):
            place = at + (k // 2 * W + k % 2) * C
            y = _away(x_ptr, place, mask, mean[None, :]) * scale + beta[None, :]
            best = tl.where((y > best) | (y != y), y, best)
        if RELU:
            best = tl.where(best < 0, 0.0, best)
        to = out + (window * C)[:, None] + col[None, :]
        tl.store(y_ptr + to, best.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_pooled(dy_ptr, x_ptr, dx_ptr, weight_ptr, bias_ptr, mean_ptr, sigma_ptr, part_ptr,
                    samples, pitch, dy_pitch, weight_pitch, bias_pitch, stat_pitch,
                    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, GROUPS: tl.constexpr,
                    SIZE: tl.constexpr, WIDTH: tl.constexpr, FEW: tl.constexpr,
                    COLS: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
                    RELU: tl.constexpr):  # fmt: skip
    """dx of one sample's block of groups, and the sample's channel sums."""
    sample, block = tl.program_id(0), tl.program_id(1)
    model = tl.cast(tl.program_id(2), tl.int64)
    _, col, inside, same, gamma, beta = _channels(
        block, weight_ptr, bias_ptr, model, weight_pitch, bias_pitch, C, WIDTH, COLS, SIZE, WEIGHT,
        BIAS)  # fmt: skip
    group = model * stat_pitch + sample * GROUPS + col // SIZE
    mean = tl.load(mean_ptr + group, mask=inside, other=0.0)
    rstd = 1.0 / tl.load(sigma_ptr + group, mask=inside, other=1.0)
    scale, shift = (gamma * rstd)[None, :], beta[None, :]
    base = model * pitch + tl.cast(sample, tl.int64) * (H * W * C)
    below = model * dy_pitch + tl.cast(sample, tl.int64) * (H // 2 * (W // 2) * C)
    windows: tl.constexpr = H // 2 * (W // 2)
    total1 = tl.zeros([FEW, COLS], tl.float32)
    total2 = tl.zeros([FEW, COLS], tl.float32)
    for i in range(0, windows, FEW):
        window = tl.arange(0, FEW) + i
        mask = (window < windows)[:, None] & inside[None, :]
        pixel = window // (W // 2) * (2 * W) + window % (W // 2) * 2
        at = base + (pixel * C)[:, None] + col[None, :]
        chosen = _away(x_ptr, at, mask, mean[None, :])
        best = chosen * scale + shift
        for k in tl.static_range(1, 4):
            away = _away(x_ptr, at + (k // 2 * W + k % 2) * C, mask, mean[None, :])
            best, chosen = _take(away * scale + shift, best, away, chosen)
        at = below + (window * C)[:, None] + col[None, :]
        dz = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            dz = tl.where(best <= 0, 0.0, dz)
        total1 += dz
        total2 += dz * (chosen * rstd[None, :])
    sum1 = tl.sum(total1, 0)
    sum2 = tl.sum(total2, 0)
    part = part_ptr + (model * samples + sample) * (2 * C) + col
    tl.store(part, sum1, mask=inside)
    tl.store(part + C, sum2, mask=inside)
    mean1 = _within(tl.where(inside, sum1 * gamma, 0.0), same) / (SIZE * H * W)
    mean2 = _within(tl.where(inside, sum2 * gamma, 0.0), same) / (SIZE * H * W)
    constant, along = (rstd * mean1)[None, :], (rstd * rstd * mean2)[None, :]
    tall: tl.constexpr = (H + 1) // 2
    wide: tl.constexpr = (W + 1) // 2
    for i in range(0, tall * wide, FEW):
        window = tl.arange(0, FEW) + i
        row, column = window // wide, window % wide
        here = (window < tall * wide)[:, None] & inside[None, :]
        right = here & (2 * column + 1 < W)[:, None]
        under = here & (2 * row + 1 < H)[:, None]
        at = base + ((row * (2 * W) + column * 2) * C)[:, None] + col[None, :]
        away0 = _away(x_ptr, at, here, mean[None, :])
        away1 = _away(x_ptr, at + C, right, mean[None, :])
        away2 = _away(x_ptr, at + W * C, under, mean[None, :])
        away3 = _away(x_ptr, at + (W + 1) * C, right & under, mean[None, :])
        best = away0 * scale + shift
        place = tl.zeros([FEW, COLS], tl.int32)
        best, place = _take(away1 * scale + shift, best, 1, place)
        best, place = _take(away2 * scale + shift, best, 2, place)
        best, place = _take(away3 * scale + shift, best, 3, place)
        out = below + ((row * (W // 2) + column) * C)[:, None] + col[None, :]
        dz = tl.load(dy_ptr + out, mask=right & under, other=0.0).to(tl.float32)
        if RELU:
            dz = tl.where(best <= 0, 0.0, dz)
        kind = dx_ptr.dtype.element_ty
        dx = scale * tl.where(place == 0, dz, 0.0) - constant - away0 * along
        tl.store(dx_ptr + at, dx.to(kind), mask=here)
        dx = scale * tl.where(place == 1, dz, 0.0) - constant - away1 * along
        tl.store(dx_ptr + at + C, dx.to(kind), mask=right)
        dx = scale * tl.where(place == 2, dz, 0.0) - constant - away2 * along
        tl.store(dx_ptr + at + W * C, dx.to(kind), mask=under)
        dx = scale * tl.where(place == 3, dz, 0.0) - constant - away3 * along
        tl.store(dx_ptr + at + (W + 1) * C, dx.to(kind), mask=right & under)
