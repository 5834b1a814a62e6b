"""Serving: blocks by worked arithmetic and vLLM's rules, the parts of a divided model, and what vLLM logged."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from torch import nn

import memsize
from memsize.cli import run
from memsize.errors import InputError, ScenarioError, UnknownInputError
from memsize.units import GiB
from tests.configs import SMALL_LLAMA
from tests.gpus import card
from tests.records import Concurrency, Interval
from tests.workloads import FULL, SLIDING, CachedLayer, block_layout

OUTSIDE = Interval(2**30 // 100, 2**30 * 11 // 100)
"""0.01 to 0.11 GiB that a server takes beside the allocator and the context, as vLLM logs them."""
KIB, MIB = 2**10, 2**20

pytest.importorskip("transformers")

SMALL = SMALL_LLAMA | {"vocab_size": 100, "max_position_embeddings": 1000}
LAYER = 2 * 2 * 16 * 2
"""Bytes of one token in one layer: keys and values × heads × width × bytes of bfloat16."""
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 12,
    "head_dim": 16,
    "sliding_window": 100,
}
PLAIN: dict[str, Any] = {"server": "vllm=0.19.0", "scenarios": "as-given"}
"""A release that takes 90 % of a card, counts no CUDA graphs, and gives the cache's size by the blocks of one group."""
PUBLISHED = Path(__file__).parent.parent.parent / "shared" / "truth" / "published.csv"


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    def written(**entries: Any) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(entries))
        return f"hf:{path}"

    return written


