"""A command: the options of a request, one call of the API with it, and one answer that is drawn, with the
commands that answer an agent's next question."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import click

from memsize.cli.click_options import (
    MANY,
    Count,
    PathType,
    RequestCommand,
    RequestOption,
    arguments_of,
    is_given,
    parameters,
    request_of,
)
from memsize.cli.output import Color, Destination, Formats, destination
from memsize.cli.working import Session, working
from memsize.errors import InputError
from memsize.files import Content
from memsize.processes.workers import side_by_side
from memsize.records.run_file import is_run_file
from memsize.render import FORMATS, IMAGES
from memsize.spec.options import options_of
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
            try:
                wanted = request_of(request, chosen)
            except InputError as error:
                if options := misplaced(chosen.get("arguments", ())):
                    hint = f"memsize {name} {options[0]} … {chosen['script']} …"
                    raise InputError(f"{error}; give options before the script: {hint}") from None
                raise
            return function(wanted, **values)

        params = [*parameters(request), *also, *outputs, _DEBUG]
        built = RequestCommand(name, params=params, callback=run, help=function.__doc__, **settings)
        built.request = request
        return built

    return decorate


def misplaced(arguments: Iterable[str]) -> list[str]:
    """Return the arguments of the script that are options of this command: these come before the script."""
    own = {flag for parameter in click.get_current_context().command.params for flag in parameter.opts}
    names = (argument.partition("=")[0] for argument in arguments)
    return [name for name in names if name.startswith("--") and name in own]


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
    output.write(text if is_saved(path) else followed(text, output))
    return reply


def followed(text: Content, output: Destination) -> Content:
    """Add the next commands to an answer for an agent."""
    return chain(text, next_commands()) if output.format == "agent" and not isinstance(text, bytes) else text


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


# -- options of an answer ----------------------------------------------------------------------------------------------

depth_option = click.Option(
    ["--depth"],
    type=Count(min=0),
    metavar="N",
    help="Show layers down to this depth, and add deeper ones to their parents.",
)

jobs_option = click.Option(
    ["-j", "--jobs"],
    type=Count(min=1),
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
    file: dict[str, Any] = {"type": PathType(path_type=Path), "metavar": "FILE"}
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


_QUESTIONS = {
    "report": {"fit": "the largest batch that fits a GPU", "timeline": "live memory at each moment"},
    "timeline": {"fit": "the largest batch that fits a GPU", "report": "each layer"},
    "fit": {"timeline": "live memory at each moment", "report": "each layer"},
    "generate": {"serve": "how many sequences a server has room for"},
    "serve": {"generate": "one generation, token by token"},
}
"""What other commands answer about the model that a command was asked about."""


def next_commands() -> Iterator[str]:
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
                if isinstance(value, tuple) and choice.kind not in MANY:  # such as GPUs, where this takes one
                    value = str(value[0]).partition(",")[0]
                texts += arguments_of(choice, value)
        yield f"{title}  {shlex.join(('memsize', name, *texts))}  # {question}\n"
        title = ""
