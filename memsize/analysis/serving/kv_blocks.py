"""The blocks of a paged cache, by the rules of vLLM's `vllm/v1/core/kv_cache_utils.py` and `kv_cache_interface.py`.

Layers that keep the same number of tokens form one group, whose block has the keys and values of all of them
(`_get_kv_cache_groups_uniform_spec`, `_get_kv_cache_groups_uniform_type`). A model of layers with full attention and
with a sliding window has several groups of equally many layers, the last of each kind padded, which share one pool of
blocks (`_get_kv_cache_groups_uniform_page_size`). Where the tokens of one kind are smaller, its blocks have room for
more of them (`unify_kv_cache_spec_page_size`).

Latent attention (MLA) keeps one vector for each token, whatever the number of cards (`MLAAttentionSpec`). A layer with
a state, as in Mamba, has one block for each request (`MambaSpec`), more where prefixes are cached, and one more for
each token that is drafted (`num_speculative_blocks`); blocks are made so large that one holds its state
(`HybridAttentionMambaModelConfig` of `vllm/model_executor/models/config.py`, later `_align_hybrid_block_size` of
`vllm/platforms/interface.py`). A state has the dtype of the model, and one input less than its convolution is wide
(`mamba_utils.py` of `vllm/model_executor/layers/mamba`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memsize.errors import InputError
from memsize.records.gpu import Interval
from memsize.records.serving import Concurrency, LayerGroup, Paged
from memsize.spec.server_rules import ONE_STATE, Rules, ServedKind, StateBlocks
from memsize.workloads.kv_caches import CachedLayer

FULL, SLIDING, LATENT, STATE = "full attention", "sliding window", "latent attention", "state"
_KINDS = (FULL, SLIDING, LATENT, STATE)
_ENDLESS = 2**40
_SCALED = 128
_OF_WINDOW = 0.8
"""SGLang's `swa_full_tokens_ratio`."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The groups of layers that have tables of blocks of their own, and the bytes of a block, which all share.

    `tokens` are those of a block of each group; 0 where a request has a state, whatever its length. Where it has
    `states`, they are in so many blocks, and so many more are for drafted tokens.
    """

    groups: tuple[LayerGroup, ...]
    block_bytes: int
    tokens: tuple[int, ...]
    states: int = 1
    drafted: int = 0

    def notes(self, block: int) -> tuple[str, ...]:
        """Return notes for the report; `block` is the number of tokens per block that the user wants."""
        tokens = min(filter(None, self.tokens), default=0)
        if tokens > block and any(group.kind == STATE for group in self.groups):
            return (f"a block has {tokens:,} tokens in place of {block:,}, so that it holds the state of a layer",)
        return ()

    def request(self, context: int, step: int) -> int:
        """Count the blocks of one request of `context` tokens (`max_memory_usage_bytes` of each group), of which `step`
        are new before the oldest leave a window.
        """
        count = 0
        for group, tokens in zip(self.groups, self.tokens, strict=True):
            if group.kind == STATE:
                count += self.drafted + (self.states or -(-context // (tokens or context)))
            elif group.window is None:
                count += -(-context // tokens)
            else:
                # A window may begin in the middle of a block, and a step's tokens are added before the oldest are
                # dropped.
                cached = min(group.window - 1 + step, context)
                count += -(-cached // tokens) + 1
        return count

    def paged(
        self, available: Interval, context: int, step: int, *, by_requests: bool = False, positions: int | None = None
    ) -> Paged:
        """Compute the cache that fills `available` bytes. Its tokens are those that vLLM logs: of the blocks of one
        group (`_report_kv_cache_config`), or of as many requests as there is room for. No request has more than
        `positions`.
        """
        request = self.request(context, step)
        blocks = Interval(*(size // self.block_bytes for size in available))
        tokens = min(filter(None, self.tokens), default=context)
        lengths = range(1, (positions or _ENDLESS) + 1)  # the longest: `estimate_max_model_len`
        longest = (bisect_right(lengths, count, key=lambda length: self.request(length, step)) for count in blocks)
        concurrency = Concurrency(*(count / request for count in blocks))
        if by_requests:
            capacity = Interval(*(int(requests * context) for requests in concurrency))
        else:
            capacity = Interval(*(count // len(self.groups) * tokens for count in blocks))
        return Paged(
            available=available,
            block_bytes=self.block_bytes,
            request_blocks=request,
            blocks=blocks,
            tokens=capacity,
            concurrency=concurrency,
            longest=Interval(*longest),
        )


def block_layout(
    layers: Sequence[CachedLayer],
    window: int | None,
    block: int,
    name: str,
    *,
    windows: bool = True,
    padding: float = 1.5,
    states: StateBlocks = ONE_STATE,
    drafted: int = 0,
) -> BlockLayout:
    """Lay out the blocks of a model. The `bytes` of a layer are those of one token, or of its whole state; `window` is
    the width of its sliding windows, which have blocks of their own where `windows`, and else those of full attention.
    Kinds of layers are padded to equally many where one has less than `padding` times as many as the other. A request
    has `states` beside attention, and one for each of the `drafted` tokens.

    Raises `InputError` for layers that these rules do not cover.
    """
    if not windows and len({layer.kind for layer in layers}) > 1:
        layers = [layer._replace(kind=FULL) if layer.kind == SLIDING else layer for layer in layers]
    count = Counter(layer.kind for layer in layers)
    other = next((kind for kind in count if kind not in _KINDS), None)
    if other or not count:
        raise InputError(f"{name} caches {other or 'nothing'}: paged caches of attention and of states are covered")
    if SLIDING in count and window is None:
        raise InputError(f"{name} has layers with a sliding window, and its config does not say how wide it is")
    width_of = {SLIDING: window}
    if len(count) == 1:
        (kind,) = count
        tokens = 0 if kind == STATE else block
        size = (tokens or 1) * sum(layer.bytes for layer in layers)
        return BlockLayout((LayerGroup(kind, len(layers), width_of.get(kind)),), size, (tokens,), drafted=drafted)
    sizes = dict.fromkeys((layer.kind, layer.bytes) for layer in layers)
    if len(sizes) > len(count):
        raise InputError(f"{name} has layers of one kind that cache more than others of it: not covered")
    of_token = {kind: size for kind, size in sizes if kind != STATE}
    largest = max(of_token.values())
    for kind, size in sizes:
        if kind == STATE:
            block = max(block, states.aligned * -(-size // (states.aligned * largest)))
        elif largest % size:
            raise InputError(f"{name} has tokens of two sizes in its cache, and the larger is no multiple of the other")
    tokens_of = {STATE: 0 if states.blocks else block}
    tokens_of |= {kind: block * largest // size for kind, size in of_token.items()}
    most, least = max(count.values()), min(count.values())
    together = most if most < padding * least else least
    groups: list[LayerGroup] = []
    for kind, number in count.items():
        tables = -(-number // together)
        groups += [LayerGroup(kind, len(range(first, number, tables)), width_of.get(kind)) for first in range(tables)]
    page, of_groups = block * largest, tuple(tokens_of[group.kind] for group in groups)
    return BlockLayout(tuple(groups), page * together, of_groups, states.blocks, drafted)


def token_bytes(numbers: int, width: int, config: Any) -> int:
    """Return the bytes of a token's `numbers` in a layer. Those of the indexer of sparse attention have eight bits, and
    a scale for each 128 (`DeepseekV32IndexerCache`); in eight bits latent attention has scales too, and the part that
    is turned in 16 (`fp8_ds_mla`).
    """
    index = getattr(config, "index_head_dim", None) or 0
    if not index:
        return numbers * width
    beside = config.kv_lora_rank // _SCALED * 4 + config.qk_rope_head_dim if width == 1 else 0
    return (numbers - index) * width + beside + index + index // _SCALED * 4


def pooled(layers: Sequence[CachedLayer], name: str, rules: Rules, kind: ServedKind) -> list[CachedLayer]:
    """Lay out SGLang's pools as layers of one token: those with a window have room for fewer tokens where they have a
    pool of their own, and states take a share of the memory (`model_runner_kv_cache_mixin.py` of
    `srt/model_executor`, later `pool_configurator.py`).

    Raises `InputError` for states of releases whose pools of them are not covered.
    """
    attention, times = [layer for layer in layers if layer.kind != STATE], 1.0
    if len(attention) < len(layers):
        if rules.of_states is None or not attention:
            raise InputError(f"{name} keeps states: how {rules.name} divides its memory is not covered")
        times += rules.of_states
    if len({layer.kind for layer in attention}) > 1:
        share = _OF_WINDOW if rules.pools(kind) else 1
        sizes = [layer.bytes * (share if layer.kind == SLIDING else 1) for layer in attention]
        attention = [layer._replace(kind=FULL, bytes=round(size)) for layer, size in zip(attention, sizes, strict=True)]
    return [layer._replace(bytes=round(layer.bytes * times)) for layer in attention]


def state_bytes(layer: CachedLayer, width: int | None, drafted: int = 0) -> int:
    """Return the bytes of a layer's states on a server; `width` is that of a recurrent number (None: the others'). A
    convolution keeps the inputs of `drafted` tokens too.
    """
    of_model = min(state.itemsize for state in layer.states)
    size = 0
    for state in layer.states:
        numbers = math.prod(state.shape)
        if state.of_convolution:
            size += numbers // state.shape[-1] * (state.shape[-1] - 1 + drafted) * of_model
        else:
            size += numbers * (width or of_model)
    return size
