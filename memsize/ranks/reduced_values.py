"""By which operation a program's ranks reduce: the operators of `c10d` take it in a form that Python cannot read, so it
is kept where the program names it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final

import torch.distributed as dist

from memsize.processes.patches import Patch

_NAMES: Final = (
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
)
"""The functions that take an operation; the last is what 2.13 calls the one before."""
_asked: ContextVar[str] = ContextVar("_asked", default="sum")


def asked() -> str:
    """What PyTorch calls the operation of the collective that runs, ``"sum"`` where no such function called it: the
    reducer of DistributedDataParallel does.
    """
    return _asked.get()


def replacements() -> Iterator[Patch]:
    """What keeps the operation while a collective runs."""
    for name in _NAMES:
        if hasattr(dist, name):
            keeping = _keeping(getattr(dist, name))
            yield from ((owner, name, keeping) for owner in (dist, dist.distributed_c10d))


def _keeping(original: Callable[..., Any]) -> Callable[..., Any]:
    place = list(inspect.signature(original).parameters).index("op")

    @functools.wraps(original)
    def reduce(*args: Any, **options: Any) -> Any:
        op = args[place] if len(args) > place else options.get("op", dist.ReduceOp.SUM)
        token = _asked.set(getattr(op, "op", op).name.lower())
        try:
            return original(*args, **options)
        finally:
            _asked.reset(token)

    return reduce
