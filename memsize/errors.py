"""The tree of errors: catch `MemsizeError` to catch all of them.

    MemsizeError
    ├── TargetError      the target could not be found, imported or built
    ├── InputError       an input specification is malformed or does not suit the model
    ├── ScenarioError    an unknown scenario, or one that this model rules out
    ├── ForwardError     the model's own forward or training step failed; says where, and keeps what ran before it
    ├── CheckpointError  a checkpoint file is missing, damaged, or refused because it would run code
    ├── OutputError      the report cannot be written as asked
    ├── BudgetError      a training loop would need more memory than there is
    ├── TorchMissingError  a model is to be run, and PyTorch is not installed
    └── UnknownValueError  a name that is none of the known ones; it is also one of the errors above

Every message is one that a user can act on. The command line prints it and exits with status 2; the exception that
caused it, where there is one, is kept as `__cause__`.
"""

from __future__ import annotations

import ast
import difflib
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final

from memsize.printable import LONGEST, printable_lines

_LONGEST_QUOTED: Final = 80
_MOST_LISTED: Final = 30
_SHOWN_OF_MORE: Final = 8
_NO_MEMORY: Final = re.compile("DefaultCPUAllocator: .*you tried to allocate ([0-9]+) bytes")
_WHILE_TRACING: Final = re.compile(
    r"""Dynamo failed to run FX node .*: got \w+\(('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
)
"""What Dynamo says of an operation that fails while it traces: its last part is the operation's own error."""


class MemsizeError(Exception):
    """The root of every error that memsize raises on purpose."""

    def __str__(self) -> str:
        # It quotes what files, models and their exceptions say, and ends up on a terminal.
        return printable_lines(super().__str__(), LONGEST)


class TargetError(MemsizeError):
    """The target could not be found, imported or built."""


class InputError(MemsizeError):
    """An input specification is malformed, or does not suit the model."""


class ScenarioError(MemsizeError):
    """An unknown scenario, or one that this model rules out."""


class CheckpointError(MemsizeError):
    """A checkpoint file is missing, damaged, or refused because loading it would run code."""


class OutputError(MemsizeError):
    """The report cannot be written as asked."""


INSTALL_TORCH: Final = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
"""How to get the small CPU build of PyTorch: https://pytorch.org/get-started/locally."""


class TorchMissingError(MemsizeError):
    """PyTorch is not installed, and the question runs a model."""

    def __init__(self) -> None:
        super().__init__(f"this needs PyTorch, which is not installed; its CPU build is enough: {INSTALL_TORCH}")


class BudgetError(MemsizeError):
    """A training loop would need more memory than there is, by the prediction of `memsize.guard`."""


class UnknownValueError(MemsizeError):
    """An unknown name. Its subclasses are also errors of the kind of thing named, such as `ScenarioError`.

    `kind` is that kind of thing, `value` the unknown name, and `nearest` the names that may have been meant. The
    message begins with `problem`, or "no", the kind and the value. It ends with `nearest`, or with all `names` if there
    are none near.
    """

    def __init__(
        self, kind: str, value: str, names: Iterable[str], *, near: Iterable[str] | None = None, problem: str = ""
    ) -> None:
        names = tuple(names)
        self.kind = kind
        self.value = value
        self.nearest = nearest(value, names) if near is None else tuple(near)
        super().__init__(f"{problem or f'no {kind} {quoted(value)}'}: {suggestion(value, names, self.nearest)}")


class UnknownInputError(UnknownValueError, InputError):
    """An unknown dtype, optimizer, loss, GPU …"""


class UnknownScenarioError(UnknownValueError, ScenarioError):
    """An unknown scenario."""


class UnknownTargetError(UnknownValueError, TargetError):
    """An unknown model, class or argument."""


class UnknownOutputError(UnknownValueError, OutputError):
    """An unknown format, column or unit."""


class ForwardError(MemsizeError):
    """The model's own forward failed, or the rest of a training step. `trace` holds the layers that ran before it did.

    It is a `memsize.records.trace.Trace`, or None where nothing ran; records lie above errors, hence the annotation.
    """

    def __init__(self, message: str, trace: Any = None) -> None:
        super().__init__(message)
        self.trace = trace


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that led to it, the latest first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def quoted(text: str) -> str:
    """`text` in quotes for a message; a long one is cut."""
    return repr(text if len(text) <= _LONGEST_QUOTED else f"{text[:_LONGEST_QUOTED]}…")


def message_of(error: BaseException) -> str:
    """The text of an exception: empty where `str` fails, in plain words where PyTorch found no memory, and that of the
    operation that failed where Dynamo traced it.
    """
    try:
        text = str(error)
    except Exception:
        return ""
    if traced := _WHILE_TRACING.search(text):
        text = str(ast.literal_eval(traced[1]))
    wanted = _NO_MEMORY.search(text)
    return f"this machine has no {int(wanted[1]) / 2**30:,.1f} GiB of memory left for a tensor" if wanted else text


def first_line(error: BaseException | str) -> str:
    """The first line of a message that is not blank, without its full stop or colon; with the next line if it ends in a
    colon. Without a message, the name of the exception's type.
    """
    text = error if isinstance(error, str) else message_of(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "" if isinstance(error, str) else type(error).__name__
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return first.rstrip(".:")


def with_type(error: BaseException) -> str:
    """Return the exception's type and the first line of its message; the source line of an ``assert`` without one."""
    kind = type(error).__name__
    line = first_line(error) if message_of(error).strip() else ""
    if not line and isinstance(error, AssertionError) and error.__traceback__ is not None:
        line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return f"{kind}: {line}" if line else kind


def in_one_line(error: BaseException) -> str:
    """The exception's type and message in one line, the type alone where it says nothing."""
    if isinstance(error, ExitError):
        return str(error)
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}"
    message = " ".join(message_of(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def nearest(name: str, names: Iterable[str], most: int = 3) -> tuple[str, ...]:
    """The at most `most` of `names` that are near to `name`, without regard to case.

    Names of which one begins with the other come first, then names that are spelt alike. A mapping gives the spelling
    of each name, and the name.
    """
    spelt = names if isinstance(names, Mapping) else {option.lower(): option for option in reversed(tuple(names))}
    key = name.lower()
    # A single letter begins too many names.
    long_enough = [option for option in spelt if min(len(key), len(option)) > 1]
    begun = [option for option in long_enough if option.startswith(key) or key.startswith(option)]
    begun.sort(key=lambda option: abs(len(option) - len(key)))
    alike = difflib.get_close_matches(key, spelt, n=most, cutoff=0.5)
    return tuple(dict.fromkeys(spelt[option] for option in (*begun, *alike)))[:most]


def suggestion(name: str, names: Iterable[str], near: Iterable[str] | None = None) -> str:
    """``"did you mean int64?"`` if some of `names` are near to `name`, else all of them: ``"known: …"``.

    `near` are the near names, if they are known already. Of more than `_MOST_LISTED` names the first few are shown.
    """
    names = tuple(names)
    if likely := ", ".join(nearest(name, names) if near is None else near):
        return f"did you mean {likely}?"
    if len(names) > _MOST_LISTED:
        return f"known: {', '.join(names[:_SHOWN_OF_MORE])} and {len(names) - _SHOWN_OF_MORE:,} more"
    return f"known: {', '.join(names)}" if names else "there is none"


class DataDependentError(RuntimeError):
    """A value was asked for that only real data could tell, or weights that were not loaded.

    It is raised inside the model's code, so it is a `RuntimeError` as PyTorch's own refusals are. The user sees it as
    the cause of a `ForwardError`; a model whose constructor meets it is built with its weights in memory.
    """


class ExitError(RuntimeError):
    """The user's code ended the program (`SystemExit`), or raised another exception that is no `Exception`.

    It is raised in their place, from them and with their traceback, so that no code of theirs ends ours.
    """


class exits_caught:  # noqa: N801 - reads as the context manager that it is
    """Turn `SystemExit` and the like of the user's code into `ExitError`. Ctrl-C passes unchanged."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None and not isinstance(error, (Exception, KeyboardInterrupt)):
            raise ExitError(in_one_line(error)).with_traceback(traceback) from error
