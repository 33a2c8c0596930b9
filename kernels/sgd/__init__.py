"""Stochastic gradient descent with momentum on stacked parameters, in place.

The semantics of torch.optim.SGD (dampening 0): d = grad + weight_decay * param, buffer = momentum
* buffer + d (so a buffer of zeros starts as the gradient), param -= lr * (buffer, or d + momentum
* buffer for Nesterov). Every model has its own learning rate and weight decay.

M models.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from kernels._register import choose, declare
from kernels.sgd import reference

declare("sgd", "sgd")


@torch.no_grad()
def step(
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    momenta: Mapping[str, Tensor],
    lr_M: Tensor,
    weight_decay_M: Tensor,
    momentum: float = 0.9,
    nesterov: bool = False,
    decayed: Collection[str] | None = None,
    grad_scale_M: Tensor | None = None,
) -> None:
    """Update every (M, …) tensor of `params` and `momenta` (zeros at first) in place.

    `decayed` names the parameters that weight decay touches (None: all). With momentum 0 `momenta`
    is neither read nor written. `grad_scale_M` multiplies each model's gradients first: its
    clipping factor.

    Raises ValueError where names or model counts disagree.
    """
    if params.keys() != grads.keys() or (momentum and not params.keys() <= momenta.keys()):
        raise ValueError("sgd.step: params, grads and momenta name different parameters")
    for name, param in params.items():
        if not param.shape[0] == lr_M.shape[0] == weight_decay_M.shape[0]:
            raise ValueError(
                f"sgd.step: {name} has {param.shape[0]} models, lr_M {lr_M.shape[0]}, "
                f"weight_decay_M {weight_decay_M.shape[0]}"
            )
    for name, param in params.items():
        fill = choose("sgd", "sgd", param.device.type, param.dtype)
        together = getattr(fill, "together", None)
        if together is not None:
            rates = (lr_M, weight_decay_M, momentum, nesterov, decayed, grad_scale_M)
            together(params, grads, momenta, *rates)
            return
        apply = reference.sgd if fill is None else fill
        decay_M = weight_decay_M if decayed is None or name in decayed else None
        buffer = momenta[name] if momentum else None
        grad = grads[name]
        if grad_scale_M is not None:
            grad = grad * grad_scale_M.view(-1, *(1,) * (grad.dim() - 1))
        apply(param, grad, buffer, lr_M, decay_M, momentum, nesterov)
