"""Every op's outputs and gradients against plain torch."""

import pytest
import torch
from op_cases import CASES, Case, outputs_and_grads
from tolerances import FLOAT32_FACTOR, FLOAT32_FLOOR, FLOAT64, GRADCHECK, error, whole_norm

import kernels

ALL = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
SEEDS = range(5)


def whole(results: dict[str, torch.Tensor]) -> float:
    return whole_norm(t for name, t in results.items() if name.startswith("grad"))


@ALL
def test_float64_equals_autograd(case: Case):
    inputs = case.inputs(torch.float64, 0)
    truth = outputs_and_grads(case.plain, inputs)
    ours = outputs_and_grads(case.ours, inputs)
    assert ours.keys() == truth.keys()
    for name, value in ours.items():
        assert value.shape == truth[name].shape, name
        scale = whole(truth) if name.startswith("grad") else 0.0
        assert error(value, truth[name], scale) <= FLOAT64, name


def plain_errors(case: Case) -> dict[str, float]:
    """The largest errors of plain torch in float32, over both layouts and five seeds."""
    largest: dict[str, float] = {}
    for seed in SEEDS:
        inputs = case.inputs(torch.float32, seed)
        truth = outputs_and_grads(case.plain, {n: as_double(t) for n, t in inputs.items()})
        for form in (torch.contiguous_format, torch.channels_last):
            laid = {
                n: t.contiguous(memory_format=form) if t.dim() == 4 else t
                for n, t in inputs.items()
            }
            for name, value in outputs_and_grads(case.plain, laid).items():
                scale = whole(truth) if name.startswith("grad") else 0.0
                here = error(value, truth[name], scale)
                largest[name] = max(here, largest.get(name, 0.0))
    return largest


