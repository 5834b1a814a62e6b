"""What may be changed of how a training is spread over GPUs, so that each of them holds less."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from memsize.analysis.fit.optimizations import OF_GENERATIONS, OPTIMIZATIONS, Optimization, autocast
from memsize.analysis.fit.run_cache import NotApplicable, RunVariant
from memsize.spec.parallel import Parallel

_MOST_GPUS: Final = 1024


def optimizations_of(variant: RunVariant) -> list[Optimization]:
    """The optimizations that are tried on such a variant."""
    if variant.generation:
        return OF_GENERATIONS
    if variant.parallel is None:
        return OPTIMIZATIONS
    if not variant.parallel.shards_parameters:
        return [VIEWS, SHARDS, *OPTIMIZATIONS] if variant.parallel.kind == "ddp" else [SHARDS, *OPTIMIZATIONS]
    return [SHARDS, OFFLOAD, MIXED_PRECISION, *(each for each in OPTIMIZATIONS if each.name != "autocast")]


def more_gpus(variant: RunVariant) -> Iterator[Optimization]:
    """The same strategy on twice as many GPUs, on four times as many and so on, if each of them holds less then."""
    parallel = variant.parallel
    while parallel and (parallel := _on_twice_as_many(parallel)) and parallel.size <= _MOST_GPUS:
        yield _spread(parallel)


def _on_twice_as_many(parallel: Parallel) -> Parallel | None:
    """None where more GPUs would hold more copies of the same."""
    if parallel.shards_parameters:
        return replace(parallel, shards=2 * parallel.shards)
    if parallel.is_pipeline:
        return replace(parallel, stages=2 * parallel.stages)
    return replace(parallel, tensor=2 * parallel.tensor) if parallel.kind == "tp" else None


def _spread(parallel: Parallel) -> Optimization:
    def apply(variant: RunVariant) -> RunVariant:
        return replace(variant, parallel=parallel)

    name, cost = f"{parallel.size:,} GPUs", "more GPUs; all of them together take a larger batch"
    return Optimization(name, f"{parallel}, with the same batch on each", cost, "hardware", frozenset({"gpus"}), apply)


def _shards(variant: RunVariant) -> RunVariant:
    parallel = variant.parallel
    if parallel is None or parallel.kind == "dp" or parallel.replicas == 1:
        raise NotApplicable("no processes hold copies of the same")
    shards = parallel.replicas * parallel.shards
    return replace(variant, parallel=replace(parallel, kind="fsdp", replicas=1, shards=shards, views=False))


def _views(variant: RunVariant) -> RunVariant:
    assert variant.parallel is not None, "strategies are changed where there is one"
    if variant.parallel.views:
        raise NotApplicable("gradients are views of the buckets already")
    return replace(variant, parallel=replace(variant.parallel, views=True))


def _offload(variant: RunVariant) -> RunVariant:
    assert variant.parallel is not None, "strategies are changed where there is one"
    if variant.parallel.offload:
        raise NotApplicable("shards are in the host's memory already")
    return replace(variant, parallel=replace(variant.parallel, offload=True))


VIEWS: Final = Optimization(
    "bucket views",
    "DistributedDataParallel(gradient_as_bucket_view=True): gradients lie in their buckets",
    "nothing, unless gradients are detached in place (detach_)",
    "nothing",
    frozenset({"buckets"}),
    _views,
)
SHARDS: Final = Optimization(
    "fsdp",
    "fully_shard in place of copies: each GPU stores its part alone",
    "layers are gathered for each forward and backward",
    "speed",
    frozenset({"copies"}),
    _shards,
)
OFFLOAD: Final = Optimization(
    "offload",
    "CPUOffloadPolicy: shards, gradients and optimizer state in the host's memory",
    "copies to the GPU and back, and an optimizer on the CPU: slower",
    "speed",
    frozenset({"offload"}),
    _offload,
)
MIXED_PRECISION: Final = Optimization(
    "mixed precision",
    "MixedPrecisionPolicy: layers in a lower precision, shards in float32",
    "rounding in the layers; usually faster",
    "numbers",
    frozenset({"precision"}),
    autocast,
)
