"""Group norm of one model, plain torch.

N samples, C channels, G groups.
"""

import torch
from torch import Tensor

from kernels.pool import reference as pool


def _per_channel(value_C: Tensor) -> Tensor:
    return value_C[:, None, None]


def _grouped(x: Tensor, groups: int) -> Tensor:
    return x.reshape(x.shape[0], groups, x.shape[1] // groups * x.shape[2] * x.shape[3])


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    groups: int,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, and the mean and sigma of every sample's groups."""
    grouped = _grouped(x, groups).to(torch.promote_types(x.dtype, torch.float32))
    mean_NG = grouped.mean(2)
    centred = grouped - mean_NG[:, :, None]
    sigma_NG = (centred.square().mean(2) + eps).sqrt()
    y = (centred / sigma_NG[:, :, None]).reshape(x.shape)
    if weight is not None:
        y = y * _per_channel(weight)
    if bias is not None:
        y = y + _per_channel(bias)
    if residual is not None:
        y = y + residual
    return y.relu() if relu else y, mean_NG, sigma_NG


def group_norm_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean_NG: Tensor,
    sigma_NG: Tensor,
    y: Tensor | None,
    groups: int,
    need_bias: bool,
    need_residual: bool,
    bias: Tensor | None = None,
    added: bool = False,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight, bias and residual; y is given where it went through ReLU.

    `bias`, and whether a residual was `added`, let an implementation redo the ReLU's mask from x.
    """
    grad = grad_y if y is None else torch.where(y <= 0, 0, grad_y)
    grad = grad.to(mean_NG.dtype)
    grouped = _grouped(x, groups)
    normal = (grouped - mean_NG[:, :, None]) / sigma_NG[:, :, None]
    scaled = grad if weight is None else grad * _per_channel(weight)
    scaled = scaled.reshape(normal.shape)
    coupling = scaled.mean(2, keepdim=True) + normal * (scaled * normal).mean(2, keepdim=True)
    grad_x = (scaled - coupling) / sigma_NG[:, :, None]
    grad_weight = (grad * normal.reshape(x.shape)).sum((0, 2, 3))
    return (
        grad_x.reshape(x.shape),
        None if weight is None else grad_weight,
        grad.sum((0, 2, 3)) if need_bias else None,
        grad if need_residual else None,
    )


def group_norm_pool(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with the output's 2×2 maxima instead of the output."""
    y, mean_NG, sigma_NG = group_norm(x, weight, bias, None, groups, eps, relu)
    return pool.max_pool(y, 2)[0], mean_NG, sigma_NG


def group_norm_pool_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean_NG: Tensor,
    sigma_NG: Tensor,
    groups: int,
    eps: float,
    relu: bool,
    need_bias: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight and bias; the windows' winners are found again in x."""
    y = group_norm(x, weight, bias, None, groups, eps, relu)[0]
    spread = pool.max_pool_backward(grad, pool.max_pool(y, 2)[1], 2, *x.shape[2:])
    saved = (x, weight, mean_NG, sigma_NG, y if relu else None)
    return group_norm_backward(spread, *saved, groups, need_bias, False)[:3]
