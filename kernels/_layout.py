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

PLANES_FROM = 256
"""Channels from which on a CPU convolves small maps faster as planes, see `kernels.conv.cpu`."""


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


def weight_strides(device: torch.device, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of one model's convolution weight of shape (O, C, kh, kw).

    On a CPU channels-last where activations of C channels are: oneDNN's wrapper copies other
    strides at every call, three times a step. Not so from `PLANES_FROM` channels on, where small
    maps are convolved as planes, and on a GPU.

    >>> weight_strides(torch.device("cpu"), (8, 16, 3, 3))
    (144, 1, 48, 16)
    >>> weight_strides(torch.device("cpu"), (8, 6, 3, 3))
    (54, 9, 3, 1)
    """
    _, channels, height, width = shape
    if device.type == "cpu" and channels_last(device, channels) and channels < PLANES_FROM:
        return channels * height * width, 1, width * channels, channels
    return _contiguous_strides(shape)


def empty_weight(like: Tensor, models: int, shape: Sequence[int]) -> Tensor:
    """An uninitialised (M, O, C, kh, kw) tensor with the strides of a convolution's weight."""
    return _empty(like, models, shape, weight_strides(like.device, shape), None)


def as_weight(weight: Tensor) -> Tensor:
    """A stacked convolution weight in its own strides, models on cache lines: itself, or a copy."""
    wanted = weight_strides(weight.device, weight.shape[1:])
    if _same_strides(weight.stride()[1:], wanted, weight.shape[1:]) and _on_lines(weight):
        return weight
    return empty_weight(weight, weight.shape[0], weight.shape[1:]).copy_(weight)


def laid_out(param: Tensor) -> Tensor:
    """A copy of a stacked parameter (M, ...) with the strides ops take without copying.

    Every model is dense and starts on a cache line.
    """
    make = empty_weight if param.dim() == 5 else empty
    return make(param, param.shape[0], param.shape[1:]).copy_(param)


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
    if dense and _on_lines(x):
        return x
    return empty(x, x.shape[0], x.shape[1:]).copy_(x)


def _on_lines(x: Tensor) -> bool:
    return x.data_ptr() % 64 == 0 and (x.shape[0] == 1 or x.stride(0) % ALIGN == 0)


def _same_strides(given: Sequence[int], wanted: Sequence[int], shape: Sequence[int]) -> bool:
    return all(size == 1 or g == w for g, w, size in zip(given, wanted, shape, strict=True))
