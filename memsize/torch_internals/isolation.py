"""Leave the process as it was: one run at a time, and afterwards all that was changed for it is put back."""

from __future__ import annotations

import gc
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memsize.processes.ctrl_c import raise_waiting
from memsize.processes.simulation import open_simulation
from memsize.torch_internals.settings import settings_kept

_SEED = 0
_COMPILER = "torch._dynamo"


@contextmanager
def isolated() -> Iterator[None]:
    """Run the user's code, one thread at a time; afterwards the process's settings are as they were.

    Modes that are active around the call (`FakeTensorMode`, a profiler's, `torch.inference_mode`, `torch.no_grad`) are
    suspended: what a model keeps for backward is asked of the model, not of the place where the question stands.
    """
    with open_simulation(), settings_kept(), _modes_suspended():
        yield


@contextmanager
def _modes_suspended() -> Iterator[None]:
    with ExitStack() as suspended:
        if torch._C._len_torch_dispatch_stack():
            suspended.enter_context(_disable_current_modes())
        suspended.enter_context(torch.inference_mode(False))  # which sets the gradient mode too
        yield


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector, so that a storage dies with its last reference and not whenever the collector
    runs.

    Every run then records the same events, and many runs in a row do not pay for scanning each other's records.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def forget_run() -> None:
    """Free what a run left in reference cycles, such as its copy of the model, while the collector is paused.

    Only what is younger than the last call is looked at: records of other runs cost nothing.
    """
    gc.collect(0)


class CompilerImport:
    """Notices that PyTorch's compiler was imported during a run, and frees what that keeps alive.

    The first `torch.utils.checkpoint` of a process imports it, in the middle of the model's forward. The import leaves
    reference cycles with the frames that it runs in, and so with everything that the forwards above it hold.
    """

    def __init__(self) -> None:
        self._pending = _COMPILER not in sys.modules

    def forget(self) -> None:
        """Collect once, as soon as the import is over. To be called after every module call."""
        if self._pending and _COMPILER in sys.modules:
            self._pending = False
            gc.collect()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run a model: isolated, and the same each time.

    Random numbers start from a fixed seed, so that a model with random control flow (a layer skipped now and then)
    always goes the same way, and warnings are ignored: a model's own are about real data or devices.
    """
    with isolated(), collector_paused():
        raise_waiting()
        warnings.simplefilter("ignore")
        random.seed(_SEED)
        torch.default_generator.manual_seed(_SEED)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(_SEED)
        yield
