"""Options, each declared once: a request is a frozen dataclass whose fields say how people write them.

The command line's options, the keywords of Python, the keys of TOML files and the checks of their values follow from
`option` and `part`:

    @dataclass(frozen=True, kw_only=True)
    class Serving:
        block_size: int = option(16, "Tokens per block.", least=1)

    @dataclass(frozen=True, kw_only=True)
    class ServeRequest:
        serving: Serving = part(Serving)
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from inspect import Parameter, signature
from numbers import Integral, Real
from types import UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_origin

from memsize.errors import InputError, UnknownInputError, quoted
from memsize.spec.other_names import other_name

Kind = Literal["text", "count", "number", "flag", "list", "texts", "table", "path"]
"""``list`` is written with commas, also in parts; ``texts`` is written once for each text."""
T = TypeVar("T")
_KINDS: Final[Mapping[str, Kind]] = {"str": "text", "int": "count", "float": "number", "bool": "flag"}
_PYTHON: Final[Mapping[str, type]] = {"str": str, "int": int, "float": float, "bool": bool, "None": type(None)}
TOML_TYPES: Final[Mapping[Kind, tuple[type, ...]]] = {
    "text": (str,),
    "count": (int,),
    "number": (float, int),
    "flag": (bool,),
    "list": (str, list),
    "texts": (str, list),
    "table": (dict,),
    "path": (str,),
}
_ABSTRACT: Final[Mapping[str, Any]] = {
    "None": type(None),
    "int": Integral,
    "float": Real,
    "Callable": Callable,
    "Iterable": Iterable,
    "Sequence": Sequence,
    "Mapping": Mapping,
    "PathLike": os.PathLike,
}
"""What a word of an annotation stands for, where that is not a class of this name."""
_WORDS: Final = {
    "str": "a text",
    "list": "a list",
    "dict": "a table",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "None": "None",
    "Callable": "a function",
    "Iterable": "a list",
    "Sequence": "a list",
    "Mapping": "a mapping",
    "PathLike": "a path",
    "AllocatorConfig": "an AllocatorConfig",
}
"""What messages call a type."""
_OPTION: Final = "option"
_PART: Final = "part"


def parse_value(text: str) -> object:
    """The value that a Python literal writes; any other text is the string that it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


