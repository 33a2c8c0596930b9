"""A model's numbers belong to the model: bit for bit alone, in any stack, in any slot."""

import math

import pytest
import torch
from op_cases import CASES, Case, outputs_and_grads
from tolerances import FLOAT64, error

import kernels
from kernels._layout import as_dense

ALL = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
MOST = 8


@pytest.fixture(autouse=True)
def one_thread():
    """Workers run with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    return one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()


def part(inputs: dict[str, torch.Tensor], models: list[int]) -> dict[str, torch.Tensor]:
    return {n: t[models] for n, t in inputs.items()}


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@ALL
def test_a_stack_equals_its_models_alone(case: Case, dtype: torch.dtype):
    inputs = case.inputs(dtype, 1, models=MOST)
    alone = [
        outputs_and_grads(case.ours, {n: t[m].clone() for n, t in inputs.items()})
        for m in range(MOST)
    ]
    for models in ([0], [0, 1, 2], [4, 0, 7, 2, 5], list(reversed(range(MOST)))):
        together = outputs_and_grads(case.ours, part(inputs, models), stack=True)
        for slot, m in enumerate(models):
            for name, value in together.items():
                assert same(value[slot], alone[m][name]), f"{name}, model {m} of {models}"


@ALL
def test_no_model_touches_another(case: Case):
    inputs = case.inputs(torch.float32, 2, models=3)
    before = outputs_and_grads(case.ours, inputs, stack=True)
    for value in inputs.values():
        value[1] = float("nan") if value.is_floating_point() else 0
    after = outputs_and_grads(case.ours, inputs, stack=True)
    for name, value in after.items():
        assert same(value[[0, 2]], before[name][[0, 2]]), name


@ALL
def test_any_strides_do(case: Case, dtype: torch.dtype):
    inputs = case.inputs(dtype, 3, models=2)
    laid = {}
    for name, value in inputs.items():
        wide = torch.full((*value.shape, 2), 3, dtype=value.dtype)
        wide[..., 1] = value
        laid[name] = wide.transpose(0, -2).contiguous().transpose(0, -2)[..., 1]
        assert value.numel() == 2 or not laid[name].is_contiguous()
    plain, strided = (outputs_and_grads(case.ours, i, stack=True) for i in (inputs, laid))
    for name, value in strided.items():
        assert error(value, plain[name]) <= FLOAT64 or same(value, plain[name]), name


@ALL
def test_shared_inputs_are_repeated(case: Case):
    """An input without a model axis serves every model."""
    inputs = case.inputs(torch.float32, 4, models=3)
    names = list(inputs)
    for shared in names:
        alone = inputs[shared][0]
        dims = tuple(None if n == shared else 0 for n in names)
        given = [alone if n == shared else inputs[n] for n in names]
        if all(d is None for d in dims):
            continue
        call = lambda *a: case.ours(**dict(zip(names, a, strict=True)))  # noqa: E731
        found = torch.func.vmap(call, in_dims=dims)(*given)
        found = found if isinstance(found, tuple) else (found,)
        repeated = inputs | {shared: alone.expand(3, *alone.shape)}
        wanted = outputs_and_grads(case.ours, repeated, stack=True)
        for i, value in enumerate(found):
            assert same(value, wanted[f"out{i}"].expand(value.shape)), shared


@ALL
def test_vmap_over_vmap_folds(case: Case):
    inputs = case.inputs(torch.float32, 5, models=6)
    names = list(inputs)

    def call(*values):
        return case.ours(**dict(zip(names, values, strict=True)))

    flat = torch.func.vmap(call)(*inputs.values())
    folded = [t.unflatten(0, (2, 3)) for t in inputs.values()]
    deep = torch.func.vmap(torch.func.vmap(call))(*folded)
    for one, other in zip(
        flat if isinstance(flat, tuple) else (flat,),
        deep if isinstance(deep, tuple) else (deep,),
        strict=True,
    ):
        assert same(one, other.flatten(0, 1))


def test_every_model_starts_on_a_cache_line():
    x = torch.randn(3, 1, 7, 5)
    y = torch.func.vmap(lambda x: kernels.linear(x[0], x[0]))(x)
    assert y.stride(0) % 16 == 0
    assert all(y[m].data_ptr() % 64 == 0 for m in range(3))
    crooked = torch.randn(3 * 35 + 1)[1:].view(3, 7, 5)
    assert as_dense(crooked).data_ptr() % 64 == 0


@pytest.mark.parametrize("models", [1, 3])
def test_sgd_does_not_know_the_stack(models):
    sizes = {"weight": (7, 3, 5, 5), "bias": (13,), "scalar": ()}
    generator = torch.Generator().manual_seed(0)
    start = {n: torch.randn((5, *s), generator=generator) for n, s in sizes.items()}
    grads = {n: torch.randn((5, *s), generator=generator) for n, s in sizes.items()}
    lr, decay = torch.rand(5, generator=generator), torch.rand(5, generator=generator)

    def trained(chosen: list[int]) -> dict[str, torch.Tensor]:
        params = {n: t[chosen] for n, t in start.items()}
        momenta = {n: torch.zeros_like(t) for n, t in params.items()}
        for step in range(3):
            now = {n: (g * (step + 1))[chosen] for n, g in grads.items()}
            kernels.sgd.step(params, now, momenta, lr[chosen], decay[chosen], 0.9, nesterov=True)
        return params

    whole = trained(list(range(5)))
    for first in range(0, 5 - models + 1, models):
        chosen = list(range(first, first + models))
        for name, value in trained(chosen).items():
            assert same(value, whole[name][chosen]), name


def test_bits_survive_odd_sizes_of_the_heaviest_ops():
    """Sizes at which vectorised loops have every kind of tail, in both layouts."""
    for channels, pixels in ((5, 31), (13, 17), (16, 33)):
        x = torch.randn(4, 3, channels, 3, pixels)
        weight = torch.rand(4, channels)

        def call(x, weight):
            out = kernels.batch_norm(x, weight, None, None, None, training=True, relu=True)
            return kernels.max_pool(out.y), out.var_C

        together = torch.func.vmap(call)(x, weight)
        for m in range(4):
            for value, one in zip(together, call(x[m], weight[m]), strict=True):
                assert same(value[m], one)
                assert math.isfinite(float(one.sum()))
