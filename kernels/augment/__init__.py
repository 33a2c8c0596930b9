"""Batches from resident bytes: gather, random crop, flip, cutout and normalisation in one op.

Random words r0…r3 = Philox4x32-10(key = key_M[m], counter = (sample id, 0, 0, 0)); equal to
tl.randint4x(key, sample id) with a 32-bit sample id. dy = r0 mod (2 pad + 1), dx = r1 mod
(2 pad + 1), flipped where r2 is odd, cutout centred at row (r2 >> 1) mod H and column r3 mod W:
the square from centre - cutout // 2, `cutout` pixels wide, clipped at the border.
out[y, x] = image[reflect(y + dy - pad), reflect((W-1-x if flipped else x) + dx - pad)], where
reflect mirrors at the border without repeating it; inside the cutout square 0, the mean.

M models, B batch, R resident images, C channels.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels._layout import empty_activation
from kernels._register import register


def _allocate(images: Tensor, index: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    table = rest[2]
    height, width, channels = images.shape[2:]
    shape = (index.shape[1], channels, height, width)
    return (empty_activation(table, index.shape[0], shape),)


_augment = register(
    "augment",
    "augment",
    "(Tensor images, Tensor index, Tensor sample, Tensor key, Tensor table, int pad, bool flip,"
    " int cutout) -> Tensor",
    _allocate,
)


def normalised_bytes(
    mean_C: Sequence[float], std_C: Sequence[float], dtype: torch.dtype = torch.float32
) -> Tensor:
    """The value (byte / 255 - mean) / std of every byte and channel, (C, 256), rounded once.

    >>> normalised_bytes([0.5], [0.5])[0, [0, 255]].tolist()
    [-1.0, 1.0]
    """
    mean = np.asarray(mean_C, dtype=np.float64)[:, None]
    std = np.asarray(std_C, dtype=np.float64)[:, None]
    table = (np.arange(256, dtype=np.float64) / 255 - mean) / std
    return torch.from_numpy(table).to(dtype)


@lru_cache(maxsize=16)
def _table(
    mean_C: tuple[float, ...], std_C: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The table on its device, made once: a captured CUDA graph may not copy from the host."""
    return normalised_bytes(mean_C, std_C, dtype).to(device)


def augment(
    images_RHWC: Tensor,
    index_MB: Tensor,
    sample_MB: Tensor,
    key_M: Tensor,
    mean_C: Sequence[float],
    std_C: Sequence[float],
    *,
    pad: int = 0,
    flip: bool = False,
    cutout: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Every model's batch (M, B, C, H, W), normalised, from resident uint8 images.

    `index_MB` are rows of the resident table, `sample_MB` the pool ids that seed each sample's
    augmentation, `key_M` one int64 key a model (study seed, model and epoch). With pad = 0, no
    flip and no cutout the batch is the plain images, whatever the keys.

    Raises ValueError on wrong types or shapes, or a padding that does not fit the image.
    """
    if images_RHWC.dtype is not torch.uint8 or images_RHWC.dim() != 4:
        raise ValueError(
            f"augment got images {tuple(images_RHWC.shape)} of {images_RHWC.dtype}: "
            "expected (R, H, W, C) of torch.uint8"
        )
    if (
        index_MB.dim() != 2
        or sample_MB.shape != index_MB.shape
        or key_M.shape != index_MB.shape[:1]
    ):
        raise ValueError(
            f"augment got index {tuple(index_MB.shape)}, sample {tuple(sample_MB.shape)} and key "
            f"{tuple(key_M.shape)}: expected (M, B), (M, B) and (M,)"
        )
    if not 0 <= pad < min(images_RHWC.shape[1:3]) or cutout < 0:
        raise ValueError(f"augment got pad {pad}, cutout {cutout}: expected 0 or more, within H, W")
    table = _table(tuple(mean_C), tuple(std_C), dtype, images_RHWC.device)
    models = index_MB.shape[0]
    batch: Tensor = _augment.stacked(
        images_RHWC[None].expand(models, *images_RHWC.shape),
        index_MB,
        sample_MB,
        key_M,
        table[None].expand(models, *table.shape),
        pad,
        flip,
        cutout,
    )
    return batch


def view(
    images_RHWC: Tensor,
    index_B: Tensor,
    mean_C: Sequence[float],
    std_C: Sequence[float],
    *,
    dy: int = 0,
    dx: int = 0,
    flip: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """One fixed view of some images, (B, C, H, W): shifted by (dy, dx) with reflection, flipped.

    The same pixels that `augment` gives for a crop offset of (dy + pad, dx + pad).
    """
    _, height, width, channels = images_RHWC.shape
    row = torch.arange(height, device=images_RHWC.device) + dy
    column = torch.arange(width, device=images_RHWC.device)
    column = (column.flip(0) if flip else column) + dx
    row, column = _reflect(row, height), _reflect(column, width)
    picked = images_RHWC[index_B[:, None, None], row[:, None], column[None, :]]
    table = normalised_bytes(mean_C, std_C, dtype).to(images_RHWC.device)
    channel = torch.arange(channels, device=images_RHWC.device)
    batch = table[channel, picked.long()].permute(0, 3, 1, 2)
    out = empty_activation(batch, 1, batch.shape)[0]
    return out.copy_(batch)


def _reflect(position: Tensor, size: int) -> Tensor:
    position = position.abs()
    return torch.where(position >= size, 2 * (size - 1) - position, position)
