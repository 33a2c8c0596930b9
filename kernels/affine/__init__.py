"""Scale, shift, residual, ReLU and a second shift as one op: Fixup's scalars, the affine-only arm.

C channels; scale and shift are scalars or (C,), the shift behind the ReLU is a scalar.
"""

from typing import Any

from torch import Tensor

from kernels._layout import empty, empty_activation, nothing
from kernels._register import differentiate, refuse_functional_grad, register


def _allocate(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return (empty_activation(x, x.shape[0], x.shape[1:]),)


def _allocate_backward(
    grad_y: Tensor,
    x: Tensor | None,
    scale: Tensor | None,
    y: Tensor | None,
    after: Tensor | None,
    need_x: bool,
    shift_shape: list[int] | None,
    need_residual: bool,
) -> tuple[Tensor, ...]:
    models, whole = grad_y.shape[0], grad_y.shape[1:]
    return (
        empty_activation(grad_y, models, whole) if need_x else nothing(grad_y, models),
        nothing(grad_y, models) if scale is None else empty(grad_y, models, scale.shape[1:]),
        nothing(grad_y, models) if shift_shape is None else empty(grad_y, models, shift_shape),
        empty_activation(grad_y, models, whole) if need_residual else nothing(grad_y, models),
        nothing(grad_y, models) if after is None else empty(grad_y, models, ()),
    )


_forward = register(
    "affine",
    "affine",
    "(Tensor x, Tensor? scale, Tensor? shift, Tensor? residual, Tensor? after, bool relu)"
    " -> Tensor",
    _allocate,
)
_backward = register(
    "affine",
    "affine_backward",
    "(Tensor grad_y, Tensor? x, Tensor? scale, Tensor? y, Tensor? after, bool need_x,"
    " int[]? shift_shape, bool need_residual) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _allocate_backward,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, scale, shift, residual, after, relu = inputs
    ctx.save_for_backward(x if scale is not None else None, scale, output if relu else None, after)
    ctx.shift_shape = None
    if shift is not None:
        stacked = x.dim() == 5
        ctx.shift_shape = list(shift.shape[1:] if stacked else shift.shape)
    needs = ctx.needs_input_grad
    ctx.needs = (bool(needs[0]), residual is not None and bool(needs[3]))


def _gradients(ctx: Any, call: Any, grad_y: Tensor) -> tuple[Any, ...]:
    x, scale, y, after = ctx.saved_tensors
    need_x, need_residual = ctx.needs
    shifted = ctx.shift_shape is not None
    if scale is not None:
        grads = call(grad_y, x, scale, y, after, need_x, ctx.shift_shape, need_residual)
        wanted = (need_x, True, shifted, need_residual, after is not None)
        return (*(g if want else None for g, want in zip(grads, wanted, strict=True)), None)
    # without a scale x and residual have one gradient
    masked, grad_shift, grad_after = grad_y, None, None
    if shifted or y is not None or after is not None:
        cut = y is not None and (need_x or need_residual)
        _, _, grad_shift, behind, grad_after = call(
            grad_y, None, None, y, after, False, ctx.shift_shape, cut
        )
        masked = behind if cut else grad_y
    return (
        masked if need_x else None,
        None,
        grad_shift if shifted else None,
        masked if need_residual else None,
        grad_after if after is not None else None,
        None,
    )


differentiate(_forward, _backward, setup=_setup, gradients=_gradients)


def affine(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    relu: bool = False,
    residual: Tensor | None = None,
    after: Tensor | None = None,
) -> Tensor:
    """relu(scale * x + shift + residual) + after on x (N, C, H, W).

    scale and shift are () or (C,), after is (). Raises ValueError on other shapes.
    """
    for name, value in (("scale", scale), ("shift", shift)):
        if value is not None and value.shape not in ((), (x.shape[1],)):
            raise ValueError(
                f"affine got x {tuple(x.shape)} and {name} {tuple(value.shape)}: "
                "expected () or (C,)"
            )
    if after is not None and after.dim():
        raise ValueError(f"affine got after {tuple(after.shape)}: expected ()")
    if x.dim() != 4:
        raise ValueError(f"affine got x {tuple(x.shape)}: expected (N, C, H, W)")
    refuse_functional_grad()
    y: Tensor = _forward(x, scale, shift, residual, after, relu)
    return y


def relu(x: Tensor) -> Tensor:
    """max(x, 0) of any shape (NaN stays NaN)."""
    if x.dim() != 4:
        return x.relu()
    return affine(x, None, None, relu=True)
