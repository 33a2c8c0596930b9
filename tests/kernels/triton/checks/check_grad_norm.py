"""Per-sample gradient norms' Triton kernels, interpreted: both forms, memory, order, bytes."""

import pytest
import torch
from triton_case import INTERPRETED, INTERPRETED_NET, Tracer, assert_close, noise, served

from kernels import grad_norm
from kernels.grad_norm import reference

CONVS = {
    "3x3": (3, 4, 5, 7, 6, 6, 3, 1, 1, True),
    "no bias": (1, 3, 16, 16, 8, 8, 3, 1, 1, False),
    "strided": (3, 2, 6, 9, 9, 7, 3, 2, 1, True),
    "1x1": (1, 5, 20, 17, 5, 5, 1, 1, 0, True),
    "1x1 strided": (1, 3, 8, 20, 7, 7, 1, 2, 0, False),
    "5x5 valid": (1, 2, 3, 6, 10, 9, 5, 1, 0, True),
    "several tiles": (1, 2, 40, 36, 7, 7, 3, 1, 1, True),
    "small": (2, 2, 5, 6, 6, 6, 3, 1, 1, True),
    "one pixel": (5, 4, 5, 6, 1, 1, 1, 1, 0, True),
}


def case(name, dtype=torch.float32):
    models, samples, channels, outputs, height, width, kernel, stride, padding, bias = CONVS[name]
    x = noise(models, samples, channels, height, width, seed=1, dtype=dtype)
    rows, cols = ((n + 2 * padding - kernel) // stride + 1 for n in (height, width))
    grad = noise(models, samples, outputs, rows, cols, seed=2, dtype=dtype)
    return x, grad, (kernel, stride, padding, bias)


def norms(x, grad, options, form):
    *sizes, bias = options
    return torch.func.vmap(lambda x, g: grad_norm.conv_norms(x, g, *sizes, bias=bias, form=form))(
        x, grad
    )


def textbook(x, grad, options):
    """Squared norms from autograd's weight gradient, one sample at a time."""
    kernel, stride, padding, bias = options
    out = torch.zeros(x.shape[:2], dtype=torch.float64)
    for m in range(x.shape[0]):
        for n in range(x.shape[1]):
            weight = torch.zeros(grad.shape[2], x.shape[2], kernel, kernel, dtype=torch.float64)
            shift = torch.zeros(grad.shape[2], dtype=torch.float64)
            leaves = [weight.requires_grad_(), shift.requires_grad_()]
            y = torch.conv2d(x[m, n : n + 1].double(), *leaves, stride, padding)
            grads = torch.autograd.grad((y * grad[m, n].double()).sum(), leaves)
            out[m, n] = grads[0].square().sum() + (grads[1].square().sum() if bias else 0)
    return out


@pytest.mark.parametrize("form", ["gram", "square"])
@pytest.mark.parametrize("name", CONVS)
def test_norms_equal_those_of_float64_gradients(name, form):
    assert served("conv_norms", "grad_norm")
    x, grad, options = case(name)
    with Tracer():
        found = norms(x, grad, options, form)
    assert_close(f"{name}, {form}", found, textbook(x, grad, options), tolerance=INTERPRETED)


@pytest.mark.parametrize("form", ["gram", "square"])
def test_bfloat16_inputs_accumulate_in_float32(form):
    x, grad, options = case("several tiles", torch.bfloat16)
    with Tracer():
        found = norms(x, grad, options, form)
    assert found.dtype is torch.float32
    assert_close(form, found, textbook(x, grad, options), tolerance=INTERPRETED)


def test_the_reference_is_right_too():
    x, grad, options = case("strided")
    for m in range(x.shape[0]):
        found = reference.conv_norms(x[m].double(), grad[m].double(), *options, "")
        assert_close("reference", found[None], textbook(x, grad, options)[m : m + 1],
                     tolerance=1e-12)  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 5, 33, 10), (1, 70, 300, 7), (2, 3, 1, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_norms_are_products_of_two_norms(shape, bias):
    models, samples, features, outputs = shape
    x, grad = noise(models, samples, features, seed=1), noise(models, samples, outputs, seed=2)
    with Tracer() as trace:
        found = torch.func.vmap(lambda x, g: grad_norm.linear_norms(x, g, bias=bias))(x, grad)
    want = (x.double().square().sum(2) + bias) * grad.double().square().sum(2)
    assert_close("linear", found, want, tolerance=INTERPRETED)
    assert trace.moved() == 4 * (x.numel() + grad.numel() + found.numel())


@pytest.mark.parametrize("axis", [0, 1, 3])
def test_any_strides_and_an_empty_batch_are_accepted(axis):
    x, grad, options = case("3x3")
    turned = [t.movedim(axis, -1).contiguous().movedim(-1, axis) for t in (x, grad)]
    for form in ("gram", "square"):
        assert torch.equal(norms(*turned, options, form), norms(x, grad, options, form))
    flat = [t[:, :, :, 0, 0] for t in (x, grad)]
    mapped = torch.func.vmap(grad_norm.linear_norms)
    assert torch.equal(mapped(*flat), mapped(*(t.contiguous() for t in flat)))
    none = grad_norm.conv_norms(x[0, :0], grad[0, :0], *options[:3])
    assert none.shape == grad_norm.linear_norms(flat[0][0, :0], flat[1][0, :0]).shape == (0,)


@pytest.mark.parametrize("form", ["gram", "square"])
def test_a_model_is_the_same_alone_and_in_any_order(form):
    x, grad, options = case("small")
    expected = norms(x, grad, options, form)
    for turn in [{"order": i} for i in range(5)] + [{"interleave": i} for i in range(3)]:
        with Tracer(**turn):
            assert torch.equal(norms(x, grad, options, form), expected)
    assert torch.equal(norms(x[1:2], grad[1:2], options, form)[0], expected[1])


def test_bytes_moved_are_exactly_those_of_the_formula():
    """gram: both sides of a pair of tiles; square: outputs once a tap and block of channels."""
    x, grad, options = case("1x1")
    samples, channels, outputs, positions = 5, 20, 17, 25
    with Tracer() as trace:
        norms(x, grad, options, "gram")
    gram, merge = trace.launches
    assert gram.loaded["x_ptr"] == 2 * 4 * samples * channels * positions
    assert gram.loaded["grad_ptr"] == 2 * 4 * samples * outputs * positions
    assert gram.stored == merge.loaded == {"part_ptr": 4 * samples}
    assert merge.stored == {"norm_ptr": 4 * samples}
    x, grad, options = case("several tiles")
    with Tracer() as trace:
        norms(x, grad, options, "square")
    square = trace.launches[0]
    taps, blocks = 9, 2
    assert square.loaded["grad_ptr"] == taps * blocks * 4 * grad.numel()
    inside = sum((7 - abs(i)) * (7 - abs(j)) for i in (-1, 0, 1) for j in (-1, 0, 1))
    assert square.loaded["x_ptr"] == blocks * 4 * 2 * 40 * inside


def test_a_net_with_probes_runs_on_triton_in_every_sense():
    x = noise(2, 3, 4, 5, 5, seed=3)
    weight, gamma = noise(2, 6, 4, 3, 3, seed=4), noise(2, 6, seed=5)
    mean, var = noise(2, 6, seed=6), noise(2, 6, seed=7).square() + 0.5
    for sense in ("contribution", "frozen", "frozen_batch"):
        results = []
        for dtype in (torch.float32, torch.float64):
            probe = torch.zeros(2, 3, dtype=dtype, requires_grad=True)

            def loss(x, w, g, m, v, p, sense=sense):
                h = grad_norm.conv2d(x, w, None, p, 1, 1)
                h = grad_norm.batch_norm(h, g, g, m, v, p, sense=sense, relu=True).y
                return grad_norm.linear(h.mean((2, 3)), g[None], None, p).square().sum()

            inputs = [t.to(dtype) for t in (x, weight, gamma, mean, var)]
            total = torch.func.vmap(loss)(*inputs, probe).sum()
            results.append(torch.autograd.grad(total, probe)[0])
        assert_close(sense, *results, tolerance=INTERPRETED_NET)
