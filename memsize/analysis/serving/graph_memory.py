"""The estimate of CUDA graphs' memory that vLLM subtracts from the cache.

The largest graph of each mode is warmed up on a stream of its own and recorded into the graphs' pool, in which the
others have room too. `torch.cuda.graph` empties the cache before it records, so that of the warm-up only a segment
stays, with cuBLAS's workspace and the states that the head would read. What else remains is the driver's, for each
graph; a piecewise one is a graph for each part between two layers' attention.

The first model runner counts each later graph as the second one, which `cudaMemGetInfo` shows in steps of 2 MiB. The
second runner measures piecewise graphs, and reads the free memory again between the warm-up of a full one and its
recording, which empties the cache: so each but the first counts 1 MiB, and the segments of a warm-up come on top.

Source: `profile_cudagraph_memory` in vLLM's `v1/worker/gpu_model_runner.py`, of the second model runner in
`v1/worker/gpu/cudagraph_utils.py`.
"""

from __future__ import annotations

from typing import Any, Final

from memsize.records.gpu import Card, Interval
from memsize.spec.server_rules import GraphEstimate, GraphSizes, ServedKind
from memsize.units import KiB, MiB

_HOPPER: Final = 9
_DATACENTER: Final = (_HOPPER, 10)
"""Hopper, and Blackwell with HBM, whose sizes differ in the logs from those of other cards."""
_STEP: Final = 2 * MiB
"""Pages of the driver, in which it takes memory."""
_SEGMENT: Final = 20 * MiB
_OF_PIECE: Final = Interval(176 * KiB, 240 * KiB)
"""What the driver keeps of a graph between two layers' attention, on other cards: the ends of nine starts of vLLM
0.8.5 to 0.17 of models with 28 to 64 layers ("Graph capturing finished", less the pool and full graphs).
"""
_OF_KERNELS: Final = 64 * KiB
"""About a dozen kernels more where layers have experts or states; those that quantize take 5 KiB each in the starts
below."""
_OF_FULL: Final = {False: 2 * MiB, True: 6 * MiB}
"""The most of a full graph on other cards, by whether layers have states: in five starts of vLLM 0.19 to 0.24 without
it counts 1 MiB, the least, in two with gated delta nets 4 to 6.
"""
_OF_LAYER: Final[dict[tuple[int, GraphEstimate], Interval]] = {
    (0, "measured"): Interval(128 * KiB, 184 * KiB),
    (_HOPPER, "extrapolated"): Interval(56 * KiB, 224 * KiB),
    (_HOPPER, "measured"): Interval(0, 88 * KiB),
    (10, "extrapolated"): Interval(0, 128 * KiB),
    (10, "measured"): Interval(0, 88 * KiB),
}
"""What the driver keeps of one layer in one graph of either mode, before Hopper (0), on it, and since: the ends of
about twenty public logs, of 0.5 to 31 B parameters on one GPU; on Hopper those of 22 starts of vLLM 0.19
(jgchn/llm-d-planner, accuracy/results/v0.19.0), after the larger of pool and parts.
"""
_OF_OTHER_LAYER: Final = 512 * KiB
"""The most of a layer with latent attention (341 KiB there) or that GPUs share (512: Llama-3.1-8B on two)."""
_SPLITS: Final = 32
"""FlashAttention 3 on Hopper divides a sequence into so many parts (`flash_attn_max_num_splits_for_cuda_graph`)."""


def graph_memory(
    config: Any, captured: GraphSizes, kind: GraphEstimate, pool: int, card: Card, tp: int, served: ServedKind
) -> Interval:
    """Return the estimate for a model with the `config` of one GPU's part; `pool` are the segments of a step of the
    largest captured size. Each graph that is not measured counts 1 MiB or more: each full one (`_MIN_PER_GRAPH_BYTES`),
    and where the second is extrapolated all but the first of each mode, of which the larger counts.
    """
    generation, parts = card.capability[0], 0
    layers = (captured.piecewise + captured.full) * config.num_hidden_layers
    counted = captured.full if kind == "measured" else captured.piecewise - 1 + captured.full - 1
    latent = getattr(config, "kv_lora_rank", None)
    if generation == _HOPPER:
        width = latent or getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # Results of parts, in float32 (`out_accum` in hopper/flash_api.cpp).
        parts = _SPLITS * captured.largest_full * config.num_attention_heads * width * 4
    if kind == "measured":
        first = Interval(2 * (pool + parts) - _SEGMENT, 2 * (pool + parts))
    else:
        first = Interval(max(pool, parts), max(pool + _SEGMENT, parts))
    if generation not in _DATACENTER and kind == "extrapolated":
        return _of_graphs(config.num_hidden_layers + 1, captured, first, served)
    of_layer = _OF_LAYER[max(since for since, of in _OF_LAYER if since <= generation and of == kind), kind]
    if generation == _HOPPER and kind == "extrapolated" and (latent or tp > 1):
        of_layer = Interval(of_layer.low, _OF_OTHER_LAYER)
    least, most = (max(counted * MiB, layers * size) for size in of_layer)
    return Interval(first.low + least, first.high + most)


def _of_graphs(pieces: int, captured: GraphSizes, first: Interval, served: ServedKind) -> Interval:
    """Add what the second graph of a mode takes, in whole pages, for every graph of `pieces` and every full one but the
    first.
    """
    more = _OF_KERNELS if served.has_experts or served.has_states else 0
    least, most = pieces * _OF_PIECE.low, pieces * (_OF_PIECE.high + more)
    least, most = max(least // _STEP * _STEP, MiB), -(-most // _STEP) * _STEP
    return Interval(
        first.low + captured.piecewise * least + (captured.full - 1) * MiB,
        first.high + captured.piecewise * most + (captured.full - 1) * _OF_FULL[served.has_states],
    )
