"""Blocks that repeat in a model, and a model with fewer of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from memsize.depth.likeness import Key, Likeness, counted

SHORTEST: Final = 3
"""The periods of blocks in the shortest model whose run shows what repeats: the first and the last stand apart."""
_LEAST: Final = SHORTEST + 2
_LONGEST_PERIOD: Final = 12
_MORE_RUNS: Final = 2
"""How many runs of the shortest model are assumed to follow the first, where stacks are chosen."""
_COUNTS: Final = re.compile("layer|block|depth")
"""Names, in a config or a module around the blocks, of how many there are. A cache has a part for each, run or not."""
_NUMBERED: Final = re.compile(r"(.*?)(\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Stack:
    """Blocks that the module at `path` holds. `counting` are the attributes that count blocks, and a period has
    `modules` modules.
    """

    path: str
    repeated: RepeatedBlocks
    counting: frozenset[Key]
    modules: int


@dataclass(frozen=True, slots=True)
class ModelBlocks:
    """Stacks of blocks of one model. Those of a group have equally many periods; `others` are the modules outside."""

    groups: tuple[tuple[Stack, ...], ...]
    others: int

    @property
    def stacks(self) -> Iterator[Stack]:
        return (stack for group in self.groups for stack in group)

    @property
    def repetition(self) -> Repetition:
        """Where blocks repeat."""
        return Repetition(tuple(tuple(stack.repeated for stack in group) for group in self.groups))

    def modules(self, counts: Sequence[int]) -> int:
        """Return how many modules a model with as many periods of each group has."""
        groups = zip(self.groups, counts, strict=True)
        return self.others + sum(stack.modules * count for group, count in groups for stack in group)

    @property
    def whole(self) -> int:
        """The modules of the whole model, which a run takes about as long as."""
        return self.modules(self.repetition.counts)

    @property
    def shortest(self) -> int:
        return self.modules((SHORTEST,) * len(self.groups))

    @property
    def first_runs(self) -> int:
        """The modules of all models that are run first: the shortest, and one with a period more of each group."""
        counts = (SHORTEST,) * len(self.groups)
        return self.shortest + sum(self.modules(one_more(counts, group)) for group in range(len(counts)))

    @property
    def of_runs(self) -> int:
        """The modules of all models that are run, if a few runs of the shortest follow the first."""
        return self.first_runs + _MORE_RUNS * self.shortest


def find_blocks(model: nn.Module) -> ModelBlocks | None:
    """Return the blocks of `model` whose repetition saves most; None where nothing repeats often enough."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return None  # nobody can take blocks out of it
    groups: dict[int, list[Stack]] = {}
    for stack in _stacks(model):
        groups.setdefault(stack.repeated.count, []).append(stack)

    def saved(group: list[Stack]) -> int:
        return sum(stack.modules * (stack.repeated.count - SHORTEST) for stack in group)

    saving = sorted(groups.values(), key=saved, reverse=True)
    total = sum(1 for _ in model.modules())
    best = None
    for size in range(1, len(saving) + 1):
        chosen = tuple(map(tuple, saving[:size]))
        inside = sum(stack.modules * stack.repeated.count for group in chosen for stack in group)
        blocks = ModelBlocks(chosen, total - inside)
        if best is None or blocks.of_runs < best.of_runs:
            best = blocks
    return best


def _stacks(model: nn.Module) -> Iterator[Stack]:
    """Yield the stacks of a model, without those that stand inside of others."""
    likeness: Likeness | None = None
    outer: list[str] = []
    for path, module in model.named_modules():
        stem = _stem(path, module)
        if stem is None or any(path.startswith(other) for other in outer):
            continue
        likeness = likeness or Likeness(model)
        stack = _repetition(path, stem, list(module.children()), likeness)
        if stack is not None:
            outer.append(stem)
            yield stack


def _stem(path: str, module: nn.Module) -> str | None:
    """Return what the paths of the children of `module` begin with, which are numbered from 0 on."""
    names = list(module._modules)
    if len(names) < _LEAST:
        return None
    match = _NUMBERED.fullmatch(names[0])
    if match is None or any(name != f"{match[1]}{number}" for number, name in enumerate(names)):
        return None
    return f"{path}.{match[1]}" if path else match[1]


