"""One op, one name, four rules: implementation, fake, backward, vmap.

`register` makes a pair of `torch.library.custom_op`s from one description: `shadow::NAME` works on
one model's tensors, `shadow::NAME_stacked` on the same tensors with a leading model axis. The vmap
rule of the first calls the second; the vmap rule of the second folds the extra axis into the model
axis. `differentiate` gives both the same autograd formula, whose backward is such a pair itself.

An op folder holds `reference.py`, and may hold `cpu.py`, `cuda.py` (plain torch) and `triton.py`:
- `reference.NAME(*args) -> Tensor | tuple[Tensor, ...]` takes one model's tensors: plain torch.
- `cpu.NAME(out, *args)`, and `cuda` and `triton` alike, take stacked tensors (any strides) and fill
  the uninitialised `out`, a tuple from the op's `allocate`. They may return NotImplemented before
  writing, for a case (never a model count) that they leave to the reference.
A GPU implementation serves only after its self-check against the reference (`_selfcheck`).
Which of them runs is chosen per (op, device type, dtype), see `choose`.

M models.
"""

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("kernels")

NAMESPACE = "shadow"
FORCE = "SHADOW_KERNELS"
"""Environment variable: "reference" forces the reference implementation of every op."""

Fill = Callable[..., object]
_chosen: dict[tuple[str, str, torch.dtype, str], Fill | None] = {}
_adopted: dict[str, str] = {}
_ops: dict[str, "Op"] = {}
_shortcuts: dict[str, type[torch.autograd.Function]] = {}
"""Name of a differentiable op -> its stacked form, past the dispatcher."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """A registered pair. `single` and `stacked` are the dispatcher's op overloads."""

    name: str
    folder: str
    single: Any
    stacked: Any
    definitions: tuple[Any, Any]
    allocate: Callable[..., tuple[Tensor, ...]] | None = None
    compute: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        """The op on one model's tensors, or on a stack's under vmap.

        Directly under one vmap, as in training, it goes past torch's dispatcher, whose layers of
        Python cost as much as a small network's arithmetic; everything else (compilation, modes,
        tensor subclasses, nested vmap, no vmap) goes through the registered pair.
        """
        level, shortcut = _only_vmap(), _shortcuts.get(self.name)
        if not level or shortcut is None:
            return self.single(*args)
        return self._directly(level, shortcut, args)

    def _directly(
        self, level: int, shortcut: type[torch.autograd.Function], args: tuple[Any, ...]
    ) -> Any:
        """The stacked op, called with the vmap level popped as its vmap rule would be."""
        pairs = [_unwrap(a, level) if isinstance(a, Tensor) else (a, None) for a in args]
        models = 0
        for value, dim in pairs:
            if isinstance(value, Tensor):
                if type(value) not in _PLAIN:
                    return self.single(*args)
                if dim is not None:
                    models = value.shape[dim]
        if not models:
            return self.single(*args)
        lifted = [_lift(value, dim, models) for value, dim in pairs]
        saved = torch._C._functorch.pop_dynamic_layer_stack()
        try:
            out = super(torch.autograd.Function, shortcut).apply(*lifted)  # type: ignore[misc]
        finally:
            torch._C._functorch.push_dynamic_layer_stack(saved)
        add = torch._C._functorch._add_batch_dim
        if isinstance(out, tuple):
            return tuple(add(o, 0, level) for o in out)
        return add(out, 0, level)


_PLAIN = (Tensor, torch.nn.Parameter)
_unwrap = torch._C._functorch._unwrap_batched


