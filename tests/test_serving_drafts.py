"""Servers with LoRA adapters and with speculative decoding: slots, heads and drafts by worked arithmetic."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memsize
from memsize.errors import InputError, UnknownInputError
from tests.configs import SMALL_LLAMA

pytest.importorskip("transformers")

LLAMA = SMALL_LLAMA | {"vocab_size": 128, "max_position_embeddings": 1000, "tie_word_embeddings": False}
QWEN = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MIXTURE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
HEAD = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 40}
NEXT = LLAMA | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 4, "head_dim": 16,
    "shared_expert_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip

LINEAR = 2 * (128 + 2 * 96 + 128 + 3 * 192)
"""Inputs and outputs of the linear layers of two layers of `LLAMA`: queries and their output 64 to 64, keys and values
64 to 32, the MLP's three 64 and 128."""
ATTENTION = 2 * 2 * 16 * 2
"""Bytes of a token in one layer's cache: keys and values × heads × width × bytes of bfloat16."""


@pytest.fixture
def served(tmp_path: Path) -> Callable[..., Any]:
    def serve(entries: dict[str, Any], release: str = "vllm=0.20.0", **options: Any) -> Any:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(entries))
        options = {"max_model_len": 500, "gpu": "h100", "scenarios": "as-given", "server": release} | options
        return memsize.serve(f"hf:{path}", **options)

    return serve


def config_of(entries: dict[str, Any], path: Path, **speculation: Any) -> str:
    """The JSON of a server that drafts three tokens with a model of these entries."""
    path.write_text(json.dumps(entries))
    return json.dumps({"model": f"hf:{path}", "num_speculative_tokens": 3} | speculation)


def row_of(report: Any) -> Any:
    (row,) = report.ran
    return row


# -- adapters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "release", "width"),
    [
        (QWEN, "vllm=0.20.0", LINEAR),
        (LLAMA, "vllm=0.20.0", LINEAR + 2 * (128 + 64)),  # its embedding and its head have adapters too
        (LLAMA, "sglang=0.5.9", LINEAR),
        # attention, then four experts: two matrices 64 to 32, and one back
        (MIXTURE, "vllm=0.11.0", 2 * (128 + 2 * 96 + 128)),
        (MIXTURE, "vllm=0.11.1", 2 * (128 + 2 * 96 + 128 + 4 * 3 * (64 + 32))),
        (MIXTURE, "vllm=0.17.0", 2 * (128 + 2 * 96 + 128 + 4 * 3 * (64 + 32)) + 2 * (128 + 64)),
    ],
)
def test_adapters_have_slots_of_the_largest_rank(
    entries: dict[str, Any], release: str, width: int, served: Callable[..., Any]
) -> None:
    """Three adapters of rank 8, in the model's two bytes: a matrix from each layer's inputs, and one to its outputs."""
    plain = row_of(served(entries, release))
    adapted = served(entries, release, enable_lora=True, max_loras=3, max_lora_rank=8)
    assert row_of(adapted).weights - plain.weights == 3 * 8 * width * 2
    assert (adapted.asked["loras"], adapted.asked["lora_rank"]) == (3, 8)
    assert any("for 3 adapters of rank 8 or less" in note for note in adapted.notes)


def test_gpus_divide_one_of_both_matrices(served: Callable[..., Any]) -> None:
    """Of queries, keys, values, gate and up the outputs are halved, of the others the inputs; embedding and head are
    whole."""
    options = {"tensor_parallel_size": 2}
    plain, adapted = (row_of(served(LLAMA, enable_lora=lora, **options)) for lora in (False, True))
    layer = (64 + 32) + 2 * (64 + 16) + (32 + 64) + 2 * (64 + 64) + (64 + 64)
    assert adapted.weights - plain.weights == 1 * 16 * (2 * layer + 2 * (128 + 64)) * 2


def test_each_graph_is_captured_with_adapters_and_without(served: Callable[..., Any]) -> None:
    """Steps of 16 sequences: piecewise graphs of up to 32 tokens (1, 2, 4, 8, 16, 24, 32), full ones of up to 16; on an
    A100 all but the first of each mode count 1 MiB or more."""
    plain, adapted = (
        row_of(served(QWEN, gpu="a100", max_num_seqs=16, enable_lora=lora)).graphs.low for lora in (False, True)
    )
    assert adapted - plain == ((14 - 1 + 10 - 1) - (7 - 1 + 5 - 1)) * 2**20


