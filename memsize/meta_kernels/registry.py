"""The one table of shape rules, by the name that an op's schema has (``"aten::addmm"``, ``"aten::add.Tensor"``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._ops import OpOverload

Rule = Callable[..., Any]
"""Takes an op's own arguments; returns what the op returns on CUDA, or NotImplemented where that isn't certain."""

_R = TypeVar("_R", bound=Rule)
TABLE: dict[str, Rule] = {}
SPARSE_TABLE: dict[str, Rule] = {}
"""Rules for calls with sparse tensors, which those of `TABLE` leave to PyTorch."""


class Rules(dict[OpOverload, Rule | None]):
    """A table by overload: ``rules[op]`` is the op's rule, or None.

    An overload is looked up when it is first used, because finding all of them in `torch.ops` takes longer than running
    a small model; those that the installed torch lacks are never looked up.
    """

    def __init__(self, table: dict[str, Rule]) -> None:
        super().__init__()
        self._table = table

    def __missing__(self, op: OpOverload) -> Rule | None:
        rule = self[op] = self._table.get(op.name())
        return rule


RULES, SPARSE_RULES = Rules(TABLE), Rules(SPARSE_TABLE)


def shape_rule(*names: str) -> Callable[[_R], _R]:
    """Register a rule for these overloads; a second rule for one of them is refused."""
    return _registered(names, TABLE, RULES)


def sparse_rule(*names: str) -> Callable[[_R], _R]:
    """The same for a rule that is asked where an op's other one, if it has one, leaves a call to PyTorch."""
    return _registered(names, SPARSE_TABLE, SPARSE_RULES)


def _registered(names: tuple[str, ...], table: dict[str, Rule], rules: Rules) -> Callable[[_R], _R]:
    def register(rule: _R) -> _R:
        for name in names:
            if name in table:
                raise ValueError(f"{name} has a shape rule already: {table[name].__qualname__}")
            table[name] = rule
        rules.clear()  # an op that had no rule may have one now
        return rule

    return register


def overloads(names: str, *suffixes: str) -> tuple[str, ...]:
    """Overloads of several ATen ops: ``overloads("add sub", ".Scalar")`` names ``aten::add.Scalar`` and the other."""
    return tuple(f"aten::{name}{suffix}" for name in names.split() for suffix in suffixes or ("",))
