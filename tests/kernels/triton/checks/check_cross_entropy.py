"""Cross-entropy's Triton kernels, interpreted: loss, phi and gradient from one read."""

import pytest
import torch
from triton_case import (
    INTERPRETED,
    Tracer,
    assert_close,
    assert_rounded,
    gradients,
    kernels,
    noise,
    served,
)

SHAPES = [(1, 7, 10), (3, 5, 2), (5, 33, 100), (2, 3, 1000), (3, 65, 3)]


def case(models, samples, classes, dtype=torch.float32, scale=3.0):
    logits = noise(models, samples, classes, seed=1, dtype=dtype, scale=scale)
    labels = torch.arange(models * samples).reshape(models, samples) * 7 % classes
    return logits, labels, noise(models, samples, seed=2)


def textbook(logits, labels, weights):
    logits = logits.double().requires_grad_()
    models, samples, classes = logits.shape
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none"
    )
    (grad,) = torch.autograd.grad((loss * weights.double().flatten()).sum(), logits)
    true = torch.nn.functional.one_hot(labels, classes).bool()
    rest = logits.masked_fill(true, -torch.inf).logsumexp(2)
    phi = logits.gather(2, labels[:, :, None])[:, :, 0] - rest
    return loss.detach().reshape(models, samples), phi.detach(), grad


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fused", [False, True])
def test_loss_phi_and_gradient_equal_float64(shape, fused):
    assert served("cross_entropy")
    assert served("cross_entropy_phi", "cross_entropy")
    logits, labels, weights = case(*shape)
    with Tracer():
        if fused:
            (loss, phi), (grad,) = gradients(
                kernels.cross_entropy_phi, [logits], [weights, weights * 0], [labels]
            )
        else:
            (loss,), (grad,) = gradients(kernels.cross_entropy, [logits], [weights], [labels])
    want_loss, want_phi, want_grad = textbook(logits, labels, weights)
    assert_close("loss", loss, want_loss, tolerance=INTERPRETED)
    assert_close("gradient", grad, want_grad, tolerance=INTERPRETED)
    if fused:
        assert_close("phi", phi, want_phi, tolerance=INTERPRETED)


def test_bfloat16_logits_give_a_rounded_gradient():
    logits, labels, weights = case(3, 40, 100, torch.bfloat16)
    with Tracer():
        (loss, phi), (grad,) = gradients(
            kernels.cross_entropy_phi, [logits], [weights, weights * 0], [labels]
        )
    want_loss, want_phi, _ = textbook(logits, labels, weights)
    _, _, share = textbook(logits, labels, torch.ones_like(weights))
    assert_close("loss", loss, want_loss, tolerance=INTERPRETED)
    assert_close("phi", phi, want_phi, tolerance=INTERPRETED)
    assert_rounded("gradient", grad, weights[:, :, None] * share.bfloat16().double())


@pytest.mark.parametrize("margin", [20.0, 80.0, 300.0, -300.0])
def test_confident_samples_keep_their_relative_accuracy(margin):
    logits = torch.tensor([[[margin, 0.0, 0.5]]])
    labels, weights = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1)
    (loss, phi), (grad,) = gradients(
        kernels.cross_entropy_phi, [logits], [weights, weights * 0], [labels]
    )
    want_phi = margin - torch.tensor([0.0, 0.5], dtype=torch.float64).logsumexp(0)
    want = torch.nn.functional.softplus(-want_phi, threshold=1000)
    assert float(phi) == pytest.approx(float(want_phi), rel=1e-6)
    assert float(loss) == pytest.approx(float(want), rel=1e-5)
    assert float(grad[0, 0, 0]) == pytest.approx(-float((-want_phi).sigmoid()), rel=1e-5)


def test_impossible_classes_and_infinite_margins_give_no_nan():
    logits = torch.tensor([[[0.0, -torch.inf, -torch.inf], [-torch.inf, 0.0, 1.0]]])
    loss, phi = torch.func.vmap(kernels.cross_entropy_phi)(logits, torch.zeros(1, 2).long())
    assert loss.tolist() == [[0.0, torch.inf]]
    assert phi.tolist() == [[torch.inf, -torch.inf]]


def test_a_model_is_the_same_alone_and_in_any_order():
    logits, labels, weights = case(5, 33, 100)

    def everything(logits, labels, weights, **turn):
        with Tracer(**turn):
            out, grads = gradients(
                kernels.cross_entropy_phi, [logits], [weights, weights * 0], [labels]
            )
        return [*out, *grads]

    expected = everything(logits, labels, weights)
    for turn in [{"order": i} for i in range(5)] + [{"interleave": i} for i in range(3)]:
        found = everything(logits, labels, weights, **turn)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    alone = everything(logits[2:3], labels[2:3], weights[2:3])
    assert all(torch.equal(a[0], b[2]) for a, b in zip(alone, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("classes", [10, 37, 100])
def test_one_pass_reads_the_logits_and_writes_the_gradient_once(classes, dtype):
    logits, labels, _ = case(2, 32, classes, dtype)
    with Tracer() as trace:
        torch.func.vmap(kernels.cross_entropy_phi)(logits, labels)
    assert trace.moved() == 2 * logits.numel() * logits.element_size() + labels.numel() * 16


def test_any_strides_and_an_empty_batch_are_accepted():
    logits, labels, _ = case(3, 6, 5)
    turned = logits.transpose(1, 2).contiguous().transpose(1, 2)
    loss, phi = torch.func.vmap(kernels.cross_entropy_phi)(turned, labels)
    expected, expected_phi = torch.func.vmap(kernels.cross_entropy_phi)(logits, labels)
    assert torch.equal(loss, expected)
    assert torch.equal(phi, expected_phi)
    assert kernels.cross_entropy(torch.empty(0, 5), torch.empty(0, dtype=torch.long)).shape == (0,)
