"""Compiled loops over activations: per-channel sums and per-channel affine maps.

Channels-last, a model's elements are cut into tiles of whole pixels, so that the inner loop is
long for any C and the constant of element j is constants[j]: per-channel values, repeated. Else
the unit is a plane, one channel's image. Sums run in float32 over a block of samples and are
gathered in float64. Code and order depend on one model's shape, never on the number of models.

A loop that writes two arrays reads few others: beyond eight checks for overlap LLVM gives up
vectorising.

M models, N samples, C channels, P = H * W pixels.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import numpy as np

from kernels._compiled.cpu import compiler

kernel = compiler(__file__)

LANES = 1024
"""Elements of a tile, at most (but at least one pixel): slicing a tile costs some 20 ns."""
BLOCK = 32768
"""Elements of a block, about: 128 KB, so that a second reading comes from a near cache."""
ZERO = np.float32(0)


@kernel
def lanes_of(channels, count):
    """Elements of a tile for `count` elements: whole pixels, few enough to be worth repeating."""
    return channels * max(1, min(LANES, count // 16) // channels)


@kernel
def repeat(value_C, out):
    """Fill a tile with per-channel values."""
    channels = value_C.size
    for start in range(0, out.size, channels):
        for c in range(channels):
            out[start + c] = value_C[c]


@kernel
def _repeated(value_C, lanes):
    out = np.empty(lanes, np.float32)
    repeat(value_C, out)
    return out


@kernel
def gather(lane, total_C):
    """Add lanes to the float64 sums of their channels, and clear them."""
    channels = total_C.size
    for start in range(0, lane.size, channels):
        for c in range(channels):
            total_C[c] += lane[start + c]
    lane[:] = ZERO


@kernel
def lane_sums(x, lane):
    """lane_j += sum of x over the tiles, four at a time, so that lanes are touched less often."""
    lanes = lane.size
    four = x.size // (4 * lanes) * 4 * lanes
    for start in range(0, four, 4 * lanes):
        a = np.uintp(start)
        b, c, d = a + np.uintp(lanes), a + np.uintp(2 * lanes), a + np.uintp(3 * lanes)
        for j in range(lanes):
            i = np.uintp(j)
            lane[i] += (x[a + i] + x[b + i]) + (x[c + i] + x[d + i])
    for start in range(four, x.size, lanes):
        at = np.uintp(start)
        for j in range(min(lanes, x.size - start)):
            lane[j] += x[at + np.uintp(j)]


@kernel
def lane_squares(x, mean, lane):
    """lane_j += sum of (x - mean_j)² over the tiles, four at a time."""
    lanes = lane.size
    four = x.size // (4 * lanes) * 4 * lanes
    for start in range(0, four, 4 * lanes):
        a = np.uintp(start)
        b, c, d = a + np.uintp(lanes), a + np.uintp(2 * lanes), a + np.uintp(3 * lanes)
        for j in range(lanes):
            i = np.uintp(j)
            mean_j = mean[i]
            away_a, away_b = x[a + i] - mean_j, x[b + i] - mean_j
            away_c, away_d = x[c + i] - mean_j, x[d + i] - mean_j
            lane[i] += (away_a * away_a + away_b * away_b) + (away_c * away_c + away_d * away_d)
    for start in range(four, x.size, lanes):
        at = np.uintp(start)
        for j in range(min(lanes, x.size - start)):
            away = x[at + np.uintp(j)] - mean[j]
            lane[j] += away * away


@kernel
def lane_products(grad, x, mean, lane_1, lane_2):
    """lane_1 += sum of grad, lane_2 += sum of grad (x - mean), over the tiles."""
    lanes = mean.size
    for start in range(0, x.size, lanes):
        at = np.uintp(start)
        for j in range(min(lanes, x.size - start)):
            slope = grad[at + np.uintp(j)]
            lane_1[j] += slope
            lane_2[j] += slope * (x[at + np.uintp(j)] - mean[j])


@kernel
def sums(x, channels, last, total_C):
    """total_c += sum of x over a run of samples (float64)."""
    if last:
        lane = np.zeros(lanes_of(channels, x.size), np.float32)
        lane_sums(x, lane)
        gather(lane, total_C)
        return
    pixels = x.size // channels
    for c in range(channels):
        at, total = np.uintp(c * pixels), ZERO
        for j in range(pixels):
            total += x[at + np.uintp(j)]
        total_C[c] += total


@kernel
def squares(x, mean_C, last, total_C):
    """total_c += sum of (x - mean_C)² over a run of samples (float64)."""
    channels = mean_C.size
    if last:
        lanes = lanes_of(channels, x.size)
        lane = np.zeros(lanes, np.float32)
        lane_squares(x, _repeated(mean_C, lanes), lane)
        gather(lane, total_C)
        return
    pixels = x.size // channels
    for c in range(channels):
        at, mean_c, total = np.uintp(c * pixels), mean_C[c], ZERO
        for j in range(pixels):
            away = x[at + np.uintp(j)] - mean_c
            total += away * away
        total_C[c] += total


@kernel
def products(grad, x, mean_C, last, total_1_C, total_2_C):
    """total_1_c += sum of grad, total_2_c += sum of grad (x - mean_C), over a run of samples."""
    channels = mean_C.size
    if last:
        lanes = lanes_of(channels, x.size)
        lane_1, lane_2 = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)
        lane_products(grad, x, _repeated(mean_C, lanes), lane_1, lane_2)
        gather(lane_1, total_1_C)
        gather(lane_2, total_2_C)
        return
    pixels = x.size // channels
    for c in range(channels):
        at, mean_c, total_1, total_2 = np.uintp(c * pixels), mean_C[c], ZERO, ZERO
        for j in range(pixels):
            slope = grad[at + np.uintp(j)]
            total_1 += slope
            total_2 += slope * (x[at + np.uintp(j)] - mean_c)
        total_1_C[c] += total_1
        total_2_C[c] += total_2


@kernel
def mask(grad, y, level, out):
    """The gradient behind a ReLU: grad where y is above `level` (or NaN)."""
    for j in range(out.size):
        out[j] = ZERO if y[j] <= level else grad[j]


@kernel
def floor_of(relu):
    """What a ReLU cuts off: all up to 0, or nothing, since nothing is at most NaN."""
    return ZERO if relu else np.float32(np.nan)


@kernel
def _map_tile(x, residual, mean, scale, shift, after, extra, floor, out, at, count):
    if extra:
        for j in range(count):
            i = at + np.uintp(j)
            value = (x[i] - mean[j]) * scale[j] + shift[j] + residual[i]
            out[i] = (floor if value <= floor else value) + after
    else:
        for j in range(count):
            i = at + np.uintp(j)
            value = (x[i] - mean[j]) * scale[j] + shift[j]
            out[i] = (floor if value <= floor else value) + after


@kernel
def _map_plane(x, residual, mean, scale, shift, after, extra, floor, out, at, count):
    if extra:
        for j in range(count):
            i = at + np.uintp(j)
            value = (x[i] - mean) * scale + shift + residual[i]
            out[i] = (floor if value <= floor else value) + after
    else:
        for j in range(count):
            i = at + np.uintp(j)
            value = (x[i] - mean) * scale + shift
            out[i] = (floor if value <= floor else value) + after


@kernel
def lane_map(x, residual, mean, scale, shift, after, extra, floor, out):
    """`mapped` with constants that are repeated over a tile."""
    lanes = mean.size
    for start in range(0, x.size, lanes):
        at, count = np.uintp(start), min(lanes, x.size - start)
        _map_tile(x, residual, mean, scale, shift, after, extra, floor, out, at, count)


@kernel
def mapped(x, residual, mean_C, scale_C, shift_C, after, samples, last, extra, relu, out):
    """out = relu((x - mean) scale + shift + residual) + after; `extra`: with the residual."""
    channels, floor = mean_C.size, floor_of(relu)
    if last:
        lanes = lanes_of(channels, x.size)
        mean, scale = _repeated(mean_C, lanes), _repeated(scale_C, lanes)
        shift = _repeated(shift_C, lanes)
        lane_map(x, residual, mean, scale, shift, after, extra, floor, out)
        return
    pixels = x.size // max(1, samples * channels)
    for row in range(samples * channels):
        c, at = row % channels, np.uintp(row * pixels)
        mean_c, scale_c, shift_c = mean_C[c], scale_C[c], shift_C[c]
        _map_plane(x, residual, mean_c, scale_c, shift_c, after, extra, floor, out, at, pixels)


@kernel
def lane_slope(grad, x, mean, scale, along, shift, out):
    """out = grad scale + (x - mean) along + shift, constants repeated over a tile."""
    lanes = mean.size
    for start in range(0, x.size, lanes):
        at = np.uintp(start)
        for j in range(min(lanes, x.size - start)):
            i = at + np.uintp(j)
            out[i] = grad[i] * scale[j] + (x[i] - mean[j]) * along[j] + shift[j]


@kernel
def sloped(grad, y, x, mean_C, scale_C, along_C, shift_C, samples, last, relu, out):
    """out = grad scale + (x - mean) along + shift over samples; `relu`: grad masked by y."""
    channels, floor = mean_C.size, floor_of(relu)
    if last:
        lanes = lanes_of(channels, x.size)
        mean, scale = _repeated(mean_C, lanes), _repeated(scale_C, lanes)
        along, shift = _repeated(along_C, lanes), _repeated(shift_C, lanes)
        if not relu:
            lane_slope(grad, x, mean, scale, along, shift, out)
            return
        for start in range(0, x.size, lanes):
            at = np.uintp(start)
            for j in range(min(lanes, x.size - start)):
                i = at + np.uintp(j)
                slope = ZERO if y[i] <= floor else grad[i]
                out[i] = slope * scale[j] + (x[i] - mean[j]) * along[j] + shift[j]
        return
    pixels = x.size // max(1, samples * channels)
    for row in range(samples * channels):
        c, at = row % channels, np.uintp(row * pixels)
        mean_c, scale_c, along_c, shift_c = mean_C[c], scale_C[c], along_C[c], shift_C[c]
        for j in range(pixels):
            i = at + np.uintp(j)
            slope = ZERO if y[i] <= floor else grad[i]
            out[i] = slope * scale_c + (x[i] - mean_c) * along_c + shift_c


@kernel
def moments(x, samples, channels, last, mean_C, var_C):
    """Mean and biased variance per channel: exact to float32 by blocks, merged as Chan et al. do.

    Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample
    variances (1979).
    """
    sample = x.size // max(1, samples)
    block = max(1, BLOCK // max(1, sample)) if last else 1
    mean, spread = np.zeros(channels), np.zeros(channels)
    count = 0
    near = np.empty(channels, np.float32)
    for first in range(0, samples, block):
        here = x[first * sample : (first + block) * sample]
        rows = here.size // channels
        total, square = np.zeros(channels), np.zeros(channels)
        sums(here, channels, last, total)
        for c in range(channels):
            near[c] = total[c] / rows
        squares(here, near, last, square)
        share = rows / (count + rows)
        for c in range(channels):
            offset = total[c] / rows - near[c]
            away = total[c] / rows - mean[c]
            spread[c] += square[c] - rows * offset * offset + away * away * count * share
            mean[c] += away * share
        count += rows
    for c in range(channels):
        mean_C[c] = mean[c] / count * count
        var_C[c] = max(spread[c], 0.0) / count


@kernel
def run_of(count, samples, last):
    """Elements of a run of whole samples: about a block, or one sample where there are planes."""
    sample = count // max(1, samples)
    return max(1, sample * max(1, BLOCK // max(1, sample)) if last else sample)


@kernel
def behind(grad, y, first, stop, level, relu, keep, masked, scratch):
    """A run of the gradient behind a ReLU that ends at `level` (y above it passes).

    Written to masked (`keep`) or scratch if need be.
    """
    here = grad[first:stop]
    if not relu and not keep:
        return here
    out = masked[first:stop] if keep else scratch[: stop - first]
    if relu:
        mask(here, y[first:stop], level, out)
    else:
        out[:] = here
    return out


@kernel
def reduced(grad, y, x, mean_C, samples, last, relu, keep, masked, total_1_C, total_2_C):
    """Sums of the masked gradient and of its product with x - mean; `keep`: write it to masked."""
    run = run_of(x.size, samples, last)
    scratch = np.empty(run if relu and not keep else 0, np.float32)
    for first in range(0, x.size, run):
        stop = min(first + run, x.size)
        slope = behind(grad, y, first, stop, ZERO, relu, keep, masked, scratch)
        products(slope, x[first:stop], mean_C, last, total_1_C, total_2_C)
