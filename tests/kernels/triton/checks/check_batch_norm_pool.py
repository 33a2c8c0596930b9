"""Batch norm with pooling in Triton, interpreted: numerics, memory, order, bytes, one op."""

import importlib
import itertools

import pytest
import torch
from check_batch_norm import HINGE, NAMES, SQUARE, apply, case, textbook
from triton_case import (
    INTERPRETED,
    Tracer,
    assert_close,
    assert_rounded,
    gradients,
    kernels,
    noise,
    untouched_memory,
)

CASES = {
    "plain": (1, 3, 5, 8, 6, {}),
    "relu": (3, 3, 24, 12, 10, {"relu": True}),
    "odd images": (3, 5, 7, 9, 5, {"relu": True, "penalty": HINGE, "probe": True}),
    "odd rows": (1, 2, 16, 7, 4, {"relu": True}),
    "odd columns": (5, 2, 3, 4, 7, {"penalty": SQUARE}),
    "one window": (3, 37, 10, 2, 2, {"relu": True, "probe": True}),
    "cut off windows": (1, 5, 10, 3, 3, {"relu": True, "probe": True}),
    "over blocks": (1, 3, 130, 4, 4, {"relu": True, "probe": True, "penalty": HINGE}),
    "several chunks": (1, 3, 1, 41, 40, {"relu": True, "probe": True}),
    "no affine": (3, 5, 6, 6, 6, {"affine": False, "relu": True, "penalty": HINGE}),
    "eval": (3, 5, 12, 7, 8, {"training": False, "relu": True, "probe": True}),
    "eval penalty": (3, 3, 8, 5, 5, {"training": False, "penalty": SQUARE}),
}
FEW = ("relu", "odd images", "over blocks", "eval")


def pooled_case(name, **extra):
    *shape, options = CASES[name]
    return case(*shape, pool=2, **options, **extra)


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_float64_autograd(name):
    inputs, weights, options = pooled_case(name)
    with Tracer() as trace:
        outputs, grads = apply(inputs, weights, options)
    assert "reduce_pooled" in {launch.name for launch in trace.launches}
    wanted, wanted_grads = textbook(inputs, weights, options)
    assert_close(f"{name}: y", outputs[0], wanted[0], tolerance=INTERPRETED)
    assert_close(f"{name}: penalty", outputs[1], wanted[1], tolerance=INTERPRETED)
    for label, got, want in zip(NAMES, grads, wanted_grads, strict=True):
        if want is not None:
            assert_close(f"{name}: {label}", got, want, tolerance=INTERPRETED)


@pytest.mark.parametrize("name", FEW)
def test_bfloat16_equals_the_rounded_reference(name):
    inputs, weights, options = pooled_case(name, dtype=torch.bfloat16)
    with Tracer():
        outputs, grads = apply(inputs, weights, options)
    wanted, wanted_grads = textbook(inputs, weights, options)
    assert_rounded("y", outputs[0], wanted[0])
    assert_rounded("dx", grads[0], wanted_grads[0])
    for label, got, want in zip(NAMES[1:3], grads[1:3], wanted_grads[1:3], strict=True):
        assert_close(label, got, want, tolerance=INTERPRETED)


@pytest.mark.parametrize("name", FEW)
def test_any_order_of_programs_gives_the_same_bits(name):
    inputs, weights, options = pooled_case(name)
    turns = [{}] + [{"order": i} for i in range(5)] + [{"interleave": i} for i in range(3)]
    expected = None
    for turn in turns:
        with Tracer(**turn):
            outputs, grads = apply(inputs, weights, options)
        found = [t for t in (*outputs, *grads) if t is not None]
        expected = expected or found
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), turn


@pytest.mark.parametrize("name", ["odd images", "eval"])
def test_a_model_is_the_same_alone(name):
    inputs, weights, options = pooled_case(name)
    outputs, grads = apply(inputs, weights, options)
    for m in range(3):
        alone = [None if t is None else t[m : m + 1] for t in inputs]
        one, one_grads = apply(alone, [w[m : m + 1] for w in weights], options)
        for got, want in zip((*one, *one_grads), (*outputs, *grads), strict=True):
            assert got is None or torch.equal(got[0], want[m])


def test_it_equals_norm_and_pooling_one_after_the_other():
    """Ties too: the first of a window's equals gets the gradient."""
    inputs, weights, options = pooled_case("odd images")
    inputs = (inputs[0].round(), *inputs[1:])
    found, found_grads = apply(inputs, weights, options)

    def apart(x, weight, bias, residual, probe):
        options.pop("pool", None)
        out = kernels.batch_norm(x, weight, bias, None, None, probe_B=probe, **options)
        return kernels.max_pool(out.y), out.penalty

    want, want_grads = gradients(apart, (*inputs[:3], *inputs[5:]), weights)
    assert torch.equal(found[0], want[0])
    assert torch.equal(found[1], want[1])
    for name, a, b in zip(NAMES, found_grads, want_grads, strict=True):
        if a is not None:
            assert_close(name, a, b, tolerance=INTERPRETED)


