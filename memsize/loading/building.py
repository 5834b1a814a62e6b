"""Calls of the user's code, to build a module or to make inputs, what they return, and where they failed.

It runs without the memory of its weights where it can, and leaves the random generators as they were. Where it fails,
`user_traceback` says in one line where, and why.
"""

from __future__ import annotations

import inspect
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memsize.errors import (
    ExitError,
    InputError,
    MemsizeError,
    TargetError,
    UnknownTargetError,
    exits_caught,
    in_one_line,
    message_of,
    quoted,
)
from memsize.loading.model_defined_step import is_trainer
from memsize.loading.scope import ImportScope
from memsize.processes.user_code import is_users
from memsize.spec.inputs import InputMaker, InputRequest

if TYPE_CHECKING:
    from torch import nn


IsTheirs = Callable[[str], bool]
_MEMSIZE = Path(__file__).absolute().parents[1]


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


def build(
    value: Any, label: str, arguments: Mapping[str, object], is_theirs: IsTheirs, failure: BaseException | None = None
) -> tuple[Any, str | None]:
    """Build a module, or the Hugging Face `Trainer` of one, and return it with a note on how, where that matters.

    `value` is one of them, a Module class or a function that returns one. `failure` is the exception of an earlier
    attempt. Raises `TargetError` when `value` is something else, when `arguments` do not suit it, and when it fails.
    """
    from torch import nn

    if isinstance(value, nn.Module) or is_trainer(value):
        if arguments:
            raise TargetError(f"{label} is an instance already, so it takes no arguments ({', '.join(arguments)})")
        return value, None
    if not callable(value) or (isinstance(value, type) and not issubclass(value, nn.Module)):
        raise TargetError(f"{label} is {_kind(value)}, not a torch.nn.Module or a function that returns one")
    _check_arguments(value, label, arguments)
    try:
        module, why = weightless(value, arguments, is_theirs, failure)
    except Exception as error:
        raise TargetError(f"building {label} failed {explained(error, is_theirs)}") from error
    if not isinstance(module, nn.Module) and not is_trainer(module):
        raise TargetError(f"{label} returned {_kind(module)}, not a torch.nn.Module")
    if why is None:
        return module, None
    return module, f"{label} was built with its weights in memory, because building it needs their values ({why})"


def weightless(
    factory: Callable[..., Any],
    arguments: Mapping[str, object],
    is_theirs: IsTheirs,
    failure: BaseException | None = None,
) -> tuple[Any, str | None]:
    """Call `factory` without the memory of large tensors; where that fails, with it, and return also the reason.

    An error in the user's code is raised by the second, ordinary call too. That call is left out where the error
    cannot be due to missing values: every value was there, it is `failure`, the exception of an earlier attempt, it
    says that there is no GPU, or it is none that PyTorch raises for a value, and no value was missed before.
    """
    from memsize.loading.weightless import Weightless

    mode = Weightless()
    with exits_caught():
        try:
            # A constructor that loads a state dict means its weights, and there are none here.
            with exits_caught(), warnings.catch_warnings(), mode:
                warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter", category=UserWarning)
                return factory(**arguments), None
        except Exception as error:
            first = error
        is_settled = (
            isinstance(first, _NEVER_ABOUT_VALUES)
            or lacks_gpu(first)
            or (failure is not None and type(failure) is type(first) and message_of(failure) == message_of(first))
        )
        # PyTorch raises a RuntimeError for a tensor without values, or an error about `meta`.
        wants_values = isinstance(first, RuntimeError) or "meta" in message_of(first)
        missed_values = mode.values_missed or (wants_values and not isinstance(first, ExitError))
        if is_settled or not mode.left_out or not missed_values:
            raise first
        return factory(**arguments), user_traceback(first, is_theirs)


_NEVER_ABOUT_VALUES = (EOFError, ImportError, NameError, OSError)


def _check_arguments(factory: Callable[..., Any], label: str, arguments: Mapping[str, object]) -> None:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (ValueError, TypeError):
        return  # written in C, or with a signature that cannot be read: calling it will tell
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown = [name for name in arguments if name not in named]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        problem = f"{label} has no argument {quoted(unknown[0])}"
        if not named:
            raise TargetError(f"{problem}: it takes none")
        raise UnknownTargetError("argument", unknown[0], named, problem=problem)
    missing = [name for name, p in named.items() if p.default is p.empty and name not in arguments]
    if missing:
        options = " ".join(f"--arg {name}=…" for name in missing)
        needs = f"the argument{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        raise TargetError(f"{label} needs {needs}: give {options} (in Python: arguments={{{missing[0]!r}: …}})")


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Restore the global random generators of Python, NumPy and PyTorch at the end."""
    from memsize.torch_internals.isolation import generators_read

    put_back = generators_read()
    try:
        yield
    finally:
        put_back()


# -- where the user's code failed --------------------------------------------------------------------------------------


def user_traceback(error: BaseException, is_theirs: IsTheirs) -> str:
    """``"at model.py:12: NameError: name 'foo' is not defined"``: the innermost line in a file that `is_theirs`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"at {Path(error.filename).name}:{error.lineno}: {in_one_line(error)}"
    theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if is_theirs(frame.filename)]
    line = f"at {Path(theirs[-1].filename).name}:{theirs[-1].lineno}: " if theirs else ""
    return f"{line}{in_one_line(error)}"


