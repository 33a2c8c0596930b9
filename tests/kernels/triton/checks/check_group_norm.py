"""Group norm's Triton kernels, interpreted: numerics, memory, order, bytes."""

import pytest
import torch
from triton_case import (
    INTERPRETED,
    Tracer,
    assert_close,
    assert_rounded,
    gradients,
    kernels,
    noise,
    served,
    untouched_memory,
)

from kernels.group_norm import triton as launchers

CASES = {
    "plain": (1, 3, 6, 5, 7, 3, {}),
    "relu": (3, 3, 24, 9, 9, 8, {"relu": True}),
    "residual": (3, 5, 16, 7, 5, 4, {"relu": True, "residual": True}),
    "residual without relu": (1, 2, 8, 4, 4, 2, {"residual": True}),
    "groups of three over blocks": (1, 2, 99, 5, 5, 33, {"relu": True}),
    "one group wider than a block": (1, 3, 80, 4, 4, 1, {"relu": True}),
    "one channel a group": (3, 2, 5, 6, 6, 5, {"relu": True}),
    "one pixel": (5, 7, 12, 1, 1, 2, {"relu": True}),
    "no affine": (1, 3, 12, 5, 5, 4, {"affine": False, "relu": True}),
    "wide images": (1, 1, 8, 37, 31, 4, {"relu": True, "residual": True}),
}
NAMES = ("dx", "dweight", "dbias", "dresidual")


def case(models, samples, channels, height, width, groups, *, dtype=torch.float32, **options):
    shape = (models, samples, channels, height, width)
    affine, residual = options.get("affine", True), options.get("residual", False)
    inputs = (
        noise(*shape, seed=1, dtype=dtype, scale=2.0, shift=3.0),
        noise(models, channels, seed=2, shift=0.5) if affine else None,
        noise(models, channels, seed=3) if affine else None,
        noise(*shape, seed=6, dtype=dtype) if residual else None,
    )
    return inputs, [noise(*shape, seed=7, dtype=dtype)], (groups, options.get("relu", False))


def apply(inputs, weights, options):
    groups, relu = options

    def model(x, weight, bias, residual):
        return kernels.group_norm(x, groups, weight, bias, relu=relu, residual=residual)

    return gradients(model, inputs, weights)


def textbook(inputs, weights, options):
    groups, relu = options
    leaves = [None if t is None else t.double().requires_grad_() for t in inputs]
    outputs = []
    for m in range(inputs[0].shape[0]):
        x, weight, bias, residual = (None if t is None else t[m] for t in leaves)
        y = torch.nn.functional.group_norm(x, groups, weight, bias)
        y = y if residual is None else y + residual
        outputs.append(y.relu() if relu else y)
    y = torch.stack(outputs)
    given = [t for t in leaves if t is not None]
    grads = iter(torch.autograd.grad((y * weights[0].double()).sum(), given))
    return y.detach(), [None if t is None else next(grads) for t in leaves]


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_equal_float64_autograd(name):
    assert served("group_norm")
    *shape, options = CASES[name]
    inputs, weights, rest = case(*shape, **options)
    with Tracer():
        (y,), grads = apply(inputs, weights, rest)
    want, want_grads = textbook(inputs, weights, rest)
    assert_close(f"{name}: y", y, want, tolerance=INTERPRETED)
    for label, got, wanted in zip(NAMES, grads, want_grads, strict=True):
        if wanted is not None:
            assert_close(f"{name}: {label}", got, wanted, tolerance=INTERPRETED)


@pytest.mark.parametrize("name", ["relu", "groups of three over blocks"])
def test_bfloat16_equals_the_rounded_reference(name):
    *shape, options = CASES[name]
    inputs, weights, rest = case(*shape, dtype=torch.bfloat16, **options)
    with Tracer():
        (y,), grads = apply(inputs, weights, rest)
    want, want_grads = textbook(inputs, weights, rest)
    assert_rounded("y", y, want)
    assert_rounded("dx", grads[0], want_grads[0])
    assert_close("dweight", grads[1], want_grads[1], tolerance=INTERPRETED)


