"""The table of remedies for generations."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from memsize.analysis.fit.optimized_models import Share, keep_the_last_logits
from memsize.analysis.fit.run_cache import RunVariant
from memsize.analysis.fit.step_remedies import (
    BF16_PARAMETERS,
    EXPANDABLE_SEGMENTS,
    INT8_WEIGHTS,
    VariantRemedy,
    edited,
    quantized,
    remedy,
)
from memsize.analysis.remedies import NotApplicable
from memsize.records.fit import Budget
from memsize.spec.generation import Generation
from memsize.units import format_bytes

CHUNK: Final = 1024
"""Tokens of the prompt that are read at a time."""


def _generation(variant: RunVariant) -> Generation:
    assert variant.generation is not None, "remedies for generations are tried on them alone"
    return variant.generation


def _with_cache(variant: RunVariant, cache: str, dtype: str | None = None) -> RunVariant:
    generation = _generation(variant)
    chosen = generation.cache_implementation or ("quantized" if generation.kv_cache_dtype else None)
    if chosen not in (None, "dynamic"):
        raise NotApplicable(f"the cache is {chosen} already")
    return replace(variant, generation=replace(generation, cache_implementation=cache, kv_cache_dtype=dtype))


def _chunked_prefill(variant: RunVariant) -> RunVariant:
    generation = _generation(variant)
    if generation.prefill_chunk_size is not None:
        raise NotApplicable("the prompt is read in chunks already")
    return replace(variant, generation=replace(generation, prefill_chunk_size=CHUNK))


GENERATION_REMEDIES: Final = (
    BF16_PARAMETERS,
    EXPANDABLE_SEGMENTS,
    INT8_WEIGHTS,
    remedy(
        "int4 weights",
        "weight-only quantization of the linear layers to 4 bits",
        "weights rounded to 16 values, unpacked each time they are used",
        "numbers",
        partial(quantized, name="int4-weight"),
        "precision",
    ),
    remedy(
        "fp8 KV cache",
        "a quantized cache with the backend fp8",
        "rounded keys and values, unpacked each time they are used",
        "numbers",
        partial(_with_cache, cache="quantized", dtype="fp8"),
        "cache",
    ),
    remedy(
        "prefill in chunks",
        f"prefill_chunk_size={CHUNK}",
        "a slower prefill, in smaller pieces",
        "speed",
        _chunked_prefill,
    ),
    remedy(
        "last logits only",
        "the head applied to the last token of the prompt alone",
        "none: generate looks at no other",
        "nothing",
        edited(keep_the_last_logits),
    ),
    remedy(
        "static cache",
        'cache_implementation="static"',
        "room for the whole context from the first token on",
        "nothing",
        partial(_with_cache, cache="static"),
        "cache",
    ),
    remedy(
        "offloaded cache",
        'cache_implementation="offloaded"',
        "as much memory of the host, and each step copies the whole cache to the GPU and back",
        "speed",
        partial(_with_cache, cache="offloaded"),
        "cache",
    ),
    remedy(
        "2 cards",
        "each layer divided between two such GPUs (tensor parallelism), as vLLM divides it",
        "a second card, and what all of them exchange after each layer",
        "hardware",
        edited(Share(2)),
        "cards precision",
    ),
)
"""Remedies for a generation, in the order in which they are tried."""


def fewer_sequences(parts: int) -> VariantRemedy:
    """Generate for one of `parts` parts of the batch at a time."""

    def apply(variant: RunVariant) -> RunVariant:
        return replace(variant, split=parts)

    title = f"{parts} generations one after the other, each of a part of the sequences"
    cost = "longer: each step makes tokens for fewer sequences"
    return remedy(f"batch ÷{parts}", title, cost, "speed", apply, "parts")


def on_larger_gpu(budget: Budget) -> VariantRemedy:
    """Generate on the GPU of `budget`."""

    def apply(variant: RunVariant) -> RunVariant:
        return replace(variant, card=budget.card, capacity=budget.allocator)

    title = f"the smallest card on which it fits, of {format_bytes(budget.card.bytes)}"
    return remedy(budget.card.name, title, "another card", "hardware", apply, "cards")
