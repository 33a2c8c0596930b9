"""Per-sample gradient norms: what each sample contributes to a batch's gradient, layer by layer.

Layers with a probe, zeros (N,) that require a gradient: autograd adds every layer's squared norm
into the probe's gradient, so one backward pass gives each sample's norm over the whole net.

    logits = grad_norm.linear(grad_norm.batch_norm(grad_norm.conv2d(…, probe_B), …, sense=…), …)
    norms = torch.autograd.grad(vmap(loss)(params, images, probe).sum(), probe)

What is measured depends on how batch norm runs, named by `sense` (the losses are summed):
- "frozen": statistics held at the running ones: the true gradient of each sample's loss;
- "frozen_batch": the same with the batch's own statistics;
- "contribution": sample n's term of the batch's gradient, coupling included; they sum to it.

N samples, C channels, O outputs, F features.
"""

from typing import Any, Literal

from torch import Tensor

from kernels._layout import accumulated, empty
from kernels._register import differentiate, refuse_functional_grad, register
from kernels.batch_norm import BatchNormOut, PenaltyForm
from kernels.batch_norm import batch_norm as plain_batch_norm
from kernels.conv import _allocate as allocate_conv
from kernels.conv import _backward as conv_backward
from kernels.grad_norm.cost import Cost, Form
from kernels.linear import _allocate as allocate_linear
from kernels.linear import _backward as linear_backward

Sense = Literal["contribution", "frozen", "frozen_batch"]


def _allocate_norms(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return (empty(x, x.shape[0], x.shape[1:2], accumulated(x.dtype)),)


def _allocate_conv(x: Tensor, weight: Tensor, bias: Any, probe: Any, *rest: Any) -> Any:
    return allocate_conv(x, weight, bias, *rest)


def _allocate_linear(x: Tensor, weight: Tensor, bias: Any, probe: Any) -> Any:
    return allocate_linear(x, weight, bias)


_conv_norms = register(
    "grad_norm",
    "conv_norms",
    "(Tensor x, Tensor grad, int kernel, int stride, int padding, bool bias, str form) -> Tensor",
    _allocate_norms,
)
_linear_norms = register(
    "grad_norm", "linear_norms", "(Tensor x, Tensor grad, bool bias) -> Tensor", _allocate_norms
)
_conv = register(
    "grad_norm",
    "probed_conv2d",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor probe, int stride, int padding) -> Tensor",
    _allocate_conv,
)
_linear = register(
    "grad_norm",
    "probed_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor probe) -> Tensor",
    _allocate_linear,
)


def _setup_conv(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, _, ctx.stride, ctx.padding = inputs
    ctx.save_for_backward(x, weight)
    ctx.biased = bias is not None


def _gradients_conv(ctx: Any, call: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    need_x, stacked = ctx.needs_input_grad[0], x.dim() == 5
    backward = conv_backward.stacked if stacked else conv_backward.single
    dx, dweight, dbias = backward(grad, x, weight, ctx.stride, ctx.padding, need_x, ctx.biased)
    norms = call(x, grad, weight.shape[-1], ctx.stride, ctx.padding, ctx.biased, "")
    biased = dbias if ctx.biased else None
    return dx if need_x else None, dweight, biased, norms, None, None


def _setup_linear(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.biased = bias is not None


def _gradients_linear(ctx: Any, call: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    need_x, stacked = ctx.needs_input_grad[0], x.dim() == 3
    backward = linear_backward.stacked if stacked else linear_backward.single
    dx, dweight, dbias = backward(grad, x, weight, need_x, ctx.biased)
    norms = call(x, grad, ctx.biased)
    return dx if need_x else None, dweight, dbias if ctx.biased else None, norms


differentiate(_conv, _conv_norms, setup=_setup_conv, gradients=_gradients_conv)
differentiate(_linear, _linear_norms, setup=_setup_linear, gradients=_gradients_linear)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    probe_B: Tensor,
    stride: int = 1,
    padding: int = 0,
) -> Tensor:
    """`kernels.conv2d` with a square kernel whose backward pass adds norm²_n to the probe."""
    if weight.dim() != 4 or weight.shape[2] != weight.shape[3]:
        raise ValueError(
            f"grad_norm.conv2d got weight {tuple(weight.shape)}: expected (O, C, k, k)"
        )
    refuse_functional_grad()
    y: Tensor = _conv(x, weight, bias, probe_B, stride, padding)
    return y


def linear(x_NF: Tensor, weight_OF: Tensor, bias_O: Tensor | None, probe_B: Tensor) -> Tensor:
    """`kernels.linear` whose backward pass adds norm²_n to the probe."""
    refuse_functional_grad()
    y: Tensor = _linear(x_NF, weight_OF, bias_O, probe_B)
    return y


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    probe_B: Tensor,
    *,
    sense: Sense,
    eps: float = 1e-5,
    relu: bool = False,
    residual: Tensor | None = None,
    penalty: PenaltyForm | None = None,
) -> BatchNormOut:
    """`kernels.batch_norm` run as `sense` asks, adding norm²_n of gamma and beta to the probe.

    Raises ValueError on another sense.
    """
    if sense not in ("contribution", "frozen", "frozen_batch"):
        raise ValueError(f"sense is '{sense}': expected 'contribution', 'frozen' or 'frozen_batch'")
    mean, var = running_mean, running_var
    if sense == "frozen_batch":
        batch = plain_batch_norm(x.detach(), None, None, None, None, training=True, eps=eps)
        mean, var = batch.mean_C, batch.var_C
    return plain_batch_norm(
        x,
        weight,
        bias,
        mean,
        var,
        training=sense == "contribution",
        eps=eps,
        relu=relu,
        residual=residual,
        penalty=penalty,
        probe_B=probe_B,
    )


def conv_norms(
    x: Tensor,
    grad: Tensor,
    kernel: int,
    stride: int = 1,
    padding: int = 0,
    *,
    bias: bool = False,
    form: Form | None = None,
) -> Tensor:
    """norm²_N of a convolution's gradients from its input (N, C, H, W) and output gradient.

    `form` forces one of the two forms; by default `Cost` chooses by the layer's shape.
    """
    norms: Tensor = _conv_norms.single(x, grad, kernel, stride, padding, bias, form or "")
    return norms


def linear_norms(x_NF: Tensor, grad_NO: Tensor, *, bias: bool = False) -> Tensor:
    """norm²_N of a linear layer's gradients.

    >>> import torch
    >>> linear_norms(torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0]])).tolist()
    [100.0]
    """
    norms: Tensor = _linear_norms.single(x_NF, grad_NO, bias)
    return norms


__all__ = ["Cost", "Sense", "batch_norm", "conv2d", "conv_norms", "linear", "linear_norms"]
