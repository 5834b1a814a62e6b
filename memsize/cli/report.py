"""`memsize report`: the layers, the scenarios side by side, and why a model did or didn't shrink."""

from __future__ import annotations

from typing import Any

import click

from memsize.cli.options import (
    allocator_option,
    depth_option,
    execute_option,
    gpu_option,
    jobs_option,
    output_options,
    parallel_option,
    scenarios_option,
    stack_option,
)
from memsize.cli.output import Destination
from memsize.cli.saved import is_saved
from memsize.cli.subject import subject_options, training_options
from memsize.cli.values import listed
from memsize.cli.working import working
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.cards import card
from memsize.errors import ForwardError, OutputError
from memsize.processes.workers import side_by_side
from memsize.records.gpu import DEFAULT_GPU
from memsize.records.report import COLUMNS, Report, column_keys
from memsize.records.trace import Failure
from memsize.spec.model_request import ModelRequest
from memsize.spec.parallel import spread_of
from memsize.spec.scenario import SCENARIOS, select
from memsize.spec.stack import Stack
from memsize.spec.training import Training


@click.command(
    short_help="Show what each byte is for, and why a model did or didn't shrink.",
    epilog=f"""\b
    Scenarios: {", ".join(list(SCENARIOS)[:8])},
      {", ".join(list(SCENARIOS)[8:])},
      torchao:CONFIG (such as torchao:Int8WeightOnlyConfig), or all.

    \b
    Columns: {", ".join(COLUMNS)}.

    \b
    Examples:
      memsize report model.py:Net --input 3,224,224 --batch-size 8
      memsize report model.py:Net --arg width=64 --arg norm=batch --input 3x32x32
      memsize report nets.text:build --input input_ids=512:int64 --scenario fp32,amp-bf16
      memsize report hf:config.json --seq-len 2048 --train adamw
      memsize report model.py:Net --input 3,64,64 -o report.html
    """,
)
@subject_options
@training_options
@parallel_option
@gpu_option
@stack_option
@allocator_option
@execute_option
@scenarios_option
@jobs_option
@depth_option
@listed("--columns", metavar="NAMES", help="Columns of the layer table, separated by commas.")
@output_options
def report(
    subject: ModelRequest,
    training: Training | None,
    parallel: str | None,
    gpu: str | None,
    stack: str | None,
    allocator: str | None,
    execute: bool,
    scenarios: str | None,
    jobs: int | None,
    depth: int | None,
    columns: str | None,
    output: Destination,
) -> None:
    """Show what each byte of TARGET is for, scenario by scenario, and why it did or didn't shrink.

    TARGET is path.py:Name or package.module:name, where the name is a Module class, a function that returns a Module,
    or a Module instance; you can omit the name if the file defines only one Module class. TARGET can also be a
    library's model, which needs no --input: hf:config.json, hf:llama, timm:resnet50, torchvision:vgg16.
    """
    # Everything that can be wrong with the command itself shows before torch is loaded.
    select(scenarios)
    chosen, software = _columns(columns), Stack.of(stack)
    config = AllocatorConfig.parse(allocator, software.release) if allocator else None
    spread = spread_of(parallel, training, execute=execute)

    # What the user's model prints goes to stderr: stdout holds the report and nothing else.
    with (
        output.told_if_interrupted(depth=depth, columns=chosen),
        working() as progress,
        side_by_side(1 if execute else jobs),
    ):
        found, error = (
            _shown(subject.model)
            if is_saved(subject.model)
            else _found(
                subject,
                scenarios=scenarios,
                train=training,
                parallel=spread,
                gpu=_gpu(gpu or (DEFAULT_GPU if allocator or stack else None), output.format),
                stack=software,
                config=config,
                execute=execute,
                progress=progress,
            )
        )
        progress("writing the report")
        output.keep(found)
        text = output.drawn(found, depth=depth, columns=chosen)
    output.write(text)
    if error is not None:
        # A text on stdout has said why already.
        told = output.file is None and output.format in ("text", "markdown")
        raise ForwardError(_short(found.stopped)) if told and found.stopped else error


def _gpu(name: str | None, form: str) -> str | None:
    """The card that peaks are for. JSON has them for every scenario, also where no card was named."""
    if name is None:
        return DEFAULT_GPU if form == "json" else None
    return card(name).name


def _found(subject: ModelRequest, **options: Any) -> tuple[Report, ForwardError | None]:
    """What the API reports, and the error of a forward that failed: the layers that ran before it are shown too."""
    from memsize import api

    try:
        found = api.report(subject, **options)
    except ForwardError as error:
        if error.trace is None:
            raise
        return Report(error.trace.model, error.trace, failure=error.trace.failure), error
    return found, _stopped(found)


def _shown(path: Any) -> tuple[Report, ForwardError | None]:
    """A saved report, and the error of a forward that had failed."""
    from memsize.analysis.saved_runs import load_kind

    found: Report = load_kind(path, Report.kind)
    return found, _stopped(found)


def _stopped(found: Report) -> ForwardError | None:
    stopped = found.stopped
    return ForwardError(describe_failure(stopped), found.trace) if stopped else None


def _short(failure: Failure) -> str:
    return f"the forward failed in {_layer(failure)}: the report says why"


def _layer(failure: Failure) -> str:
    return f"{failure.layer} ({failure.type})" if failure.layer else f"the model itself ({failure.type})"


def describe_failure(failure: Failure) -> str:
    """Which layer stopped the forward, what it was given, and why, in one sentence."""
    given = f", given {', '.join(failure.inputs)}" if failure.inputs else ""
    return f"the forward failed in {_layer(failure)}{given}: {failure.reason}"


def _columns(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise OutputError(f"no column given: choose from {', '.join(COLUMNS)}")
    return column_keys(names)