# -- speculative decoding ----------------------------------------------------------------------------------------------


def test_a_head_of_eagle_3_reads_three_states(served: Callable[..., Any], tmp_path: Path) -> None:
    """Its layer reads embedding and state, 128 numbers; the three states are joined; its head has 40 tokens, whose
    numbers in the vocabulary are a table. The embedding is the model's. Norms: one more than Llama's three."""
    plain = row_of(served(LLAMA))
    drafted = row_of(served(LLAMA, speculative_config=config_of(HEAD, tmp_path / "head.json", method="eagle3")))
    layer = (64 + 2 * 32) * 128 + 64 * 64 + 3 * 64 * 128
    numbers = layer + 3 * 64 * 64 + 40 * 64 + 4 * 64
    assert drafted.weights - plain.weights == pytest.approx(numbers * 2 + 40 * 8, abs=16 * 512)  # blocks of 512 bytes
    assert plain.paged and drafted.paged
    assert (plain.paged.block_bytes, drafted.paged.block_bytes) == (2 * 16 * ATTENTION, 3 * 16 * ATTENTION)


def test_a_head_of_eagle_shares_embedding_and_head(served: Callable[..., Any], tmp_path: Path) -> None:
    entries = HEAD | {"architectures": ["EagleLlamaForCausalLM"]}
    plain = row_of(served(LLAMA))
    drafted = row_of(served(LLAMA, speculative_config=config_of(entries, tmp_path / "head.json", method="eagle")))
    numbers = (64 + 2 * 32) * 64 + 64 * 64 + 3 * 64 * 128 + 2 * 64 * 64 + 3 * 64
    assert drafted.weights - plain.weights == pytest.approx(numbers * 2, abs=16 * 512)


def test_a_draft_model_shares_nothing(served: Callable[..., Any], tmp_path: Path) -> None:
    """A draft like the model doubles weights and cache."""
    plain = row_of(served(LLAMA))
    drafted = row_of(served(LLAMA, speculative_config=config_of(LLAMA, tmp_path / "draft.json")))
    assert drafted.weights == 2 * plain.weights
    assert plain.paged and drafted.paged
    assert drafted.paged.block_bytes == 2 * plain.paged.block_bytes


@pytest.mark.parametrize("release", ["sglang=0.5.14", "sglang=0.5.18"])
def test_sglang_makes_room_for_as_many_layers_as_the_draft_has(
    release: str, served: Callable[..., Any], tmp_path: Path
) -> None:
    """A draft of three layers whose tokens are half as large: SGLang counts five layers like the target's. The weights
    are those of vLLM's draft; without one, the same fraction is left.
    """
    path = tmp_path / "draft.json"
    path.write_text(json.dumps(QWEN | {"num_hidden_layers": 3, "num_key_value_heads": 1}))
    asked = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": f"hf:{path}"}
    asked |= {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    plain = row_of(served(LLAMA, release))
    report = served(LLAMA, release, speculative_config=json.dumps(asked))
    drafted = row_of(report)
    assert (plain.paged.block_bytes, drafted.paged.block_bytes) == (2 * ATTENTION, (2 + 3) * ATTENTION)
    of_vllm = [
        row_of(served(LLAMA, speculative_config=config)).weights
        for config in (None, config_of(QWEN | {"num_hidden_layers": 3, "num_key_value_heads": 1}, path))
    ]
    assert drafted.weights - plain.weights == of_vllm[1] - of_vllm[0] > 0
    assert report.asked["speculative"] == "draft_model" and report.asked["drafted"] == 3


def test_a_layer_of_mtp_is_like_the_last_with_attention(served: Callable[..., Any]) -> None:
    """It has a cache of its own; a state has a block more for each drafted token."""
    config = '{"method": "mtp", "num_speculative_tokens": 2}'
    plain, drafted = served(NEXT, "vllm=0.20.0"), served(NEXT, "vllm=0.20.0", speculative_config=config)
    assert sum(group.layers for group in drafted.groups) == sum(group.layers for group in plain.groups) + 1
    one, other = row_of(plain).paged, row_of(drafted).paged
    assert one and other
    # 500 tokens in blocks of 32: 16 and a block for each of three layers' states; two such layers and one share a table
    assert (one.request_blocks, other.request_blocks) == (16 + 3, 16 + 2 * 3)
    attention = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 64)  # with a gate beside the queries
    experts = 2 * (5 * 3 * 64 * 32 + 4 * 64 + 64)  # four and a shared one, the router and the shared one's gate
    joined = 2 * 2 * 64 * 64
    assert row_of(drafted).weights - row_of(plain).weights == pytest.approx(attention + experts + joined, abs=2048)


