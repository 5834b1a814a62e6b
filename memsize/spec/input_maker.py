"""Inputs that are made on request: by a user's function, or by memsize for a model that a library names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class InputRequest:
    """The sizes and the mode that inputs are made for. `seq_len` is None where nobody chose one; a text that `goes_on`
    is a prompt, whose last token ends nothing.
    """

    batch_size: int = 1
    seq_len: int | None = None
    training: bool = True
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class InputMaker:
    """`make` gives the arguments of one call, with their batch dimension: a mapping of keywords, a tuple of positions,
    or the only one. Tensors may be `meta` where nobody reads their values.

    `resizable` says whether `make` heeds the batch size; `note` what a reader must know of these inputs, and `untyped`
    that their floating dtype is the model's, whatever `make` gives.
    """

    make: Callable[[InputRequest], Any]
    resizable: bool = True
    note: str | None = None
    untyped: bool = True