def test_a_cache_takes_what_is_left(config: Callable[..., str]) -> None:
    report = memsize.serve(config(**SMALL), gpu="a10", max_num_batched_tokens=64, max_num_seqs=4, **PLAIN)
    (row,) = report.ran
    assert row.paged is not None
    # embedding and head, 2 × (query, key, value, output, gate, up, down, 2 norms), a norm; in blocks of 512 bytes
    hidden, inner, keys = 64, 128, 32
    layer = [hidden * hidden] * 2 + [hidden * keys] * 2 + [3 * hidden * inner] + [hidden] * 2
    weights = sum(-(-2 * size // 512) * 512 for size in [100 * hidden] * 2 + layer * 2 + [hidden])
    frequencies = 2 * 512  # as they are, and as they were
    table = 1000 * 16 * 2  # sines and cosines of 8 frequencies at each position
    padding = 2 * 28 * hidden * 2  # 100 tokens to a multiple of 64
    assert row.weights == weights + frequencies + table + padding
    budget = int(card("a10").bytes * 0.9)
    assert report.budget == budget
    assert row.non_torch == OUTSIDE
    assert row.paged.available == tuple(budget - row.weights - row.profile - each for each in row.non_torch[::-1])
    block = 16 * 2 * LAYER
    blocks = [size // block for size in row.paged.available]
    assert row.paged.block_bytes == block
    assert [*row.paged.blocks] == blocks
    assert [*row.paged.tokens] == [count * 16 for count in blocks]
    assert row.paged.request_blocks == 63  # 1,000 positions
    assert [*row.paged.concurrency] == [count / 63 for count in blocks]
    assert row.paged.longest == (1000, 1000)


def test_drivers_leave_different_parts_of_a_gpu(config: Callable[..., str]) -> None:
    """A T4 has 14.56 or 14.75 GiB: the cache gets 90 % of the difference at most."""
    row = memsize.serve(config(**SMALL), gpu="t4", max_num_batched_tokens=64, max_num_seqs=4, **PLAIN).ran[0]
    assert row.paged is not None
    outside = row.non_torch.high - row.non_torch.low
    more = row.paged.available.high - row.paged.available.low - outside
    assert more == pytest.approx(0.9 * (14.75 - 14.56) * GiB, abs=16)


def test_the_largest_step_has_the_tokens_and_the_logits_that_were_asked_for(config: Callable[..., str]) -> None:
    target = config(**SMALL | {"vocab_size": 50_000})

    def profile(server: str, **options: int) -> int:
        return memsize.serve(target, server=server, scenarios="as-given", **options).ran[0].profile

    def of_a_row(server: str, few: int, more: int) -> float:
        least, most = (profile(server, max_num_batched_tokens=256, max_num_seqs=seqs) for seqs in (few, more))
        return (most - least) / (more - few) / 50_000

    # Logits in bfloat16 and float32, the latter sorted, their places in int64; and what sorting takes: up to 127 rows
    # their values twice and three times pairs of 32-bit numbers, from 128 on places, and values and places again.
    assert of_a_row("vllm=0.9.2", 60, 120) == pytest.approx(2 + 4 + 4 + 8 + (2 * 4 + 3 * 8), rel=0.01)
    assert of_a_row("vllm=0.9.2", 128, 256) == pytest.approx(2 + 4 + 4 + 8 + (8 + 4 + 8), rel=0.01)
    # Later releases sort nothing: logits in float32, shares, and random numbers. The second model runner only copies.
    assert of_a_row("vllm=0.19.0", 128, 256) == pytest.approx(2 + 4 + 4 + 4, rel=0.01)
    assert of_a_row("vllm=0.24.0", 128, 256) == pytest.approx(2 + 4, rel=0.01)
    # From 0.27 on it counts generated tokens in 32 bits, and those of the prompt in one.
    counts = 4 + 4 / 32
    assert of_a_row("vllm=0.27.0", 128, 256) == pytest.approx(2 + 4 + counts, rel=0.01)
    assert of_a_row("vllm=0.33.0", 128, 256) == pytest.approx(2 + 4 + 4 + 4 + counts, rel=0.01)
    most = profile("vllm=0.19.0", max_num_batched_tokens=60_000, max_num_seqs=1)
    # the residual stream, a layer's input and its result before the MLP; gate and up in one product, and their result;
    # sines and cosines, tokens and positions, and the workspace of cuBLAS
    assert most == pytest.approx(60_000 * ((3 * 64 + 3 * 128 + 2 * 16) * 2 + 2 * 8) + 8_519_680, rel=0.03)


def test_windows_and_full_attention_share_one_pool_of_blocks(config: Callable[..., str]) -> None:
    options: dict[str, Any] = {"max_model_len": 1000, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    report = memsize.serve(config(**SMALL | GEMMA), **options, **PLAIN)
    paged = report.ran[0].paged
    assert paged is not None
    assert sorted(group[1:] for group in report.groups if group.window) == [(2, 100)] * 5
    assert [group for group in report.groups if not group.window] == [(FULL, 2, None)]
    assert paged.block_bytes == 16 * 2 * LAYER  # of the 2 layers of a group
    # 99 + 64 tokens take 11 blocks, and one more; 1,000 tokens take 63
    assert paged.request_blocks == 5 * 12 + 63
    assert paged.tokens.low == paged.blocks.low // 6 * 16


def test_one_sequence_and_blocks_of_one_token(config: Callable[..., str]) -> None:
    text = repr(memsize.serve(config(**SMALL), server="sglang=0.5.9", scenarios="as-given"))
    assert "4,096 tokens, 1 sequence," in text and "blocks of 1 token," in text


def test_a_cache_in_fp8_holds_twice_as_many_tokens(config: Callable[..., str]) -> None:
    own, fp8 = (
        memsize.serve(config(**SMALL), scenarios="as-given", kv_cache_dtype=dtype).ran[0] for dtype in (None, "fp8")
    )
    assert own.paged and fp8.paged
    assert own.paged.available == fp8.paged.available
    assert own.paged.block_bytes == 2 * fp8.paged.block_bytes


def test_cards_share_heads_widths_and_the_vocabulary(config: Callable[..., str]) -> None:
    rows = {
        tp: memsize.serve(config(**SMALL | {"vocab_size": 128}), scenarios="as-given", tensor_parallel_size=tp).ran[0]
        for tp in (1, 2, 4)
    }
    norms = 2 * 5 * 64  # held by every card
    frequencies = rows[1].weights - 2 * (2 * 128 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)) - norms
    shared = {tp: row.weights - norms - frequencies for tp, row in rows.items()}
    assert shared[2] * 2 == shared[1]
    # Two heads of keys and values are held twice by four cards: each has a whole one.
    assert shared[4] * 4 == shared[1] + 2 * 2 * 2 * 64 * 32
    sizes = [row.paged.block_bytes for row in rows.values() if row.paged]
    assert sizes == [16 * 2 * LAYER, 16 * LAYER, 16 * LAYER]


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 64), st.integers(1, 500), st.integers(0, 10**9))
def test_groups_hold_every_layer_once(full: int, sliding: int, block: int, window: int, size: int) -> None:
    layers = [CachedLayer(FULL, 64)] * full + [CachedLayer(SLIDING, 64)] * sliding
    layout = block_layout(layers, window, block, "it")
    assert sum(group.layers for group in layout.groups if group.kind == FULL) == full
    assert sum(group.layers for group in layout.groups if group.kind == SLIDING) == sliding
    assert max(group.layers for group in layout.groups) * 64 * block <= layout.block_bytes
    paged = layout.paged(Interval(size, 2 * size), 1000, 64)
    assert 0 <= size - paged.blocks.low * layout.block_bytes < layout.block_bytes
    assert paged.blocks.low <= paged.blocks.high
    assert paged.request_blocks >= -(-1000 // block)


def test_a_little_padding_is_better_than_many_groups() -> None:
    layers = [CachedLayer(SLIDING, 10)] * 12 + [CachedLayer(FULL, 10)] * 13
    layout = block_layout(layers, 128, 16, "it")
    assert layout.groups == ((SLIDING, 12, 128), (FULL, 13, None))
    assert layout.block_bytes == 16 * 13 * 10


def test_groups_are_padded_below_one_and_a_half_times_as_many_layers() -> None:
    """vLLM's `max_num_layers < min_num_layers * 1.5` (kv_cache_utils.py): 17 of 12 layers are padded, 18 are not."""

    def groups(full: int) -> tuple[tuple[object, ...], ...]:
        layers = [CachedLayer(SLIDING, 10)] * 12 + [CachedLayer(FULL, 10)] * full
        return block_layout(layers, 128, 16, "it").groups

    assert groups(17) == ((SLIDING, 12, 128), (FULL, 17, None))
    assert groups(18) == ((SLIDING, 12, 128), (FULL, 9, None), (FULL, 9, None))


@pytest.mark.parametrize(("window", "blocks"), [(65, 8 + 1), (66, 9 + 1)])
def test_a_window_keeps_one_token_less_than_its_width(window: int, blocks: int) -> None:
    """vLLM's `sliding_window - 1 + max_num_batched_tokens` (kv_cache_interface.py): 64 + 64 tokens are 8 blocks of 16,
    65 + 64 are 9; one more since a window may begin in the middle of a block.
    """
    layout = block_layout([CachedLayer(SLIDING, 64)], window, 16, "it")
    assert layout.request(1000, 64) == blocks


MAMBA = {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 16}
MAMBA2 = {"model_type": "mamba2", "state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2}
HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
MLA = {"kv_lora_rank": 32, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
STATE_OF_MAMBA = 2 * (3 * 128 + 128 * 16)
"""128 inner channels: three inputs of a convolution that is four wide, and 16 numbers of a state."""
TOKEN = 2 * 2 * 16 * 2
KINDS: dict[str, tuple[dict[str, Any], list[tuple[str, int]], int, int]] = {
    # entries; groups; bytes of a block; blocks of a request of 500 tokens
    "MLA": (
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_routed_experts": 8, "n_group": 2}
        | {"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 4}
        | MLA,
        [("latent attention", 2)],
        2 * 16 * (32 + 8) * 2,
        32,
    ),
    # the indexer's keys are in 8 bits, with a scale of 4 bytes
    "sparse MLA": (
        {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "n_routed_experts": 8}
        | {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"num_key_value_heads": 4, "index_head_dim": 128, "index_n_heads": 2, "index_topk": 16} | MLA,
        [("latent attention", 2)],
        2 * 16 * ((32 + 8) * 2 + 128 + 4),
        32,
    ),
    "Mamba": (MAMBA, [("state", 2)], 2 * STATE_OF_MAMBA, 1),
    # 8 heads of 16, and 2 groups of 16 states of either kind, go through the convolution
    "Mamba-2": (
        MAMBA2 | {"architectures": ["Mamba2ForCausalLM"]},
        [("state", 2)],
        2 * 2 * (3 * (128 + 2 * 2 * 16) + 8 * 16 * 16),
        1,
    ),
    # 4,864 bytes of a state in blocks of 48 tokens of 128 bytes
    "Jamba": (
        SMALL | {"architectures": ["JambaForCausalLM"], "model_type": "jamba", "num_hidden_layers": 8}
        | {"num_experts": 2, "mamba_dt_rank": 8},
        [("state", 1)] * 7 + [("full attention", 1)],
        48 * TOKEN,
        7 * 2 + 11,
    ),
    # (3 × (2·2·16 + 4·16) + 4·16·16) × 2 = 2,816 bytes of a state in blocks of 32 tokens
    "Qwen3-Next": (
        {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 4, "head_dim": 16}
        | {"shared_expert_intermediate_size": 32} | EXPERTS | LINEAR,
        [("state", 1)] * 3 + [("full attention", 1)],
        32 * TOKEN,
        3 * 2 + 16,
    ),
    # both in each layer: (3 × (64 + 2·16) + 4·16·16) × 2 = 2,624 bytes of a state
    "Falcon-H1": (
        {"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "mamba_d_ssm": 64, "mamba_n_heads": 4}
        | {"mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1},
        [("state", 2), ("full attention", 2)],
        2 * 32 * TOKEN,
        3 + 16,
    ),
    # (3 × (128 + 2·16) + 8·16·16) × 2 = 5,056 bytes of a state in blocks of 48 tokens
    "Granite": (
        {"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "num_local_experts": 0}
        | {"layer_types": ["mamba", "mamba", "attention"], "num_hidden_layers": 3} | HYBRID,
        [("state", 1), ("state", 1), ("full attention", 1)],
        48 * TOKEN,
        2 * 3 + 11,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_layers(kind: str, config: Callable[..., str]) -> None:
    entries, groups, size, request = KINDS[kind]
    options: dict[str, Any] = {
        "scenarios": "as-given",
        "max_model_len": 500,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
    }
    report = memsize.serve(config(**SMALL | entries), **options)
    paged = report.ran[0].paged
    assert paged is not None
    assert [group[:2] for group in report.groups] == groups
    assert (paged.block_bytes, paged.request_blocks) == (size, request)


@pytest.mark.parametrize(
    ("kind", "server", "gpu", "blocks", "tokens"),
    [
        # one block for each of three groups of states, and 16 of 32 tokens
        ("Qwen3-Next", "vllm=0.25.1", "a100", 3 + 16, 32),
        ("Qwen3-Next", "vllm=0.26.0", "a100", 3 * 2 + 16, 32),
        # FlashInfer's kernel returns states every 64 tokens
        ("Qwen3-Next", "vllm=0.33.0", "h100", 3 * 3 + 8, 64),
        ("Granite", "vllm=0.25.1", "a100", 2 + 11, 48),
        # a state in each block, which holds chunks of 256 tokens
        ("Granite", "vllm=0.27.0", "a100", 2 * 2 + 2, 256),
        ("Granite", "vllm=0.28.0", "a100", 2 * 2 + 11, 48),
        ("Granite", "vllm=0.33.0", "a100", 2 * 3 + 11, 48),
        ("Jamba", "vllm=0.27.0", "a100", 7 + 1, 2048),
    ],
)
def test_prefixes_of_hybrids_take_more_blocks_with_states(
    kind: str, server: str, gpu: str, blocks: int, tokens: int, config: Callable[..., str]
) -> None:
    """vLLM's `MambaSpec.max_memory_usage_bytes` for a request of 500 tokens."""
    options: dict[str, Any] = {"max_model_len": 500, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    options |= {"server": server, "gpu": gpu, "scenarios": "as-given"}
    report = memsize.serve(config(**SMALL | KINDS[kind][0]), **options)
    paged = report.ran[0].paged
    assert paged is not None
    assert (paged.request_blocks, paged.block_bytes) == (blocks, tokens * TOKEN)


SHARED_STATES = {
    # the numbers of a state on one of two GPUs: a convolution's, and those of the heads
    "Qwen3-Next": 3 * (2 * 16 + 2 * 16) + 2 * 16 * 16,
    "Granite": 3 * (64 + 2 * 16) + 4 * 16 * 16,  # there each has the group
    "Falcon-H1": 3 * (32 + 2 * 16) + 2 * 16 * 16,
    "Jamba": 3 * 64 + 64 * 16,
}


@pytest.mark.parametrize("kind", SHARED_STATES)
def test_gpus_share_states(kind: str, config: Callable[..., str]) -> None:
    """vLLM's `MambaStateShapeCalculator` divides heads and widths by the number of GPUs, and groups as far as there are
    any; a block has the tokens of 64 bytes that a state takes the room of.
    """
    entries, _, _, _ = KINDS[kind]
    options: dict[str, Any] = {"max_model_len": 500, "max_num_batched_tokens": 64, "max_num_seqs": 4, **PLAIN}
    entries = SMALL | {"vocab_size": 128} | entries
    one, half = (memsize.serve(config(**entries), tensor_parallel_size=tp, **options).ran[0] for tp in (1, 2))
    assert half.paged is not None
    tokens = 16 * -(-2 * SHARED_STATES[kind] // (16 * TOKEN // 2))
    layers = 2 if kind == "Falcon-H1" else 1
    assert half.paged.block_bytes == layers * tokens * TOKEN // 2
    assert 0.45 * one.weights < half.weights < 0.65 * one.weights


def test_states_that_gpus_do_not_share(config: Callable[..., str]) -> None:
    entries = SMALL | KINDS["Qwen3-Next"][0]
    with pytest.raises(InputError, match="has 2 as its linear_num_key_heads: tp 4 does not divide them"):
        memsize.serve(config(**entries), tensor_parallel_size=4, **PLAIN)
    # A model of Granite's hybrids without such layers names their sizes too: that 4 does not divide 2 is no obstacle.
    attention = KINDS["Granite"][0] | {"layer_types": ["attention"] * 3, "mamba_expand": 2, "vocab_size": 256}
    memsize.serve(config(**SMALL | attention), tensor_parallel_size=4, max_num_seqs=4, **PLAIN)
    convolutions = {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention"],
    }
    with pytest.raises(InputError, match="keeps states as in Mamba"):
        memsize.serve(config(**SMALL | convolutions), tensor_parallel_size=2, **PLAIN)


@pytest.mark.parametrize(
    ("entries", "growth"),
    [
        (MAMBA, 0),  # its states are as wide as they like
        # Two groups of 16 numbers more, of two kinds, in the first product and in two copies of the convolution's input
        (MAMBA2 | {"architectures": ["Mamba2ForCausalLM"]}, 3 * 2 * 2 * 16 * 2),
    ],
)
def test_a_step_leaves_out_the_scan_of_states(entries: dict[str, Any], growth: int, config: Callable[..., str]) -> None:
    """As vLLM's profile run does, here of 4,096 tokens."""
    options: dict[str, Any] = {"server": "vllm=0.19.0", "scenarios": "as-given", "max_num_batched_tokens": 4096}
    options |= {"max_model_len": 100, "max_num_seqs": 4}
    small, large = (
        memsize.serve(config(**SMALL | entries | {"state_size": size, "vocab_size": 64}), **options).ran[0].profile
        for size in (16, 32)
    )
    assert large - small == 4096 * growth


def test_weights_of_one_product_are_one_tensor(config: Callable[..., str]) -> None:
    """Tensors of 10 MiB and more lie in segments of whole 2 MiB: 25 and 5 and 5 MiB of query, key and value in 36, 25
    of the output in 26, twice 135 of gate and up in 270, 135 of down in 136.
    """
    sizes = {"hidden_size": 5120, "num_attention_heads": 20, "num_key_value_heads": 4, "intermediate_size": 13824}
    one = SMALL | sizes | {"head_dim": 128, "num_hidden_layers": 1, "vocab_size": 64}
    (row,) = memsize.serve(config(**one), max_num_batched_tokens=64, max_num_seqs=4, **PLAIN).ran
    small = 2 * 64 * 5120 * 2 + 3 * 5120 * 2 + 2 * 512  # embedding and head, norms, frequencies
    assert row.weights == (36 + 26 + 270 + 136) * 2**20 + small + 1000 * 128 * 2


def test_a_config_without_a_width_of_heads_is_divided(config: Callable[..., str]) -> None:
    """Qwen2's has none: two heads of 16 with one of keys and values on each of two GPUs."""
    qwen = SMALL | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    options: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "tensor_parallel_size": 2, **PLAIN}
    for model in (SMALL, qwen):
        (row,) = memsize.serve(config(**model), **options).ran
        assert row.paged is not None and row.paged.block_bytes == 16 * 2 * LAYER // 2


def test_a_block_holds_more_of_smaller_tokens() -> None:
    layout = block_layout([CachedLayer(SLIDING, 32), CachedLayer(FULL, 64)], 100, 16, "it")
    assert layout.tokens == (32, 16)
    assert layout.block_bytes == 16 * 64
    assert layout.request(1000, 64) == 6 + 1 + 63  # 163 tokens by 32, one more, 1,000 by 16
    with pytest.raises(InputError, match="tokens of two sizes"):
        block_layout([CachedLayer(SLIDING, 48), CachedLayer(FULL, 64)], 100, 16, "it")


def test_too_small_a_card_says_by_how_much(config: Callable[..., str]) -> None:
    report = memsize.serve(config(**SMALL), gpu="a10", gpu_memory_utilization=1e-4, max_num_batched_tokens=64, **PLAIN)
    (row,) = report.ran
    assert row.paged is None
    assert row.shortage == row.weights + row.profile + OUTSIDE.low + 16 * 2 * LAYER - report.budget
    assert report.why()[0].code == "serves-none"
    assert "Nothing is left for the KV cache" in str(report)


def test_what_makes_room_for_a_request(config: Callable[..., str]) -> None:
    options: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "gpu": "t4", **PLAIN}
    target = config(**SMALL)
    found = memsize.serve(target, max_model_len=6 * 10**7, **options)
    assert found.remedied is not None
    rows = {row.name: row for row in found.remedied.rows}
    assert set(rows) == {"2 GPUs", "fp8 KV cache", "RTX 4000 Ada", "smaller steps", "fp8 weights"} | {
        "int4 weights",
        "more of the GPU",
    }
    request = 6 * 10**7 // 16 * 16 * 2 * LAYER
    (row,) = found.ran
    assert found.remedied.peak == row.weights + row.profile + row.non_torch.high + request
    assert rows["fp8 KV cache"].saved == request // 2
    assert rows["2 GPUs"].outcome == rows["RTX 4000 Ada"].outcome == "fits"
    assert rows["more of the GPU"].outcome == "saves"
    divided = memsize.serve(target, max_model_len=6 * 10**7, tensor_parallel_size=2, **options).ran[0]
    assert rows["2 GPUs"].peak == divided.weights + divided.profile + divided.non_torch.high + request // 2
    assert "any one of these makes room: " in str(found)
    assert memsize.serve(target, max_model_len=100, **options).remedied is None


def test_a_scenario_that_leaves_the_experts_says_so(config: Callable[..., str]) -> None:
    mixture = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
    target = config(**SMALL | mixture)
    findings = memsize.serve(target, gpu="t4", scenarios="nf4,int4-weight", max_model_len=64).findings
    (leaves,) = (finding for finding in findings if finding.code == "quantization-leaves-most")
    assert leaves.values["scenario"] == "nf4"
    assert (leaves.values["kind"], leaves.values["most"]) == ("MixtralExperts", 2 * 2 * 4 * 3 * 64 * 128)


def test_a_step_is_run_once_for_one_model(config: Callable[..., str]) -> None:
    """The cache's dtype and the part of the card change nothing of it."""
    said: list[str] = []
    options: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "gpu": "t4", **PLAIN}
    found = memsize.serve(config(**SMALL), max_model_len=6 * 10**7, progress=said.append, **options)
    assert found.remedied is not None
    assert said.count("as-given: a step of 64 tokens") == 3  # as asked, on 2 GPUs, on a larger GPU
    most = SMALL.get("max_position_embeddings", 2048)
    assert f"the model has positions for {most:,} tokens: vLLM refuses a longer context" in found.notes[0]


@pytest.mark.parametrize(
    ("ends", "text"),
    [((1.0, 1.0), "1.00"), ((23 / 20, 23 / 20), "1.15"), ((0.999, 99.999), "50.49"), ((100.0, 466_652.57), "233,376")],
)
def test_requests_are_told_as_exactly_as_they_are_known(ends: tuple[float, float], text: str) -> None:
    assert Concurrency(*ends).middle == text


def test_a_verdict_says_the_middle_of_a_cache_first(config: Callable[..., str]) -> None:
    """Middles, and what is compared with them, are those of the same interval; no end of it is said alone."""
    options: dict[str, Any] = {"gpu": "t4", "server": "vllm=0.33.0", "scenarios": "as-given,int4-weight"}
    report = memsize.serve(config(**SMALL), max_model_len=10**9, **options)
    by_code = {finding.code: finding for finding in report.why()}
    tokens = report.ran[0].paged.tokens  # type: ignore[union-attr]
    about = by_code["serves"].values["about"]
    assert isinstance(about, int)
    assert tokens.low < about < tokens.high
    assert abs(about - tokens.middle) * 20 <= tokens.high - tokens.low
    verdict = by_code["serves"].text()
    room = f"about {about:,} tokens ({tokens.low:,} to {tokens.high:,})"
    assert f"{room}: less than one request of 1,000,000,000, so vLLM does not start." in verdict
    too_long = by_code["request-too-long"].text()
    assert "the cache is up to" in too_long
    assert f"Requests of up to {report.ran[0].paged.longest.low:,} tokens fit." in too_long  # type: ignore[union-attr]


def test_a_cache_of_which_only_the_most_is_known_above_nothing(config: Callable[..., str]) -> None:
    """1 MiB is left at most, where graphs and what lies outside PyTorch may also leave nothing."""
    target, options = config(**SMALL), {"gpu": "a10", "server": "vllm=0.20.0", "scenarios": "as-given"}
    (row,) = memsize.serve(target, **options).ran  # type: ignore[arg-type]
    assert row.paged is not None
    taken = card("a10").bytes * 0.92 - row.paged.available.high
    share = (taken + 2**20) / card("a10").bytes
    report = memsize.serve(target, gpu_memory_utilization=share, **options)  # type: ignore[arg-type]
    (paged,) = (row.paged for row in report.ran)
    assert paged is not None
    assert paged.available.low == 0 < paged.available.high
    texts = " ".join(finding.text() for finding in report.why())
    assert "0.00" not in texts
    assert f"(0 to {paged.tokens.high:,})" in texts
    assert f"Requests of more than {paged.longest.high:,} tokens do not fit." in texts  # type: ignore[union-attr]


def test_a_request_that_is_longer_than_the_cache(config: Callable[..., str]) -> None:
    report = memsize.serve(config(**SMALL), gpu="t4", scenarios="as-given", max_model_len=10**9)
    assert [finding.code for finding in report.why()][:2] == ["serves", "request-too-long"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            SMALL | {"architectures": ["MiniMaxForCausalLM"], "model_type": "minimax"},
            "keeps states in a form of its own",
        ),
        (
            SMALL | {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "num_hidden_layers": 4},
            "has chunked attention",
        ),
        (
            {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"}
            | {"text_config": SMALL | {"model_type": "llama4_text", "num_hidden_layers": 4, "num_local_experts": 2}}
            | {"vision_config": {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4}},
            "has chunked attention",
        ),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "has an encoder"),
        (
            {"architectures": ["BertModel"], "model_type": "bert", "num_attention_heads": 4},
            "has no generate method: it generates no tokens",
        ),
    ],
)
def test_what_is_not_covered(entries: dict[str, Any], message: str, config: Callable[..., str]) -> None:
    small = {"num_hidden_layers": 2, "hidden_size": 64}
    with pytest.raises(InputError, match=message):
        memsize.serve(config(**small | entries), max_model_len=100, scenarios="as-given")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization is 1\.5"),
        ({"block_size": 0}, "block_size is 0: it must be at least 1"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"tensor_parallel_size": 3}, "has 4 attention heads: tp 3 does not divide them"),
        ({"kv_cache_dtype": "int3"}, "no kv cache dtype 'int3'"),
        ({"first_start": True, "enforce_eager": True}, "first_start has no effect: enforce_eager compiles nothing"),
        ({"first_start": True, "server": "sglang=0.5.9"}, "first_start has no effect: SGLang 0.5.9 compiles nothing"),
    ],
)
def test_what_cannot_be_asked(options: dict[str, Any], message: str, config: Callable[..., str]) -> None:
    with pytest.raises((InputError, UnknownInputError), match=message):
        memsize.serve(config(**SMALL), scenarios="as-given", **options)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("vlm=0.9.2", "no server 'vlm': did you mean vllm"),
        ("tgi", "no server 'tgi'"),
        ("vllm=0.9.7", r"vLLM '0\.9\.7' is not a known release: the nearest are 0\.9\.2 and 0\.10\.0"),
        ("vllm=0.1", r"vLLM '0\.1' is not a known release: the nearest is 0\.4\.1"),
        ("vllm=0.99", r"vLLM '0\.99' is not a known release: the nearest is 0\.33\.0"),
        ("vllm=99", r"vLLM '99' is not a known release: the nearest is 0\.33\.0"),
        ("vllm=new", r"vLLM 'new' is not a known release: the nearest is 0\.33\.0"),
        ("sglang=0.6", r"SGLang '0\.6' is not a known release: the nearest is 0\.5\.23"),
    ],
)
def test_an_unknown_server(server: str, message: str, config: Callable[..., str]) -> None:
    with pytest.raises((InputError, UnknownInputError), match=message):
        memsize.serve(config(**SMALL), scenarios="as-given", server=server)


def test_defaults_are_those_of_the_release_on_the_card(config: Callable[..., str]) -> None:
    """vLLM's `EngineArgs` and `SchedulerConfig`, SGLang's `ServerArgs`."""
    target = config(**SMALL | {"max_position_embeddings": 40_000})

    def chosen(server: str, gpu: str, **options: Any) -> tuple[Any, ...]:
        asked = memsize.serve(target, server=server, gpu=gpu, scenarios="as-given", **options).asked
        return asked["batched_tokens"], asked["seqs"], asked["utilization"], asked["block"]

    assert chosen("vllm=0.4.1", "h100") == (40_000, 256, 0.9, 16)  # a whole prompt
    assert chosen("vllm=0.6.4.post1", "h100") == (512, 256, 0.9, 16)  # in chunks, beyond 32,768
    assert chosen("vllm=0.6.4", "h100", max_model_len=1000) == (2048, 256, 0.9, 16)
    assert chosen("vllm=0.8.0", "l40s") == (2048, 1024, 0.9, 16)
    assert chosen("vllm=0.8.4", "l40s") == (2048, 256, 0.9, 16)
    assert chosen("vllm=0.8.4", "h100") == (8192, 1024, 0.9, 16)
    assert chosen("vllm=0.8.5", "a100-80gb") == (8192, 1024, 0.9, 16)
    assert chosen("vllm=v0.9.2", "a100-80gb") == (2048, 256, 0.9, 16)
    assert chosen("vllm=0.9.2", "h100") == (8192, 1024, 0.9, 16)
    assert chosen("vllm", "b200") == (16_384, 1024, 0.92, 16)
    assert chosen("sglang=0.4.2", "h100")[::2] == (8192, 0.88)
    # 81,009 MiB less what is left for steps: 512, 1.5 for each of 8,192 tokens, 2 for each of 256 sequences, an eighth
    size = card("h100").bytes / 2**20
    share = round((size - (512 + 8192 * 1.5 + 256 * 2 + 128)) / size, 3)
    assert chosen("sglang=0.5.9", "h100") == (8192, 1, share, 1)


def test_sglang_leaves_memory_for_the_graphs_of_prompts(config: Callable[..., str]) -> None:
    """Since 0.5.10 (`_handle_gpu_memory_settings` in srt/server_args.py): 8 MiB for each, or 1,536 with latent
    attention, and none with images, whose encoder takes a part of the share: 5 %, and a tenth of what it is larger than
    ViT-L.
    """
    latent = KINDS["MLA"][0]
    vision = {"model_type": "siglip_vision_model", "num_hidden_layers": 48, "hidden_size": 1024, "image_size": 28}
    images = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 4}
    images |= {"vision_config": vision | {"patch_size": 14, "num_attention_heads": 4}, "image_token_index": 9}
    images |= {"text_config": SMALL | GEMMA}

    def share(server: str, gpu: str, entries: dict[str, Any]) -> Any:
        options: dict[str, Any] = {"scenarios": "as-given", "max_model_len": 100}
        asked = memsize.serve(config(**entries), server=f"sglang={server}", gpu=gpu, **options).asked
        return asked["utilization"], asked["batched_tokens"]

    def left(gpu: str, taken: float) -> float:
        size = card(gpu).bytes / MIB
        return round((size - taken) / size, 3)

    of_h100, of_5090 = 512 + 8192 * 1.5 + 256 * 2 + 128, 512 + 4096 * 1.5 + 48 * 2 + 128
    # of 4 to 8,192 tokens: 8 up to 32, 14 up to 256, 8 up to 512, 8 up to 1,024, 12 up to 4,096, 8 more
    assert share("0.5.19", "h100", SMALL) == (left("h100", of_h100 + 8 * 58), 8192)
    assert share("0.5.20", "rtx5090", SMALL) == (left("rtx5090", of_5090 + 8 * 50), 4096)
    assert share("0.5.10", "h100", SMALL | latent) == (left("h100", of_h100 + 1536), 8192)
    # twice as many layers as ViT-L
    assert share("0.5.10", "h100", images) == (pytest.approx(left("h100", of_h100) * 0.95 * 0.9), 8192)
    assert share("0.4.6", "h100", images) == (pytest.approx(0.88 * 0.9), 8192)


@pytest.mark.parametrize(
    ("release", "entries", "size"),
    [
        # two full layers of 12, and 0.8 times as many tokens in ten with windows
        ("0.5.3", GEMMA, round(10 * 0.8 * LAYER) + 2 * LAYER),
        ("0.5.9", GEMMA, 12 * LAYER),  # of few models: not of Gemma 3
        # states take 0.9 times as much as keys and values
        ("0.5.9", KINDS["Qwen3-Next"][0], round(1.9 * TOKEN)),
    ],
)
def test_sglang_has_pools_of_windows_and_states(
    release: str, entries: dict[str, Any], size: int, config: Callable[..., str]
) -> None:
    options: dict[str, Any] = {"server": f"sglang={release}", "scenarios": "as-given", "max_model_len": 100}
    paged = memsize.serve(config(**SMALL | entries), **options).ran[0].paged
    assert paged is not None
    assert paged.block_bytes == pytest.approx(size, rel=0.01)
    if release == "0.5.3":
        with pytest.raises(InputError, match=r"keeps states: how SGLang 0\.5\.3 divides its memory is not covered"):
            memsize.serve(config(**SMALL | KINDS["Jamba"][0]), **options)


def test_cards_before_ampere_are_left_to_engine_v0(config: Callable[..., str]) -> None:
    """`_is_v1_supported_oracle`: V1 needs a compute capability of 8.0 in vLLM 0.8.0 to 0.10.1."""
    target = config(**SMALL | {"max_position_embeddings": 20_000})

    def of_step(release: str, gpu: str) -> tuple[Any, Any]:
        report = memsize.serve(target, server=f"vllm={release}", gpu=gpu, scenarios="as-given")
        assert report.asked["server"] == f"vLLM {release}"
        return report.asked["batched_tokens"], report.asked["seqs"]

    assert of_step("0.8.5", "t4") == (20_000, 256)  # a whole prompt
    assert of_step("0.8.5", "l40s") == (2048, 256)
    assert of_step("0.10.1", "t4") == (20_000, 256)
    assert of_step("0.10.2", "t4") == (2048, 256)


def test_the_sum_of_cards_is_a_tensor_of_its_own(config: Callable[..., str]) -> None:
    """The result of an MLP, 4,096 tokens × 1,024 numbers of 2 bytes, and the sum of all cards' are there at once
    (`GroupCoordinator.all_reduce` in distributed/parallel_state.py).
    """
    wide = SMALL | {"hidden_size": 1024, "num_attention_heads": 2, "head_dim": 16, "intermediate_size": 128}
    before, after = (
        memsize.serve(
            config(**wide | {"vocab_size": 128}),
            server=f"vllm={release}",
            scenarios="as-given",
            tensor_parallel_size=2,
            max_model_len=1000,
            max_num_batched_tokens=4096,
            max_num_seqs=4,
        )
        .ran[0]
        .profile
        for release in ("0.6.4", "0.6.5")
    )
    assert after - before == 4096 * 1024 * 2


def test_what_is_free_beside_the_weights_is_in_use_where_a_release_counts_segments(
    config: Callable[..., str],
) -> None:
    """Weights of a small model lie in one segment of 2 MiB; vLLM 0.6.6 takes what is in use on the card less what is
    allocated, vLLM 0.7.0 less what is reserved.
    """
    free, none = (
        memsize.serve(config(**SMALL), server=f"vllm={release}", scenarios="as-given").ran[0]
        for release in ("0.6.6", "0.7.0")
    )
    tables = 1000 * 16 * 2
    padding = 2 * 28 * 64 * 2  # of 100 tokens to 128
    assert free.weights == none.weights
    assert free.non_torch.low - none.non_torch.low == 2 * MIB - (free.weights - tables - padding)


@pytest.mark.parametrize(("release", "counts_of_llama"), [("0.22.0", True), ("0.24.0", False), ("0.29.0", True)])
def test_the_second_model_runner_estimates_graphs_later(
    release: str, counts_of_llama: bool, config: Callable[..., str]
) -> None:
    """It serves Llama from 0.23 on, but no quantized one, and mixtures of experts from 0.29 on."""
    quantized = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    mixture = SMALL | EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16}

    def has_graphs(**entries: Any) -> bool:
        row = memsize.serve(config(**entries), server=f"vllm={release}", scenarios="as-given").ran[0]
        return row.graphs.high > 0

    assert has_graphs(**SMALL) == counts_of_llama
    assert has_graphs(**mixture)
    assert has_graphs(**SMALL | quantized) == (release != "0.24.0")


