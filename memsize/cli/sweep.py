"""`memsize sweep`: a grid of models, scenarios, batch sizes and GPUs as one table."""

from __future__ import annotations

from pathlib import Path

import click

from memsize.cli.options import WITH_PARQUET, output_options_for
from memsize.cli.output import Destination
from memsize.cli.saved import is_saved
from memsize.cli.working import interrupts_raised, working
from memsize.errors import OutputError
from memsize.processes.spread import BACKENDS, Backend
from memsize.records.sweep import Sweep


@click.command(
    short_help="Show what fits of many models, batches and GPUs.",
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
@click.argument("grid", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Keep each cell in this file, and run only those that it lacks. [default: FILE's name, ending in .jsonl]",
)
@click.option("--retry", is_flag=True, help="Run the cells again that failed.")
@click.option("--fresh", is_flag=True, help="Forget the results that are there, and run all cells.")
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes that run cells side by side. [default: one per core]",
)
@click.option(
    "--backend",
    default="loky",
    show_default=True,
    type=click.Choice(BACKENDS),
    help="Where cells run: loky on this machine, dask or ray on a cluster.",
)
@click.option("--scheduler", metavar="ADDRESS", help="The cluster's scheduler: tcp://10.0.0.1:8786.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Give up on a cell after this time.",
)
@output_options_for(WITH_PARQUET)
def sweep(
    grid: Path,
    results: Path | None,
    retry: bool,
    fresh: bool,
    jobs: int | None,
    backend: Backend,
    scheduler: str | None,
    timeout: float | None,
    output: Destination,
) -> None:
    """Run every cell of a grid: models and patterns of models, scenarios, batch sizes, GPUs.

    FILE is a TOML file whose keys are those of memsize check. Cells that are done are kept in a results file: a sweep
    that was interrupted goes on where it was.
    """
    # What the user's models print goes to stderr: stdout holds the answer and nothing else.
    with output.told_if_interrupted(), working() as progress, interrupts_raised():
        from memsize import api

        found: Sweep
        if is_saved(str(grid)):
            from memsize.analysis.saved_runs import load_kind

            found = load_kind(grid, Sweep.kind)
        else:
            found = api.sweep(
                grid,
                results=results or _beside(grid),
                jobs=jobs,
                backend=backend,
                scheduler=scheduler,
                timeout=timeout,
                retry=retry,
                fresh=fresh,
                progress=progress,
            )
        progress("writing the answer")
        output.keep(found)
        content = found.parquet() if output.format == "parquet" else output.drawn(found)
    output.write(content)


def _beside(file: Path) -> Path:
    if file.suffix == ".jsonl":
        raise OutputError(f"{file} holds results: name the TOML file of the sweep")
    return file.with_suffix(".jsonl")
