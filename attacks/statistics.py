"""Statistics of a sample from its logits, exact where p saturates.

phi = z_y - logsumexp over j != y of z_j, in float64: the logit-scaled confidence log p - log(1 - p)
without ever forming p. Loss and p follow from it. Source: Carlini et al., S&P 2022, section VI-A.
"""

from collections.abc import Callable

import numpy as np
from scipy.special import expit

from attacks.types import Array, Floats, Ints, require

_BLOCK_BYTES = 1 << 25


def phi_from_logits(
    logits: Array, labels_N: Array, *, axis: int = 1, out: Array | None = None
) -> Array:
    """phi of every (model, sample, query) from logits, in blocks of bounded memory.

    logits: (M, N, Q, K) or (M, N, K), any numeric type, may be a memory map; for plain (N, K) pass
    axis=0. labels_N: integer labels in 0..K-1, along `axis`. out: where to write (any floating
    type, may be a memory map; default a new float64 array). Returns (M, N, Q), (M, N) or (N,).

    NaN among a sample's logits gives NaN; infinite logits their limits. Raises ValueError for K < 2
    or labels that do not fit.

    >>> float(phi_from_logits(np.array([[1000.0, 0.0]]), np.array([0]), axis=0)[0])
    1000.0
    """
    return _by_blocks(_phi, logits, labels_N, axis, out)


def margin_from_logits(
    logits: Array, labels_N: Array, *, axis: int = 1, out: Array | None = None
) -> Array:
    """z_y - max over j != y of z_j; arguments as for `phi_from_logits`."""
    return _by_blocks(_margin, logits, labels_N, axis, out)


def loss_from_phi(phi: Array) -> Floats:
    """Cross-entropy softplus(-phi), without cancellation at either end.

    >>> float(loss_from_phi(np.array(-1000.0)))
    1000.0
    """
    return np.logaddexp(0, -np.asarray(phi, dtype=np.float64))


def probability_from_phi(phi: Array) -> Floats:
    """p_y = sigmoid(phi)."""
    return np.asarray(expit(np.asarray(phi, dtype=np.float64)))


def _by_blocks(
    function: Callable[[Floats, Ints], Floats],
    logits: Array,
    labels_N: Array,
    axis: int,
    out: Array | None,
) -> Array:
    """Apply a function of (n, Q, K) logits and n labels block by block over models and samples."""
    labels = np.asarray(labels_N)
    require(axis in (0, 1), f"axis is {axis}: expected 0 for (N, K) or 1 for (M, N, ..., K)")
    require(
        logits.ndim in ((2,) if axis == 0 else (3, 4)),
        f"logits have shape {logits.shape}: expected "
        + ("(samples, classes)" if axis == 0 else "(models, samples, [queries,] classes)"),
    )
    classes = logits.shape[-1]
    require(classes >= 2, f"logits have {classes} class: phi needs two at least")
    require(
        labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer),
        f"labels are of type {labels.dtype} and shape {labels.shape}: expected (samples,) integers",
    )
    require(
        labels.size == logits.shape[axis],
        f"{labels.size} labels for {logits.shape[axis]} samples of logits",
    )
    require(
        not labels.size or bool(labels.min() >= 0 and labels.max() < classes),
        f"labels run from {labels.min(initial=0)} to {labels.max(initial=0)}: expected 0 to "
        f"{classes - 1}",
    )
    result = np.empty(logits.shape[:-1]) if out is None else out
    require(
        result.shape == logits.shape[:-1] and np.issubdtype(result.dtype, np.floating),
        f"out has shape {result.shape} and type {result.dtype}: expected {logits.shape[:-1]}, "
        "floating",
    )
    models, results = (logits[None], result[None]) if axis == 0 else (logits, result)
    size = max(1, _BLOCK_BYTES // (8 * classes * int(np.prod(models.shape[2:-1]))))
    with np.errstate(all="ignore"):
        for of_model, into in zip(models, results, strict=True):
            for start in range(0, labels.size, size):
                block = slice(start, start + size)
                z = np.array(of_model[block], dtype=np.float64)
                flat = z.reshape(z.shape[0], -1, classes)
                chosen = function(flat, labels[block].astype(np.int64))
                into[block] = chosen.reshape(z.shape[:-1])
    return result


def _own_and_others(z_NQK: Floats, labels_N: Ints) -> Floats:
    """The label's logits; in place, -inf takes their room."""
    index = np.broadcast_to(labels_N[:, None, None], (*z_NQK.shape[:2], 1))
    own = np.take_along_axis(z_NQK, index, axis=2)[:, :, 0]
    np.put_along_axis(z_NQK, index, -np.inf, axis=2)
    return own


def _phi(z_NQK: Floats, labels_N: Ints) -> Floats:
    own = _own_and_others(z_NQK, labels_N)
    top = z_NQK.max(axis=2)
    level = np.where(np.isfinite(top), top, 0)
    z_NQK -= level[:, :, None]
    np.exp(z_NQK, out=z_NQK)
    others = level + np.log(z_NQK.sum(axis=2))
    return np.asarray(own - others)


def _margin(z_NQK: Floats, labels_N: Ints) -> Floats:
    own = _own_and_others(z_NQK, labels_N)
    return np.asarray(own - z_NQK.max(axis=2))