@pytest.mark.parametrize(
    ("release", "gpu", "tp", "is_eager", "low", "high"),
    [
        ("0.10.2", "h100", 2, False, 93, 215),
        ("0.10.2", "h100", 4, False, 216, 245),
        ("0.10.2", "l40s", 2, False, 20, 36),
        ("0.10.2", "l40s", 1, False, 1, 11),
        ("0.11.0", "h100", 2, False, 54, 138),  # most of NCCL's buffers are there before anything is measured
        ("0.11.0", "l40s", 2, False, 1, 21),
        ("0.17.0", "h100", 1, False, 1, 16),
        ("0.19.0", "h100", 1, False, 24, 46),  # graphs are captured while it is measured
        ("0.19.0", "h100", 1, True, 1, 16),
        ("0.19.0", "h100", 2, False, 206, 221),
        ("0.19.0", "a100", 1, False, 1, 16),
        ("0.24.0", "h100", 1, False, 1, 16),  # the second model runner captures none before 0.29
        ("0.33.0", "h100", 1, False, 1, 16),  # since 0.27 they are captured afterwards
        ("0.33.0", "b200", 1, False, 1, 27),
    ],
)
def test_what_lies_outside_pytorch_is_as_in_logs(
    release: str, gpu: str, tp: int, is_eager: bool, low: int, high: int, config: Callable[..., str]
) -> None:
    """Hundredths of a GiB."""
    options: dict[str, Any] = {"server": f"vllm={release}", "enforce_eager": is_eager, "scenarios": "as-given"}
    target = config(**SMALL | {"vocab_size": 128})
    (row,) = memsize.serve(
        target, gpu=gpu, tensor_parallel_size=tp, allocator="expandable_segments:True", **options
    ).ran
    least, most = row.non_torch
    assert 0 <= least - GiB * low // 100 < 2 * MIB
    assert most - least == GiB * high // 100 - GiB * low // 100


