"""Values that are known although nothing is computed.

Models look at small tensors: position ids, masks, lengths, ``.item()``, ``if mask.all()``. A `meta` tensor has no
values, so the ledger keeps a real one beside each small tensor all of whose inputs are known, runs the op on both, and
answers from the real one. A tensor that is the same everywhere (``isnan`` of finite data, ``ones``) is known whatever
its size, as a single value expanded.

A known value is an attribute of its tensor and dies with it. Tensors that share memory share one `Cell`, so that
writing something unknown through one of them makes all of them unknown. Values can be assumed rather than known: the
cell says in which words, and they are shown once a decision relies on them.
"""

from __future__ import annotations

from typing import Any

import torch

INTEGER_ELEMENTS = 2**18
"""Integer and boolean tensors are known up to this many elements: the mask of 512 × 512 positions."""
ASSUMED_ELEMENTS = 2**22
"""Assumed ones up to this many: which of 8 experts each of 64 Ki tokens goes to, twice, one-hot."""
FLOAT_ELEMENTS = 2**10
"""Floating ones up to this many: scales, rotary frequencies, the boxes of a few images."""

_ATTRIBUTE = "_memsize_known"
UNREADABLE = frozenset(
    [getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8)]
    + [torch.bits8, torch.bits16, torch.bits1x8, torch.bits2x4, torch.bits4x2, torch.float4_e2m1fn_x2]
)
"""Dtypes without kernels: PyTorch stores them, and can neither copy nor compare them."""


class Cell:
    """Whether the values in one piece of memory are still known, what was assumed to know them, and whether they are
    one number expanded.

    A view of such a number can have values of its own: it is a part then, with a cell of its own. Of truth values that
    are too many to keep, `share` is how large a part of them is true.
    """

    __slots__ = ("_parts", "_whole", "assumed", "share", "uniform", "valid")

    def __init__(self, assumed: str | None = None, uniform: bool = False, share: float | None = None) -> None:
        self.assumed = assumed
        self.share = share
        self.uniform = uniform
        self.valid = True
        self._parts: list[Cell] = []
        self._whole: Cell | None = None

    def part(self) -> Cell:
        """A cell for a view with values of its own."""
        part = Cell(self.assumed)
        part._whole = self
        self._parts.append(part)
        return part

    def forget(self) -> None:
        """Something unknown was written to the memory."""
        self.valid = False
        for part in self._parts:
            part.valid = False
        self.changed()

    def changed(self) -> None:
        """Something was written to the memory: what others that share it hold is no longer so."""
        if self._whole is not None:
            for other in (self._whole, *self._whole._parts):
                other.valid = other.valid and other is self


def remember(tensor: torch.Tensor, value: torch.Tensor | None, cell: Cell | None = None) -> torch.Tensor:
    """Keep `value` (a real tensor of the same shape) beside the meta `tensor`, which is returned.

    None says that `tensor` shares the memory of `cell` and that its own part of it is not known.
    """
    tensor.__dict__[_ATTRIBUTE] = (value, cell or Cell())
    return tensor


def known(tensor: torch.Tensor) -> torch.Tensor | None:
    """The real values of `tensor`: its own when it is on the CPU, those kept beside it, or None."""
    if not tensor.is_meta:
        return tensor
    entry = tensor.__dict__.get(_ATTRIBUTE)
    if entry is None or not entry[1].valid:
        return None
    value: torch.Tensor | None = entry[0]
    if value is None or value.shape != tensor.shape:
        return None  # its data was replaced or resized
    if value.dtype is not tensor.dtype:  # the model was cast
        value = value.to(tensor.dtype)
        tensor.__dict__[_ATTRIBUTE] = (value, entry[1])
    return value


def cell_of(tensor: torch.Tensor) -> Cell | None:
    """The cell of `tensor`'s memory, if its values were ever known."""
    entry = tensor.__dict__.get(_ATTRIBUTE)
    return None if entry is None else entry[1]


def share_of(tensor: torch.Tensor) -> float | None:
    """How large a part of `tensor` is true, where that is all that is known of it."""
    cell = cell_of(tensor) if tensor.is_meta else None
    return cell.share if cell is not None and cell.valid else None


def is_small(tensor: torch.Tensor) -> bool:
    """Whether values of this dtype and size are worth keeping."""
    if tensor.dtype in UNREADABLE:
        return False
    limit = FLOAT_ELEMENTS if tensor.is_floating_point() or tensor.is_complex() else INTEGER_ELEMENTS
    return tensor.numel() <= limit


def uniform(tensor: torch.Tensor, value: Any, assumed: str | None = None) -> torch.Tensor:
    """Keep beside `tensor` that each of its elements is `value`; costs no memory whatever the size."""
    real = torch.full((), value, dtype=tensor.dtype, device="cpu").expand(tensor.shape)
    return remember(tensor, real, Cell(assumed, uniform=True))


def is_uniform(value: torch.Tensor) -> bool:
    """Whether a known value is a single one, expanded."""
    return value.numel() == 1 or not any(value.stride())


def is_constant(value: torch.Tensor) -> bool:
    """Whether a known value has the same number everywhere."""
    return is_uniform(value) or (value.numel() > 0 and bool((value == value.flatten()[0]).all()))
