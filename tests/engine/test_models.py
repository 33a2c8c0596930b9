"""Networks: shapes, sizes, starting points, and what the recipes of the literature ask of them."""

import pytest
import torch
from small_studies import CELLS

from engine.models import build
from engine.models.layers import BatchNorm, lr_factors, take_penalty
from engine.stack import initialised
from engine.study import Penalty

SHAPES = ((1, 28), (3, 32), (1, 8), (3, 17))


def parameters(net):
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("net", "norm"), CELLS)
def test_every_net_maps_images_of_every_size_to_logits(net, norm, shape):
    channels, size = shape
    model = build(net, norm=norm, classes=7, channels=channels, size=size).train()
    images = torch.randn(2, channels, size, size)
    assert model(images).shape == (2, 7)
    assert model.eval()(images).shape == (2, 7)


@pytest.mark.parametrize(
    ("net", "norm", "channels", "size", "count"),
    [
        ("lenet", "none", 1, 28, 61_706),  # LeCun et al. 1998, with dense instead of sparse maps
        ("lenet", "batch", 1, 28, 61_706 + 2 * (6 + 16)),
        ("resnet20", "batch", 3, 32, 269_722),  # He et al. 2016: 0.27 M
        ("resnet18", "batch", 3, 32, 11_173_962 - 173_824),  # usual CIFAR net less 1x1 shortcuts
        ("conv4", "none", 3, 32, 448 + 4_640 + 18_496 + 36_928 + 2_570),
    ],
)
def test_sizes_are_the_published_ones(net, norm, channels, size, count):
    assert parameters(build(net, norm=norm, classes=10, channels=channels, size=size)) == count


@pytest.mark.parametrize("net", sorted({net for net, _ in CELLS}))
def test_arms_start_from_the_same_weights_where_layers_agree(net):
    norms = [norm for name, norm in CELLS if name == net]
    starts = {
        norm: initialised(
            lambda norm=norm: build(net, norm=norm, classes=10, channels=1, size=8), 3, 1
        ).state_dict()
        for norm in norms
    }
    for norm in norms[1:]:
        first, other = starts[norms[0]], starts[norm]
        weights = [n for n in first if n in other and first[n].dim() > 1]
        assert weights
        for name in weights:
            if "fixup" in (norms[0], norm) and ("blocks" in name or "trunk" in name):
                continue  # Fixup scales the first and zeroes the last convolution of a branch
            if norm == "fixup" and name == "classifier.weight":
                continue
            assert torch.equal(first[name], other[name]), (norm, name)


def test_models_start_from_different_weights():
    def make():
        return build("lenet", norm="none", classes=10, channels=1, size=8)

    first, again, other = (initialised(make, 0, m).block1.conv.weight for m in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_he_initialisation_keeps_the_scale_of_activations():
    torch.manual_seed(0)
    model = build("conv4", norm="none", classes=10, channels=16, size=32)
    x = torch.randn(8, 16, 32, 32)
    for block in model.blocks:
        y = torch.nn.functional.conv2d(x, block.conv.weight, padding=1)
        gain = (y.pow(2).mean() / x.pow(2).mean()).item()
        assert 1.5 < gain < 2.5  # variance 2 / fan_in, halved by the ReLU
        x = y.relu()


@pytest.mark.parametrize("net", ["resnet8", "resnet18", "resnet9"])
def test_fixup_starts_at_zero_and_batch_norm_blocks_start_as_their_shortcuts(net):
    images = torch.randn(2, 3, 16, 16)
    fixup = build(net, norm="fixup", classes=10, channels=3, size=16)
    assert fixup(images).abs().max() == 0
    twin = build(net, norm="batch", classes=10, channels=3, size=16)
    block = (twin.blocks if hasattr(twin, "blocks") else twin.trunk)[2]
    width = block.first.conv.weight.shape[1]
    x = torch.randn(2, width, 8, 8).relu()
    assert torch.equal(block(x), block.shortcut(x).relu())


def test_fixup_scales_first_convolutions_by_the_number_of_blocks():
    torch.manual_seed(0)
    model = build("resnet20", norm="fixup", classes=10, channels=3, size=32)
    weight = model.blocks[8].first.conv.weight
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5 * 9**-0.5, rel=0.02)
    factors = lr_factors(model)
    assert factors["blocks.0.before_first"] == factors["blocks.0.second.norm.weight"] == 0.1
    assert factors["blocks.0.first.conv.weight"] == factors["classifier.bias"] == 1.0


def test_penalties_are_summed_over_layers_and_handed_over_once():
    penalty = Penalty(form="square", lambda_=0.1)
    model = build("lenet", norm="batch", classes=10, channels=1, size=8, penalty=penalty)
    model(torch.randn(16, 1, 8, 8))
    norms = [m for m in model.modules() if isinstance(m, BatchNorm)]
    parts = [norm.penalty.item() for norm in norms]
    assert len(parts) == 2
    assert take_penalty(model).item() == pytest.approx(sum(parts))
    assert take_penalty(model) is None
    model.eval()(torch.randn(16, 1, 8, 8))
    assert take_penalty(model) is None


def test_a_frozen_gamma_is_no_parameter():
    kinds = {"norm": "batch", "classes": 10, "channels": 1, "size": 8}
    free = build("lenet", **kinds)
    frozen = build("lenet", **kinds, freeze_gamma=True)
    assert parameters(free) - parameters(frozen) == 6 + 16


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"net": "lenett"}, "did you mean 'lenet'"),
        ({"norm": "fixup"}, "known are batch, none, group, affine"),
        ({"size": 7}, "at least 8"),
        ({"norm": "none", "freeze_gamma": True}, "belong to norm 'batch'"),
    ],
)
def test_what_cannot_be_built_is_refused_in_a_sentence(given, sentence):
    wanted = {"net": "lenet", "norm": "batch", "classes": 10, "channels": 1, "size": 28, **given}
    with pytest.raises(ValueError, match=sentence):
        build(wanted.pop("net"), **wanted)
