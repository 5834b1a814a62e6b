"""Sums of gradients that autograd writes into the first one.

Where several gradients of one tensor meet, the engine adds each to the sum so far: in place, if nothing else holds that
sum or its memory, but never while a dispatch mode looks on or for `meta` tensors (torch/csrc/autograd/input_buffer.cpp
`accumulate`, `can_accumulate_inplace`; ATen/TensorSubclassLikeUtils.h).

Known limit: a sum of intermediate results inside a formula of autograd, such as that of atan2, looks the same.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memsize.kernels.strides import is_dense

ADD = torch.ops.aten.add.Tensor


class Owners(NamedTuple):
    """How many references to a tensor and to its storage there are, those of the call that looks among them."""

    tensor: int
    wrapper: int
    storage: int


def is_summed_in_place(args: Any, kwargs: Any) -> bool:
    """Return whether `ADD` is called by the engine with a sum that only it holds."""
    if torch.is_grad_enabled() or kwargs or len(args) != 2 or torch._C._current_autograd_node() is None:
        return False
    if not all(isinstance(operand, Tensor) for operand in args):
        return False
    fits = args[0].shape == args[1].shape and args[0].dtype is args[1].dtype and args[0].layout is torch.strided
    return fits and is_dense(args[0].shape, args[0].stride()) and _owners(args) == owners_of_sum()


def _owners(args: Any) -> Owners | None:
    if not hasattr(Tensor, "_use_count"):
        return None
    storage = args[0].untyped_storage()._cdata
    return Owners(args[0]._use_count(), sys.getrefcount(args[0]), torch._C._storage_Use_Count(storage))


@cache
def owners_of_sum() -> Owners:
    """The references to a sum that only the engine holds, counted in a small backward; call it outside of a run.

    On the CPU: kernels of `meta` tensors in Python import torch._dynamo, which takes as long as importing torch.
    """
    look = _Look()  # type: ignore[no-untyped-call]
    with torch.inference_mode(False), torch.enable_grad(), look:
        tensor = torch.zeros(2, requires_grad=True) * 2
        (tensor * 2 + tensor * 3).sum().backward()
    return look.owners


class _Look(TorchDispatchMode):
    owners = Owners(0, 0, 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ADD and not torch.is_grad_enabled():
            self.owners = _owners(args) or self.owners
        return func(*args, **(kwargs or {}))