def as_double(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value


@ALL
def test_float32_is_as_exact_as_plain_torch(case: Case):
    allowed = plain_errors(case)
    for seed in SEEDS:
        inputs = case.inputs(torch.float32, seed)
        truth = outputs_and_grads(case.plain, {n: as_double(t) for n, t in inputs.items()})
        ours = outputs_and_grads(case.ours, inputs)
        for name, value in ours.items():
            scale = whole(truth) if name.startswith("grad") else 0.0
            limit = max(FLOAT32_FACTOR * allowed[name], FLOAT32_FLOOR)
            assert error(value, truth[name], scale) <= limit, f"{name}, seed {seed}"


@ALL
def test_the_fast_implementation_equals_the_reference(case: Case, monkeypatch):
    inputs = case.inputs(torch.float32, 3, models=2)
    fast = outputs_and_grads(case.ours, inputs, stack=True)
    monkeypatch.setenv("SHADOW_KERNELS", "reference")
    slow = outputs_and_grads(case.ours, inputs, stack=True)
    for name, value in fast.items():
        assert error(value, slow[name], whole(slow)) <= 1e-5, name
        assert value.stride()[1:] == slow[name].stride()[1:], name


@pytest.mark.parametrize("form", ["square", "hinge"])
@pytest.mark.parametrize("through_sigma", [True, False])
def test_gradcheck_of_the_penalty(form: str, through_sigma: bool):
    penalty = kernels.PenaltyForm(form=form, tau=0.3, through_sigma=through_sigma)  # type: ignore[arg-type]
    x = torch.randn(3, 2, 2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([1.5, -0.8], dtype=torch.float64, requires_grad=True)

    def value(x, weight):
        out = kernels.batch_norm(x, weight, None, None, None, training=True, penalty=penalty)
        return out.penalty

    inputs = (x, weight) if through_sigma else (weight,)
    call = value if through_sigma else lambda weight: value(x.detach(), weight)
    assert torch.autograd.gradcheck(call, inputs, atol=GRADCHECK, rtol=GRADCHECK)
    if not through_sigma:
        grad = torch.autograd.grad(value(x, weight), x)[0]
        assert not grad.any()


def test_batch_moments_are_biased_and_constant():
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    out = kernels.batch_norm(x, None, None, None, None, training=True)
    assert error(out.mean_C, x.mean((0, 2, 3))) <= FLOAT64
    assert error(out.var_C, x.var((0, 2, 3), unbiased=False)) <= FLOAT64
    assert not out.mean_C.requires_grad
    assert not out.var_C.requires_grad
    assert out.penalty is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_moments_far_from_zero(dtype):
    x = 1000 + torch.randn(64, 16, 9, 9, dtype=torch.float64).to(dtype)
    out = kernels.batch_norm(x, None, None, None, None, training=True)
    truth = x.double().var((0, 2, 3), unbiased=False)
    limit = FLOAT64 if dtype is torch.float64 else 1e-5
    assert error(out.var_C, truth) <= limit


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("channels", [5, 16])
def test_the_probe_collects_squared_gradient_norms_per_sample(dtype, channels):
    x = torch.randn(4, channels, 3, 3, dtype=torch.float64)
    weight, bias = torch.rand(2, channels, dtype=torch.float64)
    slope = torch.randn_like(x)

    def contributions() -> torch.Tensor:
        sigma = (x.var((0, 2, 3), unbiased=False) + 1e-5).sqrt()[:, None, None]
        normal = (x - x.mean((0, 2, 3))[:, None, None]) / sigma
        kept = slope * (normal * weight[:, None, None] + bias[:, None, None] > 0)
        return kept.sum((2, 3)).square().sum(1) + (kept * normal).sum((2, 3)).square().sum(1)

    probe = torch.zeros(4, dtype=dtype, requires_grad=True)
    out = kernels.batch_norm(
        x.to(dtype).requires_grad_(),
        weight.to(dtype),
        bias.to(dtype),
        None,
        None,
        training=True,
        relu=True,
        probe_B=probe,
    )
    found = torch.autograd.grad(out.y, probe, slope.to(dtype))[0]
    assert error(found, contributions()) <= (FLOAT64 if dtype is torch.float64 else 1e-5)


def test_max_pool_gives_ties_to_the_first_and_keeps_nan():
    for channels in (1, 16):
        x = torch.zeros(1, channels, 2, 4)
        x[..., 3] = float("nan")
        x.requires_grad_()
        y = kernels.max_pool(x)
        assert (y[..., 0] == 0).all()
        assert y[..., 1].isnan().all()
        grad = torch.autograd.grad(y, x, torch.ones_like(y))[0]
        assert torch.equal(grad[0, 0, 0, :2], torch.tensor([1.0, 0.0]))


def test_relu_keeps_nan():
    assert kernels.relu(torch.full((1, 12, 1, 1), float("nan"))).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_empty_batch(dtype):
    x = torch.empty(0, 6, 4, 4, dtype=dtype)
    weight, bias = torch.ones(6, dtype=dtype), torch.zeros(6, dtype=dtype)
    filters = torch.ones(5, 6, 3, 3, dtype=dtype)
    assert kernels.conv2d(x, filters).shape == (0, 5, 2, 2)
    assert kernels.max_pool(x).shape == (0, 6, 2, 2)
    assert kernels.global_avg_pool(x).shape == (0, 6)
    assert kernels.group_norm(x, 2, weight, bias).shape == x.shape
    assert kernels.affine(x, weight, bias).shape == x.shape
    assert kernels.linear(x.flatten(1), torch.ones(3, 96, dtype=dtype)).shape == (0, 3)
    out = kernels.batch_norm(x, weight, bias, bias, weight, training=False)
    assert out.y.shape == x.shape
    empty = torch.empty(0, dtype=torch.int64)
    assert kernels.cross_entropy(torch.empty(0, 3, dtype=dtype), empty).shape == (0,)


@pytest.mark.parametrize(
    "call",
    [
        lambda: kernels.conv2d(torch.ones(1, 2, 3, 3), torch.ones(1, 3, 3, 3)),
        lambda: kernels.linear(torch.ones(1, 2), torch.ones(1, 3)),
        lambda: kernels.batch_norm(torch.ones(3), None, None, None, None, training=True),
        lambda: kernels.batch_norm(torch.ones(1, 3), None, None, None, None, training=False),
        lambda: kernels.group_norm(torch.ones(1, 3, 2, 2), 2, None, None),
        lambda: kernels.affine(torch.ones(1, 3, 2, 2), torch.ones(2), None),
        lambda: kernels.affine(torch.ones(1, 3, 2, 2), None, None, after=torch.ones(3)),
        lambda: kernels.max_pool(torch.ones(1, 3, 2, 2), 3),
        lambda: kernels.concat(torch.ones(1, 3, 2, 2), torch.ones(1, 3, 2, 3)),
        lambda: kernels.cross_entropy(torch.ones(2, 3), torch.zeros(3, dtype=torch.int64)),
        lambda: kernels.cross_entropy(torch.ones(2, 3), torch.zeros(2)),
        lambda: kernels.PenaltyForm(form="cube"),  # type: ignore[arg-type]
    ],
)
def test_wrong_shapes_are_refused_in_words(call):
    with pytest.raises(ValueError, match=r"expected|needs"):
        call()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_labels_out_of_range_are_refused(dtype):
    with pytest.raises((IndexError, RuntimeError)):
        kernels.cross_entropy(torch.ones(1, 3, dtype=dtype), torch.tensor([3]))
