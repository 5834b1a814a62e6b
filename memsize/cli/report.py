"""`memsize report`: the layers, the scenarios side by side, and why a model did or didn't shrink."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import click

from memsize.cli.command import answer, command, depth_option, jobs_option
from memsize.cli.output import Destination
from memsize.errors import ForwardError, OutputError
from memsize.records.gpu import DEFAULT_GPU
from memsize.records.report import COLUMNS, Report, column_keys
from memsize.records.trace import Failure, Trace
from memsize.spec.requests import ReportRequest
from memsize.spec.scenario import SCENARIOS
from memsize.spec.stack import INSTALLED

_COLUMNS = click.Option(
    ["--columns"], multiple=True, metavar="NAMES", help="Columns of the layer table, separated by commas."
)


@command(
    ReportRequest,
    also=(jobs_option, depth_option, _COLUMNS),
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
def report(
    request: ReportRequest, output: Destination, jobs: int | None, depth: int | None, columns: tuple[str, ...]
) -> None:
    """Show what each byte of TARGET is for, scenario by scenario, and why it did or didn't shrink.

    TARGET is path.py:Name or package.module:name, where the name is a Module class, a function that returns a Module,
    or a Module instance; you can omit the name if the file defines only one Module class. TARGET can also be a
    library's model, which needs no --input: hf:config.json, timm:resnet50, torchvision:vgg16, or a Hub id
    such as meta-llama/Llama-3.1-8B.
    """
    names = tuple(name.strip() for text in columns for name in text.split(",") if name.strip())
    if columns and not names:
        raise OutputError(f"no column given: choose from {', '.join(COLUMNS)}")
    # JSON has peaks for every scenario, also where no GPU was named.
    peaks = request.gpu.allocator or request.gpu.stack != INSTALLED or output.format == "json"
    gpu = replace(request.gpu, name=request.gpu.name or (DEFAULT_GPU if peaks else None))
    errors: list[ForwardError] = []

    def ask(api: Any, progress: Callable[[str], None]) -> Report:
        try:
            reply: Report = api.report(replace(request, gpu=gpu), progress=progress)
        except ForwardError as error:
            if error.trace is None:
                raise
            errors.append(error)
            return Report(error.trace.model, error.trace, failure=error.trace.failure)
        return reply

    shown = answer(
        output,
        Report.kind,
        request.model.model,
        ask,
        jobs=1 if request.execute else jobs,
        depth=depth,
        columns=column_keys(names) if columns else None,
    )
    if shown.stopped is not None:
        # A text on stdout has said why already.
        if output.file is None and output.format in ("text", "markdown"):
            options = corrected_options(shown.trace, shown.stopped)
            hint = f"; perhaps it takes {options}" if options else ": the report says why"
            raise ForwardError(f"the forward failed in {_layer(shown.stopped)}{hint}")
        raise errors[0] if errors else ForwardError(describe_failure(shown.stopped), shown.trace)


def _layer(failure: Failure) -> str:
    return f"{failure.layer} ({failure.type})" if failure.layer else failure.type


def corrected_options(trace: Trace, failure: Failure) -> str:
    """Options of an input that the first layer takes: ``-i 3,32,32 -b 64``. Empty where that is not clear."""
    weight = next((tensor.spec.shape for tensor in trace.tensors if tensor.name == f"{failure.layer}.weight"), ())
    if len(trace.inputs) != 1 or failure.inputs != (str(trace.inputs[0].spec),) or len(weight) < 2:
        return ""
    batch, *size = (size or 1 for size in trace.inputs[0].spec.shape)
    channels, dimensions = weight[1] or 1, len(weight) - 1
    if failure.type == "Linear" and size:
        right = [channels] if prod(size) == channels else [*size[:-1], channels]
    elif failure.type in ("Conv1d", "Conv2d", "Conv3d") and dimensions - 1 <= len(size) <= dimensions + (batch == 1):
        if len(size) > dimensions:  # the batch stands in the size
            batch, *size = size
        right = _image(channels, size, dimensions)
    else:
        return ""
    text = f"-i {','.join(map(str, right))}{f' -b {batch}' if batch > 1 else ''}"
    return text if (batch, *right) != trace.inputs[0].spec.shape else ""


def _image(channels: int, size: list[int], dimensions: int) -> list[int]:
    """The size of an image with its channels first: `size` may lack them, have them last, or lack a dimension."""
    if len(size) < dimensions:
        return [*size, size[-1]] if size[0] == channels else [channels, *size]
    return [channels, *(size[:-1] if size[-1] == channels != size[0] else size[1:])]


def describe_failure(failure: Failure) -> str:
    """Say in one sentence which layer stopped the forward, its input, and why."""
    inputs = f", given {', '.join(failure.inputs)}" if failure.inputs else ""
    return f"the forward failed in {_layer(failure)}{inputs}: {failure.reason}"
