"""The ledger of a virtual GPU: only what happens on the GPU is recorded, work on the CPU is really done.

Code that asks for ``device="cuda"`` below Python (``torch.set_default_device``, ``with torch.device("cuda")``, names
imported with ``from torch import zeros``) is answered here, where its op is dispatched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from memsize.records.roles import Role
from memsize.tracing.dispatch import has_own_dispatch
from memsize.tracing.ledger import Ledger, Workspaces

_META = torch.device("meta")


class _Depth(threading.local):
    value = 0


_depth = _Depth()


def below_autograd() -> bool:
    """Whether this thread is inside an op: PyTorch's own kernels in Python must see the real device of a tensor."""
    return _depth.value > 0


class VirtualLedger(Ledger):
    """Records the ops on stand-ins; `observer` is called after each, when its events are there."""

    def __init__(self, workspaces: Workspaces, observer: Callable[[], None]) -> None:
        super().__init__("meta", workspaces)
        self.evaluator.lenient = True
        self._observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and has_own_dispatch(types):
            return NotImplemented
        device = kwargs.get("device") if kwargs else None
        if device is not None and device.type == "cuda":
            kwargs = {**kwargs, "device": _META}
        elif not (device is not None and device.type == "meta") and not _on_gpu(args):
            return func(*args, **(kwargs or {}))
        _depth.value += 1
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            _depth.value -= 1
            self._observer()

    def place(self, tensor: torch.Tensor, role: Role, layer: int) -> None:
        """Give the storage of `tensor` a role and a layer that were not known when it was made."""
        index = self.index_of(tensor)
        if index >= 0:
            self._roles[index] = role
            self._layers[index] = layer

    def refuse(self, storage: int) -> None:
        """Forget that `storage` appeared: there was no memory for it."""
        self._held[storage] = 0
        place = next(i for i in reversed(range(len(self.events))) if self.events[i].storage == storage)
        del self.events[place]


def _on_gpu(args: Iterable[Any]) -> bool:
    for item in args:
        if isinstance(item, torch.Tensor):
            if item.is_meta:
                return True
        elif isinstance(item, (list, tuple)) and item and type(item[0]) is not int and _on_gpu(item):
            return True
    return False
