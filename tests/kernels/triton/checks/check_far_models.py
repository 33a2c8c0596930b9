"""Index arithmetic of every kernel at full size: a model that lies beyond 2³¹ numbers.

Each op runs on its examples twice: as they are, and with the third model of every tensor, inputs
and outputs, some 2³¹ numbers behind the first, in memory that nothing else touches. A 32-bit offset
would leave the tensor, which the tracer sees, or read something else.
"""

import contextlib
import importlib

import pytest
import torch
from check_selfcheck import TRITON, implementation
from triton_case import Tracer, kernels, noise, untouched_memory

from kernels import _examples

FAR = 2**30 + 64
"""A pitch that is a 32-bit argument itself; twice it is beyond 2³¹."""

_examples.MODELS = 3

LAUNCHERS = [
    importlib.import_module(f"kernels.{folder}.triton")
    for folder in ("batch_norm", "group_norm", "grad_norm")
]


def far(stack):
    """The stacked tensor with its models FAR numbers apart."""
    if not isinstance(stack, torch.Tensor) or not stack.numel() or stack.stride(0) == 0:
        return stack
    last = stack[-1]
    span = 1 + sum((n - 1) * s for n, s in zip(last.shape, last.stride(), strict=True))
    memory = torch.empty(FAR * (len(stack) - 1) + span, dtype=stack.dtype)
    return memory.as_strided(stack.shape, (FAR, *last.stride())).copy_(stack)


@contextlib.contextmanager
def pitched():
    """Launchers take models that lie FAR apart as they are, without a copy."""
    with pytest.MonkeyPatch.context() as patch:
        for module in LAUNCHERS:
            cut, plain = module.tiles, module.activation

            def tiles(rows, channels, cut=cut):
                return cut(rows, channels)._replace(pitch=FAR)

            def activation(x, pitch, plain=plain):
                out = plain(x, pitch)
                assert out.data_ptr() == x.data_ptr(), "copied"
                return out

            patch.setattr(module, "tiles", tiles)
            patch.setattr(module, "activation", activation)
        yield


def run(name, fill, args):
    out = _examples.outputs(name, args)
    answer = fill(*args) if name == "sgd" else fill(out, *args)
    assert answer is not NotImplemented
    return out


@pytest.mark.parametrize("name", TRITON)
def test_models_beyond_two_to_the_31_numbers_are_the_same(name, monkeypatch):
    fill, outputs = implementation(name), _examples.outputs
    for args in _examples.EXAMPLES[name](torch.bfloat16):
        near = [_dense(a) for a in args]
        with untouched_memory():
            apart = [far(a) for a in near]
            found = run(name, fill, near)
            with pitched(), Tracer(shadow=False), monkeypatch.context() as patch:
                if name != "sgd":
                    patch.setattr(_examples, "outputs", lambda *a: tuple(map(far, outputs(*a))))
                away = run(name, fill, apart)
        for one, other in zip(found, away, strict=True):
            assert other.stride(0) == FAR or not other.numel()
            assert torch.equal(one, other)
            assert not one.isnan().any()


def _dense(value):
    """Activations as the kernels want them; everything else as it is."""
    if not isinstance(value, torch.Tensor) or value.dim() != 5 or not value.is_floating_point():
        return value.clone() if isinstance(value, torch.Tensor) and value.stride(0) else value
    from kernels._layout import as_activation

    return as_activation(value)


def test_a_resident_image_beyond_two_to_the_31_bytes_is_found():
    count = 2**31 // 3072 + 3
    with untouched_memory():
        images = torch.empty(count, 32, 32, 3, dtype=torch.uint8)
        picture = noise(32, 32, 3, seed=1).abs().mul(80).clamp(0, 255).to(torch.uint8)
        images[-1] = picture
        index, key = torch.tensor([[count - 1]]), torch.zeros(1, dtype=torch.int64)
        statistics = ([0.5] * 3, [0.25] * 3)
        with Tracer(shadow=False):
            batch = kernels.augment(images, index, index, key, *statistics)
        want = kernels.augment(picture[None], index * 0, index, key, *statistics)
    assert torch.equal(batch, want)
