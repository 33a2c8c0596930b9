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
ONE, TWO = np.uintp(1), np.uintp(2)
"""Unsigned indices need no check for Python's negative ones, which stops vectorising."""


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
def _larger(value, place, best, where):
    """The later element takes over where it is larger or NaN."""
    takes = value > best or value != value
    return (value if takes else best), (place if takes else where)


@kernel
def _pair_of_rows(x, upper, lower, columns, inner, y, where, at):
    """Maxima of a row of 2 x 2 windows, and their places, from two rows of x on."""
    zero, one, two, three = np.uint8(0), np.uint8(1), np.uint8(2), np.uint8(3)
    if inner == 1:
        for j in range(columns):
            left = TWO * np.uintp(j)
            best, place = _larger(x[upper + left + ONE], one, x[upper + left], zero)
            best, place = _larger(x[lower + left], two, best, place)
            best, place = _larger(x[lower + left + ONE], three, best, place)
            y[at + np.uintp(j)], where[at + np.uintp(j)] = best, place
        return
    for j in range(columns):
        left, to = TWO * np.uintp(j) * inner, at + np.uintp(j) * inner
        for i in range(inner):
            c = np.uintp(i)
            right = left + inner + c
            best, place = _larger(x[upper + right], one, x[upper + left + c], zero)
            best, place = _larger(x[lower + left + c], two, best, place)
            best, place = _larger(x[lower + right], three, best, place)
            y[to + c], where[to + c] = best, place


@kernel
def _any_rows(x, top, width, columns, inner, size, y, where, at):
    """Maxima of a row of windows of any size."""
    for j in range(columns):
        for c in range(inner):
            best, place = x[top + np.uintp(j * size * inner + c)], np.uint8(0)
            for q in range(1, size * size):
                away = (q // size * width + j * size + q % size) * inner + c
                best, place = _larger(x[top + np.uintp(away)], np.uint8(q), best, place)
            to = at + np.uintp(j * inner + c)
            y[to], where[to] = best, place


@kernel
def max_pool_stack(
    x_all, x_pitch, y_all, y_pitch, where_all, where_pitch, models, planes, height, width, inner,
    size,
):  # fmt: skip
    """One row of windows after another."""
    rows, columns = height // size, width // size
    line, run = width * inner, columns * inner
    for m in range(models):
        y = y_all[m * y_pitch : m * y_pitch + planes * rows * run]
        where = where_all[m * where_pitch : m * where_pitch + planes * rows * run]
        for row in range(planes * rows):
            top = m * x_pitch + (row // rows * height + row % rows * size) * line
            upper, lower, at = np.uintp(top), np.uintp(top + line), np.uintp(row * run)
            if size == 2:
                _pair_of_rows(x_all, upper, lower, columns, np.uintp(inner), y, where, at)
            else:
                _any_rows(x_all, upper, width, columns, inner, size, y, where, at)


@kernel
def _scatter_row(grad, where, at, columns, inner, size, first, dx, to):
    """One row of pixels from its row of windows; `first` is the place of a window's left pixel."""
    if inner == 1 and size == 2:
        for i in range(columns):
            k = np.uintp(i)
            slope, winner, left = grad[at + k], where[at + k], to + TWO * k
            dx[left] = slope if winner == first else ZERO
            dx[left + ONE] = slope if winner == first + np.uint8(1) else ZERO
        return
    for j in range(columns):
        source = at + np.uintp(j * inner)
        for q in range(size):
            place, start = np.uint8(first + q), to + np.uintp((j * size + q) * inner)
            for i in range(inner):
                c = np.uintp(i)
                dx[start + c] = grad[source + c] if where[source + c] == place else ZERO


@kernel
def max_pool_backward_stack(
    grad_all, grad_pitch, where_all, where_pitch, dx_all, dx_pitch, models, planes, height, width,
    inner, size,
):  # fmt: skip
    """Every element of dx is written once, by the window it lies in, or set to 0."""
    rows, columns = height // size, width // size
    line, run = width * inner, columns * inner
    for m in range(models):
        grad = grad_all[m * grad_pitch : m * grad_pitch + planes * rows * run]
        where = where_all[m * where_pitch : m * where_pitch + planes * rows * run]
        dx = dx_all[m * dx_pitch : m * dx_pitch + planes * height * line]
        for row in range(planes * height):
            plane, y = row // height, row % height
            filled = run * size if y // size < rows else 0
            if filled < line:
                dx[row * line + filled : (row + 1) * line] = ZERO
            if filled:
                at, first = (plane * rows + y // size) * run, np.uint8(y % size * size)
                to = np.uintp(row * line)
                _scatter_row(grad, where, np.uintp(at), columns, inner, size, first, dx, to)


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
