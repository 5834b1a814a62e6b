"""Which line of the user's own code is running."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
"""The folders of torch and of memsize."""


def running_line(until: CodeType | None = None) -> str:
    """The innermost line outside of torch and memsize, as ``"model.py:12"``.

    The search ends at a call of `until`; the line is empty where there is none before it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not until:
        file = frame.f_code.co_filename
        if not file.startswith(LIBRARIES) and file[:1] != "<":
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
