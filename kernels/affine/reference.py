"""Scale, shift, residual and ReLU of one model, plain torch.

C channels; scale and shift are scalars or (C,).
"""

import torch
from torch import Tensor


def _broad(value: Tensor) -> Tensor:
    return value if value.dim() == 0 else value[:, None, None]


def affine(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    residual: Tensor | None,
    after: Tensor | None,
    relu: bool,
) -> Tensor:
    """relu(scale * x + shift + residual) + after, each part where it is given."""
    y = x
    if scale is not None:
        y = y * _broad(scale)
    if shift is not None:
        y = y + _broad(shift)
    if residual is not None:
        y = y + residual
    if relu:
        y = y.relu()
    return y if after is None else y + after


def affine_backward(
    grad_y: Tensor,
    x: Tensor | None,
    scale: Tensor | None,
    y: Tensor | None,
    after: Tensor | None,
    need_x: bool,
    shift_shape: list[int] | None,
    need_residual: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, scale, shift, residual, after; y is given where it went through ReLU."""
    grad = grad_y if y is None else torch.where(y <= (0 if after is None else after), 0, grad_y)
    grad_scale = None
    if scale is not None and x is not None:
        grad_scale = (grad * x).sum() if scale.dim() == 0 else (grad * x).sum((0, 2, 3))
    grad_shift = None
    if shift_shape is not None:
        grad_shift = grad.sum((0, 2, 3)) if shift_shape else grad.sum()
    return (
        (grad if scale is None else grad * _broad(scale)) if need_x else None,
        grad_scale,
        grad_shift,
        grad if need_residual else None,
        None if after is None else grad_y.sum(),
    )
