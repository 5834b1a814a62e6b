"""Convolutional networks: the toy of the demo, VGG, EfficientNet, ConvNeXt, U-Net."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class Toy(nn.Module):
    """The network of notebooks/model.py: 9,223,901 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 300, 3), nn.Conv2d(300, 500, 3), nn.Conv2d(500, 1000, 3))
        self.fc = nn.Linear(3_364_000, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.conv(x), 1))


class VGG16(nn.Module):
    """Simonyan and Zisserman, 2014, configuration D: 138,357,544 parameters."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inside = 3
        for widths in ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3):
            for width in widths:
                layers += [nn.Conv2d(inside, width, 3, padding=1), nn.ReLU(inplace=True)]
                inside = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            *(nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Dropout()),
            *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout()),
            nn.Linear(4096, 1000),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.pool(self.features(x)), 1))


class StochasticDepth(nn.Module):
    """In training, leaves out whole samples with probability `rate`; Huang et al., 2016."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return x
        noise = torch.empty((len(x),) + (1,) * (x.dim() - 1), dtype=x.dtype, device=x.device)
        return x * noise.bernoulli_(1 - self.rate).div_(1 - self.rate)


def _norm_conv(inside: int, outside: int, size: int, stride: int = 1, groups: int = 1, act: bool = True) -> nn.Module:
    conv = nn.Conv2d(inside, outside, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outside), *([nn.SiLU(inplace=True)] if act else []))


class Excitation(nn.Module):
    """Channels weighted by what the whole image says of them; Hu et al., 2017."""

    def __init__(self, width: int, narrow: int) -> None:
        super().__init__()
        self.weigh = nn.Sequential(
            *(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, narrow, 1), nn.SiLU(inplace=True)),
            *(nn.Conv2d(narrow, width, 1), nn.Sigmoid()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.weigh(x) * x


class InvertedResidual(nn.Module):
    """Expanded, convolved by channel, weighted, and projected back."""

    def __init__(self, inside: int, outside: int, size: int, stride: int, ratio: int, rate: float) -> None:
        super().__init__()
        wide = inside * ratio
        expand = [_norm_conv(inside, wide, 1)] if ratio > 1 else []
        self.block = nn.Sequential(
            *expand,
            _norm_conv(wide, wide, size, stride, groups=wide),
            Excitation(wide, inside // 4),
            _norm_conv(wide, outside, 1, act=False),
        )
        self.residual = stride == 1 and inside == outside
        self.depth = StochasticDepth(rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.depth(self.block(x)) + x if self.residual else self.block(x)


class EfficientNetB0(nn.Module):
    """Tan and Le, 2019: 5,288,548 parameters."""

    STAGES = (
        (1, 16, 1, 3, 1),
        (6, 24, 2, 3, 2),
        (6, 40, 2, 5, 2),
        (6, 80, 3, 3, 2),
        (6, 112, 3, 5, 1),
        (6, 192, 4, 5, 2),
        (6, 320, 1, 3, 1),
    )
    """Expansion, channels, blocks, kernel, stride."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_norm_conv(3, 32, 3, 2)]
        inside, done = 32, 0
        for ratio, width, blocks, size, stride in self.STAGES:
            for block in range(blocks):
                rate = 0.2 * done / 16
                layers.append(InvertedResidual(inside, width, size, 1 if block else stride, ratio, rate))
                inside, done = width, done + 1
        layers.append(_norm_conv(320, 1280, 1))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(0.2, inplace=True), nn.Linear(1280, 1000))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.pool(self.features(x)), 1))


class ImageNorm(nn.LayerNorm):
    """A layer norm over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """A 7×7 convolution by channel, and a perceptron on each pixel."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 1e-6))
        self.depth = StochasticDepth(rate)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.down(self.act(self.up(y))).permute(0, 3, 1, 2)
        return self.depth(self.scale * y) + x


class ConvNeXtTiny(nn.Module):
    """Liu et al., 2022: 28,589,128 parameters."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), ImageNorm(96, eps=1e-6)]
        done = 0
        for stage, blocks in enumerate((3, 3, 9, 3)):
            width = 96 * 2**stage
            if stage:
                layers += [ImageNorm(width // 2, eps=1e-6), nn.Conv2d(width // 2, width, 2, 2)]
            for _ in range(blocks):
                layers.append(ConvNeXtBlock(width, 0.1 * done / 17))
                done += 1
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Sequential(ImageNorm(768, eps=1e-6), nn.Flatten(), nn.Linear(768, 1000))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.features(x)))


def _double(inside: int, outside: int) -> nn.Module:
    layers: list[nn.Module] = []
    for width in (inside, outside):
        layers += [nn.Conv2d(width, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Ronneberger et al., 2015, padded and with batch norms: 31,037,698 parameters for two classes."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 1024)
        pairs = list(pairwise(widths))
        self.enter = _double(3, 64)
        self.down = nn.ModuleList(nn.Sequential(nn.MaxPool2d(2), _double(a, b)) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs))
        self.join = nn.ModuleList(_double(b, a) for a, b in reversed(pairs))
        self.leave = nn.Conv2d(64, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.enter(x)]
        for down in self.down:
            levels.append(down(levels[-1]))
        x = levels.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([levels.pop(), up(x)], 1))
        return self.leave(x)
