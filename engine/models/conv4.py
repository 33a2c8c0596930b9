"""Four plain convolutions, 16-32-64-64, He-initialised, with biases where there is no norm."""

from torch import Tensor, nn

from engine.models.layers import Conv, ConvNormAct, Linear, NormChoice

WIDTHS = (16, 32, 64, 64)


class Conv4(nn.Module):
    """[conv 3x3, norm, ReLU, max-pool 2] four times and one dense layer.

    A block pools only while its map is at least 4 pixels wide: 32x32 and 8x8 images end as 2x2
    maps, 28x28 images as 3x3.
    """

    def __init__(self, norm: NormChoice, *, classes: int, channels: int, size: int) -> None:
        super().__init__()
        blocks, inputs = [], channels
        for width in WIDTHS:
            conv = Conv(inputs, width, bias=norm.conv_bias)
            pool = 2 if size >= 4 else 0
            blocks.append(ConvNormAct(conv, norm.layer(width), pool=pool))
            inputs, size = width, size // 2 if pool else size
        self.blocks = nn.Sequential(*blocks)
        self.classifier = Linear(inputs * size * size, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, C, H, W) -> logits (N, K)."""
        logits: Tensor = self.classifier(self.blocks(x).flatten(1))
        return logits