def _only_vmap() -> int:
    """The level of the one vmap that runs, where eager autograd alone looks on; else 0."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return 0
    stack = torch._C._functorch.get_interpreter_stack()
    if stack is None or len(stack) != 1:
        return 0
    only = stack[0]
    return only.level() if only.key() == torch._C._functorch.TransformType.Vmap else 0


def register(
    folder: str, name: str, schema: str, allocate: Callable[..., tuple[Tensor, ...]]
) -> Op:
    """Register `shadow::name` and `shadow::name_stacked` with the same schema.

    `allocate(*stacked_args)` returns the uninitialised stacked outputs; it serves as the fake too.
    """
    reference = getattr(importlib.import_module(f"kernels.{folder}.reference"), name)

    def stacked(*args: Any) -> Any:
        out = allocate(*args)
        first = next(a for a in args if isinstance(a, Tensor))
        fill = choose(folder, name, first.device.type, out[0].dtype)
        if fill is None or fill(out, *args) is NotImplemented:
            _fill_by_reference(reference, out, args)
        return out if len(out) > 1 else out[0]

    def stacked_fake(*args: Any) -> Any:
        out = allocate(*args)
        return out if len(out) > 1 else out[0]

    many = torch.library.custom_op(
        f"{NAMESPACE}::{name}_stacked", stacked, mutates_args=(), schema=schema
    )
    one = torch.library.custom_op(
        f"{NAMESPACE}::{name}", _alone(stacked), mutates_args=(), schema=schema
    )
    many.register_fake(stacked_fake)
    one.register_fake(_alone(stacked_fake))
    namespace = getattr(torch.ops, NAMESPACE)
    op = Op(
        name=name,
        folder=folder,
        single=getattr(namespace, name).default,
        stacked=getattr(namespace, f"{name}_stacked").default,
        definitions=(one, many),
        allocate=allocate,
        compute=stacked,
    )
    one.register_vmap(_stack_rule(op.stacked))
    many.register_vmap(_fold_rule(op.stacked))
    _ops[name] = op
    return op


def differentiate(
    forward: Op,
    backward: Op,
    *,
    setup: Callable[[Any, tuple[Any, ...], Any], None],
    gradients: Callable[..., tuple[Any, ...]],
) -> None:
    """Give both ops of `forward` the formula `gradients(ctx, call_backward, *grad_outputs)`."""
    calls = (backward.single, backward.stacked)
    for definition, call in zip(forward.definitions, calls, strict=True):

        def formula(ctx: Any, *grads: Any, call: Any = call) -> tuple[Any, ...]:
            return gradients(ctx, call, *grads)

        definition.register_autograd(formula, setup_context=setup)
    _shortcuts[forward.name] = _shortcut(forward, backward, setup, gradients)


def _shortcut(
    forward: Op,
    backward: Op,
    setup: Callable[[Any, tuple[Any, ...], Any], None],
    gradients: Callable[..., tuple[Any, ...]],
) -> type[torch.autograd.Function]:
    """The stacked op and its formula as a plain autograd function."""
    if forward.compute is None or backward.compute is None:
        raise ValueError(f"{forward.name} and {backward.name} must be registered pairs")
    compute, transpose = forward.compute, backward.compute

    class Shortcut(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            out = compute(*args)
            setup(ctx, args, out)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            call = backward.stacked if torch.is_grad_enabled() else transpose
            return gradients(ctx, call, *grads)

    return Shortcut


def _alone(stacked: Callable[..., Any]) -> Callable[..., Any]:
    """The single-model form of a stacked function: a stack of one."""

    def single(*args: Any) -> Any:
        out = stacked(*(a[None] if isinstance(a, Tensor) else a for a in args))
        return tuple(o[0] for o in out) if isinstance(out, tuple) else out[0]

    return single


def _fill_by_reference(
    reference: Callable[..., Any], out: tuple[Tensor, ...], args: tuple[Any, ...]
) -> None:
    for m in range(out[0].shape[0]):
        results = reference(*(_aligned(a[m]) if isinstance(a, Tensor) else a for a in args))
        results = results if isinstance(results, tuple) else (results,)
        for target, result in zip(out, results, strict=True):
            if result is not None:
                target[m].copy_(result)


def _aligned(value: Tensor) -> Tensor:
    """The tensor, copied if it does not start on a cache line.

    Matrix libraries may round differently on other alignments, which a model's slot would decide.
    """
    return value.clone() if value.is_cpu and value.data_ptr() % 64 else value


def _stack_rule(stacked: Any) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        lifted = (_lift(a, d, info.batch_size) for a, d in zip(args, in_dims, strict=True))
        out = stacked(*lifted)
        return out, (0,) * len(out) if isinstance(out, tuple) else 0

    return rule


def _fold_rule(stacked: Any) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        size = info.batch_size
        lifted = [_lift(a, d, size) for a, d in zip(args, in_dims, strict=True)]
        out = stacked(*(a.flatten(0, 1) if isinstance(a, Tensor) else a for a in lifted))
        if isinstance(out, tuple):
            return tuple(o.unflatten(0, (size, -1)) for o in out), (0,) * len(out)
        return out.unflatten(0, (size, -1)), 0

    return rule


def _lift(value: Any, dim: int | None, size: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    if dim is None:
        return value[None].expand(size, *value.shape)
    return value.movedim(dim, 0)


def refuse_functional_grad() -> None:
    """Refuse torch.func.grad, vjp and jvp over our ops, which torch cannot differentiate."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return
    stack = torch._C._functorch.get_interpreter_stack() or []
    kinds = torch._C._functorch.TransformType
    if any(level.key() in (kinds.Grad, kinds.Jvp) for level in stack):
        raise RuntimeError(
            "torch.func.grad (or vjp, jvp) cannot differentiate the ops of kernels: call "
            "torch.autograd.grad(torch.func.vmap(loss)(params, …).sum(), params) outside vmap"
        )


