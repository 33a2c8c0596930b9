"""The start-up self-check admits every Triton kernel, and refuses one that is a little wrong."""

import importlib

import pytest
import torch
import triton_case  # noqa: F401  (puts the interpreter and the GPU's layouts in place)

from kernels import _examples, _selfcheck

TRITON = [
    "batch_norm", "batch_norm_backward", "batch_norm_pool", "batch_norm_pool_backward",
    "group_norm", "group_norm_backward", "group_norm_pool", "group_norm_pool_backward",
    "cross_entropy",
    "cross_entropy_backward", "cross_entropy_phi", "cross_entropy_phi_backward", "augment",
    "conv_norms", "linear_norms", "sgd",
]  # fmt: skip
_examples.SHAPES = ((5, 24, 9, 7), (3, 40, 1, 1))
_examples.CONVS = _examples.CONVS[:2]


def implementation(name):
    folder = _examples.FOLDER.get(name, name.removesuffix("_backward"))
    return getattr(importlib.import_module(f"kernels.{folder}.triton"), name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TRITON)
def test_every_kernel_is_admitted(name, dtype):
    assert _selfcheck.examine(name, implementation(name), "cpu", dtype) == ""


@pytest.mark.parametrize("name", ["batch_norm_backward", "conv_norms"])
def test_a_kernel_that_is_off_is_refused_with_the_reason(name):
    right = implementation(name)

    def wrong(out, *args):
        right(out, *args)
        out[0].view(-1)[-1:].add_(0.5) if out[0].is_contiguous() else out[0].mul_(1.01)

    assert "output 0 is off by" in _selfcheck.examine(name, wrong, "cpu", torch.float32)
