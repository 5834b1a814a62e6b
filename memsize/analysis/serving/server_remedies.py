"""Other ways to serve a model, tried where there is no room for one request, and the
assumptions of a report on a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from memsize.analysis.remedies import Ladder, Need, Remedy, RemedySearch, try_remedies
from memsize.analysis.runner import Runner
from memsize.analysis.serving.scenarios import as_served
from memsize.device.cards import CARDS
from memsize.errors import InputError
from memsize.loading.hubs import checkpoint_config_of
from memsize.records.fit import Remedied
from memsize.records.gpu import Card
from memsize.records.serving import ServingRow
from memsize.spec.generation import ServerArguments, Serving
from memsize.spec.scenario import Scenario, quantized_from
from memsize.units import GiB, format_bytes
from memsize.workloads.served_parts import part_of, served_kind
from memsize.workloads.serving import encoder_size

_UTILIZATION: Final = 0.95
"""The largest part of a GPU's memory that is tried."""
_CARDS: Final = (2, 4, 8)


def arguments_of(runner: Runner, serving: Serving, context: int) -> ServerArguments:
    """The arguments of a server, with what it chooses for a model on its GPU."""
    kind = served_kind(runner.model, is_quantized=checkpoint_config_of(runner.model) is not None)
    return serving.chosen(runner.gpu, context, images=encoder_size(runner.model), kind=kind)


@dataclass(frozen=True)
class ServedModel:
    """A model on one GPU, how it is served, and how it is stored."""

    runner: Runner
    serving: Serving
    scenario: Scenario


def remedies_for_server(base: ServedModel, context: int, needed: Callable[[ServedModel], Need]) -> Remedied:
    """Try each remedy for one request of `context` tokens; `needed` returns what it needs on each GPU."""
    search = RemedySearch(base, needed)
    own = base.runner.gpu
    utilization = arguments_of(base.runner, base.serving, context).utilization
    larger = (
        _on_gpu(card)
        for card in sorted(CARDS.values(), key=lambda card: card.bytes)
        if card.platform == "CUDA" and card.bytes > own.bytes
        if card.bytes * utilization >= search.need.bytes
    )
    ladders = (Ladder(map(_on_cards, _CARDS), until="refusal"), Ladder(larger, until="refusal"))
    scenario = base.scenario.name
    remedies = (*_REMEDIES, _smaller_steps(base, context))
    return try_remedies(search, remedies, ladders, scenario=scenario, gpu=own.name, size=context, combine=False)


def _stored_as(name: str, title: str) -> Remedy[ServedModel]:
    def apply(served: ServedModel) -> ServedModel:
        if served.scenario.recipe == "quantized":
            raise InputError("the weights are quantized already")
        scenario = quantized_from(served.scenario, name)
        return replace(served, scenario=as_served(scenario, served.serving.rules))

    return Remedy(f"{title} weights", f"--scenario {name}", "rounded weights", "numbers", apply)


def _fp8_cache(served: ServedModel) -> ServedModel:
    if served.serving.kv_cache_dtype is not None:
        raise InputError(f"the cache is in {served.serving.kv_cache_dtype} already")
    return replace(served, serving=replace(served.serving, kv_cache_dtype="fp8"))


def _smaller_steps(base: ServedModel, context: int) -> Remedy[ServedModel]:
    tokens = arguments_of(base.runner, base.serving, context).tokens // 4

    def apply(served: ServedModel) -> ServedModel:
        if tokens < 1:
            raise InputError("a step has no fewer tokens")
        return replace(served, serving=replace(served.serving, max_num_batched_tokens=tokens))

    option, cost = "a quarter of --max-num-batched-tokens", "long prompts take longer"
    return Remedy("smaller steps", option, cost, "speed", apply)


def _more_of_the_card(served: ServedModel) -> ServedModel:
    serving = served.serving
    share = serving.gpu_memory_utilization
    if share is None:
        share = arguments_of(served.runner, serving, serving.max_model_len or 1).utilization
    if share >= _UTILIZATION:
        raise InputError(f"the server may take {share:.0%} of the card already")
    return replace(served, serving=replace(serving, gpu_memory_utilization=_UTILIZATION))


_REMEDIES: Final = (
    _stored_as("fp8-weight", "fp8"),
    _stored_as("int4-weight", "int4"),
    Remedy("fp8 KV cache", "--kv-cache-dtype fp8", "rounded keys and values", "numbers", _fp8_cache),
    Remedy(
        "more of the GPU",
        f"--gpu-memory-utilization {_UTILIZATION}",
        "less room for CUDA graphs and whatever else is on it",
        "nothing",
        _more_of_the_card,
    ),
)


def _on_cards(cards: int) -> Remedy[ServedModel]:
    def apply(served: ServedModel) -> ServedModel:
        if served.serving.tensor_parallel_size > 1:
            raise InputError("the model is divided among GPUs already")
        runner = served.runner
        divided = replace(runner, model=part_of(runner.model, cards, runner.name))
        return replace(served, runner=divided, serving=replace(served.serving, tensor_parallel_size=cards))

    name, option = f"{cards} GPUs", f"--tensor-parallel-size {cards}"
    return Remedy(name, option, f"{cards} GPUs in place of one", "hardware", apply)


def _on_gpu(card: Card) -> Remedy[ServedModel]:
    def apply(served: ServedModel) -> ServedModel:
        return replace(served, runner=replace(served.runner, gpu=card))

    return Remedy(card.name, f"a card of {format_bytes(card.bytes)}", "another card", "hardware", apply)


def assumptions(row: ServingRow, served: ServerArguments, reads_images: bool) -> Iterator[str]:
    """Yield the assumptions about `row`, the first of a report."""
    yield from served.assumed
    rules, captured = served.rules, served.graphs
    if captured is not None and row.graphs.high:
        low, high = (size / GiB for size in row.graphs)
        yield (
            f"{rules.name} subtracts an estimate of the CUDA graphs' memory from the cache, {low:.2f} to {high:.2f} "
            "GiB for "
            f"{captured.piecewise} piecewise and {captured.full} full graphs of up to {captured.largest:,} tokens: "
            "none with --enforce-eager"
        )
    if rules.compiled and not served.compiles:
        yield (
            "the first start also compiles the model, which leaves less for the cache: --first-start says how much "
            "(vllm-project/vllm#54122, #54383)"
        )
    yield (
        "the largest step runs transformers' own forward, with one kernel for a norm and for a layer's experts: other "
        "fused kernels of the server may need less between its layers"
    )
    if not served.loras:
        yield "LoRA adapters need memory in addition: --enable-lora"
    if not served.speculation:
        yield "speculative decoding needs memory in addition: --speculative-config"
    if reads_images:
        yield (
            "images have the size that the config names, and transformers' own encoder reads them: the server's may "
            "need less, so that the cache has at least these blocks"
        )
