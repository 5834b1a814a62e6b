"""The targets that a pattern stands for: ``timm:resnet*``, ``hf:bert*``, ``nets/*.py:Net``."""

from __future__ import annotations

import glob
from fnmatch import filter as matching
from importlib import import_module
from typing import Final

from memsize.errors import TargetError, UnknownTargetError, quoted
from memsize.loading.target import LIBRARIES, parse_target

_MAGIC: Final = ("*", "[")
"""What makes a name a pattern. A question mark begins the arguments of a library's model."""


def targets_of(pattern: str) -> tuple[str, ...]:
    """The targets that `pattern` stands for, in alphabetical order; one without ``*`` and ``[`` stands for itself.

    Raises `TargetError` for a pattern that matches nothing, and for what cannot be a target.
    """
    library, colon, rest = pattern.strip().partition(":")
    if colon and library in LIBRARIES:
        return _of_library(library, rest)
    place, colon, name = pattern.rpartition(":") if not pattern.endswith(".py") else (pattern, "", "")
    if not any(sign in place for sign in _MAGIC):
        parse_target(pattern)
        return (pattern,)
    files = sorted(glob.glob(place, recursive=True))
    if not files:
        raise TargetError(f"no file matches {quoted(place)}")
    return tuple(f"{file}{colon}{name}" for file in files)


def _of_library(library: str, rest: str) -> tuple[str, ...]:
    name, mark, options = rest.partition("?")
    if not any(sign in name for sign in _MAGIC):
        parse_target(f"{library}:{rest}")
        return (f"{library}:{rest}",)
    if files := sorted(glob.glob(name, recursive=True)) if library == "hf" else []:
        return tuple(f"{library}:{file}{mark}{options}" for file in files)
    # These import torch.
    from memsize.loading.hubs import FILES, quiet
    from memsize.loading.torchvision_ops import torchvision_importable

    with torchvision_importable(), quiet():
        known: tuple[str, ...] = tuple(import_module(f"memsize.loading.hubs.{FILES[library]}").names())
    found = sorted(matching(known, name))
    if not found:
        problem = f"no model of {library} matches {quoted(name)}"
        raise UnknownTargetError("model", name.strip("*"), known, problem=problem)
    return tuple(f"{library}:{each}{mark}{options}" for each in found)
