"""`memsize check`: a project's models against the limits in its pyproject.toml, which `memsize init` begins."""

from __future__ import annotations

from dataclasses import replace

import click

from memsize.cli.command import command
from memsize.cli.output import Destination
from memsize.cli.working import interrupts_raised, say, working
from memsize.records.check import Check
from memsize.records.finding import SEVERITIES, Severity
from memsize.render import FORMATS
from memsize.spec.file_requests import CheckRequest
from memsize.spec.project import find_project
from memsize.spec.requests import InitRequest

_FORMATS = {"terminal": (), **FORMATS, "github": (), "junit": (".xml",)}
"""`terminal` is another name of text."""


@command(
    CheckRequest,
    formats=_FORMATS,
    also=(
        click.Option(
            ["--fail-on"],
            default="error",
            show_default=True,
            type=click.Choice([*SEVERITIES, "never"]),
            help="The least serious finding that gives exit status 1.",
        ),
    ),
    shows_saved=False,
    epilog="""\b
    Examples:
      memsize check
      memsize check --update
      memsize check --format github --fail-on warning

    \b
    Exit status: 0 if all holds, 1 if a limit or baseline is broken, 2 if something could not be checked.
    """,
)
def check(request: CheckRequest, output: Destination, fail_on: Severity) -> int:
    """Check the models of a project against limits and baselines: [[tool.memsize.target]] in its pyproject.toml.

    PATHS are projects: folders, or files such as pyproject.toml. A folder stands for the nearest pyproject.toml from
    there upwards. [default: the working folder]
    """
    output = replace(output, format="text") if output.format == "terminal" else output
    files = dict.fromkeys(map(find_project, request.projects))
    # What the user's models print goes to stderr: stdout holds the answer and nothing else.
    with working() as progress:
        from memsize import api

        checks = [api.check(replace(request, paths=(file,)), progress=progress) for file in files]
        whole = Check(
            ", ".join(check.project for check in checks),
            tuple(model for check in checks for model in check.models),
            tuple(name for check in checks for name in check.written),
        )
        output.keep(whole)
        text = output.drawn(whole)
    output.write(text)
    return whole.status(fail_on)


@command(
    InitRequest,
    answers=False,
    epilog="""\b
    Example:
      memsize init model.py:Net --input 3,224,224 --train adamw --gpu t4
    """,
)
def init(request: InitRequest) -> None:
    """Add a section about TARGET to the pyproject.toml of FOLDER, with limits a tenth above what it needs today.

    [default: the working folder]
    """
    with working(), interrupts_raised():
        from memsize import api

        file, section = api.init(request)
    say(f"Added to {file}:\n{section}")
