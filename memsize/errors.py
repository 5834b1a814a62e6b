"""What can go wrong, as a tree: catch `MemsizeError` to catch all of it.

    MemsizeError
    ├── TargetError      the target could not be found, imported or built
    ├── InputError       an input specification is malformed or does not suit the model
    ├── ScenarioError    an unknown scenario, or one that this model rules out
    ├── ForwardError     the model's own forward failed; says which layer, and keeps what ran before it
    ├── CheckpointError  a checkpoint file is missing, damaged, or refused because it would run code
    └── OutputError      the report cannot be written as asked

Every message is one that a user can act on. The command line prints it and exits with status 2; the exception that
caused it, where there is one, is kept as `__cause__`.
"""

from __future__ import annotations

from typing import Any


class MemsizeError(Exception):
    """The root of every error that memsize raises on purpose."""


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


class ForwardError(MemsizeError):
    """The model's own forward failed. `trace` holds the layers that ran before it did.

    It is a `memsize.records.trace.Trace`, or None where nothing ran; records lie above errors, hence the annotation.
    """

    def __init__(self, message: str, trace: Any = None) -> None:
        super().__init__(message)
        self.trace = trace


class UnknownValueError(RuntimeError):
    """A value was asked for that only real data could tell, or weights that were not loaded.

    It is raised inside the model's code, so it is a `RuntimeError` as PyTorch's own refusals are. The user sees it as
    the cause of a `ForwardError`; a model whose constructor meets it is built with its weights in memory.
    """
