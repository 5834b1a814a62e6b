"""Adapters beside the layers of a meta copy, frozen parts, and the mark of a quantized base.

LoRA is memsize's own, of the operations and dtypes of peft 0.21 (`tuners/lora/layer.py`, `Linear.forward`, and
`tuners/lora/bnb.py`, `Linear4bit.forward`): adapters in float32 whatever the base has (`autocast_adapter_dtype`). The
other kinds, and LoRA beside layers that are not linear, are made by peft where it is installed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from memsize.errors import InputError, MemsizeError, UnknownInputError, first_line, nearest
from memsize.loading.hubs import quiet
from memsize.loading.library_imports import torchvision_importable
from memsize.model.meta_copy import MetaCopier
from memsize.precision.layouts import base_layout
from memsize.precision.quantized import ADAPTER, BASE, WHOLE, converts, is_adapter, is_conv1d, is_unpacked
from memsize.spec.training import ADAPTER_OPTIONS, BASES, PEFT_CONFIGS, Adapter, TrainedParts, matches

_PROJECTION = nn.modules.linear.NonDynamicallyQuantizableLinear
"""The output projection of an attention module, which reads the weight and calls no forward."""


def with_trained_parts(model: nn.Module, parts: TrainedParts) -> nn.Module:
    """A meta copy of `model` with these adapters, this base and these frozen parts.

    Raises `InputError` for a pattern that matches nothing, a rank that is too large, and a base that no layer takes.
    """
    copied = MetaCopier(model).copy()
    for pattern in parts.freeze:
        _freeze_matching(copied, pattern)
    if parts.base is not None:
        if not converts(copied, base_layout(parts.base)):
            others = [name for name in BASES if converts(copied, base_layout(name))]
            instead = f"choose from {', '.join(others)}" if others else "no other format is for its layers either"
            raise InputError(f"no layer of the model can be stored as {parts.base}: {instead}")
        vars(copied)[BASE] = parts.base
    if parts.adapter is not None:
        add_adapters(copied, parts.adapter)
    return copied


def has_adapters(model: nn.Module) -> bool:
    """Whether adapters stand beside layers of `model`."""
    return any(is_adapter(module) for module in model.modules())


def add_adapters(model: nn.Module, adapter: Adapter) -> None:
    """Freeze `model`, a copy that memsize may change, and put adapters beside the layers that `adapter` targets."""
    linears = {path: (module, inside, outside) for path, module, inside, outside in linear_layers(model)}
    trained = [path for pattern in adapter.train for path in _matching_modules(model, pattern)]
    trained = [path for path in trained if not any(path.startswith(f"{other}.") for other in trained)]
    targets = _targets(model, adapter, linears, trained)
    model.requires_grad_(False)
    if adapter.kind == "lora" and all(path in linears for path in targets):
        for path in targets:
            module, inside, outside = linears[path]
            parent, _, name = path.rpartition(".")
            model.get_submodule(parent)._modules[name] = LoRALinear(module, inside, outside, adapter)
    else:
        _add_by_peft(model, adapter, targets)
    for path in dict.fromkeys(trained):
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent)._modules[name] = TrainedCopy(model.get_submodule(path))


class LoRALinear(nn.Module):
    """A linear layer with ``B·A·x`` beside it, with A [rank, in] and B [out, rank] in float32."""

    def __init__(self, base: nn.Module, inside: int, outside: int, adapter: Adapter) -> None:
        super().__init__()
        self.base_layer = base
        self.dropout = nn.Dropout(adapter.dropout) if adapter.dropout else nn.Identity()
        self.lora_A = nn.Linear(inside, adapter.rank, bias=False, device="meta", dtype=torch.float32)
        self.lora_B = nn.Linear(adapter.rank, outside, bias=False, device="meta", dtype=torch.float32)
        for part in (self.lora_A, self.lora_B):
            vars(part)[ADAPTER] = True

    @property
    def weight(self) -> Any:
        """The base's weight, which some models read."""
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        return self.base_layer.bias

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The base's output and the adapter's, in the dtype of the base's."""
        result: Tensor = self.base_layer(x, *args, **kwargs)
        dtype = result.dtype
        if is_unpacked(self.base_layer):
            return self._beside_unpacked(result, x)
        x = x.to(self.lora_A.weight.dtype)
        result = result + self._added(x)
        return result.to(dtype)

    def _added(self, x: Tensor) -> Tensor:
        result: Tensor = self.lora_B(self.lora_A(self.dropout(x))) * 1.0  # the scale, alpha / rank
        return result

    def _beside_unpacked(self, result: Tensor, x: Tensor) -> Tensor:
        """Beside a layer of bitsandbytes, peft leaves the dtypes to autocast where that is on."""
        if torch.is_autocast_enabled():
            return result + self._added(x)
        return result + self._added(x.to(self.lora_A.weight.dtype)).to(result.dtype)


class TrainedCopy(nn.Module):
    """A frozen module with the copy that is trained in its place, as peft's `ModulesToSaveWrapper` has both."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original_module = original
        self.trained = deepcopy(original).requires_grad_(True)
        for module in self.modules():
            vars(module)[WHOLE] = True

    @property
    def weight(self) -> Any:
        """The copy's weight, which some models read."""
        return self.trained.weight

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The copy's output."""
        return self.trained(*args, **kwargs)


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, int, int]]:
    """Linear layers but the head, with their paths and widths; transformers' `Conv1D` stores its weight transposed."""
    ask = getattr(model, "get_output_embeddings", None)
    head = ask() if callable(ask) else None
    for path, module in model.named_modules():
        if module is head or isinstance(module, _PROJECTION) or is_adapter(module):
            continue
        if isinstance(module, nn.Linear):
            yield path, module, module.in_features, module.out_features
        elif is_conv1d(module):
            yield path, module, *module.weight.shape


