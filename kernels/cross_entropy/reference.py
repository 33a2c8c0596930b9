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


def cross_entropy_phi(logits_NK: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """loss = softplus(-phi), phi = z_y - logsumexp(z without y), and the gradient of each loss."""
    logits_NK = logits_NK.to(torch.promote_types(logits_NK.dtype, torch.float32))
    classes = torch.arange(logits_NK.shape[1], device=logits_NK.device)
    true_NK = labels_N[:, None] == classes
    rest_N = logits_NK.masked_fill(true_NK, -torch.inf).logsumexp(1)
    phi_N = logits_NK.gather(1, labels_N[:, None])[:, 0] - rest_N
    share_NK = torch.where(true_NK, -(-phi_N).sigmoid()[:, None], logits_NK.softmax(1))
    return torch.nn.functional.softplus(-phi_N, threshold=1000), phi_N, share_NK


def cross_entropy_phi_backward(grad_N: Tensor, share_NK: Tensor) -> Tensor:
    """grad_n share_n."""
    return grad_N[:, None] * share_NK
