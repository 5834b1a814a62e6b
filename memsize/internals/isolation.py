"""Leave the process as it was: random number generators, garbage collector, gradient mode, warnings."""

from __future__ import annotations

import gc
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

_SEED = 0
_COMPILER = "torch._dynamo"


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


def autograd_enabled() -> AbstractContextManager[None]:
    """While open, autograd records, even where the caller is inside of `torch.inference_mode` or `torch.no_grad`.

    What is kept for backward is asked of the model, not of the place where the question stands.
    """
    return torch.inference_mode(False)  # which sets the gradient mode too


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
    """Restore all global state that a forward may change, also after an error.

    Inside, random numbers start from a fixed seed, so that a model with random control flow (a layer skipped now and
    then) is the same each time, and warnings are ignored: a model's own are about real data or devices.
    """
    numpy = sys.modules.get("numpy")
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
    grad = torch.is_grad_enabled()
    try:
        random.seed(_SEED)
        torch.default_generator.manual_seed(_SEED)
        if numpy:
            numpy.random.seed(_SEED)
        with collector_paused(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy:
            numpy.random.set_state(states[2])