def _targets(
    model: nn.Module, adapter: Adapter, linears: dict[str, tuple[nn.Module, int, int]], trained: Sequence[str]
) -> list[str]:
    """The paths of the layers with adapters: without targets all linear ones, as peft's ``all-linear``. A module that
    is `trained` in full has none.
    """
    paths = [path for pattern in adapter.targets for path in _matching_layers(model, pattern, linears)]
    whole = tuple(f"{path}." for path in trained)
    paths = [path for path in dict.fromkeys(paths or filter(None, linears)) if not f"{path}.".startswith(whole)]
    if not paths and trained:
        raise InputError(f"{adapter.kind} has no layer to stand beside: train={';'.join(adapter.train)} takes them all")
    if not paths:
        raise InputError(f"{adapter.kind} has no layer to stand beside: no linear layer is inside the model")
    widths = {path: min(linears[path][1:]) for path in paths if path in linears}
    narrow = [path for path, width in widths.items() if width < adapter.rank]
    if narrow and (adapter.targets or len(narrow) == len(paths)):
        widest = max(narrow, key=lambda path: widths[path])
        raise InputError(f"rank {adapter.rank} is larger than {widest}: the largest is {widths[widest]}")
    return paths


def _matching_layers(model: nn.Module, pattern: str, linears: Iterable[str]) -> list[str]:
    """The layers that `pattern` means: linear ones if there are such, else any without children."""
    paths = [path for path in linears if matches(path, pattern)]
    leaves = [path for path, module in model.named_modules() if not any(True for _ in module.children())]
    paths = paths or [path for path in leaves if path and matches(path, pattern)]
    if not paths:
        names = dict.fromkeys(path.rpartition(".")[2] for path in linears)
        raise UnknownInputError("layer", pattern, names, problem=f"no layer is called {pattern!r}")
    return paths


def _matching_modules(model: nn.Module, pattern: str) -> list[str]:
    every = [path for path, _ in model.named_modules() if path]
    paths = [path for path in every if matches(path, pattern)]
    if not paths:
        names = dict.fromkeys(path.rpartition(".")[2] for path in every)
        raise UnknownInputError("module", pattern, names, problem=f"no module is called {pattern!r}")
    return paths


def _freeze_matching(model: nn.Module, pattern: str) -> None:
    """Freeze the parameters whose name, or whose module's path, `pattern` matches."""
    named = dict(nn.Module.named_parameters(model, remove_duplicate=False))
    paths = [path for path, _ in model.named_modules() if path and matches(path, pattern)]
    frozen = [p for name, p in named.items() if matches(name, pattern) or any(name.startswith(f"{p}.") for p in paths)]
    if not frozen:
        names = dict.fromkeys(part for name in named for part in name.split(".") if not part.isdecimal())
        paths = [path for path, _ in model.named_modules() if path]
        if "*" in pattern:  # of all layers in a list, one pattern
            paths = list(dict.fromkeys(re.sub(r"(?<=\.)\d+\b", "*", path) for path in paths))
        near = nearest(pattern, paths) if "." in pattern else None
        raise UnknownInputError(
            "parameter", pattern, names, near=near or None, problem=f"freeze: nothing is called {pattern!r}"
        )
    for parameter in frozen:
        parameter.requires_grad_(False)


def _add_by_peft(model: nn.Module, adapter: Adapter, targets: list[str]) -> None:
    """Let peft put its adapters in place, and mark what it added."""
    try:
        with quiet(logging.WARNING), torchvision_importable():
            import peft
    except ImportError as error:
        beside = f"{adapter.kind} adapters" if adapter.kind != "lora" else "adapters of layers that are not linear"
        raise MemsizeError(f"{beside} are made by peft: pip install peft") from error
    before = set(map(id, (*model.parameters(), *model.buffers())))
    options: dict[str, Any] = {"target_modules": targets, **dict(adapter.options)}
    if adapter.kind in ("lora", "dora", "vera"):
        options["r"] = adapter.rank
        options["vera_dropout" if adapter.kind == "vera" else "lora_dropout"] = adapter.dropout
    if adapter.kind == "dora":
        options["use_dora"] = True
    if adapter.kind == "oft":
        if "r" in options:  # peft takes one of the two
            options.setdefault("oft_block_size", 0)
        if "dropout" in options:
            options["module_dropout"] = options.pop("dropout")
    if "alpha" in options and adapter.kind in ("lora", "dora"):
        options["lora_alpha"] = options.pop("alpha")
    if adapter.kind == "ia3":
        options.setdefault("feedforward_modules", [])
    config = getattr(peft, PEFT_CONFIGS[adapter.kind])
    fields = config.__dataclass_fields__
    if (unknown := next((name for name in options if name not in fields), None)) is not None:
        names = [*(name for name in ADAPTER_OPTIONS if name != unknown), *fields]
        raise UnknownInputError("option", unknown, names, problem=f"{adapter.kind} has no option {unknown!r}")
    try:
        with quiet(logging.WARNING):
            peft.get_peft_model(model, config(**options))  # which changes the model in place
    except Exception as error:
        raise InputError(f"peft cannot put {adapter.kind} beside these layers: {first_line(error)}") from error
    for module in model.modules():
        own = (*module._parameters.values(), *module._buffers.values())
        if any(tensor is not None and id(tensor) not in before for tensor in own):
            vars(module)[ADAPTER] = True
            module._apply(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, recurse=False)
