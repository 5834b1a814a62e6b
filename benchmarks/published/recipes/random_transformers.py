"""Random encoders of the GPUMemNet data set, as its `transformer.py` made and trained them.

The model runs twice before the training: once to try it, and once for modelsummary. Their input stays on the GPU. A
batch is freed before the next one is copied; an output, a loss and the predicted classes live until the next ones
replace them. The last batch of a pass is smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor, nn

import memsize
from benchmarks.published.rows import Row
from memsize.analysis.step import StepTrace

_TRIALS: Final = 2
_PASSES: Final = 2
_FULL: Final = 3
"""Of a pass; what follows takes no more."""


def predict(row: Row) -> StepTrace:
    """Two forward passes, and the first steps of two passes over the data."""
    values = {name: float(value) for name, value in row.values.items() if name != "figure"}
    with torch.device("meta"):
        model = Network(values)
    batch = int(values["batch"])
    rest = int(values["samples"]) % batch
    sizes = ([batch] * _FULL + [rest] * (rest > 0)) * _PASSES
    return memsize.trace(
        model,
        args=(torch.empty(1),),
        step=_loop(sizes, int(values["length"])),
        steps=len(sizes),
        gpu=row.source.gpu,
        stack=row.source.stack,
    )


def _loop(sizes: list[int], length: int) -> Callable[[nn.Module], Callable[[Tensor], None]]:
    def make(model: nn.Module) -> Callable[[Tensor], None]:
        model.train()
        tensors: dict[str, Tensor] = {"tried": torch.zeros(sizes[0], length, dtype=torch.int64, device="meta")}
        for _ in range(_TRIALS):
            model(tensors["tried"])
        optimizer, criterion = torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss()
        pending = iter(sizes)

        def body(_: Tensor) -> None:
            batch = next(pending)
            for name in ("inputs", "labels"):
                tensors.pop(name, None)
            tensors["inputs"] = torch.zeros(batch, length, dtype=torch.int64, device="meta")
            tensors["labels"] = torch.zeros(batch, dtype=torch.int64, device="meta")
            optimizer.zero_grad()
            tensors["outputs"] = model(tensors["inputs"])
            tensors["loss"] = criterion(tensors["outputs"], tensors["labels"])
            tensors["loss"].backward()
            optimizer.step()
            tensors["highest"], tensors["predicted"] = torch.max(tensors["outputs"], 1)

        return body

    return make


class Network(nn.Module):
    """An encoder between an embedding and a classifier of the mean position."""

    def __init__(self, values: Mapping[str, float]) -> None:
        super().__init__()
        width, length = int(values["width"]), int(values["length"])
        self.embedding = nn.Embedding(int(values["vocabulary"]), width)
        self.positions = nn.Parameter(torch.zeros(1, length, width))
        layer = nn.TransformerEncoderLayer(
            width, int(values["heads"]), int(values["hidden"]), values["dropout"], batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, int(values["layers"]))
        self.head = nn.Linear(width, int(values["classes"]))

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.layers(self.embedding(tokens) + self.positions)
        return self.head(states.mean(dim=1))