_WANTS_GPU = re.compile(
    "not compiled with CUDA|not linked with support for cuda|NVIDIA driver|No CUDA GPUs"
    "|has no attribute '_cuda_|CUDA driver"
)
"""The second is the message after a virtual GPU: PyTorch's C++ asks Python only once whether CUDA is there."""


def lacks_gpu(error: BaseException | None) -> bool:
    """Whether PyTorch raised `error` because the user's code asked for a GPU that this machine has not."""
    return error is not None and _WANTS_GPU.search(message_of(error)) is not None


def explained(error: BaseException, is_theirs: IsTheirs) -> str:
    """`user_traceback`, and advice where the error `lacks_gpu`."""
    advice = (
        "; memsize needs no GPU, and neither may building the model: leave it on the CPU, and keep .cuda() and "
        "training below if __name__ == '__main__'"
    )
    return f"{user_traceback(error, is_theirs)}{advice if lacks_gpu(error) else ''}"


@contextmanager
def users_failures_told() -> Iterator[None]:
    """Turn an exception of the user's own code, such as their ``train()``, into a `TargetError` that names the line."""
    try:
        yield
    except MemsizeError:
        raise
    except RecursionError as error:
        limit = sys.getrecursionlimit()
        raise TargetError(f"the model nests too deeply for Python's recursion limit of {limit}: raise that") from error
    except Exception as error:
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if is_users(frame.filename):
                where = f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})"
                raise TargetError(f"your own code failed at {where}: {in_one_line(error)}") from error
            if Path(frame.filename).is_relative_to(_MEMSIZE):
                break
        raise


def input_maker(function: Callable[..., Any], label: str, scope: ImportScope | None = None) -> InputMaker:
    """Return a maker of inputs that calls `function` with the arguments ``batch_size``, ``seq_len`` and ``training``,
    if it takes them, and without the memory of large tensors, if it can run so.

    Calling it raises `InputError` where the function fails, needs other arguments, or returns nothing.
    """
    names = {"batch_size", "seq_len", "training"}
    taken, missing = set[str](), list[str]()
    with suppress(TypeError, ValueError):
        parameters = inspect.signature(function).parameters.values()
        named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        taken = names if any(p.kind is p.VAR_KEYWORD for p in parameters) else names & named.keys()
        if taken is not names:
            missing = [name for name, p in named.items() if p.default is p.empty and name not in names - {"seq_len"}]
    if missing:
        raise InputError(f"{label} needs {', '.join(missing)}: it may only ask for batch_size, training, seq_len=None")

    def make(request: InputRequest) -> Any:
        arguments = {name: value for name, value in asdict(request).items() if name in taken}
        if request.seq_len is None:
            arguments.pop("seq_len", None)
        elif "seq_len" not in taken:
            raise InputError(f"{label} takes no seq_len, so --seq-len has no effect")
        if request.batch_size > 1 and "batch_size" not in taken:
            raise InputError(f"{label} takes no batch_size, so it decides itself how many samples there are")
        is_theirs = scope.owns if scope else is_users
        try:
            with random_numbers_kept():
                inputs = weightless(function, arguments, is_theirs)[0]
        except TargetError:
            raise
        except Exception as error:
            raise InputError(f"{label} failed {user_traceback(error, is_theirs)}") from error
        if inputs is None:
            raise InputError(f"{label} returned None, not the model's inputs")
        return inputs

    return InputMaker(make, resizable="batch_size" in taken, untyped=False)


def wanted_inputs(model: nn.Module) -> str:
    """Say in words which arguments the model's forward takes, and how to give them on the command line."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return "give one with --input SHAPE"
    taken = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in taken if p.default is p.empty]
    names = ", ".join(needed or [p.name for p in taken][:3]) or "nothing by name"
    how = (
        "give each with --input SHAPE or --input name=SHAPE:DTYPE, without the batch dimension (in Python: input_size)"
    )
    return f"its forward takes {names}; {how}"
