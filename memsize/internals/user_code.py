"""Which frames are the user's, neither PyTorch's nor memsize's, and which line of theirs is running."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def is_outside(file: str) -> bool:
    """Whether the source `file` is neither PyTorch's nor memsize's: the user's own, or a library's model."""
    return not file.startswith((*_LIBRARIES, "<"))


def running_line(until: CodeType | None = None) -> str:
    """The innermost line outside of torch and memsize, as ``"model.py:12"``.

    The search ends at a call of `until`; the line is empty where there is none before it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not until:
        if is_outside(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
