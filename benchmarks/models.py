"""The models whose training steps the offload engine is measured on, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def vgg19(classes: int = 1000, width: int = 64, size: int = 224) -> nn.Module:
    """VGG-19 (Simonyan and Zisserman, 2015), in-place ReLU and dropout included, begun as He et al. (2015) have it, so
    that it learns without normalisation. Input (B, 3, size, size)."""
    layers: list[nn.Module] = []
    channels = 3
    for stage, convolutions in enumerate((2, 2, 4, 4, 4)):
        for _ in range(convolutions):
            out = width * min(2**stage, 8)
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(inplace=True)]
            channels = out
        layers.append(nn.MaxPool2d(2))
    hidden = 64 * width
    head = [nn.Flatten(), nn.Linear(channels * (size // 32) ** 2, hidden), nn.ReLU(inplace=True), nn.Dropout()]
    head += [nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(hidden, classes)]
    net = nn.Sequential(*layers, *head)
    for module in net:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return net


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.shortcut = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.layers(x) + self.shortcut(x), inplace=True)


def resnet152(classes: int = 1000, width: int = 64, blocks: tuple[int, ...] = (3, 8, 36, 3)) -> nn.Module:
    """ResNet-152 (He et al., 2016), the stride on the 3 x 3 convolution. Input (B, 3, 224, 224)."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(_Bottleneck(channels, width << stage, 2 if stage > 0 and block == 0 else 1))
            channels = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class _Inverted(nn.Module):
    """EfficientNet's block: wide in the middle, where each channel has a kernel of its own and a weight that all
    positions decide."""

    def __init__(self, channels: int, out: int, wider: int, kernel: int, stride: int) -> None:
        super().__init__()
        wide = channels * wider
        expand = [nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(inplace=True)]
        self.spread = nn.Sequential(
            *(expand if wider > 1 else ()),
            nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False),
            nn.BatchNorm2d(wide), nn.SiLU(inplace=True),
        )  # fmt: skip
        squeezed = max(1, channels // 4)
        self.weight = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, squeezed, 1), nn.SiLU(inplace=True), nn.Conv2d(squeezed, wide, 1),
            nn.Sigmoid(),
        )  # fmt: skip
        self.gather = nn.Sequential(nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out))
        self.adds = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y = self.spread(x)
        y = self.gather(y * self.weight(y))
        return x + y if self.adds else y


def efficientnet(classes: int = 1000, width: int = 8) -> nn.Module:
    """EfficientNet-B0 (Tan and Le, 2019) without the dropout of whole blocks. Input (B, 3, 224, 224)."""
    stages = ((1, 2, 1, 3, 1), (6, 3, 2, 3, 2), (6, 5, 2, 5, 2), (6, 10, 3, 3, 2), (6, 14, 3, 5, 1), (6, 24, 4, 5, 2),
              (6, 40, 1, 3, 1))  # wider, channels in eights, blocks, kernel, stride  # fmt: skip
    channels = 4 * width
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels), nn.SiLU(True)]
    for wider, eights, blocks, kernel, stride in stages:
        for block in range(blocks):
            layers.append(_Inverted(channels, eights * width, wider, kernel, stride if block == 0 else 1))
            channels = eights * width
    layers += [nn.Conv2d(channels, 160 * width, 1, bias=False), nn.BatchNorm2d(160 * width), nn.SiLU(True)]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(160 * width, classes)
    )


class _Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.projection = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        B, T, H = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, H // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(B, T, H))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class _Decoder(nn.Module):
    checkpointed = False
    """Whether every block is recomputed in the backward."""

    def through(self, x: Tensor, *others: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, *others, use_reentrant=False) if self.checkpointed else block(x, *others)
        return x


class _Gpt(_Decoder):
    def __init__(self, vocabulary: int, hidden: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(_Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.through(self.tokens(tokens) + places))).flatten(0, 1)


def gpt(
    vocabulary: int = 16384, hidden: int = 2048, layers: int = 12, heads: int = 16, length: int = 2048
) -> nn.Module:
    """A decoder as GPT-2's (Radford et al., 2019): pre-norm, GELU. Input (B, T) of tokens; (B * T, vocabulary)."""
    return _Gpt(vocabulary, hidden, layers, heads, length)


class _LlamaBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, groups: int, wide: int) -> None:
        super().__init__()
        self.size = hidden // heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key, self.value = (nn.Linear(hidden, groups * self.size, bias=False) for _ in range(2))
        self.projection = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = nn.Linear(hidden, wide, bias=False), nn.Linear(hidden, wide, bias=False)
        self.down = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def rotated(y: Tensor) -> Tensor:
            a, b = y.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class _Llama(_Decoder):
    def __init__(self, vocabulary: int, hidden: int, layers: int, heads: int, groups: int, wide: int) -> None:
        super().__init__()
        self.size = hidden // heads
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(_LlamaBlock(hidden, heads, groups, wide) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        rates = 500000.0 ** -(torch.arange(0, self.size, 2, device=x.device) / self.size)
        angles = torch.outer(torch.arange(tokens.shape[1], device=x.device), rates)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return self.head(self.norm(self.through(x, cos, sin))).flatten(0, 1)


def llama(
    vocabulary: int = 16384,
    hidden: int = 4096,
    layers: int = 8,
    heads: int = 32,
    groups: int = 8,
    wide: int = 14336,
) -> nn.Module:
    """A decoder of Llama 3's shape (Grattafiori et al., 2024; its 8B has 32 layers and a larger vocabulary): grouped
    queries, rotary positions, SwiGLU. Input (B, T) of tokens; (B * T, vocabulary)."""
    return _Llama(vocabulary, hidden, layers, heads, groups, wide)