class UnknownKeywordError(UnknownInputError, TypeError):
    """A keyword that the function does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One field as people write it: `key` in Python and TOML, `flags` on the command line.

    `python` is the parameter of its part's `keywords` that takes its place in Python, if there is one. `annotation` is
    its type in Python, where that is another than the field's. `shown` is its default in help where the value itself
    would say nothing. `least` is its smallest value. A flag that has `choices` stands for the first of them, or is
    followed by one. `read` makes the value of texts and TOML values. A `positional` one is an argument of the command
    and of the function, a `required` one has no default. One that is not `written` is Python's alone.
    """

    help: str
    key: str = ""
    python: str = ""
    annotation: str = ""
    flags: tuple[str, ...] = ()
    kind: Kind | None = None
    types: tuple[type, ...] = ()
    default: Any = None
    shown: str | None = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    least: float | None = None
    read: Callable[[Any], Any] | None = None
    positional: bool = False
    required: bool = False
    written: bool = True

    @property
    def description(self) -> str:
        """The help, with the default where it says something."""
        default = self.shown or (self.default if self.default not in (None, False, (), {}) else "")
        return f"{self.help or self.metavar or self.key.upper()}{f' Default: {default}.' if default else ''}"

    @property
    def flag(self) -> str:
        """The flag that messages name."""
        return max(self.flags, key=len).partition("/")[0]

    def checked(self, value: Any, name: str = "") -> Any:
        """Return `value`; raise `InputError`, naming the option `name`, for one that it cannot have."""
        name = name or self.key
        if self.kind == "list" and isinstance(value, int):
            value = str(value)
        if self.kind == "list" and not isinstance(value, str) and isinstance(value, Iterable):
            value = ",".join(map(str, value))
        if value is None and self.default is None:
            return value
        if self.types:
            check_type(name, value, self.types)
        if self.least is not None and isinstance(value, int | float) and value < self.least:
            raise InputError(f"{name} is {value:g}: it must be at least {self.least:g}")
        if self.choices and not isinstance(value, bool) and value not in self.choices:
            raise UnknownInputError(name.lstrip("-").replace("_", " "), str(value), self.choices)
        return value

    def taken(self, value: Any, spell: Callable[[Option], str], python: bool) -> Any:
        """Return what `value` means, as Python gives it or as it is written."""
        return self.checked(self.read(value) if self.read and not python else value, spell(self))

    def keyword(self, declared_in: type) -> Parameter:
        """The parameter of a Python function, of an option that is `declared_in` a request."""
        kind = Parameter.POSITIONAL_OR_KEYWORD if self.positional else Parameter.KEYWORD_ONLY
        default = Parameter.empty if self.required else self.default
        return _spelled_out(Parameter(self.key, kind, default=default, annotation=self.annotation), declared_in)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A request that is a field of another: `cls` without some of its fields, others changed.

    It is there always, or only `when` ``"any"`` of its options is given, or the one of that key: the others are for
    `purpose`, and refused without it. `keywords` makes it of Python's keywords where those are not all its fields.
    """

    cls: type
    without: frozenset[str] = frozenset()
    when: str = ""
    purpose: str = ""
    keywords: Callable[..., Any] | None = None
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def options(self) -> dict[str, Option]:
        return {
            name: replace(choice, **self.changes.get(name, {}))
            for name, choice in _own_options(self.cls).items()
            if name not in self.without
        }

    def value(
        self,
        name: str,
        given_values: Mapping[str, Any],
        spell: Callable[[Option], str] = lambda choice: choice.key,
        python: bool = False,
    ) -> Any:
        """The part, called `name` in its request, of the values by their keys."""
        options = self.options()
        if (whole := self._whole(name, given_values, options)) is not None:
            return whole
        if missing := next((o for o in options.values() if o.required and o.key not in given_values), None):
            raise InputError(f"{spell(missing)} is missing")
        values = {n: given_values[o.key] for n, o in options.items() if given_values.get(o.key) is not None}
        if self.when == "any" and not values:
            return None
        if self.when not in ("", "any"):
            asking = next(choice for choice in options.values() if choice.key == self.when)
            if given_values.get(asking.key, asking.default) is None:
                if unused := [options[n] for n in values]:
                    raise InputError(f"{spell(unused[0])} is for {self.purpose.format(spell(asking))}")
                return None
        if python and self.keywords is not None:
            return self.keywords(**self._python_keywords(name, given_values))
        changed = {n: options[n].default for n, change in self.changes.items() if "default" in change and n in options}
        read = {n: options[n].taken(value, spell, python) for n, value in values.items()}
        return self.cls(**(changed | read))

    def _whole(self, name: str, given_values: Mapping[str, Any], options: Mapping[str, Option]) -> Any:
        """The `cls` that a keyword brings whole; None if there is none, or if the keyword is one of the options."""
        lead = self.lead(name)
        whole = given_values.get(lead)
        if isinstance(whole, self.cls):
            others = (key for key in self.keywords_of(name) if key != lead and given_values.get(key) is not None)
            if (twice := next(others, None)) is not None:
                raise InputError(f"{twice} is given twice: the {self.cls.__name__} already holds it")
            return whole
        if whole is not None and lead not in {choice.key for choice in options.values()} | {"model"}:
            raise InputError(f"{lead} is {quoted(str(whole))}: it should be a {self.cls.__name__}")
        return None

    def _python_keywords(self, name: str, given_values: Mapping[str, Any]) -> dict[str, Any]:
        parameters = self.keywords_of(name)
        for key, parameter in parameters.items():
            if parameter.default is Parameter.empty and key not in given_values:
                raise InputError(f"{key} is missing")
        return {key: given_values[key] for key in parameters if key in given_values}

    def lead(self, name: str) -> str:
        """The keyword that takes a `cls` whole, of the part called `name` in its request."""
        return name if self.when in ("", "any") else self.when

    def keywords_of(self, name: str) -> dict[str, Parameter]:
        """The keywords of a Python function for the part called `name` in its request."""
        if self.keywords is not None:
            omitted = {choice.key for n, choice in _own_options(self.cls).items() if n in self.without}
            parameters = [p for p in signature(self.keywords).parameters.values() if p.kind is not p.VAR_KEYWORD]
            same = {choice.key: choice.keyword(self.cls) for choice in self.options().values() if not choice.python}
            return {p.name: _spelled_out(p, self.cls) for p in parameters if p.name not in omitted} | same
        keywords = {choice.key: choice.keyword(self.cls) for choice in self.options().values()}
        lead = self.lead(name)
        whole = keywords.pop(lead, Parameter(lead, Parameter.KEYWORD_ONLY, default=None, annotation="None"))
        if not any("annotation" in change for change in self.changes.values()):
            types = f"{self.cls.__name__} | {whole.annotation}"
            whole = whole.replace(annotation=types if types.endswith("None") else f"{types} | None")
        return {lead: whole} | keywords


def option(default: Any, help: str, **settings: Any) -> Any:
    """Declare a field with its `help` and the settings of an `Option`; without a `default` it has to be given."""
    factory = settings.pop("factory", None)
    shown = None if default is MISSING or factory else default
    metadata = {_OPTION: Option(help=help, default=shown, required=default is MISSING, **settings)}
    return field(default_factory=factory, metadata=metadata) if factory else field(default=default, metadata=metadata)


def part(cls: type, **settings: Any) -> Any:
    """Declare a field that holds another request: the settings of a `Part`, and changes by the names of its fields."""
    named = {name: settings.pop(name) for name in ("when", "purpose", "keywords") if name in settings}
    without = frozenset(settings.pop("without", ()))
    declared = Part(cls=cls, without=without, changes=settings, **named)
    return field(default_factory=lambda: declared.value("", {}), metadata={_PART: declared})


REQUIRED: Final = MISSING
"""The default of an option that has to be given."""


@cache
def _own_options(cls: Any) -> dict[str, Option]:
    return {declared.name: _named(declared) for declared in fields(cls) if _OPTION in declared.metadata}


def _named(declared: Field[Any]) -> Option:
    """The option of a field, with what follows from the field's name and annotation."""
    choice: Option = declared.metadata[_OPTION]
    annotation = choice.annotation or str(declared.type)
    words = annotation.split(" | ")
    key = choice.key or declared.name
    types = tuple(_PYTHON[word] for word in words) if set(words) <= set(_PYTHON) else ()
    kind = choice.kind or _KINDS.get(words[0], "text")
    metavar = choice.metavar or ("N" if kind == "count" and not choice.choices else None)
    flags = choice.flags or (f"--{key.replace('_', '-')}",)
    number = (int, *types) if float in types else types
    return replace(choice, key=key, annotation=annotation, kind=kind, types=number, metavar=metavar, flags=flags)


