"""Targets → models: ``load("model.py:Test")`` imports what the target names and builds its module.

Models that a library names (``timm:resnet18``) are built by `hubs`, and come with inputs that suit them.

The module is built without the memory of its weights where its constructor allows that: large parameters and buffers
are then `meta` tensors. See `weightless` for how, `scope` for what is importable meanwhile.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from memsize.errors import ExitError, InputError, TargetError, UnknownTargetError, exits_caught, quoted
from memsize.loading.building import build, gpu_advice, lacks_gpu, random_numbers_kept, user_traceback
from memsize.loading.input_functions import input_maker
from memsize.loading.model_defined_step import is_trainer, own_step, own_step_of
from memsize.loading.scope import ImportScope, is_taken
from memsize.loading.target import Target, parse_target
from memsize.spec.input_maker import InputMaker, InputRequest

if TYPE_CHECKING:
    from torch import nn

GpuContextFactory = Callable[[], AbstractContextManager[Any]]
"""Opens a region in which this process has a GPU."""
_Found = TypeVar("_Found")

__all__ = [
    "GpuContextFactory",
    "InputMaker",
    "InputRequest",
    "LoadedModel",
    "Target",
    "input_maker",
    "load",
    "load_inputs",
    "load_loop",
    "parse_target",
]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A target's module, its name (``model.py:Test``), and what a reader must know about how it was built.

    `inputs` makes those that suit it, where its library says which they are.
    """

    module: nn.Module
    name: str
    notes: tuple[str, ...] = ()
    scope: ImportScope | None = field(default=None, repr=False, compare=False)
    inputs: InputMaker | None = field(default=None, repr=False, compare=False)

    def importable(self) -> AbstractContextManager[None]:
        """While it is entered, what the target could import while it loaded can be imported again: by its forward."""
        if self.scope is not None:
            return self.scope.entered()
        if self.inputs is None:
            raise ValueError(f"{self.name} was not loaded from a target")
        return nullcontext()  # a library's model imports what is installed


def load(
    target: str | Target,
    arguments: Mapping[str, object] | None = None,
    machine: GpuContextFactory = nullcontext,
    own: bool = False,
) -> LoadedModel:
    """The model that `target` names, built with `arguments` where it is a class or a function.

    A Hugging Face `Trainer` stands for its model, with its first batch as input. With `own` the model's forward is the
    training step of its own (`own_step`).

    What fails on this machine, which has no GPU, is loaded once more on `machine`, which has one. The global random
    generators, ``sys.path`` and the names in ``sys.modules`` are afterwards as they were. Raises `TargetError` saying
    what is wrong with the target, or which line of the user's failed.
    """
    target = parse_target(target) if isinstance(target, str) else target
    if target.library is not None:
        from memsize.loading.hubs import named

        found = named(target, arguments or {})
        return LoadedModel(found.module, found.name, found.notes, inputs=found.inputs)

    def loaded() -> LoadedModel:
        scope, module_name = _scope(target)
        with _loading(scope):
            module = _imported(target, scope, module_name)
            name = target.name or _only_class(module, target)
            label = f"{target.place}:{name}"
            found, note = build(_looked_up(module, name, target), label, arguments or {}, scope.owns)
            trainer = found if is_trainer(found) else None
            model = trainer.model if trainer else found
            inputs = _made_on(machine, scope, _trained(model, trainer, own)) if trainer or own else None
        notes = [note] if note else []
        step = own_step_of(model)
        notes += [step.note] if step else []
        return LoadedModel(model, label, tuple(notes), scope, inputs)

    return _with_gpu_where_wanted(loaded, machine)


def load_inputs(text: str, machine: GpuContextFactory = nullcontext) -> InputMaker:
    """The function that ``file.py:make_inputs`` or ``package.module:make_inputs`` names, as a maker of inputs.

    What fails on this machine is done once more on `machine`, as for `load`. Raises `TargetError` where there is no
    such function, `InputError` where it asks for more than it is given.
    """
    scope, function, label = _function(text, machine, "makes inputs", "inputs.py:make_inputs")
    return _made_on(machine, scope, input_maker(function, label, scope))


def load_loop(text: str, machine: GpuContextFactory = nullcontext) -> Callable[..., Any]:
    """The function that ``file.py:generate`` names, a loop that generates tokens. Raises as `load_inputs` does."""
    scope, function, _ = _function(text, machine, "generates tokens", "loop.py:generate")

    @functools.wraps(function)
    def loop(*args: Any, **kwargs: Any) -> Any:
        with scope.entered():
            return function(*args, **kwargs)

    return loop


def _function(
    text: str, machine: GpuContextFactory, what: str, example: str
) -> tuple[ImportScope, Callable[..., Any], str]:
    """The function that `text` names, the scope of its imports, and its label."""
    target = parse_target(text)
    if target.library is not None or target.name is None:
        raise TargetError(f"{text!r} names no function that {what}: write it like {example}")
    label = f"{target.place}:{target.name}"

    def loaded() -> tuple[ImportScope, Any]:
        scope, module_name = _scope(target)
        with _loading(scope):
            return scope, _looked_up(_imported(target, scope, module_name), str(target.name), target)

    scope, function = _with_gpu_where_wanted(loaded, machine)
    if not callable(function):
        raise TargetError(f"{label} is no function: it has to be one that {what}")
    return scope, function, label


def _made_on(machine: GpuContextFactory, scope: ImportScope, maker: InputMaker) -> InputMaker:
    """What `maker` makes, with the imports of `scope`, and on `machine` where it fails here."""

    def make(request: InputRequest) -> Any:
        with scope.entered():
            return _with_gpu_where_wanted(lambda: maker.make(request), machine)

    return replace(maker, make=make)


