"""How far numbers may be from the truth: the one table. Loosening an entry needs a written reason.

float64 on a CPU is the truth. Errors are norms of differences over norms of the truth.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

FLOAT64 = 1e-11
"""Error of a float64 tensor, relative to max(its norm, SMALL of the whole gradient's norm)."""

SMALL = 1e-3
"""A tensor below this share of the whole gradient is measured against the whole: a convolution's
bias before batch norm has gradient zero, and rounding noise has no relative error."""

FLOAT32_FACTOR = 3.0
"""A float32 error is at most this times plain torch's largest, over layouts and seeds: ReLU masks
and pool winners flip at rounding level, so no two implementations agree to 1e-5."""

FLOAT32_FLOOR = 3e-7
"""Below this relative error (5 units in the last place) a float32 tensor is as good as exact."""

STEPS_FLOAT64 = 1e-13
"""Weights after a few SGD steps in float64, relative: only the order of roundings differs."""

GRADCHECK = 1e-6
"""Finite differences in float64: the tolerance of torch.autograd.gradcheck's own default scale."""

INTERPRETED = 1e-6
"""An interpreted kernel in float32, outputs and gradients alike: greatest error over the model's
greatest value."""

INTERPRETED_NET = 1e-5
"""The same through a whole net: six layers pass their errors on, and a rounded ReLU its mask."""

INTERPRETED_BFLOAT16 = 0.999
"""The share of a kernel's bfloat16 numbers that equal the float64 ones rounded once."""


def whole_norm(tensors: Iterable[Tensor]) -> float:
    """The norm of several tensors as one vector, in float64."""
    return sum(float(t.double().square().sum()) for t in tensors) ** 0.5


def error(value: Tensor, truth: Tensor, whole: float = 0.0) -> float:
    """|value - truth| / max(|truth|, SMALL * whole)."""
    value, truth = value.detach(), truth.detach().double()
    scale = max(float(truth.norm()), SMALL * whole, torch.finfo(torch.float64).tiny)
    return float((value.double() - truth).norm()) / scale
