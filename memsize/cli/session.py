"""What one invocation of the command line knows beside its arguments."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Session:
    """`debug`: whether an error shows its traceback. An option sets it before anything can go wrong."""

    debug: bool = False
