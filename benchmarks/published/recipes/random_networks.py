"""Random convolutional networks of the GPUMemNet data set, as its `cnn.py` made and trained them.

torchsummary runs each network with two samples before the training; what that leaves in the allocator decides where
the workspaces of cuBLAS lie. A batch is freed before the next one is copied, an output and a loss live until the next
ones replace them. The last, smaller batch of a pass is left out: training ended after a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn

import memsize
from benchmarks.published.rows import Row
from memsize.analysis.step import StepTrace

_ACTIVATIONS: Final = {
    "relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "prelu": nn.PReLU, "elu": nn.ELU, "selu": nn.SELU, "gelu": nn.GELU,
    "tanh": nn.Tanh, "swish": nn.SiLU, "softplus": nn.Softplus, "mish": nn.Mish,
}  # fmt: skip
_MOST: Final = 2048
"""No layer has more filters."""
_GROWTH, _LAYERS = 32, 4
"""Filters and layers of a dense block."""
_SUMMARIZED: Final = 2
_STEPS: Final = 3
_MOST_BLOCKS: Final = 20
"""More than any dense network of the data set has."""


def predict(row: Row) -> StepTrace:
    """A summary and three steps with Adam."""
    return training(row.values, row.source.gpu, row.source.stack)


def training(values: Mapping[str, str], gpu: str, stack: str) -> StepTrace:
    """The same of a network by its settings."""
    with torch.device("meta"):
        model = Network(values)
    shape = (int(values["channels"]), int(values["size"]), int(values["size"]))
    return memsize.trace(
        model,
        args=(torch.empty(1),),
        step=_loop(int(values["batch"]), shape),
        steps=_STEPS,
        gpu=gpu,
        stack=stack,
    )


def settings(line: Mapping[str, str]) -> dict[str, str]:
    """The settings of a line of the data set.

    How often a dense network halves its filters is not among them: it follows from the parameters of the convolutions.
    """
    values = {
        **{name: line[name] for name in ("depth", "architecture", "batch", "activation")},
        "channels": line["input_channels"],
        "classes": line["num_classes"],
        "filters": line["base_filters"],
        "size": line["input_size"],
        "norm": str(int(line["batchnorm"] == "True")),
        "dropout": line["dropout_rate"][:5] if line["dropout"] == "True" else "0",
    }
    parameters = sorted(int(size.partition(":")[2]) for size in line["conv_sizes"].split())
    for every in map(str, range(1, _MOST_BLOCKS)):
        if _parameters({**values, "every": every}) == parameters:
            return {**values, "every": every}
    raise ValueError(f"no {line['architecture']} network has these convolutions")


def _parameters(values: Mapping[str, str]) -> list[int]:
    with torch.device("meta"):
        network = Network(values)
    convolutions = [part for part in network.modules() if isinstance(part, nn.Conv2d)]
    return sorted(sum(weight.numel() for weight in part.parameters()) for part in convolutions)


def _loop(batch: int, shape: tuple[int, ...]) -> Callable[[nn.Module], Callable[[Tensor], None]]:
    def make(model: nn.Module) -> Callable[[Tensor], None]:
        model.train()
        model(torch.empty(_SUMMARIZED, *shape, device="meta"))
        optimizer, criterion = torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss()
        tensors: dict[str, Tensor] = {}

        def body(_: Tensor) -> None:
            for name in ("inputs", "labels"):
                tensors.pop(name, None)
            tensors["inputs"] = torch.empty(batch, *shape, device="meta")
            tensors["labels"] = torch.zeros(batch, dtype=torch.int64, device="meta")
            optimizer.zero_grad()
            tensors["outputs"] = model(tensors["inputs"])
            tensors["loss"] = criterion(tensors["outputs"], tensors["labels"])
            tensors["loss"].backward()
            optimizer.step()

        return body

    return make


class Layer(nn.Sequential):
    """A convolution, batch norm, activation and dropout, as the settings have them."""

    def __init__(self, values: Mapping[str, str], inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> None:
        parts: list[nn.Module] = [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2)]
        if values["norm"] == "1":
            parts.append(nn.BatchNorm2d(outputs))
        parts.append(_ACTIVATIONS[values["activation"]]())
        if values["dropout"] != "0":
            parts.append(nn.Dropout(float(values["dropout"])))
        super().__init__(*parts)


class Residual(nn.Module):
    """Two layers beside a shortcut."""

    def __init__(self, values: Mapping[str, str], inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = Layer(values, inputs, outputs, stride=stride), Layer(values, outputs, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            norm = nn.BatchNorm2d(outputs) if values["norm"] == "1" else nn.Identity()
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), norm)

    def forward(self, x: Tensor) -> Tensor:
        """The shortcut runs first."""
        residual = self.shortcut(x)
        x = self.first(x)
        x = self.second(x)
        added: Tensor = x + residual
        return added


class Dense(nn.Module):
    """Layers that each read everything before them."""

    def __init__(self, values: Mapping[str, str], inputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(values, inputs + n * _GROWTH, _GROWTH) for n in range(_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """All of it side by side."""
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


class Transition(nn.Module):
    """Half the filters of a dense block, and half the pixels in each direction."""

    def __init__(self, values: Mapping[str, str], inputs: int) -> None:
        super().__init__()
        self.layer = Layer({**values, "activation": "relu", "dropout": "0"}, inputs, inputs // 2, kernel=1)
        self.pool = nn.AvgPool2d(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """A single pixel is not pooled."""
        x = self.layer(x)
        return self.pool(x) if min(x.shape[2:]) > 1 else x


class Network(nn.Module):
    """The blocks of an architecture, and a linear layer behind their average."""

    def __init__(self, values: Mapping[str, str]) -> None:
        super().__init__()
        make = {"residual": _residuals, "dense": _denses}.get(values["architecture"], _layers)
        self.blocks = nn.ModuleList()
        width = int(values["channels"])
        for block, outputs in make(values, width):
            self.blocks.append(block)
            width = outputs
        self.average, self.softmax = nn.AdaptiveAvgPool2d(1), nn.Softmax(1)
        self.fc = nn.Linear(width, int(values["classes"]))

    def forward(self, x: Tensor) -> Tensor:
        """The classes' probabilities, which the script gives to the cross-entropy."""
        for block in self.blocks:
            x = block(x)
        x = self.average(x)
        x = torch.flatten(x, 1)
        x = self.fc(x)
        probabilities: Tensor = self.softmax(x)
        return probabilities


