"""The estimate of CUDA graphs' memory that vLLM subtracts from the cache.

The largest graph of each mode is warmed up on a stream of its own, whose segments stay, and recorded into the graphs'
pool, which takes the same again. Smaller graphs reuse both: they add what the driver keeps of their kernels. The first
model runner counts each later graph as the second one; the second runner measures piecewise graphs, and counts full
ones so.

Source: `profile_cudagraph_memory` in vLLM's `v1/worker/gpu_model_runner.py`, of the second model runner in
`v1/worker/gpu/cudagraph_utils.py`.
"""

from __future__ import annotations

from typing import Any, Final

from memsize.records.gpu import Card, Interval
from memsize.spec.server_rules import GraphEstimate, GraphSizes
from memsize.units import KiB, MiB

_HOPPER: Final = 9
_OF_LAYER: Final[dict[tuple[int, GraphEstimate], Interval]] = {
    (0, "extrapolated"): Interval(88 * KiB, 224 * KiB),
    (0, "measured"): Interval(128 * KiB, 184 * KiB),
    (_HOPPER, "extrapolated"): Interval(56 * KiB, 224 * KiB),
    (_HOPPER, "measured"): Interval(0, 88 * KiB),
    (10, "extrapolated"): Interval(0, 112 * KiB),
    (10, "measured"): Interval(0, 88 * KiB),
}
"""What the driver keeps of one layer in one graph, before Hopper (0), on it, and since: the ends of about twenty public
logs, of 0.5 to 31 B parameters on one GPU, whose memory of CUDA graphs is divided so after two pools; on Hopper those
of 22 starts of vLLM 0.19 (jgchn/llm-d-planner, accuracy/results/v0.19.0), after the larger of pool and parts.
"""
_OF_OTHER_LAYER: Final = 512 * KiB
"""The most of a layer with latent attention (341 KiB there) or that GPUs share (512: Llama-3.1-8B on two)."""
_SPLITS: Final = 32
"""FlashAttention 3 on Hopper divides a sequence into so many parts (`flash_attn_max_num_splits_for_cuda_graph`)."""


def graph_memory(
    config: Any, captured: GraphSizes, kind: GraphEstimate, pool: int, card: Card, tp: int = 1
) -> Interval:
    """Return the estimate for a model with the `config` of one GPU's part; `pool` are the segments of a step of the
    largest captured size. Each graph that is not measured counts 1 MiB or more: each full one (`_MIN_PER_GRAPH_BYTES`),
    and where the second is extrapolated all but the first of each mode, of which the larger counts.
    """
    generation, parts = card.capability[0], 0
    of_layer = _OF_LAYER[max(since for since, _ in _OF_LAYER if since <= generation), kind]
    layers = (captured.piecewise + captured.full) * config.num_hidden_layers
    counted = captured.full if kind == "measured" else captured.piecewise - 1 + captured.full - 1
    if generation == _HOPPER:
        latent = getattr(config, "kv_lora_rank", None)
        width = latent or getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # Results of parts, in float32 (`out_accum` in hopper/flash_api.cpp).
        parts = _SPLITS * captured.largest_full * config.num_attention_heads * width * 4
        if kind == "extrapolated" and (latent or tp > 1):
            of_layer = Interval(of_layer.low, _OF_OTHER_LAYER)
    least, most = (max(counted * MiB, layers * size) for size in of_layer)
    if generation == _HOPPER and kind == "extrapolated":
        return Interval(max(pool, parts) + least, max(pool, parts) + most)
    return Interval(pool + parts + least, 2 * (pool + parts) + most)
