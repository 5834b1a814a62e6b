"""The imports of libraries: without PyTorch's compiler, and beside a torchvision that does not fit the installed torch.

The compiler is imported when something first uses it: that takes as long as importing torch. Nothing compiles here. Yet
torchvision imports the compiler for a check in its `roi_align`, transformers for a mode of
masks that it seldom makes, and both timm and transformers to mark functions. transformers also imports torchao, and the
compiler with it, to save quantized weights. While a model is loaded, these imports wait until the function is called.
Marks wait until the compiler is imported or the function is called, as PyTorch's own marks do.

A torchvision wheel fits one build of torch. Beside another (the usual wheel beside the CPU build of torch) its compiled
part is not loaded, importing it fails, and timm and parts of transformers fail with it. The models themselves are
Python, and so is all that a run on `meta` tensors asks of the operators: what they return, how they are differentiated
and what autocast does to them. The compiled part gives these their schemas alone, which are declared here in its place.

What was declared stays for good, as what was imported does: torchvision remains importable in a process that could not
have used it, and an operator that is asked to compute says that it cannot.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch._compile import _disable_dynamo

from memsize.processes.patches import Execute, ImportHook
from memsize.processes.simulation import Function, Override, ThreadPatches

_COMPILER = "torch._dynamo"
_LATE: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    _COMPILER: {
        "torch._dynamo.utils": ("is_compile_supported",),
        "torch._dynamo._trace_wrapped_higher_order_op": ("TransformGetItemToIndex",),
    },
    "torchao": {"torchao.prototype.safetensors.safetensors_support": ("flatten_tensor_state_dict",)},
}
"""By package: its modules that other libraries import, and the functions in them that are called later, if ever."""


@contextmanager
def compiler_late() -> Iterator[None]:
    """Keep libraries from importing these packages in passing, or by marking functions in this thread."""
    absent = [package for package, late in _LATE.items() if not sys.modules.keys() & {package, *late}]
    finders = [_StandIns(package) for package in absent]
    sys.meta_path[:0] = finders
    try:
        with _compiler_patches.active():
            yield
    finally:
        for finder in finders:
            sys.meta_path.remove(finder)
            finder.make_way()


class _StandIns(ImportHook):
    """Stand-ins for modules of a package. When the package is imported after all, they give way to its own modules."""

    def __init__(self, package: str) -> None:
        super().__init__(package.__eq__, self._give_way)
        self._modules = {name: _StandIn(package, name, called) for name, called in _LATE[package].items()}
        sys.modules.update(self._modules)

    def _give_way(self, execute: Execute, module: ModuleType) -> None:
        self.make_way()
        execute(module)

    def make_way(self) -> None:
        for name, stand_in in self._modules.items():
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]


class _StandIn(ModuleType):
    """A module whose functions can be looked up without importing it."""

    def __init__(self, package: str, name: str, called: tuple[str, ...]) -> None:
        super().__init__(name)
        self._package = package
        self._called = called

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._called:
            return lambda *args, **kwargs: getattr(self._own(), name)(*args, **kwargs)
        return getattr(self._own(), name)

    def _own(self) -> ModuleType:
        importlib.import_module(self._package)  # first: it makes the stand-in give way
        return importlib.import_module(self.__name__)


# -- marks ------------------------------------------------------------------------------------------------------------


def _disabled_when_called(disable: Function, fn: Any = None, recursive: bool = True, **more: Any) -> Any:
    if fn is None:
        return functools.partial(_disabled_when_called, disable, recursive=recursive, **more)
    if _COMPILER in sys.modules or not inspect.isfunction(fn):
        return disable(fn, recursive, **more)
    return _disable_dynamo(fn, recursive)


def _marked_late(note: Callable[[Function], None], mark: Function, fn: Any) -> Any:
    if _COMPILER in sys.modules or not inspect.isfunction(fn):
        return mark(fn)
    note(fn)
    return fn


class _Allowed(ImportHook):
    """Functions marked with `allow_in_graph`. The compiler gets them when it is imported."""

    def __init__(self) -> None:
        super().__init__(_COMPILER.__eq__, self._hand_over)
        self._functions: list[Function] = []

    def add(self, function: Function) -> None:
        if not self._functions:
            sys.meta_path.insert(0, self)
        self._functions.append(function)

    def _hand_over(self, execute: Execute, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        execute(module)
        for function in self._functions:
            module.allow_in_graph(function)
        self._functions.clear()


_allowed = _Allowed()


class _Mentioned:
    """`torch._dynamo` for code that only names it, as in ``@torch._dynamo.allow_in_graph``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.compiler if name in _MARKS else importlib.import_module(_COMPILER), name)


