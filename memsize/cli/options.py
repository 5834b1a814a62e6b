"""Options that every command with an output has: how sizes are drawn, in which format, and where to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from memsize.cli.session import Session
from memsize.errors import OutputError
from memsize.nearest import suggestion
from memsize.render import FORMATS
from memsize.units import DECIMAL, UNITS

Command = TypeVar("Command", bound=Callable[..., Any])


def output_options(command: Command) -> Command:
    """Give `command` the parameters `unit`, `format`, `file` and `force`, and the flag --debug."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def parse_unit(text: str) -> str:
    """The unit called `text`, in any case: mib and MIB are MiB."""
    known = (*UNITS, *DECIMAL)
    found = text if text in known else next((unit for unit in known if unit.lower() == text.lower()), None)
    if found is None:
        raise OutputError(f"no unit {text!r}: {suggestion(text, known)}")
    return found


def _set_debug(context: click.Context, _: click.Parameter, debug: bool) -> None:
    session = context.find_object(Session)
    if session is not None:
        session.debug = debug


_OPTIONS = (
    click.option(
        "-u",
        "--units",
        "unit",
        default="MiB",
        show_default=True,
        metavar="UNIT",
        help="Unit of sizes: B, KiB, MiB, GiB, or the decimal kB, MB, GB.",
    ),
    click.option(
        "-f",
        "--format",
        "format",
        metavar="FORMAT",
        help=f"One of {', '.join(FORMATS)}. [default: by the suffix of -o, else text]",
    ),
    click.option(
        "-o",
        "--output",
        "file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write to this file, in the format of its suffix.",
    ),
    click.option("--force", is_flag=True, help="Overwrite the file if it exists."),
    click.option(
        "--debug",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_set_debug,
        help="Show the traceback of an error.",
    ),
)
