"""Fully connected layer: one matrix product per model behind one stacked op.

N samples, F input features, O output features.
"""

from typing import Any

from torch import Tensor

from kernels._layout import empty, nothing
from kernels._register import differentiate, refuse_functional_grad, register


def _allocate(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    return (empty(x, x.shape[0], (x.shape[1], weight.shape[1])),)


def _allocate_backward(
    grad: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_bias: bool
) -> tuple[Tensor, ...]:
    models = x.shape[0]
    grad_x = empty(x, models, x.shape[1:]) if need_x else nothing(x, models)
    grad_bias = empty(x, models, weight.shape[1:2]) if need_bias else nothing(x, models)
    return grad_x, empty(x, models, weight.shape[1:]), grad_bias


_forward = register(
    "linear", "linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _allocate
)
_backward = register(
    "linear",
    "linear_backward",
    "(Tensor grad, Tensor x, Tensor weight, bool need_x, bool need_bias)"
    " -> (Tensor, Tensor, Tensor)",
    _allocate_backward,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.biased = bias is not None


def _gradients(ctx: Any, call: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    need_x = ctx.needs_input_grad[0]
    grad_x, grad_weight, grad_bias = call(grad, x, weight, need_x, ctx.biased)
    return grad_x if need_x else None, grad_weight, grad_bias if ctx.biased else None


differentiate(_forward, _backward, setup=_setup, gradients=_gradients)


def linear(x_NF: Tensor, weight_OF: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """y_NO = x weightᵀ + bias, as torch.nn.functional.linear does.

    Raises ValueError where features or dimensions do not fit.
    """
    if x_NF.dim() != 2 or weight_OF.dim() != 2 or x_NF.shape[1] != weight_OF.shape[1]:
        raise ValueError(
            f"linear got x {tuple(x_NF.shape)} and weight {tuple(weight_OF.shape)}: "
            "expected (N, F) and (O, F)"
        )
    refuse_functional_grad()
    y: Tensor = _forward(x_NF, weight_OF, bias_O)
    return y
