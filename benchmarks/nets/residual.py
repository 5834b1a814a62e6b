"""Residual networks; He et al., 2015, with the stride in the 3×3 convolution as usual since."""

from __future__ import annotations

import torch
from torch import nn


class BasicBlock(nn.Module):
    """Two 3×3 convolutions, and a shortcut around them."""

    expansion = 1

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(inside, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.second, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = _shortcut(inside, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.first(x)))
        return self.relu(self.norm2(self.second(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1×1 down, 3×3, 1×1 up, and a shortcut around them."""

    expansion = 4

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.reduce, self.norm1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.middle, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.expand, self.norm3 = nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = _shortcut(inside, outside, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.reduce(x)))
        y = self.relu(self.norm2(self.middle(y)))
        return self.relu(self.norm3(self.expand(y)) + self.shortcut(x))


def _shortcut(inside: int, outside: int, stride: int) -> nn.Module:
    if stride == 1 and inside == outside:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))


class ResNet(nn.Module):
    """A stem, four stages of blocks, and a classifier of 1,000 classes."""

    def __init__(self, block: type[BasicBlock] | type[Bottleneck], blocks: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        self.stages, inside = nn.Sequential(), 64
        for stage, count in enumerate(blocks):
            width = 64 * 2**stage
            outside = width * block.expansion
            first = block(inside, width, 1 if stage == 0 else 2)
            self.stages.append(nn.Sequential(first, *(block(outside, width, 1) for _ in range(count - 1))))
            inside = outside
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inside, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.flatten(self.pool(self.stages(self.stem(x))), 1))


class ResNet18(ResNet):
    """Eight basic blocks: 11,689,512 parameters."""

    def __init__(self) -> None:
        super().__init__(BasicBlock, (2, 2, 2, 2))


class ResNet50(ResNet):
    """16 bottlenecks: 25,557,032 parameters."""

    def __init__(self) -> None:
        super().__init__(Bottleneck, (3, 4, 6, 3))
