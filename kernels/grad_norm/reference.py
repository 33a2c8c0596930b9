"""Per-sample squared norms of a layer's weight and bias gradients, of one model, plain torch.

Sample n's gradient is Σ_t b_t a_tᵀ over its output positions t: a_t the patch of inputs that the
position sees, b_t the gradient of its outputs.

N samples, C channels, O outputs, F features, T output positions.
"""

import torch
from torch import Tensor


def conv_norms(
    x: Tensor, grad: Tensor, kernel: int, stride: int, padding: int, bias: bool, form: str
) -> Tensor:
    """norm²_n of a square convolution's weight gradient, of its bias too where it has one."""
    wide = torch.promote_types(x.dtype, torch.float32)
    patches = torch.nn.functional.unfold(x.to(wide), kernel, padding=padding, stride=stride)
    grad_NOT = grad.flatten(2).to(wide)
    squared = torch.einsum("not,ndt->nod", grad_NOT, patches).square().sum((1, 2))
    return squared + grad_NOT.sum(2).square().sum(1) if bias else squared


def linear_norms(x_NF: Tensor, grad_NO: Tensor, bias: bool) -> Tensor:
    """norm²_n = (|a_n|² [+ 1 for the bias]) |b_n|²."""
    wide = torch.promote_types(x_NF.dtype, torch.float32)
    inputs = x_NF.to(wide).square().sum(1) + (1 if bias else 0)
    return inputs * grad_NO.to(wide).square().sum(1)


def probed_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, probe: Tensor, stride: int, padding: int
) -> Tensor:
    """A plain convolution: the probe only receives a gradient."""
    return torch.conv2d(x, weight, bias, stride, padding)


def probed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, probe: Tensor) -> Tensor:
    """A plain linear layer: the probe only receives a gradient."""
    return torch.nn.functional.linear(x, weight, bias)
