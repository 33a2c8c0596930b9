"""Fully connected layer of one model, plain torch."""

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y = x weightᵀ + bias."""
    return torch.nn.functional.linear(x, weight, bias)


def linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_bias: bool
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """The gradients of x (where needed), weight and bias (where there is one)."""
    return (
        grad @ weight if need_x else None,
        grad.T @ x,
        grad.sum(0) if need_bias else None,
    )
