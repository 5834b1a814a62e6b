"""What CUDA's kernels do to memory beside returning their results, known by source: the table that families fill.

An op's output says nothing of what its kernel allocates inside, rearranges first or refuses, yet the caching allocator
gives the memory. A family of ops (`attention`, `convolution`, …) registers what its kernels are known to do; others
than those registered may do more.
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
        """What it asks for."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


Copies = Iterator[tuple[torch.Tensor, Format]]
"""Arguments that a kernel copies before it begins, and the memory format that they are brought into."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
TEMPORARIES: dict[Any, Callable[..., Iterator[Temporary]]] = {}
COPIES: dict[Any, Callable[[Any, Any], Copies]] = {}
SAME_DTYPE: dict[Any, slice] = {}


def temporaries_of(*ops: Any) -> Callable[[_Function], _Function]:
    """The function says what the kernels of `ops` have at their own peak; it takes the op's arguments."""
    return _registered(TEMPORARIES, ops)


def copies_of(*ops: Any) -> Callable[[_Function], _Function]:
    """The function says what the kernels of `ops` copy; it takes the op's positional arguments and its keywords."""
    return _registered(COPIES, ops)


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
