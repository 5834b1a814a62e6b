"""Leaves the process as it was: random number generators, garbage collector, gradient mode, warnings."""

from __future__ import annotations

import gc
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SEED = 0
_COMPILER = "torch._dynamo"


@contextmanager
def collector_paused() -> Iterator[None]:
    """Storages end when their last reference does, never when the collector happens to come by.

    Every run then writes the same events, and many runs in a row do not pay for scanning each other's records.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class CompilerImport:
    """Notices that PyTorch's compiler was imported meanwhile, and lets go of what that keeps.

    The first `torch.utils.checkpoint` of a process imports it, in the middle of the model's forward. The import leaves
    reference cycles with the frames that it runs in, and so with everything that the forwards above it hold.
    """

    def __init__(self) -> None:
        self._pending = _COMPILER not in sys.modules

    def forget(self) -> None:
        """To be called as often as modules are: collects once, when the import is over."""
        if self._pending and _COMPILER in sys.modules:
            self._pending = False
            gc.collect()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Everything global that a forward may move is put back after, also after an error.

    Meanwhile random numbers begin at a fixed seed, so that a model which decides by them (a layer left out now and
    then) shows the same each time. A model's own warnings are about real data or devices; they would only puzzle here.
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
