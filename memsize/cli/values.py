"""Options that belong together reach a command as one value: a group of click options and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any

import click

Option = Callable[[Callable[..., Any]], Callable[..., Any]]
"""What `click.option` and `click.argument` return."""


def listed(*names: str, default: str | None = None, **settings: Any) -> Option:
    """An option whose value is a list, separated by commas: given twice (``--gpu t4 --gpu h100``), it is both lists."""
    return click.option(
        *names,
        multiple=True,
        default=None if default is None else (default,),
        callback=lambda context, option, given: ",".join(given) if given else None,
        **settings,
    )


def grouped(name: str, options: Sequence[Option], make: Callable[..., object]) -> Option:
    """A decorator that gives a command `options`, and one parameter `name` in their place: what `make` returns of them.

    `make` takes them by name and raises `MemsizeError` for what cannot be meant, before anything heavy is imported.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        taken: list[str] = []

        def run(**given: Any) -> Any:
            value = make(**{key: given.pop(key) for key in taken})
            return command(**{name: value}, **given)

        decorated: Callable[..., Any] = update_wrapper(run, command)
        before = len(_parameters(decorated))
        for option in reversed(options):
            decorated = option(decorated)
        taken += [str(parameter.name) for parameter in _parameters(decorated)[before:] if parameter.expose_value]
        return decorated

    return decorate


def _parameters(command: Callable[..., Any]) -> list[click.Parameter]:
    """The parameters that decorators have given `command` so far, the last one first."""
    return getattr(command, "__click_params__", [])
