"""Every op on odd shapes: inputs of one model, our call, and the same in plain torch.

N samples, C channels, K classes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels.batch_norm import pooled
from kernels.group_norm import pooled as group_pooled

Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """`shapes` names the float inputs; `labels` adds N labels below K under that name."""

    name: str
    shapes: dict[str, tuple[int, ...]]
    ours: Callable[..., Tensor | tuple[Tensor, ...]]
    plain: Callable[..., Tensor | tuple[Tensor, ...]]
    labels: tuple[int, int] | None = None

    def inputs(self, dtype: torch.dtype, seed: int, models: int = 0) -> Tensors:
        """Normal inputs (of `models` models, 0: one without a model axis), around 1 for scales."""
        generator = torch.Generator().manual_seed(seed)
        lead = (models,) if models else ()
        drawn = {}
        for name, shape in self.shapes.items():
            value = torch.randn((*lead, *shape), generator=generator, dtype=torch.float64)
            value = value + 1 if name in ("weight_c", "scale") else value
            drawn[name] = value.to(dtype)
        if self.labels:
            samples, classes = self.labels
            drawn["labels"] = torch.randint(classes, (*lead, samples), generator=generator)
        return drawn


def outputs_and_grads(call: Callable[..., object], inputs: Tensors, stack: bool = False) -> Tensors:
    """Outputs of a call and the gradients of their product with fixed random numbers.

    With `stack` the inputs have a model axis, the call runs under vmap, and every model's outputs
    meet the same numbers.
    """
    leaves = {
        n: t.detach().requires_grad_() if t.is_floating_point() else t for n, t in inputs.items()
    }
    names = list(leaves)
    if stack:
        over_models = torch.func.vmap(lambda *a: call(**dict(zip(names, a, strict=True))))
        results = over_models(*leaves.values())
    else:
        results = call(**leaves)
    results = results if isinstance(results, tuple) else (results,)
    loss = torch.zeros((), dtype=results[0].dtype)
    for result in results:
        loss = loss + (result * _numbers(result.shape[1:] if stack else result.shape)).sum()
    floats = [n for n in names if leaves[n].is_floating_point()]
    grads = torch.autograd.grad(loss, [leaves[n] for n in floats], allow_unused=True)
    found = {f"out{i}": r.detach() for i, r in enumerate(results)}
    for name, grad in zip(floats, grads, strict=True):
        found[f"grad {name}"] = torch.zeros_like(leaves[name]) if grad is None else grad
    return found


def _numbers(shape: torch.Size) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=generator, dtype=torch.float64).float()


def _plain_batch_norm(x, weight_c=None, bias=None, residual=None, relu=False, form=None):
    y = F.batch_norm(x, None, None, weight_c, bias, training=True)
    y = y if residual is None else y + residual
    y = y.relu() if relu else y
    if form is None:
        return y
    dims = [d for d in range(x.dim()) if d != 1]
    sigma = (x.var(dims, unbiased=False) + 1e-5).sqrt()
    ratio = (1 if weight_c is None else weight_c) / (
        sigma if form.through_sigma else sigma.detach()
    )
    phi = ratio**2 if form.form == "square" else (ratio.abs() - form.tau).clamp(min=0) ** 2
    return y, phi.mean()


def _batch_norm(x, weight_c=None, bias=None, residual=None, relu=False, form=None):
    out = kernels.batch_norm(
        x, weight_c, bias, None, None, training=True, relu=relu, residual=residual, penalty=form
    )
    return out.y if out.penalty is None else (out.y, out.penalty)


def _batch_norm_case(name, shape, parts=("weight_c", "bias"), relu=False, form=None):
    sizes = {"weight_c": shape[1:2], "bias": shape[1:2], "residual": shape}
    return Case(
        name=f"batch_norm {name}",
        shapes={"x": shape} | {p: sizes[p] for p in parts},
        ours=lambda **t: _batch_norm(**t, relu=relu, form=form),
        plain=lambda **t: _plain_batch_norm(**t, relu=relu, form=form),
    )


def _pooled(x, weight_c, bias, form=None):
    """The op itself, which a CPU does not choose."""
    static = (1e-5, True, form.form if form else "", form.tau if form else 1.0, True)
    y, _, _, penalty = pooled._forward(x, weight_c, bias, None, None, None, *static)
    return y if form is None else (y, penalty)


def _plain_pooled(x, weight_c, bias, form=None):
    found = _plain_batch_norm(x, weight_c, bias, relu=True, form=form)
    y, *penalty = found if form else (found,)
    return (F.max_pool2d(y, 2), *penalty) if form else F.max_pool2d(y, 2)


def _pooled_case(name, shape, form=None):
    return Case(
        name=f"batch_norm {name}",
        shapes={"x": shape, "weight_c": shape[1:2], "bias": shape[1:2]},
        ours=lambda x, weight_c, bias: _pooled(x, weight_c, bias, form),
        plain=lambda x, weight_c, bias: _plain_pooled(x, weight_c, bias, form),
    )


def _eval_batch_norm(call):
    def run(x, weight_c, bias, mean):
        var = torch.linspace(0.5, 2, x.shape[1], dtype=x.dtype)
        return call(x, mean.detach(), var, weight_c, bias)

    return run


def _plain_affine(x, scale=None, shift=None, residual=None, after=None, relu=False):
    def broad(t):
        return t if t.dim() == 0 else t[:, None, None]

    y = x if scale is None else x * broad(scale)
    y = y if shift is None else y + broad(shift)
    y = y if residual is None else y + residual
    y = y.relu() if relu else y
    return y if after is None else y + after


def _affine_case(name, shape, parts, relu=False):
    return Case(
        name=f"affine {name}",
        shapes={"x": shape} | parts,
        ours=lambda **t: kernels.affine(
            t["x"], t.get("scale"), t.get("shift"), relu, t.get("residual"), t.get("after")
        ),
        plain=lambda **t: _plain_affine(**t, relu=relu),
    )


def _group_norm_case(name, shape, groups, relu=False, residual=False):
    def plain(x, weight_c, bias, residual=None):
        y = F.group_norm(x, groups, weight_c, bias)
        y = y if residual is None else y + residual
        return y.relu() if relu else y

    shapes = {"x": shape, "weight_c": shape[1:2], "bias": shape[1:2]}
    return Case(
        name=f"group_norm {name}",
        shapes=shapes | ({"residual": shape} if residual else {}),
        ours=lambda x, weight_c, bias, residual=None: kernels.group_norm(
            x, groups, weight_c, bias, relu=relu, residual=residual
        ),
        plain=plain,
    )


def _conv_case(name, x, weight, bias, stride, padding):
    return Case(
        name=f"conv2d {name}",
        shapes={"x": x, "weight": weight} | ({"bias": weight[:1]} if bias else {}),
        ours=lambda x, weight, bias=None: kernels.conv2d(x, weight, bias, stride, padding),
        plain=lambda x, weight, bias=None: F.conv2d(x, weight, bias, stride, padding),
    )


def _pool_case(name, shape, ours, plain):
    return Case(name=f"pool {name}", shapes={"x": shape}, ours=ours, plain=plain)


def _plain_phi(logits, labels):
    others = logits.detach().clone()
    others[torch.arange(len(labels)), labels] = -torch.inf
    phi = logits.detach()[torch.arange(len(labels)), labels] - others.logsumexp(1)
    return F.cross_entropy(logits, labels, reduction="none"), phi


_SQUARE = kernels.PenaltyForm(form="square")
_HINGE = kernels.PenaltyForm(form="hinge", tau=0.4)
_FIXED = kernels.PenaltyForm(form="hinge", tau=0.4, through_sigma=False)

CASES = [
    _conv_case("planes", (3, 1, 9, 7), (6, 1, 5, 5), True, 1, 2),
    _conv_case("to channels-last", (5, 6, 7, 7), (13, 6, 3, 3), False, 1, 0),
    _conv_case("stride 2", (3, 16, 9, 9), (24, 16, 3, 3), False, 2, 1),
    _conv_case("1x1 stride 2", (3, 24, 5, 7), (16, 24, 1, 1), True, 2, 0),
    _conv_case("wide, small map", (3, 256, 4, 4), (9, 256, 3, 3), True, 1, 1),
    _conv_case("wide, large map", (2, 256, 9, 9), (9, 256, 3, 3), False, 2, 1),
    _conv_case("images", (5, 3, 8, 8), (16, 3, 3, 3), True, 1, 1),
    Case(
        name="linear",
        shapes={"x": (5, 13), "weight": (7, 13), "bias": (7,)},
        ours=lambda x, weight, bias=None: kernels.linear(x, weight, bias),
        plain=lambda x, weight, bias=None: F.linear(x, weight, bias),
    ),
    Case(
        name="linear without bias",
        shapes={"x": (3, 33), "weight": (10, 33)},
        ours=lambda x, weight, bias=None: kernels.linear(x, weight, bias),
        plain=lambda x, weight, bias=None: F.linear(x, weight, bias),
    ),
    _batch_norm_case("planes", (5, 6, 7, 9)),
    _batch_norm_case("channels-last", (5, 24, 7, 3), relu=True),
    _batch_norm_case("residual", (3, 13, 5, 5), ("weight_c", "bias", "residual"), relu=True),
    _batch_norm_case("residual of planes", (3, 5, 5, 5), ("weight_c", "bias", "residual")),
    _batch_norm_case("bare", (7, 12, 3, 5), ()),
    _batch_norm_case("no bias", (7, 3, 3, 5), ("weight_c",)),
    _batch_norm_case("1x1", (9, 17, 1, 1), relu=True),
    _batch_norm_case("features", (9, 5)),
    _batch_norm_case("square", (5, 6, 7, 7), relu=True, form=_SQUARE),
    _batch_norm_case("hinge", (5, 16, 7, 7), ("weight_c", "bias", "residual"), form=_HINGE),
    _batch_norm_case("hinge, sigma held", (5, 5, 4, 7), form=_FIXED),
    _batch_norm_case("square, gamma frozen", (5, 5, 4, 7), (), form=_SQUARE),
    Case(
        name="batch_norm eval",
        shapes={"x": (5, 6, 7, 7), "weight_c": (6,), "bias": (6,), "mean": (6,)},
        ours=_eval_batch_norm(
            lambda x, m, v, w, b: kernels.batch_norm(x, w, b, m, v, training=False, relu=True).y
        ),
        plain=_eval_batch_norm(lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b).relu()),
    ),
    _pooled_case("pooled", (5, 6, 7, 8)),
    _pooled_case("pooled, hinge", (3, 13, 5, 4), _HINGE),
    Case(
        name="group_norm pooled",
        shapes={"x": (3, 16, 5, 7), "weight_c": (16,), "bias": (16,)},
        ours=lambda x, weight_c, bias: group_pooled._forward(x, weight_c, bias, 4, 1e-5, True)[0],
        plain=lambda x, weight_c, bias: F.max_pool2d(F.group_norm(x, 4, weight_c, bias).relu(), 2),
    ),
    _group_norm_case("planes", (3, 6, 5, 7), 2),
    _group_norm_case("channels-last", (5, 24, 7, 7), 4, relu=True),
    _group_norm_case("residual", (3, 16, 5, 3), 8, relu=True, residual=True),
    _group_norm_case("one group", (3, 5, 5, 3), 1, residual=True),
    _affine_case("scalars", (5, 6, 7, 7), {"scale": (), "shift": ()}, relu=True),
    _affine_case(
        "channels", (5, 16, 3, 7), {"scale": (16,), "shift": (16,), "residual": (5, 16, 3, 7)}
    ),
    _affine_case(
        "mixed", (3, 5, 3, 7), {"scale": (), "shift": (5,), "residual": (3, 5, 3, 7)}, relu=True
    ),
    _affine_case("shift", (3, 24, 3, 7), {"shift": ()}),
    _affine_case("scale", (3, 5, 3, 7), {"scale": (5,)}, relu=True),
    _affine_case("sum", (3, 5, 3, 7), {"residual": (3, 5, 3, 7)}, relu=True),
    _affine_case("after alone", (3, 16, 3, 7), {"after": ()}, relu=True),
    _affine_case("two shifts", (3, 5, 5, 7), {"shift": (), "after": ()}, relu=True),
    _affine_case("shifts without ReLU", (3, 24, 3, 7), {"shift": (24,), "after": ()}),
    _affine_case(
        "Fixup",
        (70, 16, 9, 7),
        {"scale": (), "shift": (), "residual": (70, 16, 9, 7), "after": ()},
        relu=True,
    ),
    Case(name="relu", shapes={"x": (3, 12, 5, 7)}, ours=kernels.relu, plain=torch.relu),
    _pool_case("max planes", (5, 6, 9, 11), kernels.max_pool, lambda x: F.max_pool2d(x, 2)),
    _pool_case("max channels-last", (3, 13, 7, 8), kernels.max_pool, lambda x: F.max_pool2d(x, 2)),
    _pool_case(
        "max of 3", (3, 6, 7, 9), lambda x: kernels.max_pool(x, 3), lambda x: F.max_pool2d(x, 3)
    ),
    _pool_case(
        "max of 3, channels-last",
        (3, 16, 8, 9),
        lambda x: kernels.max_pool(x, 3),
        lambda x: F.max_pool2d(x, 3),
    ),
    _pool_case("avg planes", (5, 6, 9, 11), kernels.avg_pool, lambda x: F.avg_pool2d(x, 2)),
    _pool_case(
        "avg channels-last",
        (3, 24, 7, 7),
        lambda x: kernels.avg_pool(x, 3),
        lambda x: F.avg_pool2d(x, 3),
    ),
    _pool_case("global", (3, 24, 5, 7), kernels.global_avg_pool, lambda x: x.mean((2, 3))),
    _pool_case("global planes", (3, 5, 5, 7), kernels.global_avg_pool, lambda x: x.mean((2, 3))),
    Case(
        name="concat",
        shapes={"first": (3, 6, 5, 7), "second": (3, 12, 5, 7)},
        ours=lambda first, second: kernels.concat(first, second),
        plain=lambda first, second: torch.cat([first, second], 1),
    ),
    Case(
        name="cross_entropy",
        shapes={"logits": (7, 11)},
        labels=(7, 11),
        ours=lambda logits, labels: kernels.cross_entropy(logits * 5, labels),
        plain=lambda logits, labels: F.cross_entropy(logits * 5, labels, reduction="none"),
    ),
    Case(
        name="cross_entropy_phi",
        shapes={"logits": (7, 11)},
        labels=(7, 11),
        ours=lambda logits, labels: kernels.cross_entropy_phi(logits, labels),
        plain=_plain_phi,
    ),
]