@pytest.mark.parametrize(("tokens", "block"), [(2, 32), (7, 48)])
def test_a_convolution_keeps_drafted_tokens(tokens: int, block: int, served: Callable[..., Any]) -> None:
    """128 channels of 3 inputs and those of the drafted tokens, and 4 × 16 × 16 numbers of a state: 3,328 and 4,608
    bytes, in blocks of a multiple of 16 tokens of 128 bytes."""
    config = json.dumps({"method": "mtp", "num_speculative_tokens": tokens})
    assert f"a block has {block} tokens in place of 16" in " ".join(served(NEXT, speculative_config=config).notes)


@pytest.mark.parametrize(("release", "numbers"), [("vllm=0.20.0", 2 * 2 + 4), ("vllm=0.33.0", 0)])
def test_rejected_tokens_have_logits_of_their_own(release: str, numbers: int, served: Callable[..., Any]) -> None:
    """The first model runner rejects a token for each of 8 sequences: two rows of logits for each in bfloat16, one in
    float32, beside those of the step. The second one doesn't in its profile run."""
    entries, config = LLAMA | {"vocab_size": 32_000}, '{"method": "ngram", "num_speculative_tokens": 2}'
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "enforce_eager": True}
    plain, drafted = (row_of(served(entries, release, speculative_config=text, **options)) for text in (None, config))
    assert drafted.weights == plain.weights
    assert drafted.profile - plain.profile == pytest.approx(numbers * 8 * 32_000, abs=1024)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_lora": True, "max_lora_rank": 24}, "max_lora_rank is 24: the nearest that vLLM takes is 16 or 32"),
        ({"enable_lora": True, "max_lora_rank": 999}, "the nearest that vLLM takes is 512"),
        ({"max_lora_rank": 16}, "max_lora_rank has no effect without enable_lora"),
        ({"max_loras": 2}, "max_loras has no effect without enable_lora"),
        ({"enable_lora": True, "server": "sglang=0.5.9"}, "give max_lora_rank: SGLang 0.5.9 reads it"),
        ({"speculative_config": "eagle3"}, "speculative_config is 'eagle3': it is JSON, such as"),
        ({"speculative_config": '{"method": "eagel3", "num_speculative_tokens": 3}'}, "did you mean eagle3"),
        ({"speculative_config": '{"method": "ngram"}'}, "needs num_speculative_tokens of at least 1"),
        ({"speculative_config": '{"method": "eagle3", "num_speculative_tokens": 3}'}, "needs a model for eagle3"),
        ({"speculative_config": '{"num_spec_tokens": 3}'}, "did you mean num_speculative_tokens"),
        (
            {"speculative_config": '{"method": "mtp", "num_speculative_tokens": 1}', "server": "vllm=0.9.2"},
            r"mtp is covered for vLLM from 0\.10\.0 on, not for vLLM 0\.9\.2",
        ),
        (
            {
                "speculative_config": '{"speculative_algorithm": "NEXTN", "speculative_num_steps": 1}',
                "server": "sglang=0.5.13",
            },
            r"mtp is covered for SGLang from 0\.5\.14 on, not for SGLang 0\.5\.13",
        ),
    ],
)
def test_what_cannot_be_asked(options: dict[str, Any], message: str, served: Callable[..., Any]) -> None:
    with pytest.raises((InputError, UnknownInputError), match=message):
        served(LLAMA, **options)
