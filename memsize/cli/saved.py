"""Saved runs in place of TARGET: a command that only reads a run shows one from its file, without the model."""

from __future__ import annotations

import click
from click.core import ParameterSource

from memsize.errors import InputError
from memsize.records.run_file import is_run_file

_SHOWS = frozenset({"unit", "format", "file", "save", "force", "full", "color", "debug", "depth", "columns", "jobs"})
"""Options that say how a run is shown or made, and do not change it."""


def is_saved(target: object, *also: str) -> bool:
    """Whether `target` is a saved run; raises `InputError` where an option was given that a run cannot follow any more.

    `also` names further options that the command applies to a saved run.
    """
    if not isinstance(target, str) or not is_run_file(target):
        return False
    refuse_options(f"{target} is a saved run", *also)
    return True


def refuse_options(why: str, *also: str) -> None:
    """Raise `InputError`, which begins with `why`, where an option was given that asks for a run, other than `also`."""
    context = click.get_current_context()
    for option in (each for each in context.command.params if isinstance(each, click.Option)):
        name = str(option.name)
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if given and name not in _SHOWS and name not in also:
            raise InputError(f"{why}: {max(option.opts, key=len)} would need the model to be run again")
