"""`memsize explain`: what a memory snapshot of a real GPU shows."""

from __future__ import annotations

from pathlib import Path

import click

from memsize.cli.options import output_options
from memsize.cli.output import Destination
from memsize.cli.saved import is_saved
from memsize.cli.working import working


@click.command(
    short_help="Explain a memory snapshot of a real GPU, as after an out-of-memory error.",
    epilog="""\b
    Examples:
      memsize explain snapshot.pickle
      memsize explain oom.pickle --beside run.memsize
      memsize explain snapshot.pickle -o snapshot.html

    \b
    To record one:
      torch.cuda.memory._record_memory_history(max_entries=100000)
      ... your program ...
      torch.cuda.memory._dump_snapshot("snapshot.pickle")
    """,
)
@click.argument("path", type=click.Path(path_type=Path), metavar="FILE")
@click.option(
    "--beside",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Compare with the peak that this saved run predicts: of memsize run, timeline or report --train.",
)
@click.option("--device", type=click.IntRange(min=0), metavar="N", help="GPU to explain. [default: the fullest]")
@output_options
def explain(path: Path, beside: Path | None, device: int | None, output: Destination) -> None:
    """Show what was alive in FILE, a snapshot by torch.cuda.memory._dump_snapshot: what it was for, the lines that made
    it, and what was free in pieces. Nothing in the file is run.
    """
    with working() as progress:
        from memsize import api
        from memsize.analysis.saved_runs import load_kind

        progress(f"reading {path}")
        if is_saved(str(path)):
            found = load_kind(path, "explanation")
        else:
            found = api.explain(path, beside=beside, device=device)
        output.keep(found)
        text = output.drawn(found)
    output.write(text)
