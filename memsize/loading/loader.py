"""Models, functions of inputs, and generation loops from targets, and the targets that a pattern means.

Their code is imported here, `building` builds a model, and `scope` says what is importable meanwhile.
"""

from __future__ import annotations

import ast
import functools
import glob
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from fnmatch import filter as matching
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final, TypeVar

from memsize.errors import (
    ExitError,
    InputError,
    TargetError,
    UnknownTargetError,
    exits_caught,
    nearest,
    quoted,
    suggestion,
)
from memsize.loading.building import (
    LoadedModel,
    build,
    explained,
    input_maker,
    lacks_gpu,
    random_numbers_kept,
)
from memsize.loading.model_defined_step import is_trainer, model_defined_step, model_defined_step_of
from memsize.loading.presets import presets
from memsize.loading.scope import ImportScope, is_taken
from memsize.loading.target import LIBRARIES, Target, parse_target
from memsize.spec.inputs import InputMaker, InputRequest

GpuContextFactory = Callable[[], AbstractContextManager[Any]]
"""Opens a region in which this process has a GPU."""
_Result = TypeVar("_Result")


def load(
    target: str | Target,
    arguments: Mapping[str, object] | None = None,
    gpu_context: GpuContextFactory = nullcontext,
    own: bool = False,
    online: bool = False,
) -> LoadedModel:
    """Load the model that `target` names, built with `arguments` where it is a class or a function.

    A Hugging Face `Trainer` stands for its model, with its first batch as input. With `own` the model's forward is the
    training step of its own (`model_defined_step`). With `online` the config of a Hub id may be fetched from the Hub.

    What fails on this machine, which has no GPU, is loaded once more in `gpu_context`, which has one. The global random
    generators, ``sys.path`` and the names in ``sys.modules`` are restored. Raises `TargetError` with the problem of the
    target, or the line of the user's code that failed.
    """
    target = parse_target(target) if isinstance(target, str) else target
    target = _of_library(target) or target
    if online and target.library not in ("hf", "diffusers"):
        raise InputError("--online is for the model of a Hub id, such as meta-llama/Llama-3.1-8B")
    if target.library is not None:
        from memsize.loading.hubs import load_library_model

        return load_library_model(target, arguments or {}, online)

    def attempt(failure: BaseException | None) -> LoadedModel:
        scope, module_name = scope_of(target)
        with _loading(scope):
            module = import_target(target, scope, module_name)
            name = target.name or only_class(module, target)
            label = f"{target.source}:{name}"
            chosen = {**dict(target.options), **(arguments or {})}
            built, note = build(look_up(module, name, target), label, chosen, scope.owns, failure)
            trainer = built if is_trainer(built) else None
            model = trainer.model if trainer else built
            inputs = None
            if trainer or own:
                step = model_defined_step(model, trainer)
                inputs = _with_gpu(gpu_context, scope, step.inputs())
                if own:
                    vars(model)["forward"] = step
        defined = model_defined_step_of(model)
        notes = (note, defined.note if defined else None)
        return LoadedModel(model, label, tuple(filter(None, notes)), scope, inputs)

    return _retry_with_gpu(attempt, gpu_context)


_BY_NAME = ("timm", "torchvision")
"""Libraries whose models a bare name can mean."""


def _of_library(target: Target) -> Target | None:
    """The model of timm or torchvision that the bare name of a missing module means, as in ``resnet50``."""
    name = target.module
    if name is None or target.name is not None or "." in name or importlib.util.find_spec(name):
        return None
    if Path(name).is_dir() or Path(f"{name}.py").is_file():
        return None
    from memsize.loading.hubs import model_names

    for library in _BY_NAME:
        with suppress(TargetError):  # it is not installed
            if name in model_names(library):
                return Target(None, None, name, library, target.options)
    return None


def load_inputs(text: str, gpu_context: GpuContextFactory = nullcontext) -> InputMaker:
    """The function that ``file.py:make_inputs`` or ``package.module:make_inputs`` names, as a maker of inputs.

    What fails on this machine is done once more in `gpu_context`, as for `load`. Raises `TargetError` where there is no
    such function, `InputError` where it asks for more than it is given.
    """
    scope, function, label = _function(text, gpu_context, "makes inputs", "inputs.py:make_inputs")
    return _with_gpu(gpu_context, scope, input_maker(function, label, scope))


def load_loop(text: str, gpu_context: GpuContextFactory = nullcontext) -> Callable[..., Any]:
    """The function that ``file.py:generate`` names, a loop that generates tokens. Raises as `load_inputs` does."""
    scope, function, _ = _function(text, gpu_context, "generates tokens", "loop.py:generate")

    @functools.wraps(function)
    def loop(*args: Any, **kwargs: Any) -> Any:
        with scope.entered():
            return function(*args, **kwargs)

    return loop


