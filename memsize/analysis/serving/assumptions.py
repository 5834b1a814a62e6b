"""Assumptions of a report on a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from memsize.analysis.serving.kv_blocks import STATE
from memsize.records.serving import LayerGroup, ServingRow
from memsize.spec.generation import ServerArguments
from memsize.units import GiB

_COMPILING: Final = GiB * 18 // 10


def assumptions(
    row: ServingRow, groups: Sequence[LayerGroup], served: ServerArguments, reads_images: bool
) -> Iterator[str]:
    """Yield the assumptions about `row`, the first of a report."""
    yield from served.assumed
    rules, captured = served.rules, served.graphs
    if captured is not None:
        low, high = (size / GiB for size in row.graphs)
        yield (
            f"{rules.name} takes an estimate of the CUDA graphs' memory off the cache, {low:.2f} to {high:.2f} GiB for "
            f"{captured.piecewise} piecewise and {captured.full} full graphs of up to {captured.largest:,} tokens: "
            "none with --enforce-eager"
        )
    compiles = rules.profiles and rules.gate == "never"
    if compiles and row.paged is not None and row.paged.available.middle < 20 * _COMPILING:
        yield (
            "the first start also compiles the model: in logs the cache was 0.9 to 1.8 GiB smaller until the next one "
            "(vllm-project/vllm#54122, #54383)"
        )
    yield (
        "the largest step runs transformers' own forward, with one kernel for a norm and for a layer's experts: other "
        "fused kernels of the server may need less between its layers"
    )
    yield "adapters and the models of speculative decoding come on top of what the server may take"
    if any(group.kind == STATE for group in groups):
        yield (
            "layers with a state run transformers' plain PyTorch code, which needs far more for a moment than a "
            "server's kernels: the cache has at least these blocks"
        )
    if reads_images:
        yield (
            "images have the size that the config names, and transformers' own encoder reads them: the server's may "
            "need less, so that the cache has at least these blocks"
        )
