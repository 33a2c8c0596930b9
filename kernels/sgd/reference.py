"""One step of SGD on one stacked parameter, in separate exactly rounded torch operations.

M models.
"""

from torch import Tensor


def sgd(
    param: Tensor,
    grad: Tensor,
    buffer: Tensor | None,
    lr_M: Tensor,
    weight_decay_M: Tensor | None,
    momentum: float,
    nesterov: bool,
) -> None:
    """Update `param` and `buffer` in place.

    No fused multiply-add (addcmul, add with alpha): those round differently in the vectorised body
    and the tail of a loop, and a model's place in the stack would decide which it gets.
    """
    per_model = (-1, *(1,) * (param.dim() - 1))
    step = grad
    if weight_decay_M is not None:
        step = step + param * weight_decay_M.view(per_model)
    if buffer is not None:
        buffer.mul_(momentum).add_(step)
        step = step + buffer * momentum if nesterov else buffer
    param.sub_(step * lr_M.view(per_model))
