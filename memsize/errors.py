"""What can go wrong, as a tree: catch `MemsizeError` to catch all of it.

    MemsizeError
    ├── TargetError      the target could not be found, imported or built
    ├── InputError       an input specification is malformed or does not suit the model
    ├── ScenarioError    an unknown scenario, or one that this model rules out
    ├── ForwardError     the model's own forward or training step failed; says where, and keeps what ran before it
    ├── CheckpointError  a checkpoint file is missing, damaged, or refused because it would run code
    ├── OutputError      the report cannot be written as asked
    ├── BudgetError      a training loop would need more memory than there is
    └── UnknownValueError  a name that is none of the known ones; it is also one of the errors above

Every message is one that a user can act on. The command line prints it and exits with status 2; the exception that
caused it, where there is one, is kept as `__cause__`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from memsize.printable import LONGEST, printable_lines
from memsize.suggestions import nearest, suggestion

_LONGEST_QUOTED: Final = 80
_NO_MEMORY: Final = re.compile("DefaultCPUAllocator: .*you tried to allocate ([0-9]+) bytes")


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


class BudgetError(MemsizeError):
    """A training loop would need more memory than there is, by the prediction of `memsize.guard`."""


class UnknownValueError(MemsizeError):
    """A name that is none of the known ones; also an error of what it was to name, such as `ScenarioError`.

    `kind` is what it was to name, `value` the name, `nearest` those that may have been meant, which the message ends
    with: all that are `known` where none is near. It begins with `problem`, or "no", the kind and the value.
    """

    def __init__(
        self, kind: str, value: str, known: Iterable[str], *, near: Iterable[str] | None = None, problem: str = ""
    ) -> None:
        names = tuple(known)
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


def quoted(text: str) -> str:
    """`text` in quotes, as a message shows what it was given: of a long one its beginning."""
    return repr(text if len(text) <= _LONGEST_QUOTED else f"{text[:_LONGEST_QUOTED]}…")


def message_of(error: BaseException) -> str:
    """What an exception says: nothing where saying it fails too, and in plain words where PyTorch found no memory."""
    try:
        text = str(error)
    except Exception:
        return ""
    wanted = _NO_MEMORY.search(text)
    return f"this machine has no {int(wanted[1]) / 2**30:,.2f} GiB of memory left for a tensor" if wanted else text


def first_line(error: BaseException | str) -> str:
    """What went wrong, without where and with what: the first line that is not blank, without its full stop or colon;
    with the next one where it ends in a colon.

    The name of the exception's type where it says nothing.
    """
    text = error if isinstance(error, str) else message_of(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "" if isinstance(error, str) else type(error).__name__
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return first.rstrip(".:")


def in_one_line(error: BaseException) -> str:
    """The exception's type and message in one line, the type alone where it says nothing."""
    if isinstance(error, ExitError):
        return str(error)
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}"
    message = " ".join(message_of(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


class DataDependentError(RuntimeError):
    """A value was asked for that only real data could tell, or weights that were not loaded.

    It is raised inside the model's code, so it is a `RuntimeError` as PyTorch's own refusals are. The user sees it as
    the cause of a `ForwardError`; a model whose constructor meets it is built with its weights in memory.
    """


class ExitError(RuntimeError):
    """The user's code ended the program (`SystemExit`), or raised another exception that is no `Exception`.

    It is raised in their place, from them and with their traceback, so that no code of theirs ends ours.
    """


@contextmanager
def exits_caught() -> Iterator[None]:
    """While the user's code runs in here, it ends with a result or an `Exception`; only Ctrl-C passes as it is."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ExitError(in_one_line(error)).with_traceback(error.__traceback__) from error
