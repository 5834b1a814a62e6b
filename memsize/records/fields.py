"""Fields: the columns of a record, each declared once for every format, and the cells that documents draw of them.

    ROWS = Fields[FitRow](
        field("scenario", "scenario", "name", 100, "how the model is stored and run"),
        field("peak", "needs", "bytes", 95, "smallest memory in which it fits"),
    )

Files (csv, JSON, DataFrames) hold `get(row)` under the field's `name`; documents (terminal, markdown, pages) draw the
cell below its `title`. A field without a title is only in files, a field made by `shown` only in documents.

A cell is a value with a type (bytes, a share, a path, tensor specs …) and never text that was already formatted, so
that each renderer draws it in its own way and none can know more than another. None is a cell that has no meaning in
its row; `Missing` is a figure that is not known, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeVar, cast

from memsize.records.roles import Role, in_order, noun
from memsize.records.trace import TensorSpec
from memsize.units import Bytes

if TYPE_CHECKING:
    from pandas import DataFrame


class Path(str):
    """A module's or tensor's qualified name."""

    __slots__ = ()


class Sized(int):
    """Bytes in a column of several units: drawn with their own."""

    __slots__ = ()


class Share(float):
    """A part of a whole: 0.5 is half of it."""

    __slots__ = ()


class Load(Share):
    """A part of a GPU's memory that is taken: above 1 it does not fit. Pages shade it."""

    __slots__ = ()


class Signed(int):
    """A difference in bytes, above (> 0) or below a reference."""

    __slots__ = ()


class Change(float):
    """A relative difference, above (> 0) or below a reference: 0.012 is 1.2 % more."""

    __slots__ = ()


class Words(tuple[str, ...]):
    """Short texts in one cell: marks, dtypes."""

    __slots__ = ()


class Specs(tuple[TensorSpec, ...]):
    __slots__ = ()


class Missing(NamedTuple):
    """A figure that is not known, and why."""

    reason: str


class Label(NamedTuple):
    """A row's name; `hint` says in a few words what it is."""

    text: str
    hint: str = ""


Cell = Label | Path | Specs | Words | Share | Change | Signed | Sized | Bytes | str | int | Missing | None


def share_of(part: int | None, whole: int | None) -> Share | None:
    """`part` as a share of `whole`; None where either is unknown or `whole` is 0."""
    return Share(part / whole) if part is not None and whole else None


# -- fields ------------------------------------------------------------------------------------------------------------


ColumnKind = Literal["name", "text", "specs", "count", "bytes", "share", "words"]
R = TypeVar("R")


Kind = Literal["name", "path", "text", "role", "words", "specs", "count", "bytes", "signed", "share", "change"]
"""The kind of a field: how its column is drawn, and the type of its cells."""


def _same(value: Any) -> Any:
    return value


