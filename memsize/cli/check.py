"""`memsize check`: a project's models against the limits and baselines in its pyproject.toml."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from memsize.cli.messages import say
from memsize.cli.options import gpu_option, output_options_for
from memsize.cli.output import Destination
from memsize.cli.subject import several_subjects_options, step_options
from memsize.cli.values import listed
from memsize.cli.working import interrupts_raised, working
from memsize.device.cards import card
from memsize.errors import InputError
from memsize.loading.target import parse_target
from memsize.records.check import SEVERITIES, Check
from memsize.records.gpu import DEFAULT_GPU
from memsize.render import FORMATS
from memsize.spec.model_request import ModelRequest
from memsize.spec.project import find_project
from memsize.spec.scenario import scenario_named
from memsize.spec.training import Training

_FORMATS = {"terminal": (), **FORMATS, "github": (), "sarif": (".sarif",), "junit": (".xml",)}
"""`terminal` is another name of text."""
_OF_INIT = frozenset(
    "inputs maker seq_len batch_size arguments mode train loss accumulate ema gpu scenario".split()
)  # fmt: skip


@click.command(
    short_help="Check limits and baselines of a project's models.",
    epilog="""\b
    Examples:
      memsize check
      memsize check --update
      memsize check --format github --fail-on warning
      memsize check --init model.py:Net --input 3,224,224 --train adamw --gpu t4

    \b
    Exit status: 0 if all holds, 1 if a limit or baseline is broken, 2 if something could not be checked.
    """,
)
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--update", is_flag=True, help="Write the baselines instead of comparing with them.")
@listed("--select", metavar="CODES", help="Findings that count as errors, separated by commas.")
@listed("--ignore", metavar="CODES", help="Findings to leave out, separated by commas.")
@click.option(
    "--fail-on",
    default="error",
    show_default=True,
    type=click.Choice([*SEVERITIES, "never"]),
    help="The least serious finding that gives exit status 1.",
)
@click.option("--init", "target", metavar="TARGET", help="Write a first section about this model, run as follows.")
@several_subjects_options
@step_options
@gpu_option
@click.option(
    "-s", "--scenario", default="as-given", show_default=True, metavar="NAME", help="How to store and run it."
)
@output_options_for(_FORMATS)
def check(
    paths: tuple[Path, ...],
    update: bool,
    select: str | None,
    ignore: str | None,
    fail_on: str,
    target: str | None,
    subject: ModelRequest,
    training: Training | None,
    gpu: str | None,
    scenario: str,
    output: Destination,
) -> int:
    """Check the models of a project against limits and baselines: [[tool.memsize.target]] in its pyproject.toml.

    PATHS are projects: folders, or files such as pyproject.toml. A folder stands for the nearest pyproject.toml from
    there upwards. [default: the working folder]
    """
    output = replace(output, format="text") if output.format == "terminal" else output
    if target is not None:
        _begin(paths, replace(subject, model=target), training, gpu, scenario_named(scenario).name)
        return 0
    _refuse_options_of_init()
    places = [find_project(path) for path in paths or (Path(),)]

    # What the user's models print goes to stderr: stdout holds the answer and nothing else.
    with working() as progress:
        from memsize import api

        found = [
            api.check(place, select=_codes(select), ignore=_codes(ignore), update=update, progress=progress)
            for place in dict.fromkeys(places)
        ]
        whole = Check(
            ", ".join(each.project for each in found),
            tuple(model for each in found for model in each.models),
            tuple(name for each in found for name in each.written),
        )
        output.keep(whole)
        text = output.drawn(whole)
    output.write(text)
    return whole.status(fail_on)  # type: ignore[arg-type]


def _codes(text: str | None) -> list[str]:
    return [code.strip() for code in (text or "").split(",") if code.strip()]


def _begin(
    paths: tuple[Path, ...], subject: ModelRequest, training: Training | None, gpu: str | None, scenario: str
) -> None:
    parse_target(str(subject.model))
    card(gpu or DEFAULT_GPU)
    if len(paths) > 1 or not all(path.is_dir() for path in paths):
        raise InputError("--init writes to the pyproject.toml of one folder")
    with working(), interrupts_raised():
        from memsize.api.starting import start_project

        file, section = start_project(paths[0] if paths else Path(), subject, training, gpu, scenario)
    say(f"Added to {file}:\n{section}")


def _refuse_options_of_init() -> None:
    """Raise `InputError` where an option of --init was given without it."""
    context = click.get_current_context()
    for option in (each for each in context.command.params if isinstance(each, click.Option)):
        given = context.get_parameter_source(str(option.name)) is click.core.ParameterSource.COMMANDLINE
        if given and option.name in _OF_INIT:
            name = max(option.opts, key=len)
            raise InputError(f"{name} is for --init: how a target is run stands in its section of pyproject.toml")