def _without_import(lookup: Function, name: str) -> Any:
    return _Mentioned() if name == "_dynamo" and _COMPILER not in sys.modules else lookup(name)


_MARKS: Final[Mapping[str, Function]] = {
    "disable": _disabled_when_called,
    # All that the compiler does with a constant.
    "assume_constant_result": functools.partial(
        _marked_late, lambda fn: fn.__dict__.update(_dynamo_marked_constant=True)
    ),
    "allow_in_graph": functools.partial(_marked_late, _allowed.add),
}


_compiler_patches = ThreadPatches(
    lambda: (
        *(Override(torch.compiler, name, late) for name, late in _MARKS.items()),
        Override(torch, "__getattr__", _without_import),
    )
)


_SCHEMAS: Final = Path(__file__).with_name("torchvision_operators.txt")
"""What torchvision 0.28 declares in C++ (csrc/ops/*.cpp), an operator a line."""

_DIFFERENTIABLE = "roi_align roi_pool ps_roi_align ps_roi_pool deform_conv2d"
_IN_PYTHON = "_autograd_registrations.py"
"""The file with torchvision's gradient formulas; before 0.27 they were in the compiled part."""

_declared: list[torch.library.Library] = []
"""A library's operators last as long as it does."""


@contextmanager
def torchvision_importable() -> Iterator[None]:
    """Let this thread import torchvision: operators that cannot be loaded are declared instead."""
    # Python keeps the parts of a package whose import failed; `torchvision.extension` would not try to load again.
    if "torchvision" not in sys.modules:
        for name in [name for name in sys.modules if name.startswith("torchvision.")]:
            del sys.modules[name]
    with _operator_patches.active():
        yield


def _or_declared(load: Function, path: str) -> None:
    try:
        load(path)
    except OSError:
        file = Path(path)
        if file.parent.name != "torchvision" or not file.name.startswith("_C"):
            raise
        if not _declared:
            declare_schemas(file.with_name(_IN_PYTHON).is_file())


_operator_patches = ThreadPatches(lambda: (Override(torch.ops, "load_library", _or_declared),))


def declare_schemas(differentiated: bool = True) -> torch.library.Library:
    """Declare the operators as the compiled part would; only where nothing else has, and for good.

    Unless they are `differentiated` in Python, those with gradients refuse to run: they would come out without.
    """
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS.read_text("utf-8").splitlines():
        library.define(schema)
    library.impl("_cuda_version", lambda: -1, "CompositeExplicitAutograd")  # not a build for CUDA
    for name in () if differentiated else _DIFFERENTIABLE.split():
        library.impl(name, _refuse, "Autograd")
    _declared.append(library)
    return library


def _refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError(f"this operator needs the compiled part of torchvision, which cannot be loaded: {remedy()}")


def remedy() -> str:
    """How to get the torchvision that fits the installed torch."""
    release = matching_release(torch.__version__)
    # A build that names its platform does not come from the default index.
    _, _, build = torch.__version__.partition("+")
    index = f" --index-url URL, where URL is the index of {build} builds" if build else ""
    return (
        f"torch {torch.__version__} goes with torchvision {release} from the same index: "
        f"pip install --force-reinstall --no-deps torchvision=={release}{index}"
    )


def matching_release(torch_version: str) -> str:
    """The torchvision for a release of torch 2: 0.28.0 for 2.13.0, as the wheels of torchvision require it."""
    minor, patch = re.findall(r"\d+", torch_version)[1:3]
    return f"0.{int(minor) + 15}.{patch}"
