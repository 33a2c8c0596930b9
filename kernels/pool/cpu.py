"""Pooling on a CPU, compiled: runs of a whole row of windows, one comparison at a time.

Activations come in their own strides: channels-last, the inner loop runs over the channels of one
pixel; else over the columns of one plane. The values compared and written are the same.

M models, N samples, C channels.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import numpy as np
from torch import Tensor

from kernels._channels import cpu as channels
from kernels._channels import flat
from kernels._channels.cpu import sums
from kernels._compiled.cpu import compiler
from kernels._layout import as_activation, channels_last

kernel = compiler(__file__, channels.__file__)
ZERO = np.float32(0)


def _planes(x: Tensor) -> tuple[int, int, int, int]:
    """How to see an activation as planes of (height, width, inner) numbers: count and sizes."""
    samples, channels, height, width = x.shape[1:]
    if channels_last(x.device, channels):
        return samples, height, width, channels
    return samples * channels, height, width, 1


def max_pool(out: tuple[Tensor, ...], x: Tensor, size: int) -> None:
    """Fill the largest of each window, and where it is."""
    x = as_activation(x)
    max_pool_stack(*flat(x), *flat(out[0]), *flat(out[1]), x.shape[0], *_planes(x), size)


def max_pool_backward(
    out: tuple[Tensor, ...], grad: Tensor, where: Tensor, size: int, height: int, width: int
) -> None:
    """Fill the gradient of x: each window's to its winner."""
    grad, where = as_activation(grad), as_activation(where)
    sizes = _planes(out[0])
    max_pool_backward_stack(*flat(grad), *flat(where), *flat(out[0]), out[0].shape[0], *sizes, size)


def avg_pool(out: tuple[Tensor, ...], x: Tensor, size: int) -> None:
    """Fill the mean of each window."""
    x = as_activation(x)
    avg_pool_stack(*flat(x), *flat(out[0]), x.shape[0], *_planes(x), size)


def avg_pool_backward(
    out: tuple[Tensor, ...], grad: Tensor, size: int, height: int, width: int
) -> None:
    """Fill the gradient of x: each window's shared evenly."""
    grad = as_activation(grad)
    avg_pool_backward_stack(*flat(grad), *flat(out[0]), out[0].shape[0], *_planes(out[0]), size)


def global_avg_pool(out: tuple[Tensor, ...], x: Tensor) -> None:
    """Fill the mean of each channel's image."""
    x = as_activation(x)
    models, samples, width = x.shape[:3]
    last = channels_last(x.device, width)
    global_avg_pool_stack(*flat(x), *flat(out[0]), models, samples, width, last, x[0].numel())


@kernel
def max_pool_stack(
    x_all, x_pitch, y_all, y_pitch, where_all, where_pitch, models, planes, height, width, inner,
    size,
):  # fmt: skip
    """The first pass over a row of windows finds the maxima, the second where they come from."""
    rows, columns = height // size, width // size
    run = columns * inner
    for m in range(models):
        for row in range(planes * rows):
            at = row * run
            y = y_all[m * y_pitch + at : m * y_pitch + at + run]
            where = where_all[m * where_pitch + at : m * where_pitch + at + run]
            top = m * x_pitch + (row // rows * height + row % rows * size) * width * inner
            for q in range(size * size):
                start = top + (q // size * width + q % size) * inner
                x = x_all[start : start + (columns - 1) * size * inner + inner]
                place = np.uint8(q)
                if inner == 1:
                    for j in range(columns):
                        value = x[j * size]
                        if q == 0 or value > y[j] or value != value:
                            y[j], where[j] = value, place
                    continue
                for j in range(columns):
                    pixel = x[j * size * inner : j * size * inner + inner]
                    best = y[j * inner : j * inner + inner]
                    spot = where[j * inner : j * inner + inner]
                    if q == 0:
                        best[:] = pixel
                        spot[:] = 0
                        continue
                    for c in range(inner):
                        larger = pixel[c] > best[c] or pixel[c] != pixel[c]
                        spot[c] = place if larger else spot[c]
                        best[c] = pixel[c] if larger else best[c]


@kernel
def max_pool_backward_stack(
    grad_all, grad_pitch, where_all, where_pitch, dx_all, dx_pitch, models, planes, height, width,
    inner, size,
):  # fmt: skip
    """Every element of dx is written once, by the window it lies in, or set to 0."""
    rows, columns = height // size, width // size
    run = columns * inner
    for m in range(models):
        for line in range(planes * height):
            plane, y = line // height, line % height
            start = m * dx_pitch + line * width * inner
            dx = dx_all[start : start + width * inner]
            if y // size >= rows:
                dx[:] = ZERO
                continue
            dx[run * size :] = ZERO
            at = (plane * rows + y // size) * run
            grad = grad_all[m * grad_pitch + at : m * grad_pitch + at + run]
            where = where_all[m * where_pitch + at : m * where_pitch + at + run]
            for q in range(size):
                place = np.uint8(y % size * size + q)
                if inner == 1:
                    for j in range(columns):
                        dx[j * size + q] = grad[j] if where[j] == place else ZERO
                    continue
                for j in range(columns):
                    first = (j * size + q) * inner
                    pixel = dx[first : first + inner]
                    slope = grad[j * inner : j * inner + inner]
                    spot = where[j * inner : j * inner + inner]
                    for c in range(inner):
                        pixel[c] = slope[c] if spot[c] == place else ZERO


@kernel
def avg_pool_stack(x_all, x_pitch, y_all, y_pitch, models, planes, height, width, inner, size):
    """Sums in the order of the window's elements, then one product."""
    rows, columns = height // size, width // size
    share = np.float32(1.0 / (size * size))
    for m in range(models):
        for row in range(planes * rows):
            at = m * y_pitch + row * columns * inner
            y = y_all[at : at + columns * inner]
            top = m * x_pitch + (row // rows * height + row % rows * size) * width * inner
            y[:] = ZERO
            for q in range(size * size):
                start = top + (q // size * width + q % size) * inner
                for j in range(columns):
                    for c in range(inner):
                        y[j * inner + c] += x_all[start + j * size * inner + c]
            for j in range(y.size):
                y[j] *= share


@kernel
def avg_pool_backward_stack(
    grad_all, grad_pitch, dx_all, dx_pitch, models, planes, height, width, inner, size
):
    """Every element of dx is its window's gradient times the share, or 0."""
    rows, columns = height // size, width // size
    share = np.float32(1.0 / (size * size))
    for m in range(models):
        for line in range(planes * height):
            plane, y = line // height, line % height
            start = m * dx_pitch + line * width * inner
            dx = dx_all[start : start + width * inner]
            dx[:] = ZERO
            if y // size >= rows:
                continue
            at = m * grad_pitch + (plane * rows + y // size) * columns * inner
            for j in range(columns * size):
                for c in range(inner):
                    dx[j * inner + c] = grad_all[at + j // size * inner + c] * share


@kernel
def global_avg_pool_stack(x_all, x_pitch, y_all, y_pitch, models, samples, width, last, count):
    """Sums per channel of every sample, times the share."""
    sample = count // max(1, samples)
    share = width / max(1, sample)
    for m in range(models):
        for n in range(samples):
            total_C = np.zeros(width)
            start = m * x_pitch + n * sample
            sums(x_all[start : start + sample], width, last, total_C)
            for c in range(width):
                y_all[m * y_pitch + n * width + c] = total_C[c] * share