@pytest.mark.parametrize(
    ("gpu", "kind", "size"),
    [
        ("l4", "llama", 58 * 1536 * (1984 - 1024)),
        ("l4", "qwen2", 58 * 1536 * (2288 - 1024)),  # its queries, keys and values have a bias
        ("l40s", "llama", 142 * 1536 * (1984 - 1024)),
        ("a10", "llama", 0),
        ("h100", "llama", 0),
    ],
)
def test_kernels_for_eight_bits_have_local_memory_on_ada(
    gpu: str, kind: str, size: int, config: Callable[..., str]
) -> None:
    """Each of 1,536 threads of 58 or 142 multiprocessors has as many bytes beyond the context's 1,024."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": weights}}
    quantized = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    entries = SMALL | {"model_type": kind, "architectures": [names[kind]]}
    plain, other = (
        memsize.serve(config(**entries | own), gpu=gpu, **PLAIN, enforce_eager=True).ran[0].non_torch.low
        for own in ({}, {"quantization_config": quantized | {"ignore": ["lm_head"]}})
    )
    assert other - plain == size


def test_latent_attention_absorbs_its_projections(config: Callable[..., str]) -> None:
    """vLLM 0.7.1 keeps products of them (attention/backends/mla/utils.py): of the queries with the keys, 16 × 4 heads
    × 32, of the values with the output, 4 × 32 × 64, and the turned part of the queries, 16 × 4 × 8; in two layers.
    Computing them takes a workspace of cuBLAS, which is there when the step begins.
    """
    entries = SMALL | KINDS["MLA"][0]
    before, after = (
        memsize.serve(config(**entries), server=f"vllm={release}", scenarios="as-given").ran[0]
        for release in ("0.7.0", "0.7.1")
    )
    assert after.weights - before.weights == 2 * 4 * (16 * 32 + 32 * 64 + 16 * 8) * 2 + 8_519_680
    assert before.profile - after.profile == 8_519_680


def test_a_release_between_two_that_were_read_says_so(config: Callable[..., str]) -> None:
    between, read = (
        memsize.serve(config(**SMALL), server=f"vllm={release}", scenarios="as-given").assumptions
        for release in ("0.8.3", "0.8.4")
    )
    assert (
        "vLLM 0.8.3 was not read: it follows vLLM 0.8.0, and what changed up to 0.8.4 may be in it already" in between
    )
    assert not any("was not read" in text for text in read)


def test_rules_of_windows_follow_the_release(config: Callable[..., str]) -> None:
    """Each layer has a cache like those of full attention up to 0.9.0; the cache's size is that of whole requests from
    0.21 on; from 0.26 on a window waits for the tokens of two steps.
    """

    def served(release: str) -> Any:
        options: dict[str, Any] = {"max_model_len": 1000, "max_num_batched_tokens": 64, "max_num_seqs": 4}
        report = memsize.serve(config(**SMALL | GEMMA), server=f"vllm={release}", scenarios="as-given", **options)
        return report, report.ran[0].paged

    report, paged = served("0.9.0")
    assert report.groups == ((FULL, 12, None),)
    assert paged.request_blocks == 63
    report, paged = served("0.19.0")
    assert paged.request_blocks == 5 * 12 + 63  # 99 + 64 tokens take 11 blocks, and one more
    assert paged.tokens.low == paged.blocks.low // 6 * 16
    _, paged = served("0.21.0")
    assert paged.request_blocks == 5 * 12 + 63
    assert paged.tokens.low == int(paged.blocks.low / paged.request_blocks * 1000)
    _, paged = served("0.26.0")
    assert paged.request_blocks == 5 * 16 + 63  # 99 + 2 × 64 tokens take 15 blocks, and one more


def test_a_cache_of_a_set_size(config: Callable[..., str]) -> None:
    options: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "gpu": "t4", **PLAIN}
    (row,) = memsize.serve(config(**SMALL), kv_cache_memory="1MiB", **options).ran
    assert row.paged is not None
    assert row.paged.available == (2**20, 2**20)
    assert row.paged.blocks == (256, 256)  # of 16 tokens in two layers
    assert row.paged.longest == (1000, 1000)
    (row,) = memsize.serve(config(**SMALL), kv_cache_memory=16 * 2 * LAYER * 10, **options).ran
    assert row.paged is not None
    assert row.paged.longest == (160, 160)
    report = memsize.serve(config(**SMALL), kv_cache_memory="15GiB", **options)
    (row,) = report.ran
    assert row.paged is None
    assert row.shortage > 0
    assert "are missing for a KV cache of 15.0 GiB." in str(report)


def test_room_for_cuda_graphs_is_an_interval(config: Callable[..., str]) -> None:
    options: dict[str, Any] = {"scenarios": "as-given", "gpu_memory_utilization": 0.9, "gpu": "a100"}
    captured, eager = (
        memsize.serve(config(**SMALL), server="vllm=0.20.0", enforce_eager=is_eager, **options).ran[0]
        for is_eager in (False, True)
    )
    assert captured.graphs.high > captured.graphs.low > 0
    assert eager.graphs == (0, 0)
    assert captured.paged and eager.paged
    assert captured.non_torch.low - eager.non_torch.low == 2**30 // 10 - 2**30 // 100  # graphs are captured meanwhile
    taken = captured.graphs.low + captured.non_torch.low - eager.non_torch.low
    assert eager.paged.available.high - captured.paged.available.high == taken
    assert any("CUDA graphs" in text for text in memsize.serve(config(**SMALL), **PLAIN).assumptions)


@pytest.mark.parametrize(
    ("release", "gpu", "seqs", "sizes"),
    [  # "Profiling CUDA graph memory: PIECEWISE=51 (largest=512), FULL=35 (largest=256)" in logs
        ("0.21.0", "RTX 4090", 256, (51, 35, 512)),
        ("0.26.0", "B300", 1024, (51, 51, 512)),
        ("0.28.0", "B300", 1024, (83, 83, 1024)),
        ("0.28.0", "RTX 5090", 1024, (51, 51, 512)),
        ("0.22.0", "A40", 128, (35, 19, 256)),
        ("0.20.0", "RTX 5090", 40, (13, 8, 80)),
        ("0.20.0", "RTX 5090", 32, (11, 7, 64)),
        ("0.20.0", "RTX 5090", 2, (3, 2, 4)),
        ("0.20.0", "RTX 5090", 1, (2, 1, 2)),
    ],
)
def test_the_graphs_that_are_captured(
    release: str, gpu: str, seqs: int, sizes: tuple[int, int, int], config: Callable[..., str]
) -> None:
    mixture = SMALL | EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16}
    options = {"gpu": gpu, "server": f"vllm={release}", "scenarios": "as-given"}
    report = memsize.serve(config(**mixture), max_num_seqs=seqs, max_num_batched_tokens=2048, **options)  # type: ignore[arg-type]
    piecewise, full, largest = sizes
    text = f"{piecewise} piecewise and {full} full graphs of up to {largest:,} tokens"
    assert any(text in assumption for assumption in report.assumptions)


def test_graphs_take_a_pool_and_what_the_driver_keeps(config: Callable[..., str]) -> None:
    """Where 51 piecewise and 35 full graphs of n layers are measured, 128 to 184 KiB of each before Hopper; since then
    0 to 88, of the full ones 1 MiB at least. Between the warm-up of a full graph and its recording the cache is
    emptied, which counts as another pool but for a segment.

    Where the second graph of each mode counts for all, it shows in pages of 2 MiB. On an RTX a piecewise one is n + 1
    graphs of 176 to 240 KiB: of 3 and of 7 up to one page, or none, of which 1 MiB counts. A full one counts 1 to 2.

    FlashAttention 3 has results of 32 parts of 256 tokens with 4 heads of 16 or 32 numbers, in float32.
    """

    def graphs(gpu: str, layers: int, head: int = 16, release: str = "0.33.0") -> Interval:
        entries = SMALL | {"num_hidden_layers": layers, "head_dim": head}
        options: dict[str, Any] = {"max_num_seqs": 256, "server": f"vllm={release}", "scenarios": "as-given"}
        return memsize.serve(config(**entries), gpu=gpu, **options).ran[0].graphs

    few, many = graphs("RTX 4090", 2), graphs("RTX 4090", 6)
    assert (many.low - few.low, many.high - few.high) == (
        86 * 6 * 128 * KIB - 35 * MIB,
        86 * 6 * 184 * KIB - 35 * MIB,
    )
    assert few.high - few.low == 20 * MIB  # 86 * 2 * 184 KiB would be 30.9
    pool = (few.high - 35 * MIB) // 2
    few, many = graphs("RTX 5090", 2), graphs("RTX 5090", 6)
    assert (many.low - few.low, many.high - few.high) == (0, 86 * 6 * 88 * KIB - 35 * MIB)
    extrapolated = graphs("B200", 2, release="0.20.0")
    assert extrapolated == (pool + (50 + 34) * MIB, pool + 20 * MIB + (50 + 34) * MIB)
    narrow, wide = graphs("H100 80GB", 2), graphs("H100 80GB", 2, 32)
    parts = 32 * 256 * 4 * 16 * 4
    assert (narrow.low - few.low, narrow.high - few.high) == (2 * parts, 2 * parts)
    assert wide.low - narrow.low - 2 * parts < 4 * MIB

    assert graphs("RTX 5090", 2, release="0.20.0") == graphs("RTX 4090", 2, release="0.20.0")
    few, many, deep = (graphs("RTX 4090", layers, release="0.20.0") for layers in (2, 6, 12))
    assert few == (pool + (51 + 34) * MIB, pool + 20 * MIB + (51 * 2 + 34 * 2) * MIB)
    assert many == few
    assert deep == (pool + (51 * 2 + 34) * MIB, pool + 20 * MIB + (51 * 4 + 34 * 2) * MIB)  # 13 graphs: 2.2 to 3.05 MiB


def test_the_second_graph_on_hopper_counts_for_all_others(config: Callable[..., str]) -> None:
    """32 parts of 512 tokens with 4 heads of 256 numbers, or with latent attention of 512, are more than the pool and
    its workspace of cuBLAS. 51 piecewise and 51 full graphs keep 56 to 224 KiB of each of 20 layers, or up to 512.
    """
    options: dict[str, Any] = {"gpu": "h100", "server": "vllm=0.20.0", "scenarios": "as-given"}
    deep = {"num_hidden_layers": 20, "head_dim": 256}
    plain = memsize.serve(config(**SMALL | deep), **options).ran[0].graphs
    entries = SMALL | KINDS["MLA"][0] | {"num_hidden_layers": 20, "kv_lora_rank": 512}
    latent = memsize.serve(config(**entries), **options).ran[0].graphs
    parts = 32 * 512 * 4 * 256 * 4
    assert plain == (parts + 102 * 20 * 56 * KIB, parts + 102 * 20 * 224 * KIB)
    assert latent == (2 * parts + 102 * 20 * 56 * KIB, 2 * parts + 102 * 20 * 512 * KIB)


def test_hybrids_of_granite_have_a_rotary_table_where_they_name_it(config: Callable[..., str]) -> None:
    """1,000 positions times 16 numbers of a head in two bytes, beside two blocks of the frequencies of transformers."""

    def weights(kind: str | None) -> int:
        entries = SMALL | KINDS["Granite"][0] | {"position_embedding_type": kind}
        return int(memsize.serve(config(**entries), gpu="t4", max_num_seqs=4, **PLAIN).ran[0].weights)

    assert weights("rope") - weights(None) == weights("rope") - weights("nope") == 1000 * 16 * 2 + 2 * 512


def test_graphs_of_experts_have_more_kernels(config: Callable[..., str]) -> None:
    """13 graphs between 12 layers' attention keep up to 240 KiB, 3.05 MiB: two pages; with experts up to 64 KiB more,
    3.86, the same two; of 15 layers 3.75 and 4.75: two and three.
    """
    mixture = SMALL | EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16}
    options: dict[str, Any] = {"gpu": "RTX 4090", "server": "vllm=0.20.0", "scenarios": "as-given", "max_num_seqs": 256}

    def grown(entries: dict[str, Any]) -> int:
        few, many = (
            memsize.serve(config(**entries | {"num_hidden_layers": layers}), **options).ran[0].graphs.high
            for layers in (12, 15)
        )
        return many - few

    assert grown(SMALL) == 0
    assert grown(mixture) == 51 * 2 * MIB


def test_full_graphs_of_states_keep_more(config: Callable[..., str]) -> None:
    """34 more full graphs keep up to 6 MiB where layers have states, else 2; 3 or 4 between layers up to a page."""
    options: dict[str, Any] = {"gpu": "RTX 4090", "server": "vllm=0.20.0", "scenarios": "as-given", "max_num_seqs": 256}

    def uncertain(entries: dict[str, Any]) -> int:
        graphs = memsize.serve(config(**entries), **options).ran[0].graphs
        return graphs.high - graphs.low

    plain = (20 + 51 + 34) * MIB
    assert uncertain(SMALL) == plain
    assert uncertain(SMALL | KINDS["Granite"][0]) == plain + 34 * 4 * MIB


@pytest.mark.parametrize(
    ("release", "vocabulary", "allocator", "least", "most"),
    [
        ("0.24.0", 150_000, None, 0, 0),
        ("0.28.0", 150_000, None, 0, 20),  # whole segments count: the table's, of 18.3 MiB, may stay
        ("0.28.0", 150_000, "expandable_segments:True", 0, 0),
        ("0.30.0", 200_000, None, 0, 26),
        ("0.31.0", 200_000, None, 0, 0),  # no block above 20 MiB is split
        ("0.33.0", 150_000, None, 0, 20),
    ],
)
def test_a_first_start_times_the_kernel_that_reads_the_table(
    release: str, vocabulary: int, allocator: str | None, least: int, most: int, config: Callable[..., str]
) -> None:
    """All tokens × 64 numbers, 2,000 embeddings and their norms, and a T4's cache, of 3 to 6 MiB; of 2 bytes. Counts
    of tokens, 4 bytes and a bit for each since 0.27, are there beside them.
    """
    later, first = (
        memsize.serve(
            config(**SMALL | {"vocab_size": vocabulary}),
            gpu="t4",
            server=f"vllm={release}",
            scenarios="as-given",
            allocator=allocator,
            max_num_batched_tokens=2000,
            max_num_seqs=1,
            first_start=is_first,
        )
        for is_first in (False, True)
    )
    assert any("first start" in text for text in later.assumptions)
    assert not any("first start" in text for text in first.assumptions)
    (warm,), (cold,) = later.ran, first.ran
    peak = vocabulary * 64 * 2 + 2 * 2000 * 64 * 2 + 3 * MIB
    counts = (vocabulary + -(-vocabulary // 32)) * 4 if release != "0.24.0" else 0
    assert cold.profile == max(peak, warm.profile - counts) + counts
    beyond = peak + 3 * MIB + counts - cold.profile
    grown = [now - before for now, before in zip(cold.non_torch, warm.non_torch, strict=True)]
    assert grown == [least * MIB, most * MIB + beyond]


@pytest.mark.parametrize(
    ("release", "vocabulary", "least", "most"),
    [
        ("0.24.0", 64, 2 * MIB, 6 * MIB),
        ("0.9.2", 64, 2 * MIB, 6 * MIB),
        ("0.8.5", 64, 256_000_000, 256_000_000),  # PyTorch 2.6
        ("0.24.0", 20_000, 0, 0),  # the sampler, which is not compiled, takes most
    ],
)
def test_a_first_start_times_the_kernels_of_a_step_where_they_run(
    release: str, vocabulary: int, least: int, most: int, config: Callable[..., str]
) -> None:
    """The largest is the activation, beside which a buffer of the GPU's cache (2 to 6 MiB on an A10) is written: 4,096
    tokens × (2 + 1) × 1,024 numbers of 2 bytes are 24 MiB; 512 rows of 20,000 logits are 39 MiB a copy.
    """
    entries = SMALL | {"intermediate_size": 1024, "vocab_size": vocabulary}
    options: dict[str, Any] = {"gpu": "a10", "server": f"vllm={release}", "scenarios": "as-given"}
    options |= {"max_num_batched_tokens": 4096, "max_num_seqs": 512}
    warm, cold = (
        memsize.serve(config(**entries), first_start=is_first, **options).ran[0] for is_first in (False, True)
    )
    grown = [now - before for now, before in zip(cold.non_torch, warm.non_torch, strict=True)]
    figures = cold.profile - warm.profile, *grown
    # Blocks of up to 1 MiB more are not split.
    assert figures == pytest.approx((least, 0, most - least), abs=MIB)


def test_the_head_reads_random_states_beside_those_of_the_step(config: Callable[..., str]) -> None:
    """512 × 64 numbers of 2 bytes, since vLLM 0.9 (`_dummy_sampler_run` of the first model runner)."""
    options: dict[str, Any] = {"scenarios": "as-given", "max_num_batched_tokens": 1024, "max_num_seqs": 512}
    before, after = (
        memsize.serve(config(**SMALL | {"vocab_size": 20_000}), server=f"vllm={release}", **options).ran[0].profile
        for release in ("0.8.5", "0.9.0")
    )
    assert after - before == 512 * 64 * 2


def test_scaled_embeddings_are_gone_after_the_first_layer(config: Callable[..., str]) -> None:
    """Granite multiplies them: its largest step is Llama's."""
    options: dict[str, Any] = {"server": "vllm=0.19.0", "scenarios": "as-given", "max_num_batched_tokens": 4096}
    entries = SMALL | {"intermediate_size": 1024, "vocab_size": 64}
    granite = {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "embedding_multiplier": 12}
    scaled, plain = (memsize.serve(config(**entries | other), **options).ran[0].profile for other in (granite, {}))
    assert scaled == plain


