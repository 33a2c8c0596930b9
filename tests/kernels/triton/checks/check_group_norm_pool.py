"""Group norm with pooling in Triton, interpreted: numerics, memory, order, bytes."""

import pytest
import torch
from check_group_norm import NAMES, case
from triton_case import (
    INTERPRETED,
    Tracer,
    assert_close,
    assert_rounded,
    gradients,
    kernels,
    noise,
)

CASES = {
    "plain": (1, 3, 6, 6, 8, 3, {}),
    "relu": (3, 3, 24, 8, 10, 8, {"relu": True}),
    "odd images": (5, 3, 7, 9, 5, 1, {"relu": True}),
    "one window": (3, 7, 12, 2, 2, 4, {"relu": True}),
    "cut off windows": (1, 5, 10, 3, 3, 2, {"relu": True}),
    "groups of three over blocks": (1, 2, 99, 4, 4, 33, {"relu": True}),
    "one group wider than a block": (1, 3, 80, 4, 5, 1, {"relu": True}),
    "no affine": (1, 3, 12, 6, 6, 4, {"affine": False, "relu": True}),
    "wide images": (1, 1, 8, 37, 30, 4, {"relu": True}),
}


def pooled_case(name, dtype=torch.float32):
    *shape, options = CASES[name]
    inputs, _, rest = case(*shape, dtype=dtype, **options)
    models, samples, channels, height, width, _ = shape
    slope = noise(models, samples, channels, height // 2, width // 2, seed=7, dtype=dtype)
    return inputs[:3], [slope], rest


def apply(inputs, weights, options):
    groups, relu = options
    return gradients(
        lambda x, w, b: kernels.group_norm(x, groups, w, b, relu=relu, pool=2), inputs, weights
    )


def textbook(inputs, weights, options):
    groups, relu = options
    leaves = [None if t is None else t.double().requires_grad_() for t in inputs]
    outputs = []
    for m in range(inputs[0].shape[0]):
        one = [None if t is None else t[m] for t in leaves]
        y = torch.nn.functional.group_norm(one[0], groups, *one[1:])
        outputs.append(torch.nn.functional.max_pool2d(y.relu() if relu else y, 2))
    y = torch.stack(outputs)
    given = [t for t in leaves if t is not None]
    grads = iter(torch.autograd.grad((y * weights[0].double()).sum(), given))
    return y.detach(), [None if t is None else next(grads) for t in leaves]


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_equal_float64_autograd(name):
    inputs, weights, rest = pooled_case(name)
    with Tracer() as trace:
        (y,), grads = apply(inputs, weights, rest)
    assert "backward_pooled" in {launch.name for launch in trace.launches}
    want, want_grads = textbook(inputs, weights, rest)
    assert_close(f"{name}: y", y, want, tolerance=INTERPRETED)
    for label, got, wanted in zip(NAMES, grads, want_grads, strict=False):
        if wanted is not None:
            assert_close(f"{name}: {label}", got, wanted, tolerance=INTERPRETED)


@pytest.mark.parametrize("name", ["relu", "odd images"])
def test_bfloat16_equals_the_rounded_reference(name):
    inputs, weights, rest = pooled_case(name, torch.bfloat16)
    with Tracer():
        (y,), grads = apply(inputs, weights, rest)
    want, want_grads = textbook(inputs, weights, rest)
    assert_rounded("y", y, want)
    assert_rounded("dx", grads[0], want_grads[0])
    assert_close("dweight", grads[1], want_grads[1], tolerance=INTERPRETED)


@pytest.mark.parametrize("name", ["odd images", "one window"])
def test_a_model_is_the_same_alone_and_in_any_order(name):
    inputs, weights, rest = pooled_case(name)

    def everything(inputs, weights, **turn):
        with Tracer(**turn):
            out, grads = apply(inputs, weights, rest)
        return [*out, *grads]

    expected = everything(inputs, weights)
    for turn in [{"order": i} for i in range(5)] + [{"interleave": i} for i in range(3)]:
        found = everything(inputs, weights, **turn)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), turn
    alone = everything([t[1:2] for t in inputs], [weights[0][1:2]])
    assert all(torch.equal(a[0], b[1]) for a, b in zip(alone, expected, strict=True))


def test_any_strides_and_an_empty_batch_are_accepted():
    inputs, weights, rest = pooled_case("relu")
    expected, expected_grads = apply(inputs, weights, rest)
    x = inputs[0].movedim(1, -1).contiguous().movedim(-1, 1)
    found, grads = apply((x, *inputs[1:]), weights, rest)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(grads[0], expected_grads[0])
    assert kernels.group_norm(torch.ones(0, 4, 4, 6), 2, None, None, pool=2).shape == (0, 4, 2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [32, 64])
def test_bytes_moved_are_within_a_twentieth_of_the_floor(channels, dtype):
    """As batch norm's: forward 2¼, backward 3½ activations."""
    inputs, _, rest = case(1, 2, channels, 16, 16, 8, dtype=dtype, relu=True)
    slope = noise(1, 2, channels, 8, 8, seed=7, dtype=dtype)
    with Tracer() as trace:
        apply(inputs[:3], [slope], rest)
    floor = 5.75 * inputs[0].numel() * inputs[0].element_size()
    assert floor <= trace.moved() <= 1.05 * floor


def test_bytes_moved_are_exactly_those_of_the_formula():
    inputs, _, rest = case(3, 5, 24, 13, 13, 8, relu=True)
    slope = noise(3, 5, 24, 6, 6, seed=7)
    with Tracer() as trace:
        apply(inputs[:3], [slope], rest)
    samples, groups, vector = 5, 8, 4 * 24
    whole, inside, maxima = (n * vector for n in (13 * 13, 12 * 12, 6 * 6))
    statistics = 4 * 2 * groups
    forward = samples * (whole + inside + maxima + 2 * vector + statistics)
    backward = samples * (inside + 2 * maxima + 2 * whole + 2 * vector + statistics + 2 * vector)
    merge = samples * 2 * vector + 2 * vector
    assert trace.moved() == 3 * (forward + backward + merge)
