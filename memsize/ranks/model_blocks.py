"""The blocks of a model that are sharded one by one, or put on stages: its own hints, else the layers that repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from memsize.records.finding import join_names

_LISTS = (nn.ModuleList, nn.Sequential)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)


class Blocks(NamedTuple):
    """The modules to shard, the innermost first, and a description of their source."""

    modules: tuple[nn.Module, ...]
    source: str

    def __str__(self) -> str:
        kinds = Counter(type(module).__name__ for module in self.modules)
        return join_names(tuple(f"{count:,} x {kind}" for kind, count in kinds.items()))


def blocks_of(model: nn.Module) -> Blocks:
    """Return the blocks of a model: the modules that its library lists in ``_no_split_modules``, or else the children
    of one class in a ModuleList or Sequential (preferably those that have children themselves). May be empty.
    """
    hinted = {name for module in model.modules() for name in _hints(module)}
    own = [module for module in model.modules() if type(module).__name__ in hinted and module is not model]
    if own:
        return Blocks(_inner_first(own), "the model's own _no_split_modules")
    repeated = [child for module in model.modules() if isinstance(module, _LISTS) for child in _alike(module)]
    nested = [module for module in repeated if any(True for _ in module.children())]
    return Blocks(_inner_first(nested or repeated), "the layers that repeat in a list or a sequence")


def blocks_in_line(model: nn.Module) -> Blocks:
    """Return the blocks that pipeline stages consist of: the layers in the lists that the library's plan names
    (transformers' ``pp_plan``), or else those of `blocks_of` without branches of a block and without blocks that
    contain others.
    """
    if planned := [block for several in _planned(model) for block in several]:
        return Blocks(tuple(planned), "the model's own pp_plan")
    blocks, source = blocks_of(model)
    branches = set(_branches(blocks))
    blocks = tuple(block for block in blocks if block not in branches)
    return Blocks(tuple(block for block in blocks if not _holds_any(block, blocks)), source)


def _branches(blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules that all blocks of a class hold in ModuleLists of equal lengths: experts, which do not run
    one after the other.

    Stages, whose layers do run in order, hold them in a Sequential, or in lists of different lengths.
    """
    kinds: dict[type, list[list[nn.ModuleList]]] = {}
    for block in blocks:
        lists = [module for module in block.modules() if isinstance(module, nn.ModuleList)]
        kinds.setdefault(type(block), []).append(lists)
    for alike in kinds.values():
        lengths = {tuple(map(len, lists)) for lists in alike}
        if len(alike) > 1 and len(lengths) == 1:
            yield from (branch for lists in alike for several in lists for branch in several)


def _planned(model: Any) -> Iterator[nn.ModuleList]:
    base = getattr(model, "base_model", model)  # whose names the plan uses
    plan = getattr(base, "_pp_plan", None) or getattr(getattr(model, "config", None), "base_model_pp_plan", None)
    for name in plan or ():
        children = getattr(base, name, None)
        if isinstance(children, nn.ModuleList):
            yield children


def _holds_any(outer: nn.Module, blocks: Iterable[nn.Module]) -> bool:
    inside = {*outer.modules()} - {outer}
    return any(block in inside for block in blocks)


def _hints(module: Any) -> Iterable[str]:
    hints = getattr(module, "_no_split_modules", None)
    return hints if isinstance(hints, (list, tuple, set)) else ()


def _alike(several: nn.Module) -> list[nn.Module]:
    children = list(dict.fromkeys(several.children()))
    one_class = len({type(child) for child in children}) == 1 and len(children) > 1
    usable = one_class and not isinstance(children[0], _WITHOUT_FORWARD)
    return [child for child in children if any(True for _ in child.parameters())] if usable else []


def _inner_first(modules: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """Return each module once, children before parents; `modules` lists parents before children."""
    return tuple(reversed(dict.fromkeys(modules)))
