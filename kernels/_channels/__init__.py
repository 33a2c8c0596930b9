"""Loops over channels that the CPU implementations of several ops share."""

import numpy as np
import numpy.typing as npt
from torch import Tensor


def flat(value: Tensor) -> tuple[npt.NDArray[np.generic], int]:
    """The memory of a stack of dense models as one array, and the elements from model to model."""
    count = value[0].numel() if value.shape[0] else 0
    pitch = value.stride(0) if value.shape[0] > 1 else count
    total = (value.shape[0] - 1) * pitch + count
    view = value.detach().as_strided((max(0, total),), (1,))
    return view.numpy(), pitch


def flat_or(value: Tensor | None, stand_in: Tensor) -> tuple[npt.NDArray[np.generic], int]:
    """`flat`, of another tensor where there is none: compiled code wants an array anyway."""
    return flat(stand_in if value is None else value)


def constants(value: Tensor | None, like: Tensor, fill: float) -> npt.NDArray[np.float32]:
    """Per-channel values of every model, contiguous (M, C): given ones, scalars, or a constant."""
    if value is None:
        return np.full((like.shape[0], like.shape[2]), fill, np.float32)
    value = value.detach()
    if value.dim() == 1:
        value = value[:, None].expand(like.shape[0], like.shape[2])
    array: npt.NDArray[np.float32] = value.contiguous().numpy()
    return array
