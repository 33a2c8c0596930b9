"""Cross-entropy per sample. N samples, K classes."""

from typing import Any

import torch
from torch import Tensor

from kernels._layout import accumulated, empty
from kernels._register import differentiate, refuse_functional_grad, register


def _allocate(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return (empty(logits, logits.shape[0], logits.shape[1:2]),)


def _allocate_backward(grad: Tensor, logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return (empty(logits, logits.shape[0], logits.shape[1:]),)


_forward = register(
    "cross_entropy", "cross_entropy", "(Tensor logits, Tensor labels) -> Tensor", _allocate
)
_backward = register(
    "cross_entropy",
    "cross_entropy_backward",
    "(Tensor grad, Tensor logits, Tensor labels) -> Tensor",
    _allocate_backward,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, call: Any, grad: Tensor) -> tuple[Any, ...]:
    return call(grad, *ctx.saved_tensors), None


differentiate(_forward, _backward, setup=_setup, gradients=_gradients)


def cross_entropy(logits_NK: Tensor, labels_N: Tensor) -> Tensor:
    """loss_N = logsumexp(logits) - logits[label], one number a sample.

    Raises ValueError on other shapes or labels that are not int64.

    >>> cross_entropy(torch.zeros(1, 2), torch.tensor([1])).item() == torch.tensor(2.0).log().item()
    True
    """
    _check(logits_NK, labels_N)
    refuse_functional_grad()
    loss_N: Tensor = _forward(logits_NK, labels_N)
    return loss_N


def _allocate_phi(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    models, shape, wide = logits.shape[0], logits.shape[1:], accumulated(logits.dtype)
    loss, phi = (empty(logits, models, shape[:1], wide) for _ in range(2))
    return loss, phi, empty(logits, models, shape)


def _allocate_phi_backward(grad: Tensor, share: Tensor) -> tuple[Tensor, ...]:
    return (empty(share, share.shape[0], share.shape[1:]),)


_forward_phi = register(
    "cross_entropy",
    "cross_entropy_phi",
    "(Tensor logits, Tensor labels) -> (Tensor, Tensor, Tensor)",
    _allocate_phi,
)
_backward_phi = register(
    "cross_entropy",
    "cross_entropy_phi_backward",
    "(Tensor grad, Tensor share) -> Tensor",
    _allocate_phi_backward,
)


def _setup_phi(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, phi, share = output
    ctx.mark_non_differentiable(phi, share)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(share)


def _gradients_phi(ctx: Any, call: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    return None if grad is None else call(grad, *ctx.saved_tensors), None


differentiate(_forward_phi, _backward_phi, setup=_setup_phi, gradients=_gradients_phi)


def cross_entropy_phi(logits_NK: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """loss_N and the logit-scaled confidence phi_N (not differentiable) from one pass.

    phi = z_y - logsumexp of the other logits, so that loss = softplus(-phi); the gradient of the
    logits is made in the same pass and kept for the backward pass. Needs two classes.

    >>> loss, phi = cross_entropy_phi(torch.zeros(1, 2), torch.tensor([1]))
    >>> phi.tolist(), bool(loss.sub(torch.tensor(2.0).log()).abs() < 1e-6)
    ([0.0], True)
    """
    _check(logits_NK, labels_N)
    refuse_functional_grad()
    loss_N, phi_N, _ = _forward_phi(logits_NK, labels_N)
    return loss_N, phi_N


def _check(logits_NK: Tensor, labels_N: Tensor) -> None:
    if logits_NK.dim() != 2 or labels_N.shape != logits_NK.shape[:1]:
        raise ValueError(
            f"cross_entropy got logits {tuple(logits_NK.shape)} and labels "
            f"{tuple(labels_N.shape)}: expected (N, K) and (N,)"
        )
    if labels_N.dtype is not torch.int64:
        raise ValueError(f"cross_entropy got labels of type {labels_N.dtype}: expected torch.int64")
