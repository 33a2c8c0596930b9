"""Cross-entropy of one model, plain torch. N samples, K classes."""

import torch
from torch import Tensor


def cross_entropy(logits_NK: Tensor, labels_N: Tensor) -> Tensor:
    """loss_n = logsumexp(z_n) - z_n[label]."""
    return torch.nn.functional.cross_entropy(logits_NK, labels_N, reduction="none")


def cross_entropy_backward(grad_N: Tensor, logits_NK: Tensor, labels_N: Tensor) -> Tensor:
    """grad_n (softmax(z_n) - onehot)."""
    classes = torch.arange(logits_NK.shape[1], device=logits_NK.device)
    onehot_NK = (labels_N[:, None] == classes).to(logits_NK.dtype)
    return grad_N[:, None] * (logits_NK.softmax(1) - onehot_NK)
