"""Concatenation of channels of one model, plain torch."""

import torch
from torch import Tensor


def concat(first: Tensor, second: Tensor) -> Tensor:
    """The channels of the first, then those of the second."""
    return torch.cat([first, second], 1)


def concat_backward(grad: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """The gradients of the first `channels` channels and of the rest."""
    return grad[:, :channels], grad[:, channels:]
