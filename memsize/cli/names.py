"""`memsize gpus`, `memsize models` and `memsize scenarios`: the names that options and targets take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

import click
from tabulate import tabulate

from memsize.errors import TargetError, UnknownInputError
from memsize.units import GiB

_PATTERN = click.Argument(["pattern"], default="", required=False)
"""A part of a name, or with ``*`` the whole of it, without regard to case."""


def _listing(function: Callable[[str], None]) -> click.Command:
    return click.Command(function.__name__, params=[_PATTERN], callback=function, help=function.__doc__)


@_listing
def gpus(pattern: str) -> None:
    """List the GPUs whose memory is known, or those that PATTERN matches.

    \b
    Such as:
      memsize gpus 4090
      memsize gpus "h*"
    """
    from memsize.device.cards import CARDS

    rows = [
        (card.name, ", ".join(card.aliases), f"{card.bytes / GiB:.1f} GiB", card.platform)
        for card in CARDS.values()
        if any(_matches(pattern, name) for name in (card.name, *card.aliases))
    ]
    _print(rows, ("name", "or", "memory", "platform"), "GPU", pattern, CARDS)


@_listing
def scenarios(pattern: str) -> None:
    """List the scenarios, or those that PATTERN matches: ways to store and run a model."""
    from memsize.spec.scenario import SCENARIOS

    rows = [(name, scenario.title) for name, scenario in SCENARIOS.items() if _matches(pattern, name)]
    _print(rows, ("name", "meaning"), "scenario", pattern, SCENARIOS)


@_listing
def models(pattern: str) -> None:
    """List the models of the Hub with a preset, and those that the installed timm, torchvision and transformers define.

    PATTERN shows those that it matches.

    \b
    Such as:
      memsize models resnet50
      memsize models llama-3
      memsize models "timm:vit_*_384"
    """
    from memsize.loading.presets import presets
    from memsize.loading.target import LIBRARIES

    targets = list(presets())
    for library in LIBRARIES:
        try:
            from memsize.loading.hubs import model_names

            targets += [f"{library}:{name}" for name in model_names(library)]
        except (TargetError, ModuleNotFoundError):  # it or torch is not installed, or cannot be imported
            continue
    _print([(name,) for name in targets if _matches(pattern, name)], (), "model", pattern, targets)


def _matches(pattern: str, name: str) -> bool:
    pattern, name = pattern.lower(), name.lower()
    return fnmatchcase(name, pattern) if "*" in pattern else pattern in name


def _print(
    rows: Sequence[tuple[str, ...]], titles: Sequence[str], kind: str, pattern: str, names: Iterable[str]
) -> None:
    if not rows:
        raise UnknownInputError(kind, pattern, names, problem=f"no {kind} is called {pattern!r}")
    click.echo(tabulate(rows, titles, tablefmt="simple" if titles else "plain", disable_numparse=True))
