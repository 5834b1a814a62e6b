"""`memsize timeline`: what is alive at every moment of a step, drawn or as a snapshot for PyTorch's memory viewer."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from memsize.cli.options import check_maker, output_options, parse_unit, run_options
from memsize.cli.output import Destination, destination
from memsize.cli.progress import Progress
from memsize.cli.report import parse_arguments
from memsize.device.cards import DEFAULT as DEFAULT_GPU
from memsize.device.cards import card
from memsize.inputs import parse_inputs
from memsize.loading.target import parse_target
from memsize.render.timeline import FORMATS, render
from memsize.scenario import scenario_named
from memsize.training import Training

if TYPE_CHECKING:
    from memsize.steptrace import StepTrace


@click.command(
    short_help="What is alive at every moment of a step.",
    epilog="""\b
    Examples:
      memsize timeline model.py:Net --input 3,224,224 --train adamw
      memsize timeline model.py:Net --input 3,224,224 --train adamw --scenario amp-bf16 -o step.html
      memsize timeline model.py:Net --input 3,224,224 --train sgd -o step.pickle

    \b
    A .pickle is a PyTorch memory snapshot: https://pytorch.org/memory_viz opens it.
    """,
)
@run_options
@click.option("-s", "--scenario", default="fp32", show_default=True, metavar="NAME", help="How the model is run.")
@partial(output_options, formats=FORMATS)
def timeline(
    target: str,
    inputs: tuple[str, ...],
    maker: str | None,
    seq_len: int | None,
    batch_size: int,
    arguments: tuple[str, ...],
    mode: Literal["train", "eval"],
    train: str | None,
    gpu: str | None,
    steps: int,
    loss: str | None,
    accumulate: int,
    ema: bool,
    allocator: str | None,
    execute: bool,
    scenario: str,
    unit: str,
    format: str | None,
    file: Path | None,
    force: bool,
) -> None:
    """Live bytes by role over the operations of training steps of TARGET, or of one inference without --train.

    TARGET is path.py:Name or package.module:name, as memsize report takes it.
    """
    # Everything that can be wrong with the command itself shows before torch is loaded.
    parse_target(target)
    check_maker(maker, inputs)
    parse_inputs(inputs)
    values, asked, where = parse_arguments(arguments), scenario_named(scenario), card(gpu or DEFAULT_GPU)
    if train:
        Training(train, loss, steps, accumulate, ema=ema)
    output, unit = destination(file, format, force, FORMATS), parse_unit(unit)

    # What the user's model prints goes to stderr: stdout holds the timeline and nothing else.
    with Progress() as progress, contextlib.redirect_stdout(sys.stderr):
        from memsize import api

        progress(f"{asked.name}, batch {batch_size}")
        traced = api.trace(
            target,
            inputs or None,
            input_data=maker,
            seq_len=seq_len,
            scenario=asked.name,
            optimizer=train,
            loss=loss,
            steps=steps,
            accumulate=accumulate,
            ema=ema,
            config=allocator,
            execute=execute,
            gpu=where.name,
            batch_size=batch_size,
            arguments=values,
            mode=mode,
        )
        progress("writing the timeline")
        content = _content(traced, output, unit)
    output.write(content)


def _content(traced: StepTrace, output: Destination, unit: str) -> str | bytes:
    if output.format == "snapshot":
        from memsize.snapshot import pickled

        return pickled(traced.trace, traced.config)
    from memsize.timeline import timeline

    return render(timeline(traced.trace, traced.config), output.format, unit, output.width)