_COLUMNS: Final[Mapping[Kind, ColumnKind]] = {"path": "name", "role": "text", "signed": "bytes", "change": "share"}
"""How a field is drawn, where that is not called as its kind is."""
_CELLS: Final[Mapping[Kind, Callable[[Any], Cell]]] = {
    **{"path": Path, "role": noun, "words": Words, "specs": Specs, "bytes": Bytes, "signed": Signed},
    **{"share": Share, "change": Change},
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its stable `key`, its title, the kind of its cells, and its weight: light columns are left out first.

    `role` is set if its bytes belong to one role. It is left out together with the column `beside`, without which it
    has no meaning. An `optional` column is shown only on request. A title that needs its row to be understood, such as
    "in", has the name `alone` to be called by outside the table.
    """

    key: str
    title: str
    kind: ColumnKind
    weight: int
    help: str = ""
    role: Role | None = None
    beside: str = ""
    optional: bool = False
    alone: str = ""


@dataclass(frozen=True, slots=True)
class Field(Column, Generic[R]):
    """One field of a record: a column, the `name` that files give it, and its getters.

    `get` reads the value that files hold, bytes where it `is_size`. `cell` makes the cell that documents draw from the
    row and the answer that it belongs to; without one it is the value of `get` as `drawn`. A `key` field has a value in
    every row, also in rows without figures. The DataFrame column of a `nullable` one is Int64. `adds` says that the
    rows add up.
    """

    name: str = ""
    drawn: Callable[[Any], Cell] = _same
    is_size: bool = False
    get: Callable[[R], Any] = _same
    cell: Callable[[R, Any], Cell] | None = None
    in_files: bool = True
    is_key: bool = False
    nullable: bool = False
    adds: bool = False


def field(
    name: str,
    title: str = "",
    kind: Kind = "text",
    weight: int = 0,
    hint: str = "",
    *,
    get: Callable[[R], Any] | str = "",
    cell: Callable[[R, Any], Cell] | None = None,
    key: str = "",
    drawn: Kind | None = None,
    **settings: Any,
) -> Field[R]:
    """A field called `name` in files and `title` in documents, where it is drawn as `drawn` (default: its kind).

    Its value is the attribute `name`, or what `get` reads: a function, or the path of an attribute, in which an
    attribute that is None has none but None. `key` is the column's key where that is not `name`, and `settings` are
    those of a `Field`.
    """
    shape = drawn or kind
    column = (key or name, title, cast(ColumnKind, _COLUMNS.get(shape, shape)), weight, hint)
    is_size, cells = kind in ("bytes", "signed"), _CELLS.get(shape, _same)
    return Field(*column, name=name, drawn=cells, is_size=is_size, get=_getter(get or name), cell=cell, **settings)


def _getter(get: Callable[[R], Any] | str) -> Callable[[R], Any]:
    if not isinstance(get, str):
        return get
    first, *others = get.split(".")
    if not others:
        return attrgetter(first)

    def read(row: Any) -> Any:
        return reduce(lambda value, name: None if value is None else getattr(value, name), (first, *others), row)

    return read


def shown(name: str, title: str, kind: Kind, weight: int, hint: str = "", **options: Any) -> Field[Any]:
    """A field that only documents have; `options` as in `field`."""
    return field(name, title, kind, weight, hint, in_files=False, **options)


SCENARIO: Final[Field[Any]] = field(
    "scenario",
    "scenario",
    "name",
    100,
    "how the model is stored and run",
    cell=lambda row, _: Label(row.scenario, hint=row.title),
    is_key=True,
)
"""The field of records whose rows are named by a `scenario`, explained by their `title`."""


_NONE: Final[Mapping[str, Any]] = {}


def _changed(fields: tuple[Field[R], ...], setting: str, values: Mapping[str, Any]) -> tuple[Field[R], ...]:
    """The fields with another `setting`, by name; raises ValueError for a name that none of them has."""
    if unknown := values.keys() - {entry.name for entry in fields}:
        raise ValueError(f"no fields of these names have a {setting}: {sorted(unknown)}")
    return tuple(replace(entry, **{setting: values[entry.name]}) if entry.name in values else entry for entry in fields)


class Fields(Generic[R]):
    """The fields of one record, in order.

    `get`, `cell` and other `settings` of a `Field` come by the names of the fields where they would make a field longer
    than one line of this table; names alone are those of fields for which a setting is true. A row that `lacks` figures
    has the cell `missing` in its columns of numbers and None in the others, but for its key fields and for fields that
    have a `cell` of their own.
    """

    def __init__(
        self,
        *fields: Field[R],
        get: Mapping[str, Callable[[R], Any] | str] = _NONE,
        cell: Mapping[str, Callable[[R, Any], Cell]] = _NONE,
        lacks: Callable[[R], bool] = lambda row: False,
        missing: Callable[[R], Cell] = lambda row: None,
        **settings: Mapping[str, Any] | Collection[str],
    ) -> None:
        for setting, values in settings.items():
            fields = _changed(fields, setting, values if isinstance(values, Mapping) else dict.fromkeys(values, True))
        getters = {name: _getter(read) for name, read in get.items()}
        self._fields = _changed(_changed(fields, "get", getters), "cell", cell)
        self._lacks = lacks
        self._missing = missing

    def __iter__(self) -> Iterator[Field[R]]:
        return iter(self._fields)

    @property
    def columns(self) -> tuple[Field[R], ...]:
        return tuple(entry for entry in self._fields if entry.title)

    def weighted(self, weight: int) -> Fields[R]:
        """The fields with weights of their own, from `weight` downwards: the first is the last to be left out."""
        return self._with(replace(entry, weight=weight - number) for number, entry in enumerate(self._fields))

    def only(self, *names: str) -> Fields[R]:
        """The fields of these names, in their order."""
        by_name = {entry.name: entry for entry in self._fields}
        return self._with(by_name[name] for name in names)

    def without(self, *names: str) -> Fields[R]:
        return self._with(entry for entry in self._fields if entry.name not in names)

    def titled(self, **titles: str) -> Fields[R]:
        return self._with(_changed(self._fields, "title", titles))

    def hinted(self, **hints: str) -> Fields[R]:
        return self._with(_changed(self._fields, "help", hints))

    def drawn(self, **cells: Callable[[R, Any], Cell]) -> Fields[R]:
        return self._with(_changed(self._fields, "cell", cells))

    def after(self, *fields: Field[R]) -> Fields[R]:
        """The fields with others before them."""
        return self._with((*fields, *self._fields))

    def plus(self, *fields: Field[R]) -> Fields[R]:
        return self._with((*self._fields, *fields))

    def _with(self, fields: Iterable[Field[R]]) -> Fields[R]:
        return Fields(*fields, lacks=self._lacks, missing=self._missing)

    def record(self, row: R) -> dict[str, Any]:
        """A row as files hold it."""
        return {entry.name: entry.get(row) for entry in self._fields if entry.in_files}

    def flat(self, rows: Iterable[R]) -> FlatTable:
        """The rows as files hold them."""
        filed = tuple(entry for entry in self._fields if entry.in_files)
        return FlatTable(
            tuple(entry.name for entry in filed),
            (tuple(entry.get(row) for entry in filed) for row in rows),
            tuple(entry.name for entry in filed if entry.is_size),
            tuple(entry.name for entry in filed if entry.nullable),
        )

    def cells(self, row: R, answer: Any = None) -> tuple[Cell, ...]:
        """A row as documents draw it."""
        lacks, missing = self._lacks(row), self._missing(row)
        return tuple(_cell(entry, row, answer, lacks, missing) for entry in self.columns)

    def total(self, label: Cell, sums: Any, answer: Any = None) -> tuple[Cell, ...]:
        """The cells of a row of sums below `label`: the fields that add up, read from `sums`."""
        _, *others = self.columns
        return (label, *(_cell(entry, sums, answer, False, None) if entry.adds else None for entry in others))


def _cell(of: Field[Any], row: Any, answer: Any, lacks: bool, missing: Cell) -> Cell:
    if of.cell is not None:
        return of.cell(row, answer)
    if lacks and not of.is_key:
        return missing if of.kind in ("bytes", "count") else None
    value = of.get(row)
    return value if value is None or isinstance(value, Missing) else of.drawn(value)


def role_fields(sizes: Sequence[Mapping[Role, int]], meaning: str = "", of: str = "roles") -> tuple[Field[Any], ...]:
    """A field for the bytes of each role in `sizes`, which rows have as their attribute `of`.

    Where there is no room for all, the column whose largest figure is smallest is left out first.
    """
    roles = in_order(role for entry in sizes for role in entry)
    by_size = sorted(roles, key=lambda role: -max(entry.get(role, 0) for entry in sizes))
    read = attrgetter(of)
    fields: list[Field[Any]] = []
    for role in roles:
        hint, get = meaning and f"{noun(role)}{meaning}", partial(_size_of, read, role)
        fields.append(field(role, noun(role), "bytes", 60 - 3 * by_size.index(role), hint, get=get, role=role))
    return tuple(fields)


def _size_of(read: Callable[[Any], Mapping[Role, int]], role: Role, row: Any) -> int:
    return read(row).get(role, 0)


class FlatTable(NamedTuple):
    """Plain values in rows and columns, as a csv file and a DataFrame hold them. The rows can be read once.

    `sizes` names the columns of bytes, `nullable` the columns of whole numbers of which some may be unknown.
    """

    columns: tuple[str, ...]
    rows: Iterable[Sequence[object]]
    sizes: Collection[str] = ()
    nullable: Collection[str] = ()

    def records(self) -> list[dict[str, object]]:
        """The table's rows as dicts."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def frame(self) -> DataFrame:
        """The table as a DataFrame; ``attrs["units"]`` has the unit of each column of bytes. It imports pandas."""
        from pandas import DataFrame

        frame = DataFrame(list(self.rows), columns=list(self.columns)).astype(dict.fromkeys(self.nullable, "Int64"))
        frame.attrs["units"] = {name: "B" for name in self.columns if name in self.sizes}
        return frame
