"""How stacked tensors are handed to Triton kernels: cuts, pitches, strides, rounds. No triton here.

Everything but `rounds` depends on one model's shape alone, so that a model's numbers do not depend
on how many there are; rounds only decide which models one launch covers.

M models, N samples, C channels, R = N·H·W rows a model.
"""

from typing import NamedTuple

from torch import Tensor

from kernels._layout import as_activation

TILE = 2048
"""Elements of a tile: 16 a thread with 4 warps, which leaves no register spilled."""

L2_BYTES = 24 * 2**20
"""Working set of the models that one round of launches covers, so that a second read finds L2."""


def power_of_2(count: int) -> int:
    """The smallest power of two that is no less.

    >>> [power_of_2(n) for n in (1, 3, 8)]
    [1, 4, 8]
    """
    return 1 << max(0, count - 1).bit_length()


class Tiles(NamedTuple):
    """How a model is cut: channels of a tile, blocks of them, rows of a tile and of a program."""

    cols: int
    blocks: int
    rows: int
    chunk: int
    pitch: int


def tiles(rows: int, channels: int) -> Tiles:
    """The cut of a layer; depends on the shape of one model alone.

    >>> tiles(131072, 64)
    Tiles(cols=64, blocks=1, rows=32, chunk=512, pitch=8388608)
    """
    cols = min(64, power_of_2(channels))
    tile_rows = TILE // cols
    chunk = max(tile_rows, 512 if rows >= 16384 else 256)
    pitch = -(-rows * channels // 16) * 16
    return Tiles(cols, -(-channels // cols), tile_rows, chunk, pitch)


def sample_tiles(pixels: int, cut: Tiles) -> tuple[int, int, int]:
    """Samples a program, samples a tile, rows of a sample a tile, for images of H·W pixels.

    >>> sample_tiles(1024, tiles(131072, 64)), sample_tiles(16, tiles(2048, 64))
    ((1, 1, 32), (16, 2, 16))
    """
    rows = min(cut.rows, power_of_2(pixels))
    samples = cut.rows // rows
    return max(samples, -(-cut.chunk // pixels)), samples, rows


def activation(x: Tensor, pitch: int) -> Tensor:
    """x (M, N, C, H, W) of any strides as channels-last models `pitch` numbers apart."""
    x = as_activation(x)
    if x.shape[0] == 1 or x.stride(0) == pitch:
        return x
    one = x[:1]
    out = one.new_empty(x.shape[0] * pitch).as_strided(x.shape, (pitch, *x.stride()[1:]))
    return out.copy_(x)


def unit_stride(vector_MC: Tensor) -> Tensor:
    """The tensor, copied if neighbouring channels do not lie side by side."""
    return vector_MC if vector_MC.stride(1) == 1 else vector_MC.contiguous()


def rounds(x: Tensor, activations: int) -> list[tuple[int, int]]:
    """(first model, models) of each round of launches: what fits L2 together, or all at once."""
    models = x.shape[0]
    one = activations * x[0].numel() * x.element_size()
    count = L2_BYTES // one or models
    return [(m, min(count, models - m)) for m in range(0, models, count)]
