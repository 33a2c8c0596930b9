"""Per-sample gradient norms against loops over samples, in every sense, through a whole net."""

import pytest
import torch
from torch.func import vmap

import kernels
from kernels import grad_norm

MODELS, SAMPLES, EPS = 3, 5, 1e-5
LABELS = torch.tensor([0, 2, 1, 1, 2])


def parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = {"conv": (4, 3, 3, 3), "conv_bias": (4,), "gamma": (4,), "beta": (4,), "head": (3, 36),
              "head_bias": (3,), "mean": (4,), "var": (4,)}  # fmt: skip
    made = {
        k: torch.randn(MODELS, *s, generator=generator, dtype=torch.float64).to(dtype)
        for k, s in shapes.items()
    }
    made["var"] = made["var"].square() + 0.5
    images = torch.randn(MODELS, SAMPLES, 3, 6, 6, generator=generator, dtype=torch.float64)
    return made, images.to(dtype)


def losses(p, images, probe, sense):
    h = grad_norm.conv2d(images, p["conv"], p["conv_bias"], probe, stride=2, padding=1)
    h = grad_norm.batch_norm(
        h, p["gamma"], p["beta"], p["mean"], p["var"], probe, sense=sense, relu=True
    ).y
    logits = grad_norm.linear(h.flatten(1), p["head"], p["head_bias"], probe)
    return kernels.cross_entropy(logits, LABELS)


TRAINED = ("conv", "conv_bias", "gamma", "beta", "head", "head_bias")


def textbook(p, images, sense):
    """Squared norms of one model: plain torch, one backward pass a sample."""
    from torch.nn import functional as F

    samples = images.shape[0]
    copies = {k: p[k].expand(samples, *p[k].shape).clone().requires_grad_() for k in TRAINED}
    h = torch.cat([
        F.conv2d(images[n : n + 1], copies["conv"][n], copies["conv_bias"][n], 2, 1)
        for n in range(samples)
    ])  # fmt: skip
    mean, var = p["mean"], p["var"]
    if sense != "frozen":
        mean = h.mean((0, 2, 3))
        var = h.var((0, 2, 3), unbiased=False)
    if sense == "frozen_batch":
        mean, var = mean.detach(), var.detach()
    h = (h - mean[:, None, None]) / (var + EPS).sqrt()[:, None, None]
    h = (h * copies["gamma"][:, :, None, None] + copies["beta"][:, :, None, None]).relu()
    logits = torch.einsum("nf,nof->no", h.flatten(1), copies["head"]) + copies["head_bias"]
    total = F.cross_entropy(logits, LABELS, reduction="sum")
    grads = torch.autograd.grad(total, list(copies.values()))
    return sum(g.flatten(1).square().sum(1) for g in grads)


@pytest.mark.parametrize("sense", ["contribution", "frozen", "frozen_batch"])
def test_a_net_gives_each_samples_norm_in_one_backward_pass(sense):
    p, images = parameters()
    probe = torch.zeros(MODELS, SAMPLES, dtype=torch.float64, requires_grad=True)
    total = vmap(lambda p, x, probe: losses(p, x, probe, sense))(p, images, probe).sum()
    (norms,) = torch.autograd.grad(total, probe)
    for m in range(MODELS):
        want = textbook({k: v[m] for k, v in p.items()}, images[m], sense)
        assert torch.allclose(norms[m], want, rtol=1e-11, atol=0)


