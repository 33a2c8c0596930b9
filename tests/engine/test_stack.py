"""A stack of M equals M networks alone, whatever the slot, whatever the neighbours do."""

import pytest
import tolerances
import torch
import torch.nn.functional as F
from small_studies import CELLS
from torch import nn

from engine import stack
from engine.models import build
from engine.models.layers import take_penalty
from engine.sequential import plain
from engine.study import Penalty

LAMBDAS = (0.01, 0.0, 0.1)


def maker(net, norm, size=16):
    penalty = Penalty(form="hinge", lambda_=1.0, tau=0.5) if norm == "batch" else None

    def make():
        return build(net, norm=norm, classes=10, channels=3, size=size, penalty=penalty)

    return make


def batch(models, dtype=torch.float32, size=16, count=6):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(models, count, 3, size, size, dtype=dtype, generator=generator)
    return images, torch.randint(0, 10, (models, count), generator=generator)


def one_by_one(make, ids, images_MBCHW, labels_MB, dtype):
    """Losses, gradients and buffers of plain networks, by autograd."""
    for slot, model_id in enumerate(ids):
        net = plain(stack.initialised(make, 0, model_id)).to(dtype).train()
        loss_B = F.cross_entropy(net(images_MBCHW[slot]), labels_MB[slot], reduction="none")
        penalty = take_penalty(net)
        total = loss_B.mean() + (0 if penalty is None else LAMBDAS[slot] * penalty)
        total.backward()
        yield loss_B.detach(), {n: p.grad for n, p in net.named_parameters()}, net


@pytest.mark.parametrize(("net", "norm"), CELLS)
def test_losses_gradients_and_statistics_equal_plain_torch(net, norm):
    dtype, ids = torch.float64, (4, 0, 7)
    make = maker(net, norm)
    skeleton, state = stack.build_stack(make, 0, ids)
    state = state.to("cpu", dtype)
    images, labels = batch(len(ids), dtype)
    lambda_M = torch.tensor(LAMBDAS, dtype=dtype)
    loss_MB, grads = stack.gradients(skeleton.train(), state, images, labels, lambda_M)
    for slot, (loss_B, wanted, alone) in enumerate(one_by_one(make, ids, images, labels, dtype)):
        torch.testing.assert_close(loss_MB[slot], loss_B, rtol=1e-12, atol=1e-12)
        whole = tolerances.whole_norm(wanted.values())
        for name, gradient in wanted.items():
            error = tolerances.error(grads[name][slot], gradient, whole)
            assert error < tolerances.FLOAT64, (slot, name)
        for name, value in alone.named_buffers():
            torch.testing.assert_close(state.buffers[name][slot], value, msg=name)


@pytest.mark.parametrize(("net", "norm"), CELLS)
def test_bits_do_not_depend_on_the_stack_or_the_slot(net, norm):
    make = maker(net, norm, size=8)
    images, labels = batch(5, size=8, count=5)

    def run(slots):
        skeleton, state = stack.build_stack(make, 0, slots)
        lambda_M = torch.tensor([0.01 * slot for slot in slots])
        loss_MB, grads = stack.gradients(
            skeleton.train(), state, images[slots], labels[slots], lambda_M
        )
        logits = stack.forward(skeleton.eval(), state, images[slots])
        return {"loss": loss_MB, "logits": logits, **grads, **state.buffers}

    together = run([0, 1, 2, 3, 4])
    for slots in ([3], [4, 1, 3]):
        for name, value in run(slots).items():
            for slot, model in enumerate(slots):
                assert torch.equal(value[slot], together[name][model]), (name, slots, model)


@pytest.mark.parametrize(("net", "norm"), [("lenet", "batch"), ("resnet8", "fixup")])
def test_a_model_is_unchanged_when_another_diverges(net, norm):
    make = maker(net, norm, size=8)
    images, labels = batch(3, size=8)
    skeleton, state = stack.build_stack(make, 0, [0, 1, 2])
    calm, _ = stack.gradients(skeleton.train(), state, images, labels, torch.zeros(3))
    _, state = stack.build_stack(make, 0, [0, 1, 2])
    images[1] = float("nan")
    wild, grads = stack.gradients(skeleton, state, images, labels, torch.zeros(3))
    assert wild[1].isnan().any()
    for slot in (0, 2):
        assert torch.equal(calm[slot], wild[slot])
        assert all(g[slot].isfinite().all() for g in grads.values())
        assert all(b[slot].isfinite().all() for b in state.buffers.values())


class UsersOwn(nn.Module):
    """Plain torch layers only, with an initialisation of its own."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.GELU(), nn.MaxPool2d(2), nn.Flatten()
        )
        self.head = nn.Linear(5 * 7 * 7, 10)
        nn.init.orthogonal_(self.head.weight)

    def forward(self, x):
        return self.head(self.body(x))


def test_a_users_module_of_plain_torch_layers_stacks():
    ids, dtype = (2, 9), torch.float64
    skeleton, state = stack.build_stack(UsersOwn, 0, ids)
    state = state.to("cpu", dtype)
    head = state.params["head.weight"][1]
    torch.testing.assert_close(head @ head.T, torch.eye(10, dtype=dtype), atol=1e-5, rtol=0)
    images, labels = batch(2, dtype)
    loss_MB, grads = stack.gradients(
        skeleton.train(), state, images, labels, torch.zeros(2, dtype=dtype)
    )
    for slot, (loss_B, wanted, alone) in enumerate(
        one_by_one(UsersOwn, ids, images, labels, dtype)
    ):
        torch.testing.assert_close(loss_MB[slot], loss_B)
        for name, gradient in wanted.items():
            torch.testing.assert_close(grads[name][slot], gradient, msg=name)
        for name, value in alone.named_buffers():
            torch.testing.assert_close(state.buffers[name][slot], value, msg=name)


def test_ambient_random_layers_are_refused():
    def make():
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(768, 10))

    with pytest.raises(ValueError, match="'1' is torch's Dropout"):
        stack.build_stack(make, 0, [0])


def test_building_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    stack.build_stack(UsersOwn, 0, [0, 1])
    assert torch.equal(before, torch.get_rng_state())


def test_select_and_unstack_give_the_models_back():
    make = maker("lenet", "batch")
    skeleton, state = stack.build_stack(make, 0, [0, 1, 2])
    assert state.models == 3
    chosen = state.select([2, 0])
    net = make()
    net.load_state_dict(state.unstack(2))
    images, _ = batch(2)
    alone = net.eval()(images[0])
    both = stack.forward(skeleton.eval(), chosen, images)
    assert torch.equal(both[0], alone)
    chosen.params["classifier.bias"].fill_(7)
    assert not (state.params["classifier.bias"] == 7).any()


def test_an_empty_stack_is_refused():
    with pytest.raises(ValueError, match="at least one model"):
        stack.build_stack(UsersOwn, 0, [])
