"""What the interpreter checks share: ops served by Triton on CPU tensors, oracles, comparison.

`serve()` makes this process's registered ops run their Triton implementation under the interpreter,
with the layouts that a GPU would see; `run` traces a call and differentiates it outside vmap.
"""

import contextlib
import sys
from pathlib import Path

import torch
from triton_interpreter import prepare

prepare()

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tolerances import INTERPRETED, INTERPRETED_BFLOAT16, INTERPRETED_NET  # noqa: E402
from triton_tracer import Tracer  # noqa: E402

import kernels  # noqa: E402
from kernels import _layout, _register, pool  # noqa: E402

FLOATS = (torch.float32, torch.bfloat16)


def _fast(folder, name, device, dtype):
    return _register._function(folder, "triton", name) if dtype in FLOATS else None


def serve() -> None:
    """From now on, ops of this process run their Triton kernels, interpreted."""
    _layout.channels_last = lambda device, channels: True
    pool._one_op = lambda device: True
    _register._fast = _fast
    _register.forget()


serve()


def served(name: str, folder: str | None = None) -> bool:
    fill = _register.choose(folder or name, name, "cpu", torch.float32)
    return fill is not None and fill.__module__ == f"kernels.{folder or name}.triton"


def noise(*shape, seed=0, dtype=torch.float32, scale=1.0, shift=0.0):
    """Normal numbers that do not depend on ambient generators, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale + shift
    return values.to(dtype)


def gradients(function, inputs, weights, constants=()):
    """Outputs of vmap(function)(*inputs, *constants), gradients of Σ weights·outputs, outside."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in inputs]
    given = [t for t in leaves if t is not None]

    def call(some, rest):
        some = iter(some)
        return function(*(None if t is None else next(some) for t in leaves), *rest)

    outputs = torch.func.vmap(call)(tuple(given), tuple(constants))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum((w * o.to(w.dtype)).sum() for w, o in zip(weights, outputs, strict=True))
    grads = iter(torch.autograd.grad(total, given))
    return [o.detach() for o in outputs], [None if t is None else next(grads) for t in leaves]


@contextlib.contextmanager
def untouched_memory():
    """Huge tensors stay virtual: nothing fills them."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True


def assert_close(name, got, want, *, tolerance, atol=0.0):
    """The greatest error is at most `tolerance` of the greatest value (of its model)."""
    assert got.shape == want.shape, (
        f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    )
    for m in range(got.shape[0]):
        g, w = got[m].double(), want[m].double()
        assert not torch.isnan(g).any(), f"{name}: NaN in model {m}"
        if not w.numel():
            continue
        limit = tolerance * float(w.abs().max()) + atol
        error = float((g - w).abs().max())
        assert error <= limit, f"{name}, model {m}: error {error:.3g}, allowed {limit:.3g}"


def assert_rounded(name, got, want, *, share=INTERPRETED_BFLOAT16):
    """bfloat16 results equal the reference rounded to bfloat16 on more than `share`."""
    assert got.dtype is torch.bfloat16, f"{name}: {got.dtype}"
    equal = float((got == want.to(torch.bfloat16)).double().mean())
    assert equal >= share, f"{name}: {equal:.5f} equal the rounded reference, expected {share}"


__all__ = [
    "FLOATS",
    "INTERPRETED",
    "INTERPRETED_BFLOAT16",
    "INTERPRETED_NET",
    "Tracer",
    "assert_close",
    "assert_rounded",
    "gradients",
    "kernels",
    "noise",
    "serve",
    "served",
    "untouched_memory",
]