def test_large_weights_are_not_split_from_their_segments(config: Callable[..., str]) -> None:
    """Gate and up are one tensor of 2 × 5,248 × 1,024 × 2 bytes = 20.5 MiB in a segment of 22. Since vLLM 0.22 the rest
    of a block above 20 MiB is part of it; that of the second product, 10.25 of 12 MiB, is not.
    """
    entries = SMALL | {"hidden_size": 1024, "intermediate_size": 5248, "num_hidden_layers": 1}
    options: dict[str, Any] = {"scenarios": "as-given", "max_num_batched_tokens": 64, "max_num_seqs": 4}
    split, whole = (
        memsize.serve(config(**entries), server=f"vllm={release}", **options).ran[0].weights
        for release in ("0.20.0", "0.22.0")
    )
    assert whole - split == 1.5 * MIB


def test_both_products_of_experts_share_a_buffer(config: Callable[..., str]) -> None:
    """4,096 tokens × 2 experts: 2 × 32 numbers go into the activation, 32 come out, and 64 are the result. Since vLLM
    0.8 one buffer serves the first and the last.
    """
    routed = SMALL | EXPERTS | {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}
    routed |= {"vocab_size": 64, "shared_expert_intermediate_size": 16}
    options: dict[str, Any] = {"scenarios": "as-given", "max_num_batched_tokens": 4096, "max_num_seqs": 64}

    def step(release: str) -> int:
        return memsize.serve(config(**routed), server=f"vllm={release}", **options).ran[0].profile

    assert step("0.7.3") - step("0.8.0") == 4096 * 2 * 2 * 32 * 2


