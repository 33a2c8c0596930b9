"""batch_norm with `pool`: on a CPU the two ops, the same to the bit; what it takes and refuses."""

import pytest
import torch

import kernels
from kernels.batch_norm import pooled


def run(pool, residual=None, size=(7, 6)):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 12, *size, generator=generator).requires_grad_()
    weight = torch.rand(3, 12, generator=generator).requires_grad_()
    given = [x, weight] if residual is None else [x, weight, residual(x)]

    def model(x, weight, residual=None):
        options = {"training": True, "relu": True, "residual": residual}
        if pool:
            return kernels.batch_norm(x, weight, None, None, None, pool=pool, **options).y
        return kernels.max_pool(kernels.batch_norm(x, weight, None, None, None, **options).y)

    y = torch.func.vmap(model)(*given)
    return y, *torch.autograd.grad(y.square().sum(), [x, weight])


def test_on_a_cpu_it_is_the_two_ops_one_after_the_other():
    assert all(torch.equal(a, b) for a, b in zip(run(2), run(0), strict=True))
    residual = torch.zeros_like
    assert all(torch.equal(a, b) for a, b in zip(run(2, residual), run(0, residual), strict=True))
    assert run(3)[0].shape == (3, 5, 12, 2, 2)


def test_where_it_is_fused_the_numbers_are_the_same(monkeypatch):
    apart = run(2)
    called = []
    monkeypatch.setattr(pooled, "fuses", lambda device: called.append(device) or True)
    assert all(torch.equal(a, b) for a, b in zip(run(2), apart, strict=True))
    assert called


def test_a_window_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="a size from 1 to 15 that fits the image"):
        run(8)
    with pytest.raises(ValueError, match="fits the image"):
        run(2, size=(1, 6))
