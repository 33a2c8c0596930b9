"""A shallow DenseNet (Huang et al. 2017): growth 12, three dense blocks of four layers.

Shallow on purpose: without a norm, deep dense nets do not train fairly. Layers pre-activate
(norm, ReLU, convolution); without a norm convolutions carry biases.
"""

from torch import Tensor, nn

from engine.models.layers import AvgPool, Concat, Conv, GlobalAvgPool, Linear, NormChoice

GROWTH, LAYERS, BLOCKS = 12, 4, 3


class PreActConv(nn.Module):
    """conv(relu(norm(x)))."""

    def __init__(self, norm: NormChoice, inputs: int, outputs: int, size: int) -> None:
        super().__init__()
        self.norm = norm.layer(inputs)
        self.conv = Conv(inputs, outputs, size, bias=norm.conv_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, O, H, W)."""
        y: Tensor = self.conv(self.norm(x))
        return y


class DenseLayer(PreActConv):
    """A 3x3 layer that appends its `GROWTH` maps to its input."""

    def __init__(self, norm: NormChoice, inputs: int) -> None:
        super().__init__(norm, inputs, GROWTH, 3)
        self.concat = Concat()

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C + GROWTH, H, W)."""
        y: Tensor = self.concat(x, super().forward(x))
        return y


class Transition(PreActConv):
    """A 1x1 layer that halves the channels, then average pooling by 2."""

    def __init__(self, norm: NormChoice, inputs: int) -> None:
        super().__init__(norm, inputs, inputs // 2, 1)
        self.pool = AvgPool(2)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C / 2, H / 2, W / 2)."""
        y: Tensor = self.pool(super().forward(x))
        return y


class DenseNet(nn.Module):
    """A stem of 16 maps, dense blocks with transitions between them, norm, ReLU, mean, dense."""

    def __init__(self, norm: NormChoice, *, classes: int, channels: int, size: int) -> None:
        super().__init__()
        width = 16
        layers: list[nn.Module] = [Conv(channels, width, bias=norm.conv_bias)]
        for block in range(BLOCKS):
            for _ in range(LAYERS):
                layers.append(DenseLayer(norm, width))
                width += GROWTH
            if block < BLOCKS - 1:
                layers.append(Transition(norm, width))
                width //= 2
        self.layers = nn.Sequential(*layers)
        self.norm = norm.layer(width)
        self.mean = GlobalAvgPool()
        self.classifier = Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, C, H, W) -> logits (N, K)."""
        x = self.norm(self.layers(x))
        logits: Tensor = self.classifier(self.mean(x))
        return logits
