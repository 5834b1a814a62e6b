"""The one table of optimizations: what each does to a variant, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from memsize.analysis.fit.optimized_models import (
    Adam8bit,
    LowRank,
    Share,
    chunk_the_head,
    freeze_all_but_head,
    keep_the_last_logits,
    loss_of_the_head,
    recompute_blocks,
    write_in_place,
)
from memsize.analysis.fit.run_cache import NotApplicable, RunVariant
from memsize.records.gpu import Card
from memsize.spec.generation import Generation
from memsize.spec.scenario import SCENARIOS, quantized_from
from memsize.spec.training import Training, parse_optimizer
from memsize.units import format_bytes

Changes = Literal["nothing", "speed", "numbers", "training", "hardware"]
"""What an optimization changes besides memory: nothing that matters, the speed, the rounding, what is learnt, or the
cards that it takes.
"""

Apply = Callable[[RunVariant], RunVariant]


@dataclass(frozen=True, slots=True)
class Optimization:
    """One way to need less memory.

    `apply` turns a variant into the variant with it; it raises `NotApplicable` with the reason where that means
    nothing. `cost` is what one pays. Of optimizations that share a group only one is taken at a time.
    """

    name: str
    title: str
    cost: str
    changes: Changes
    groups: frozenset[str]
    apply: Apply


RANK: Final = 16
"""The rank of adapters."""
CHUNK: Final = 1024
"""Tokens of the prompt that are read at a time."""
_FUSED: Final = ("adam", "adamw", "sgd", "sgd-momentum", "adagrad")
_ADAMS: Final = ("adam", "adamw")

OPTIMIZATIONS: Final[list[Optimization]] = []
"""All optimizations of a step but accumulation, which has a number of parts, in the order in which they are tried."""
OF_GENERATIONS: Final[list[Optimization]] = []
"""All optimizations of a generation, in that order."""


def _optimization(
    name: str, title: str, cost: str, changes: Changes, groups: str = "", *, of: Sequence[list[Optimization]] = ()
) -> Callable[[Apply], Apply]:
    """A decorator that adds a function as an optimization of a step, or to the tables `of`. It is a group of its own
    unless `groups` names some.
    """

    def add(apply: Apply) -> Apply:
        made = Optimization(name, title, cost, changes, frozenset(groups.split() or [name]), apply)
        for table in of or (OPTIMIZATIONS,):
            table.append(made)
        return apply

    return add


def _trained(variant: RunVariant) -> Training:
    if variant.training is None:
        raise NotApplicable("nothing is trained")
    return variant.training


def _optimizer_name(training: Training) -> str:
    if not isinstance(training.optimizer, str) or training.is_own:
        raise NotApplicable("the optimizer is the target's own, or was given as a function")
    return training.optimizer


def _check_full_precision(variant: RunVariant) -> None:
    if variant.scenario.name not in ("as-given", "fp32"):
        raise NotApplicable(f"the scenario is {variant.scenario.name} already")


def _check_undivided(variant: RunVariant) -> None:
    if variant.parallel and variant.parallel.tensor > 1:
        raise NotApplicable("the model's own plan divides its layers as they are")


def _quantized(variant: RunVariant, name: str) -> RunVariant:
    if variant.scenario.recipe == "quantized":
        raise NotApplicable("the scenario is quantized already")
    return replace(variant, scenario=quantized_from(variant.scenario, name))


@_optimization(
    "autocast",
    "torch.autocast around forward and loss",
    "rounding in matrix products; copies of the weights while they are used; usually faster",
    "numbers",
    "precision",
)
def autocast(variant: RunVariant) -> RunVariant:
    _check_full_precision(variant)
    return replace(variant, scenario=SCENARIOS["amp-bf16" if variant.card.capability >= (8, 0) else "amp-fp16"])


@_optimization(
    "bf16 parameters",
    "model.bfloat16(): weights, gradients, optimizer state and activations",
    "updates smaller than 1/256 of a weight are lost",
    "numbers",
    "precision",
    of=(OPTIMIZATIONS, OF_GENERATIONS),
)
def bf16_parameters(variant: RunVariant) -> RunVariant:
    _check_full_precision(variant)
    return replace(variant, scenario=SCENARIOS["bf16"])


@_optimization(
    "activation checkpointing",
    "torch.utils.checkpoint around each repeated block",
    "one more forward of these blocks per step, about a third more time",
    "speed",
)
def activation_checkpointing(variant: RunVariant) -> RunVariant:
    _trained(variant)
    return variant.edited(recompute_blocks)


@_optimization("fused optimizer", "fused=True", "none; usually faster", "nothing", "optimizer")
def fused_optimizer(variant: RunVariant) -> RunVariant:
    return _with_option(variant, "fused", _FUSED)


@_optimization(
    "foreach=False",
    "the optimizer's loop over single parameters",
    "a slower optimizer step, many small kernels",
    "speed",
    "optimizer",
)
def without_foreach(variant: RunVariant) -> RunVariant:
    return _with_option(variant, "foreach=False", None)


def _with_option(variant: RunVariant, option: str, known: tuple[str, ...] | None) -> RunVariant:
    training = _trained(variant)
    text = _optimizer_name(training)
    spec = parse_optimizer(text)
    if known is not None and spec.name not in known:
        raise NotApplicable(f"{spec.cls} has no such implementation")
    if {"fused", "foreach"} & set(spec.options):
        raise NotApplicable("the optimizer's implementation is chosen already")
    joined = f"{text},{option}" if ":" in text else f"{text}:{option}"
    return replace(variant, training=replace(training, optimizer=joined))


@_optimization(
    "8-bit optimizer state",
    "bitsandbytes' Adam8bit or AdamW8bit; modelled",
    "another library; state rounded in blocks of 256",
    "numbers",
    "optimizer",
)
def eight_bit_state(variant: RunVariant) -> RunVariant:
    training = _trained(variant)
    if variant.parallel and (variant.parallel.shards_parameters or variant.parallel.tensor > 1):
        raise NotApplicable("bitsandbytes' optimizers cannot update DTensors (bitsandbytes#1633)")
    if parse_optimizer(_optimizer_name(training)).name not in _ADAMS:
        raise NotApplicable("it is Adam's state that is stored in 8 bits")
    return replace(variant, training=replace(training, optimizer=Adam8bit))


@_optimization(
    "SGD",
    "plain SGD, which keeps no state",
    "another optimizer: other learning rates, often more steps",
    "training",
    "optimizer",
)
def sgd(variant: RunVariant) -> RunVariant:
    training = _trained(variant)
    if isinstance(training.optimizer, str) and not training.is_own and parse_optimizer(training.optimizer).cls == "SGD":
        raise NotApplicable("the optimizer is SGD already")
    return replace(variant, training=replace(training, optimizer="sgd"))


@_optimization("set_to_none", "zero_grad(set_to_none=True)", "none", "nothing")
def set_to_none(variant: RunVariant) -> RunVariant:
    training = _trained(variant)
    if training.set_to_none:
        raise NotApplicable("gradients are dropped before the forward already")
    return replace(variant, training=replace(training, set_to_none=True))


@_optimization(
    "chunked cross-entropy",
    "head and loss over 1,024 tokens at a time",
    "the head's product is computed twice; no logits to look at",
    "speed",
)
def chunked_cross_entropy(variant: RunVariant) -> RunVariant:
    training = _trained(variant)
    if training.loss not in (None, "cross_entropy"):
        raise NotApplicable("the loss is not cross-entropy")
    _check_undivided(variant)
    return replace(variant, training=replace(training, loss=loss_of_the_head)).edited(chunk_the_head)


@_optimization(
    "in-place activations",
    "inplace=True where the backward needs the output only",
    "wrong results where something else reads an activation's input",
    "nothing",
)
def in_place_activations(variant: RunVariant) -> RunVariant:
    return variant.edited(write_in_place)


@_optimization(
    "expandable segments",
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "none known on Linux",
    "nothing",
    of=(OPTIMIZATIONS, OF_GENERATIONS),
)
def expandable_segments(variant: RunVariant) -> RunVariant:
    if variant.config.expandable_segments:
        raise NotApplicable("segments are expandable already")
    return replace(variant, config=replace(variant.config, expandable_segments=True))


@_optimization("freezing", "all but the last layer frozen", "only the last layer learns", "training", "trained")
def freezing(variant: RunVariant) -> RunVariant:
    _trained(variant)
    return variant.edited(freeze_all_but_head)


@_optimization(
    "LoRA",
    f"adapters of rank {RANK} beside the linear layers, the rest frozen",
    "only adapters learn; two more small products per layer",
    "training",
    "trained",
)
def lora(variant: RunVariant) -> RunVariant:
    _trained(variant)
    _check_undivided(variant)
    return variant.edited(LowRank(RANK))


@_optimization(
    "LoRA on a 4-bit base",
    "the same beside nf4 weights (QLoRA)",
    "rounded base weights, unpacked each time they are used: slower",
    "training",
    "trained precision",
)
def qlora(variant: RunVariant) -> RunVariant:
    _trained(variant)
    return _quantized(variant, "nf4").edited(LowRank(RANK))


@_optimization(
    "int8 weights",
    "weight-only quantization of the linear layers",
    "rounded weights, unpacked each time they are used",
    "numbers",
    "precision",
    of=(OPTIMIZATIONS, OF_GENERATIONS),
)
def int8_weights(variant: RunVariant) -> RunVariant:
    if variant.training is not None:
        raise NotApplicable("quantized weights are not trained: see the adapters")
    return _quantized(variant, "int8-weight")


@_optimization(
    "int4 weights",
    "weight-only quantization of the linear layers to 4 bits",
    "weights rounded to 16 values, unpacked each time they are used",
    "numbers",
    "precision",
    of=(OF_GENERATIONS,),
)
def int4_weights(variant: RunVariant) -> RunVariant:
    return _quantized(variant, "int4-weight")


@_optimization(
    "fp8 KV cache",
    "a quantized cache with the backend fp8",
    "rounded keys and values, unpacked each time they are used",
    "numbers",
    "cache",
    of=(OF_GENERATIONS,),
)
def fp8_cache(variant: RunVariant) -> RunVariant:
    return _with_cache(variant, "quantized", "fp8")


@_optimization(
    "prefill in chunks",
    f"prefill_chunk_size={CHUNK}",
    "a slower prefill, in smaller pieces",
    "speed",
    of=(OF_GENERATIONS,),
)
def chunked_prefill(variant: RunVariant) -> RunVariant:
    generation = _generation(variant)
    if generation.chunk is not None:
        raise NotApplicable("the prompt is read in chunks already")
    return replace(variant, generation=replace(generation, chunk=CHUNK))


@_optimization(
    "last logits only",
    "the head applied to the last token of the prompt alone",
    "none: generate looks at no other",
    "nothing",
    of=(OF_GENERATIONS,),
)
def last_logits_only(variant: RunVariant) -> RunVariant:
    return variant.edited(keep_the_last_logits)


@_optimization(
    "static cache",
    'cache_implementation="static"',
    "room for the whole context from the first token on",
    "nothing",
    "cache",
    of=(OF_GENERATIONS,),
)
def static_cache(variant: RunVariant) -> RunVariant:
    return _with_cache(variant, "static", None)


@_optimization(
    "offloaded cache",
    'cache_implementation="offloaded"',
    "as much memory of the host, and each step copies the whole cache to the GPU and back",
    "speed",
    "cache",
    of=(OF_GENERATIONS,),
)
def offloaded_cache(variant: RunVariant) -> RunVariant:
    return _with_cache(variant, "offloaded", None)


@_optimization(
    "2 cards",
    "each layer divided between two such GPUs (tensor parallelism), as vLLM divides it",
    "a second card, and what all of them exchange after each layer",
    "hardware",
    "cards precision",
    of=(OF_GENERATIONS,),
)
def two_cards(variant: RunVariant) -> RunVariant:
    return variant.edited(Share(2))


def _with_cache(variant: RunVariant, cache: str, dtype: str | None) -> RunVariant:
    generation = _generation(variant)
    chosen = generation.cache or ("quantized" if generation.kv_dtype else None)
    if chosen not in (None, "dynamic"):
        raise NotApplicable(f"the cache is {chosen} already")
    return replace(variant, generation=replace(generation, cache=cache, kv_dtype=dtype))


def _generation(variant: RunVariant) -> Generation:
    assert variant.generation is not None, "optimizations of generations are tried on them alone"
    return variant.generation


def on(card: Card) -> Optimization:
    """The same on another card."""

    def apply(variant: RunVariant) -> RunVariant:
        return replace(variant, card=card)

    title = f"the smallest card on which it fits, of {format_bytes(card.bytes)}"
    return Optimization(card.name, title, "another card", "hardware", frozenset({"cards"}), apply)


def in_parts(parts: int, variant: RunVariant) -> Optimization:
    """A batch in `parts` parts, one after the other: of a training with gradients that are accumulated."""
    return fewer_sequences(parts) if variant.generation else accumulation(parts)


def fewer_sequences(parts: int) -> Optimization:
    """A generation for each of `parts` parts of the batch."""

    def apply(variant: RunVariant) -> RunVariant:
        return replace(variant, split=parts)

    title = f"{parts} generations one after the other, each of a part of the sequences"
    cost = "longer: each step makes tokens for fewer sequences"
    return Optimization(f"batch ÷{parts}", title, cost, "speed", frozenset({"parts"}), apply)


def accumulation(parts: int) -> Optimization:
    """Gradient accumulation over `parts` parts of the batch."""

    def apply(variant: RunVariant) -> RunVariant:
        _trained(variant)
        if variant.split > 1:
            raise NotApplicable("the batch is split already")
        return replace(variant, split=parts)

    title = f"{parts} backwards per step, each with a part of the batch"
    cost = "smaller kernels, so slower; batch norms see the parts' statistics"
    return Optimization(f"accumulation ×{parts}", title, cost, "speed", frozenset({"accumulation"}), apply)
