"""Batch norm's Triton kernels, interpreted: numerics, memory, order, bytes."""

import itertools

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

EPS = 1e-5


def case(models, samples, channels, height, width, *, dtype=torch.float32, **options):
    """Inputs (x, weight, bias, running mean, running var, residual, probe) and options."""
    shape = (models, samples, channels, height, width)
    affine, residual = options.pop("affine", True), options.pop("residual", False)
    probe, training = options.pop("probe", False), options.setdefault("training", True)
    channel = (models, channels)
    inputs = (
        noise(*shape, seed=1, dtype=dtype, scale=2.0, shift=3.0),
        noise(*channel, seed=2, shift=0.5) if affine else None,
        noise(*channel, seed=3) if affine else None,
        None if training else noise(*channel, seed=4, shift=3.0),
        None if training else noise(*channel, seed=5).square() + 0.5,
        noise(*shape, seed=6, dtype=dtype) if residual else None,
        torch.zeros(models, samples) if probe else None,
    )
    if size := options.get("pool", 0):
        shape = (models, samples, channels, height // size, width // size)
    weights = [noise(*shape, seed=7, dtype=dtype), noise(models, seed=8)]
    return inputs, weights, options


def apply(inputs, weights, options):
    """(y, penalty) and the gradients of all inputs, through the registered op under vmap."""
    x, weight, bias, *running, residual, probe = inputs
    constants = [t for t in running if t is not None]

    def model(x, weight, bias, residual, probe, mean=None, var=None):
        out = kernels.batch_norm(
            x, weight, bias, mean, var, residual=residual, probe_B=probe, **options
        )
        return out.y, out.mean_C.sum() * 0 if out.penalty is None else out.penalty

    return gradients(model, (x, weight, bias, residual, probe), weights, constants)


def textbook(inputs, weights, options):
    """The same in float64, one model at a time, from the textbook formula and torch's autograd."""
    results = []
    for m in range(inputs[0].shape[0]):
        one = [None if t is None else t[m].double().requires_grad_() for t in inputs]
        results.append(textbook_model(*one, [w[m].double() for w in weights], **options))
    stack = lambda parts: [  # noqa: E731
        None if p[0] is None else torch.stack(p) for p in zip(*parts, strict=True)
    ]
    return stack([r[0] for r in results]), stack([r[1] for r in results])


def textbook_model(
    x, weight, bias, mean, var, residual, probe, weights, *, training, relu=False, penalty=None,
    pool=0,
):  # fmt: skip
    samples = x.shape[0]
    if training:
        mean = x.mean((0, 2, 3))
        var = (x - mean[:, None, None]).square().mean((0, 2, 3))
    gamma = torch.ones_like(mean) if weight is None else weight
    beta = torch.zeros_like(mean) if bias is None else bias
    shares = [v.detach().expand(samples, -1).clone().requires_grad_() for v in (gamma, beta)]
    sigma = (var + EPS).sqrt()

    def output(gamma_NC, beta_NC, normal):
        y = normal * gamma_NC[:, :, None, None] + beta_NC[:, :, None, None]
        y = y if residual is None else y + residual
        y = y.relu() if relu else y
        return torch.nn.functional.max_pool2d(y, pool) if pool else y

    normal = (x - mean[:, None, None]) / sigma[:, None, None]
    y = output(gamma.expand(samples, -1), beta.expand(samples, -1), normal)
    value = y.new_zeros(())
    if penalty is not None:
        ratio = gamma / (sigma if penalty.through_sigma and training else sigma.detach())
        over = ratio.abs() if penalty.form == "square" else (ratio.abs() - penalty.tau).clamp(min=0)
        value = over.square().mean()
    total = (weights[0] * y).sum() + weights[1] * value
    leaves = [t for t in (x, weight, bias, residual) if t is not None]
    grads = iter(torch.autograd.grad(total, leaves, retain_graph=True, materialize_grads=True))
    found = [None if t is None else next(grads) for t in (x, weight, bias, residual)]
    norms = None
    if probe is not None:
        share = (weights[0] * output(*shares, normal.detach())).sum()
        norms = sum(g.square().sum(1) for g in torch.autograd.grad(share, shares))
    return [y.detach(), value.detach()], [*found, norms]


NAMES = ("dx", "dweight", "dbias", "dresidual", "norms")
SQUARE = kernels.PenaltyForm(form="square")
HINGE = kernels.PenaltyForm(form="hinge", tau=0.2)
FIXED = kernels.PenaltyForm(form="hinge", tau=0.1, through_sigma=False)

CASES = {
    "plain": (1, 3, 5, 7, 5, {}),
    "relu": (3, 3, 24, 13, 13, {"relu": True}),
    "residual": (3, 5, 16, 9, 11, {"relu": True, "residual": True}),
    "residual without relu": (1, 4, 6, 5, 5, {"residual": True}),
    "square penalty": (5, 3, 7, 6, 6, {"relu": True, "penalty": SQUARE}),
    "hinge penalty": (3, 3, 7, 6, 6, {"penalty": HINGE, "probe": True}),
    "penalty at fixed sigma": (3, 3, 7, 6, 6, {"penalty": FIXED, "relu": True}),
    "norms": (3, 7, 16, 4, 4, {"relu": True, "probe": True, "residual": True}),
    "norms over blocks": (1, 5, 130, 3, 3, {"relu": True, "probe": True, "penalty": HINGE}),
    "wide images": (1, 1, 8, 33, 31, {"probe": True, "relu": True}),
    "one pixel": (5, 37, 10, 1, 1, {"relu": True, "probe": True}),
    "one channel": (3, 5, 1, 9, 9, {"relu": True}),
    "no affine": (3, 5, 6, 5, 5, {"affine": False, "relu": True, "penalty": HINGE}),
    "eval": (3, 5, 12, 7, 7, {"training": False, "relu": True, "probe": True}),
    "eval residual": (3, 3, 8, 5, 5, {"training": False, "relu": True, "residual": True}),
    "eval penalty": (3, 3, 8, 5, 5, {"training": False, "penalty": SQUARE}),
}
FEW = ("relu", "norms over blocks", "eval residual", "hinge penalty")


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_float64_autograd(name):
    assert served("batch_norm")
    *shape, options = CASES[name]
    inputs, weights, options = case(*shape, **options)
    with Tracer():
        outputs, grads = apply(inputs, weights, options)
    wanted, wanted_grads = textbook(inputs, weights, options)
    assert_close(f"{name}: y", outputs[0], wanted[0], tolerance=INTERPRETED)
    assert_close(f"{name}: penalty", outputs[1], wanted[1], tolerance=INTERPRETED)
    for label, got, want in zip(NAMES, grads, wanted_grads, strict=True):
        if want is not None:
            assert_close(f"{name}: {label}", got, want, tolerance=INTERPRETED)


@pytest.mark.parametrize("name", FEW)
def test_bfloat16_equals_the_rounded_reference(name):
    *shape, options = CASES[name]
    inputs, weights, options = case(*shape, dtype=torch.bfloat16, **options)
    with Tracer():
        outputs, grads = apply(inputs, weights, options)
    wanted, wanted_grads = textbook(inputs, weights, options)
    assert_rounded("y", outputs[0], wanted[0])
    assert_rounded("dx", grads[0], wanted_grads[0])
    for label, got, want in zip(NAMES[1:3], grads[1:3], wanted_grads[1:3], strict=True):
        assert got.dtype is torch.float32
        assert_close(label, got, want, tolerance=INTERPRETED)


@pytest.mark.parametrize("name", FEW)
def test_any_order_of_programs_gives_the_same_bits(name):
    *shape, options = CASES[name]
    inputs, weights, options = case(*shape, **options)
    with Tracer():
        outputs, grads = apply(inputs, weights, options)
    expected = [t for t in (*outputs, *grads) if t is not None]
    turns = [{"order": i} for i in range(5)] + [{"interleave": i} for i in range(3)]
    for turn in turns:
        with Tracer(**turn):
            outputs, grads = apply(inputs, weights, options)
        found = [t for t in (*outputs, *grads) if t is not None]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), turn