def test_weights_that_a_server_quantizes(config: Callable[..., str]) -> None:
    """Those of experts are, the head is not: 4 experts of 3 × 512 × 256 numbers, and what attention has, in two layers.

    vLLM 0.19 logged 8.49 GiB for Llama-3.1-8B with `--quantization fp8` (jgchn/llm-d-planner, accuracy).
    """
    routed = WIDE | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128}
    routed |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    rows = memsize.serve(config(**routed), server="vllm=0.19.0", max_num_batched_tokens=64).ran
    plain, fp8, int4 = sorted(rows, key=lambda row: -row.weights)
    heads = 128 * (4 + 2 + 2 + 4)
    numbers = 2 * (4 * 3 * 512 * 256 + 512 * heads)
    assert plain.weights - fp8.weights == pytest.approx(numbers, rel=0.01)
    assert plain.weights - int4.weights == pytest.approx(numbers * (2 - 0.5 - (2 + 0.5) / 128), rel=0.01)


def test_a_gate_of_one_number_fits_in_no_word_of_four_bits(config: Callable[..., str]) -> None:
    """Eight numbers of AWQ's are a word: the gate of shared experts, 64 to 1, has none."""
    routed = SMALL | EXPERTS | {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}
    (row,) = memsize.serve(config(**routed | {"shared_expert_intermediate_size": 16}), scenarios="int4-weight").ran
    assert row.weights > 0


