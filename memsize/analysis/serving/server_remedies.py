"""The table of remedies for a server that does not start: each serves the model in another way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from memsize.analysis.remedies import Ladder, Need, Remedy, RemedySearch, try_remedies
from memsize.analysis.runner import Runner
from memsize.device.cards import CARDS
from memsize.errors import InputError
from memsize.records.fit import Remedied
from memsize.records.gpu import Card
from memsize.spec.generation import Serving
from memsize.spec.scenario import Scenario, quantized_from
from memsize.units import format_bytes
from memsize.workloads.serving import part_of

UTILIZATION: Final = 0.95
"""The largest part of a GPU's memory that is tried."""
_CARDS: Final = (2, 4, 8)


@dataclass(frozen=True)
class ServedModel:
    """A model on one GPU, how it is served, and how it is stored."""

    runner: Runner
    serving: Serving
    scenario: Scenario

    @property
    def budget(self) -> int:
        """The bytes of its GPU that the server may take."""
        return int(self.runner.gpu.bytes * self.serving.gpu_memory_utilization)


def remedies_for_server(base: ServedModel, context: int, needed: Callable[[ServedModel], int]) -> Remedied:
    """Try each remedy for one request of `context` tokens; `needed` returns the bytes that it needs on each GPU."""
    search = RemedySearch(base, lambda served: Need(needed(served), served.budget))
    ladders = (
        Ladder([_on_cards(cards) for cards in _CARDS], until="refusal"),
        Ladder(_larger_gpus(base, search.need.bytes), until="refusal"),
    )
    return try_remedies(
        search,
        _REMEDIES,
        ladders,
        scenario=base.scenario.name,
        gpu=base.runner.gpu.name,
        size=context,
        combine=False,
    )


def _stored_as(name: str, title: str) -> Remedy[ServedModel]:
    def apply(served: ServedModel) -> ServedModel:
        if served.scenario.recipe == "quantized":
            raise InputError("the weights are quantized already")
        return replace(served, scenario=quantized_from(served.scenario, name))

    return Remedy(f"{title} weights", f"--scenario {name}", "rounded weights", "numbers", apply)


def _fp8_cache(served: ServedModel) -> ServedModel:
    if served.serving.kv_cache_dtype is not None:
        raise InputError(f"the cache is in {served.serving.kv_cache_dtype} already")
    return replace(served, serving=replace(served.serving, kv_cache_dtype="fp8"))


def _smaller_steps(served: ServedModel) -> ServedModel:
    tokens = served.serving.max_num_batched_tokens // 4
    if tokens < 1:
        raise InputError("a step has no fewer tokens")
    return replace(served, serving=replace(served.serving, max_num_batched_tokens=tokens))


def _more_of_the_card(served: ServedModel) -> ServedModel:
    if served.serving.gpu_memory_utilization >= UTILIZATION:
        raise InputError(f"the server may take {served.serving.gpu_memory_utilization:.0%} of the card already")
    return replace(served, serving=replace(served.serving, gpu_memory_utilization=UTILIZATION))


_REMEDIES: Final = (
    _stored_as("fp8-weight", "fp8"),
    _stored_as("int4-weight", "int4"),
    Remedy("fp8 KV cache", "--kv-cache-dtype fp8", "rounded keys and values", "numbers", _fp8_cache),
    Remedy(
        "smaller steps", "a quarter of --max-num-batched-tokens", "long prompts take longer", "speed", _smaller_steps
    ),
    Remedy(
        "more of the card",
        f"--gpu-memory-utilization {UTILIZATION}",
        "less room for CUDA graphs and whatever else is on it",
        "nothing",
        _more_of_the_card,
    ),
)


def _on_cards(cards: int) -> Remedy[ServedModel]:
    def apply(served: ServedModel) -> ServedModel:
        if served.serving.tensor_parallel_size > 1:
            raise InputError("the model is divided among cards already")
        runner = served.runner
        part = part_of(runner.model, cards, runner.name)
        divided = Runner(
            runner.name, part, runner.inputs, False, gpu=runner.gpu, stack=runner.stack, whole=runner.whole
        )
        return replace(served, runner=divided, serving=replace(served.serving, tensor_parallel_size=cards))

    return Remedy(
        f"{cards} cards", f"--tensor-parallel-size {cards}", f"{cards} cards in place of one", "hardware", apply
    )


def _larger_gpus(base: ServedModel, needed: int) -> Iterator[Remedy[ServedModel]]:
    """Yield the larger GPUs whose share may hold `needed` bytes, ascending."""
    for card in sorted(CARDS.values(), key=lambda card: card.bytes):
        is_larger = card.platform == "CUDA" and card.bytes > base.runner.gpu.bytes
        if is_larger and card.bytes * base.serving.gpu_memory_utilization >= needed:
            yield _on_gpu(card)


def _on_gpu(card: Card) -> Remedy[ServedModel]:
    def apply(served: ServedModel) -> ServedModel:
        runner = served.runner
        moved = Runner(
            runner.name, runner.model, runner.inputs, False, gpu=card, stack=runner.stack, whole=runner.whole
        )
        return replace(served, runner=moved)

    return Remedy(card.name, f"a card of {format_bytes(card.bytes)}", "another card", "hardware", apply)