@pytest.mark.parametrize("name", ["norms", "square penalty", "eval"])
def test_a_model_is_the_same_alone_and_beside_any_other(name):
    *shape, options = CASES[name]
    inputs, weights, options = case(*shape, **options)
    outputs, grads = apply(inputs, weights, options)
    for m in range(shape[0]):
        alone = [None if t is None else t[m : m + 1] for t in inputs]
        one, one_grads = apply(alone, [w[m : m + 1] for w in weights], options)
        for got, want in zip((*one, *one_grads), (*outputs, *grads), strict=True):
            assert got is None or torch.equal(got[0], want[m])
    spoilt = [t.clone() if t is not None else None for t in inputs]
    spoilt[0][1] = float("nan")
    beside, beside_grads = apply(spoilt, weights, options)
    for got, want in zip((*beside, *beside_grads), (*outputs, *grads), strict=True):
        assert got is None or torch.equal(got[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("layout", ["models last", "batch last", "expanded"])
def test_any_strides_are_accepted(layout):
    inputs, weights, options = case(3, 4, 6, 5, 7, relu=True)
    expected, expected_grads = apply(inputs, weights, options)
    x = inputs[0]
    if layout == "models last":
        x = x.movedim(0, -1).contiguous().movedim(-1, 0)
    elif layout == "batch last":
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    else:
        x = x[:1].expand(3, *x.shape[1:])
        expected, expected_grads = apply((x.contiguous(), *inputs[1:]), weights, options)
    found, grads = apply((x, *inputs[1:]), weights, options)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(grads[0], expected_grads[0])


def test_a_residual_without_gradient_still_masks():
    inputs, weights, options = case(3, 4, 6, 5, 7, relu=True, residual=True)
    x, weight, bias, _, _, residual, _ = inputs

    def model(x, weight, bias, residual):
        out = kernels.batch_norm(x, weight, bias, None, None, residual=residual, **options)
        return out.y, out.mean_C.sum() * 0

    with Tracer():
        found, grads = gradients(model, (x, weight, bias), weights, [residual])
    expected, expected_grads = apply(inputs, weights, options)
    assert torch.equal(found[0], expected[0])
    for got, want in zip(grads, expected_grads[:3], strict=True):
        assert torch.equal(got, want)


def test_an_empty_batch_is_left_to_the_reference():
    out = kernels.batch_norm(torch.ones(0, 4, 3, 3), None, None, torch.zeros(4), torch.ones(4),
                             training=False)  # fmt: skip
    assert out.y.shape == (0, 4, 3, 3)
    assert torch.equal(out.mean_C, torch.zeros(4))


def test_a_large_mean_does_not_cost_the_variance():
    x = noise(1, 4, 8, 16, 16, seed=3) + 1000.0
    with Tracer():
        var = torch.func.vmap(
            lambda x: kernels.batch_norm(x, None, None, None, None, training=True).var_C
        )(x)
    want = x.double().var((1, 3, 4), unbiased=False)
    assert_close("variance", var, want, tolerance=INTERPRETED)


def floors(inputs, options):
    """Bytes a perfect two-pass implementation moves: forward 3A, backward 5A, residual 1A + 2A."""
    activation = inputs[0].numel() * inputs[0].element_size()
    return activation * (8 + (3 if inputs[5] is not None else 0))


@pytest.mark.parametrize(
    ("channels", "dtype", "residual"),
    list(itertools.product((32, 64), (torch.float32, torch.bfloat16), (False, True))),
)
def test_bytes_moved_are_within_a_twentieth_of_the_floor(channels, dtype, residual):
    inputs, weights, options = case(
        1, 4, channels, 16, 16, dtype=dtype, relu=True, residual=residual
    )
    with Tracer() as trace:
        apply(inputs, weights, options)
    assert floors(inputs, options) <= trace.moved() <= 1.05 * floors(inputs, options)


def test_bytes_moved_are_exactly_those_of_the_formula():
    inputs, weights, options = case(3, 5, 24, 13, 13, relu=True)
    with Tracer() as trace:
        apply(inputs, weights, options)
    models, samples, channels, pixels = 3, 5, 24, 169
    rows, chunks, groups = samples * pixels, 4, 3
    part, vector = 2 * channels * 4, channels * 4
    forward = 3 * rows * channels * 4 + chunks * (part + 1.5 * part) + 2 * vector
    forward += chunks * 4 * vector + 4
    backward = 5 * rows * channels * 4 + groups * (4 * vector + 2 * part)
    backward += 3 * vector + 2 * vector + part + chunks * (4 * vector + part)
    assert trace.moved() == models * (forward + backward)


def test_penalty_and_norms_add_almost_nothing():
    moved = []
    for extra in ({}, {"penalty": HINGE, "probe": True}):
        inputs, weights, options = case(1, 2, 32, 32, 32, relu=True, **extra)
        with Tracer() as trace:
            apply(inputs, weights, options)
        moved.append(trace.moved())
    assert moved[0] < moved[1] <= 1.005 * moved[0]


def test_index_arithmetic_holds_beyond_two_to_the_31_elements():
    import importlib

    launchers = importlib.import_module("kernels.batch_norm.triton")
    models, samples, channels, size = 25, 512, 64, 64
    shape = (models, samples, channels, size, size)
    per_model = samples * channels * size * size
    assert models * per_model > 2**31
    with untouched_memory():
        pixels = (samples * channels * size * size, channels * size * size, 1, size * channels,
                  channels)  # fmt: skip
        big = [torch.empty(models * per_model, dtype=torch.bfloat16) for _ in range(2)]
        x, y = (b.as_strided(shape, (pixels[0], *pixels[1:])) for b in big)
        last = noise(32, channels, seed=1, dtype=torch.bfloat16)
        big[0][-32 * channels :] = last.flatten()
        mean, var = torch.zeros(models, 64), torch.ones(models, 64)
        out = (y, mean.clone(), var.clone(), torch.empty(models))
        rounds, launchers.rounds = launchers.rounds, lambda x, n: [(0, models)]
        try:
            with Tracer(shadow=False, only_last=1):
                launchers.batch_norm(out, x, None, None, mean, var, None, None, 0.0, True, "", 1.0,
                                     True)  # fmt: skip
        finally:
            launchers.rounds = rounds
        assert torch.equal(big[1][-32 * channels :], last.flatten().relu())
