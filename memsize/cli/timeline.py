"""`memsize timeline`: live memory over a training step, drawn or as a snapshot for PyTorch's memory viewer."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from memsize.cli.options import (
    WITH_SNAPSHOT,
    allocator_option,
    execute_option,
    gpu_option,
    output_options_for,
    parallel_option,
    scenario_option,
    stack_option,
)
from memsize.cli.output import Destination
from memsize.cli.saved import is_saved
from memsize.cli.subject import subject_options, training_options
from memsize.cli.working import working
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.cards import card
from memsize.files import Content
from memsize.records.gpu import DEFAULT_GPU
from memsize.spec.model_request import ModelRequest
from memsize.spec.parallel import spread_of
from memsize.spec.scenario import scenario_named
from memsize.spec.stack import Stack
from memsize.spec.training import Training

if TYPE_CHECKING:
    from memsize.analysis.step import StepTrace


@click.command(
    short_help="Show live memory over a training step.",
    epilog="""\b
    Examples:
      memsize timeline model.py:Net --input 3,224,224 --train adamw
      memsize timeline model.py:Net --input 3,224,224 --train adamw --scenario amp-bf16 -o step.html
      memsize timeline hf:config.json --seq-len 2048 --train adamw --parallel fsdp=8 --gpu h100
      memsize timeline model.py:Net --input 3,224,224 --train sgd -o step.pickle

    \b
    A .pickle is a PyTorch memory snapshot, which https://pytorch.org/memory_viz displays.
    """,
)
@subject_options
@training_options
@parallel_option
@gpu_option
@stack_option
@allocator_option
@execute_option
@scenario_option
@output_options_for(WITH_SNAPSHOT)
def timeline(
    subject: ModelRequest,
    training: Training | None,
    parallel: str | None,
    gpu: str | None,
    stack: str | None,
    allocator: str | None,
    execute: bool,
    scenario: str,
    output: Destination,
) -> None:
    """Show the live memory of TARGET over its training steps, by role; without --train, over one inference.

    TARGET is path.py:Name, package.module:name or a library's model, as for memsize report.
    """
    # Everything that can be wrong with the command itself shows before torch is loaded.
    asked, where, software = scenario_named(scenario), card(gpu or DEFAULT_GPU), Stack.of(stack)
    config = AllocatorConfig.of(allocator, software.release)
    spread = spread_of(parallel, training, execute=execute)

    # What the user's model prints goes to stderr: stdout holds the timeline and nothing else.
    with working() as progress:
        from memsize import api
        from memsize.analysis.saved_runs import load_step

        if is_saved(subject.model, "scenario", "allocator"):
            traced = load_step(str(subject.model), _given("scenario", scenario))
            traced = replace(traced, config=config) if allocator else traced
        else:
            progress(f"{asked.name}, batch {subject.batch_size}")
            traced = api.trace(
                subject,
                **(asdict(training) if training else {"optimizer": None}),
                scenario=asked.name,
                parallel=spread,
                gpu=where.name,
                stack=software,
                config=config,
                execute=execute,
            )
        output.keep(traced)
        progress("writing the timeline")
        content = _content(traced, output)
    output.write(content)


def _given(name: str, value: str) -> str | None:
    """The value of an option, None where it is its default."""
    return value if click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE else None


def _content(traced: StepTrace, output: Destination) -> Content:
    if output.format == "snapshot":
        from memsize.analysis.snapshot import pickled

        return pickled(traced.trace, traced.config)
    from memsize.analysis.timeline import timeline

    return output.drawn(timeline(traced.trace, traced.config, card(traced.gpu)))
