"""The commands as tools of an agent: the JSON schema of each input, and the command line that an input stands for.

Both follow from the command's request. A tool reads files of one folder, and runs code of that folder and of the
libraries whose models memsize knows by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path
from sys import modules, stdlib_module_names
from typing import Any, Final

import click

from memsize.cli import memsize
from memsize.cli.click_options import RequestCommand, arguments_of
from memsize.errors import InputError, MemsizeError, UnknownInputError, quoted
from memsize.loading.target import parse_revision, parse_target
from memsize.spec.options import Kind, Option, options_of

_NAMES: Final = "report fit run timeline generate serve explain checkpoint gpus".split()
_WITHHELD: Final = ("allow_writes",)
_CODE: Final = ("target", "inputs", "assistant_model", "against", "step")
"""Options whose value may name a module, from which code is run."""
_TYPES: Final[Mapping[Kind, Mapping[str, Any]]] = {
    "text": {"type": ["string", "number"]},
    "path": {"type": "string"},
    "count": {"type": "integer"},
    "number": {"type": "number"},
    "flag": {"type": "boolean"},
    "list": {"type": ["string", "number", "array"], "items": {"type": ["string", "number"]}},
    "texts": {"type": ["string", "array"], "items": {"type": "string"}},
    "table": {"type": "object"},
}


@dataclass(frozen=True, slots=True)
class Tool:
    """One command, with the options that an agent may set."""

    command: RequestCommand

    @property
    def name(self) -> str:
        return str(self.command.name)

    @property
    def description(self) -> str:
        """The help of the command, without its options."""
        return re.sub(r"\n(?!\n)", " ", cleandoc(self.command.help or "").replace("\b\n", "")).replace("\n ", "\n\n")

    @property
    def options(self) -> dict[str, Option]:
        options = options_of(self.command.request).items()
        return {key: choice for key, choice in options if choice.written and key not in _WITHHELD}

    @property
    def schema(self) -> dict[str, Any]:
        properties = {key: _property(choice) for key, choice in self.options.items()}
        required = [key for key, choice in self.options.items() if choice.positional and choice.required]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    @property
    def is_saved(self) -> bool:
        """Whether its answer can be saved, and drawn for an agent."""
        return any(parameter.name == "saved" for parameter in self.command.params)

    def command_line(self, values: Mapping[str, Any], saved: Path) -> list[str]:
        """The arguments of `memsize` for an input, whose answer is also saved to a file; raises `InputError`."""
        options = self.options
        if (unknown := next((key for key in values if key not in options), None)) is not None:
            raise UnknownInputError("argument", str(unknown), options)
        texts = {key: [*arguments_of(choice, values.get(key))] for key, choice in options.items()}
        flags = [text for key, choice in options.items() if not choice.positional for text in texts[key]]
        output = ["--format=agent", f"--save={saved}"] if self.is_saved else []
        return [
            *(self.name, *flags, *output, "--"),
            *(text for key, choice in options.items() if choice.positional for text in texts[key]),
        ]

    def check_inside(self, values: Mapping[str, Any], folder: Path) -> None:
        """Raise `InputError` for an input that reads a file outside `folder`, or runs other code."""
        from memsize.analysis.explain.error_text import is_message

        for key, value in values.items():
            for text in _strings(value):
                if self.name == "explain" and is_message(text):
                    continue  # it is read as it is, and names no file
                _check_paths(text, folder)
                if key in _CODE:
                    _check_module(text, folder)
        if values.get("module"):
            _check_module(str(values.get("script")), folder)


def tools() -> dict[str, Tool]:
    context = click.Context(memsize)
    commands = (memsize.get_command(context, name) for name in _NAMES)
    return {str(command.name): Tool(command) for command in commands if isinstance(command, RequestCommand)}


def _property(choice: Option) -> dict[str, Any]:
    schema = {**_TYPES[choice.kind or "text"], "description": choice.description}
    if choice.choices:
        switch, types = ([True, False], ["boolean", "string"]) if choice.kind == "flag" else ([], "string")
        schema |= {"type": types, "enum": [*switch, *choice.choices]}
    if choice.least is not None:
        schema["minimum"] = choice.least
    return schema


def _strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for item in value.values():
                yield from _strings(item)
        case Sequence():
            for item in value:
                yield from _strings(item)


def _check_paths(text: str, folder: Path) -> None:
    """Raise `InputError` where `text`, or a part of it such as the file of a target, is a path out of `folder`."""
    for part in (text, *re.split(r"[:=,;?&]", text)):
        try:
            is_inside = "\0" not in part and (folder / Path(part).expanduser()).resolve().is_relative_to(folder)
        except (OSError, RuntimeError):  # no such home folder, a circle of links
            is_inside = False
        if not is_inside:
            raise InputError(f"{quoted(text)} is outside {folder}, the folder that this server may read")


def _check_module(text: str, folder: Path) -> None:
    """Raise `InputError` where `text` is a target in a module that is not of `folder`."""
    revision = parse_revision(text)
    try:
        module = parse_target(revision.target if revision else text).module
    except MemsizeError:  # the command says what is wrong with a target
        return
    package = (module or "").partition(".")[0]
    if package in stdlib_module_names or package in modules:
        is_inside = False  # whatever lies in the folder, Python has this one already
    else:
        is_inside = PathFinder.find_spec(package, [str(folder)]) is not None or find_spec(package) is None
    if module and not is_inside:
        raise InputError(f"{quoted(module)} is a module outside {folder}, the folder that this server may run")
