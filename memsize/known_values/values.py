"""Constants beside `meta` tensors: the values of those that do not depend on the data.

Models look at small tensors: position ids, masks, lengths, ``.item()``, ``if mask.all()``. A `meta` tensor has no
values, so a real tensor is kept beside each small one that follows from constants alone; ops run on both, and questions
about values are answered from the real one. A tensor with the same number everywhere (``ones``, ``isnan`` of finite
data) has a constant whatever its size: a single element, expanded.

A constant is an attribute of its tensor and dies with it. Tensors that share memory share one `ConstantState`, so that
writing data through one of them invalidates the constants of all. A constant can rest on an assumption: its state has
the words for it, which are shown once a decision of the model relies on it.
"""

from __future__ import annotations

from typing import Any

import torch

from memsize.torch_internals.meta import is_meta

MAX_INTEGER_ELEMENTS = 2**18
"""Integer and boolean constants are kept up to this many elements: the mask of 512 × 512 positions."""
MAX_ASSUMED_ELEMENTS = 2**22
"""Assumed ones up to this many: which of 8 experts each of 64 Ki tokens goes to, twice, one-hot."""
MAX_FLOAT_ELEMENTS = 2**10
"""Floating ones up to this many: scales, rotary frequencies, the boxes of a few images."""

CONSTANT = "_memsize_constant"
"""The attribute of a tensor that holds its constant."""
UNREADABLE = frozenset(
    [getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8)]
    + [torch.bits8, torch.bits16, torch.bits1x8, torch.bits2x4, torch.bits4x2, torch.float4_e2m1fn_x2]
)
"""Dtypes without kernels: PyTorch stores them, and can neither copy nor compare them."""


class ConstantState:
    """The state of a piece of memory, shared by its tensors: whether their constants are still valid, the assumption
    behind them, and whether they are expanded: one number, or few that repeat (`uniform`).

    A view of such a number can get values of its own, and then has a state of its own (`for_view`). Of boolean tensors
    too large to keep, `true_share` is the share of True. `read_as` is the assumption, in words, behind a number
    that is read from unknown values which did not come from data.
    """

    __slots__ = ("_base", "_views", "assumption", "read_as", "true_share", "uniform", "valid")

    def __init__(self, assumption: str | None = None, uniform: bool = False, true_share: float | None = None) -> None:
        self.assumption = assumption
        self.read_as: str | None = None
        self.true_share = true_share
        self.uniform = uniform
        self.valid = True
        self._views: list[ConstantState] = []
        self._base: ConstantState | None = None

    def for_view(self) -> ConstantState:
        view = ConstantState(self.assumption)
        view._base = self._base or self
        view._base._views.append(view)
        return view

    def invalidate(self) -> None:
        """Note that data was written to the memory."""
        self.valid = False
        self.read_as = None
        for view in self._views:
            view.valid = False
        self.written()

    def written(self) -> None:
        """A constant was written to the memory: what base and sibling views hold is out of date."""
        if self._base is not None:
            for other in (self._base, *self._base._views):
                other.valid = other.valid and other is self


def set_constant(tensor: torch.Tensor, value: Any, state: ConstantState | None = None) -> torch.Tensor:
    """Keep `value` beside the meta `tensor`, which is returned: a real tensor of the same shape, or its diagonals
    (`toeplitz`).

    None says that `tensor` shares the memory of `state` and that its own values are not known.
    """
    tensor.__dict__[CONSTANT] = (value, state or ConstantState())
    return tensor


def set_unknown(tensor: torch.Tensor, read_as: str) -> None:
    """Record that something other than data was written to the meta `tensor`; `read_as` is assumed where it is read."""
    state = state_of(tensor) or ConstantState()
    state.invalidate()
    if is_small(tensor):
        state.read_as = read_as
        set_constant(tensor, None, state)


def constant_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The real values of `tensor`: its own when it is on the CPU, those kept beside it, or None."""
    if not is_meta(tensor):
        return tensor
    entry = tensor.__dict__.get(CONSTANT)
    if entry is None or not entry[1].valid:
        return None
    value = entry[0]
    if not isinstance(value, torch.Tensor) or value.shape != tensor.shape:
        return None  # known in another form, or its data was replaced or resized
    if value.dtype is not tensor.dtype:  # the model was cast
        value = value.to(tensor.dtype)
        tensor.__dict__[CONSTANT] = (value, entry[1])
    return value


def entry_of(tensor: torch.Tensor) -> tuple[Any, ConstantState] | None:
    """Return the values kept beside a meta `tensor`, in whatever form, and the state of its memory."""
    return tensor.__dict__.get(CONSTANT)


def state_of(tensor: torch.Tensor) -> ConstantState | None:
    """The state of `tensor`'s memory, if there ever was a constant in it."""
    entry = tensor.__dict__.get(CONSTANT)
    return None if entry is None else entry[1]


def true_share_of(tensor: torch.Tensor) -> float | None:
    """The share of True in a boolean `tensor`, where that is all that is known of it."""
    state = state_of(tensor) if is_meta(tensor) else None
    return state.true_share if state is not None and state.valid else None


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a constant of this dtype and size is worth keeping."""
    if tensor.dtype in UNREADABLE:
        return False
    limit = MAX_FLOAT_ELEMENTS if tensor.is_floating_point() or tensor.is_complex() else MAX_INTEGER_ELEMENTS
    return tensor.numel() <= limit


def set_uniform(tensor: torch.Tensor, value: Any, assumption: str | None = None) -> torch.Tensor:
    """Record that every element of `tensor` is `value`; costs no memory whatever the size."""
    real = torch.full((), value, dtype=tensor.dtype, device="cpu").expand(tensor.shape)
    return set_constant(tensor, real, ConstantState(assumption, uniform=True))


def set_filled(tensor: torch.Tensor, value: Any) -> torch.Tensor:
    """The same for a tensor that may be written to: of a small one, every element is kept."""
    if not is_small(tensor):
        return set_uniform(tensor, value)
    return set_constant(tensor, torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu"))


def is_uniform(value: torch.Tensor) -> bool:
    """Whether a constant is stored as a single element, expanded."""
    return value.numel() == 1 or not any(value.stride())


def is_large(value: torch.Tensor) -> bool:
    """Whether these are as many floats as a layer has weights. None are read: billions may be zeros, in a file."""
    return value.is_floating_point() and value.numel() > MAX_ASSUMED_ELEMENTS


_RANGED = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64))
"""Dtypes whose least and largest number take a quarter of the time of comparing each with one."""


def has_single_value(value: torch.Tensor) -> bool:
    """Whether a constant has the same number everywhere, however it is stored."""
    if is_uniform(value) or not value.numel() or is_large(value):
        return is_uniform(value)
    number = value[(0,) * value.dim()]
    # Most masks have several, which two rows show.
    two_rows = value[(0,) * (value.dim() - 2)][:2]
    if differ(two_rows, number):
        return False
    if value.dtype not in _RANGED:
        return not differ(value, number)
    least, most = torch.aminmax(value)
    return bool(least == most)


def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether some of their elements differ; `torch.equal` takes ten times as long to compare two masks."""
    return bool((one != other).count_nonzero())
