"""The parameters of a model as its library makes it: memsize has no part in this."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import torch
from torch import nn


def counted(build: Callable[[], nn.Module]) -> int:
    """How many parameters `build` makes, each once: on `meta` where the library can, else with real weights."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sum(parameter.numel() for parameter in _built(build).parameters())
    finally:
        logging.disable(level)


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    try:
        with torch.device("meta"):
            return build()
    except (RuntimeError, NotImplementedError):  # some constructors look at a number that they have just made
        return build()