def test_the_workspace_of_experts_stays(config: Callable[..., str]) -> None:
    """Since vLLM 0.14 it is there beside the logits: 4,096 tokens × 2 experts, 64 numbers of a result, and 64 of the
    first product, which are more than those of a result, in 2 bytes.
    """
    routed = SMALL | EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16}
    options: dict[str, Any] = {"scenarios": "as-given", "max_num_batched_tokens": 4096, "max_num_seqs": 512}
    before, after = (
        memsize.serve(config(**routed | {"vocab_size": 50_000}), server=f"vllm={release}", **options).ran[0].profile
        for release in ("0.13.0", "0.14.0")
    )
    assert after - before == 4096 * 2 * (64 + 64) * 2


def test_gemma_4_turns_a_part_of_a_head_with_a_table_for_all_of_it(config: Callable[..., str]) -> None:
    """Sines and cosines at 1,000 positions: of 16 numbers in windows, of all 32 in full attention though a quarter of
    them turns (`gemma4_rope.py`); in 2 bytes.
    """
    entries = SMALL | {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "head_dim": 16}
    entries |= {"global_head_dim": 32, "num_hidden_layers": 6, "hidden_size_per_layer_input": 0, "vocab_size": 128}
    short, long = (
        memsize.serve(config(**entries | {"max_position_embeddings": count}), **PLAIN).ran[0].weights
        for count in (1000, 2000)
    )
    assert long - short == 1000 * (16 + 32) * 2


@pytest.mark.parametrize(("seqs", "rows"), [(64, 40), (20, 32), (8, 8)])
def test_a_search_in_tiles_has_a_row_on_each_multiprocessor(seqs: int, rows: int, config: Callable[..., str]) -> None:
    """Triton's kernel has the next power of two of them, at most the 40 of a T4, in float32; FlashInfer's none."""
    tiles, none = (
        memsize.serve(
            config(**SMALL | {"vocab_size": 50_000}),
            gpu="t4",
            server=f"vllm={release}",
            scenarios="as-given",
            max_num_batched_tokens=64,
            max_num_seqs=seqs,
        )
        .ran[0]
        .profile
        for release in ("0.20.0", "0.21.0")
    )
    assert tiles - none == -(-rows * 50_000 * 4 // 512) * 512


WIDE = SMALL | {"hidden_size": 512, "intermediate_size": 1024}
LINEARS = 2 * (2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 1024)
"""Numbers of the weights of linear layers, without the head."""
QUANTIZED: dict[str, tuple[dict[str, Any], float]] = {
    # the config; bytes that a number takes: packed, and for each group of 32 a scale in bfloat16 and its zero
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32}, 0.5 + (2 + 0.5) / 32),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, 0.5 + 2 / 32),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, 1 + 4 / 1024),
    "NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5 + 1 / 16),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
            },
        },
        0.5 + 2 / 32,
    ),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_checkpoint_is_served_as_it_is(name: str, config: Callable[..., str]) -> None:
    entries, width = QUANTIZED[name]
    options: dict[str, Any] = {"server": "vllm=0.9.2", "max_num_batched_tokens": 64, "max_num_seqs": 4}
    (plain,) = memsize.serve(config(**WIDE), scenarios="as-given", **options).ran
    report = memsize.serve(config(**WIDE | {"quantization_config": entries}), **options)
    (row,) = report.ran  # no other scenario quantizes it anew
    assert plain.weights - row.weights == pytest.approx(LINEARS * (2 - width), rel=0.02)  # in blocks of 512 bytes
    assert row.title == f"weights of the checkpoint ({entries['quant_method']})"
    assert not any("they are shown unquantized" in note for note in report.notes)


