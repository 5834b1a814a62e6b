"""Blocks that repeat in a model, and a model with fewer of them."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from memsize.depth.likeness import Key, Likeness, counted
from memsize.depth.repeated import RepeatedBlocks

_LEAST: Final = 8
"""With fewer periods of blocks, the runs of short models take as long as that of the whole."""
_LONGEST_PERIOD: Final = 12
_COUNTS: Final = re.compile("layer|block|depth")
"""Names in a config of how many blocks there are: a cache has a part for each of them, also for one that is not run."""
_NUMBERED: Final = re.compile(r"(.*?)(\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ModelBlocks:
    """Blocks of one model: the module at `path` holds them. `counting` are the attributes that count blocks."""

    path: str
    repeated: RepeatedBlocks
    counting: frozenset[Key]
    modules: int
    """How many modules one period has."""


def find_blocks(model: nn.Module) -> ModelBlocks | None:
    """Return the blocks of `model` that repeat most; None where there are too few for short models to be quicker."""
    likeness: Likeness | None = None
    best: ModelBlocks | None = None
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return None  # nobody can take blocks out of it
    for path, module in model.named_modules():
        if best is not None and path.startswith(best.repeated.stem):
            continue
        stem = _stem(path, module)
        if stem is None:
            continue
        likeness = likeness or Likeness(model)
        candidate = _repetition(path, stem, list(module.children()), likeness)
        if candidate and (best is None or _saved(candidate) > _saved(best)):
            best = candidate
    return best


def _saved(blocks: ModelBlocks) -> int:
    return blocks.modules * blocks.repeated.count


def _stem(path: str, module: nn.Module) -> str | None:
    """Return what the paths of the children of `module` begin with, which are numbered from 0 on."""
    names = list(module._modules)
    if len(names) < _LEAST:
        return None
    match = _NUMBERED.fullmatch(names[0])
    if match is None or any(name != f"{match[1]}{number}" for number, name in enumerate(names)):
        return None
    return f"{path}.{match[1]}" if path else match[1]


def _repetition(path: str, stem: str, children: Sequence[nn.Module], likeness: Likeness) -> ModelBlocks | None:
    """Return the longest repetition among `children`, the one of the shortest period if there are several."""
    if len(children) < _LEAST or len({type(child) for child in children}) > _LONGEST_PERIOD:
        return None
    features = [likeness.features(child) for child in children]
    numbers: dict[Hashable, int] = {}
    try:
        common = [numbers.setdefault(block.common, len(numbers)) for block in features]
    except TypeError:  # an attribute that has no hash
        return None
    best: ModelBlocks | None = None
    for period in range(1, min(_LONGEST_PERIOD, len(children) // _LEAST) + 1):
        for start, count in _runs(common, period):
            if best is not None and period * count <= best.repeated.period * best.repeated.count:
                continue
            counting = counted(features[start:], period, count)
            if counting is not None:
                modules = sum(1 for child in children[start : start + period] for _ in child.modules())
                behind = len(children) - start - period * count
                best = ModelBlocks(path, RepeatedBlocks(stem, start, period, count, behind), counting, modules)
    return best


def _runs(common: Sequence[int], period: int) -> Iterator[tuple[int, int]]:
    """Yield where blocks begin to repeat, and how many periods there are, `_LEAST` at the least."""
    start = 0
    for position in range(period, len(common) + 1):
        if position < len(common) and common[position] == common[position - period]:
            continue
        count = (position - start) // period
        if count >= _LEAST:
            yield start, count
        start = position - period + 1


def shorten(model: nn.Module, blocks: ModelBlocks, count: int) -> None:
    """Leave `count` periods of the blocks in `model`, a copy. Blocks behind them, lists with an item for each block
    and the number of layers in a config are as if the model had been built so.
    """
    repeated = blocks.repeated
    holder = model.get_submodule(blocks.path)
    children, total = list(holder.children()), len(holder._modules)
    first, last = repeated.start + repeated.period * count, repeated.stop
    for child in children[last:]:
        for path, name in blocks.counting:
            module: Any = child.get_submodule(path) if _has(child, path) else None
            if module is not None and type(vars(module).get(name)) is int:
                vars(module)[name] -= last - first
    stem = repeated.stem.removeprefix(f"{blocks.path}." if blocks.path else "")
    holder._modules.clear()
    for number, child in enumerate([*children[:first], *children[last:]]):
        holder._modules[f"{stem}{number}"] = child
    for owner in _owners(model):
        for name, value in list(vars(owner).items()):
            if type(value) in (list, tuple) and len(value) == total and not name.startswith("__"):
                vars(owner)[name] = value[:first] + value[last:]
            elif value == total and type(value) is int and _COUNTS.search(name) and not isinstance(owner, nn.Module):
                vars(owner)[name] = total - (last - first)


def _has(module: nn.Module, path: str) -> bool:
    return any(path == other for other, _ in module.named_modules())


def _owners(model: nn.Module) -> Iterator[Any]:
    """Yield the objects whose lists may have an item for each block: modules, and what they are configured with."""
    met: set[int] = set()
    for module in model.modules():
        yield module
        for value in vars(module).values():
            if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value):
                waiting = [value]
                while waiting:
                    owner = waiting.pop()
                    if id(owner) not in met and not isinstance(owner, nn.Module):
                        met.add(id(owner))
                        yield owner
                        waiting += [
                            part for part in vars(owner).values() if type(part) is type(owner) or _is_config(part)
                        ]


def _is_config(value: Any) -> bool:
    return type(value).__name__.endswith("Config") and hasattr(value, "__dict__")
