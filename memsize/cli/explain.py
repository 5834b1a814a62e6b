"""`memsize explain`: what a memory snapshot of a real GPU shows."""

from __future__ import annotations

from memsize.cli.command import answer, command
from memsize.cli.output import Destination
from memsize.spec.requests import ExplainRequest


@command(
    ExplainRequest,
    short_help="Explain a memory snapshot of a real GPU, as after an out-of-memory error.",
    epilog="""\b
    Examples:
      memsize explain snapshot.pickle
      memsize explain oom.pickle --against run.memsize
      memsize explain snapshot.pickle -o snapshot.html

    \b
    To record one:
      torch.cuda.memory._record_memory_history(max_entries=100000)
      ... your program ...
      torch.cuda.memory._dump_snapshot("snapshot.pickle")
    """,
)
def explain(request: ExplainRequest, output: Destination) -> None:
    """Show what was alive in FILE, a snapshot by torch.cuda.memory._dump_snapshot: what it was for, the lines that made
    it, and what was free in pieces. Nothing in the file is run.
    """
    answer(output, "explanation", request.snapshot, lambda api, _: api.explain(request))