Blocks = Iterator[tuple[nn.Module, int]]
"""Each block with the filters of its output."""


def _residuals(values: Mapping[str, str], width: int) -> Blocks:
    depth, base, size = (int(values[name]) for name in ("depth", "filters", "size"))
    for n in range(depth // 2):
        outputs = _grown(base, n, depth)
        stride = 2 if n % 2 == 1 and size > 7 else 1
        yield Residual(values, width, outputs, stride), outputs
        width, size = outputs, size // stride
        if size <= 7:
            break


def _denses(values: Mapping[str, str], width: int) -> Blocks:
    count, every = int(values["depth"]) // _LAYERS, int(values["every"])
    for n in range(count):
        block, width = Dense(values, width), width + _LAYERS * _GROWTH
        yield block, width
        if n % every == 0 and n != count - 1:
            yield Transition(values, width), width // 2
            width //= 2


def _layers(values: Mapping[str, str], width: int) -> Blocks:
    depth, base = int(values["depth"]), int(values["filters"])
    for n in range(depth):
        outputs = _filters(values["architecture"], base, depth, n)
        yield Layer(values, width, outputs), outputs
        width = outputs


def _grown(base: int, layer: int, layers: float) -> int:
    """The filters of a layer where they grow from `base` to the most in so many layers."""
    return min(int(base * ((_MOST / base) ** (1 / layers)) ** layer), _MOST)


def _filters(architecture: str, base: int, depth: int, layer: int) -> int:
    half = depth // 2
    match architecture:
        case "pyramid":
            return _grown(base, layer, depth)
        case "gradual":
            return _grown(base, layer, 2 * depth)
        case "reverse_pyramid":
            return max(int(base / ((_MOST / base) ** (1 / depth)) ** layer), 1)
        case "bottleneck":
            growth = 2.0 if depth <= 2 else (_MOST / base) ** (1 / (depth - 1))
            return min(int(base * growth ** (layer - 1)), _MOST) if layer else 2 * base
        case "hourglass" if layer < half:
            return _grown(base, layer, half)
        case "hourglass":
            return max(int(base * ((_MOST / base) ** (1 / (depth - half))) ** (depth - layer - 1)), base)
    return base
