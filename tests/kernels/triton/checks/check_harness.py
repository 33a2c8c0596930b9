"""The harness itself: what it must see, it sees."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton_case import Tracer, noise
from triton_interpreter import round_to_bfloat16, widen
from triton_tracer import MemoryFault


@triton.jit
def _shift(x_ptr, y_ptr, n, OFFSET: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0) if MASKED else tl.load(x_ptr + at)
    tl.store(y_ptr + at + OFFSET, x, mask=at + OFFSET < n)


@triton.jit
def _total(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr, tl.sum(tl.load(x_ptr + at, mask=at < n), 0))


@triton.jit
def _update(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr, tl.load(x_ptr) + 1.0)


@triton.jit
def _product(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    c = tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at))
    tl.store(c_ptr + at, c.to(c_ptr.dtype.element_ty))


def launch(x, y, offset=0, masked=True, n=None):
    _shift[(triton.cdiv(x.numel(), 8),)](x, y, n or x.numel(), offset, masked, 8)


def test_a_correct_kernel_passes_and_its_bytes_are_counted():
    x, y = noise(21), torch.empty(21)
    with Tracer() as trace:
        launch(x, y)
    assert torch.equal(x, y)
    assert trace.launches[0].loaded == {"x_ptr": 84}
    assert trace.launches[0].stored == {"y_ptr": 84}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: launch(x, torch.empty(21), masked=False), "load out of bounds"),
        (lambda x: launch(x, torch.empty(21), n=24), "out of bounds"),
        (lambda x: launch(x, torch.empty(8), n=21), "store out of bounds"),
        (lambda x: launch(x, x, offset=8), "races"),
        (lambda x: _update[(2,)](x, 8), "races"),
        (lambda x: _total[(2,)](x, x.clone(), 21, 32), "races"),
    ],
)
def test_what_a_gpu_would_get_wrong_is_a_fault(call, message):
    x = noise(21)
    with Tracer(), pytest.raises(Exception, match=message) as caught:
        call(x)
    assert MemoryFault.__name__ in repr(caught.value) or isinstance(caught.value, MemoryFault)


def test_a_masked_lane_without_other_holds_nan():
    y = torch.empty(1)
    _total[(1,)](noise(5), y, 5, 8)
    assert torch.isnan(y).all()


def test_uninitialised_memory_is_nan():
    assert torch.isnan(torch.empty(3)).all()


def test_an_interleaving_exposes_a_lost_update():
    found = set()
    for seed in range(6):
        x = torch.zeros(1)
        with Tracer(interleave=seed, shadow=False):
            _update[(4,)](x, 8)
        found.add(float(x))
    assert min(found) < 4.0


def test_bfloat16_rounds_to_nearest_even():
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5e38, 3e-40, np.inf], dtype=np.float32)
    want = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    assert np.array_equal(widen(round_to_bfloat16(values)), want)


def test_bfloat16_products_are_accumulated_in_float32():
    a, b = (noise(16, 16, seed=s, dtype=torch.bfloat16) for s in (1, 2))
    c = torch.empty(16, 16)
    _product[(1,)](a, b, c, 16)
    assert torch.allclose(c, a.float() @ b.float(), rtol=1e-5, atol=1e-5)
