"""Models by the names of the libraries that define them: ``hf:config.json``, ``timm:resnet18``, ``torchvision:vgg11``.

Each is built from its definition alone, without weights and without the network, and comes with inputs that suit it.
One file per library; each needs that library only. Here is what they have in common: how a library is imported, how a
model is built, and how an unknown name is refused.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from memsize.errors import TargetError, UnknownTargetError, in_one_line, quoted
from memsize.loading.building import build, random_numbers_kept
from memsize.loading.late_compiler import compiler_late
from memsize.loading.target import Target
from memsize.loading.torchvision_ops import remedy, torchvision_importable
from memsize.spec.input_maker import InputMaker

if TYPE_CHECKING:
    from torch import nn

MOST_MODULES: Final = 250_000
"""Modules of a library's model: one of 384 experts in each of 60 layers has 120,000."""

FILES: Final = {"hf": "huggingface", "timm": "pytorch_image_models", "torchvision": "vision"}


@dataclass(frozen=True, slots=True)
class Named:
    """A model of a library: its module, its name as a target, the inputs that suit it, and what is to be said of it."""

    module: nn.Module
    name: str
    inputs: InputMaker
    notes: tuple[str, ...] = ()


def named(target: Target, arguments: Mapping[str, object]) -> Named:
    """The model that a library's target names, built with its options and `arguments`.

    Raises `TargetError` where the library is missing or broken, does not know the name, or cannot build it.
    """
    assert target.library is not None and target.name is not None
    library = importlib.import_module(f"memsize.loading.hubs.{FILES[target.library]}")
    with random_numbers_kept(), quiet(), torchvision_importable(), compiler_late():
        found: Named = library.load(target.name, {**dict(target.options), **arguments})
    return found


def imported(name: str) -> Any:
    """The library `name`; raises `TargetError` that says in one line how to get it, or what is wrong with it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            extra = "pip install 'memsize[models]'"
            raise TargetError(f"{name}: targets need the library {name}, which is not installed: {extra}") from None
        raise TargetError(_broken(name, error)) from error
    except Exception as error:  # an extension that does not fit the installed torch raises what it likes
        raise TargetError(_broken(name, error)) from error


def constructed(
    factory: Callable[..., Any], label: str, arguments: Mapping[str, object]
) -> tuple[nn.Module, tuple[str, ...]]:
    """What a library's function builds, without its weights, and notes on how; raises `TargetError` if it can't."""
    try:
        with _few_modules():
            module, note = build(factory, label, arguments, lambda _: False)
    except TargetError as error:
        if isinstance(_origin(error), _TooManyModulesError):
            most = f"{MOST_MODULES:,} modules, twice those of the largest model"
            raise TargetError(f"{label} has more than {most}") from None
        if isinstance(error.__cause__, ImportError) and is_broken("torchvision"):
            raise TargetError(f"{error} (the installed torchvision cannot be imported)") from error
        raise
    return module, (note,) if note else ()


class _TooManyModulesError(BaseException):
    """A model that would be built without end. No `Exception`, which constructors catch, and which is tried again."""


def _origin(error: BaseException) -> BaseException:
    """The first of the errors that led to `error`."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def _few_modules() -> Iterator[None]:
    """While open, no more than `MOST_MODULES` modules become parts of others."""
    from torch.nn.modules.module import register_module_module_registration_hook

    built = 0

    def count(*_: object) -> None:
        nonlocal built
        built += 1
        if built > MOST_MODULES:
            raise _TooManyModulesError

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def unknown(label: str, name: str, names: Iterable[str], what: str = "model") -> TargetError:
    """The error for a `name` that a library, or one of its configs, does not have, with those that are near."""
    return UnknownTargetError(what, name, names, problem=f"{label} has no {what} {quoted(name)}")


def is_broken(name: str) -> bool:
    """Whether the library `name` is installed and cannot be imported."""
    try:
        imported(name)
    except TargetError as error:
        return error.__cause__ is not None
    return False


@contextmanager
def quiet() -> Iterator[None]:
    """While open, libraries neither log nor warn: what they say of weights and of each other is not about the model."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _broken(name: str, error: Exception) -> str:
    text = in_one_line(error)
    if "torchvision" not in text:
        return (
            f"the installed {name} cannot be imported: {text}; install it again: pip install --force-reinstall {name}"
        )
    if name == "torchvision":
        return f"the installed torchvision cannot be imported: {text}; {remedy()}"
    absent = isinstance(error, ModuleNotFoundError) and error.name == "torchvision"
    state = "which is not installed" if absent else f"and the installed one cannot be imported: {text}"
    return f"{name} needs torchvision, {state}; {remedy()}"
