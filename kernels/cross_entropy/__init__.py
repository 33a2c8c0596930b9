"""Cross-entropy per sample. N samples, K classes."""

from typing import Any

import torch
from torch import Tensor

from kernels._layout import empty
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
    if logits_NK.dim() != 2 or labels_N.shape != logits_NK.shape[:1]:
        raise ValueError(
            f"cross_entropy got logits {tuple(logits_NK.shape)} and labels "
            f"{tuple(labels_N.shape)}: expected (N, K) and (N,)"
        )
    if labels_N.dtype is not torch.int64:
        raise ValueError(f"cross_entropy got labels of type {labels_N.dtype}: expected torch.int64")
    refuse_functional_grad()
    loss_N: Tensor = _forward.single(logits_NK, labels_N)
    return loss_N
