"""Gather, crop, flip, cut out and normalise the batch of one model, plain torch.

R resident images, B batch, C channels.
"""

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_BUMPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of word * multiplier, in int64 without overflow."""
    low = word * (multiplier & 0xFFFF)
    high = word * (multiplier >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(key: Tensor, counter_B: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al. 2011): key of 64 bits, counter (word, 0, 0, 0), words in int64.

    Equal to triton's tl.randint4x(key, counter) for 32-bit counters.
    """
    key_0, key_1 = key & _WORD, (key >> 32) & _WORD
    c0, c1, c2, c3 = counter_B & _WORD, *(torch.zeros_like(counter_B) for _ in range(3))
    for _ in range(10):
        high_0, low_0 = _product(c0, _MULTIPLIERS[0])
        high_1, low_1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high_1 ^ c1 ^ key_0, low_1, high_0 ^ c3 ^ key_1, low_0
        key_0, key_1 = (key_0 + _BUMPS[0]) & _WORD, (key_1 + _BUMPS[1]) & _WORD
    return c0, c1, c2, c3


def _reflect(position: Tensor, size: int) -> Tensor:
    position = position.abs()
    return torch.where(position >= size, 2 * (size - 1) - position, position)


def augment(
    images_RHWC: Tensor,
    index_B: Tensor,
    sample_B: Tensor,
    key: Tensor,
    table_C256: Tensor,
    pad: int,
    flip: bool,
    cutout: int,
) -> Tensor:
    """One model's batch (B, C, H, W); `table_C256` holds each byte's normalised value."""
    _, height, width, channels = images_RHWC.shape
    word_0, word_1, word_2, word_3 = philox(key, sample_B)
    row = torch.arange(height, device=index_B.device)[None, :]
    column = torch.arange(width, device=index_B.device)[None, :]
    span = 2 * pad + 1
    mirrored = (word_2[:, None] & 1 == 1) & flip
    source_row = _reflect(row + (word_0 % span)[:, None] - pad, height)
    source_column = torch.where(mirrored, width - 1 - column, column)
    source_column = _reflect(source_column + (word_1 % span)[:, None] - pad, width)
    bytes_BHWC = images_RHWC[
        index_B[:, None, None], source_row[:, :, None], source_column[:, None, :]
    ]
    channel = torch.arange(channels, device=index_B.device)
    out = table_C256[channel, bytes_BHWC.long()].permute(0, 3, 1, 2)
    if cutout:
        top = ((word_2 >> 1) % height)[:, None] - cutout // 2
        left = (word_3 % width)[:, None] - cutout // 2
        rows = (row >= top) & (row < top + cutout)
        columns = (column >= left) & (column < left + cutout)
        out = torch.where((rows[:, :, None] & columns[:, None, :])[:, None], 0, out)
    return out
