"""The blocks of a paged cache, by the rules of vLLM's `vllm/v1/core/kv_cache_utils.py` and `kv_cache_interface.py`.

Layers that keep the same number of tokens form one group, whose block has the keys and values of all of them
(`_get_kv_cache_groups_uniform_spec`, `_get_kv_cache_groups_uniform_type`). A model of layers with full attention and
with a sliding window has several groups of equally many layers, the last of each kind padded, which share one pool of
blocks (`_get_kv_cache_groups_uniform_page_size`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memsize.errors import InputError
from memsize.records.gpu import Interval
from memsize.records.serving import Concurrency, LayerGroup, Paged
from memsize.spec.serving import Serving
from memsize.workloads.generation import CachedLayer

FULL, SLIDING = "full attention", "sliding window"


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The groups of layers that have tables of blocks of their own, and the bytes of a block, which all share."""

    groups: tuple[LayerGroup, ...]
    block_bytes: int

    def request(self, serving: Serving, context: int) -> int:
        """The blocks of one request of `context` tokens (`max_memory_usage_bytes` of each group)."""
        return sum(_blocks(group, serving, context) for group in self.groups)

    def paged(self, available: Interval, serving: Serving, context: int) -> Paged:
        """The cache that fills `available` bytes; tokens as vLLM logs them (`_report_kv_cache_config`)."""
        request = self.request(serving, context)
        blocks = Interval(*(size // self.block_bytes for size in available))
        return Paged(
            available=available,
            block_bytes=self.block_bytes,
            request_blocks=request,
            blocks=blocks,
            tokens=Interval(*(count // len(self.groups) * serving.block for count in blocks)),
            concurrency=Concurrency(*(count / request for count in blocks)),
        )


def block_layout(layers: Sequence[CachedLayer], window: int | None, block: int, name: str) -> BlockLayout:
    """The blocks of a model whose layers' `bytes` are those of one token; `window` is that of its sliding ones.

    Raises `InputError` for layers that these rules do not cover.
    """
    kinds = list(dict.fromkeys(layer.kind for layer in layers))
    other = next((kind for kind in kinds if kind not in (FULL, SLIDING)), None)
    if other or not kinds:
        raise InputError(f"{name} caches {other or 'nothing'}: paged caches of full attention and windows are covered")
    if SLIDING in kinds and window is None:
        raise InputError(f"{name} has layers with a sliding window, and its config does not say how wide it is")
    count = {kind: sum(layer.kind == kind for layer in layers) for kind in kinds}
    windows = {FULL: None, SLIDING: window}
    if len(kinds) == 1:
        group = LayerGroup(kinds[0], len(layers), windows[kinds[0]])
        return BlockLayout((group,), block * sum(layer.bytes for layer in layers))
    if len({layer.bytes for layer in layers}) > 1:
        raise InputError(f"{name} has windows whose tokens are not as large as those of full attention: not covered")
    most, least = max(count.values()), min(count.values())
    together = most if most < 1.5 * least else least  # the first where that costs little padding
    groups = tuple(
        LayerGroup(kind, len(range(place, count[kind], tables)), windows[kind])
        for kind in kinds
        for tables in (-(-count[kind] // together),)
        for place in range(tables)
    )
    return BlockLayout(groups, block * together * layers[0].bytes)


def _blocks(group: LayerGroup, serving: Serving, context: int) -> int:
    """A window may begin in the middle of a block; a step's tokens come in before those beyond it go."""
    if group.window is None:
        return -(-context // serving.block)
    tokens = min(group.window - 1 + serving.batched_tokens, context)
    return -(-tokens // serving.block) + 1
