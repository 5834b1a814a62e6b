"""`Trace` and other frozen records ↔ JSON data, each the exact inverse of the other.

A dataclass is an object with its fields' names, a named tuple a list (a trace holds many of them, and names would be
most of the file). How to read a type follows from its annotations, so a new field needs no line here; one that a file
lacks takes its default, as do the last values of a named tuple. That is how the traces of earlier schemas are read.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any

from memsize.errors import InputError
from memsize.records.trace import Trace

SCHEMA = "memsize.trace/2"
"""What `encode` writes. /2 added the streams of storages, the roots, and the world."""
READ = ("memsize.trace/1", SCHEMA)
"""What `decode` takes."""


def encode(trace: Trace) -> dict[str, Any]:
    """`trace` as dicts, lists, strings, integers, booleans and None, ready for `json.dump`."""
    return {"schema": SCHEMA, **plain(trace)}


def decode(data: object) -> Trace:
    """The trace that `data` encodes; raises `InputError` when it is not a trace of a version in `READ`."""
    found = data.get("schema") if isinstance(data, dict) else type(data).__name__
    if not isinstance(data, dict) or found not in READ:
        raise InputError(f"not a memsize trace: expected schema {SCHEMA!r}, found {found!r}")
    try:
        trace: Trace = reader(Trace)({key: value for key, value in data.items() if key != "schema"})
    except (TypeError, ValueError) as error:
        raise InputError(f"not a memsize trace: {error}") from error
    return trace


def plain(value: Any) -> Any:
    """A frozen record, at any depth, as dicts, lists and scalars."""
    if dataclasses.is_dataclass(value):
        return {name: plain(getattr(value, name)) for name in _names(value.__class__)}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


@cache
def _names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


@cache
def reader(hint: Any) -> Callable[[Any], Any]:
    """What turns plain data into a value of the annotated type `hint`; it raises TypeError or ValueError."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _one_of(frozenset(arguments[1]))
    if origin in (typing.Union, types.UnionType):
        return _optional(arguments)
    if origin is tuple:
        return _sequence(arguments[0])
    if dataclasses.is_dataclass(hint):
        return _record(typing.cast(type, hint))
    if isinstance(hint, type) and issubclass(hint, tuple):
        return _named_tuple(hint)
    return _scalar(hint)


def _optional(arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    (inner,) = (reader(argument) for argument in arguments if argument is not types.NoneType)
    return lambda value: None if value is None else inner(value)


def _sequence(item: Any) -> Callable[[Any], Any]:
    inner = reader(item)

    def read(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise TypeError(f"expected a list, found {value!r:.60}")
        return tuple([inner(part) for part in value])

    return read


def _record(cls: type) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    readers = {name: reader(hints[name]) for name in _names(cls)}

    def read(value: Any) -> Any:
        if not isinstance(value, dict) or not value.keys() <= readers.keys():
            raise TypeError(f"expected the fields of {cls.__name__}, found {value!r:.60}")
        return cls(**{name: readers[name](part) for name, part in value.items()})

    return read


def _named_tuple(cls: type) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    readers = [reader(hints[name]) for name in cls._fields]  # type: ignore[attr-defined]
    fewest = len(readers) - len(cls._field_defaults)  # type: ignore[attr-defined]

    def read(value: Any) -> Any:
        if not isinstance(value, list | tuple) or not fewest <= len(value) <= len(readers):
            raise TypeError(f"expected {len(readers)} values of {cls.__name__}, found {value!r:.60}")
        return cls(*[read_part(part) for read_part, part in zip(readers, value, strict=False)])

    return read


def _one_of(choices: frozenset[str]) -> Callable[[Any], Any]:
    """A check that a value is one of a Literal's, or a key of the table that an open set of names is annotated with."""

    def choose(value: Any) -> Any:
        if value not in choices:
            raise ValueError(f"expected one of {', '.join(sorted(choices))}, found {value!r:.60}")
        return value

    return choose


def _scalar(hint: Any) -> Callable[[Any], Any]:
    """A check that a value is of the scalar type `hint`, or one of the values of a Literal."""
    if typing.get_origin(hint) is typing.Literal:
        return _one_of(frozenset(typing.get_args(hint)))

    def check(value: Any) -> Any:
        # True is an integer to Python, but no size.
        if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
            raise TypeError(f"expected {hint.__name__}, found {value!r:.60}")
        return value

    return check
