"""Networks by name: what the catalog lists, built for given images, classes and norm."""

from collections.abc import Callable

from torch import nn

import kernels
from engine.models.catalog import NETS
from engine.models.conv4 import Conv4
from engine.models.densenet import DenseNet
from engine.models.layers import NormChoice
from engine.models.lenet import LeNet
from engine.models.resnet import ResNet, ResNet9
from engine.study import Penalty, unknown

SMALLEST = 8
"""Images must be at least this many pixels wide."""


def build(
    net: str,
    *,
    norm: str,
    classes: int,
    channels: int,
    size: int,
    penalty: Penalty | None = None,
    freeze_gamma: bool = False,
) -> nn.Module:
    """One freshly initialised network for square images.

    Args:
        net: a name of `engine.models.catalog.NETS`.
        norm: one of the norms listed there for that network.
        classes: K, the number of logits.
        channels: image channels.
        size: image side in pixels, at least 8.
        penalty: the form of the gamma/sigma penalty that batch norm layers report in training;
            its strength lambda is the trainer's business.
        freeze_gamma: keep batch norm's gamma at 1 (also where it would start at 0).

    Raises:
        ValueError: an unknown network or norm, images below 8 pixels, or batch norm's options
            given to another norm.
    """
    if net not in NETS:
        raise ValueError(unknown("network", net, NETS))
    if norm not in NETS[net]:
        raise ValueError(unknown(f"norm of {net}", norm, NETS[net]))
    if size < SMALLEST:
        raise ValueError(f"images are {size} pixels wide: {net} needs at least {SMALLEST}")
    if norm != "batch" and (penalty is not None or freeze_gamma):
        raise ValueError(f"penalty and freeze_gamma belong to norm 'batch', not '{norm}'")
    form = None
    if penalty is not None:
        form = kernels.PenaltyForm(
            form=penalty.form, tau=penalty.tau, through_sigma=penalty.through_sigma
        )
    choice = NormChoice(name=norm, penalty=form, freeze_gamma=freeze_gamma)
    return _MAKERS[net](choice, classes, channels, size)


def _resnet(widths: tuple[int, ...], depth: int) -> Callable[..., nn.Module]:
    def make(norm: NormChoice, classes: int, channels: int, size: int) -> nn.Module:
        return ResNet(norm, widths=widths, depth=depth, classes=classes, channels=channels)

    return make


def _sized(kind: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def make(norm: NormChoice, classes: int, channels: int, size: int) -> nn.Module:
        return kind(norm, classes=classes, channels=channels, size=size)

    return make


_MAKERS: dict[str, Callable[..., nn.Module]] = {
    "lenet": _sized(LeNet),
    "conv4": _sized(Conv4),
    "resnet8": _resnet((16, 32, 64), 1),
    "resnet20": _resnet((16, 32, 64), 3),
    "resnet18": _resnet((64, 128, 256, 512), 2),
    "resnet9": _sized(ResNet9),
    "densenet": _sized(DenseNet),
}
