"""Augmented batches on a CPU, compiled: one sample after another, straight from the bytes.

M models, B batch, R resident images, C channels.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import numpy as np
from torch import Tensor

from kernels._compiled.cpu import compiler
from kernels._layout import channels_last

kernel = compiler(__file__, exact=True)

LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
FIRST, SECOND = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
BUMP_0, BUMP_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


def augment(
    out: tuple[Tensor, ...],
    images: Tensor,
    index: Tensor,
    sample: Tensor,
    key: Tensor,
    table: Tensor,
    pad: int,
    flip: bool,
    cutout: int,
) -> object:
    """Fill every model's batch; all models share images and table, as `kernels.augment` sees to."""
    if images.stride(0) or table.stride(0) or not images[0].is_contiguous():
        return NotImplemented
    rows = images.shape[1]
    index_MB = index.contiguous().numpy()
    if index_MB.size and not (index_MB.min() >= 0 and index_MB.max() < rows):
        raise IndexError(f"augment got an index outside 0 to {rows - 1}")
    for m in range(index_MB.shape[0]):
        batch = out[0][m]
        last = channels_last(batch.device, batch.shape[1])
        view = batch.permute(0, 2, 3, 1) if last else batch
        arrays = (view.numpy(), images[0].numpy(), index_MB[m], sample[m].contiguous().numpy())
        augment_model(*arrays, np.uint64(key[m]), table[0].numpy(), last, pad, flip, cutout)
    return None


@kernel
def philox(key, counter):
    """Philox4x32-10 (Salmon et al. 2011) of the counter (word, 0, 0, 0)."""
    key_0, key_1 = key & LOW, key >> HALF
    c0, c1, c2, c3 = counter & LOW, np.uint64(0), np.uint64(0), np.uint64(0)
    for _ in range(10):
        one, two = FIRST * c0, SECOND * c2
        c0, c1 = (two >> HALF) ^ c1 ^ key_0, two & LOW
        c2, c3 = (one >> HALF) ^ c3 ^ key_1, one & LOW
        key_0, key_1 = (key_0 + BUMP_0) & LOW, (key_1 + BUMP_1) & LOW
    return np.int64(c0), np.int64(c1), np.int64(c2), np.int64(c3)


@kernel
def _reflect(position, size):
    position = abs(position)
    return 2 * (size - 1) - position if position >= size else position


@kernel
def augment_model(out, images, index_B, sample_B, key, table, last, pad, flip, cutout):
    """One model's batch, out (B, H, W, C) where `last`, else (B, C, H, W)."""
    _, height, width, channels = images.shape
    source = np.empty(width, np.int64)
    span = 2 * pad + 1
    for b in range(index_B.size):
        word_0, word_1, word_2, word_3 = philox(key, np.uint64(sample_B[b]))
        mirrored = flip and word_2 & 1 == 1
        for x in range(width):
            from_x = width - 1 - x if mirrored else x
            source[x] = _reflect(from_x + word_1 % span - pad, width)
        top = (word_2 >> 1) % height - cutout // 2
        left = word_3 % width - cutout // 2
        image = images[index_B[b]]
        for y in range(height):
            line = image[_reflect(y + word_0 % span - pad, height)]
            cut = top <= y < top + cutout
            for x in range(width):
                hidden = cut and left <= x < left + cutout
                for c in range(channels):
                    value = np.float32(0) if hidden else table[c, line[source[x], c]]
                    if last:
                        out[b, y, x, c] = value
                    else:
                        out[b, c, y, x] = value
