"""What a pickle's instructions amount to, as plain values: nothing of what they name is imported or called."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Global(NamedTuple):
    """A class or a function, by its dotted name."""

    path: str

    def __str__(self) -> str:
        return self.path


class Blob(NamedTuple):
    """Bytes, or a text, too long to be kept: where they stand in the pickle's file, and how many they are."""

    start: int
    length: int
    text: bool


class StorageValue(NamedTuple):
    """A storage that a pickle mentions by its key: its dtype, how many elements it claims, and from which on."""

    key: str
    dtype: str
    elements: int
    base: int = 0


@dataclass(slots=True, eq=False)
class Dict:
    """A dictionary of any kind; `pairs` in the order in which they were set."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Object:
    """Anything that a pickle makes by a call: what it would call, with what, and what it adds to the result."""

    made_by: Any
    args: tuple[Any, ...] = ()
    states: list[Any] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class TensorValue:
    """A strided tensor of a storage: `offset` and `stride` in elements. `storage` is None when it keeps no data.

    A numpy array that stands in the pickle itself has a `Blob` for a storage.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: StorageValue | Blob | None
    trainable: bool | None = None


@dataclass(slots=True, eq=False)
class Composite:
    """A tensor that is kept in others: sparse, quantized per channel, nested, or a wrapper subclass.

    `inner` may hold anything: the tensors in it are its parts. An empty `kind` is a plain tensor with attributes.
    """

    kind: str
    inner: list[tuple[str, Any]]
    trainable: bool | None = None