def _function(
    text: str, gpu_context: GpuContextFactory, purpose: str, example: str
) -> tuple[ImportScope, Callable[..., Any], str]:
    target = parse_target(text)
    if target.library is not None or target.name is None:
        raise TargetError(f"{text!r} names no function that {purpose}: write it like {example}")
    label = f"{target.source}:{target.name}"

    def attempt(_: BaseException | None) -> tuple[ImportScope, Any]:
        scope, module_name = scope_of(target)
        with _loading(scope):
            return scope, look_up(import_target(target, scope, module_name), str(target.name), target)

    scope, function = _retry_with_gpu(attempt, gpu_context)
    if not callable(function):
        raise TargetError(f"{label} is not a function: name one that {purpose}")
    return scope, function, label


def _with_gpu(gpu_context: GpuContextFactory, scope: ImportScope, maker: InputMaker) -> InputMaker:
    """Run `maker` with the imports of `scope`, and in `gpu_context` where it fails here."""

    def make(request: InputRequest) -> Any:
        with scope.entered():
            return _retry_with_gpu(lambda _: maker.make(request), gpu_context)

    return replace(maker, make=make)


@contextmanager
def _loading(scope: ImportScope) -> Iterator[None]:
    from memsize.loading.library_imports import compiler_late, torchvision_importable

    with random_numbers_kept(), scope.entered(), torchvision_importable(), compiler_late():
        yield


def _retry_with_gpu(attempt: Callable[[BaseException | None], _Result], gpu_context: GpuContextFactory) -> _Result:
    """Run `attempt` on this machine; where that fails, once more in `gpu_context`, with the first exception.

    Code looks for a GPU in more ways than one can list (``assert torch.cuda.is_available()``), so every failure is
    retried there, except that of reading from an exhausted stdin. If the second attempt fails too, raise the first
    error, unless that was about the missing GPU.
    """
    import torch

    from memsize.torch_internals.isolation import settings_read

    put_back = settings_read()
    try:
        return attempt(None)
    except (TargetError, InputError) as error:
        if error.__cause__ is None or isinstance(error.__cause__, EOFError) or torch.cuda.is_available():
            raise
        first = error
    put_back()
    try:
        with gpu_context():
            return attempt(first.__cause__)
    except (TargetError, InputError):
        if lacks_gpu(first.__cause__):
            raise
        raise first from first.__cause__


# -- patterns ---------------------------------------------------------------------------------------------------------

_MAGIC: Final = ("*", "[")
"""What makes a name a pattern. A question mark begins the arguments of a library's model."""


def targets_of(pattern: str) -> tuple[str, ...]:
    """The targets that `pattern` stands for, in alphabetical order; one without ``*`` and ``[`` stands for itself.

    Raises `TargetError` for a pattern that matches nothing, and for what cannot be a target.
    """
    library, colon, rest = pattern.strip().partition(":")
    if colon and library in LIBRARIES:
        return _library_targets(library, rest)
    path, colon, name = pattern.rpartition(":") if not pattern.endswith(".py") else (pattern, "", "")
    if not any(sign in path for sign in _MAGIC):
        parse_target(pattern)
        return (pattern,)
    files = sorted(glob.glob(path, recursive=True))
    if not files:
        raise TargetError(f"no file matches {quoted(path)}")
    return tuple(f"{file}{colon}{name}" for file in files)


def _library_targets(library: str, rest: str) -> tuple[str, ...]:
    name, mark, options = rest.partition("?")
    if not any(sign in name for sign in _MAGIC):
        parse_target(f"{library}:{rest}")
        return (f"{library}:{rest}",)
    if files := sorted(glob.glob(name, recursive=True)) if library == "hf" else []:
        return tuple(f"{library}:{file}{mark}{options}" for file in files)
    from memsize.loading.hubs import model_names  # imports torch

    names = model_names(library)
    matches = sorted(matching(names, name))
    if not matches:
        problem = f"no model of {library} matches {quoted(name)}"
        raise UnknownTargetError("model", name.strip("*"), names, problem=problem)
    return tuple(f"{library}:{match}{mark}{options}" for match in matches)


def scope_of(target: Target) -> tuple[ImportScope, str]:
    """The scope of the target's imports, and the name to import it by.

    A file in a package is imported as that package's module, so that its relative imports work; any other file as
    Python would import it from its own folder; a dotted name from the working folder or from what is installed.
    """
    if target.file is None:
        return ImportScope(Path.cwd()), str(target.module)
    folder, names = target.file.parent, [target.file.stem]
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        names.insert(0, folder.name)
        folder = folder.parent
    if len(names) == 1:
        return ImportScope(folder, script=target.file), names[0]
    dotted = ".".join(names[:-1] if names[-1] == "__init__" else names)
    return ImportScope(folder, last=target.file.parent, script=target.file), dotted


