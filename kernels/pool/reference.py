"""Pooling of one model by windows that do not overlap, plain torch."""

import torch
from torch import Tensor


def max_pool(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The largest of each window, and its place there (row-major): the first of equals."""
    y, flat = torch.nn.functional.max_pool2d(x, size, return_indices=True)
    width = x.shape[3]
    rows = torch.arange(y.shape[2], device=x.device)[:, None] * size
    columns = torch.arange(y.shape[3], device=x.device) * size
    where = (flat // width - rows) * size + flat % width - columns
    return y, where.to(torch.uint8)


def max_pool_backward(grad: Tensor, where: Tensor, size: int, height: int, width: int) -> Tensor:
    """Each window's gradient goes to its winner."""
    chosen = where[..., None] == torch.arange(size * size, device=grad.device)
    return _spread(torch.where(chosen, grad[..., None], 0), size, height, width)


def avg_pool(x: Tensor, size: int) -> Tensor:
    """The mean of each window."""
    return torch.nn.functional.avg_pool2d(x, size)


def avg_pool_backward(grad: Tensor, size: int, height: int, width: int) -> Tensor:
    """Each window's gradient is shared evenly."""
    shares = (grad / (size * size))[..., None].expand(*grad.shape, size * size)
    return _spread(shares, size, height, width)


def global_avg_pool(x: Tensor) -> Tensor:
    """The mean of each channel's image."""
    return x.mean((2, 3))


def global_avg_pool_backward(grad_NC: Tensor, height: int, width: int) -> Tensor:
    """Each channel's gradient is shared evenly over its image."""
    shares = grad_NC / (height * width)
    return shares[:, :, None, None].expand(*grad_NC.shape, height, width)


def _spread(windows: Tensor, size: int, height: int, width: int) -> Tensor:
    """(N, C, h, w, size²) back to (N, C, height, width); rows and columns left over are 0."""
    samples, channels, rows, columns, _ = windows.shape
    out = windows.new_zeros(samples, channels, height, width)
    inner = windows.reshape(samples, channels, rows, columns, size, size).transpose(3, 4)
    out[:, :, : rows * size, : columns * size] = inner.reshape(
        samples, channels, rows * size, columns * size
    )
    return out
