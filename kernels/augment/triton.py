"""Augmentation in Triton: gather, crop, flip, cutout and normalisation from resident bytes.

One program makes a strip of output rows of one sample. Its random words are those of
`reference.philox`, bit for bit: tl.randint4x with the model's key and the sample's id. Bytes are
normalised through the table of their 256 values a channel, so no rounding is left to the compiler.

M models, B batch, R resident images, C channels.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._launch import power_of_2

PIXELS = 256
"""Pixels of a program, about."""


@triton.jit
def _reflect(position, SIZE: tl.constexpr):
    position = tl.abs(position)
    return tl.where(position >= SIZE, 2 * (SIZE - 1) - position, position)


@triton.jit
def gather(images_ptr, index_ptr, sample_ptr, key_ptr, table_ptr, out_ptr, image_pitch, index_pitch,
           sample_pitch, key_pitch, table_pitch, out_pitch, H: tl.constexpr, W: tl.constexpr,
           C: tl.constexpr, COLS: tl.constexpr, STRIP: tl.constexpr, PIXELS: tl.constexpr,
           PAD: tl.constexpr, FLIP: tl.constexpr, CUTOUT: tl.constexpr):  # fmt: skip
    """`STRIP` rows of one sample of one model."""
    strip, sample = tl.program_id(0), tl.program_id(1)
    model = tl.cast(tl.program_id(2), tl.int64)
    image = tl.load(index_ptr + model * index_pitch + sample).to(tl.int64)
    counter = tl.load(sample_ptr + model * sample_pitch + sample).to(tl.int32)
    key = tl.load(key_ptr + model * key_pitch)
    word0, word1, word2, word3 = tl.randint4x(key, counter)
    word0, word1 = word0.to(tl.uint32), word1.to(tl.uint32)
    word2, word3 = word2.to(tl.uint32), word3.to(tl.uint32)
    pixel = tl.arange(0, PIXELS)
    row = strip * STRIP + pixel // W
    col = pixel % W
    here = (pixel < STRIP * W) & (row < H)
    down = (word0 % (2 * PAD + 1)).to(tl.int32) - PAD
    right = (word1 % (2 * PAD + 1)).to(tl.int32) - PAD
    mirrored = col
    if FLIP:
        mirrored = tl.where((word2 & 1) == 1, W - 1 - col, col)
    source = _reflect(row + down, H) * W + _reflect(mirrored + right, W)
    channel = tl.arange(0, COLS)
    mask = here[:, None] & (channel < C)[None, :]
    base = model * image_pitch + image * (H * W * C)
    at = source[:, None] * C + channel[None, :]
    byte = tl.load(images_ptr + base + at, mask=mask, other=0).to(tl.int32)
    spot = model * table_pitch + channel[None, :] * 256 + byte
    value = tl.load(table_ptr + spot, mask=mask, other=0.0)
    if CUTOUT > 0:
        top = ((word2 >> 1) % H).to(tl.int32) - CUTOUT // 2
        left = (word3 % W).to(tl.int32) - CUTOUT // 2
        cut = (row >= top) & (row < top + CUTOUT) & (col >= left) & (col < left + CUTOUT)
        value = tl.where(cut[:, None], 0.0, value)
    out = model * out_pitch + tl.cast(sample, tl.int64) * (H * W * C)
    to = (row * W + col)[:, None] * C + channel[None, :]
    tl.store(out_ptr + out + to, value.to(out_ptr.dtype.element_ty), mask=mask)


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
    """Fill every model's batch; leaves empty ones."""
    (batch,) = out
    if batch.numel() == 0:
        return NotImplemented
    height, width, channels = images.shape[2:]
    if not images[0].is_contiguous() or not table[0].is_contiguous():
        return NotImplemented
    strip = max(1, min(height, PIXELS // width))
    with torch.cuda.device_of(batch):
        gather[(triton.cdiv(height, strip), index.shape[1], index.shape[0])](
            images, _rows(index), _rows(sample), key, table, batch, images.stride(0),
            _rows(index).stride(0), _rows(sample).stride(0), key.stride(0), table.stride(0),
            batch.stride(0), H=height, W=width, C=channels, COLS=power_of_2(channels), STRIP=strip,
            PIXELS=power_of_2(strip * width), PAD=pad, FLIP=flip, CUTOUT=cutout,
        )  # fmt: skip
    return out


def _rows(stack: Tensor) -> Tensor:
    return stack if stack.stride(1) == 1 else stack.contiguous()
