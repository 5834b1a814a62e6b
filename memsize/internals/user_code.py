"""Which frames are the user's: neither PyTorch's nor memsize's."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def is_outside(file: str) -> bool:
    """Whether the source `file` is neither PyTorch's nor memsize's: the user's own, or a library's model."""
    return not file.startswith((*_LIBRARIES, "<"))


def calling_line() -> str:
    """``model.py:12``: the line outside PyTorch and memsize that is being run; empty where there is none."""
    frame = sys._getframe()
    while frame.f_back is not None and not is_outside(frame.f_code.co_filename):
        frame = frame.f_back
    file = frame.f_code.co_filename
    return f"{Path(file).name}:{frame.f_lineno}" if is_outside(file) else ""
