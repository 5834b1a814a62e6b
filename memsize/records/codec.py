"""Frozen records ↔ JSON data, each direction the exact inverse of the other.

How a record is written and read follows from its annotations, so that a new field needs no line here. A dataclass is an
object with its fields' names; a named tuple a list, because a trace holds many of them and names would be most of the
file. A mapping from texts is an object, from anything else a list of pairs. What a file lacks takes its default: files
of older versions keep loading as long as new fields have one. Fields that a file has and the record doesn't are
refused, because leaving them out would change what the file says.

What is read can be shown: integers are those of int64, floats are finite, a record with a method `validate` has been
asked by it, and values satisfy the constraints of their annotations:

    class Event(NamedTuple):
        storage: Annotated[int, Index("storages")]
        delta: int

An `Index` or a `Name` refers to a field of the record that the value is part of, at any depth.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Annotated, Any, Final, NamedTuple

from memsize.units import Bytes

Convert = Callable[[Any], Any]


class Reference(NamedTuple):
    """The values inside a record that refer to a field of a record around it, and how they do."""

    to: Index | Name
    values: Callable[[Any], Iterable[Any]]


class Coder(NamedTuple):
    """Functions that write values of one type as JSON data and read them back; `read` raises TypeError or ValueError.

    `is_plain` is true if a value already is JSON data and is written as it is. `references` are those that are still to
    be checked, by the coder of a record around it.
    """

    write: Convert
    read: Convert
    is_plain: bool = False
    references: tuple[Reference, ...] = ()


def plain(record: Any) -> Any:
    """A frozen record as dicts, lists and scalars."""
    kind: Any = type(record)
    return coder(kind).write(record)


@cache
def coder(hint: Any) -> Coder:
    """The coder of an annotated type: scalars, literals, optionals, tuples, mappings, dataclasses and named tuples."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _constrained(*arguments)
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
    read = {int: _read_int, float: _read_float}.get(hint, partial(_read_exactly, hint))
    return Coder(_same, read, is_plain=True)


_SCALARS = (bool, int, float, str)


def _same(value: Any) -> Any:
    return value


def _constrained(hint: Any, constraint: AtLeast | NotEmpty | Index | Name) -> Coder:
    inner = coder(hint)
    if isinstance(constraint, Index | Name):
        return inner._replace(references=(Reference(constraint, _alone),))

    def read(data: Any) -> Any:
        value = inner.read(data)
        if isinstance(constraint, NotEmpty) and not value:
            raise ValueError("expected one entry or more, found none")
        if isinstance(constraint, AtLeast) and value < constraint.least:
            raise ValueError(f"expected {constraint.least} or more, found {data!r:.60}")
        return value

    return inner._replace(read=read)


def _alone(value: Any) -> Iterable[Any]:
    return (value,)


def _optional(arguments: tuple[Any, ...]) -> Coder:
    (inner,) = (coder(argument) for argument in arguments if argument is not types.NoneType)
    return Coder(
        _same if inner.is_plain else lambda value: None if value is None else inner.write(value),
        lambda value: None if value is None else inner.read(value),
        inner.is_plain,
        _inside(inner, lambda value: () if value is None else (value,)),
    )


def _sequence(item: Any) -> Coder:
    inner = coder(item)

    def write(values: Any) -> Any:
        return list(values) if inner.is_plain else [inner.write(value) for value in values]

    read: Convert = lambda values: tuple([inner.read(value) for value in _listed(values)])  # noqa: E731
    return Coder(write, read, references=_inside(inner, _same))


def _inside(inner: Coder, members: Callable[[Any], Iterable[Any]]) -> tuple[Reference, ...]:
    """The references of a value whose `members` have those of `inner`."""
    return tuple(_through(reference, members) for reference in inner.references)


def _through(reference: Reference, members: Callable[[Any], Iterable[Any]]) -> Reference:
    if reference.values is _alone:
        return reference._replace(values=members)
    return reference._replace(values=lambda value: chain.from_iterable(map(reference.values, members(value))))


def _fixed(items: tuple[Any, ...]) -> Coder:
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

        write: Convert = lambda actual: {name: inner.write(member) for name, member in actual.items()}  # noqa: E731
        return Coder(write, read, references=_inside(inner, lambda actual: actual.values()))
    pair = _fixed((key, value))
    return Coder(
        lambda actual: [pair.write(item) for item in actual.items()],
        lambda data: dict(pair.read(item) for item in _listed(data)),
    )


def _named_values(cls: Any) -> Coder:
    """Return the coder of a TypedDict, which is an object with its keys."""
    inner = {name: coder(hint) for name, hint in typing.get_type_hints(cls).items()}

    def read(data: Any) -> Any:
        if not isinstance(data, dict) or not cls.__required_keys__ <= data.keys() <= inner.keys():
            raise TypeError(f"expected the keys of {cls.__name__}, found {data!r:.60}")
        return {name: inner[name].read(value) for name, value in data.items()}

    return Coder(lambda actual: {name: inner[name].write(value) for name, value in actual.items()}, read)