def test_contributions_sum_to_the_gradient_and_frozen_norms_are_each_samples_own():
    """A batch of one repeated sample: its contribution is the batch's gradient over the count."""
    p, images = parameters()
    one = {k: v[0].clone().requires_grad_(k in TRAINED) for k, v in p.items()}
    own = []
    for n in range(SAMPLES):
        probe = torch.zeros(1, dtype=torch.float64)
        h = grad_norm.conv2d(images[0, n : n + 1], one["conv"], one["conv_bias"], probe, 2, 1)
        h = grad_norm.batch_norm(
            h,
            one["gamma"],
            one["beta"],
            p["mean"][0],
            p["var"][0],
            probe,
            sense="frozen",
            relu=True,
        ).y
        logits = grad_norm.linear(h.flatten(1), one["head"], one["head_bias"], probe)
        loss = kernels.cross_entropy(logits, LABELS[n : n + 1]).sum()
        grads = torch.autograd.grad(loss, [one[k] for k in TRAINED])
        own.append(sum(g.square().sum() for g in grads))
    probe = torch.zeros(SAMPLES, dtype=torch.float64, requires_grad=True)
    detached = {k: v.detach() for k, v in one.items()}
    (norms,) = torch.autograd.grad(losses(detached, images[0], probe, "frozen").sum(), probe)
    assert torch.allclose(norms, torch.stack(own), rtol=1e-11)


def test_a_probe_changes_neither_outputs_nor_gradients():
    p, images = parameters(torch.float32)
    leaves = {k: v.requires_grad_(k in TRAINED) for k, v in p.items()}

    def plain(p, images):
        h = kernels.conv2d(images, p["conv"], p["conv_bias"], 2, 1)
        h = kernels.batch_norm(h, p["gamma"], p["beta"], None, None, training=True, relu=True).y
        return kernels.cross_entropy(
            kernels.linear(h.flatten(1), p["head"], p["head_bias"]), LABELS
        )

    probe = torch.zeros(MODELS, SAMPLES)
    with_probe = vmap(lambda p, x, probe: losses(p, x, probe, "contribution"))(
        leaves, images, probe
    )
    without = vmap(plain)(leaves, images)
    assert torch.equal(with_probe, without)
    wanted = [leaves[k] for k in TRAINED]
    grads = zip(
        torch.autograd.grad(with_probe.sum(), wanted),
        torch.autograd.grad(without.sum(), wanted),
        strict=True,
    )
    assert all(torch.equal(a, b) for a, b in grads)


def test_a_model_is_the_same_alone_and_beside_others():
    p, images = parameters(torch.float32)
    norms = []
    for chosen in (slice(0, 3), slice(1, 2)):
        probe = torch.zeros(MODELS, SAMPLES)[chosen].clone().requires_grad_()
        some = {k: v[chosen] for k, v in p.items()}
        run = vmap(lambda p, x, probe: losses(p, x, probe, "contribution"))
        norms.append(torch.autograd.grad(run(some, images[chosen], probe).sum(), probe)[0])
    assert torch.equal(norms[0][1], norms[1][0])


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_opcheck_passes():
    x, weight = torch.randn(2, 3, 4, 4), torch.randn(5, 3, 3, 3)
    probe = torch.zeros(2)
    for inputs in ((x, weight, None, probe, 1, 1), (x, weight, torch.zeros(5), probe, 2, 0)):
        tensors = [t.clone().requires_grad_() if torch.is_tensor(t) else t for t in inputs]
        torch.library.opcheck(grad_norm._conv.single, tensors)
    grad = torch.randn(2, 5, 4, 4)
    torch.library.opcheck(grad_norm._conv_norms.single, (x, grad, 3, 1, 1, True, "gram"))
    torch.library.opcheck(grad_norm._linear_norms.single, (x[:, :, 0, 0], grad[:, :, 0, 0], True))


def test_other_senses_and_kernels_are_refused():
    x = torch.zeros(2, 3, 4, 4)
    with pytest.raises(ValueError, match="expected 'contribution', 'frozen' or 'frozen_batch'"):
        grad_norm.batch_norm(x, None, None, None, None, torch.zeros(2), sense="exact")
    with pytest.raises(ValueError, match=r"expected \(O, C, k, k\)"):
        grad_norm.conv2d(x, torch.zeros(5, 3, 3, 1), None, torch.zeros(2))
