"""`memsize checkpoint`: what takes up the space in a file, and why."""

from __future__ import annotations

from pathlib import Path

import click

from memsize.cli.options import output_options
from memsize.cli.output import Destination
from memsize.cli.saved import is_saved
from memsize.cli.subject import parse_arguments
from memsize.cli.working import working
from memsize.errors import InputError
from memsize.loading.target import parse_target


@click.command(
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
@click.argument("path", type=click.Path(path_type=Path), metavar="FILE")
@click.option(
    "--against",
    "target",
    metavar="TARGET",
    help="Compare with the tensors of this model, a target of memsize report such as model.py:Net.",
)
@click.option(
    "--arg", "arguments", multiple=True, metavar="NAME=VALUE", help="Argument for its constructor. Repeatable."
)
@click.option(
    "--depth",
    type=click.IntRange(min=0),
    metavar="N",
    help="Show modules down to this depth within each part. [default: a readable number of rows]",
)
@output_options
def checkpoint(
    path: Path,
    target: str | None,
    arguments: tuple[str, ...],
    depth: int | None,
    output: Destination,
) -> None:
    """Show what takes up the space in FILE: parts, dtypes, modules, and every byte outside the tensors.

    FILE is a file written by torch.save (.pt, .pth, .bin, .ckpt), a safetensors or GGUF file, an index.json of several
    files, or a folder with one of these. Only headers are read, and nothing that a pickle names is run.
    """
    values = parse_arguments(arguments)
    if target is None and values:
        raise InputError("--arg is for the model of --against: name one")
    if target is not None:
        parse_target(target)

    with working() as progress:
        from memsize import api
        from memsize.analysis.saved_runs import load_kind

        progress(f"reading {path}")
        if is_saved(str(path)):
            found = load_kind(path, "checkpoint")
        else:
            found = api.read_checkpoint(path, against=target, arguments=values)
        output.keep(found)
        text = output.drawn(found, depth=depth)
    output.write(text)
