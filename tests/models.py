"""Small models whose figures are known by arithmetic. Used by the tests of tracing, findings and the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memsize.cli.click_options import request_of as request_of
from memsize.loading import (
    LoadedModel as LoadedModel,
    Target as Target,
    hubs as hubs,
    load as load,
    load_inputs as load_inputs,
    load_loop as load_loop,
    parse_target as parse_target,
    targets_of as targets_of,
)
from memsize.loading.library_imports import matching_release as matching_release
from memsize.loading.presets import presets as presets
from memsize.model.input_tensors import (
    cast_floating as cast_floating,
    inputs_from_data as inputs_from_data,
    inputs_from_maker as inputs_from_maker,
    inputs_from_specs as inputs_from_specs,
    resized as resized,
)
from memsize.model.meta_copy import MetaCopier as MetaCopier, in_mode as in_mode, meta_copy as meta_copy
from memsize.model.tensor_storage import (
    plain_tensors as plain_tensors,
    storage_key as storage_key,
    stored_tensors as stored_tensors,
    tensor_bytes as tensor_bytes,
    wrapper_name as wrapper_name,
)
from memsize.precision.layouts import GROUP as GROUP, LAYOUTS as LAYOUTS, Kernel as Kernel, part as part
from memsize.precision.quantized import (
    Quantized as Quantized,
    apply_layout as apply_layout,
    apply_torchao as apply_torchao,
    run_as as run_as,
    stored_under as stored_under,
)
from memsize.precision.recipes import (
    Recipe as Recipe,
    apply_scenario as apply_scenario,
    floating_dtype as floating_dtype,
)
from memsize.spec import file_requests as file_requests
from memsize.spec.inputs import (
    DTYPES as DTYPES,
    InputRequest as InputRequest,
    format_shape as format_shape,
    parse_input as parse_input,
    parse_inputs as parse_inputs,
)
from memsize.spec.model_request import call_of as call_of, parse_arguments as parse_arguments
from memsize.spec.options import Option as Option, keywords_of as keywords_of, options_of as options_of
from memsize.spec.project import (
    LIMITS as LIMITS,
    MODEL_KEYS as MODEL_KEYS,
    Bound as Bound,
    Growth as Growth,
    find_project as find_project,
    parse_limits as parse_limits,
    parse_section as parse_section,
    read_project as read_project,
    usual_gpu as usual_gpu,
)
from memsize.spec.scenario import DEFAULT as DEFAULT, SCENARIOS as SCENARIOS, scenario_named as scenario_named
from memsize.spec.sweep import grid_of as grid_of
from memsize.spec.training import OPTIMIZERS as OPTIMIZERS, parse_optimizer as parse_optimizer
from memsize.torch_internals.pytree import map_tensors as map_tensors, tensors_in as tensors_in
from memsize.tracing.dispatch import MetaDispatchMode as MetaDispatchMode
from memsize.tracing.ledger import Ledger as Ledger, Workspaces as Workspaces
from memsize.tracing.saved_tensors import saving as saving


class Toy(nn.Module):
    """The CNN of the question: 9,223,901 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 300, 3), nn.Conv2d(300, 500, 3), nn.Conv2d(500, 1000, 3))
        self.fc = nn.Linear(3364000, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).flatten(1))


class Small(nn.Module):
    """Conv, batch norm, in-place ReLU, pooling, flatten, dropout, linear, for 3×32×32 inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.flat = nn.Flatten()
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8 * 15 * 15, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.flat(self.pool(self.relu(self.norm(self.conv(x)))))))


class Tied(nn.Module):
    """An embedding and a head that share one 1065×64 weight: 68,160 parameters, 272,640 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1065, 64)
        self.head = nn.Linear(64, 1065, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


class Unused(nn.Module):
    """100→100→10 and a 1000×1000 layer that is never called: 1,012,110 parameters, 4,048,440 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(100, 100)
        self.idle = nn.Linear(1000, 1000)
        self.second = nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Reused(nn.Module):
    """One convolution called three times: 16·16·9 + 16 = 2,320 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.conv(self.conv(x)))


class Attention(nn.Module):
    """MultiheadAttention(64) and Linear(64, 5): 4·64·64 + 4·64 + 64·5 + 5 = 16,965 parameters, 67,860 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0])


class Direct(nn.Module):
    """A parameter on the model itself (1·197·768) and Linear(768, 10): 158,986 parameters; a buffer of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 197, 768))
        self.head = nn.Linear(768, 10)
        self.register_buffer("table", torch.zeros(2**18))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.position)


class Listed(nn.Module):
    """Four Linear(100, 100) in a Python list, one registered Linear(100, 10): 1,010 of 41,410 are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(100, 100) for _ in range(4)]
        self.head = nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.hidden:
            x = layer(x)
        return self.head(x)


@dataclass
class Pair:
    left: Tensor
    rest: dict[str, Any]


class Nested(nn.Module):
    """Returns a dataclass that holds a dict of a tuple: one new tensor, another, and a view of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Pair:
        y = self.body(x)
        return Pair(y, {"both": (torch.sigmoid(y), y[:, :3])})


class Recurrent(nn.Module):
    """A two-layer LSTM with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 32, 2, batch_first=True)
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Lazy(nn.Module):
    """A LazyLinear: 20·10 + 10 = 210 parameters once it has seen 20 features."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LazyLinear(10)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Detached(nn.Module):
    """Reads its first weight through `.data`: no gradient reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.linear(x, self.first.weight.data, self.first.bias))


class Looking(nn.Module):
    """Looks at values that follow from shapes alone, and asks whether activations are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if torch.isnan(y).any() or torch.isinf(y).any():
            y = y.clamp(-1, 1)
        mask = torch.ones(x.shape[0], 10, dtype=torch.bool, device=x.device)
        keep = int(torch.arange(5, device=x.device).max())
        return y[:, :keep] * 2 if mask.all() else y


class Deciding(nn.Module):
    """Goes one way or the other depending on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return y * 2 if (y > 0).any() else y


class Forgetful(nn.Module):
    """Uses an attribute that it never defined."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.haed(self.body(x))


class Residual(nn.Module):
    """A block whose sum is its own new memory, and one that adds in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(4, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = self.b(y)
        z += y
        return torch.relu(z)
