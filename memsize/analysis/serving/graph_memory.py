"""The memory that vLLM sets aside for CUDA graphs (`profile_cudagraph_memory` in `vllm/v1/worker/gpu_model_runner.py`,
of the second model runner in `vllm/v1/worker/gpu/cudagraph_utils.py`).

The largest graph of each mode is warmed up on a stream of its own, whose segments stay, and recorded into the graphs'
pool, which takes the same again. Smaller graphs reuse both: they add what the driver keeps of their kernels. The first
runner counts each later graph as the second one; the second runner measures piecewise graphs, and counts full ones so.
"""

from __future__ import annotations

from typing import Any, Final

from memsize.records.gpu import Card, Interval
from memsize.spec.server_rules import GraphEstimate, GraphSizes
from memsize.units import KiB, MiB

_HOPPER: Final = 9
_OF_LAYER: Final[dict[tuple[bool, GraphEstimate], Interval]] = {
    (False, "extrapolated"): Interval(88 * KiB, 224 * KiB),
    (False, "measured"): Interval(128 * KiB, 184 * KiB),
    (True, "extrapolated"): Interval(0, 112 * KiB),
    (True, "measured"): Interval(0, 88 * KiB),
}
"""What the driver keeps of one layer in one graph, before Hopper (False) and since: the ends of about twenty public
logs, of 0.5 to 31 B parameters on one GPU, whose memory of CUDA graphs is divided so after two pools.
"""
_SPLITS: Final = 32
"""FlashAttention 3 on Hopper divides a sequence into so many parts (`flash_attn_max_num_splits_for_cuda_graph`)."""


def graph_memory(config: Any, captured: GraphSizes, kind: GraphEstimate, pool: Interval, card: Card) -> Interval:
    """Return the estimate for a model with the `config` of one GPU's part; `pool` are the segments of a step of the
    largest captured size. Each full graph counts 1 MiB or more (`_MIN_PER_GRAPH_BYTES`).
    """
    generation, parts = card.capability[0], 0
    if generation == _HOPPER and not getattr(config, "kv_lora_rank", None):
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # Results of parts, in float32 (`out_accum` in hopper/flash_api.cpp).
        parts = _SPLITS * captured.largest_full * config.num_attention_heads * width * 4
    layers = (captured.piecewise + captured.full) * config.num_hidden_layers
    least, most = (layers * size for size in _OF_LAYER[generation >= _HOPPER, kind])
    return Interval(pool.low + parts + max(captured.full * MiB, least), 2 * (pool.high + parts) + most)
