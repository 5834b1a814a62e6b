"""What CUDA's kernels do to memory besides returning results, known from their source: a table that the families fill.

The output of an op says nothing about what its kernel allocates inside, copies first or refuses, yet the caching
allocator provides that memory. A family of ops (`attention`, `convolution`, …) registers what its kernels are known to
do; kernels that are not registered may do more than is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from memsize.records.layout import Format


class Temporary(NamedTuple):
    """One allocation inside a kernel, freed at its end."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def bytes(self) -> int:
        """The bytes that it requests."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


Copies = Iterator[tuple[torch.Tensor, Format]]
"""The arguments that a kernel copies before it begins, and the memory format of the copies."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
TEMPORARIES: dict[Any, Callable[..., Iterator[Temporary]]] = {}
COPIES: dict[Any, Callable[[Any, Any], Copies]] = {}
RESULT_FIRST: set[Any] = set()
SAME_DTYPE: dict[Any, slice] = {}


def temporaries_of(*ops: Any) -> Callable[[_Function], _Function]:
    """Register a function that yields the allocations alive at the peak of the kernels of `ops`; it takes an op's
    arguments.
    """
    return _registered(TEMPORARIES, ops)


def copies_of(*ops: Any) -> Callable[[_Function], _Function]:
    """Register a function that yields what the kernels of `ops` copy; it takes an op's positional and keyword
    arguments.
    """
    return _registered(COPIES, ops)


def result_first(*ops: Any) -> None:
    """The kernels of `ops` have their result before they copy anything (in PyTorch's terms, they are structured)."""
    RESULT_FIRST.update(ops)


def same_dtype(operands: slice, *ops: Any) -> None:
    """The kernels of `ops` refuse positional `operands` of different dtypes, which `meta` kernels let pass."""
    SAME_DTYPE.update(dict.fromkeys(ops, operands))


def _registered(table: dict[Any, Any], ops: tuple[Any, ...]) -> Callable[[_Function], _Function]:
    def register(function: _Function) -> _Function:
        table.update(dict.fromkeys(ops, function))
        return function

    return register


def copy_unless_contiguous(args: Any, _: Any) -> Copies:
    """The first argument, made contiguous."""
    if isinstance(args[0], torch.Tensor) and not args[0].is_contiguous():
        yield args[0], "row-major"