def _trained(model: nn.Module, trainer: Any, own: bool) -> InputMaker:
    """The batch with which a model is trained, and the step as its forward where that is asked for."""
    step = own_step(model, trainer)
    if own:
        vars(model)["forward"] = step
    return step.inputs()


@contextmanager
def _loading(scope: ImportScope) -> Iterator[None]:
    from memsize.loading.late_compiler import compiler_late
    from memsize.loading.torchvision_ops import torchvision_importable

    with random_numbers_kept(), scope.entered(), torchvision_importable(), compiler_late():
        yield


def _with_gpu_where_wanted(attempt: Callable[[], _Found], machine: GpuContextFactory) -> _Found:
    """What `attempt` returns: on this machine where it runs here, else on `machine`.

    Code looks for a GPU in more ways than one can list (``assert torch.cuda.is_available()``), so whatever fails here
    is tried there; what fails there too is told as it failed here, unless that was for want of a GPU.
    """
    import torch

    from memsize.torch_internals.settings import settings_read

    put_back = settings_read()
    try:
        return attempt()
    except (TargetError, InputError) as error:
        if error.__cause__ is None or torch.cuda.is_available():
            raise
        first = error
    put_back()
    try:
        with machine():
            return attempt()
    except (TargetError, InputError):
        if lacks_gpu(first.__cause__):
            raise
        raise first from first.__cause__


def _scope(target: Target) -> tuple[ImportScope, str]:
    """What the target may import, and the name to import it by.

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


def _imported(target: Target, scope: ImportScope, name: str) -> ModuleType:
    try:
        with exits_caught():
            if target.file and "." not in name and target.file.stem != "__init__":
                return _executed(target.file, scope, name)
            module = importlib.import_module(name)
    except Exception as error:
        raise TargetError(_import_failure(error, target, scope)) from error
    found = getattr(module, "__file__", None)
    if target.file and not (found and Path(found).samefile(target.file)):
        raise TargetError(f"{target.file.name} is {name}, but another {name} is imported already, from {found}")
    return module


def _executed(file: Path, scope: ImportScope, name: str) -> ModuleType:
    """A fresh module made from `file`, importable in the scope as `name` unless that is another's."""
    name = f"{name}_target" if is_taken(name) or not name.isidentifier() else name
    loader = _Source(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None  # there is one for every loader
    module = importlib.util.module_from_spec(spec)
    scope.adopt(name, module)
    loader.exec_module(module)
    return module


class _Source(SourceFileLoader):
    """Compiles the file as it is now. Python's own cache takes a text of the same second and size for the same."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _import_failure(error: Exception, target: Target, scope: ImportScope) -> str:
    if isinstance(error, TargetError):
        return str(error)
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and target.module and f"{target.module}.".startswith(f"{missing}."):
        return f"no module {missing!r}, neither installed nor in {scope.folder}{_dotted_hint(target)}"
    what = f"importing {target.place} failed {user_traceback(error, scope.owns)}{gpu_advice(error)}"
    if "torchvision::" in str(error):
        from memsize.loading.torchvision_ops import remedy

        return f"{what}; {remedy()}"
    if isinstance(error, ExitError):
        return f"{what}; keep what runs the program below if __name__ == '__main__'"
    if missing and missing.partition(".")[0] not in sys.stdlib_module_names:
        return f"{what}; install it where memsize is installed, or put it beside {target.place}"
    return what


def _dotted_hint(target: Target) -> str:
    """``package.module.Net`` was meant as ``package.module:Net``, as its capital letter shows."""
    package, _, last = str(target.module).rpartition(".")
    return f" (did you mean {package}:{last}?)" if package and target.name is None else ""


def _looked_up(module: ModuleType, name: str, target: Target) -> Any:
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            problem = f"{target.place} has no {quoted(name)}"
            raise UnknownTargetError("name", name, _candidates(module), problem=problem) from None
    return found


def _only_class(module: ModuleType, target: Target) -> str:
    """The name of the only Module class that the target's own code defines; raises `TargetError` when it is not one."""
    from torch import nn

    defined = _defined(module)
    classes = [name for name, value in defined.items() if isinstance(value, type) and issubclass(value, nn.Module)]
    if len(classes) == 1:
        return classes[0]
    choices = classes or _candidates(module)
    if not choices:
        raise TargetError(f"{target.place} defines no torch.nn.Module class, and no function to build one")
    example = f"{target.place}:{choices[0]}"
    raise TargetError(f"{target.place} holds {', '.join(choices)}: name the one you mean, like {example}")


def _candidates(module: ModuleType) -> list[str]:
    """What a target could name: Module instances, and the Module classes and functions that the module defines."""
    from torch import nn

    instances = [name for name, value in vars(module).items() if isinstance(value, nn.Module)]
    defined = [
        name
        for name, value in _defined(module).items()
        if (issubclass(value, nn.Module) if isinstance(value, type) else callable(value))
    ]
    return [name for name in dict.fromkeys((*defined, *instances)) if not name.startswith("_")]


def _defined(module: ModuleType) -> dict[str, Any]:
    """The classes and functions that `module` itself defines, or gives as its own when it is a package."""
    package = module.__name__
    return {
        name: value
        for name, value in vars(module).items()
        if (own := getattr(value, "__module__", None)) == package
        or (hasattr(module, "__path__") and isinstance(own, str) and own.startswith(f"{package}."))
    }
