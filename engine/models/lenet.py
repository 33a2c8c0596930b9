"""LeNet-5 with an optional norm after each convolution (LeCun et al. 1998), ReLU, max pooling."""

from torch import Tensor, nn

from engine.models.layers import Conv, ConvNormAct, Linear, NormChoice, ReLU


class LeNet(nn.Module):
    """conv 6 of 5x5 padded 2, conv 16 of 5x5, each [norm] ReLU max-pool 2; dense 120-84-K.

    Biases and torch's default initialisation with every norm, so that arms start alike. Images
    below 16 pixels pad the second convolution by 2 as well, which leaves 2x2 maps of 8x8 digits.
    """

    def __init__(self, norm: NormChoice, *, classes: int, channels: int, size: int) -> None:
        super().__init__()
        padding = 2 if size < 16 else 0
        side = (size // 2 + 2 * padding - 4) // 2
        first = Conv(channels, 6, 5, padding=2, bias=True, init="torch")
        second = Conv(6, 16, 5, padding=padding, bias=True, init="torch")
        self.block1 = ConvNormAct(first, norm.layer(6), pool=2)
        self.block2 = ConvNormAct(second, norm.layer(16), pool=2)
        self.dense1 = Linear(16 * side * side, 120)
        self.dense2 = Linear(120, 84)
        self.classifier = Linear(84, classes)
        self.relu = ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, C, H, W) -> logits (N, K)."""
        x = self.block2(self.block1(x)).flatten(1)
        x = self.relu(self.dense1(x))
        x = self.relu(self.dense2(x))
        logits: Tensor = self.classifier(x)
        return logits
