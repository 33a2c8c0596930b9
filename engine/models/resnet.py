"""Residual nets for small images, with batch or group norm or trained without a norm by Fixup.

He, Zhang, Ren, Sun 2016 (CIFAR nets, parameter-free shortcuts); Zhang, Dauphin, Ma 2019 (Fixup).
All norms share widths, strides and shortcuts, and start each branch at zero: the last gamma, or
Fixup's last convolution, is 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.models.layers import (
    Affine,
    Concat,
    Conv,
    ConvNormAct,
    GlobalAvgPool,
    Layer,
    Linear,
    NormChoice,
)


class Shortcut(nn.Module):
    """Every stride-th pixel, missing channels filled with zeros: no parameters, in every arm."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.extra, self.stride = outputs - inputs, stride
        self.concat = Concat()

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C + extra, H / stride, W / stride)."""
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.extra:
            x = self.concat(x, torch.zeros_like(x[:, :1]).expand(-1, self.extra, -1, -1))
        return x


class BasicBlock(nn.Module):
    """relu(shortcut(x) + norm(conv(relu(norm(conv(x)))))) with the last gamma starting at 0."""

    def __init__(self, norm: NormChoice, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        first = Conv(inputs, outputs, stride=stride)
        self.first = ConvNormAct(first, norm.layer(outputs))
        self.second = ConvNormAct(Conv(outputs, outputs), norm.layer(outputs, gamma=0.0))
        self.shortcut = Shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, O, H / stride, W / stride)."""
        y: Tensor = self.second(self.first(x), self.shortcut(x))
        return y


class FixupBlock(Layer):
    """A basic block without a norm: scalar biases, one multiplier, scaled first, zero last conv.

    `blocks` is the number of residual blocks of the net, L in the first convolution's factor
    L^(-1/2) (two convolutions a branch). The bias in front of a convolution is added by the op
    before it: `before_first` by the layer before the block, see `in_turn`. Fixup's scalars learn at
    a tenth of the learning rate.
    """

    lr_factor = 0.1

    def __init__(self, blocks: int, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        first = Conv(inputs, outputs, stride=stride, scale=blocks**-0.5)
        second = Conv(outputs, outputs, init="zero")
        self.before_first = nn.Parameter(torch.empty(()))
        self.first = ConvNormAct(first, Affine(None, scale=False))
        self.before_second = nn.Parameter(torch.empty(()))
        self.second = ConvNormAct(second, Affine(None))
        self.shortcut = Shortcut(inputs, outputs, stride)
        self.draw(None)

    def draw(self, generator: torch.Generator | None) -> None:
        """Biases start at zero; nothing is drawn."""
        with torch.no_grad():
            self.before_first.zero_()
            self.before_second.zero_()

    def forward(self, x: Tensor, after: Tensor | None = None) -> Tensor:
        """x + before_first (N, C, H, W) -> (N, O, H / stride, W / stride), plus `after`."""
        inner = self.first(x, after=self.before_second)
        y: Tensor = self.second(inner, self.shortcut(x), after)
        return y


def in_turn(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Layers one after the other; each adds what a Fixup block behind it wants added."""
    for layer, following in zip(layers, (*layers[1:], None), strict=True):
        if isinstance(following, FixupBlock):
            x = layer(x, after=following.before_first)
        else:
            x = layer(x)
    return x


def _block(norm: NormChoice, blocks: int, inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    if norm.name == "fixup":
        return FixupBlock(blocks, inputs, outputs, stride)
    return BasicBlock(norm, inputs, outputs, stride)


class ResNet(nn.Module):
    """A 3x3 stem, stages of basic blocks (the first of each but the first strides by 2), one dense.

    Fixup's classifier starts at zero.
    """

    def __init__(
        self,
        norm: NormChoice,
        *,
        widths: Sequence[int],
        depth: int,
        classes: int,
        channels: int,
    ) -> None:
        super().__init__()
        stem = Conv(channels, widths[0], bias=norm.conv_bias)
        self.stem = ConvNormAct(stem, norm.layer(widths[0]))
        blocks, inputs = [], widths[0]
        for stage, width in enumerate(widths):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(_block(norm, depth * len(widths), inputs, width, stride))
                inputs = width
        self.blocks = nn.Sequential(*blocks)
        fixup = norm.name == "fixup"
        self.mean = GlobalAvgPool()
        self.classifier = Linear(inputs, classes, init="zero" if fixup else "torch")

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, C, H, W) -> logits (N, K)."""
        x = in_turn([self.stem, *self.blocks], x)
        logits: Tensor = self.classifier(self.mean(x))
        return logits


class ResNet9(nn.Module):
    """The fast CIFAR net of the DAWNBench entries: 64-128-256-512, two residual blocks, max pools.

    Its residual blocks are the basic blocks above; its plain convolutions carry biases where there
    is no norm. Logits are scaled by 1/8. A block pools only while its map is at least 4 pixels
    wide, and a global maximum precedes the classifier.
    """

    def __init__(self, norm: NormChoice, *, classes: int, channels: int, size: int) -> None:
        super().__init__()
        fixup = norm.name == "fixup"

        def plain(inputs: int, outputs: int, pool: int) -> nn.Module:
            conv = Conv(inputs, outputs, bias=norm.conv_bias)
            return ConvNormAct(conv, norm.layer(outputs), pool=pool)

        pools = [2 if size >= 4 * 2**i else 0 for i in range(3)]
        self.trunk = nn.Sequential(
            plain(channels, 64, 0),
            plain(64, 128, pools[0]),
            _block(norm, 2, 128, 128),
            plain(128, 256, pools[1]),
            plain(256, 512, pools[2]),
            _block(norm, 2, 512, 512),
        )
        self.classifier = Linear(512, classes, init="zero" if fixup else "torch")

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, C, H, W) -> logits (N, K)."""
        maxima = in_turn(list(self.trunk), x).amax((2, 3))
        logits: Tensor = self.classifier(maxima) * 0.125
        return logits
