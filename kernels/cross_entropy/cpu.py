"""Cross-entropy on a CPU, compiled: one sample after another, sums in float64.

M models, N samples, K classes.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import math

import numpy as np
from torch import Tensor

from kernels._channels import flat
from kernels._compiled.cpu import compiler
from kernels._layout import as_dense

kernel = compiler(__file__, exact=True)


def cross_entropy(out: tuple[Tensor, ...], logits: Tensor, labels: Tensor) -> None:
    """Fill the loss of every sample."""
    labels_MN = labels.contiguous().numpy()
    _check(labels_MN, logits.shape[2])
    cross_entropy_stack(*flat(as_dense(logits)), labels_MN, *flat(out[0]), logits.shape[2])


def cross_entropy_backward(
    out: tuple[Tensor, ...], grad: Tensor, logits: Tensor, labels: Tensor
) -> None:
    """Fill the gradient of the logits."""
    grad_MN = grad.detach().contiguous().numpy()
    labels_MN = labels.contiguous().numpy()
    cross_entropy_backward_stack(
        grad_MN, *flat(as_dense(logits)), labels_MN, *flat(out[0]), logits.shape[2]
    )


def _check(labels_MN: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]", classes: int) -> None:
    if labels_MN.size and not (labels_MN.min() >= 0 and labels_MN.max() < classes):
        raise IndexError(f"cross_entropy got a label outside 0 to {classes - 1}")


@kernel
def _top(row_K):
    top = row_K[0]
    for k in range(1, row_K.size):
        if row_K[k] > top or row_K[k] != row_K[k]:
            top = row_K[k]
    return np.float64(top)


@kernel
def cross_entropy_stack(logits_all, logits_pitch, labels_MN, loss_all, loss_pitch, classes):
    """Every sample's logsumexp minus its label's logit."""
    models, samples = labels_MN.shape
    for m in range(models):
        for n in range(samples):
            start = m * logits_pitch + n * classes
            row_K = logits_all[start : start + classes]
            top, total = _top(row_K), 0.0
            for k in range(classes):
                total += math.exp(row_K[k] - top)
            loss = math.log(total) + top - row_K[labels_MN[m, n]]
            loss_all[m * loss_pitch + n] = loss


@kernel
def cross_entropy_backward_stack(
    grad_MN, logits_all, logits_pitch, labels_MN, out_all, out_pitch, classes
):
    """Every sample's gradient times (softmax - onehot)."""
    models, samples = labels_MN.shape
    for m in range(models):
        for n in range(samples):
            start = m * logits_pitch + n * classes
            row_K = logits_all[start : start + classes]
            out_K = out_all[m * out_pitch + n * classes : m * out_pitch + (n + 1) * classes]
            top, total = _top(row_K), 0.0
            for k in range(classes):
                total += math.exp(row_K[k] - top)
            for k in range(classes):
                share = math.exp(row_K[k] - top) / total
                if k == labels_MN[m, n]:
                    share -= 1.0
                out_K[k] = grad_MN[m, n] * share
