"""Threads that a program starts, to fetch data ahead or to serve requests: what they do on the GPU is recorded too.

PyTorch's dispatch modes, its hooks for saved tensors and the dispatch key of CUDA's semantics belong to one thread. A
thread that outlives the region is left with a mode that does nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextvars import copy_context
from functools import partial
from typing import Any, Self

from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from memsize.kernels.semantics import Semantics, switched_on
from memsize.processes.patches import MISSING, Patch, assign
from memsize.tracing.saved_tensors import saving
from memsize.virtual.ledger.gpu_ledger import VirtualLedger


class Threads:
    """The threads that are started while this is open. They follow the `semantics` of the thread that opened it."""

    def __init__(self, ledger: VirtualLedger, semantics: Semantics) -> None:
        self.ledger = ledger
        self.is_open = False
        self._semantics = semantics

    def __enter__(self) -> Self:
        self.is_open = True
        return self

    def __exit__(self, *error: object) -> None:
        self.is_open = False

    def replacement(self) -> Patch:
        """Patch `threading.Thread.start`."""
        original: Any = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            assign(thread, "run", partial(copy_context().run, self._follow, thread, thread.run))
            original(thread)

        return threading.Thread, "start", start

    def _follow(self, thread: threading.Thread, run: Callable[[], None]) -> None:
        ledger = self.ledger
        try:
            with ledger.in_thread(), saving(ledger.saved), _InThread(self), switched_on(self._semantics):
                run()
        except BaseException:
            if self.is_open:
                raise  # else the program is over, and its GPU is gone
        finally:
            assign(thread, "run", MISSING)  # a cycle, which would keep what the thread holds


class _InThread(TorchDispatchMode):
    def __init__(self, threads: Threads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._threads = threads

    def __enter__(self) -> Self:
        # A mode's own way also sets flags of the whole process, which threads that overlap would leave set.
        _push_mode(self)
        return self

    def __exit__(self, *error: object) -> None:
        _pop_mode()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `MetaDispatchMode`

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._threads.is_open:
            return self._threads.ledger.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
