"""Models, functions of inputs, and generation loops from targets, and the targets that a pattern means.

`importing` imports their code, `building` builds a model, and `scope` says what is importable meanwhile.
"""

from __future__ import annotations

import functools
import glob
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import filter as matching
from typing import TYPE_CHECKING, Any, Final, TypeVar

from memsize.errors import InputError, TargetError, UnknownTargetError, quoted
from memsize.loading.building import build, lacks_gpu, random_numbers_kept
from memsize.loading.importing import import_target, look_up, only_class, scope_of
from memsize.loading.input_functions import input_maker
from memsize.loading.model_defined_step import is_trainer, model_defined_step, model_defined_step_of
from memsize.loading.scope import ImportScope
from memsize.loading.target import LIBRARIES, Target, parse_target
from memsize.spec.inputs import InputMaker, InputRequest

if TYPE_CHECKING:
    from torch import nn

GpuContextFactory = Callable[[], AbstractContextManager[Any]]
"""Opens a region in which this process has a GPU."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A target's module, its name (``model.py:Test``), and notes for readers on how it was built.

    `inputs` makes inputs that suit the model, where its library or trainer defines them.
    """

    module: nn.Module
    name: str
    notes: tuple[str, ...] = ()
    scope: ImportScope | None = field(default=None, repr=False, compare=False)
    inputs: InputMaker | None = field(default=None, repr=False, compare=False)

    def importable(self) -> AbstractContextManager[None]:
        """Let the model's forward import all that the target could import while it was loaded."""
        if self.scope is not None:
            return self.scope.entered()
        if self.inputs is None:
            raise ValueError(f"{self.name} was not loaded from a target")
        return nullcontext()  # a library's model imports what is installed


def load(
    target: str | Target,
    arguments: Mapping[str, object] | None = None,
    gpu_context: GpuContextFactory = nullcontext,
    own: bool = False,
) -> LoadedModel:
    """Load the model that `target` names, built with `arguments` where it is a class or a function.

    A Hugging Face `Trainer` stands for its model, with its first batch as input. With `own` the model's forward is the
    training step of its own (`model_defined_step`).

    What fails on this machine, which has no GPU, is loaded once more in `gpu_context`, which has one. The global random
    generators, ``sys.path`` and the names in ``sys.modules`` are restored. Raises `TargetError` with the problem of the
    target, or the line of the user's code that failed.
    """
    target = parse_target(target) if isinstance(target, str) else target
    if target.library is not None:
        from memsize.loading.hubs import load_library_model

        model = load_library_model(target, arguments or {})
        return LoadedModel(model.module, model.name, model.notes, inputs=model.inputs)

    def attempt(failure: BaseException | None) -> LoadedModel:
        scope, module_name = scope_of(target)
        with _loading(scope):
            module = import_target(target, scope, module_name)
            name = target.name or only_class(module, target)
            label = f"{target.source}:{name}"
            built, note = build(look_up(module, name, target), label, arguments or {}, scope.owns, failure)
            trainer = built if is_trainer(built) else None
            model = trainer.model if trainer else built
            inputs = _with_gpu(gpu_context, scope, _training_batch(model, trainer, own)) if trainer or own else None
        notes = [note] if note else []
        step = model_defined_step_of(model)
        notes += [step.note] if step else []
        return LoadedModel(model, label, tuple(notes), scope, inputs)

    return _retry_with_gpu(attempt, gpu_context)


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
    """The function that `text` names, the scope of its imports, and its label."""
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
        raise TargetError(f"{label} is no function: it has to be one that {purpose}")
    return scope, function, label


def _with_gpu(gpu_context: GpuContextFactory, scope: ImportScope, maker: InputMaker) -> InputMaker:
    """Run `maker` with the imports of `scope`, and in `gpu_context` where it fails here."""

    def make(request: InputRequest) -> Any:
        with scope.entered():
            return _retry_with_gpu(lambda _: maker.make(request), gpu_context)

    return replace(maker, make=make)


def _training_batch(model: nn.Module, trainer: Any, own: bool) -> InputMaker:
    """The batch with which a model is trained. With `own`, its forward becomes its training step."""
    step = model_defined_step(model, trainer)
    if own:
        vars(model)["forward"] = step
    return step.inputs()


@contextmanager
def _loading(scope: ImportScope) -> Iterator[None]:
    from memsize.loading.late_compiler import compiler_late
    from memsize.loading.torchvision_ops import torchvision_importable

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
