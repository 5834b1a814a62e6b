"""A request as options of click; the request that a command line makes, and the arguments that ask for one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from memsize.errors import InputError, quoted
from memsize.spec.options import Option, build, options_of
from memsize.spec.project import usual_values


class RequestCommand(click.Command):
    request: type

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the word after a flag for its value only if it is one of its choices."""
        options = options_of(self.request).values()
        choices = {flag: it.choices for it in options if it.kind == "flag" and it.choices for flag in it.flags}
        texts, remaining = list[str](), deque(args)
        takers = {flag: it.description for it in options if it.kind not in ("flag", "texts") for flag in it.flags}
        while remaining:
            text = remaining.popleft()
            if text in takers and remaining and remaining[0] in takers and ctx.allow_interspersed_args:
                ctx.fail(f"{text} has no value: {remaining[0]} follows it")
            if text in takers and not remaining and not ctx.resilient_parsing:
                ctx.fail(f"{text} has no value. {takers[text].rstrip('.')}")
            if values := choices.get(text):
                text = f"{text}={remaining.popleft() if remaining and remaining[0] in values else values[0]}"
            texts.append(text)
        return super().parse_args(ctx, texts)


class Count(click.IntRange):
    """A whole number; click calls it an integer range."""

    name = "whole number"


class PathType(click.Path):
    """The name of a file or a folder; pathlib would take the empty one for the working folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the name is empty", param, ctx)
        if "\0" in str(value):
            self.fail("the name has a null byte, which no file's name has", param, ctx)
        return super().convert(value, param, ctx)


class RequestOption(click.Option):
    """An option of a request: a saved run cannot follow it any more."""

    def __init__(self, declared: Option, **settings: Any) -> None:
        self.declared = declared
        super().__init__([*declared.flags, declared.key], **settings)


def parameters(request: type) -> list[click.Parameter]:
    return [
        _argument(choice) if choice.positional else _option(choice)
        for choice in options_of(request).values()
        if choice.written
    ]


def _argument(choice: Option) -> click.Argument:
    several: dict[str, Any] = {"nargs": -1, "type": click.UNPROCESSED} if choice.kind == "texts" else {}
    if choice.kind in ("path", "count"):
        several["type"] = _type(choice)
    if choice.key in _TARGETS:
        several["shell_complete"] = _complete_files
    if choice.default not in (None, ""):
        several["required"] = False
    return click.Argument([choice.key], metavar=choice.metavar, **several)


def _option(choice: Option) -> RequestOption:
    """The click option of a declared one; its value is used only where it was given."""
    shown = f" [default: {choice.shown}]" if choice.shown else ""
    settings: dict[str, Any] = {"help": choice.help + shown, "metavar": choice.metavar}
    if choice.default not in (None, False, "", ()) and not choice.shown:
        settings |= {"default": choice.default, "show_default": True}
    if choice.kind == "flag" and choice.choices:
        settings |= {"type": _type(choice), "default": None}
    elif choice.kind == "flag":
        settings["is_flag"] = True
        settings.setdefault("default", choice.default)
    elif choice.kind in ("list", "texts", "table"):
        settings |= {"multiple": True, "type": click.STRING}
        if "default" in settings:
            settings["default"] = (settings["default"],)
    else:
        settings["type"] = _type(choice)
    if choice.key in _TARGETS:
        settings["shell_complete"] = _complete_files
    if choice.flag in ("--gpu", "--scenario"):
        settings["shell_complete"] = _complete_names
    return RequestOption(choice, **settings)


_TARGETS = ("target", "inputs", "before", "after", "script")

_complete_files = click.Path().shell_complete


def _complete_names(context: click.Context, option: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The GPUs or scenarios that continue what stands behind the last comma."""
    from memsize.device.cards import CARDS
    from memsize.spec.scenario import SCENARIOS

    names = [*SCENARIOS]
    if "--gpu" in option.opts:  # t4, h100-80gb, rtx-4090
        names = [name.lower().replace(" ", "-").removeprefix("tesla-").removeprefix("geforce-") for name in CARDS]
    before, comma, last = incomplete.rpartition(",")
    return [CompletionItem(f"{before}{comma}{name}") for name in names if name.startswith(last.lower())]


def _type(choice: Option) -> Any:
    if choice.choices:
        return click.Choice(choice.choices)
    if choice.kind == "path":
        return PathType(path_type=Path)
    if choice.kind == "count":
        return click.INT if choice.least is None else Count(min=int(choice.least))
    return click.FLOAT if choice.kind == "number" else click.STRING


def request_of(request: type, values: Mapping[str, Any]) -> Any:
    """The request of those `values` that were given on the command line, and of the usual GPU where none was."""
    options = options_of(request)
    chosen = {
        key: ",".join(value) if options[key].kind == "list" else value
        for key, value in values.items()
        if is_given(key) or (options[key].positional and value is not None)
    }
    usual = usual_values(request, chosen.keys())
    return build(request, usual | chosen, spell=lambda choice: choice.key if choice.positional else choice.flag)


def is_given(name: str) -> bool:
    """Whether the option of that name was given."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


MANY = ("list", "texts", "table")
"""Kinds of options with several values."""


def arguments_of(choice: Option, value: Any) -> Iterator[str]:
    """The arguments of the command line that give an option this value; raises `InputError` for one it can't have."""
    if value is None:
        return
    if choice.kind == "flag":
        on, off = (choice.flag, next(iter(choice.flags[0].split("/")[1:]), ""))
        if value in choice.choices:
            yield f"{on}={value}"
            return
        if not isinstance(value, bool):
            raise InputError(f"{choice.key} is {quoted(str(value))}: it should be true or false")
        yield from filter(None, [on if value else off])
        return
    if choice.kind == "table" and isinstance(value, Mapping):
        texts = [f"{name}={item!r}" for name, item in value.items()]
    elif choice.kind == "table" and not isinstance(value, tuple):
        raise InputError(f"{choice.key} is {quoted(str(value))}: it should be a table")
    elif choice.kind in MANY and isinstance(value, Sequence) and not isinstance(value, str):
        texts = [",".join(map(str, value))] if choice.kind == "list" else [*map(str, value)]
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        texts = [str(value)]
    else:
        raise InputError(f"{choice.key} is {quoted(str(value))}: it should be a text or a number")
    yield from texts if choice.positional else (f"{choice.flag}={text}" for text in texts)
