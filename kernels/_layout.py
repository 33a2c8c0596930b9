"""Where the numbers of an activation lie: logical (N, C, H, W) everywhere, strides chosen here.

Every op allocates its outputs through this module, in its implementations and in its fake alike,
so that the strides a fake promises are the strides an op returns. The rule depends on the shape
of one model's tensor and the device only, never on the number of models.

M models, N samples, C channels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGN = 16
"""Elements between the starts of two models are a multiple of this (64 bytes in float32).

Matrix libraries may round differently on differently aligned operands: with every model starting
on a cache line, model m sees the same alignment alone and in any slot.
"""

CHANNELS_LAST_FROM = 12
"""On a CPU, activations with at least this many channels are channels-last, and RGB images."""


def channels_last(device: torch.device, channels: int) -> bool:
    """Whether activations of that many channels are kept channels-last on a device.

    On a CPU oneDNN's convolutions are up to twice as fast so from 12 channels on, and for images
    of 3 channels; with 1 and 6 channels (LeNet) planes are faster.
    """
    return device.type != "cpu" or channels == 3 or channels >= CHANNELS_LAST_FROM


def activation_strides(device: torch.device, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of one model's activation of logical shape (N, C, H, W).

    >>> activation_strides(torch.device("cpu"), (2, 6, 5, 5))
    (150, 25, 5, 1)
    >>> activation_strides(torch.device("cpu"), (2, 16, 5, 5))
    (400, 1, 80, 16)
    """
    _, channels, height, width = shape
    if channels_last(device, channels):
        return channels * height * width, 1, width * channels, channels
    return channels * height * width, height * width, width, 1


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


def empty(
    like: Tensor, models: int, shape: Sequence[int], dtype: torch.dtype | None = None
) -> Tensor:
    """An uninitialised (M, *shape) tensor, each model dense and starting on a cache line."""
    return _empty(like, models, shape, _contiguous_strides(shape), dtype)


def empty_activation(
    like: Tensor, models: int, shape: Sequence[int], dtype: torch.dtype | None = None
) -> Tensor:
    """An uninitialised (M, N, C, H, W) tensor with the strides of an activation."""
    return _empty(like, models, shape, activation_strides(like.device, shape), dtype)


def _empty(
    like: Tensor,
    models: int,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype | None,
) -> Tensor:
    count = 1
    for size in shape:
        count = count * size
    pitch = (count + ALIGN - 1) // ALIGN * ALIGN
    return torch.empty_strided(
        (models, *shape), (pitch, *strides), dtype=dtype or like.dtype, device=like.device
    )


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The type of sums and statistics over numbers of a type: never less than float32."""
    return torch.promote_types(dtype, torch.float32)


def nothing(like: Tensor, models: int) -> Tensor:
    """The (M, 0) tensor that stands for a gradient nobody asked for."""
    return torch.empty((models, 0), dtype=like.dtype, device=like.device)


def as_activation(x: Tensor) -> Tensor:
    """One stacked activation (M, N, C, H, W) in its own strides: itself, or a copy."""
    wanted = activation_strides(x.device, x.shape[1:])
    if _same_strides(x.stride()[1:], wanted, x.shape[1:]):
        return x
    return empty_activation(x, x.shape[0], x.shape[1:]).copy_(x)


def as_dense(x: Tensor) -> Tensor:
    """A stacked tensor whose models are dense and start on a cache line: itself, or a copy."""
    dense = _same_strides(x.stride()[1:], _contiguous_strides(x.shape[1:]), x.shape[1:])
    aligned = x.data_ptr() % 64 == 0 and (x.shape[0] == 1 or x.stride(0) % ALIGN == 0)
    if dense and aligned:
        return x
    return empty(x, x.shape[0], x.shape[1:]).copy_(x)


def _same_strides(given: Sequence[int], wanted: Sequence[int], shape: Sequence[int]) -> bool:
    return all(size == 1 or g == w for g, w, size in zip(given, wanted, shape, strict=True))