def test_blackwell_multiplies_nvfp4_in_a_workspace(config: Callable[..., str]) -> None:
    """FlashInfer's takes the place of cuBLAS's. Beside the result of a product its input in four bits is smaller than
    the result of the activation, which comes after it; Marlin's sums, 64 KiB for each of 170 multiprocessors, are not.
    """
    entries = {"quantization_config": QUANTIZED["NVFP4"][0]}
    fp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    inputs_kept: dict[str, Any] = {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": fp4}}}
    inputs_too = inputs_kept | {"config_groups": {"0": {"weights": fp4, "input_activations": fp4}}}

    def step(tokens: int, **quantization: Any) -> int:
        options: dict[str, Any] = {"gpu": "RTX 5090", "server": "vllm=0.24.0", "scenarios": "as-given"}
        options |= {"max_num_batched_tokens": tokens, "max_num_seqs": 4, "enforce_eager": True}
        return memsize.serve(config(**WIDE | quantization), **options).ran[0].profile

    for tokens in (4096, 8192):
        assert step(tokens, **entries) - step(tokens) == 32 * MIB - 8_519_680
    assert step(8192, quantization_config=inputs_too) == step(8192, **entries)
    assert step(8192, quantization_config=inputs_kept) < step(8192)


MXFP4: dict[tuple[str, str], int] = {
    # Marlin's: 96 inner numbers become 128 and 96 outer ones 256, of 17/32 bytes with their scales.
    ("0.19.0", "a100"): 3 * 128 * 256 * 17 // 32 + (2 * 128 + 256) * 2,
    ("0.11.0", "h100"): 3 * 128 * 256 * 17 // 32 + (2 * 128 + 256) * 2,
    ("0.11.0", "b200"): 3 * 128 * 256 * 17 // 32 + (2 * 128 + 256) * 2,
    # FlashInfer's: 256 inner ones up to 0.26; biases in float32.
    ("0.26.0", "b200"): 3 * 256 * 256 * 17 // 32 + (2 * 256 + 256) * 4,
    ("0.27.0", "b200"): 3 * 128 * 256 * 17 // 32 + (2 * 128 + 256) * 4,
    # Triton's: 128 inner numbers. The 96 outer ones are 48 bytes in rows of 32, and 3 scales in rows of 2; outputs are
    # 16 rows or more (64 with Triton 3.6), scales' 256. The checkpoint's scales stay up to 0.24.
    ("0.12.0", "h100"): 3 * 128 * 3 + 256 * 64 + 96 * 64 + 256 * 4 + 256 * 4 + (2 * 128 + 96) * 4,
    ("0.19.0", "h100"): 3 * 128 * 3 + 256 * 64 + 128 * 64 + 256 * 4 + 256 * 4 + (2 * 128 + 96) * 4,
    ("0.25.1", "h100"): 256 * 64 + 96 * 64 + 256 * 4 + 256 * 4 + (2 * 128 + 96) * 4,
}
"""Bytes of an expert with 96 numbers in and out and 96 between, by vLLM's release and GPU."""


def test_experts_in_mxfp4_are_rounded_up_for_the_kernels_of_a_gpu(config: Callable[..., str]) -> None:
    """vLLM logged 13.64 GiB for gpt-oss-20b on an H100 (0.19.0), 13.72 on an A100, and 65.97 (0.10.1) and 64.38
    (0.14.1) for gpt-oss-120b on H100s: 13.64, 13.71, 65.95 and 64.36 here (jgchn/llm-d-planner, myoceane.fr,
    vllm-project/vllm#23278, #33155).
    """
    entries = SMALL | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 16}
    entries |= {"hidden_size": 96, "intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2}
    entries |= {"quantization_config": {"quant_method": "mxfp4"}}

    def weights(server: str, gpu: str) -> int:
        options: dict[str, Any] = {"scenarios": "as-given", "max_num_batched_tokens": 64, "max_num_seqs": 4}
        return memsize.serve(config(**entries), gpu=gpu, server=server, **options).ran[0].weights

    as_stored = weights("sglang=0.5.9", "a100")
    sizes = {case: (weights(f"vllm={case[0]}", case[1]) - as_stored) // (2 * 8) for case in MXFP4}
    assert sizes == {case: size - 3 * 96 * 96 * 17 // 32 - 3 * 96 * 2 for case, size in MXFP4.items()}


def test_layers_that_a_checkpoint_does_not_quantize(config: Callable[..., str]) -> None:
    entries = QUANTIZED["fp8"][0]
    options: dict[str, Any] = {"scenarios": "as-given", "max_num_batched_tokens": 64, "max_num_seqs": 4}
    every, some = (
        memsize.serve(config(**WIDE | {"quantization_config": entries | ignored}), **options).ran[0].weights
        for ignored in ({}, {"modules_to_not_convert": ["lm_head", "model.layers.1"]})
    )
    assert some - every == pytest.approx(LINEARS / 2, rel=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scenarios": "fp8-weight"}, r"quantized already \(awq\): serve it as-given"),
        ({"scenarios": "as-given", "method": "hqq"}, "quantized by 'hqq', which is not covered"),
    ],
)
def test_what_a_quantized_checkpoint_cannot_be(
    options: dict[str, Any], message: str, config: Callable[..., str]
) -> None:
    entries = {"quant_method": options.pop("method", "awq")}
    with pytest.raises(ScenarioError, match=message):
        memsize.serve(config(**SMALL | {"quantization_config": entries}), **options)


VISION = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 99,
    "text_config": {name: value for name, value in SMALL.items() if name != "architectures"},
    "vision_config": {"model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 256}
    | {"num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28, "patch_size": 14, "projection_dim": 64},
    "dtype": "bfloat16",
}


def test_gpus_share_a_model_that_reads_images(config: Callable[..., str]) -> None:
    """Half of the linear layers of texts and of the encoder, of the padded vocabulary's rows in embedding and head; the
    projector is whole.
    """
    options: dict[str, Any] = {"scenarios": "as-given", "max_num_batched_tokens": 512, "max_num_seqs": 4}
    wide = {"hidden_size": 512, "intermediate_size": 1024}
    entries = VISION | {"text_config": VISION["text_config"] | wide, "vision_config": VISION["vision_config"] | wide}
    one, half = (memsize.serve(config(**entries), tensor_parallel_size=tp, **options).ran[0].weights for tp in (1, 2))
    encoder = 2 * (4 * 512 * 512 + 2 * 512 * 1024)
    attention = 512 * 128 * (4 + 2 + 2 + 4)
    text = 2 * (attention + 3 * 512 * 1024)
    assert one - half == pytest.approx((encoder + text + 2 * 128 * 512) * 2 / 2, rel=0.01)


def test_images_of_qwen3_vl_have_wider_tables_and_buffers(config: Callable[..., str]) -> None:
    """Sines and cosines of four times 1,000 positions of 16 numbers, and of two layers of images the states of a step's
    512 tokens: MRotaryEmbedding and `deepstack_input_embeds` of vLLM 0.24.
    """
    text = {name: value for name, value in SMALL.items() if name != "architectures"}
    entries = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "text_config": text | {"model_type": "qwen3_vl_text", "head_dim": 16, "vocab_size": 128},
        "vision_config": {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 14}
        | {"out_hidden_size": 64, "spatial_merge_size": 2, "deepstack_visual_indexes": [0, 1]},
    }
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    served = {
        tokens: memsize.serve(config(**entries), max_num_batched_tokens=tokens, max_num_seqs=4, **PLAIN).ran[0].weights
        for tokens in (512, 1024)
    }
    assert served[1024] - served[512] == 2 * 512 * 64 * 2
    entries["text_config"] |= {"rope_parameters": sections}
    wider = memsize.serve(config(**entries), max_num_batched_tokens=512, max_num_seqs=4, **PLAIN).ran[0].weights
    assert wider - served[512] == 3 * 1000 * 16 * 2


def test_images_are_encoded_before_the_step(config: Callable[..., str]) -> None:
    """A step of 8,192 tokens may stand for 2,048 images of 4; V0 reads one with each of 256 sequences, in the step."""
    options: dict[str, Any] = {"scenarios": "as-given", "gpu": "h100", "max_num_batched_tokens": 8192}
    said: list[str] = []
    report = memsize.serve(config(**VISION), server="vllm=0.9.2", max_num_seqs=4096, progress=said.append, **options)
    assert "as-given: 2,048 images" in said
    assert any("transformers' own encoder reads them" in text for text in report.assumptions)
    # the input and the output of a layer's MLP, with its inside before and after the activation
    assert report.ran[0].profile > 2048 * 5 * (2 * 64 + 2 * 256) * 2
    (text,) = memsize.serve(config(**SMALL), server="vllm=0.7.3", max_model_len=1000, **options).ran
    (both,) = memsize.serve(config(**VISION), server="vllm=0.7.3", max_model_len=1000, **options).ran
    assert both.weights > text.weights


def test_images_and_their_embeddings_are_there_during_a_step(config: Callable[..., str]) -> None:
    """128 images of 3 × 28 × 28 numbers, which the second model runner holds no longer, and of 4 embeddings of 64; in 2
    bytes. The logits of 512 texts are the peak.
    """
    options: dict[str, Any] = {"scenarios": "as-given", "max_num_batched_tokens": 512, "max_num_seqs": 512}
    large = {"vocab_size": 50_000}
    images, texts = VISION | {"text_config": VISION["text_config"] | large}, SMALL | large
    first, second = (
        memsize.serve(config(**images), server=release, **options).ran[0].profile
        - memsize.serve(config(**texts), server=release, **options).ran[0].profile
        for release in ("vllm=0.20.0", "vllm=0.26.0")
    )
    assert second == 128 * 4 * 64 * 2
    assert first - second == 128 * 3 * 28 * 28 * 2


def test_the_states_that_llama_3_2_keeps_of_images(config: Callable[..., str]) -> None:
    """One image of 4 tiles for each of 256 sequences: the peak is in the second encoder's MLP, after its activation."""
    heads = {"num_attention_heads": 4, "hidden_size": 64}
    text = {name: SMALL[name] for name in ("vocab_size", "num_key_value_heads", "intermediate_size")}
    vision = {"model_type": "mllama_vision_model", "image_size": 28, "patch_size": 14, "num_hidden_layers": 3}
    mllama = {
        "architectures": ["MllamaForConditionalGeneration"],
        "model_type": "mllama",
        "dtype": "bfloat16",
        "image_token_index": 99,
        "text_config": heads
        | text
        | {"model_type": "mllama_text_model", "num_hidden_layers": 4, "cross_attention_layers": [1], "pad_token_id": 0}
        | {"max_position_embeddings": 1000},
        "vision_config": vision
        | {"num_global_layers": 2, "hidden_size": 64, "attention_heads": 4, "intermediate_size": 256}
        | {"intermediate_layers_indices": [0, 1], "vision_output_dim": 3 * 64, "max_num_tiles": 4},
    }
    (row,) = memsize.serve(config(**mllama), gpu="h100", server="vllm=0.6.6", scenarios="as-given").ran
    images, patches, padded = 256, 2 * 2 + 1, 8
    state = images * 4 * padded * 64 * 2
    mask = images * (4 * padded) ** 2 * 2
    embedded = images * 4 * (patches - 1) * 64 * 2
    pixels = images * 4 * 3 * 28 * 28 * 4
    tokens = images * 4 * patches * 3 * 8
    # two states and the last, and a stack of the two; input of the encoder and of its layer, residual, norm; the MLP
    states = (2 + 1 + 2 + 4 + 2 * 4) * state
    assert states + mask + embedded + 2 * pixels + tokens == pytest.approx(row.profile - 32 * 2**20, rel=0.01)
    assert row.paged is not None
    assert row.paged.block_bytes == 16 * 4 * LAYER


def test_only_a_config_can_be_divided() -> None:
    with pytest.raises(InputError, match=r"only a target such as hf:config\.json can be divided"):
        memsize.serve(nn.Linear(4, 4), (4,), tensor_parallel_size=2)


def test_the_command_line(config: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, saved = config(**SMALL), str(tmp_path / "run.memsize")
    asked = [
        "serve",
        target,
        "--gpu",
        "t4",
        "--max-num-batched-tokens",
        "64",
        "--max-num-seqs",
        "4",
        "--max-model-len",
        "100",
    ]
    assert run([*asked, "-s", "as-given,int8-weight", "--save", saved, "-f", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "memsize.serving/1"
    assert data["asked"]["context"] == 100
    assert [row["scenario"] for row in data["servings"]] == ["as-given", "int8-weight"]
    assert all(row["paged"]["request_blocks"] == 7 for row in data["servings"])
    assert run(["serve", saved, "-f", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == data
    for format in ("text", "html", "markdown", "csv"):
        assert run(["serve", saved, "-f", format]) == 0
        assert "as-given" in capsys.readouterr().out
    assert run(["serve", target, "--tensor-parallel-size", "3"]) == 2
    assert capsys.readouterr().err.endswith("has 4 attention heads: tp 3 does not divide them\n")


# -- what vLLM logged --------------------------------------------------------------------------------------------------

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published figures are not here")
def test_the_tokens_that_were_published(config: Callable[..., str]) -> None:
    with PUBLISHED.open(newline="") as lines:
        published = [row for row in csv.DictReader(lines) if row["source"].startswith("vllm ")]
    assert published
    for row in published:
        assert row["model"] == "Qwen3-1.7B"
        cache = float(row["config"].removeprefix("KV cache of ").removesuffix(" GiB")) * GiB
        paged = memsize.serve(config(**QWEN3), gpu="h100", scenarios="as-given").ran[0].paged
        assert paged is not None
        assert cache // paged.block_bytes * 16 == pytest.approx(float(row["measured"]), rel=0.02)


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
QWEN25 = QWEN3 | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 1536, "head_dim": 128}
QWEN25 |= {"intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
LOGS: dict[str, tuple[dict[str, Any], str, float, dict[str, Any], tuple[float, float, float], int | None]] = {
    # config, card, its GiB; arguments; GiB of weights, of the step, and of the cache; blocks
    "Qwen2.5-1.5B, L40S": (
        QWEN25, "l40s", 44.39,
        {"server": "vllm=0.7.3", "gpu_memory_utilization": 0.85, "max_model_len": 4096},
        (2.88, 1.40, 33.37), 78_115,
    ),
    "Llama-3.1-8B, RTX 3090, 20,000 tokens": (
        LLAMA, "rtx3090", 23.58, {"server": "vllm=0.6.4", "max_model_len": 20_000}, (14.99, 2.07, 3.81), 1952,
    ),
    "Llama-3.1-8B, RTX 3090, 29,000 tokens": (
        LLAMA, "rtx3090", 23.58, {"server": "vllm=0.6.4", "max_model_len": 29_000}, (14.99, 2.99, 2.89), 1478,
    ),
    "Qwen2.5-1.5B, T4": (
        QWEN25 | {"dtype": "float16"}, "t4", 14.56,
        {"server": "vllm=0.7.3", "gpu_memory_utilization": 0.5, "max_num_batched_tokens": 32_768},
        (2.8875, 2.02, 2.36), 5519,
    ),
    "Llama-3.1-8B, H100": (LLAMA, "h100", 79.14, {"server": "vllm=0.6.6"}, (14.99, 1.19, 54.93), None),
}  # fmt: skip
"""vllm-project/vllm#10517, and logs in public repositories."""


@pytest.mark.thorough
@pytest.mark.parametrize("log", LOGS)
def test_the_parts_of_a_log(log: str, config: Callable[..., str]) -> None:
    entries, gpu, size, options, (weights, step, cache), blocks = LOGS[log]
    share = options.get("gpu_memory_utilization", 0.9) * size * GiB / card(gpu).bytes
    report = memsize.serve(
        config(**entries), gpu=gpu, scenarios="as-given", **options | {"gpu_memory_utilization": share}
    )
    (row,) = report.ran
    assert row.paged is not None
    assert row.weights == pytest.approx(weights * GiB, rel=0.01)
    assert row.profile == pytest.approx(step * GiB, rel=0.01)
    low, high = row.paged.available
    assert low <= (cache + 0.005) * GiB and (cache - 0.005) * GiB <= high
    assert high - low < GiB // 4  # a context, and what comes on top of it
    if blocks is not None:
        assert row.paged.blocks.low <= blocks <= row.paged.blocks.high
