"""`memsize checkpoint`: what takes up the space in a file, and why."""

from __future__ import annotations

import click

from memsize.cli.command import answer, command
from memsize.cli.output import Destination
from memsize.spec.requests import CheckpointRequest

_DEPTH = click.Option(
    ["--depth"],
    type=click.IntRange(min=0),
    metavar="N",
    help="Show modules down to this depth within each part. [default: a readable number of rows]",
)


@command(
    CheckpointRequest,
    also=(_DEPTH,),
    short_help="Show what takes up the space in a checkpoint file.",
    epilog="""\b
    Examples:
      memsize checkpoint last.ckpt
      memsize checkpoint model.safetensors.index.json --depth 3
      memsize checkpoint llama-Q4_K_M.gguf --units GiB
      memsize checkpoint last.ckpt --against model.py:Net --arg width=64
      memsize checkpoint last.ckpt -o last.html
    """,
)
def checkpoint(request: CheckpointRequest, output: Destination, depth: int | None) -> None:
    """Show what takes up the space in FILE: parts, dtypes, modules, and every byte outside the tensors.

    FILE is a file written by torch.save (.pt, .pth, .bin, .ckpt), a safetensors or GGUF file, an index.json of several
    files, or a folder with one of these. Only headers are read, and nothing that a pickle names is run.
    """
    answer(output, "checkpoint", request.path, lambda api, _: api.checkpoint(request), depth=depth)
