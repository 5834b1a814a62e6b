"""Options that commands share: the GPU to simulate, units, formats and the output file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import get_args

import click

from memsize.cli.output import Color, Destination, Formats, destination
from memsize.cli.session import Session
from memsize.cli.values import Option, grouped, listed
from memsize.errors import UnknownOutputError
from memsize.render import FORMATS, IMAGES
from memsize.spec.scenario import DEFAULT
from memsize.units import DECIMAL, UNITS


def output_options_for(formats: Formats) -> Option:
    """The parameter `output`, a `Destination` in one of `formats`, and the flag --debug."""
    formats = {**formats, **IMAGES}
    options = (_UNITS, _format_option(formats), _FILE, _SAVE, _FORCE, _FULL, _COLOR, _DEBUG)
    return grouped("output", options, partial(_output, formats=formats))


def _output(
    unit: str | None,
    format: str | None,
    file: Path | None,
    save: Path | None,
    force: bool,
    full: bool,
    color: Color,
    formats: Formats,
) -> Destination:
    return destination(file, format, force, formats, unit and parse_unit(unit), save, full, color)


def parse_unit(text: str) -> str:
    """The unit called `text`, in any case: mib and MIB are MiB."""
    known = (*UNITS, *DECIMAL)
    found = text if text in known else next((unit for unit in known if unit.lower() == text.lower()), None)
    if found is None:
        raise UnknownOutputError("unit", text, known)
    return found


def _format_option(formats: Formats) -> Option:
    return click.option(
        "-f",
        "--format",
        "format",
        metavar="FORMAT",
        help=f"Output format: {', '.join(formats)}. [default: from the suffix of -o, else text]",
    )


def _set_debug(context: click.Context, _: click.Parameter, debug: bool) -> None:
    session = context.find_object(Session)
    if session is not None:
        session.debug = debug


scenarios_option = listed(
    "-s",
    "--scenario",
    "scenarios",
    metavar="NAMES",
    help=f"Scenarios separated by commas, or all. [default: {', '.join(DEFAULT)}]",
)
"""The parameter `scenarios`: several names, or None for the usual ones."""

scenario_option = click.option(
    "-s",
    "--scenario",
    default="as-given",
    show_default=True,
    metavar="NAME",
    help="How to store and run the model.",
)
"""The parameter `scenario`: one name."""

depth_option = click.option(
    "--depth",
    type=click.IntRange(min=0),
    metavar="N",
    help="Show layers down to this depth, and add deeper ones to their parents.",
)

gpu_option = click.option("--gpu", metavar="NAME", help="GPU to simulate: a100, t4, h100 … [default: a100]")

stack_option = click.option(
    "--stack", metavar="RELEASES", help="PyTorch and CUDA on the GPU: torch=2.6,cuda=12.4. [default: those installed]"
)

allocator_option = click.option(
    "--allocator",
    metavar="SETTINGS",
    help="Settings of the caching allocator, as in PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True …",
)

parallel_option = click.option(
    "--parallel",
    metavar="STRATEGY",
    help="Train on several GPUs, and show one: ddp=8[,views], fsdp=8[,offload], hsdp=4x8, tp=8, pp=4, "
    "fsdp=8,tp=8,pp=4, dp=4.",
)

jobs_option = click.option(
    "-j",
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes that run scenarios side by side. [default: one per core]",
)

execute_option = click.option(
    "--execute", is_flag=True, help="Compute for real, on the CPU: for models with data-dependent control flow."
)

_UNITS = click.option(
    "-u",
    "--units",
    "unit",
    metavar="UNIT",
    help="Unit of sizes: B, KiB, MiB, GiB, or the decimal kB, MB, GB. [default: MiB, or smaller for a tiny model]",
)
_FILE = click.option(
    "-o",
    "--output",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write to this file, in the format given by its suffix.",
)
_SAVE = click.option(
    "--save",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also save the run, as run.memsize: every command takes that file in place of TARGET.",
)
_FORCE = click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
_FULL = click.option(
    "--full", is_flag=True, help="Show all of the answer. [default: what fits the terminal's height; elsewhere all]"
)
_COLOR = click.option(
    "--color",
    type=click.Choice(get_args(Color)),
    default="auto",
    help="When to use colors. [default: on a terminal, unless NO_COLOR is set]",
)
_DEBUG = click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_set_debug,
    help="Show tracebacks of errors.",
)

WITH_SNAPSHOT = {**FORMATS, "snapshot": (".pickle", ".pkl")}
"""The formats of what holds a run's events: a snapshot is for PyTorch's memory viewer."""

WITH_PARQUET = {**FORMATS, "parquet": (".parquet",)}
"""The formats of a table that other programs read."""

output_options = output_options_for(FORMATS)
"""The parameter `output` in one of the formats of a report, and the flag --debug."""
