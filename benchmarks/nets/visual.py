"""Transformers for images: ViT and Swin."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.nets.convolutional import StochasticDepth


class ViTBlock(nn.Module):
    """Attention and a perceptron, each after its norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        x = x + y
        return x + self.mlp(self.norm2(x))


class ViTBase(nn.Module):
    """Dosovitskiy et al., 2020, patches of 16×16: 86,567,656 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, 768))
        self.positions = nn.Parameter(torch.empty(1, 197, 768).normal_(std=0.02))
        self.blocks = nn.Sequential(*(ViTBlock(768, 12) for _ in range(12)))
        self.norm = nn.LayerNorm(768, eps=1e-6)
        self.head = nn.Linear(768, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class WindowAttention(nn.Module):
    """Attention within windows of 7×7, moved by half a window where `shift` is set, with a bias by distance."""

    SIDE = 7

    def __init__(self, width: int, heads: int, shift: int) -> None:
        super().__init__()
        self.heads, self.shift, side = heads, shift, self.SIDE
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.zeros((2 * side - 1) ** 2, heads))
        places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).flatten(1)
        apart = places[:, :, None] - places[:, None, :] + side - 1
        self.register_buffer("index", (apart[0] * (2 * side - 1) + apart[1]).flatten(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        side, shift = self.SIDE, self.shift if height > self.SIDE else 0
        if shift:
            x = torch.roll(x, (-shift, -shift), (1, 2))
        rows, columns = height // side, width // side
        x = x.view(batch, rows, side, columns, side, channels).permute(0, 1, 3, 2, 4, 5)
        x = x.reshape(-1, side * side, channels)
        q, k, v = self.qkv(x).reshape(len(x), side * side, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q * (channels // self.heads) ** -0.5) @ k.transpose(-2, -1)
        scores = scores + self.table[self.index].view(side * side, side * side, -1).permute(2, 0, 1).unsqueeze(0)
        if shift:
            mask = self._mask(height, width, x)
            scores = scores.view(batch, -1, self.heads, side * side, side * side) + mask[None, :, None]
            scores = scores.view(-1, self.heads, side * side, side * side)
        x = (F.softmax(scores, -1) @ v).transpose(1, 2).reshape(len(x), side * side, channels)
        x = self.out(x).view(batch, rows, columns, side, side, channels).permute(0, 1, 3, 2, 4, 5)
        x = x.reshape(batch, height, width, channels)
        return torch.roll(x, (shift, shift), (1, 2)) if shift else x

    def _mask(self, height: int, width: int, like: Tensor) -> Tensor:
        """What a moved window joins across the border does not see each other."""
        side, shift = self.SIDE, self.shift
        regions = like.new_zeros((height, width))
        number = 0
        cuts = ((0, -side), (-side, -shift), (-shift, None))
        for top, bottom in cuts:
            for left, right in cuts:
                regions[top:bottom, left:right] = number
                number += 1
        regions = regions.view(height // side, side, width // side, side).permute(0, 2, 1, 3).reshape(-1, side * side)
        apart = regions.unsqueeze(1) - regions.unsqueeze(2)
        return apart.masked_fill(apart != 0, -100.0).masked_fill(apart == 0, 0.0)


class SwinBlock(nn.Module):
    """Window attention and a perceptron, each after its norm and left out now and then."""

    def __init__(self, width: int, heads: int, shift: int, rate: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = WindowAttention(width, heads, shift)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.depth = StochasticDepth(rate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.depth(self.attention(self.norm1(x)))
        return x + self.depth(self.mlp(self.norm2(x)))


class Merging(nn.Module):
    """Four neighbours become one pixel with twice the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduce = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        corners = [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]
        return self.reduce(self.norm(torch.cat(corners, -1)))


class SwinTiny(nn.Module):
    """Liu et al., 2021, for images of 224×224: 28,288,354 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.enter = nn.Conv2d(3, 96, 4, 4), nn.LayerNorm(96)
        layers: list[nn.Module] = []
        done = 0
        for stage, (blocks, heads) in enumerate(((2, 3), (2, 6), (6, 12), (2, 24))):
            width = 96 * 2**stage
            if stage:
                layers.append(Merging(width // 2))
            for block in range(blocks):
                layers.append(SwinBlock(width, heads, 3 * (block % 2), 0.2 * done / 11))
                done += 1
        self.layers = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(768), nn.Linear(768, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.enter(self.patches(x).permute(0, 2, 3, 1)))
        return self.head(self.norm(x).mean((1, 2)))
