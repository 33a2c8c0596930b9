"""The rules of every op: opcheck, fakes, compile, choice of implementation, refusals."""

import subprocess
import sys

import pytest
import torch
from op_cases import CASES, outputs_and_grads
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from kernels import _register

ONE_EACH = (
    "conv2d to channels-last",
    "linear",
    "batch_norm hinge",
    "batch_norm pooled, hinge",
    "group_norm residual",
    "group_norm pooled",
    "affine mixed",
    "pool max channels-last",
    "pool avg planes",
    "pool global",
    "concat",
    "cross_entropy",
    "cross_entropy_phi",
)


class Recorder(TorchDispatchMode):
    """Keeps the arguments of every call of an op of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[object, tuple[object, ...]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == _register.NAMESPACE:
            self.calls[func] = args
        return func(*args, **(kwargs or {}))


def recorded(case_name: str) -> dict[object, tuple[object, ...]]:
    case = next(c for c in CASES if c.name == case_name)
    with Recorder() as recorder:
        outputs_and_grads(case.ours, case.inputs(torch.float32, 0))
        outputs_and_grads(case.ours, case.inputs(torch.float32, 0, models=3), stack=True)
    return recorder.calls


# opcheck itself looks at the .grad of clones
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", ONE_EACH)
def test_opcheck(name):
    calls = recorded(name)
    assert len(calls) == 4, "single and stacked, forward and backward"
    for op, args in calls.items():
        forward = "backward" not in op.name()
        fresh = tuple(
            a.detach().requires_grad_(forward and a.is_floating_point())
            if isinstance(a, torch.Tensor)
            else a
            for a in args
        )
        torch.library.opcheck(op, fresh)


def test_every_registered_op_is_checked():
    names = {op.name().split("::")[1] for n in ONE_EACH for op in recorded(n)}
    seen = {name.removesuffix("_stacked") for name in names}
    folders = {"augment", "grad_norm"}  # the first below, the second beside its own tests
    pairs = {
        name
        for name, op in _register._ops.items()
        if op.single is not None and op.folder not in folders
    }
    assert pairs == seen


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_past_the_dispatcher_is_the_same_to_the_bit(case, monkeypatch):
    inputs = case.inputs(torch.float32, 0, models=3)
    with Recorder() as recorder:
        registered = outputs_and_grads(case.ours, inputs, stack=True)
    assert recorder.calls, "a mode sees the registered ops"
    for op in _register._ops.values():
        if op.single is not None:
            monkeypatch.setitem(op.__dict__, "single", None)
            monkeypatch.setitem(op.__dict__, "stacked", None)
    direct = outputs_and_grads(case.ours, inputs, stack=True)
    assert direct.keys() == registered.keys()
    for name, value in direct.items():
        assert torch.equal(value, registered[name]), name


def test_backward_twice_is_refused_past_the_dispatcher_too():
    x = torch.ones(2, 3, 4, 5, 5, requires_grad=True)
    y = torch.func.vmap(kernels.global_avg_pool)(x)
    (grad,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad.sum().backward()


def test_opcheck_of_augment():
    images = torch.randint(256, (3, 5, 6, 7, 1), dtype=torch.uint8)
    index, key = torch.randint(5, (3, 4)), torch.arange(3)
    args = (images, index, index, key, torch.randn(3, 1, 256), 1, True, 2)
    torch.library.opcheck(torch.ops.shadow.augment_stacked.default, args)
    single = (images[0], index[0], index[0], key[0], torch.randn(1, 256), 1, True, 2)
    torch.library.opcheck(torch.ops.shadow.augment.default, single)


def small_net(params, x, labels):
    h = kernels.conv2d(x, params["filters"], None, 1, 1)
    out = kernels.batch_norm(
        h,
        params["gamma"],
        params["beta"],
        None,
        None,
        training=True,
        relu=True,
        penalty=kernels.PenaltyForm(form="hinge", tau=0.1),
    )
    h = kernels.max_pool(out.y)
    h = kernels.group_norm(h, 2, params["gamma"], params["beta"], relu=True)
    h = kernels.global_avg_pool(kernels.affine(h, params["scale"], None, relu=True))
    loss = kernels.cross_entropy(kernels.linear(h, params["head"]), labels)
    return loss.sum() + 0.1 * out.penalty


def net_inputs(models: int):
    shapes = {
        "filters": (6, 3, 3, 3),
        "gamma": (6,),
        "beta": (6,),
        "scale": (),
        "head": (4, 6),
    }
    params = {n: torch.randn((models, *s)).requires_grad_() for n, s in shapes.items()}
    return params, torch.randn(models, 5, 3, 7, 7), torch.randint(4, (models, 5))


def test_autograd_outside_vmap_equals_each_model_alone():
    params, x, labels = net_inputs(3)
    losses = torch.func.vmap(small_net)(params, x, labels)
    grads = torch.autograd.grad(losses.sum(), list(params.values()))
    for m in range(3):
        mine = {n: p[m].detach().clone().requires_grad_() for n, p in params.items()}
        loss = small_net(mine, x[m].clone(), labels[m].clone())
        assert torch.equal(loss, losses[m])
        for whole, one in zip(grads, torch.autograd.grad(loss, list(mine.values())), strict=True):
            assert torch.equal(whole[m], one)


def test_vmap_equals_the_stacked_ops():
    x, filters = torch.randn(3, 5, 3, 7, 7), torch.randn(3, 6, 3, 3, 3)
    stacked = torch.ops.shadow.conv2d_stacked(x, filters, None, 1, 1)
    mapped = torch.func.vmap(lambda x, w: kernels.conv2d(x, w, None, 1, 1))(x, filters)
    assert torch.equal(mapped, stacked)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
# Inductor's own imports warn
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_without_a_graph_break(backend):
    params, x, labels = net_inputs(2)

    def step(params, x, labels):
        return torch.func.vmap(small_net)(params, x, labels)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    eager, traced = step(params, x, labels), compiled(params, x, labels)
    wanted = torch.autograd.grad(eager.sum(), list(params.values()))
    found = torch.autograd.grad(traced.sum(), list(params.values()))
    if backend == "aot_eager":
        assert torch.equal(eager, traced)
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    # Inductor sums what lies between the ops in its own order
    assert torch.allclose(eager, traced, rtol=1e-5)
    assert all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(wanted, found, strict=True)
    )


@pytest.mark.parametrize("within_vmap", [False, True])
def test_functional_grad_is_refused_in_one_sentence(within_vmap):
    x, weight = torch.randn(2, 2, 2), torch.randn(2, 2, 2)

    def loss(weight, x):
        return kernels.linear(x, weight).sum()

    gradient = torch.func.grad(loss)
    call, args = gradient, (weight[0], x[0])
    if within_vmap:
        call, args = torch.func.vmap(gradient), (weight, x)
    with pytest.raises(RuntimeError, match=r"autograd\.grad.*outside vmap"):
        call(*args)


@pytest.fixture
def forgetful():
    yield
    _register.forget()


def test_the_plan_names_every_op(monkeypatch):
    plan = kernels.plan()
    ops = {key.split(":")[0] for key in plan if ":" in key}
    assert ops == set(_register._ops)
    assert plan["torch"] == torch.__version__
    assert plan["conv2d:cpu:float32"] == "cpu"
    assert kernels.plan(dtype=torch.float64)["conv2d:cpu:float64"] == "reference"
    monkeypatch.setenv("SHADOW_KERNELS", "reference")
    assert {v for k, v in kernels.plan().items() if ":" in k} == {"reference"}


@pytest.mark.usefixtures("forgetful")
def test_a_plan_is_adopted_or_refused():
    plan = kernels.plan()
    kernels.adopt(plan)
    kernels.adopt(plan | {"batch_norm:cpu:float32": "reference"})
    assert kernels.plan()["batch_norm:cpu:float32"] == "reference"
    _register.forget()
    for key, value in (("isa", "VAX"), ("numba", "0"), ("conv2d:cpu:float32", "abacus")):
        with pytest.raises(RuntimeError, match="fresh --out"):
            kernels.adopt(plan | {key: value})


def test_an_unknown_force_is_refused(monkeypatch):
    monkeypatch.setenv("SHADOW_KERNELS", "fastest")
    with pytest.raises(ValueError, match="expected 'reference'"):
        kernels.relu(torch.ones(1, 1, 1, 1))


def test_everything_runs_without_numba():
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "import torch, kernels\n"
        "out = kernels.batch_norm(torch.randn(2, 3, 4, 4), None, None, None, None, training=True)\n"
        "assert abs(float(out.y.mean())) < 1e-5\n"
        "plan = kernels.plan()\n"
        "assert plan['batch_norm:cpu:float32'] == 'reference', plan\n"
        "assert plan['conv2d:cpu:float32'] == 'cpu', plan\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
