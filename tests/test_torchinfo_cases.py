"""The structures that torchinfo's users report, and what it counts in each beside what memsize counts.

Where torchinfo is right the totals are equal. Where they are not, the case says by how much torchinfo is off and why.
The truth is what the module itself holds: each parameter once, after a forward where a forward makes some.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torchinfo
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import memsize

Outputs = namedtuple("Outputs", "first second")


class Leaf(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(size, size), nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.line(x))


class Nested(nn.Module):
    """Modules in modules in modules."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Sequential(nn.Sequential(Leaf(8), nn.ReLU()), nn.ModuleDict({"a": Leaf(8)})["a"])
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.outer(x))


class Recursive(nn.Module):
    """The same layer in several places of one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.relu(self.shared(x))
        return x


class Siamese(nn.Module):
    """One tower for two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), nn.Linear(8, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.cat([self.tower(left), self.tower(right)], 1))


class Reused(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class TiedWeights(nn.Module):
    """One parameter in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


class Parameters(nn.Module):
    """Parameters in a list, and one beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight
        return x * self.scale


class ParameterDictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({"weight": torch.randn(8, 4), "bias": torch.zeros(4)})

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights["weight"] + self.weights["bias"]


class ParameterOfAChild(nn.Module):
    """Uses the parameters of a module without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.linear(x, self.line.weight, self.line.bias))


class Returning(nn.Module):
    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.wrap = nn.Linear(8, 4), nn.Linear(8, 2), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.a(x), self.b(x))


@dataclass
class Result:
    first: Tensor
    second: Tensor


class Packed(nn.Module):
    """A recurrent net over sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(50, 8), nn.LSTM(8, 16, 2, batch_first=True), nn.Linear(16, 2)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0][:, -1])


class Partly(nn.Module):
    """A frozen half, and a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head, self.idle = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 2), nn.Linear(30, 30)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(x))


class Hidden(nn.Module):
    """Modules in a Python list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = [nn.Linear(8, 8)], nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[0](x))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x)[0]


def pruned() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    prune.l1_unstructured(model[0], "weight", 0.5)
    return model


def frozen_half() -> nn.Module:
    half = nn.Parameter(torch.randn(8, 8), requires_grad=False)
    model = nn.Linear(8, 8)
    model.weight = half
    return model


ROW = (torch.randn(2, 8),)
IDS = (torch.randint(50, (2, 6)),)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "nested": (Nested, ROW),
    "recursive": (Recursive, ROW),
    "siamese": (Siamese, ROW * 2),
    "reused": (Reused, ROW),
    "tied": (TiedWeights, IDS),
    "parameter list": (Parameters, ROW),
    "parameter dictionary": (ParameterDictionary, ROW),
    "parameters of a child": (ParameterOfAChild, ROW),
    "dictionary": (lambda: Returning(lambda a, b: {"a": a, "b": [b]}), ROW),
    "named tuple": (lambda: Returning(Outputs), ROW),
    "dataclass": (lambda: Returning(Result), ROW),
    "scripted": (lambda: torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))), ROW),
    "traced": (lambda: torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), ROW[0]), ROW),
    "pruned": (pruned, ROW),
    "packed": (Packed, (*IDS, torch.tensor([6, 3]))),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2)), ROW),
    "partly frozen and idle": (Partly, ROW),
    "in a Python list": (Hidden, ROW),
    "a frozen weight": (frozen_half, ROW),
    "an empty module": (nn.Identity, ROW),
    "transformer layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (torch.randn(2, 5, 8),)),
    "attention": (Attending, (torch.randn(2, 5, 8),)),
}


WRONG: dict[str, tuple[int | None, str]] = {
    "tied": (400, "it counts the 50·8 parameters once for each module that holds them"),
    "pruned": (-32, "it leaves out the half of 64 weights that the mask makes zero: they are stored all the same"),
    "dataclass": (None, "it takes tensors, tuples, lists and dictionaries for outputs, and raises for anything else"),
}
"""By how much torchinfo's total is off (None: it has none), and why."""


def truth(build: Callable[[], nn.Module], inputs: tuple[Tensor, ...]) -> tuple[int, int]:
    """Parameters of a model and trainable ones, each once, after a forward."""
    model = build()
    model(*inputs)
    held = list(model.parameters())
    return sum(p.numel() for p in held), sum(p.numel() for p in held if p.requires_grad)


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*is not supported in Python 3.14", "ignore:.*enable_nested")
@pytest.mark.parametrize("name", CASES)
def test_totals(name: str) -> None:
    torch.manual_seed(0)
    build, inputs = CASES[name]
    model = build()
    totals = memsize.report(model, input_data=inputs, scenarios="fp32").totals
    assert (totals.parameters, totals.trainable) == truth(build, inputs)
    more, _ = WRONG.get(name, (0, ""))
    if more is None:
        with pytest.raises(RuntimeError, match="Failed to run torchinfo"):
            torchinfo.summary(model, input_data=inputs, verbose=0, device="cpu")
        return
    theirs = torchinfo.summary(model, input_data=inputs, verbose=0, device="cpu")
    assert (theirs.total_params, theirs.trainable_params) == (totals.parameters + more, totals.trainable + more)