def import_target(target: Target, scope: ImportScope, name: str) -> ModuleType:
    """Import the target's module as `name`, in its entered `scope`. Raises `TargetError` where that fails."""
    try:
        with exits_caught():
            if target.file and "." not in name and target.file.stem != "__init__":
                _check_trains_nothing(target.file)
                return _execute(target.file, scope, name)
            module = importlib.import_module(name)
    except Exception as error:
        raise TargetError(_import_failure(error, target, scope)) from error
    path = getattr(module, "__file__", None)
    if target.file and not (path and Path(path).samefile(target.file)):
        raise TargetError(f"{target.file.name} is {name}, but another {name} is imported already, from {path}")
    return module


def _execute(file: Path, scope: ImportScope, name: str) -> ModuleType:
    name = f"{name}_target" if is_taken(name) or not name.isidentifier() else name
    loader = _Source(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None  # there is one for every loader
    module = importlib.util.module_from_spec(spec)
    scope.adopt(name, module)
    loader.exec_module(module)
    return module


def _check_trains_nothing(file: Path) -> None:
    """Raise `TargetError` for a file that calls backward in a loop when it is imported: it would train for real."""
    try:
        todo: list[tuple[ast.AST, bool]] = [(ast.parse(file.read_bytes()), False)]
    except (OSError, SyntaxError, ValueError):  # the import says why
        return
    while todo:
        node, is_looping = todo.pop(0)
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
                continue
            case ast.If(test=test) if "__name__" in ast.unparse(test):
                todo += ((child, is_looping) for child in node.orelse)
                continue
            case ast.Call(func=ast.Attribute(attr="backward")) if is_looping:
                raise TargetError(
                    f"{file.name} trains when it is imported (line {node.lineno}): memsize run {os.path.relpath(file)} "
                    "simulates it as a script; to report on its model, put the training under if __name__ == '__main__'"
                )
        is_looping = is_looping or isinstance(node, (ast.For, ast.While))
        todo += ((child, is_looping) for child in ast.iter_child_nodes(node))


class _Source(SourceFileLoader):
    """Compiles the file anew. Python's own cache takes two texts of the same second and size for the same."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _import_failure(error: Exception, target: Target, scope: ImportScope) -> str:
    if isinstance(error, TargetError):
        return str(error)
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and target.module and f"{target.module}.".startswith(f"{missing}."):
        package, _, last = str(target.module).rpartition(".")
        hint = f" (did you mean {package}:{last}?)" if package and target.name is None else ""
        if not package and not any(map(importlib.util.find_spec, _BY_NAME)):
            hint = " (models by name come with timm and torchvision: pip install 'memsize[models]')"
        elif not package and target.name is None:
            near = nearest(missing, tuple(presets()))
            hint = f" ({suggestion(missing, (), near)} memsize models lists names)" if near else ""
        return f"no module {missing!r}, neither installed nor in {scope.folder}{hint}"
    failure = f"importing {target.source} failed {explained(error, scope.owns)}"
    if "torchvision::" in str(error):
        from memsize.loading.library_imports import remedy

        return f"{failure}; {remedy()}"
    if isinstance(error, ExitError):
        return f"{failure}; keep what runs the program below if __name__ == '__main__'"
    if missing and missing.partition(".")[0] not in sys.stdlib_module_names:
        return f"{failure}; install it where memsize is installed, or put it beside {target.source}"
    return failure


def look_up(module: ModuleType, name: str, target: Target) -> Any:
    """The object that the dotted `name` means in `module`; raises `TargetError` if there is none."""
    value: Any = module
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            problem = f"{target.source} has no {quoted(name)}"
            raise UnknownTargetError("name", name, _candidates(module), problem=problem) from None
    return value


def only_class(module: ModuleType, target: Target) -> str:
    """The name of the only Module class that the target's own code defines; raises `TargetError` when it is not one."""
    from torch import nn

    defined = _defined(module).items()
    classes = [name for name, value in defined if isinstance(value, type) and issubclass(value, nn.Module)]
    if len(classes) == 1:
        return classes[0]
    choices = classes or _candidates(module)
    if not choices:
        raise TargetError(f"{target.source} defines no torch.nn.Module class, and no function to build one")
    example = f"{target.source}:{choices[-1]}"
    raise TargetError(f"{target.source} holds {', '.join(choices)}: name the one you mean, like {example}")


def _candidates(module: ModuleType) -> list[str]:
    from torch import nn

    instances = [name for name, value in vars(module).items() if isinstance(value, nn.Module)]
    defined = [
        name
        for name, value in _defined(module).items()
        if (issubclass(value, nn.Module) if isinstance(value, type) else callable(value))
    ]
    return [name for name in dict.fromkeys((*defined, *instances)) if not name.startswith("_")]


def _defined(module: ModuleType) -> dict[str, Any]:
    package = module.__name__
    return {
        name: value
        for name, value in vars(module).items()
        if (own := getattr(value, "__module__", None)) == package
        or (hasattr(module, "__path__") and isinstance(own, str) and own.startswith(f"{package}."))
    }