def _repetition(path: str, stem: str, children: Sequence[nn.Module], likeness: Likeness) -> Stack | None:
    """Return the longest repetition among `children`, the one of the shortest period if there are several."""
    if max(Counter(map(type, children)).values()) < _LEAST:
        return None
    features = [likeness.features(child) for child in children]
    numbers: dict[Hashable, int] = {}
    try:
        common = [numbers.setdefault(block.common, len(numbers)) for block in features]
    except TypeError:  # an attribute that has no hash
        return None
    best: Stack | None = None
    for period in range(1, min(_LONGEST_PERIOD, len(children) // _LEAST) + 1):
        for start, count in _runs(common, period):
            if best is not None and period * count <= best.repeated.period * best.repeated.count:
                continue
            counting = counted(features[start:], period, count)
            if counting is not None:
                modules = sum(1 for child in children[start : start + period] for _ in child.modules())
                behind = len(children) - start - period * count
                best = Stack(path, RepeatedBlocks(stem, start, period, count, behind), counting, modules)
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


def superfluous(model: nn.Module, blocks: ModelBlocks, counts: Sequence[int]) -> Iterator[nn.Module]:
    """Yield the blocks of the whole `model` that `shorten` takes out of a copy."""
    for group, count in zip(blocks.groups, counts, strict=True):
        for stack in group:
            yield from list(model.get_submodule(stack.path).children())[stack.repeated.beyond(count)]


def shorten(model: nn.Module, blocks: ModelBlocks, counts: Sequence[int]) -> None:
    """Leave as many periods of each group of blocks in `model`, a copy. Blocks behind them, lists with an item for each
    block and the number of layers in a config, or in a module around the blocks, are as if the model had been built so.
    """
    removed: dict[int, slice] = {}
    inside: set[int] = set()
    for group, count in zip(blocks.groups, counts, strict=True):
        for stack in group:
            repeated = stack.repeated
            without = repeated.beyond(count)
            removed.setdefault(repeated.stop + repeated.behind, without)
            holder, fewer = model.get_submodule(stack.path), without.stop - without.start
            children = list(holder.children())
            for child in children[without.stop :]:
                modules: dict[str, Any] = dict(child.named_modules())
                for path, name in stack.counting:
                    if path in modules and type(vars(modules[path]).get(name)) is int:
                        vars(modules[path])[name] -= fewer
            stem = repeated.stem.removeprefix(f"{stack.path}." if stack.path else "")
            del children[without]
            holder._modules.clear()
            holder._modules.update({f"{stem}{number}": child for number, child in enumerate(children)})
            inside.update(id(module) for child in children for module in child.modules())
    for owner in _owners(model):
        for name, value in list(vars(owner).items()):
            if type(value) in (list, tuple) and len(value) in removed and not name.startswith("__"):
                without = removed[len(value)]
                vars(owner)[name] = value[: without.start] + value[without.stop :]
            elif type(value) is int and value in removed and id(owner) not in inside and _COUNTS.search(name):
                vars(owner)[name] = value - (removed[value].stop - removed[value].start)


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
                        for part in vars(owner).values():
                            is_config = type(part).__name__.endswith("Config") and hasattr(part, "__dict__")
                            waiting += [part] if type(part) is type(owner) or is_config else []


# -- where blocks repeat, and how their names count --------------------------------------------------------------------

WITHOUT_NUMBER = -1


class FoldedPath(NamedTuple):
    """A path without the number of its block: `stem` is what comes before the number, `kind` is which block of a period
    it is in, counted from the end behind the last period; None outside of the blocks, where `rest` is the whole path.
    """

    stem: str
    kind: int | None
    rest: str

    def unfold(self, number: int) -> str:
        return self.rest if self.kind is None else f"{self.stem}{number}{self.rest}"


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """`count` periods of `period` blocks each, the children of one module from number `start` on.

    Their paths are `stem` and a number (``"model.layers."``, 7). `behind` are the children that follow the last period.
    """

    stem: str
    start: int
    period: int
    count: int
    behind: int = 0

    @property
    def stop(self) -> int:
        """The number behind the last period."""
        return self.start + self.period * self.count

    def beyond(self, count: int) -> slice:
        """The numbers of the blocks that a model with `count` periods lacks."""
        return slice(self.start + self.period * count, self.stop)

    def fold(self, path: str) -> tuple[FoldedPath, int]:
        """Return `path` without the number of its child, and that number; children before the first period keep it."""
        name = path[len(self.stem) :].partition(".")[0] if path.startswith(self.stem) else ""
        number = int(name) if name.isdigit() else WITHOUT_NUMBER
        if number < self.start:
            return FoldedPath("", None, path), WITHOUT_NUMBER
        kind = (number - self.start) % self.period if number < self.stop else self.stop - number - 1
        return FoldedPath(self.stem, kind, path[len(self.stem) + len(str(number)) :]), number


@dataclass(frozen=True, slots=True)
class Repetition:
    """The blocks of a model that repeat. The stacks of one of the `groups` have equally many periods."""

    groups: tuple[tuple[RepeatedBlocks, ...], ...]

    def __iter__(self) -> Iterator[RepeatedBlocks]:
        return (stack for group in self.groups for stack in group)

    @property
    def counts(self) -> tuple[int, ...]:
        """The periods in each group."""
        return tuple(group[0].count for group in self.groups)

    def with_counts(self, counts: Sequence[int]) -> Repetition:
        """Return these blocks in a model that has as many periods of each group."""
        groups = zip(self.groups, counts, strict=True)
        return Repetition(tuple(tuple(replace(stack, count=count) for stack in group) for group, count in groups))

    def fold(self, path: str) -> tuple[FoldedPath, int]:
        """Return `path` without the number of its block, and that number, -1 outside of the stacks."""
        folded = (stack.fold(path) for stack in self if path.startswith(stack.stem))
        return next(folded, (FoldedPath("", None, path), WITHOUT_NUMBER))


def one_more(counts: Sequence[int], group: int) -> tuple[int, ...]:
    """Return the counts of the periods with one more in a group."""
    return tuple(count + (number == group) for number, count in enumerate(counts))
