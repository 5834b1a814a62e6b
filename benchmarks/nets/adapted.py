"""Small changes to networks: perceptrons of any size, and low-rank adapters on frozen ones."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn


def perceptron(*widths: int) -> nn.Module:
    """Linear layers of these widths with ReLU between them."""
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Adapted(nn.Module):
    """A frozen linear layer and a trainable product of low rank beside it; Hu et al., 2021."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * 2.0


def adapted(model: nn.Module, names: tuple[str, ...], rank: int = 16) -> nn.Module:
    """`model` frozen, with adapters on its linear layers of these names."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(parent, name, Adapted(child, rank))
    return model
