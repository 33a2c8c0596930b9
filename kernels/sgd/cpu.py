"""SGD on a CPU: one compiled pass over a parameter, every operation rounded as in the reference.

M models.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import numpy as np
import torch
from torch import Tensor

from kernels._channels import flat
from kernels._compiled.cpu import compiler
from kernels.sgd import reference

kernel = compiler(__file__, exact=True)


def sgd(
    param: Tensor,
    grad: Tensor,
    buffer: Tensor | None,
    lr_M: Tensor,
    weight_decay_M: Tensor | None,
    momentum: float,
    nesterov: bool,
) -> None:
    """Update `param` and `buffer` in place."""
    strides = param.stride()[1:]
    if not _dense(param) or (buffer is not None and buffer.stride()[1:] != strides):
        reference.sgd(param, grad, buffer, lr_M, weight_decay_M, momentum, nesterov)
        return
    if grad.stride()[1:] != strides:
        grad = torch.empty_like(param).copy_(grad)
    decay_M = np.zeros(1, np.float32) if weight_decay_M is None else weight_decay_M.numpy()
    sgd_stack(
        *flat(param),
        *flat(grad),
        *flat(param if buffer is None else buffer),
        lr_M.to(param.dtype).numpy(),
        decay_M.astype(np.float32, copy=False),
        param[0].numel(),
        np.float32(momentum),
        weight_decay_M is not None,
        buffer is not None,
        nesterov,
    )


def _dense(param: Tensor) -> bool:
    """Whether each model's numbers lie without gaps, in either order of a convolution's weight."""
    one = param[0]
    return one.is_contiguous() or (
        one.dim() == 4 and one.is_contiguous(memory_format=torch.channels_last)
    )


@kernel
def sgd_stack(
    param_all, param_pitch, grad_all, grad_pitch, buffer_all, buffer_pitch, lr_M, decay_M, count,
    momentum, decayed, buffered, nesterov,
):  # fmt: skip
    """The steps of the reference, in its order, without fused multiply-adds."""
    for m in range(lr_M.size):
        param = param_all[m * param_pitch : m * param_pitch + count]
        grad = grad_all[m * grad_pitch : m * grad_pitch + count]
        lr, decay = lr_M[m], np.float32(0)
        if decayed:
            decay = decay_M[m]
        if not buffered:
            for i in range(count):
                step = grad[i] + param[i] * decay if decayed else grad[i]
                param[i] -= step * lr
            continue
        buffer = buffer_all[m * buffer_pitch : m * buffer_pitch + count]
        for i in range(count):
            step = grad[i] + param[i] * decay if decayed else grad[i]
            buffer[i] = buffer[i] * momentum + step
            step = step + buffer[i] * momentum if nesterov else buffer[i]
            param[i] -= step * lr
