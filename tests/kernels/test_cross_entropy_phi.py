"""Loss and logit-scaled confidence from one op: textbook numbers, gradients, rules, refusals."""

import pytest
import torch

import kernels
from kernels._register import _ops


def case(models=3, samples=5, classes=4):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(models, samples, classes, generator=generator, dtype=torch.float64) * 3
    labels = torch.arange(models * samples).reshape(models, samples) % classes
    return logits, labels


def test_loss_phi_and_gradient_equal_torch():
    logits, labels = case()
    logits.requires_grad_()
    loss, phi = torch.func.vmap(kernels.cross_entropy_phi)(logits, labels)
    want = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none"
    )
    assert torch.allclose(loss.flatten(), want, rtol=1e-13)
    assert torch.allclose(phi, torch.log(torch.expm1(want).reciprocal()).view_as(phi), rtol=1e-9)
    weight = torch.linspace(-1, 2, 15, dtype=torch.float64).view(3, 5)
    (grad,) = torch.autograd.grad((weight * loss).sum(), logits, retain_graph=True)
    (want_grad,) = torch.autograd.grad((weight.flatten() * want).sum(), logits)
    assert torch.allclose(grad, want_grad, atol=1e-14)
    assert not phi.requires_grad


def test_a_confident_sample_keeps_its_loss_and_its_gradient():
    logits = torch.tensor([[60.0, 0.0]], requires_grad=True)
    loss, phi = kernels.cross_entropy_phi(logits, torch.tensor([0]))
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert float(phi.detach()) == 60.0
    assert float(loss.detach()) == pytest.approx(8.75651e-27, rel=1e-5)
    assert grad.flatten().tolist() == pytest.approx([-8.75651e-27, 8.75651e-27], rel=1e-5)


def test_a_model_is_the_same_alone_and_beside_others():
    logits, labels = case()
    logits = logits.float()
    both = torch.func.vmap(kernels.cross_entropy_phi)(logits, labels)
    alone = torch.func.vmap(kernels.cross_entropy_phi)(logits[1:2], labels[1:2])
    assert all(torch.equal(a[0], b[1]) for a, b in zip(alone, both, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_opcheck_passes():
    logits, labels = case()
    op = _ops["cross_entropy_phi"]
    torch.library.opcheck(op.single, (logits[0].clone().requires_grad_(), labels[0]))
    torch.library.opcheck(op.stacked, (logits.clone().requires_grad_(), labels))


def test_it_runs_under_compile_without_a_graph_break():
    logits, labels = case()

    def step(logits, labels):
        loss, phi = torch.func.vmap(kernels.cross_entropy_phi)(logits, labels)
        return loss.sum(), phi

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(logits, labels), step(logits, labels), strict=True):
        assert torch.equal(got, want)


def test_wrong_shapes_and_types_are_refused():
    with pytest.raises(ValueError, match=r"expected \(N, K\) and \(N,\)"):
        kernels.cross_entropy_phi(torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"expected torch\.int64"):
        kernels.cross_entropy_phi(torch.zeros(3, 2), torch.zeros(3))
