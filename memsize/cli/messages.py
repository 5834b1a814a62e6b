"""What a command says beside its answer: on stderr, without anything that a terminal would obey."""

from __future__ import annotations

import click

from memsize.printable import printable_lines


def say(text: str) -> None:
    """Print a message to stderr."""
    click.echo(printable_lines(text), err=True)
