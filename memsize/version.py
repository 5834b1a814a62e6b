"""The version of memsize, for `pyproject.toml`, the command line and saved runs."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing `typing` is left to whoever needs it
    from typing import Final

VERSION: Final = "0.1.0"
