"""Frames of the user's code (neither PyTorch's nor memsize's), and the line of theirs that is running."""

from __future__ import annotations

import ast
import os
import runpy
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Final, TypeAlias

from memsize.errors import causes

_INSTALLED = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, "<frozen ")
_STANDARD = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")},)
_WORKLOADS = str(Path(__file__).parents[1] / "workloads")
_TORCH = find_spec("torch")
_LIBRARIES = (*((str(Path(str(_TORCH.origin)).parent),) if _TORCH else ()), str(Path(__file__).parents[1]))
_RUNS_SCRIPTS = (f"{Path(__file__).parents[1]}{os.sep}", runpy.run_path.__code__.co_filename)


Lines: TypeAlias = tuple[tuple[str, int], ...]
"""Files and numbers of lines, each of which led to the next."""
CELLS: Final[dict[str, str]] = {}
"""The cells of a notebook by the names of files that their code has: ``"In [3]"``."""


def is_outside(file: str) -> bool:
    """Whether the source `file` is neither PyTorch's nor memsize's: the user's own, or a library's model."""
    return file in CELLS or not _is_ours(file)


@cache
def _is_ours(file: str) -> bool:
    return file.startswith((*_LIBRARIES, "<"))


@cache
def is_users(file: str) -> bool:
    """Whether the source `file` is the user's own: neither Python's, nor an installed package's, nor memsize's."""
    path = os.path.abspath(file)
    return file[:1] != "<" and is_outside(path) and not is_library(path)


@cache
def is_library(file: str) -> bool:
    """Whether the source `file` is Python's own or an installed package's."""
    return file.startswith(_INSTALLED) or is_packaged(file)


def running_line(until: CodeType | None = None) -> str:
    """The innermost line outside of torch and memsize, as ``"model.py:12"``; empty if there is none before `until`."""
    frame = next(users_frames(until, libraries=True), None)
    return "" if frame is None else line_of(frame.f_code.co_filename, frame.f_lineno)


def line_in_forward() -> tuple[str, int] | None:
    """The file and number of the innermost line outside of PyTorch and memsize, below what memsize calls."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        side = _side(code.co_filename)
        if side:
            return (code.co_filename, frame.f_lineno) if side > 0 else None
        frame = frame.f_back
    return None


@cache
def _side(file: str) -> int:
    """1 for the source of a model, 0 for that of what calls or serves it, -1 where what memsize calls begins."""
    if file.startswith(_WORKLOADS):
        return -1
    return int(is_outside(file) and (not file.startswith(_STANDARD) or is_packaged(file)))


def is_packaged(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def users_frames(
    until: CodeType | None = None, libraries: bool = False, thread: int | None = None
) -> Iterator[FrameType]:
    """The calls that are running in the user's own code, the innermost first; with `libraries` also those in packages
    other than PyTorch and memsize. They are those of this thread, or of the one with that number. The search ends at a
    call of `until`.
    """
    frame: FrameType | None = sys._getframe(1) if thread is None else sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not until:
        file = frame.f_code.co_filename
        if is_outside(file) and (libraries or not is_library(file)):
            yield frame
        frame = frame.f_back


def running_lines(until: CodeType | None = None, thread: int | None = None) -> Lines:
    """The innermost line of the user's own code, and after it the innermost one of a package that it led to: either may
    be missing. They are those of this thread, or of the one with that number. The search ends at a call of `until`.
    """
    package: Lines = ()
    for frame in users_frames(until, True, thread):
        line = frame.f_code.co_filename, frame.f_lineno
        if not is_library(line[0]):
            return (line, *package)
        if not package and is_packaged(line[0]):
            package = (line,)
    return package


def variables(frame: FrameType) -> list[tuple[str, Any]]:
    """The variables of a call that is running, by name.

    Before Python 3.13 a function's frame holds on to the values that it was last asked for: what the function lets go
    of meanwhile would stay alive. They are let go here, unless the user's own ``locals()`` holds them too.
    """
    values = frame.f_locals
    items = list(values.items())
    if _SNAPSHOTS and frame.f_code.co_flags & CO_OPTIMIZED and sys.getrefcount(values) == _UNSHARED:
        values.clear()
    return items


_SNAPSHOTS = sys.version_info < (3, 13)
_UNSHARED = 3
"""The references to a dict that only its frame, one variable and the call that counts have."""


def line_of(file: str, line: int) -> str:
    """How a line is shown: ``"model.py:12"``."""
    return f"{CELLS.get(file) or Path(file).name}:{line}"


def shown(lines: Lines) -> str:
    """How a line is shown with the one that it led to: ``"train.py:12 > trainer.py:80"``."""
    return " > ".join(line_of(*line) for line in lines)


def parsed(file: str) -> ast.Module | None:
    """The source `file`, as it is now, as a syntax tree; None where it cannot be read."""
    try:
        return _parsed(file, os.stat(file).st_mtime_ns)
    except (OSError, SyntaxError, ValueError):
        return None


@cache
def _parsed(file: str, written: int) -> ast.Module:
    return ast.parse(Path(file).read_bytes())


def shown_as_python_would(error: BaseException) -> None:
    """Leave the calls of memsize, and of what runs a script, out of the tracebacks of `error` and of what led to it."""
    for led in causes(error):
        frames, entry = [], led.__traceback__
        while entry is not None:
            frames.append(entry)
            entry = entry.tb_next
        led.__traceback__ = None
        for entry in reversed(frames):
            if not entry.tb_frame.f_code.co_filename.startswith(_RUNS_SCRIPTS):
                led.__traceback__ = TracebackType(led.__traceback__, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
