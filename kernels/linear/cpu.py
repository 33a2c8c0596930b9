"""Fully connected layer on a CPU: matrix products of one model, written in place."""

import torch
from torch import Tensor

from kernels._layout import as_dense


def linear(out: tuple[Tensor, ...], x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Fill y, one model after another."""
    x, weight = as_dense(x), as_dense(weight)
    for m in range(x.shape[0]):
        if bias is None:
            torch.mm(x[m], weight[m].T, out=out[0][m])
        else:
            torch.addmm(bias[m], x[m], weight[m].T, out=out[0][m])


def linear_backward(
    out: tuple[Tensor, ...],
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    need_x: bool,
    need_bias: bool,
) -> None:
    """Fill the gradients of x, weight and bias, one model after another."""
    grad_x, grad_weight, grad_bias = out
    grad, x, weight = as_dense(grad), as_dense(x), as_dense(weight)
    for m in range(x.shape[0]):
        if need_x:
            torch.mm(grad[m], weight[m], out=grad_x[m])
        torch.mm(grad[m].T, x[m], out=grad_weight[m])
        if need_bias:
            torch.sum(grad[m], 0, out=grad_bias[m])
