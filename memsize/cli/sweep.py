"""`memsize sweep`: a grid of models, scenarios, batch sizes and GPUs as one table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from memsize.cli.command import WITH_PARQUET, command, is_saved
from memsize.cli.output import Destination
from memsize.cli.working import interrupts_raised, working
from memsize.errors import InputError, OutputError
from memsize.records.sweep import Sweep
from memsize.spec.requests import SweepRequest


@command(
    SweepRequest,
    formats=WITH_PARQUET,
    epilog="""\b
    Examples:
      memsize sweep sweep.toml
      memsize sweep sweep.toml -o sweep.csv
      memsize sweep sweep.toml --backend dask --scheduler tcp://10.0.0.1:8786 -o sweep.parquet

    \b
    A sweep.toml:
      target = ["timm:resnet*", "torchvision:vgg16"]
      train = "adamw"
      batch_size = [8, 32, 128]
      gpu = ["t4", "a100"]
    """,
)
def sweep(request: SweepRequest, output: Destination) -> None:
    """Run every cell of a grid: models and patterns of models, scenarios, batch sizes, GPUs.

    FILE is a TOML file whose keys are those of memsize check. Cells that are done are kept in a results file: a sweep
    that was interrupted goes on where it was.
    """
    file = Path(str(request.grid))
    if file.is_dir():
        raise InputError(f"{file} is a folder: name the TOML file of the sweep")
    # What the user's models print goes to stderr: stdout holds the answer and nothing else.
    with output.shown_if_interrupted(), working() as progress, interrupts_raised():
        from memsize import api
        from memsize.analysis.step import load_kind

        if is_saved(file):
            table: Sweep = load_kind(file, Sweep.kind)
        else:
            table = api.sweep(replace(request, results=request.results or _beside(file)), progress=progress)
        progress("writing the answer")
        output.keep(table)
        content = table.parquet() if output.format == "parquet" else output.drawn(table)
    output.write(content)


def _beside(file: Path) -> Path:
    if file.suffix == ".jsonl":
        raise OutputError(f"{file} holds results: name the TOML file of the sweep")
    return file.with_suffix(".jsonl")
