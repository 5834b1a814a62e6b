"""A command: the options of a request, one call of the API with it, and one answer that is drawn."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from memsize.cli.output import Color, Destination, Formats, destination
from memsize.cli.working import Session, working
from memsize.errors import InputError, quoted
from memsize.processes.workers import side_by_side
from memsize.records.run_file import is_run_file
from memsize.render import FORMATS, IMAGES
from memsize.spec.options import Option, build, options_of
from memsize.spec.project import with_usual_gpu
from memsize.units import AUTO

WITH_CALLS = {"speedscope": (".speedscope.json",), **FORMATS}
"""The formats of an answer that holds the calls behind what is alive. The longest suffix comes first."""

WITH_SNAPSHOT = {**WITH_CALLS, "snapshot": (".pickle", ".pkl")}
"""The formats of an answer that holds a run's events: a snapshot is for PyTorch's memory viewer."""

WITH_PARQUET = {**FORMATS, "parquet": (".parquet",)}
"""The formats of a table that other programs read."""


def command(
    request: type,
    *,
    formats: Formats = FORMATS,
    also: Sequence[click.Parameter] = (),
    answers: bool = True,
    shows_saved: bool = True,
    **settings: Any,
) -> Callable[[Callable[..., Any]], RequestCommand]:
    """Make a command of a function of a `request` and, where it `answers`, of a `Destination`, its `output`; `also` are
    options that it takes by name. Where it `shows_saved`, it shows an answer that it saved again.

    `settings` are those of `click.Command`.
    """

    def decorate(function: Callable[..., Any]) -> RequestCommand:
        name = function.__name__.replace("_", "-")
        outputs = _output_options(formats, name if shows_saved else "") if answers else ()

        def run(**values: Any) -> Any:
            if answers:
                output_values = {str(option.name): values.pop(str(option.name)) for option in outputs}
                values["output"] = destination(formats={**formats, **IMAGES, "agent": ()}, **output_values)
            chosen = {key: values.pop(key) for key in options_of(request) if key in values}
            return function(request_of(request, chosen), **values)

        params = [*parameters(request), *also, *outputs, _DEBUG]
        built = RequestCommand(name, params=params, callback=run, help=function.__doc__, **settings)
        built.request = request
        return built

    return decorate


class RequestCommand(click.Command):
    """A command whose options make a `request`."""

    request: type


class _Path(click.Path):
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
    """The arguments and options of a request."""
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
    if choice.kind == "flag":
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
        return _Path(path_type=Path)
    if choice.kind == "count":
        return click.INT if choice.least is None else click.IntRange(min=int(choice.least))
    return click.FLOAT if choice.kind == "number" else click.STRING


def request_of(request: type, values: Mapping[str, Any]) -> Any:
    """The request of those `values` that were given on the command line, and of the usual GPU where none was."""
    options = options_of(request)
    chosen = {
        key: ",".join(value) if options[key].kind == "list" else value
        for key, value in values.items()
        if is_given(key) or (options[key].positional and value is not None)
    }
    return build(
        request, with_usual_gpu(request, chosen), spell=lambda choice: choice.key if choice.positional else choice.flag
    )


def is_given(name: str) -> bool:
    """Whether the option of that name was given."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def answer(
    output: Destination,
    kind: str,
    path: object,
    ask: Callable[[Any, Callable[[str], None]], Any],
    *,
    jobs: int | None = None,
    **view: Any,
) -> Any:
    """Draw what `ask`, a function of the API and of a progress line, answers, or the saved run at `path`.

    What the user's model prints goes to stderr: stdout holds the answer and nothing else.
    """
    with output.shown_if_interrupted(**view), working() as progress, side_by_side(jobs):
        from memsize import api
        from memsize.analysis.step import load_kind

        reply = load_kind(str(path), kind) if is_saved(path) else ask(api, progress)
        progress("writing the answer")
        output.keep(reply)
        text = output.drawn(reply, **view)
    if output.format == "agent" and not isinstance(text, bytes) and not is_saved(path):
        text = chain(text, _next_commands())
    output.write(text)
    return reply


_MANY = ("list", "texts", "table")
"""Kinds of options with several values."""
_QUESTIONS = {
    "report": {"fit": "the largest batch that fits a GPU", "timeline": "what is alive at each moment"},
    "timeline": {"fit": "the largest batch that fits a GPU", "report": "each layer"},
    "fit": {"timeline": "what is alive at each moment", "report": "each layer"},
    "generate": {"serve": "how many sequences a server has room for"},
    "serve": {"generate": "one generation, token by token"},
}
"""What other commands answer about the model that a command was asked about."""