@cache
def options_of(request: Any) -> dict[str, Option]:
    """All options of a request and its parts by their keys, in the order of their fields."""
    options: dict[str, Option] = {}
    own = _own_options(request)
    for declared in fields(request):
        of_part = declared.metadata[_PART].options() if _PART in declared.metadata else {}
        choices = [own[declared.name]] if declared.name in own else of_part.values()
        options |= {choice.key: choice for choice in choices}
    return options


@cache
def keywords_of(request: Any) -> dict[str, Parameter]:
    """The parameters of a Python function with this request, by their names, positional ones first."""
    keywords: dict[str, Parameter] = {}
    for column in fields(request):
        if _PART in column.metadata:
            keywords |= column.metadata[_PART].keywords_of(column.name)
        elif _OPTION in column.metadata:
            choice = _named(column)
            keywords[choice.key] = choice.keyword(request)
    return dict(sorted(keywords.items(), key=lambda item: item[1].kind))


def _spelled_out(parameter: Parameter, declared_in: type) -> Parameter:
    """The parameter with an annotation that says what its aliases stand for, such as ``Literal["train", "eval"]``."""
    aliases = vars(sys.modules[declared_in.__module__])

    def meaning(word: re.Match[str]) -> str:
        alias = aliases.get(word[0])
        if get_origin(alias) not in (Literal, Union, UnionType):
            return word[0]
        return re.sub(r"(\w+\.)+", "", repr(alias)).replace("'", '"')

    return parameter.replace(annotation=re.sub(r"\b(?<!\.)[A-Za-z_]\w*", meaning, str(parameter.annotation)))


