"""How the user's code is called: to build a module from what a target names, or to make inputs.

It runs without the memory of its weights where it can, and leaves the random generators as they were. Where it fails,
`user_traceback` says in one line where, and why.
"""

from __future__ import annotations

import inspect
import random
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memsize.errors import (
    ExitError,
    MemsizeError,
    TargetError,
    UnknownTargetError,
    exits_caught,
    in_one_line,
    message_of,
    quoted,
)
from memsize.loading.model_defined_step import is_trainer
from memsize.loading.scope import is_users

IsTheirs = Callable[[str], bool]
_MEMSIZE = Path(__file__).absolute().parents[1]


def build(found: Any, label: str, arguments: Mapping[str, object], is_theirs: IsTheirs) -> tuple[Any, str | None]:
    """The module, or the Hugging Face `Trainer` of one, that `found` is or makes, and a note on how it was made where
    that matters.

    `found` is one of them, a Module class or a function that returns one. Raises `TargetError` when it is something
    else, when `arguments` do not suit it, and when it fails.
    """
    from torch import nn

    if isinstance(found, nn.Module) or is_trainer(found):
        if arguments:
            raise TargetError(f"{label} is an instance already, so it takes no arguments ({', '.join(arguments)})")
        return found, None
    if not callable(found) or (isinstance(found, type) and not issubclass(found, nn.Module)):
        raise TargetError(f"{label} is {_kind(found)}, not a torch.nn.Module or a function that returns one")
    _check_arguments(found, label, arguments)
    made, note = _call(found, label, arguments, is_theirs)
    if not isinstance(made, nn.Module) and not is_trainer(made):
        raise TargetError(f"{label} returned {_kind(made)}, not a torch.nn.Module")
    return made, note


def _call(
    factory: Callable[..., Any], label: str, arguments: Mapping[str, object], is_theirs: IsTheirs
) -> tuple[Any, str | None]:
    """What `factory` returns and, where that is not made without its weights, a note that says why."""
    try:
        made, why = weightless(factory, arguments, is_theirs)
    except Exception as error:
        why = f"{user_traceback(error, is_theirs)}{gpu_advice(error)}"
        raise TargetError(f"building {label} failed {why}") from error
    if why is None:
        return made, None
    return made, f"{label} was built with its weights in memory, because building it needs their values ({why})"


def weightless(
    factory: Callable[..., Any], arguments: Mapping[str, object], is_theirs: IsTheirs
) -> tuple[Any, str | None]:
    """What `factory` returns: without large tensors where it can be had so, else with them, and why.

    Whatever is wrong with the user's code shows in the second, ordinary call too, and is raised from there; unless it
    shows on `meta` in the same words, where it costs nothing.
    """
    with exits_caught():
        try:
            with exits_caught():
                return _call_weightless(factory, arguments), None
        except Exception as error:
            first = error
        if _fails_alike(factory, arguments, first):
            raise first
        return factory(**arguments), user_traceback(first, is_theirs)


def _fails_alike(factory: Callable[..., Any], arguments: Mapping[str, object], error: Exception) -> bool:
    """Whether `error` is that of the constructor: no `RuntimeError`, as PyTorch raises where a value is missing, and
    the same on `meta`. The weights of billions of parameters are not made to fail once more.
    """
    import torch

    if isinstance(error, RuntimeError) and not isinstance(error, ExitError):
        return False
    try:
        with exits_caught(), warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            factory(**arguments)
    except Exception as other:
        return type(other) is type(error) and message_of(other) == message_of(error)
    return False


def _call_weightless(factory: Callable[..., Any], arguments: Mapping[str, object]) -> Any:
    from memsize.loading.weightless import Weightless

    with warnings.catch_warnings(), Weightless():
        # A constructor that loads a state dict means its weights, and there are none here.
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter", category=UserWarning)
        return factory(**arguments)


def _check_arguments(factory: Callable[..., Any], label: str, arguments: Mapping[str, object]) -> None:
    """Raise `TargetError` naming the arguments that `factory` lacks or does not know."""
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
        given = " ".join(f"--arg {name}=…" for name in missing)
        needs = f"the argument{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        raise TargetError(f"{label} needs {needs}: give {given} (in Python: arguments={{{missing[0]!r}: …}})")


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Afterwards the global random generators of Python, NumPy and PyTorch are where they were."""
    import torch

    python, state = random.getstate(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    numpy = sys.modules.get("numpy.random")
    numpy_state = numpy.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(state)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if numpy:
            numpy.set_state(numpy_state)


# -- where the user's code failed --------------------------------------------------------------------------------------


def user_traceback(error: BaseException, is_theirs: Callable[[str], bool]) -> str:
    """``"at model.py:12: NameError: name 'foo' is not defined"``: the innermost line in a file that `is_theirs`."""
    place = _place(error, is_theirs)
    return f"{f'at {place}: ' if place else ''}{in_one_line(error)}"


_WANTS_GPU = re.compile("not compiled with CUDA|NVIDIA driver|No CUDA GPUs|has no attribute '_cuda_|CUDA driver")


def lacks_gpu(error: BaseException | None) -> bool:
    """Whether PyTorch raised `error` because the user's code asked for a GPU that this machine has not."""
    return error is not None and _WANTS_GPU.search(message_of(error)) is not None


def gpu_advice(error: BaseException) -> str:
    """What to do about an error that `lacks_gpu`; empty for any other error."""
    if not lacks_gpu(error):
        return ""
    return (
        "; memsize needs no GPU, and neither may building the model: leave it on the CPU, and keep .cuda() and "
        "training below if __name__ == '__main__'"
    )


def _place(error: BaseException, is_theirs: Callable[[str], bool]) -> str | None:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if is_theirs(frame.filename)]
    return f"{Path(theirs[-1].filename).name}:{theirs[-1].lineno}" if theirs else None


@contextmanager
def users_failures_told() -> Iterator[None]:
    """While open, what the user's own code raises where memsize or PyTorch called it, in a ``train()`` of theirs, say,
    is a `TargetError` that names the line.
    """
    try:
        yield
    except MemsizeError:
        raise
    except RecursionError as error:
        limit = sys.getrecursionlimit()
        raise TargetError(f"the model nests too deeply for Python's recursion limit of {limit}: raise that") from error
    except Exception as error:
        frame = _users_frame(error)
        if frame is None:
            raise
        where = f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})"
        raise TargetError(f"your own code failed at {where}: {in_one_line(error)}") from error


def _users_frame(error: Exception) -> traceback.FrameSummary | None:
    """The innermost frame of the user's, if it lies below every one of memsize's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return frame
        if Path(frame.filename).is_relative_to(_MEMSIZE):
            return None
    return None