def _next_commands() -> Iterator[str]:
    """The lines, for an agent, with the commands that answer the next question, with the options that were given."""
    context = click.get_current_context()
    assert isinstance(context.command, RequestCommand)
    group = context.parent and context.parent.command
    own = {choice.flag: key for key, choice in options_of(context.command.request).items() if not choice.positional}
    title = "Next\n"
    for name, question in _QUESTIONS.get(str(context.command.name), {}).items():
        following = group.get_command(context, name) if isinstance(group, click.Group) else None
        if not isinstance(following, RequestCommand):
            continue
        texts: list[str] = []
        for key, choice in options_of(following.request).items():
            key = own.get(choice.flag, key)
            if choice.written and key in context.params and (choice.positional or is_given(key)):
                value = context.params[key]
                if isinstance(value, tuple) and choice.kind not in _MANY:  # such as GPUs, where this takes one
                    value = str(value[0]).partition(",")[0]
                texts += arguments_of(choice, value)
        yield f"{title}  {shlex.join(('memsize', name, *texts))}  # {question}\n"
        title = ""


def asking(function: str, request: Any) -> Callable[[Any, Callable[[str], None]], Any]:
    """A function of the API with a `request`, for `answer`; it says what it is doing."""
    return lambda api, progress: getattr(api, function)(request, progress=progress)


def parts_shown(progress: Any, output: Destination) -> dict[str, Any]:
    """The keywords by which a search tells what it is doing, and what a row says once it is there."""
    unit = output.unit or AUTO
    return {"progress": progress, "found": lambda part: progress.found(part.text(unit))}


def is_saved(target: object, *also: str) -> bool:
    """Whether `target` is a saved run; raises `InputError` where an option was given that a run cannot follow any more.

    `also` names further options that the command applies to a saved run.
    """
    if not isinstance(target, str | Path) or not is_run_file(target):
        return False
    refuse_options(f"{target} is a saved run", *also)
    return True


def refuse_options(why: str, *also: str) -> None:
    """Raise `InputError`, which begins with `why`, where an option was given that asks for a run, other than `also`."""
    for parameter in click.get_current_context().command.params:
        name = str(parameter.name)
        if isinstance(parameter, RequestOption) and is_given(name) and name not in also:
            raise InputError(f"{why}: {parameter.declared.flag} would need the model to be run again")


def arguments_of(choice: Option, value: Any) -> Iterator[str]:
    """The arguments of the command line that give an option this value; raises `InputError` for one it can't have."""
    if value is None:
        return
    if choice.kind == "flag":
        on, off = (choice.flag, next(iter(choice.flags[0].split("/")[1:]), ""))
        if not isinstance(value, bool):
            raise InputError(f"{choice.key} is {quoted(str(value))}: it should be true or false")
        yield from filter(None, [on if value else off])
        return
    if choice.kind == "table" and isinstance(value, Mapping):
        texts = [f"{name}={item!r}" for name, item in value.items()]
    elif choice.kind == "table" and not isinstance(value, tuple):
        raise InputError(f"{choice.key} is {quoted(str(value))}: it should be a table")
    elif choice.kind in _MANY and isinstance(value, Sequence) and not isinstance(value, str):
        texts = [",".join(map(str, value))] if choice.kind == "list" else [*map(str, value)]
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        texts = [str(value)]
    else:
        raise InputError(f"{choice.key} is {quoted(str(value))}: it should be a text or a number")
    yield from texts if choice.positional else (f"{choice.flag}={text}" for text in texts)


# -- options of an answer ----------------------------------------------------------------------------------------------

depth_option = click.Option(
    ["--depth"],
    type=click.IntRange(min=0),
    metavar="N",
    help="Show layers down to this depth, and add deeper ones to their parents.",
)

jobs_option = click.Option(
    ["-j", "--jobs"],
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes that run scenarios side by side. [default: one per core]",
)


def _set_debug(context: click.Context, _: click.Parameter, debug: bool) -> None:
    if session := context.find_object(Session):
        session.debug = debug


_DEBUG = click.Option(
    ["--debug"], is_flag=True, is_eager=True, expose_value=False, callback=_set_debug, help="Show tracebacks of errors."
)


def _output_options(formats: Formats, command: str) -> tuple[click.Option, ...]:
    file: dict[str, Any] = {"type": _Path(path_type=Path), "metavar": "FILE"}
    unit = "Unit of sizes: B, KiB, MiB, GiB, or the decimal kB, MB, GB. [default: by size]"
    named = f"{', '.join({**formats, **IMAGES})}, or agent: verdict, findings, next commands"
    form = f"Output format: {named}. [default: from the suffix of -o, else text]"
    saved = f": memsize {command} run.memsize shows it again." if command else ", for memsize.load."
    return (
        click.Option(["-u", "--units", "unit"], metavar="UNIT", help=unit),
        click.Option(["-f", "--format", "format"], metavar="FORMAT", help=form),
        click.Option(["-o", "--output", "file"], **file, help="Write to this file, in the format given by its suffix."),
        click.Option(["--save", "saved"], **file, help=f"Also save the answer, as run.memsize{saved}"),
        click.Option(["--force"], is_flag=True, help="Overwrite the file if it exists."),
        click.Option(
            ["--full"],
            is_flag=True,
            help="Show all of the answer. [default: what fits the terminal's height; elsewhere all]",
        ),
        click.Option(
            ["--color"],
            type=click.Choice(get_args(Color)),
            default="auto",
            help="When to use colors. [default: on a terminal, unless NO_COLOR is set]",
        ),
    )
