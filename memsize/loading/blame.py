"""Which line of the user's own code an exception comes from, and how a message says so."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path


def describe(error: BaseException, is_theirs: Callable[[str], bool]) -> str:
    """``"at model.py:12: NameError: name 'foo' is not defined"``: the innermost line in a file that `is_theirs`."""
    place = _place(error, is_theirs)
    return f"{f'at {place}: ' if place else ''}{reason(error)}"


def reason(error: BaseException) -> str:
    """The exception's type and message in one line, the type alone where it says nothing."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}"
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _place(error: BaseException, is_theirs: Callable[[str], bool]) -> str | None:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if is_theirs(frame.filename)]
    return f"{Path(theirs[-1].filename).name}:{theirs[-1].lineno}" if theirs else None
