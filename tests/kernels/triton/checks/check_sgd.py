"""SGD's Triton kernel, interpreted: torch.optim.SGD's numbers, one launch, exact bytes."""

import pytest
import torch
from triton_case import (
    INTERPRETED,
    Tracer,
    assert_close,
    assert_rounded,
    kernels,
    noise,
    served,
    untouched_memory,
)

from kernels.sgd import reference
from kernels.sgd import triton as launchers

SHAPES = {"conv": (5, 3, 3, 3), "gamma": (7,), "wide": (1500,), "head": (10, 33)}


def state(models, shapes=SHAPES, seed=0):
    return {k: noise(models, *s, seed=seed + i) for i, (k, s) in enumerate(shapes.items())}


def rates(models):
    lr = torch.linspace(0.05, 0.4, models)
    return lr, torch.linspace(0.0, 0.02, models)


@pytest.mark.parametrize("models", [1, 3, 5])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, False), (0.9, True), (0.0, False)])
def test_steps_equal_the_optimiser_of_torch(models, momentum, nesterov):
    assert served("sgd")
    params, momenta = state(models), {k: v * 0 for k, v in state(models).items()}
    lr, decay = rates(models)
    twins = [{k: v[m].double().clone() for k, v in params.items()} for m in range(models)]
    optimisers = [
        torch.optim.SGD(
            [
                {"params": [twin[k]], "weight_decay": float(decay[m]) if k != "gamma" else 0.0}
                for k in twin
            ],
            lr=float(lr[m]),
            momentum=momentum,
            nesterov=nesterov,
        )
        for m, twin in enumerate(twins)
    ]
    for step in range(3):
        grads = state(models, seed=10 + step)
        with Tracer() as trace:
            kernels.sgd.step(params, grads, momenta, lr, decay, momentum, nesterov,
                             decayed=("conv", "wide", "head"))  # fmt: skip
        assert len(trace.launches) == 1
        for m, (twin, optimiser) in enumerate(zip(twins, optimisers, strict=True)):
            for name, value in twin.items():
                value.grad = grads[name][m].double()
            optimiser.step()
    for name, value in params.items():
        want = torch.stack([twin[name] for twin in twins])
        assert_close(name, value, want, tolerance=INTERPRETED)


def test_a_model_is_the_same_alone_and_in_any_order():
    params, grads, momenta = state(5), state(5, seed=5), state(5, seed=9)
    lr, decay = rates(5)
    alone = [{k: v[3:4].clone() for k, v in s.items()} for s in (params, grads, momenta)]
    turns = [{"order": i} for i in range(5)] + [{"interleave": i} for i in range(3)]
    results = []
    for turn in ({}, *turns):
        mine = [{k: v.clone() for k, v in s.items()} for s in (params, grads, momenta)]
        with Tracer(**turn):
            kernels.sgd.step(*mine, lr, decay)
        results.append(mine)
    kernels.sgd.step(*alone, lr[3:4], decay[3:4])
    for name in params:
        assert all(torch.equal(r[0][name], results[0][0][name]) for r in results)
        assert torch.equal(alone[0][name][0], results[0][0][name][3])
        assert torch.equal(alone[2][name][0], results[0][2][name][3])


def test_gradients_may_be_clipped_per_model():
    params, grads = state(2), state(2, seed=5)
    before = {k: v.clone() for k, v in params.items()}
    lr, scale = torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.25])
    kernels.sgd.step(params, grads, {}, lr, lr * 0, momentum=0.0, grad_scale_M=scale)
    for name, value in params.items():
        want = before[name] - 0.5 * grads[name] * scale.view(-1, *(1,) * (value.dim() - 1))
        assert_close(name, value, want, tolerance=INTERPRETED)


def test_gradients_of_any_strides_are_accepted():
    stacks = [state(3, {"a": (6, 5)}, seed) for seed in (0, 5, 9)]
    turned = [{k: v.clone() for k, v in s.items()} for s in stacks]
    turned[1] = {k: v.transpose(0, 2).contiguous().transpose(0, 2) for k, v in stacks[1].items()}
    for params, grads, momenta in (stacks, turned):
        kernels.sgd.step(params, grads, momenta, *rates(3))
    assert torch.equal(stacks[0]["a"], turned[0]["a"])
    assert torch.equal(stacks[2]["a"], turned[2]["a"])


@pytest.mark.parametrize("nesterov", [False, True])
def test_bfloat16_equals_the_rounded_reference(nesterov):
    lr, decay = rates(3)
    stacks = [{k: v.bfloat16() for k, v in state(3, seed=s).items()} for s in (0, 5, 9)]
    wide = [{k: v.double() for k, v in s.items()} for s in stacks]
    with Tracer():
        kernels.sgd.step(*stacks, lr, decay, nesterov=nesterov)
    for name, param in wide[0].items():
        reference.sgd(param, wide[1][name], wide[2][name], lr.double(), decay.double(), 0.9,
                      nesterov)  # fmt: skip
        assert_rounded(f"{name}: momentum", stacks[2][name], wide[2][name])
        assert_rounded(name, stacks[0][name], param)


def test_bytes_moved_are_those_of_five_streams():
    shapes = {"a": (64, 32, 3, 3), "b": (64,), "c": (10, 64)}
    params, grads, momenta = (state(2, shapes, seed) for seed in (0, 5, 9))
    with Tracer() as trace:
        kernels.sgd.step(params, grads, momenta, *rates(2))
    count = sum(v.numel() for v in params.values())
    programs = trace.launches[0].grid[0] * 2
    assert trace.moved() == 5 * 4 * count + programs * 8
    assert trace.moved() <= 1.005 * 5 * 4 * count


def test_more_parameters_than_one_launch_takes_are_all_updated():
    shapes = {str(i): (3 + i,) for i in range(launchers.MOST + 3)}
    params, grads = state(1, shapes), state(1, shapes, seed=99)
    before = {k: v.clone() for k, v in params.items()}
    with Tracer() as trace:
        kernels.sgd.step(params, grads, {}, torch.ones(1), torch.zeros(1), momentum=0.0)
    assert len(trace.launches) == 2
    for name, value in params.items():
        assert torch.equal(value, before[name] - grads[name])


def test_models_that_are_not_dense_are_refused():
    stack = {"a": torch.zeros(2, 6, 5).transpose(1, 2)}
    with pytest.raises(ValueError, match="a are not dense"):
        kernels.sgd.step(stack, {"a": stack["a"].contiguous()}, {}, torch.ones(2), torch.zeros(2),
                         momentum=0.0)  # fmt: skip


def test_index_arithmetic_holds_beyond_two_to_the_31_elements():
    models, count = 5, 2**29 + 2**20
    assert models * count > 2**31
    with untouched_memory():
        param, grad = (torch.empty(models, count, dtype=torch.bfloat16) for _ in range(2))
        param[-1, -1024:], grad[-1, -1024:] = 1.0, 0.5
        rate = torch.ones(models)
        with Tracer(shadow=False, only_last=1):
            kernels.sgd.step({"a": param}, {"a": grad}, {}, rate, 0 * rate, momentum=0.0)
        assert torch.equal(param[-1, -1024:], torch.full((1024,), 0.5, dtype=torch.bfloat16))
