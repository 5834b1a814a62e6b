"""PyTorch's compiler, imported when something first uses it: that takes as long as importing torch.

Nothing compiles here. Yet torchvision imports it for a question that its `roi_align` may ask of it, and timm to mark
functions that it is to leave alone. While a model is loaded, that question waits until it is asked, and such a mark
until the function is called, which is how PyTorch marks its own.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch._compile import _disable_dynamo

from memsize.internals.patching import Function, Patch, PatchSet

_COMPILER = "torch._dynamo"
_UTILS = "torch._dynamo.utils"


class _Thread(threading.local):
    inside = 0


_thread = _Thread()


@contextmanager
def compiler_late() -> Iterator[None]:
    """While open, importing torchvision does not import the compiler, nor does marking functions in this thread."""
    if _COMPILER in sys.modules or _UTILS in sys.modules:
        yield
        return
    finder = _Finder()
    sys.modules[_UTILS] = finder.stand_in
    sys.meta_path.insert(0, finder)
    try:
        with _patches.active():
            _thread.inside += 1
            try:
                yield
            finally:
                _thread.inside -= 1
    finally:
        sys.meta_path.remove(finder)
        finder.make_way()


class _Finder:
    """Notices that the compiler is imported after all, and makes way for its own module."""

    def __init__(self) -> None:
        self.stand_in = _Utils(_UTILS)

    def find_spec(self, fullname: str, *_: Any) -> None:
        if fullname == _COMPILER:
            self.make_way()

    def make_way(self) -> None:
        if sys.modules.get(_UTILS) is self.stand_in:
            del sys.modules[_UTILS]


class _Utils(ModuleType):
    """`torch._dynamo.utils`, of which one function can be had without importing it."""

    def __getattr__(self, name: str) -> Any:
        if name == "is_compile_supported":
            return _is_compile_supported
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_utils(), name)


def _is_compile_supported(device_type: Any) -> Any:
    return _utils().is_compile_supported(device_type)


def _utils() -> Any:
    importlib.import_module(_COMPILER)  # first: it makes the stand-in give way
    return importlib.import_module(_UTILS)


def _when_called(disable: Function) -> Function:
    def marked(fn: Any = None, recursive: bool = True, **more: Any) -> Any:
        if fn is None:
            return functools.partial(marked, recursive=recursive, **more)
        if _COMPILER in sys.modules or not inspect.isfunction(fn):
            return disable(fn, recursive, **more)
        return _disable_dynamo(fn, recursive)

    return marked


_patches = PatchSet(lambda: (Patch(torch.compiler, "disable", _when_called),), lambda: _thread.inside > 0)
