"""Norms with `pool`: on a CPU the two ops, the same to the bit; what it takes and refuses."""

import pytest
import torch

import kernels
from kernels import pool

BATCH, GROUP = "batch_norm", "group_norm"
NORMS = pytest.mark.parametrize("norm", [BATCH, GROUP])


def run(norm, size, residual=None, image=(7, 6)):
    """Output and gradients, pooled by the norm itself, or after it (size 0)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 12, *image, generator=generator).requires_grad_()
    weight = torch.rand(3, 12, generator=generator).requires_grad_()
    given = [x, weight] if residual is None else [x, weight, residual(x)]

    def model(x, weight, residual=None):
        options = {"relu": True, "residual": residual} | ({"pool": size} if size else {})
        if norm == BATCH:
            y = kernels.batch_norm(x, weight, None, None, None, training=True, **options).y
        else:
            y = kernels.group_norm(x, 4, weight, None, **options)
        return y if size else kernels.max_pool(y)

    y = torch.func.vmap(model)(*given)
    return y, *torch.autograd.grad(y.square().sum(), [x, weight])


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@NORMS
def test_on_a_cpu_it_is_the_two_ops_one_after_the_other(norm):
    assert same(run(norm, 2), run(norm, 0))
    assert same(run(norm, 2, torch.zeros_like), run(norm, 0, torch.zeros_like))
    assert run(norm, 3)[0].shape == (3, 5, 12, 2, 2)


@NORMS
def test_where_it_is_fused_the_numbers_are_the_same(norm, monkeypatch):
    apart = run(norm, 2)
    called = []
    monkeypatch.setattr(pool, "_one_op", lambda device: called.append(device) or True)
    assert same(run(norm, 2), apart)
    assert len(called) == 1
    run(norm, 2, torch.zeros_like)
    run(norm, 3)
    assert len(called) == 1, "a residual, or another window, is not fused"


@NORMS
def test_a_window_that_does_not_fit_is_refused(norm):
    with pytest.raises(ValueError, match="a size from 1 to 15 that fits the image"):
        run(norm, 8)
    with pytest.raises(ValueError, match="fits the image"):
        run(norm, 2, image=(1, 6))
