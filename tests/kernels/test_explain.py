"""kernels.explain names the implementation that runs and the reason."""

import pytest
import torch

import kernels
from kernels import _register

X = {"x": (8, 128, 64, 32, 32), "weight": (8, 64, 64, 3, 3)}


def test_on_a_cpu_the_fast_implementation_serves_float32():
    assert kernels.explain("batch_norm", X).implementation == "cpu"
    wide = kernels.explain("batch_norm", X, dtype=torch.float64)
    assert (wide.implementation, wide.why) == ("reference", "cpu takes float32")
    assert kernels.explain("linear_norms").why == "there is no implementation for cpu"


def test_it_agrees_with_what_runs():
    for name, op in _register._ops.items():
        fill = _register.choose(op.folder, name, "cpu", torch.float32)
        where = "reference" if fill is None else fill.__module__.rpartition(".")[2]
        assert kernels.explain(name).implementation == where


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_op_is_explained_in_a_sentence(device, dtype):
    for name in _register._ops:
        found = kernels.explain(name, None, device, dtype)
        assert found.implementation in ("reference", "cpu", "cuda", "triton")
        assert str(found).startswith(f"{name} on {device} in {str(dtype)[6:]}: ")
        assert len(found.why) > 15
        assert "\n" not in str(found)


def test_the_form_of_gradient_norms_is_told_where_there_is_a_choice():
    small = {"x": (8, 128, 64, 4, 4), "weight": (8, 64, 64, 3, 3)}
    assert kernels.explain("conv_norms", small, "cuda").how.startswith("gram form: ")
    assert kernels.explain("conv_norms", small).how == "square form, whatever the layer"


def test_the_environment_forces_the_reference(monkeypatch):
    monkeypatch.setenv("SHADOW_KERNELS", "reference")
    found = kernels.explain("batch_norm", X)
    assert str(found) == (
        "batch_norm on cpu in float32: reference (SHADOW_KERNELS=reference forces it)"
    )
    assert _register.choose("batch_norm", "batch_norm", "cpu", torch.float32) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU here decides by its self-check")
def test_for_a_gpu_it_says_how_the_shapes_are_cut():
    found = kernels.explain("batch_norm", X, "cuda", torch.bfloat16)
    assert found.implementation == "triton"
    assert "no GPU here" in found.why
    assert found.how == "1 blocks of 64 channels, tiles of 32 rows, 512 rows a program"
    assert kernels.explain("conv2d", X, "cuda").how == "one cuDNN call a model"
    pointwise = X | {"weight": (8, 64, 64, 1, 1)}
    assert kernels.explain("conv2d", pointwise, "cuda").how == "one matrix product a model"


def test_unknown_ops_and_shapes_are_refused():
    with pytest.raises(ValueError, match="unknown op 'norm': known are"):
        kernels.explain("norm")
    with pytest.raises(ValueError, match="explain got shapes"):
        kernels.explain("conv_norms", {"x": (1, 2, 3, 4, 5)})
