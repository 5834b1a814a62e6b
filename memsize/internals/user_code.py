"""Which frames are the user's, neither PyTorch's nor memsize's, and which line of theirs is running."""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

_INSTALLED = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, "<frozen ")
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def is_outside(file: str) -> bool:
    """Whether the source `file` is neither PyTorch's nor memsize's: the user's own, or a library's model."""
    return not file.startswith((*_LIBRARIES, "<"))


@cache
def is_library(file: str) -> bool:
    """Whether the source `file` is Python's own or an installed package's."""
    return file.startswith(_INSTALLED) or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def running_line(until: CodeType | None = None, libraries: bool = True) -> str:
    """The innermost line outside of torch and memsize, as ``"model.py:12"``; without `libraries`, outside of those too.

    The search ends at a call of `until`; the line is empty where there is none before it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not until:
        file = frame.f_code.co_filename
        if is_outside(file) and (libraries or not is_library(file)):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
