"""The facts about kernels, by op: one table for each kind of fact, filled by the modules of this package.

A shape rule says what an op returns, and so what it keeps for backward. That doesn't tell what the kernel allocates
inside, copies first or refuses, though the caching allocator provides that memory too: temporaries, copies and demands
on dtypes have tables of their own, for the kernels whose source is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch._ops import OpOverload

from memsize.model.tensor_storage import dtype_name

if TYPE_CHECKING:
    from memsize.records.layout import Format

_F = TypeVar("_F", bound=Callable[..., Any])

# -- results ----------------------------------------------------------------------------------------------------------

Rule = Callable[..., Any]
"""Takes an op's own arguments; returns what the op returns on CUDA, or NotImplemented where that isn't certain."""

TABLE: dict[str, Rule] = {}
"""Shape rules by the name that an op's schema has (``"aten::addmm"``, ``"aten::add.Tensor"``)."""
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


def shape_rule(*names: str) -> Callable[[_F], _F]:
    """Register a rule for these overloads; raises ValueError for one that has a rule already."""
    return _ruled(names, TABLE, RULES)


def shape_rules(library: str, rules: Mapping[str, Rule]) -> None:
    """Register rules of one expression each, by the names of the overloads of `library` that it holds for."""
    for names, rule in rules.items():
        shape_rule(*(f"{library}::{name}" for name in names.split()))(rule)


def sparse_rule(*names: str) -> Callable[[_F], _F]:
    """Register a rule that is tried where the op's shape rule, if any, leaves a call with sparse tensors to PyTorch."""
    return _ruled(names, SPARSE_TABLE, SPARSE_RULES)


def _ruled(names: tuple[str, ...], table: dict[str, Rule], rules: Rules) -> Callable[[_F], _F]:
    def register(rule: _F) -> _F:
        for name in names:
            if name in table:
                other = getattr(table[name], "func", table[name])
                raise ValueError(f"{name} has a shape rule already: {other.__qualname__}")
            table[name] = rule
        rules.clear()  # an op that had no rule may have one now
        return rule

    return register


def overloads(names: str, *suffixes: str) -> tuple[str, ...]:
    """Overloads of several ATen ops: ``overloads("add sub", ".Scalar")`` names ``aten::add.Scalar`` and the other."""
    return tuple(f"aten::{name}{suffix}" for name in names.split() for suffix in suffixes or ("",))


# -- temporaries ------------------------------------------------------------------------------------------------------


class Temporary(NamedTuple):
    """One allocation inside a kernel, freed at its end."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def bytes(self) -> int:
        """The bytes that it requests."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


TEMPORARIES: dict[Any, Callable[..., Iterator[Temporary]]] = {}
"""The allocations alive at the peak of a kernel, by overload, or by the name of a library's op: functions of an op's
arguments.
"""


def temporaries_of(*ops: Any) -> Callable[[_F], _F]:
    """Register a function that yields what the kernels of `ops` hold at their peak, from an op's arguments."""
    return _registered(TEMPORARIES, ops)


REDUCTIONS: dict[Any, Callable[..., Any]] = {}
"""The ops whose kernel reduces a tensor, by overload: functions of an op's arguments that return its `Reduction`."""


def reduction_of(*ops: Any) -> Callable[[_F], _F]:
    """Register a function that returns what the kernels of `ops` reduce, from an op's arguments."""
    return _registered(REDUCTIONS, ops)


# -- copies -----------------------------------------------------------------------------------------------------------

Copies: TypeAlias = "Iterator[tuple[torch.Tensor, Format]]"
"""The arguments that a kernel copies before it begins, and the memory format of the copies."""

COPIES: dict[Any, Callable[[Any, Any], Copies]] = {}
RESULT_FIRST: set[Any] = set()
"""Ops whose kernels allocate their result before they copy anything."""
LAST_FIRST: set[Any] = set()
"""Ops whose kernels allocate their last result first."""


def copies_of(*ops: Any) -> Callable[[_F], _F]:
    """Register a function that yields the arguments that the kernels of `ops` copy, from an op's arguments."""
    return _registered(COPIES, ops)


def result_first(*ops: Any) -> None:
    """Register `ops` whose kernels allocate their result before they copy anything (in PyTorch's terms, structured)."""
    RESULT_FIRST.update(ops)


def copy_unless_contiguous(args: Any, _: Any) -> Copies:
    """Yield the first argument where it is not contiguous."""
    if isinstance(args[0], torch.Tensor) and not args[0].is_contiguous():
        yield args[0], "row-major"


def _registered(table: dict[Any, Any], ops: tuple[Any, ...]) -> Callable[[_F], _F]:
    def register(function: _F) -> _F:
        table.update(dict.fromkeys(ops, function))
        return function

    return register


# -- dtypes -----------------------------------------------------------------------------------------------------------

SAME_DTYPE: dict[Any, slice] = {}
"""The positions of the operands that must have one dtype, by overload."""


def same_dtype(operands: slice, *ops: Any) -> None:
    """Register `ops` whose kernels refuse positional `operands` of different dtypes, which `meta` kernels let pass."""
    SAME_DTYPE.update(dict.fromkeys(ops, operands))


def refuse_mixed(func: Any, operands: Sequence[Any]) -> None:
    """Raise the RuntimeError that the op's CUDA kernel raises when the dtypes of its `operands` differ.

    Without this check, a partly cast model would seem to run.
    """
    dtypes = [operand.dtype for operand in operands if isinstance(operand, torch.Tensor)]
    if any(dtype is not dtypes[0] for dtype in dtypes):
        names = " and ".join(dict.fromkeys(map(dtype_name, dtypes)))
        raise RuntimeError(f"{func._overloadpacket.__name__}: its operands must have the same dtype, but got {names}")
