"""Cross-entropy in Triton: loss, logit-scaled confidence and gradient from one read of the logits.

With rest = logsumexp of the other classes' logits, phi = z_y − rest, loss = softplus(−phi) and
d loss / d z_y = −sigmoid(−phi): none of them saturates for confident samples.

M models, N samples, K classes.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels._launch import power_of_2

TILE = 1024
_FINITE = tl.constexpr(3e38)


@triton.jit
def _softplus(value):
    """log(1 + exp(v)) = max(v, 0) + log1p(u), u = exp(−|v|); log1p(u) = 2 artanh(u / (2 + u))."""
    u = tl.exp(-tl.abs(value))
    s = u / (2.0 + u)
    square = s * s
    series = tl.full(square.shape, 1.0 / 17.0, tl.float32)
    for odd in tl.static_range(15, 0, -2):
        series = series * square + 1.0 / odd
    return tl.maximum(value, 0.0) + 2.0 * s * series


@triton.jit
def entropy(logits_ptr, labels_ptr, grad_ptr, loss_ptr, phi_ptr, share_ptr, samples, logits_pitch,
            labels_pitch, grad_pitch, loss_pitch, phi_pitch, share_pitch, K: tl.constexpr,
            ROWS: tl.constexpr, COLS: tl.constexpr, LOSS: tl.constexpr, PHI: tl.constexpr,
            SHARE: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """Whichever of loss, phi and gradient is asked for, of a few samples of one model."""
    model = tl.cast(tl.program_id(1), tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    here = row < samples
    inside = here[:, None] & (col < K)[None, :]
    at = row[:, None] * K + col[None, :]
    z = tl.load(logits_ptr + model * logits_pitch + at, mask=inside, other=0.0).to(tl.float32)
    label = tl.load(labels_ptr + model * labels_pitch + row, mask=here, other=0)
    true = col[None, :] == label[:, None]
    others = tl.where((col < K)[None, :] & (true == 0), z, float("-inf"))
    top = tl.maximum(tl.max(others, 1), -_FINITE)
    weight = tl.exp(others - top[:, None])
    total = tl.sum(weight, 1)
    phi = tl.sum(tl.where(true, z, 0.0), 1) - (top + tl.log(total))
    if LOSS:
        loss = _softplus(-phi).to(loss_ptr.dtype.element_ty)
        tl.store(loss_ptr + model * loss_pitch + row, loss, mask=here)
    if PHI:
        tl.store(phi_ptr + model * phi_pitch + row, phi, mask=here)
    if SHARE:
        miss = 1.0 / (1.0 + tl.exp(phi))
        share = tl.where(
            true, -miss[:, None], weight * (miss / tl.where(total > 0, total, 1.0))[:, None]
        )
        if SCALED:
            grad = tl.load(grad_ptr + model * grad_pitch + row, mask=here, other=0.0)
            share *= grad.to(tl.float32)[:, None]
        out = share.to(share_ptr.dtype.element_ty)
        tl.store(share_ptr + model * share_pitch + at, out, mask=inside)


@triton.jit
def scale(grad_ptr, share_ptr, out_ptr, samples, grad_pitch, share_pitch, out_pitch,
          K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """out = grad_N · share_NK."""
    model = tl.cast(tl.program_id(1), tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    mask = (row < samples)[:, None] & (col < K)[None, :]
    at = row[:, None] * K + col[None, :]
    grad = tl.load(grad_ptr + model * grad_pitch + row, mask=row < samples, other=0.0)
    share = tl.load(share_ptr + model * share_pitch + at, mask=mask, other=0.0).to(tl.float32)
    out = (grad.to(tl.float32)[:, None] * share).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + model * out_pitch + at, out, mask=mask)


def cross_entropy(out: tuple[Tensor, ...], logits: Tensor, labels: Tensor) -> object:
    """Fill the loss of every sample."""
    return _entropy(logits, labels, loss=out[0])


def cross_entropy_backward(
    out: tuple[Tensor, ...], grad: Tensor, logits: Tensor, labels: Tensor
) -> object:
    """Fill the gradient of the logits."""
    return _entropy(logits, labels, grad=grad, share=out[0])


def cross_entropy_phi(out: tuple[Tensor, ...], logits: Tensor, labels: Tensor) -> object:
    """Fill loss, phi and the gradient of every sample's own loss, in one pass."""
    return _entropy(logits, labels, loss=out[0], phi=out[1], share=out[2])


def cross_entropy_phi_backward(out: tuple[Tensor, ...], grad: Tensor, share: Tensor) -> object:
    """Fill grad_N · share_NK."""
    samples, classes = share.shape[1:]
    if share.numel() == 0:
        return NotImplemented
    share, grad = _dense(share), _dense(grad)
    rows, cols = _tile(classes)
    with torch.cuda.device_of(share):
        scale[(triton.cdiv(samples, rows), share.shape[0])](
            grad, share, out[0], samples, grad.stride(0), share.stride(0), out[0].stride(0),
            K=classes, ROWS=rows, COLS=cols, num_warps=2,
        )  # fmt: skip
    return out


def _entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    grad: Tensor | None = None,
    loss: Tensor | None = None,
    phi: Tensor | None = None,
    share: Tensor | None = None,
) -> object:
    samples, classes = logits.shape[1:]
    if logits.numel() == 0:
        return NotImplemented
    logits, labels = _dense(logits), _dense(labels)
    given = [
        logits if t is None else t
        for t in (None if grad is None else _dense(grad), loss, phi, share)
    ]
    rows, cols = _tile(classes)
    with torch.cuda.device_of(logits):
        entropy[(triton.cdiv(samples, rows), logits.shape[0])](
            logits, labels, *given, samples, logits.stride(0), labels.stride(0),
            *(t.stride(0) for t in given), K=classes, ROWS=rows, COLS=cols,
            LOSS=loss is not None, PHI=phi is not None, SHARE=share is not None,
            SCALED=grad is not None, num_warps=2,
        )  # fmt: skip
    return given


def _tile(classes: int) -> tuple[int, int]:
    cols = power_of_2(classes)
    return max(1, TILE // cols), cols


def _dense(stack: Tensor) -> Tensor:
    return stack if stack[0].is_contiguous() else stack.contiguous()
