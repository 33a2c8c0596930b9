"""Group norm's two kernels: one program owns one sample's block of whole groups of channels.

It reads its part of x twice (statistics, then output), so the second read is likely to hit a cache;
sums over the channels of a group go through a small 0/1 matrix, which any C/G allows. The backward
kernel writes each sample's Σ dz and Σ dz·x̂ per channel, which `merge` adds in a fixed order.

M models, N samples, C channels, G groups.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def _within(value, same):
    """Every channel's sum over the channels of its group."""
    return tl.sum(tl.where(same, value[None, :], 0.0), 1)


@triton.jit
def _channels(block, weight_ptr, bias_ptr, model, weight_pitch, bias_pitch, C: tl.constexpr,
              WIDTH: tl.constexpr, COLS: tl.constexpr, SIZE: tl.constexpr, WEIGHT: tl.constexpr,
              BIAS: tl.constexpr):  # fmt: skip
    """The block's channels, which of them exist, who shares a group, gamma and beta."""
    lane = tl.arange(0, COLS)
    col = block * WIDTH + lane
    inside = (lane < WIDTH) & (col < C)
    same = (lane // SIZE)[:, None] == (lane // SIZE)[None, :]
    gamma = tl.full([COLS], 1.0, tl.float32)
    if WEIGHT:
        gamma = tl.load(weight_ptr + model * weight_pitch + col, mask=inside, other=0.0)
        gamma = gamma.to(tl.float32)
    beta = tl.zeros([COLS], tl.float32)
    if BIAS:
        beta = tl.load(bias_ptr + model * bias_pitch + col, mask=inside, other=0.0).to(tl.float32)
    return lane, col, inside, same, gamma, beta


@triton.jit
def moments(x_ptr, base, col, inside, same, eps, HW: tl.constexpr, C: tl.constexpr,
            SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Mean and sigma of every channel's group, of one sample's image at `base`."""
    row = tl.arange(0, ROWS)
    tile = row[:, None] * C + col[None, :]
    mask = (row < HW)[:, None] & inside[None, :]
    x = tl.load(x_ptr + base + tile, mask=mask, other=0.0).to(tl.float32)
    shift = tl.sum(x, 0) / min(HW, ROWS)
    total = tl.zeros([ROWS, COLS], tl.float32)
    square = tl.zeros([ROWS, COLS], tl.float32)
    away = tl.where(mask, x - shift[None, :], 0.0)
    total += away
    square += away * away
    for i in range(ROWS, HW, ROWS):
        mask = (row + i < HW)[:, None] & inside[None, :]
        x = tl.load(x_ptr + base + i * C + tile, mask=mask, other=0.0).to(tl.float32)
        away = tl.where(mask, x - shift[None, :], 0.0)
        total += away
        square += away * away
    offset = tl.sum(total, 0) / HW
    spread = tl.sum(square, 0) - offset * offset * HW
    centre = tl.where(inside, shift + offset, 0.0)
    mean = _within(centre, same) / SIZE
    away = centre - mean
    spread = tl.where(inside, spread + away * away * HW, 0.0)
    sigma = tl.sqrt_rn(_within(spread, same) / (SIZE * HW) + eps)
    return mean, sigma


@triton.jit
def forward(x_ptr, residual_ptr, y_ptr, weight_ptr, bias_ptr, mean_ptr, sigma_ptr, pitch,
            weight_pitch, bias_pitch, stat_pitch, eps, HW: tl.constexpr, C: tl.constexpr,
            GROUPS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
            COLS: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr,
            RESIDUAL: tl.constexpr):  # fmt: skip
    """y = relu(gamma·(x − mean)/sigma + beta + residual) of one sample's block of groups."""
    sample, block = tl.program_id(0), tl.program_id(1)
    model = tl.cast(tl.program_id(2), tl.int64)
    lane, col, inside, same, gamma, beta = _channels(
        block, weight_ptr, bias_ptr, model, weight_pitch, bias_pitch, C, WIDTH, COLS, SIZE, WEIGHT,
        BIAS)  # fmt: skip
    row = tl.arange(0, ROWS)
    base = model * pitch + tl.cast(sample, tl.int64) * (HW * C)
    tile = row[:, None] * C + col[None, :]
    mean, sigma = moments(x_ptr, base, col, inside, same, eps, HW, C, SIZE, ROWS, COLS)
    at = model * stat_pitch + sample * GROUPS + col // SIZE
    first = inside & (lane % SIZE == 0)
    tl.store(mean_ptr + at, mean, mask=first)
    tl.store(sigma_ptr + at, sigma, mask=first)
    scale = gamma / sigma
    for i in range(0, HW, ROWS):
        mask = (row + i < HW)[:, None] & inside[None, :]
        x = tl.load(x_ptr + base + i * C + tile, mask=mask, other=0.0).to(tl.float32)
        y = (x - mean[None, :]) * scale[None, :] + beta[None, :]
        if RESIDUAL:
            y += tl.load(residual_ptr + base + i * C + tile, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            y = tl.where(y < 0, 0.0, y)
        tl.store(y_ptr + base + i * C + tile, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _masked(dy_ptr, y_ptr, at, mask, away, scale, beta, MASK: tl.constexpr):
    """dy behind the ReLU: the mask from y, or redone from x."""
    dz = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if MASK == "y":
        dz = tl.where(tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32) <= 0, 0.0, dz)
    if MASK == "x":
        dz = tl.where(away * scale[None, :] + beta[None, :] <= 0, 0.0, dz)
    return dz


@triton.jit
def backward(dy_ptr, x_ptr, y_ptr, dz_ptr, dx_ptr, weight_ptr, bias_ptr, mean_ptr, sigma_ptr,
             part_ptr, samples, pitch, weight_pitch, bias_pitch, stat_pitch, HW: tl.constexpr,
             C: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
             ROWS: tl.constexpr, COLS: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
             MASK: tl.constexpr, WRITE_DZ: tl.constexpr):  # fmt: skip
    """dx of one sample's block of groups, dz where asked for, and the sample's channel sums.

    A written dz is read back by the same program, after a barrier, instead of dy and y.
    """
    sample, block = tl.program_id(0), tl.program_id(1)
    model = tl.cast(tl.program_id(2), tl.int64)
    _, col, inside, same, gamma, beta = _channels(
        block, weight_ptr, bias_ptr, model, weight_pitch, bias_pitch, C, WIDTH, COLS, SIZE, WEIGHT,
        BIAS)  # fmt: skip
    group = model * stat_pitch + sample * GROUPS + col // SIZE
    mean = tl.load(mean_ptr + group, mask=inside, other=0.0)
    rstd = 1.0 / tl.load(sigma_ptr + group, mask=inside, other=1.0)
    scale = gamma * rstd
    row = tl.arange(0, ROWS)
    base = model * pitch + tl.cast(sample, tl.int64) * (HW * C)
    tile = row[:, None] * C + col[None, :]
    total1 = tl.zeros([ROWS, COLS], tl.float32)
    total2 = tl.zeros([ROWS, COLS], tl.float32)
    for i in range(0, HW, ROWS):
        mask = (row + i < HW)[:, None] & inside[None, :]
        at = base + i * C + tile
        away = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) - mean[None, :]
        dz = _masked(dy_ptr, y_ptr, at, mask, away, scale, beta, MASK)
        if WRITE_DZ:
            tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=mask)
        total1 += dz
        total2 += dz * (away * rstd[None, :])
    sum1 = tl.sum(total1, 0)
    sum2 = tl.sum(total2, 0)
    part = part_ptr + (model * samples + sample) * (2 * C) + col
    tl.store(part, sum1, mask=inside)
    tl.store(part + C, sum2, mask=inside)
    mean1 = _within(tl.where(inside, sum1 * gamma, 0.0), same) / (SIZE * HW)
    mean2 = _within(tl.where(inside, sum2 * gamma, 0.0), same) / (SIZE * HW)
    if WRITE_DZ:
        tl.debug_barrier()
    for i in range(0, HW, ROWS):
        mask = (row + i < HW)[:, None] & inside[None, :]
        at = base + i * C + tile
        away = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) - mean[None, :]
        if WRITE_DZ:
            dz = tl.load(dz_ptr + at, mask=mask, other=0.0).to(tl.float32)
        else:
            dz = _masked(dy_ptr, y_ptr, at, mask, away, scale, beta, MASK)
        normal = away * rstd[None, :]
        dx = rstd[None, :] * (dz * gamma[None, :] - mean1[None, :] - normal * mean2[None, :])
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def merge(part_ptr, dweight_ptr, dbias_ptr, samples, dweight_pitch, dbias_pitch, C: tl.constexpr,
          STEP: tl.constexpr, COLS: tl.constexpr, WEIGHT: tl.constexpr,
          BIAS: tl.constexpr):  # fmt: skip
    """dgamma and dbeta: the samples' channel sums, added in a fixed order."""
    model = tl.cast(tl.program_id(1), tl.int64)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    lane = tl.arange(0, STEP)
    part = part_ptr + model * samples * (2 * C) + col[None, :]
    total1 = tl.zeros([STEP, COLS], tl.float32)
    total2 = tl.zeros([STEP, COLS], tl.float32)
    for i in range(0, samples, STEP):
        mask = (lane + i < samples)[:, None] & (col < C)[None, :]
        at = part + (lane + i)[:, None] * (2 * C)
        if BIAS:
            total1 += tl.load(at, mask=mask, other=0.0)
        if WEIGHT:
            total2 += tl.load(at + C, mask=mask, other=0.0)
    if BIAS:
        out = tl.sum(total1, 0).to(dbias_ptr.dtype.element_ty)
        tl.store(dbias_ptr + model * dbias_pitch + col, out, mask=col < C)
    if WEIGHT:
        out = tl.sum(total2, 0).to(dweight_ptr.dtype.element_ty)
        tl.store(dweight_ptr + model * dweight_pitch + col, out, mask=col < C)
