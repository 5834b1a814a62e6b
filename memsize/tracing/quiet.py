"""Leaves the process as it was: random number generators, garbage collector, gradient mode, warnings."""

from __future__ import annotations

import gc
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def undisturbed() -> Iterator[None]:
    """Everything global that a forward may move is put back after, also after an error.

    The collector pauses, so that storages end when their last reference does and every run writes the same events.
    A model's own warnings are about real data or real devices; they would only puzzle here.
    """
    numpy = sys.modules.get("numpy")
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
    grad, collecting = torch.is_grad_enabled(), gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy:
            numpy.random.set_state(states[2])
        if collecting:
            gc.enable()
