"""The arguments that a script declares with argparse, and leaves at their defaults."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memsize.processes.patches import assigned, calling


@contextmanager
def whole_number_defaults() -> Iterator[dict[str, int]]:
    """Collect the options with a whole number above 0 that parsers leave at their defaults, by their longest name."""
    defaults: dict[str, int] = {}

    def parse(original: Any, parser: ArgumentParser, *arguments: Any, **keywords: Any) -> Any:
        values, rest = original(parser, *arguments, **keywords)
        for action in parser._actions:
            value = getattr(values, action.dest, None)
            if action.option_strings and action.nargs is None and type(value) is int and value == action.default > 0:
                defaults[max(action.option_strings, key=len)] = value
        return values, rest

    with assigned(ArgumentParser, "parse_known_args", calling(parse, ArgumentParser.parse_known_args)):
        yield defaults
