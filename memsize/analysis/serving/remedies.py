"""What would let a server start that does not: each is another way to serve the model, and measured as the first is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from memsize.analysis.runner import Runner
from memsize.analysis.serving.tensor_parallel import part_of
from memsize.device.cards import CARDS
from memsize.errors import ForwardError, InputError, ScenarioError
from memsize.records.fit import Remedied, RemedyRow
from memsize.records.gpu import Card
from memsize.spec.scenario import Scenario, quantized_from
from memsize.spec.serving import Serving
from memsize.units import format_bytes

UTILIZATION: Final = 0.95
"""The largest part of a card that is tried."""
_CARDS: Final = (2, 4, 8)


@dataclass(frozen=True)
class Served:
    """A model on one card, how it is served, and how it is stored."""

    runner: Runner
    serving: Serving
    scenario: Scenario

    @property
    def budget(self) -> int:
        """The bytes of its card that the server may take."""
        return int(self.runner.gpu.bytes * self.serving.utilization)


Needs = Callable[[Served], int]
"""What a server needs on each card for a first request."""


@dataclass(frozen=True)
class Remedy:
    """Another way to serve; `apply` raises `InputError` where it means nothing."""

    name: str
    title: str
    cost: str
    changes: Literal["nothing", "speed", "numbers", "training", "hardware"]
    apply: Callable[[Served], Served]


def try_remedies(base: Served, context: int, needs: Needs) -> Remedied:
    """What each remedy does to what a server needs for one request of `context` tokens, most bytes saved first."""
    peak = needs(base)
    rows = [_row(remedy, base, peak, needs) for remedy in _REMEDIES]
    rows.append(_first_that_fits([_several(cards) for cards in _CARDS], base, peak, needs))
    rows += [_first_that_fits(larger, base, peak, needs)] if (larger := list(_larger(base, peak))) else []
    rows.sort(key=lambda row: -(row.saved or 0))
    return Remedied(base.scenario.name, base.runner.gpu.name, context, base.budget, peak, tuple(rows))


def _first_that_fits(remedies: Sequence[Remedy], base: Served, peak: int, needs: Needs) -> RemedyRow:
    """The row of the first that is enough, or of the last."""
    for remedy in remedies:
        row = _row(remedy, base, peak, needs)
        if row.outcome in ("fits", "not here"):
            break
    return row


def _row(remedy: Remedy, base: Served, peak: int, needs: Needs) -> RemedyRow:
    said = (remedy.name, remedy.title, remedy.cost, remedy.changes)
    try:
        other = remedy.apply(base)
        needed = needs(other)
    except (InputError, ForwardError, ScenarioError) as error:
        return RemedyRow(*said, "not here", reason=str(error))
    more = other.budget - base.budget
    outcome: Literal["fits", "saves", "no help"] = (
        "fits" if needed <= other.budget else "saves" if needed - more < peak else "no help"
    )
    return RemedyRow(*said, outcome, needed, peak - needed)


def _stored_as(name: str, title: str) -> Remedy:
    def apply(served: Served) -> Served:
        if served.scenario.recipe == "quantized":
            raise InputError("the weights are quantized already")
        return replace(served, scenario=quantized_from(served.scenario, name))

    return Remedy(f"{title} weights", f"--scenario {name}", "rounded weights", "numbers", apply)


def _fp8_cache(served: Served) -> Served:
    if served.serving.kv_dtype is not None:
        raise InputError(f"the cache is in {served.serving.kv_dtype} already")
    return replace(served, serving=replace(served.serving, kv_dtype="fp8"))


def _smaller_steps(served: Served) -> Served:
    tokens = served.serving.batched_tokens // 4
    if tokens < 1:
        raise InputError("a step has no fewer tokens")
    return replace(served, serving=replace(served.serving, batched_tokens=tokens))


def _more_of_the_card(served: Served) -> Served:
    if served.serving.utilization >= UTILIZATION:
        raise InputError(f"the server may take {served.serving.utilization:.0%} of the card already")
    return replace(served, serving=replace(served.serving, utilization=UTILIZATION))


_REMEDIES: Final = (
    _stored_as("fp8-weight", "fp8"),
    _stored_as("int4-weight", "int4"),
    Remedy("fp8 KV cache", "--kv-dtype fp8", "rounded keys and values", "numbers", _fp8_cache),
    Remedy("smaller steps", "a quarter of --max-batched-tokens", "long prompts take longer", "speed", _smaller_steps),
    Remedy(
        "more of the card",
        f"--utilization {UTILIZATION}",
        "less room for CUDA graphs and whatever else is on it",
        "nothing",
        _more_of_the_card,
    ),
)


def _several(cards: int) -> Remedy:
    def apply(served: Served) -> Served:
        if served.serving.tp > 1:
            raise InputError("the model is divided among cards already")
        runner = served.runner
        part = part_of(runner.model, cards, runner.name)
        divided = Runner(runner.name, part, runner.inputs, False, gpu=runner.gpu, stack=runner.stack)
        return replace(served, runner=divided, serving=replace(served.serving, tp=cards))

    return Remedy(f"{cards} cards", f"--tp {cards}", f"{cards} cards in place of one", "hardware", apply)


def _larger(base: Served, peak: int) -> Iterator[Remedy]:
    """The cards whose share is as large as what is needed, ascending."""
    for card in sorted(CARDS.values(), key=lambda each: each.bytes):
        is_larger = card.platform == "CUDA" and card.bytes > base.runner.gpu.bytes
        if is_larger and card.bytes * base.serving.utilization >= peak:
            yield _on(card)


def _on(card: Card) -> Remedy:
    def apply(served: Served) -> Served:
        runner = served.runner
        moved = Runner(runner.name, runner.model, runner.inputs, False, gpu=card, stack=runner.stack)
        return replace(served, runner=moved)

    return Remedy(card.name, f"a card of {format_bytes(card.bytes)}", "another card", "hardware", apply)