def _dataclass(cls: Any) -> Coder:
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = [(field.name, coder(hints[field.name])) for field in dataclasses.fields(cls) if field.init]
    readers = {name: member.read for name, member in fields}
    references, check = _references(cls, fields)

    def write(record: Any) -> Any:
        return {
            name: getattr(record, name) if member.is_plain else member.write(getattr(record, name))
            for name, member in fields
        }

    def read(data: Any) -> Any:
        if not isinstance(data, dict) or not data.keys() <= readers.keys():
            raise TypeError(f"expected the fields of {cls.__name__}, found {data!r:.60}")
        record = cls(**{name: readers[name](value) for name, value in data.items()})
        check(record)
        return record

    return Coder(write, read, references=references)


def _named_tuple(cls: Any) -> Coder:
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = [(name, coder(hints[name])) for name in cls._fields]
    inner = [member for _, member in fields]
    least = len(inner) - len(cls._field_defaults)
    references, check = _references(cls, fields)
    if all(member.is_plain for member in inner):
        write: Convert = list
    else:
        write = lambda record: [member.write(value) for member, value in zip(inner, record, strict=True)]  # noqa: E731

    def read(data: Any) -> Any:
        if not isinstance(data, list | tuple) or not least <= len(data) <= len(inner):
            raise TypeError(f"expected {len(inner)} values of {cls.__name__}, found {data!r:.60}")
        record = cls(*[member.read(value) for member, value in zip(inner, data, strict=False)])
        check(record)
        return record

    return Coder(write, read, references=references)


def _references(cls: Any, fields: Sequence[tuple[str, Coder]]) -> tuple[tuple[Reference, ...], Callable[[Any], None]]:
    """The references from a record to fields of those around it, and a function that checks those to its own."""
    names = [name for name, _ in fields]
    references = [
        (name, reference, itemgetter(position) if issubclass(cls, tuple) else attrgetter(name))
        for position, (name, member) in enumerate(fields)
        for reference in member.references
    ]
    own = [entry for entry in references if entry[1].to.of in names]
    validate = getattr(cls, "validate", None)

    def check(record: Any) -> None:
        for name, reference, get in own:
            _check(name, reference.to, reference.values(get(record)), getattr(record, reference.to.of))
        if validate is not None:
            validate(record)

    return tuple(_member(reference, get) for _, reference, get in references if reference.to.of not in names), check


def _member(reference: Reference, get: Callable[[Any], Any]) -> Reference:
    if reference.values is _alone:
        return reference._replace(values=lambda record: (get(record),))
    return reference._replace(values=lambda record: reference.values(get(record)))


def _check(name: str, to: Index | Name, values: Iterable[Any], entries: Sequence[Any]) -> None:
    """Raise ValueError unless all `values` in the field `name` refer to one of `entries`."""
    if isinstance(to, Name):
        wrong = set(values) - {entry.name for entry in entries}
    else:
        wrong = set(values) - set(range(-to.optional, len(entries) + to.end))
    if wrong:
        raise ValueError(f"{name}: {min(wrong)!r:.60} refers to none of the {len(entries)} {to.of}")


def _listed(values: Any) -> Any:
    if not isinstance(values, list | tuple):
        raise TypeError(f"expected a list, found {values!r:.60}")
    return values


def _read_choice(choices: frozenset[Any], value: Any) -> Any:
    if value not in choices:
        raise ValueError(f"expected one of {', '.join(sorted(map(str, choices)))}, found {value!r:.60}")
    return value


def _read_exactly(hint: type, value: Any) -> Any:
    # True is an integer to Python, but no size.
    if type(value) is not hint:
        raise TypeError(f"expected {hint.__name__}, found {value!r:.60}")
    return value


def _read_int(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected int, found {value!r:.60}")
    if not -LARGEST - 1 <= value <= LARGEST:
        raise ValueError(f"expected an integer of 64 bits, found {value!r:.60}")
    return value


def _read_float(value: Any) -> float:
    number = float(_read_int(value)) if type(value) is int else value  # JSON has one kind of number
    if not isinstance(number, float):
        raise TypeError(f"expected float, found {value!r:.60}")
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, found {value!r:.60}")
    return number


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
        case {"bytes": count} if len(data) == 1:
            return Bytes(_read_int(count))
        case {"tuple": list(values)} if len(data) == 1:
            return tuple(map(_read_any, values))
        case None | str() | bool():
            return data
        case int():
            return _read_int(data)
        case float():
            return _read_float(data)
    raise TypeError(f"expected a value of a finding, found {data!r:.60}")


LARGEST: Final = 2**63 - 1
"""The largest integer in a file, and minus the smallest less one: those of int64, as a size in bytes is."""


class AtLeast(NamedTuple):
    """An integer that is `least` or more."""

    least: int


class NotEmpty(NamedTuple):
    """A sequence with at least one entry."""


class Index(NamedTuple):
    """A position in the sequence `of`; -1 is none where `optional`, and its length is allowed where `end`."""

    of: str
    optional: bool = False
    end: bool = False


class Name(NamedTuple):
    """The `name` of an entry of the sequence `of`."""

    of: str


Size = Annotated[int, AtLeast(0)]
"""A number of bytes or of things: not below 0."""
