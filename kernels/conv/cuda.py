"""Convolution on a GPU: one cuDNN call a model, on parallel streams; 1×1 as one product a model.

Every call has one model's shape and strides, the algorithm is chosen without timing and must be
deterministic, so a model's bits depend on nothing else. The streams fork from the current one and
join it again: inside a CUDA graph they become parallel branches. Grouped convolution, what plain
vmap would make of a stack, is the slow path and is not used.

M models, N samples, C channels, O output channels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kernels._layout import as_activation, as_dense
from kernels.conv import reference

STREAMS = 4
"""Branches that models take turns on."""

_side: dict[torch.device, list["torch.cuda.Stream"]] = {}


@contextmanager
def _deterministic() -> Iterator[None]:
    tf32 = torch.backends.cudnn.allow_tf32
    with torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32
    ):
        yield


def _each(models: int, device: torch.device, work: Callable[[int], None]) -> None:
    """work(m) for every model, on side streams that the current one waits for."""
    if device.type != "cuda" or models == 1:
        for m in range(models):
            work(m)
        return
    with torch.cuda.device(device):
        if device not in _side:
            _side[device] = [torch.cuda.Stream(device) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]
        branches = _side[device][: min(models, STREAMS)]
        trunk = torch.cuda.current_stream(device)
        for branch in branches:
            branch.wait_stream(trunk)
        for m in range(models):
            with torch.cuda.stream(branches[m % len(branches)]):
                work(m)
        for branch in branches:
            trunk.wait_stream(branch)


def _pointwise(weight: Tensor, stride: int, padding: int) -> bool:
    return tuple(weight.shape[3:]) == (1, 1) and stride == 1 and padding == 0


def _rows(activation: Tensor) -> Tensor:
    """One model's channels-last (N, C, H, W) as (N·H·W, C), without a copy."""
    return activation.permute(0, 2, 3, 1).view(-1, activation.shape[1])


def conv2d(
    out: tuple[Tensor, ...],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    padding: int,
) -> object:
    """Fill y; leaves empty batches and mixed types."""
    (y,) = out
    if y.numel() == 0 or weight.dtype != x.dtype:
        return NotImplemented
    x, weight = as_activation(x), as_dense(weight)
    pointwise = _pointwise(weight, stride, padding)

    def one(m: int) -> None:
        if pointwise:
            torch.mm(_rows(x[m]), weight[m, :, :, 0, 0].T, out=_rows(y[m]))
        else:
            _convolve(y[m], x[m], weight[m], stride, padding)
        if bias is not None:
            y[m].add_(bias[m][:, None, None])

    with _deterministic():
        _each(x.shape[0], x.device, one)
    return out


def _convolve(y: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int) -> None:
    if not x.is_cuda:
        y.copy_(torch.conv2d(x, weight, None, stride, padding))
        return
    tf32 = torch.backends.cudnn.allow_tf32
    torch.ops.aten.cudnn_convolution.out(
        x, weight, [padding] * 2, [stride] * 2, [1, 1], 1, False, True, tf32, out=y
    )


def conv2d_backward(
    out: tuple[Tensor, ...],
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: int,
    padding: int,
    need_x: bool,
    need_bias: bool,
) -> object:
    """Fill the gradients of x, weight and bias; leaves empty batches and mixed types."""
    grad_x, grad_weight, grad_bias = out
    if grad.numel() == 0 or weight.dtype != x.dtype:
        return NotImplemented
    grad, x, weight = as_activation(grad), as_activation(x), as_dense(weight)
    pointwise = _pointwise(weight, stride, padding)

    def one(m: int) -> None:
        if not pointwise:
            _transpose(out, m, grad[m], x[m], weight[m], stride, padding, need_x, need_bias)
            return
        outward, inward = _rows(grad[m]), _rows(x[m])
        if need_x:
            torch.mm(outward, weight[m, :, :, 0, 0], out=_rows(grad_x[m]))
        torch.mm(outward.T, inward, out=grad_weight[m, :, :, 0, 0])
        if need_bias:
            grad_bias[m].copy_(outward.sum(0))

    with _deterministic():
        _each(x.shape[0], x.device, one)
    return out


def _transpose(
    out: tuple[Tensor, ...],
    m: int,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: int,
    padding: int,
    need_x: bool,
    need_bias: bool,
) -> None:
    """One model's gradients through cuDNN; that of x is written in place."""
    direct = need_x and x.is_cuda
    if direct:
        spare = _spare(x, weight, stride, padding)
        tf32 = torch.backends.cudnn.allow_tf32
        torch.ops.aten.cudnn_convolution_transpose.out(
            grad, weight, [padding] * 2, spare, [stride] * 2, [1, 1], 1, False, True, tf32,
            out=out[0][m],
        )  # fmt: skip
    grads = reference.conv2d_backward(
        grad, x, weight, stride, padding, need_x and not direct, need_bias
    )
    for target, value in zip(out, grads, strict=True):
        if value is not None:
            target[m].copy_(value)


def _spare(x: Tensor, weight: Tensor, stride: int, padding: int) -> list[int]:
    """Rows and columns of x that a strided convolution does not reach, per spatial dimension."""
    sides = zip(x.shape[2:], weight.shape[2:], strict=True)
    return [(n + 2 * padding - k) % stride for n, k in sides]
