"""`memsize layout`: which layers keep channels last, what loses it, and what that copies."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Literal

import click

from memsize.cli.options import check_maker, input_options, output_options, parse_unit
from memsize.cli.output import destination
from memsize.cli.progress import Progress
from memsize.cli.report import parse_arguments
from memsize.inputs import parse_inputs
from memsize.loading.target import parse_target
from memsize.scenario import scenario_named


@click.command(
    short_help="Which layers keep channels last, and what copies.",
    epilog="""\b
    Examples:
      memsize layout model.py:Net --input 3,224,224
      memsize layout timm:convnext_tiny --batch-size 32 --scenario amp-bf16
      memsize layout torchvision:r3d_18 -o layout.html
    """,
)
@input_options
@click.option("-s", "--scenario", default="as-given", show_default=True, metavar="NAME", help="How the model is run.")
@click.option(
    "--depth", type=click.IntRange(min=0), metavar="N", help="Show layers down to this depth; deeper ones are added up."
)
@output_options
def layout(
    target: str,
    inputs: tuple[str, ...],
    maker: str | None,
    seq_len: int | None,
    batch_size: int,
    arguments: tuple[str, ...],
    mode: Literal["train", "eval"],
    scenario: str,
    depth: int | None,
    unit: str,
    format: str | None,
    file: Path | None,
    force: bool,
) -> None:
    """The memory formats of TARGET under channels last: which op loses it, and what is copied to rearrange.

    TARGET is path.py:Name, package.module:name or a library's model, as memsize report takes it. It is run as it is and
    once more with images (4-D) and volumes (5-D) in channels last, weights and inputs.
    """
    # Everything that can be wrong with the command itself shows before torch is loaded.
    parse_target(target)
    check_maker(maker, inputs)
    specs, values, asked = parse_inputs(inputs), parse_arguments(arguments), scenario_named(scenario)
    where, unit = destination(file, format, force), parse_unit(unit)

    # What the user's model prints goes to stderr: stdout holds the report and nothing else.
    with Progress() as progress, contextlib.redirect_stdout(sys.stderr):
        from memsize import api
        from memsize.render.layout import render

        found = api.audit_layout(
            target,
            inputs=specs,
            input_data=maker,
            seq_len=seq_len,
            batch_size=batch_size,
            arguments=values,
            scenario=asked.name,
            mode=mode,
            progress=progress,
        )
        text = render(found, where.format, unit=unit, depth=depth, width=where.width)
    where.write(text)
