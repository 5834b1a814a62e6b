"""The one table of shape rules, by the name that an op's schema has (``"aten::addmm"``, ``"aten::add.Tensor"``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._ops import OpOverload

Rule = Callable[..., Any]
"""Takes an op's own arguments; returns what the op returns on CUDA, or NotImplemented where that isn't certain."""

_R = TypeVar("_R", bound=Rule)
TABLE: dict[str, Rule] = {}


class Rules(dict[OpOverload, Rule | None]):
    """The table by overload: ``rules[op]`` is the op's rule, or None.

    An overload is looked up when it is first used, because finding all of them in `torch.ops` takes longer than running
    a small model; those that the installed torch lacks are never looked up.
    """

    def __missing__(self, op: OpOverload) -> Rule | None:
        rule = self[op] = TABLE.get(op.name())
        return rule


RULES = Rules()


def shape_rule(*names: str) -> Callable[[_R], _R]:
    """Register a rule for these overloads; a second rule for one of them is refused."""

    def register(rule: _R) -> _R:
        for name in names:
            if name in TABLE:
                raise ValueError(f"{name} has a shape rule already: {TABLE[name].__qualname__}")
            TABLE[name] = rule
        RULES.clear()  # an op that had no rule may have one now
        return rule

    return register


def overloads(names: str, *suffixes: str) -> tuple[str, ...]:
    """Overloads of several ATen ops: ``overloads("add sub", ".Scalar")`` names ``aten::add.Scalar`` and the other."""
    return tuple(f"aten::{name}{suffix}" for name in names.split() for suffix in suffixes or ("",))
