"""What gpu_check holds right before it times anything: every op, and a whole net, on the device.

M models, N samples, C channels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kernels
from bench.gpu_rows import Bench
from kernels import _examples, _register, _selfcheck, grad_norm

Tensors = list[Tensor]


def correctness(bench: Bench, dtypes: tuple[torch.dtype, ...]) -> list[str]:
    """What is wrong: every op against its reference, and a model alone against itself stacked."""
    wrong = []
    for name, examples in _examples.EXAMPLES.items():
        for dtype in dtypes:
            folder = _examples.FOLDER.get(name, name.removesuffix("_backward"))
            fill = serving(folder, name, bench.device, dtype)
            label = f"{name} {str(dtype).removeprefix('torch.')}"
            if fill is None:
                print(f"  {label}: the reference serves")
                continue
            reason = _selfcheck.examine(name, fill, bench.device, dtype)
            reason = reason or alone(name, fill, examples(dtype), bench.device)
            reason = reason or graphed(bench, name, fill, examples(dtype))
            right = f"right, and the same alone and {again(bench)}"
            print(f"  {label}: {reason or right} ({fill.__module__})")
            wrong += [f"{label}: {reason}"] if reason else []
    return wrong + whole_net(bench)


def again(bench: Bench) -> str:
    """What `bench.captured` makes of a call."""
    return "from a CUDA graph" if bench.device == "cuda" else "once more (no graphs on a CPU)"


def serving(folder: str, name: str, device: str, dtype: torch.dtype) -> Any:
    """The fast implementation of an op, whatever its self-check said."""
    for file in ("cuda", "triton") if device == "cuda" else ("cpu",):
        if fill := _register._function(folder, file, name):
            return fill
    return None


def alone(name: str, fill: Any, examples: list[list[Any]], device: str) -> str:
    """Compare model 1 of a stack with itself in a stack of one, bit for bit."""
    if name == "sgd":
        return ""
    for args in examples:
        args = [a.to(device) if isinstance(a, Tensor) else a for a in args]
        one = [a[1:] if isinstance(a, Tensor) else a for a in args]
        out, single = _examples.outputs(name, args), _examples.outputs(name, one)
        if NotImplemented in (fill(out, *args), fill(single, *one)):
            continue
        if not all(torch.equal(o[1:], s) for o, s in zip(out, single, strict=True)):
            return "a model alone differs from the same model in a stack"
    return ""


def graphed(bench: Bench, name: str, fill: Any, examples: list[list[Any]]) -> str:
    """Compare an op's outputs from a replayed CUDA graph with its own, bit for bit."""
    for args in examples:
        sets = [[_fresh(a, bench.device) for a in args] for _ in range(2)]
        out, want = (_examples.outputs(name, given) for given in sets)
        calls = [partial(fill, *given) for given in sets]
        if name != "sgd":
            calls = [partial(fill, o, *given) for o, given in zip((out, want), sets, strict=True)]
        if calls[1]() is NotImplemented:
            continue
        replay = bench.captured(calls[0])
        for tensor, before in zip(sets[0], args, strict=True):
            if isinstance(tensor, Tensor):
                tensor.copy_(before)
        replay()
        _finish(bench)
        if not all(torch.equal(a, b) for a, b in zip(out, want, strict=True)):
            return "a replayed CUDA graph gives other numbers"
    return ""


def _fresh(value: Any, device: str) -> Any:
    return value.to(device, copy=True) if isinstance(value, Tensor) else value


def _finish(bench: Bench) -> None:
    if bench.device == "cuda":
        torch.cuda.synchronize()


def whole_net(bench: Bench) -> list[str]:
    """What is wrong with a net's gradients: compiled, and as a CUDA graph, against eager, bitwise.

    Every op stands in it once: convolutions, norms with pooling, penalty and norms, head, loss.
    """
    shapes = {"conv": (16, 3, 3, 3), "gamma": (16,), "beta": (16,), "wide": (16, 16, 3, 3),
              "point": (16, 16, 1, 1), "head": (5, 16)}  # fmt: skip
    leaves = [torch.randn(bench.models, *s, device=bench.device) for s in shapes.values()]
    leaves += [torch.zeros(bench.models, bench.batch, device=bench.device)]
    images = torch.randn(bench.models, bench.batch, 3, 12, 12, device=bench.device)
    labels = torch.arange(bench.batch, device=bench.device) % 5
    form = kernels.PenaltyForm(form="hinge", tau=0.3)
    options: dict[str, Any] = {"training": True, "relu": True, "penalty": form}

    def loss(x: Tensor, p: Tensors) -> Tensor:
        conv, gamma, beta, wide, point, head, probe = p
        h = kernels.conv2d(x, conv, None, 1, 1)
        out = kernels.batch_norm(h, gamma, beta, None, None, probe_B=probe, pool=2, **options)
        h = grad_norm.conv2d(out.y, wide, None, probe, 1, 1)
        more = kernels.batch_norm(h, gamma, beta, None, None, residual=out.y, **options)
        h = kernels.group_norm(kernels.conv2d(more.y, point), 4, gamma, beta, relu=True, pool=2)
        logits = grad_norm.linear(kernels.global_avg_pool(h), head, None, probe)
        assert out.penalty is not None
        assert more.penalty is not None
        return kernels.cross_entropy_phi(logits, labels)[0].sum() + out.penalty + more.penalty

    def step(images: Tensor, leaves: Tensors) -> Tensor:
        return torch.func.vmap(loss)(images, leaves).sum()

    def gradients(total: Callable[[Tensor, Tensors], Tensor]) -> Tensors:
        wanted = [leaf.detach().requires_grad_() for leaf in leaves]
        return list(torch.autograd.grad(total(images, wanted), wanted))

    want = gradients(step)
    wrong = []
    compiled = gradients(torch.compile(step, fullgraph=True, backend="aot_eager"))
    if not all(torch.equal(a, b) for a, b in zip(want, compiled, strict=True)):
        wrong.append("a whole net: compiled, its gradients differ")
    kept: Tensors = []

    def keep() -> None:
        kept[:] = gradients(step)

    bench.captured(keep)()
    _finish(bench)
    if not all(torch.equal(a, b) for a, b in zip(want, kept, strict=True)):
        wrong.append("a whole net: from a CUDA graph, its gradients differ")
    print(f"  a whole net: {'; '.join(wrong) or f'the same compiled and {again(bench)}'}")
    return wrong
