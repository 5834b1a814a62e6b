"""`torch.cond` and ``while_loop`` outside of compiled code, whose operators have no kernels for tensors without memory.

Their backward computes a branch, or the body of a loop, anew from its operands, which are all that a forward keeps, but
for the condition of a branch.

Source: torch/_higher_order_ops/cond.py (`CondAutogradOp`), torch/_higher_order_ops/while_loop.py (`while_loop_dense`,
`WhileLoopAutogradOp`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.utils.checkpoint import checkpoint

from memsize.known_values.values import constant_of

Branch = Callable[..., Any]
Note = Callable[[str], None]
FIRST_BRANCH: Final = "torch.cond is assumed to take its first branch where that depends on data"
TWO_ITERATIONS: Final = "while_loop is assumed to run twice where that depends on data"
"""After the second time a loop takes no more."""


def dispatched(
    note: Note, original: Callable[..., Any], operator: HigherOrderOperator, key: Any, *args: Any, **options: Any
) -> Any:
    """Dispatch an operator on functions, in a run; `note` receives what is assumed."""
    rule = _RULES.get(operator.__name__)
    return rule(note, operator, *args, **options) if rule else original(operator, key, *args, **options)


def _cond(note: Note, _: Any, pred: Any, true_fn: Branch, false_fn: Branch, operands: Any = ()) -> Any:
    is_assumed = depends_on_data(pred)
    if is_assumed:
        note(FIRST_BRANCH)
    branch = true_fn if is_assumed or pred else false_fn
    return _recomputed(lambda _, *operands: branch(*operands), pred, *operands)


def _while_loop(note: Note, operator: Any, cond: Branch, body: Branch, *args: Any, **kwargs: Any) -> Any:
    iterations = count()

    def goes_on(*values: Any) -> Any:
        if depends_on_data(answer := cond(*values)):
            note(TWO_ITERATIONS)
            return next(iterations) < 2
        return answer

    loop = operator.py_kernels[DispatchKey.CompositeExplicitAutograd]
    return loop(goes_on, partial(_recomputed, body), *args, **kwargs)


def depends_on_data(value: Any) -> bool:
    """Whether a condition is a tensor whose value is unknown."""
    return isinstance(value, Tensor) and constant_of(value) is None


def _recomputed(function: Branch, *operands: Any) -> Any:
    if not torch.is_grad_enabled():
        return function(*operands)
    return checkpoint(function, *operands, use_reentrant=False, preserve_rng_state=False)


_RULES: Final[dict[str, Callable[..., Any]]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "while_loop_stack_output": _while_loop,
}
