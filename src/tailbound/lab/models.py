"""The small models that the tasks train, each readable in one sitting.

No batch norm anywhere: its running statistics follow each worker's own samples, so
replicas would stop being equal bit for bit. Group norm has no such state.

Letters: B samples, T characters, C channels or embedding width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def digits_cnn() -> nn.Module:
    """Two convolutions and two linear layers: (B, 1, 8, 8) to logits (B, 10).

    138 794 parameters: 384 chunks of 1448 bytes, so that a loss bound of 0.8 % is
    three chunks, and one of 40.8 % is far (2.3 standard deviations) from what three
    sends at 70 % loss leave missing.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def resnet(
    *, dims: int, in_channels: int, widths: tuple[int, ...], blocks_per_width: int
) -> nn.Module:
    """A residual network of ten classes: (B, in_channels, *size) to logits (B, 10).

    The size is halved and the width changes at the start of each stage but the first.
    ``dims=2, in_channels=3, widths=(16, 32, 64), blocks_per_width=3`` is ResNet-20.

    Args:
        dims: 1 for signals, 2 for images.
        in_channels: of the input.
        widths: channels of each stage, multiples of 8.
        blocks_per_width: residual blocks in a stage, two convolutions each.

    Source: He et al. 2016 (arXiv:1512.03385), section 4.2, with group norm.
    """
    pool = nn.AdaptiveAvgPool1d(1) if dims == 1 else nn.AdaptiveAvgPool2d(1)
    layers: list[nn.Module] = [
        convolution(dims, in_channels, widths[0], kernel_size=3),
        nn.GroupNorm(8, widths[0]),
        nn.ReLU(),
    ]
    channels = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks_per_width):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(ResidualBlock(dims, channels, width, stride=stride))
            channels = width
    return nn.Sequential(*layers, pool, nn.Flatten(), nn.Linear(channels, 10))


class ResidualBlock(nn.Module):
    """relu(x + f(x)), where f is two convolutions of size 3.

    Where the shape changes, x goes through a convolution of size 1.
    """

    def __init__(self, dims: int, channels: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = convolution(dims, channels, width, kernel_size=3, stride=stride)
        self.norm1 = nn.GroupNorm(8, width)
        self.conv2 = convolution(dims, width, width, kernel_size=3)
        self.norm2 = nn.GroupNorm(8, width)
        self.shortcut: nn.Module = nn.Identity()
        if channels != width or stride != 1:
            self.shortcut = convolution(
                dims, channels, width, kernel_size=1, stride=stride
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, *size) to (B, width, *ceil(size / stride))."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(self.shortcut(x) + y)


def convolution(
    dims: int, channels: int, width: int, *, kernel_size: int, stride: int = 1
) -> nn.Module:
    """A convolution that keeps the size (over the stride); the norm has the bias."""
    cls = nn.Conv1d if dims == 1 else nn.Conv2d
    return cls(
        channels,
        width,
        kernel_size=kernel_size,
        stride=stride,
        padding=kernel_size // 2,
        bias=False,
    )


class CharGPT(nn.Module):
    """A causal transformer over bytes: (B, T) to logits (B, T, 256).

    Pre-norm blocks, learned positions, output layer tied to the embedding.

    Source: Radford et al. 2019 (GPT-2), small; after nanoGPT.
    """

    def __init__(
        self,
        *,
        context: int,
        width: int = 64,
        num_blocks: int = 2,
        num_heads: int = 4,
        vocabulary: int = 256,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, num_heads) for _ in range(num_blocks))
        )
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, V) of the next byte; T is at most ``context``."""
        x_BTC = self.token(tokens_BT) + self.position[: tokens_BT.shape[1]]
        x_BTC = self.norm(self.blocks(x_BTC))
        return F.linear(x_BTC, self.token.weight)


class TransformerBlock(nn.Module):
    """Causal self-attention, then a two-layer perceptron, both residual."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_BTC: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C); a position sees itself and those before it."""
        x_BTC = x_BTC + self.attend(self.norm1(x_BTC))
        change_BTC: Tensor = self.mlp(self.norm2(x_BTC))
        return x_BTC + change_BTC

    def attend(self, x_BTC: Tensor) -> Tensor:
        """Mix the values of earlier positions, head by head."""
        # (B, T, 3C) -> three of (B, heads, T, C / heads)
        query, key, value = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for part in self.query_key_value(x_BTC).chunk(3, dim=2)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended_BTC: Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return attended_BTC
