"""One launch of SGD over all stacked parameters of a network, in Triton.

Programs are blocks of one parameter of one model; the parameters are arguments of one kernel, which
finds its own by program number. So a step is one launch, and nothing but the arguments changes
between steps: learning rate, weight decay and clipping live in device memory (CUDA graphs).

M models.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from collections.abc import Collection, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
MOST = 48
"""Parameters of one launch: beyond it a network takes another one (arguments are limited)."""


@triton.jit
def _update(param_ptr, grad_ptr, buffer_ptr, lr, decay, scale, momentum, at, mask,
            DECAYED: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr,
            SCALED: tl.constexpr):  # fmt: skip
    param = tl.load(param_ptr + at, mask=mask, other=0.0).to(tl.float32)
    step = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        step *= scale
    if DECAYED:
        step += param * decay
    if MOMENTUM:
        buffer = tl.load(buffer_ptr + at, mask=mask, other=0.0).to(tl.float32)
        buffer = buffer * momentum + step
        tl.store(buffer_ptr + at, buffer.to(buffer_ptr.dtype.element_ty), mask=mask)
        if NESTEROV:
            step += buffer * momentum
        else:
            step = buffer
    param -= step * lr
    tl.store(param_ptr + at, param.to(param_ptr.dtype.element_ty), mask=mask)


@triton.jit
def update_all(stacks, grads, buffers, lr_ptr, decay_ptr, scale_ptr, lr_pitch, decay_pitch,
               scale_pitch, momentum, COUNTS: tl.constexpr, STARTS: tl.constexpr,
               PITCHES: tl.constexpr, DECAYED: tl.constexpr, MOMENTUM: tl.constexpr,
               NESTEROV: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Update one block of one parameter of one model, all of them in one launch."""
    program, model = tl.program_id(0), tl.cast(tl.program_id(1), tl.int64)
    lr = tl.load(lr_ptr + model * lr_pitch).to(tl.float32)
    decay = tl.load(decay_ptr + model * decay_pitch).to(tl.float32)
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_ptr + model * scale_pitch).to(tl.float32)
    for t in tl.static_range(len(COUNTS)):
        if (program >= STARTS[t]) & (program < STARTS[t + 1]):
            at = (program - STARTS[t]) * BLOCK + tl.arange(0, BLOCK)
            _update(stacks[t] + model * PITCHES[t][0], grads[t] + model * PITCHES[t][1],
                    buffers[t] + model * PITCHES[t][2], lr, decay, scale, momentum, at,
                    at < COUNTS[t], DECAYED[t], MOMENTUM, NESTEROV, SCALED)  # fmt: skip


def sgd(
    param: Tensor,
    grad: Tensor,
    buffer: Tensor | None,
    lr_M: Tensor,
    weight_decay_M: Tensor | None,
    momentum: float,
    nesterov: bool,
) -> None:
    """One stacked parameter, as `reference.sgd`."""
    decay_M = lr_M if weight_decay_M is None else weight_decay_M
    buffers = {"": param if buffer is None else buffer}
    decayed = () if weight_decay_M is None else ("",)
    together({"": param}, {"": grad}, buffers, lr_M, decay_M, momentum, nesterov, decayed)


def together(
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    momenta: Mapping[str, Tensor],
    lr_M: Tensor,
    weight_decay_M: Tensor,
    momentum: float,
    nesterov: bool,
    decayed: Collection[str] | None,
    grad_scale_M: Tensor | None = None,
) -> None:
    """All stacked parameters in one launch (one for every `MOST` of them).

    `grad_scale_M` multiplies a model's gradients first: its clipping factor.
    """
    names = [name for name, param in params.items() if param.numel()]
    for first in range(0, len(names), MOST):
        _launch(
            names[first : first + MOST], params, grads, momenta, lr_M, weight_decay_M, momentum,
            nesterov, decayed, grad_scale_M,
        )  # fmt: skip


setattr(sgd, "together", together)  # noqa: B010  (mypy knows no attributes of functions)


def _launch(
    names: list[str],
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    momenta: Mapping[str, Tensor],
    lr_M: Tensor,
    weight_decay_M: Tensor,
    momentum: float,
    nesterov: bool,
    decayed: Collection[str] | None,
    grad_scale_M: Tensor | None,
) -> None:
    stacks = [params[name] for name in names]
    steps = [_dense(grads[name]) for name in names]
    buffers = [momenta[name] for name in names] if momentum else stacks
    for name, stack, buffer in zip(names, stacks, buffers, strict=True):
        if not (_is_dense(stack) and _is_dense(buffer)):
            raise ValueError(f"sgd.step: the models of {name} are not dense in memory")
    counts = tuple(stack[0].numel() for stack in stacks)
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + -(-count // BLOCK))
    pitches = tuple(
        (p.stride(0), g.stride(0), b.stride(0))
        for p, g, b in zip(stacks, steps, buffers, strict=True)
    )
    scale = lr_M if grad_scale_M is None else grad_scale_M
    with torch.cuda.device_of(lr_M):
        update_all[(starts[-1], lr_M.shape[0])](
            tuple(stacks), tuple(steps), tuple(buffers), lr_M, weight_decay_M, scale,
            lr_M.stride(0), weight_decay_M.stride(0), scale.stride(0), momentum, COUNTS=counts,
            STARTS=tuple(starts), PITCHES=pitches,
            DECAYED=tuple(decayed is None or name in decayed for name in names),
            MOMENTUM=bool(momentum), NESTEROV=nesterov, SCALED=grad_scale_M is not None,
            BLOCK=BLOCK,
        )  # fmt: skip


def _is_dense(stack: Tensor) -> bool:
    return bool(stack[0].is_contiguous())


def _dense(stack: Tensor) -> Tensor:
    return stack if _is_dense(stack) else stack.contiguous()
