"""A whole training step on the Triton kernels: under vmap, stacked by hand, and per model."""

import torch
from triton_case import INTERPRETED_NET, Tracer, assert_close, kernels, noise

from kernels import _register, grad_norm

FORM = kernels.PenaltyForm(form="hinge", tau=0.3)
LABELS = torch.tensor([0, 2, 1, 1])
MODELS, SAMPLES = 3, 4


def parameters(dtype=torch.float32):
    shapes = {"conv": (8, 3, 3, 3), "gamma": (8,), "beta": (8,), "wide": (8, 8, 3, 3),
              "group_gamma": (8,), "group_beta": (8,), "head": (3, 8), "bias": (3,)}  # fmt: skip
    return {k: noise(MODELS, *s, seed=i, dtype=dtype) for i, (k, s) in enumerate(shapes.items())}


def net(p, images, probe):
    """Convolution, batch norm with penalty and norms, residual group norm, head: (loss, P)."""
    h = kernels.conv2d(images, p["conv"], None, 1, 1)
    out = kernels.batch_norm(h, p["gamma"], p["beta"], None, None, training=True, relu=True,
                             penalty=FORM, probe_B=probe)  # fmt: skip
    h = grad_norm.conv2d(out.y, p["wide"], None, probe, 1, 1)
    h = kernels.group_norm(h, 2, p["group_gamma"], p["group_beta"], relu=True, residual=out.y)
    logits = kernels.linear(kernels.global_avg_pool(h), p["head"], p["bias"])
    loss, phi = kernels.cross_entropy_phi(logits, LABELS)
    return loss.sum(), out.penalty, phi


def gradients(p, images, lambda_M, **turn):
    leaves = {k: v.clone().requires_grad_() for k, v in p.items()}
    probe = torch.zeros(images.shape[:2], dtype=images.dtype).requires_grad_()
    with Tracer(**turn):
        loss, penalty, phi = torch.func.vmap(net)(leaves, images, probe)
        wanted = [*leaves.values(), probe]
        grads = torch.autograd.grad((loss + lambda_M * penalty).sum(), wanted)
    return [phi.detach(), *grads]


def stacked(p, images, lambda_M):
    """The same step from the stacked ops themselves, without vmap."""
    ops = {name: op.stacked for name, op in _register._ops.items()}
    leaves = {k: v.clone().requires_grad_() for k, v in p.items()}
    probe = torch.zeros(images.shape[:2]).requires_grad_()
    h = ops["conv2d"](images, leaves["conv"], None, 1, 1)
    y, _, _, penalty = ops["batch_norm"](
        h, leaves["gamma"], leaves["beta"], None, None, None, probe, 1e-5, True, "hinge", 0.3, True
    )
    h = ops["probed_conv2d"](y, leaves["wide"], None, probe, 1, 1)
    h, _, _ = ops["group_norm"](h, leaves["group_gamma"], leaves["group_beta"], y, 2, 1e-5, True)
    pooled = torch.func.vmap(kernels.global_avg_pool)(h)
    logits = ops["linear"](pooled, leaves["head"], leaves["bias"])
    loss, phi, _ = ops["cross_entropy_phi"](logits, LABELS.expand(MODELS, SAMPLES))
    wanted = [*leaves.values(), probe]
    grads = torch.autograd.grad((loss.sum(1) + lambda_M * penalty).sum(), wanted)
    return [phi.detach(), *grads]


def test_vmap_with_grad_outside_equals_the_stacked_calls_bit_for_bit():
    images, lambda_M = noise(MODELS, SAMPLES, 3, 6, 6, seed=99), torch.tensor([0.0, 0.1, 3.0])
    found = gradients(parameters(), images, lambda_M)
    want = stacked(parameters(), images, lambda_M)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_a_step_equals_float64_and_each_model_alone():
    images, lambda_M = noise(MODELS, SAMPLES, 3, 6, 6, seed=99), torch.tensor([0.0, 0.1, 3.0])
    p = parameters()
    found = gradients(p, images, lambda_M)
    wide = gradients({k: v.double() for k, v in p.items()}, images.double(), lambda_M.double())
    for name, got, want in zip(("phi", *p, "norms"), found, wide, strict=True):
        assert_close(name, got, want, tolerance=INTERPRETED_NET)
    for m in range(MODELS):
        one = {k: v[m : m + 1] for k, v in p.items()}
        alone = gradients(one, images[m : m + 1], lambda_M[m : m + 1])
        assert all(torch.equal(a[0], b[m]) for a, b in zip(alone, found, strict=True))
    turned = gradients(p, images, lambda_M, order=1)
    assert all(torch.equal(a, b) for a, b in zip(turned, found, strict=True))


def test_compiled_it_is_the_same_to_the_bit():
    """The ops are opaque to torch.compile: no break, and the kernels that run are these."""
    images, lambda_M = noise(MODELS, SAMPLES, 3, 6, 6, seed=99), torch.tensor([0.0, 0.1, 3.0])
    leaves = {k: v.requires_grad_() for k, v in parameters().items()}
    probe = torch.zeros(images.shape[:2]).requires_grad_()

    def step(leaves, images, probe):
        loss, penalty, _ = torch.func.vmap(net)(leaves, images, probe)
        return (loss + lambda_M * penalty).sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    wanted = [*leaves.values(), probe]
    with Tracer() as trace:
        found = torch.autograd.grad(compiled(leaves, images, probe), wanted)
    names = {launch.name for launch in trace.launches}
    assert {"apply_backward", "backward", "entropy"} <= names
    expected = torch.autograd.grad(step(leaves, images, probe), wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
