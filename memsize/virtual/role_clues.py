"""Clues to what memory is for at the moment it is made, so that a run that ends there has its roles right.

Autograd hands a parameter its first gradient in an `AccumulateGrad` node: it detaches the tensor that the backward
made, or copies it where something else shares or uses it (torch/csrc/autograd/functions/accumulate_grad.h). A custom
function that computes the gradient of a weight in its own forward, as fused losses do, makes it like the weight. An
optimizer fills or copies tensors for its state in its first step; its other results come from arithmetic.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Final

import torch
from torch.autograd.function import FunctionCtx

from memsize.processes.user_code import variables

_aten: Any = torch.ops.aten
_accumulating: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_KEEPING: Final = frozenset((_aten.detach.default, _aten.new_empty_strided.default, _aten.clone.default))
_LIKE: Final = frozenset(
    (_aten.zeros_like.default, _aten.empty_like.default, _aten.new_zeros.default, _aten.new_empty.default)
)
FILLING: Final = frozenset(
    "clone empty empty_like eye full full_like new_empty new_full new_ones new_zeros ones ones_like zeros "
    "zeros_like".split()
)
"""Names of the ops with which optimizers make their state."""
COPYING: Final = frozenset(("_to_copy", "clone"))
"""Names of the ops with which they copy one that they load."""


def parameter_of_first_gradient(func: Any) -> torch.Tensor | None:
    """Return the tensor whose first gradient the running op keeps as its ``.grad``; `None` if it does not."""
    if func not in _KEEPING:
        return None
    node: Any = torch._C._current_autograd_node()
    if not isinstance(node, _accumulating):
        return None
    variable: torch.Tensor = node.variable
    return variable if variable.grad is None else None


def is_gradient_of_own_forward(func: Any, args: Any, result: Any) -> bool:
    """Whether the forward of a custom function has made `result` to be the gradient of its argument ``args[0]``, if
    that is a parameter.
    """
    if func not in _LIKE or torch.is_grad_enabled() or result.shape != args[0].shape:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_own_forward(frame):
        frame = frame.f_back
    return frame is not None


def _is_own_forward(frame: FrameType) -> bool:
    """Whether a call is that of a custom function's forward: its first argument is the context that it saves to."""
    code = frame.f_code
    if code.co_name != "forward" or not code.co_argcount:
        return False
    return isinstance(dict(variables(frame)).get(code.co_varnames[0]), FunctionCtx)
