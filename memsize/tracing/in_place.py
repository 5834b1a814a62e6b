"""Ops that autograd runs in place on a GPU, but never for `meta` tensors or while a dispatch mode looks on.

- Where several gradients of one tensor meet, the engine adds each to the sum so far, if nothing else holds that sum or
  its memory (torch/csrc/autograd/input_buffer.cpp `accumulate`, `can_accumulate_inplace`). Known limit: a sum of
  intermediate results inside a formula, such as that of atan2, looks the same.
- Formulas write into results of their own: the gradient of an indexed, gathered or sorted tensor into zeros of its
  shape (torch/csrc/autograd/FunctionsManual.cpp; ATen/TensorSubclassLikeUtils.h says for which tensors they do not).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memsize.kernels.strides import is_dense

_aten = torch.ops.aten
_ADD: Final = _aten.add.Tensor
_SELECTING: Final = "Gather Cummax Cummin IndexSelect Max Min Topk Sort Kthvalue Median Nanmedian Mode Take Trace"


class InPlace(NamedTuple):
    """`op` writes in place what another op returns anew. `nodes` are those of autograd whose formulas do; none: the
    engine does. `owns` says whether only a tensor that nothing else holds is written.
    """

    op: Any
    nodes: frozenset[str] = frozenset()
    owns: bool = False


def _of(op: Any, nodes: str = "", owns: bool = False) -> InPlace:
    names = (f"{node}Backward{number}" for node in nodes.split() for number in (0, 1))
    return InPlace(op, frozenset(names), owns)


IN_PLACE: Final[Mapping[Any, InPlace]] = {
    _ADD: _of(_aten.add_.Tensor, owns=True),
    _aten.index_put.default: _of(_aten.index_put_.default, "Index"),
    _aten.scatter_add.default: _of(_aten.scatter_add_.default, _SELECTING),
    _aten.scatter.src: _of(_aten.scatter_.src, _SELECTING),
    _aten.index_add.default: _of(_aten.index_add_.default, _SELECTING),
    _aten.index_fill.int_Tensor: _of(_aten.index_fill_.int_Tensor, _SELECTING),
    _aten.put.default: _of(_aten.put_.default, _SELECTING),
    _aten.sub.Tensor: _of(_aten.sub_.Tensor, "BinaryCrossEntropyWithLogits", owns=True),
    _aten.mul.Tensor: _of(_aten.mul_.Tensor, "BinaryCrossEntropyWithLogits", owns=True),
}
"""By the op that is called while a mode looks on."""


def is_written_in_place(in_place: InPlace, args: Any) -> bool:
    """Whether autograd calls an op with these `args` only because a mode looks on."""
    node: Any = None if torch.is_grad_enabled() else torch._C._current_autograd_node()
    if node is None:
        return False
    if in_place.nodes:
        name = type(node).name(node)  # a function of the program may have an attribute `name`
        return name in in_place.nodes and (not in_place.owns or _owners(args) == owners_of_sum())
    if len(args) != 2 or not all(isinstance(operand, Tensor) for operand in args):
        return False
    fits = args[0].shape == args[1].shape and args[0].dtype is args[1].dtype and args[0].layout is torch.strided
    return fits and is_dense(args[0].shape, args[0].stride()) and _owners(args) == owners_of_sum()


class _Owners(NamedTuple):
    """Numbers of references to a tensor and to its storage, those of the call that looks among them."""

    tensor: int
    wrapper: int
    storage: int


def _owners(args: Any) -> _Owners | None:
    if not hasattr(Tensor, "_use_count"):
        return None
    storage = args[0].untyped_storage()._cdata
    return _Owners(args[0]._use_count(), sys.getrefcount(args[0]), torch._C._storage_Use_Count(storage))


@cache
def owners_of_sum() -> _Owners:
    """The references to a sum that only the engine holds, counted in a small backward outside of any run.

    On the CPU: kernels of `meta` tensors in Python import torch._dynamo, which takes as long as importing torch.
    """
    look = _Look()  # type: ignore[no-untyped-call]
    with torch.inference_mode(False), torch.enable_grad(), look:
        tensor = torch.zeros(2, requires_grad=True) * 2
        (tensor * 2 + tensor * 3).sum().backward()
    return look.owners


class _Look(TorchDispatchMode):
    owners = _Owners(0, 0, 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ADD and not torch.is_grad_enabled():
            self.owners = _owners(args) or self.owners
        return func(*args, **(kwargs or {}))
