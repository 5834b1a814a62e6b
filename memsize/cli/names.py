"""`memsize gpus`, `memsize models` and `memsize scenarios`: the names that options and targets take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import click
from tabulate import tabulate

from memsize.cli.command import command
from memsize.errors import TargetError, UnknownInputError
from memsize.spec.file_requests import NamesRequest
from memsize.units import GiB


@command(NamesRequest, answers=False)
def gpus(request: NamesRequest) -> None:
    """List the GPUs whose memory is known, or those that PATTERN matches.

    \b
    Such as:
      memsize gpus 4090
      memsize gpus "h*"
    """
    from memsize.device.cards import CARDS

    rows = [
        (
            card.name,
            f"{card.bytes / GiB:.1f} GiB",
            ", ".join(card.aliases) + (f" ({card.platform})" if card.platform != "CUDA" else ""),
        )
        for card in CARDS.values()
        if any(_matches(request.pattern, name) for name in (card.name, *card.aliases))
    ]
    _print(rows, ("name", "memory", "or"), "GPU", request.pattern, CARDS)


@command(NamesRequest, answers=False)
def scenarios(request: NamesRequest) -> None:
    """List the scenarios, or those that PATTERN matches: ways to store and run a model."""
    from memsize.spec.scenario import SCENARIOS

    rows = [(name, scenario.title) for name, scenario in SCENARIOS.items() if _matches(request.pattern, name)]
    _print(rows, ("name", "meaning"), "scenario", request.pattern, SCENARIOS)


@command(NamesRequest, answers=False)
def models(request: NamesRequest) -> None:
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
    _print([(name,) for name in targets if _matches(request.pattern, name)], (), "model", request.pattern, targets)


def _matches(pattern: str, name: str) -> bool:
    pattern, name = pattern.lower(), name.lower()
    return fnmatchcase(name, pattern) if "*" in pattern else pattern in name


def _print(
    rows: Sequence[tuple[str, ...]], titles: Sequence[str], kind: str, pattern: str, names: Iterable[str]
) -> None:
    if not rows:
        raise UnknownInputError(kind, pattern, names, problem=f"no {kind} is called {pattern!r}")
    click.echo(tabulate(rows, titles, tablefmt="simple" if titles else "plain", disable_numparse=True))
