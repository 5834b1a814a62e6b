"""`torch.compile` in a program: its code is compiled for the virtual GPU (`memsize.compile`).

The compiler is imported, and its region opened, when compiled code is first called: libraries decorate much that no
program calls. FlexAttention makes its masks without what is as large as the scores, which no program could hold.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import FunctionType
from typing import Any, Final

import torch

from memsize.cuda.cuda_semantics import original_lists_of_devices
from memsize.kernels.attention import compiled_mask
from memsize.kernels.semantics import simulated_release
from memsize.known_values.data_dependent import UNCOMPILED
from memsize.processes.patches import SuspendablePatches
from memsize.tracing.overrides import FLEX, Compiles, suspended_overrides
from memsize.virtual.ledger.gpu_ledger import VirtualLedger

_GPU: Final = torch.device("cuda", 0)
_AS_WRITTEN: Final = frozenset({"eager", "eager_noexcept", "eager_debug"})
_PARTITIONED: Final = frozenset({"aot_eager", "cudagraphs"})
_OTHER_BACKEND = "torch.compile's backend {} is not followed"
_UNKNOWN_BACKEND = ", and PyTorch refuses it where no package registers it"


class Compilation:
    """Compiles the code of the program that `ledger` records; where it is not `active`, that code runs as written.

    If it `measures`, what PyTorch measures to compile is part of the run.
    """

    def __init__(self, ledger: VirtualLedger, capability: tuple[int, int], active: bool, measures: bool) -> None:
        self._ledger = ledger
        self._capability = capability
        self._is_active = active
        self._measures = measures
        self._regions = ExitStack()
        self._is_open = False
        self._original: Callable[..., Any] = torch.compile
        self._patches: SuspendablePatches
        self._driver: SuspendablePatches
        self._compiler: Any = None

    def reach(self, patches: SuspendablePatches, driver: SuspendablePatches) -> None:
        """Suspend `patches` while code is compiled; while it is traced, those of the `driver` answer in their place."""
        self._patches, self._driver = patches, driver

    def close(self) -> None:
        """Leave nothing of the compiler behind."""
        self._regions.close()

    def compile(self, model: Any = None, **options: Any) -> Any:
        """`torch.compile`."""
        if model is None:
            return lambda later: self.compile(later, **options)
        if options.get("disable"):
            return model
        backend = options.get("backend", "inductor")
        flex = sys.modules.get(FLEX)
        if flex is not None and model is flex.create_block_mask:
            return compiled_mask(model, self._ledger.absently)
        if getattr(backend, "__name__", backend) in _AS_WRITTEN or (flex is not None and model is flex.flex_attention):
            return model
        is_followed = backend == "inductor" or backend in _PARTITIONED
        make = self._compiled if is_followed and self._is_active else self._as_written
        return self._when_called(make, model, options) if isinstance(model, FunctionType) else make(model, options)

    def _when_called(self, make: Callable[..., Any], function: FunctionType, options: Any) -> Callable[..., Any]:
        compiled: list[Any] = []

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not compiled:
                compiled.append(make(function, options))
            return compiled[0](*args, **kwargs)

        called.__dict__["_torchdynamo_inline"] = function  # which other compiled code calls in its own graph
        return called

    def _as_written(self, model: Any, options: dict[str, Any]) -> Any:
        backend = options.get("backend", "inductor")
        if backend != "inductor":
            from torch._dynamo import list_backends

            is_known = not isinstance(backend, str) or backend in list_backends(exclude_tags=())
            note = _OTHER_BACKEND.format(getattr(backend, "__name__", backend))
            self._note(note + ("" if is_known else _UNKNOWN_BACKEND))
        self._note(UNCOMPILED)
        return model

    def _compiled(self, model: Any, options: dict[str, Any]) -> Any:
        self._open()
        if options.get("backend") in _PARTITIONED:
            options = {**options, "backend": getattr(self._compiler, options["backend"])}
        with self._suspended():
            return self._original(model, **options)

    def _note(self, text: str) -> None:
        self._ledger.evaluator.notes[text] = None

    def _open(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        with self._suspended(), warnings.catch_warnings(action="ignore"):
            from memsize.compile.backend import Compiler
            from memsize.compile.region import compiling, rules

        self._note(rules(simulated_release()))
        compiler = self._compiler = Compiler(self._capability, self._note, self._measures)
        self._regions.enter_context(
            compiling(compiler, Compiles(self._traced, self._suspended, _GPU, self._ledger.inline))
        )

    @contextmanager
    def _traced(self) -> Iterator[None]:
        with self._suspended():
            self._driver.apply()
            try:
                yield
            finally:
                self._driver.restore()

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        with (  # the last to be applied is restored first
            self._driver.suspended(),
            self._patches.suspended(),
            original_lists_of_devices(),
            suspended_overrides(),
        ):
            yield
