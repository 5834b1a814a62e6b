"""Frozen records ↔ JSON data, each direction the exact inverse of the other.

How a record is written and read follows from its annotations, so that a new field needs no line here. A dataclass is an
object with its fields' names; a named tuple a list, because a trace holds many of them and names would be most of the
file. A mapping from texts is an object, from anything else a list of pairs. What a file lacks takes its default: files
of older versions keep loading as long as new fields have one. Fields that a file has and the record doesn't are
refused, because leaving them out would change what the file says.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from memsize.units import Bytes

Convert = Callable[[Any], Any]


class Coder(NamedTuple):
    """Functions that write values of one type as JSON data and read them back; `read` raises TypeError or ValueError.

    `is_plain` is true if a value already is JSON data and is written as it is.
    """

    write: Convert
    read: Convert
    is_plain: bool = False


def plain(record: Any) -> Any:
    """A frozen record as dicts, lists and scalars."""
    kind: Any = type(record)
    return coder(kind).write(record)


@cache
def coder(hint: Any) -> Coder:
    """The coder of an annotated type: scalars, literals, optionals, tuples, mappings, dataclasses and named tuples."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _optional(arguments)
    if origin is Sequence:
        return _sequence(arguments[0])
    if origin is tuple:
        return _sequence(arguments[0]) if arguments[1:] == (...,) else _fixed(arguments)
    if origin is typing.Literal:
        return Coder(_same, partial(_read_choice, frozenset(arguments)), is_plain=True)
    if origin in (Mapping, dict):
        return _mapping(*arguments)
    if typing.is_typeddict(hint):
        return _named_values(hint)
    if hint is object:
        return Coder(_write_any, _read_any)
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint)
    if isinstance(hint, type) and issubclass(hint, tuple):
        return _named_tuple(hint)
    if hint not in _SCALARS:
        raise TypeError(f"no value of {hint!r} can be in a file")
    return Coder(_same, _read_float if hint is float else partial(_read_exactly, hint), is_plain=True)


_SCALARS = (bool, int, float, str)


def _same(value: Any) -> Any:
    return value


def _optional(arguments: tuple[Any, ...]) -> Coder:
    (inner,) = (coder(argument) for argument in arguments if argument is not types.NoneType)
    return Coder(
        _same if inner.is_plain else lambda value: None if value is None else inner.write(value),
        lambda value: None if value is None else inner.read(value),
        inner.is_plain,
    )


def _sequence(item: Any) -> Coder:
    inner = coder(item)

    def write(values: Any) -> Any:
        return list(values) if inner.is_plain else [inner.write(value) for value in values]

    return Coder(write, lambda values: tuple([inner.read(value) for value in _listed(values)]))


def _fixed(items: tuple[Any, ...]) -> Coder:
    """Return the coder of a tuple with one type for each position."""
    inner = [coder(item) for item in items]

    def read(values: Any) -> Any:
        if len(_listed(values)) != len(inner):
            raise TypeError(f"expected {len(inner)} values, found {values!r:.60}")
        return tuple([member.read(value) for member, value in zip(inner, values, strict=True)])

    return Coder(lambda values: [member.write(value) for member, value in zip(inner, values, strict=True)], read)


def _mapping(key: Any, value: Any) -> Coder:
    if key is str or typing.get_origin(key) is typing.Literal:
        names, inner = coder(key), coder(value)

        def read(data: Any) -> Any:
            if not isinstance(data, dict):
                raise TypeError(f"expected an object, found {data!r:.60}")
            return {names.read(name): inner.read(member) for name, member in data.items()}

        return Coder(lambda actual: {name: inner.write(member) for name, member in actual.items()}, read)
    pair = _fixed((key, value))
    return Coder(
        lambda actual: [pair.write(item) for item in actual.items()],
        lambda data: dict(pair.read(item) for item in _listed(data)),
    )


def _named_values(cls: Any) -> Coder:
    """Return the coder of a TypedDict, which is an object with its keys."""
    inner = {name: coder(hint) for name, hint in typing.get_type_hints(cls).items()}

    def read(data: Any) -> Any:
        if not isinstance(data, dict) or data.keys() != inner.keys():
            raise TypeError(f"expected the keys of {cls.__name__}, found {data!r:.60}")
        return {name: inner[name].read(value) for name, value in data.items()}

    return Coder(lambda actual: {name: inner[name].write(value) for name, value in actual.items()}, read)


def _dataclass(cls: Any) -> Coder:
    hints = typing.get_type_hints(cls)
    fields = [(field.name, coder(hints[field.name])) for field in dataclasses.fields(cls) if field.init]
    readers = {name: member.read for name, member in fields}

    def write(record: Any) -> Any:
        return {
            name: getattr(record, name) if member.is_plain else member.write(getattr(record, name))
            for name, member in fields
        }

    def read(data: Any) -> Any:
        if not isinstance(data, dict) or not data.keys() <= readers.keys():
            raise TypeError(f"expected the fields of {cls.__name__}, found {data!r:.60}")
        return cls(**{name: readers[name](value) for name, value in data.items()})

    return Coder(write, read)


def _named_tuple(cls: Any) -> Coder:
    hints = typing.get_type_hints(cls)
    inner = [coder(hints[name]) for name in cls._fields]
    least = len(inner) - len(cls._field_defaults)
    if all(member.is_plain for member in inner):
        write: Convert = list
    else:
        write = lambda record: [member.write(value) for member, value in zip(inner, record, strict=True)]  # noqa: E731

    def read(data: Any) -> Any:
        if not isinstance(data, list | tuple) or not least <= len(data) <= len(inner):
            raise TypeError(f"expected {len(inner)} values of {cls.__name__}, found {data!r:.60}")
        return cls(*[member.read(value) for member, value in zip(inner, data, strict=False)])

    return Coder(write, read)


def _listed(values: Any) -> Any:
    if not isinstance(values, list | tuple):
        raise TypeError(f"expected a list, found {values!r:.60}")
    return values


def _read_choice(choices: frozenset[Any], value: Any) -> Any:
    if value not in choices:
        raise ValueError(f"expected one of {', '.join(sorted(map(str, choices)))}, found {value!r:.60}")
    return value


def _read_exactly(hint: type, value: Any) -> Any:
    # True is an integer to Python, but no number.
    if type(value) is not hint:
        raise TypeError(f"expected {hint.__name__}, found {value!r:.60}")
    return value


def _read_float(value: Any) -> float:
    return float(value) if type(value) is int else _read_exactly(float, value)  # JSON has one kind of number


def _write_any(value: Any) -> Any:
    """Encode a value of a finding, which has no annotated type: bytes and tuples carry the name of their type."""
    if isinstance(value, Bytes):
        return {"bytes": int(value)}
    if isinstance(value, tuple | list):
        return {"tuple": [_write_any(member) for member in value]}
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"{type(value).__name__} is nothing that a file holds")


def _read_any(data: Any) -> Any:
    match data:
        case {"bytes": int(count)} if len(data) == 1:
            return Bytes(count)
        case {"tuple": list(values)} if len(data) == 1:
            return tuple(map(_read_any, values))
        case None | str() | bool() | int() | float():
            return data
    raise TypeError(f"expected a value of a finding, found {data!r:.60}")
