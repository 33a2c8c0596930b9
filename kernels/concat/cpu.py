"""Concatenation of channels on a CPU: every part is copied once, into the strides of the ops.

torch.cat under vmap forgets channels-last strides, and the next op would copy once more.
"""

from torch import Tensor


def concat(out: tuple[Tensor, ...], first: Tensor, second: Tensor) -> None:
    """Fill the concatenation."""
    channels = first.shape[2]
    out[0][:, :, :channels].copy_(first)
    out[0][:, :, channels:].copy_(second)


def concat_backward(out: tuple[Tensor, ...], grad: Tensor, channels: int) -> None:
    """Fill the gradients of both parts."""
    out[0].copy_(grad[:, :, :channels])
    out[1].copy_(grad[:, :, channels:])
