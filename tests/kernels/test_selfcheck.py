"""The start-up self-check of GPU implementations: verdicts, their cache, and cuDNN's code paths."""

import json
from pathlib import Path

import pytest
import torch

from kernels import _examples, _register, _selfcheck
from kernels.conv import cuda


def right(out, logits, labels):
    for m in range(logits.shape[0]):
        out[0][m] = torch.nn.functional.cross_entropy(logits[m], labels[m], reduction="none")


def wrong(out, logits, labels):
    right(out, logits, labels)
    out[0][-1, -1] *= 1.5


def failing(out, logits, labels):
    raise RuntimeError("no such kernel\nand more")


def test_a_wrong_or_failing_implementation_is_refused_with_its_reason():
    examine = lambda fill: _selfcheck.examine("cross_entropy", fill, "cpu", torch.float32)  # noqa: E731
    assert examine(right) == ""
    assert "output 0 is off by" in examine(wrong)
    assert examine(failing) == "it failed: RuntimeError: no such kernel"
    assert "no example" in _selfcheck.examine("unheard", right, "cpu", torch.float32)


def test_library_products_have_room_for_tf32_and_nothing_else_has():
    for name in ("conv2d", "conv2d_backward", "probed_conv2d"):
        assert _selfcheck._limit(name, torch.float32) == _selfcheck.TF32_LIMIT
    for name in ("batch_norm", "conv_norms", "linear_norms"):
        assert _selfcheck._limit(name, torch.float32) == _selfcheck.LIMITS[torch.float32]
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert _selfcheck._limit("conv2d", torch.float32) == _selfcheck.LIMITS[torch.float32]


def test_verdicts_are_kept_by_source_and_type(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _selfcheck.reason("cross_entropy", right, "cpu", torch.float32) == ""
    (path,) = tmp_path.rglob("*.json")
    assert json.loads(path.read_text())["reason"] == ""
    assert _selfcheck.reason("cross_entropy", wrong, "cpu", torch.float32) == ""
    assert "is off by" in _selfcheck.reason("cross_entropy", wrong, "cpu", torch.bfloat16)


def test_a_verdict_is_void_once_any_source_of_the_kernels_changed(monkeypatch):
    before, read = _selfcheck._key("group_norm", torch.float32), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda p: read(p) + b"#" * (p.name == "_launch.py"))
    assert _selfcheck._key("group_norm", torch.float32) != before


def test_a_gpu_implementation_serves_only_if_it_is_admitted(monkeypatch, caplog):
    verdicts = iter(["", "output 0 is off by 1"])
    monkeypatch.setattr(_selfcheck, "reason", lambda *_: next(verdicts))
    assert _register._fast("conv", "conv2d", "cuda", torch.float32) is cuda.conv2d
    assert _register._fast("conv", "conv2d", "cuda", torch.float32) is None
    assert "conv2d on cuda runs its reference: output 0 is off by 1" in caplog.text


@pytest.mark.parametrize("name", ["conv2d", "conv2d_backward"])
def test_convolutions_per_model_and_pointwise_products_equal_the_reference(name, monkeypatch):
    """On a CPU the library call is not cuDNN's; views, products and gradients are the same."""
    monkeypatch.setattr("kernels._layout.channels_last", lambda device, channels: True)
    assert _selfcheck.examine(name, getattr(cuda, name), "cpu", torch.float32) == ""


STRIDED = [(11, 3, 2, 1), (8, 3, 2, 1), (9, 5, 3, 0), (7, 1, 2, 0)]


@pytest.mark.parametrize(("size", "kernel", "stride", "padding"), STRIDED)
def test_the_gradient_of_x_is_a_transposed_convolution_with_spare_rows(
    size, kernel, stride, padding
):
    """What cuDNN is asked for on a GPU, in plain torch."""
    x, weight = (
        torch.randn(2, 3, size, size + 1).double(),
        torch.randn(4, 3, kernel, kernel).double(),
    )
    x.requires_grad_()
    y = torch.conv2d(x, weight, None, stride, padding)
    grad = torch.randn_like(y)
    (want,) = torch.autograd.grad(y, x, grad)
    spare = cuda._spare(x, weight, stride, padding)
    found = torch.conv_transpose2d(grad, weight, None, stride, padding, spare)
    assert torch.allclose(found, want)


def test_every_op_with_a_gpu_implementation_has_examples():
    missing = []
    for name, op in _register._ops.items():
        for file in ("cuda", "triton"):
            if _register._function(op.folder, file, name) and name not in _examples.EXAMPLES:
                missing.append(name)
    assert not missing