def choose(folder: str, name: str, device: str, dtype: torch.dtype) -> Fill | None:
    """The fast implementation of an op, or None for the reference looped over models."""
    forced = os.environ.get(FORCE, "")
    key = (name, device, dtype, forced)
    if key not in _chosen:
        if forced not in ("", "reference"):
            raise ValueError(f"{FORCE} is '{forced}': expected 'reference' or nothing")
        wanted = _adopted.get(_plan_key(name, device, dtype))
        use_reference = forced == "reference" or wanted == "reference"
        _chosen[key] = None if use_reference else _fast(folder, name, device, dtype)
    return _chosen[key]


def _fast(folder: str, name: str, device: str, dtype: torch.dtype) -> Fill | None:
    if device == "cpu" and dtype is torch.float32:
        return _function(folder, "cpu", name)
    if device == "cuda" and dtype in (torch.float32, torch.bfloat16):
        for file in ("cuda", "triton"):
            fill = _function(folder, file, name)
            if fill is None:
                continue
            reason = importlib.import_module("kernels._selfcheck").reason(name, fill, device, dtype)
            if not reason:
                return fill
            logger.warning("%s on %s runs its reference: %s", name, device, reason)
    return None


def _function(folder: str, file: str, name: str) -> Fill | None:
    path = f"kernels.{folder}.{file}"
    if importlib.util.find_spec(path) is None:
        return None
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        logger.warning("%s runs its reference: %s", name, error)
        return None
    fill: Fill | None = getattr(module, name, None)
    return fill


def declare(folder: str, name: str) -> None:
    """List a function that is chosen like an op but is not a registered pair (in-place steps)."""
    _ops[name] = Op(name=name, folder=folder, single=None, stacked=None, definitions=(None, None))


def _plan_key(name: str, device: str, dtype: torch.dtype) -> str:
    return f"{name}:{device}:{str(dtype).removeprefix('torch.')}"


def plan(device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """The numeric plan: which implementation serves each op, and what its bits depend on."""
    found = {"torch": torch.__version__, "numba": "none"}
    if importlib.util.find_spec("numba") is not None:
        found["numba"] = importlib.import_module("numba").__version__
    if device == "cpu":
        found["isa"] = torch.backends.cpu.get_cpu_capability()
    else:
        found["sm"] = ".".join(map(str, torch.cuda.get_device_capability()))
        found["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    for name, op in sorted(_ops.items()):
        fill = choose(op.folder, name, device, dtype)
        where = "reference" if fill is None else fill.__module__.rpartition(".")[2]
        found[_plan_key(name, device, dtype)] = where
    return found


def adopt(given: dict[str, str]) -> None:
    """Run by a plan made elsewhere, or refuse in one sentence.

    Raises RuntimeError where a version, the instruction set or an implementation differs.
    """
    forget()
    for key, wanted in given.items():
        if wanted == "reference" and ":" in key:
            _adopted[key] = wanted
    devices = {tuple(key.split(":")[1:]) for key in given if ":" in key}
    for device, dtype in devices:
        here = plan(device, getattr(torch, dtype))
        for key, wanted in given.items():
            found = here.get(key)
            if found != wanted and (":" not in key or key.endswith(f":{device}:{dtype}")):
                raise RuntimeError(
                    f"this machine cannot run the run's numeric plan: it asks for {key} = "
                    f"{wanted}, here it is {found}; name a fresh --out to plan anew"
                )


def forget() -> None:
    """Forget the choices made and the plan adopted (for tests and self-checks)."""
    _chosen.clear()
    _adopted.clear()
