"""Max, average and global average pooling by windows that do not overlap (stride = size).

Rows and columns that fill no whole window are dropped, as in torch's floor mode.

N samples, C channels.
"""

from typing import Any

import torch
from torch import Tensor

from kernels._layout import empty, empty_activation
from kernels._register import differentiate, refuse_functional_grad, register

FUSED = 2
"""The window that norms pool by in the same op, where a device has one."""


def fuses(x: Tensor, size: int, residual: Tensor | None) -> bool:
    """Whether norm and pooling are one op: on a GPU, for 2×2 windows and without a residual.

    These are all the max-pools behind a norm in the shipped nets, and what they save is largest:
    with a residual its stream and its gradient's would be moved all the same.
    """
    fits = size == FUSED and residual is None and min(x.shape[2:]) >= FUSED
    return fits and _one_op(x.device)


def _one_op(device: torch.device) -> bool:
    return device.type != "cpu"


def _pooled(x: Tensor, size: int) -> tuple[int, ...]:
    return (*x.shape[1:3], x.shape[3] // size, x.shape[4] // size)


def _allocate_max(x: Tensor, size: int) -> tuple[Tensor, ...]:
    shape = _pooled(x, size)
    where = empty_activation(x, x.shape[0], shape, torch.uint8)
    return empty_activation(x, x.shape[0], shape), where


def _allocate_max_backward(
    grad: Tensor, where: Tensor, size: int, height: int, width: int
) -> tuple[Tensor, ...]:
    return (empty_activation(grad, grad.shape[0], (*grad.shape[1:3], height, width)),)


def _allocate_avg(x: Tensor, size: int) -> tuple[Tensor, ...]:
    return (empty_activation(x, x.shape[0], _pooled(x, size)),)


def _allocate_avg_backward(grad: Tensor, size: int, height: int, width: int) -> tuple[Tensor, ...]:
    return (empty_activation(grad, grad.shape[0], (*grad.shape[1:3], height, width)),)


def _allocate_global(x: Tensor) -> tuple[Tensor, ...]:
    return (empty(x, x.shape[0], x.shape[1:3]),)


def _allocate_global_backward(grad: Tensor, height: int, width: int) -> tuple[Tensor, ...]:
    return (empty_activation(grad, grad.shape[0], (*grad.shape[1:3], height, width)),)


_max = register("pool", "max_pool", "(Tensor x, int size) -> (Tensor, Tensor)", _allocate_max)
_max_backward = register(
    "pool",
    "max_pool_backward",
    "(Tensor grad, Tensor where, int size, int height, int width) -> Tensor",
    _allocate_max_backward,
)
_avg = register("pool", "avg_pool", "(Tensor x, int size) -> Tensor", _allocate_avg)
_avg_backward = register(
    "pool",
    "avg_pool_backward",
    "(Tensor grad, int size, int height, int width) -> Tensor",
    _allocate_avg_backward,
)
_global = register("pool", "global_avg_pool", "(Tensor x) -> Tensor", _allocate_global)
_global_backward = register(
    "pool",
    "global_avg_pool_backward",
    "(Tensor grad, int height, int width) -> Tensor",
    _allocate_global_backward,
)


def _setup_max(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, ctx.size = inputs
    ctx.image = x.shape[-2:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])


def _gradients_max(ctx: Any, call: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    if grad is None:
        return None, None
    return call(grad, ctx.saved_tensors[0], ctx.size, *ctx.image), None


def _setup_avg(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, ctx.size = inputs
    ctx.image = x.shape[-2:]


def _gradients_avg(ctx: Any, call: Any, grad: Tensor) -> tuple[Any, ...]:
    return call(grad, ctx.size, *ctx.image), None


def _setup_global(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.image = inputs[0].shape[-2:]


def _gradients_global(ctx: Any, call: Any, grad: Tensor) -> Any:
    return call(grad, *ctx.image)


differentiate(_max, _max_backward, setup=_setup_max, gradients=_gradients_max)
differentiate(_avg, _avg_backward, setup=_setup_avg, gradients=_gradients_avg)
differentiate(_global, _global_backward, setup=_setup_global, gradients=_gradients_global)


def _check(name: str, x: Tensor, size: int) -> None:
    if x.dim() != 4 or not 1 <= size <= min(x.shape[2:], default=0) or size > 15:
        raise ValueError(
            f"{name} got x {tuple(x.shape)} and size {size}: expected (N, C, H, W) and a size from "
            "1 to 15 that fits the image"
        )
    refuse_functional_grad()


def max_pool(x: Tensor, size: int = 2) -> Tensor:
    """The largest of each size × size window of x (N, C, H, W); the first of equals wins.

    Raises ValueError where the window does not fit.
    """
    _check("max_pool", x, size)
    y: Tensor = _max(x, size)[0]
    return y


def avg_pool(x: Tensor, size: int = 2) -> Tensor:
    """The mean of each size × size window of x (N, C, H, W).

    Raises ValueError where the window does not fit.
    """
    _check("avg_pool", x, size)
    y: Tensor = _avg(x, size)
    return y


def global_avg_pool(x: Tensor) -> Tensor:
    """The mean over the image: (N, C, H, W) to (N, C)."""
    _check("global_avg_pool", x, 1)
    y: Tensor = _global(x)
    return y