def test_any_strides_and_an_empty_batch_are_accepted():
    inputs, weights, options = pooled_case("relu")
    expected, expected_grads = apply(inputs, weights, options)
    x = inputs[0].movedim(1, -1).contiguous().movedim(-1, 1)
    found, grads = apply((x, *inputs[1:]), weights, options)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(grads[0], expected_grads[0])
    out = kernels.batch_norm(torch.ones(0, 4, 4, 6), None, None, torch.zeros(4), torch.ones(4),
                             training=False, pool=2)  # fmt: skip
    assert out.y.shape == (0, 4, 2, 3)


@pytest.mark.parametrize(
    ("channels", "dtype"), list(itertools.product((32, 64), (torch.float32, torch.bfloat16)))
)
def test_bytes_moved_are_within_a_twentieth_of_the_floor(channels, dtype):
    """Forward 2¼, backward 3½ activations; norm and pooling apart move 10½ and the places."""
    inputs, weights, options = case(1, 4, channels, 16, 16, dtype=dtype, relu=True, pool=2)
    with Tracer() as trace:
        apply(inputs, weights, options)
    floor = 5.75 * inputs[0].numel() * inputs[0].element_size()
    assert floor <= trace.moved() <= 1.05 * floor


def test_bytes_moved_are_exactly_those_of_the_formula():
    inputs, weights, options = case(3, 5, 24, 13, 13, relu=True, pool=2)
    with Tracer() as trace:
        apply(inputs, weights, options)
    whole, inside, maxima = (5 * n * 24 * 4 for n in (13 * 13, 12 * 12, 6 * 6))
    vector, chunks, few, fewer, groups = 24 * 4, 4, 3, 4, 3
    part = 2 * vector
    forward = whole + chunks * (part + 1.5 * part) + 2 * vector  # statistics and their merge
    forward += inside + maxima + few * 4 * vector + 4
    backward = inside + maxima + groups * (4 * vector + 2 * part)
    backward += 3 * vector + 2 * vector + part  # merge
    backward += 2 * whole + maxima + fewer * (4 * vector + part)
    assert trace.moved() == 3 * (forward + backward)


def test_index_arithmetic_holds_beyond_two_to_the_31_elements():
    launchers = importlib.import_module("kernels.batch_norm.triton")
    models, samples, channels, size = 25, 512, 64, 64
    sample = channels * size * size
    assert models * samples * sample > 2**31
    with untouched_memory():
        shape = (models, samples, channels, size, size)
        strides = (samples * sample, sample, 1, size * channels, channels)
        memory = [torch.empty(models * samples * sample, dtype=torch.bfloat16) for _ in range(2)]
        x, dx = (m.as_strided(shape, strides) for m in memory)
        half = (models, samples, channels, size // 2, size // 2)
        strides = (samples * sample // 4, sample // 4, 1, size // 2 * channels, channels)
        small = [torch.empty(models * samples * sample // 4, dtype=torch.bfloat16)
                 for _ in range(2)]  # fmt: skip
        y, dy = (m.as_strided(half, strides) for m in small)
        last = noise(sample, seed=1, dtype=torch.bfloat16)
        slope = noise(sample // 4, seed=2, dtype=torch.bfloat16)
        memory[0][-sample:], small[1][-sample // 4 :] = last, slope
        mean, var = torch.zeros(models, channels), torch.ones(models, channels)
        rounds, launchers.rounds = launchers.rounds, lambda x, n: [(0, models)]
        out = (y, mean.clone(), var.clone(), torch.empty(models))
        nothing = torch.empty(models, 0)
        try:
            with Tracer(shadow=False, only_last=1):
                launchers.batch_norm_pool(out, x, None, None, mean, var, None, 0.0, True, "", 1.0,
                                          True)  # fmt: skip
                launchers.batch_norm_pool_backward(
                    (dx, nothing, nothing, nothing), dy, None, x, None, None, mean, var, False,
                    0.0, True, "", 1.0, True, True, False, False,
                )  # fmt: skip
        finally:
            launchers.rounds = rounds
        grid = (size, size, channels), (size // 2, size // 2, channels)
        picture, below = (t.double().view(g) for t, g in zip((last, slope), grid, strict=True))
        picture = picture.permute(2, 0, 1)[None].requires_grad_()
        want = torch.nn.functional.max_pool2d(picture.relu(), 2)
        (grad,) = torch.autograd.grad(want, picture, below.permute(2, 0, 1)[None])
        row, pair = channels * size // 2, 2 * size * channels
        maxima, slopes = (t[0].detach().permute(1, 2, 0).flatten() for t in (want, grad))
        assert torch.equal(small[0][-row:].double(), maxima[-row:])
        assert torch.equal(memory[1][-pair:].double(), slopes[-pair:])
