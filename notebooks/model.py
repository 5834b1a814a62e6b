"""The model of the question "Why tensor size was not changed?": three convolutions and one wide linear layer."""

import torch
from torch import nn


class Test(nn.Module):
    """A toy CNN for 3×64×64 images: 9,223,901 parameters, 36,895,604 bytes in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 300, 3), nn.Conv2d(300, 500, 3), nn.Conv2d(500, 1000, 3))
        self.fc = nn.Linear(3364000, 1)  # 1000 channels × 58 × 58

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.flatten(self.conv(x), 1))
