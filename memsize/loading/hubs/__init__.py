"""Models by the names of the libraries that define them: ``hf:config.json``, ``timm:resnet18``, ``torchvision:vgg11``.

Each is built from its definition alone, without weights and without the network, and comes with inputs that suit it.
This module has what the libraries share: importing them, building a model, refusing an unknown name.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from memsize.errors import TargetError, UnknownTargetError, in_one_line, quoted
from memsize.loading.building import LoadedModel, build, random_numbers_kept
from memsize.loading.library_imports import compiler_late, remedy, torchvision_importable
from memsize.loading.presets import is_hub_id, presets
from memsize.loading.target import Target

if TYPE_CHECKING:
    from torch import nn

MOST_MODULES: Final = 250_000
"""Modules of a library's model: one of 384 experts in each of 60 layers has 120,000."""
CHECKPOINT_CONFIG: Final = "_memsize_quantization_config"
"""Set on a model that holds floating weights: how its checkpoint quantizes them."""
_LOADERS: Final = {
    "hf": ("huggingface", "load_transformers_model"),
    "timm": ("image_models", "load_timm_model"),
    "torchvision": ("image_models", "load_torchvision_model"),
    "diffusers": ("diffusion", "load_pipeline"),
}


def checkpoint_config_of(model: nn.Module) -> object:
    """Return the `quantization_config` with which `model`, or the model that it copies, was marked; None without."""
    return vars(model).get(CHECKPOINT_CONFIG)


def load_library_model(target: Target, arguments: Mapping[str, object], online: bool = False) -> LoadedModel:
    """Build the model that a library's target names, with its options and `arguments`; with `online` a config may come
    from the Hub.

    Raises `TargetError` where the library is missing or broken, does not know the name, or cannot build it.
    """
    assert target.library is not None and target.name is not None
    with random_numbers_kept(), quiet(), torchvision_importable(), compiler_late():
        is_pipeline = target.library == "hf" and _is_pipeline(target.name)
        module, function = _LOADERS["diffusers" if is_pipeline else target.library]
        load = getattr(importlib.import_module(f"memsize.loading.hubs.{module}"), function)
        wanted = {"online": True} if online else {}
        model: LoadedModel = load(target.name, {**dict(target.options), **arguments}, **wanted)
    return model


def _is_pipeline(name: str) -> bool:
    """Whether `name` is the Hub id of a pipeline of diffusers: a preset, or in the local cache."""
    if name in presets():
        return bool(presets()[name].parts)
    from memsize.loading.hubs.hub_files import PIPELINE, cached_file

    return is_hub_id(name) and cached_file(name, PIPELINE) is not None


def model_names(library: str) -> list[str]:
    """The names of a library's models, for transformers its model types, for diffusers none: its models are folders.

    Raises as `import_library` does.
    """
    if library == "diffusers":
        return []
    with torchvision_importable(), quiet():
        if library == "hf":
            return list(import_library("transformers").CONFIG_MAPPING)
        package = import_library(library)
        names: list[str] = (package.models if library == "torchvision" else package).list_models()
        return names


def import_library(name: str) -> Any:
    """Import the library `name`. Raises `TargetError` with how to install it, or why it cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # an extension that does not fit the installed torch raises what it likes
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            extra = f"pip install 'memsize[{'diffusers' if name == 'diffusers' else 'models'}]'"
            raise TargetError(f"{name}: targets need the library {name}, which is not installed: {extra}") from None
        raise TargetError(_broken(name, error)) from error


def build_library_model(
    factory: Callable[..., Any], label: str, arguments: Mapping[str, object]
) -> tuple[nn.Module, tuple[str, ...]]:
    """Call a library's function to build a module without its weights; return it with notes on how it was built.

    Raises `TargetError` if that fails, or for a model of more than `MOST_MODULES` modules.
    """
    from torch.nn.modules.module import register_module_module_registration_hook

    built = 0

    def count(*_: object) -> None:
        nonlocal built
        built += 1
        if built > MOST_MODULES:
            raise _TooManyModulesError

    hook = register_module_module_registration_hook(count)
    try:
        module, note = build(factory, label, arguments, lambda _: False)
    except (TargetError, _TooManyModulesError) as error:
        if isinstance(first_cause(error), _TooManyModulesError):
            most = f"{MOST_MODULES:,} modules, twice those of the largest model"
            raise TargetError(f"{label} has more than {most}") from None
        if isinstance(error.__cause__, ImportError) and is_broken("torchvision"):
            raise TargetError(f"{error} (the installed torchvision cannot be imported)") from error
        raise
    finally:
        hook.remove()
    return module, (note,) if note else ()


class _TooManyModulesError(BaseException):
    """A model that would be built without end. No `Exception`, which constructors catch, and which is tried again."""


def first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def is_broken(name: str) -> bool:
    """Whether the library `name` is installed and cannot be imported."""
    try:
        import_library(name)
    except TargetError as error:
        return error.__cause__ is not None
    return False


def unknown_name(label: str, name: str, names: Iterable[str], kind: str = "model") -> TargetError:
    """The error for a `name` that a library, or one of its configs, does not have, with near names."""
    return UnknownTargetError(kind, name, names, problem=f"{label} has no {kind} {quoted(name)}")


@contextmanager
def quiet(most: int = logging.ERROR) -> Iterator[None]:
    """Silence the warnings of libraries, and logs up to level `most`: they are about weights and kernels."""
    level = logging.root.manager.disable
    logging.disable(most)
    try:
        with warnings.catch_warnings(action="ignore"):
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