@pytest.mark.parametrize("name", ["residual", "one pixel"])
def test_a_model_is_the_same_alone_and_in_any_order(name):
    *shape, options = CASES[name]
    inputs, weights, rest = case(*shape, **options)

    def everything(inputs, weights, **turn):
        with Tracer(**turn):
            out, grads = apply(inputs, weights, rest)
        return [t for t in (*out, *grads) if t is not None]

    expected = everything(inputs, weights)
    for turn in [{"order": i} for i in range(5)] + [{"interleave": i} for i in range(3)]:
        found = everything(inputs, weights, **turn)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), turn
    one = [None if t is None else t[1:2] for t in inputs]
    alone = everything(one, [weights[0][1:2]])
    assert all(torch.equal(a[0], b[1]) for a, b in zip(alone, expected, strict=True))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [32, 64])
def test_bytes_moved_are_within_a_twentieth_of_the_floor(channels, dtype, residual):
    inputs, weights, rest = case(
        1, 2, channels, 16, 16, 8, dtype=dtype, relu=True, residual=residual
    )
    with Tracer() as trace:
        apply(inputs, weights, rest)
    floor = (8 + 3 * residual) * inputs[0].numel() * inputs[0].element_size()
    assert floor <= trace.moved() <= 1.05 * floor


def test_bytes_moved_are_exactly_those_of_the_formula():
    inputs, weights, rest = case(3, 5, 24, 13, 13, 8, relu=True)
    with Tracer() as trace:
        apply(inputs, weights, rest)
    samples, channels, pixels, groups = 5, 24, 169, 8
    vector, statistics = 4 * channels, 4 * 2 * groups
    forward = samples * (3 * pixels * vector + 2 * vector + statistics)
    backward = samples * (5 * pixels * vector + 2 * vector + statistics + 2 * vector)
    merge = samples * 2 * vector + 2 * vector
    assert trace.moved() == 3 * (forward + backward + merge)


@pytest.mark.parametrize("layout", ["models last", "batch last", "channels second"])
def test_any_strides_are_accepted(layout):
    inputs, weights, rest = case(3, 4, 6, 5, 7, 3, relu=True, residual=True)
    (expected,), expected_grads = apply(inputs, weights, rest)
    axis = {"models last": 0, "batch last": 1, "channels second": 3}[layout]
    turned = [t.movedim(axis, -1).contiguous().movedim(-1, axis) for t in (inputs[0], inputs[3])]
    (found,), grads = apply((turned[0], inputs[1].T.contiguous().T, inputs[2], turned[1]),
                            weights, rest)  # fmt: skip
    assert torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected_grads, strict=True))


def test_an_empty_batch_is_left_to_the_reference():
    assert kernels.group_norm(torch.ones(0, 4, 3, 3), 2, None, None).shape == (0, 4, 3, 3)


def test_index_arithmetic_holds_beyond_two_to_the_31_elements():
    models, samples, channels, size = 25, 512, 64, 64
    sample = channels * size * size
    assert models * samples * sample > 2**31
    with untouched_memory():
        shape = (models, samples, channels, size, size)
        strides = (samples * sample, sample, 1, size * channels, channels)
        memory = [torch.empty(models * samples * sample, dtype=torch.bfloat16) for _ in range(2)]
        x, y = (m.as_strided(shape, strides) for m in memory)
        last = noise(sample, seed=1, dtype=torch.bfloat16)
        memory[0][-sample:] = last
        mean, sigma = (torch.empty(models, samples, 1) for _ in range(2))
        with Tracer(shadow=False, only_last=1):
            launchers.group_norm((y, mean, sigma), x, None, None, None, 1, 0.0, False)
        want = torch.nn.functional.layer_norm(last.double(), last.shape, eps=0.0)
        assert_rounded("y", memory[1][-sample:], want)