def build(
    request: type[T],
    values: Mapping[str, Any],
    *,
    spell: Callable[[Option], str] = lambda choice: choice.key,
    python: bool = False,
) -> T:
    """The request with these values by their keys; `spell` is how messages name an option.

    Raises `InputError` for a value that its option cannot have, and for values that cannot be meant together.
    """
    arguments: dict[str, Any] = {}
    for column in fields(request):  # type: ignore[arg-type]
        if _PART in column.metadata:
            arguments[column.name] = column.metadata[_PART].value(column.name, values, spell=spell, python=python)
        elif _OPTION in column.metadata:
            choice = _named(column)
            if choice.key in values:
                arguments[column.name] = choice.taken(values[choice.key], spell, python)
            elif column.default is MISSING and column.default_factory is MISSING:
                what = choice.help.partition(". ")[0].rstrip(".")
                raise InputError(f"{spell(choice)} is missing{what and f' ({what[0].lower()}{what[1:]})'}")
    return request(**arguments)


def of_keywords(
    request: type[T], keywords: Mapping[str, Any], also: Mapping[str, Parameter]
) -> tuple[T, dict[str, Any]]:
    """The request of a Python call, and the keywords of the function's own, `also`.

    Raises `UnknownKeywordError` for a keyword that there is not, and `InputError` for a value that it cannot have.
    """
    values = dict(keywords)
    accepted = {**keywords_of(request), **also}  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in accepted:
            meant = _keyword_meant(name, request)
            near = (meant,) if meant else None
            raise UnknownKeywordError("keyword", name, accepted, near=near, problem=f"unknown keyword `{name}`")
        _check_annotation(name, value, accepted[name].annotation)
    own = {name: values.pop(name) for name in also if name in values}
    return build(request, values, python=True), own


def _keyword_meant(name: str, request: type) -> str | None:
    """The keyword for which another library has this `name`, and its value if that says one: ``base="nf4"``."""
    choices = {flag: choice for choice in options_of(request).values() for flag in choice.flags}
    choices |= {flag.partition("/")[0]: choice for flag, choice in choices.items()}

    def keyword(flag: re.Match[str]) -> str:
        choice, value = choices[flag[1]], flag[2]
        key = choice.python or choice.key
        if value and choice.kind == "table":
            argument, _, number = value.partition("=")
            return f'{key}={{"{argument}": {number}}}'
        return f'{key}="{value}"' if value else key

    meant = other_name(name, choices)
    return meant and re.sub(r"(--[a-z-]+)(?: (?!--)(\S+))?", keyword, meant)


def _check_annotation(key: str, value: object, annotation: str) -> None:
    """Raise `InputError` for a value of another type; a class goes by its name, since torch may not be imported yet."""
    plain = re.sub(r"\b(\w+\.)+", "", annotation)
    while "[" in plain:
        plain = re.sub(r"\[[^][]*\]", "", plain)
    types = plain.split(" | ")
    # Models and optimizers are checked where they are used, choices with the other ones in view.
    if {"Any", "Module", "Optimizer", "Literal"} & {*types}:
        return
    classes = {base.__name__ for base in type(value).__mro__}
    if isinstance(value, bool | str):  # True is no number here, and a text no list
        fits = bool({"bool", "str"} & classes & {*types})
    else:
        fits = any(name in classes or isinstance(value, _ABSTRACT.get(name, ())) for name in types)
    if not fits:
        *others, last = (_WORDS.get(name, f"a {name}") for name in types)
        wanted = f"{', '.join(others)} or {last}" if others else last
        raise InputError(f"{key} is {quoted(str(value))}: it should be {wanted}")


def values_of(request: Any) -> dict[str, Any]:
    """Return the values of a request and its parts by their keys, of options that have another than their default."""
    values: dict[str, Any] = {}
    for column in fields(request):
        value = getattr(request, column.name)
        if _PART in column.metadata:
            options = column.metadata[_PART].options() if value is not None else {}
            own = {choice.key: (choice, getattr(value, name)) for name, choice in options.items()}
        else:
            own = {choice.key: (choice, value) for choice in [_named(column)]} if _OPTION in column.metadata else {}
        values |= {key: member for key, (choice, member) in own.items() if member not in (choice.default, None, (), {})}
    return values


def check_fields(request: Any) -> None:
    """Raise `InputError` for a field whose value its option cannot have: for a dataclass's ``__post_init__``."""
    for name, choice in _own_options(type(request)).items():  # type: ignore[arg-type]
        choice.checked(getattr(request, name))


def check_type(key: str, value: object, types: tuple[type, ...]) -> None:
    """Raise `InputError` for a value of none of the types that its key has."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        meant = " or ".join(dict.fromkeys(_WORDS[kind.__name__] for kind in types if kind is not type(None)))
        raise InputError(f"{key} is {quoted(str(value))}: it should be {meant}")
