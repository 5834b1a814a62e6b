"""The one table of shape rules, by the name that an op's schema has (``"aten::addmm"``, ``"aten::add.Tensor"``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload

Rule = Callable[..., Any]
"""Takes an op's own arguments; returns what it would return on CUDA, NotImplemented where it can't tell for certain."""

_R = TypeVar("_R", bound=Rule)
TABLE: dict[str, Rule] = {}


def shape_rule(*names: str) -> Callable[[_R], _R]:
    """Register a rule for these overloads; a second rule for one of them is refused."""

    def register(rule: _R) -> _R:
        for name in names:
            if name in TABLE:
                raise ValueError(f"{name} has a shape rule already: {TABLE[name].__qualname__}")
            TABLE[name] = rule
        return rule

    return register


def overloads(names: str, *suffixes: str) -> tuple[str, ...]:
    """Overloads of several ATen ops: ``overloads("add sub", ".Scalar")`` names ``aten::add.Scalar`` and the other."""
    return tuple(f"aten::{name}{suffix}" for name in names.split() for suffix in suffixes or ("",))


class Rules(Mapping[OpOverload, Rule]):
    """The table, read by overload. An overload is matched when it is first asked for, because finding all of them in
    `torch.ops` takes longer than a small model does; those that the installed torch lacks are never met."""

    def __init__(self, table: Mapping[str, Rule]) -> None:
        self._table = table
        self._found: dict[OpOverload, Rule | None] = {}
        self._size = len(table)

    def get(self, op: OpOverload, default: Any = None) -> Any:
        """The rule for `op`, or `default`."""
        if len(self._table) != self._size:
            # A rule was registered since: an op that had none may have one now.
            self._found.clear()
            self._size = len(self._table)
        try:
            rule = self._found[op]
        except KeyError:
            rule = self._found[op] = self._table.get(op.name())
        return default if rule is None else rule

    def __getitem__(self, op: OpOverload) -> Rule:
        rule: Rule | None = self.get(op)
        if rule is None:
            raise KeyError(op)
        return rule

    def __iter__(self) -> Iterator[OpOverload]:
        return (op for op in map(_overload, self._table) if op is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _overload(name: str) -> OpOverload | None:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
    return found if isinstance(found, OpOverload) else None
