"""The caches of each kind, step by step: those of generations that were derived beside real runs on the CPU."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from memsize import Generation
from tests.models import tensors_in
from tests.test_generation import SMALL, T5, WINDOW, generator_of
from tests.workloads import generator as generators

transformers = pytest.importorskip("transformers")

PROMPT, NEW, BATCH = 13, 30, 2
GROUPS = {"prompt": 16, "max_new_tokens": 140}
"""Quanto packs groups of 64 numbers, and what has come since, of each layer, when those are 128 tokens."""
PART: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "dtype": "bfloat16"}
MAMBA = PART | {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 2,
    "chunk_size": 8,
}
LATENT = PART | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
HYBRID = PART | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MIXED = PART | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 24,
}
STARTED = T5 | {"decoder_start_token_id": 0, "pad_token_id": 0}
QUANTO = pytest.mark.skipif(not importlib.util.find_spec("optimum"), reason="needs optimum-quanto")
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dynamic": (SMALL, {}),
    "in chunks": (SMALL, {"prefill_chunk_size": 5}),
    "beams": (SMALL, {"num_beams": 3}),
    "static": (SMALL, {"cache_implementation": "static"}),
    "offloaded": (SMALL, {"cache_implementation": "offloaded"}),
    "offloaded static": (SMALL, {"cache_implementation": "offloaded_static"}),
    "fp8": (SMALL, {"kv_cache_dtype": "fp8"}),
    "int4": (SMALL, {"kv_cache_dtype": "int4"} | GROUPS),
    "int2": (SMALL, {"kv_cache_dtype": "int2"} | GROUPS),
    "sliding": (SMALL | WINDOW, {}),
    "sliding, static": (SMALL | WINDOW, {"cache_implementation": "static"}),
    "sliding and full": (MIXED, {}),
    "sliding and full, static": (MIXED, {"cache_implementation": "static"}),
    "latent": (LATENT, {}),
    "states": (MAMBA, {}),
    "states and full": (HYBRID, {}),
    "encoder-decoder": (STARTED, {}),
    "encoder-decoder, static": (STARTED, {"cache_implementation": "static"}),
}

QUICK = ("static", "offloaded", "fp8", "sliding", "states")


def marks(case: str) -> list[pytest.MarkDecorator]:
    return [*([] if case in QUICK else [pytest.mark.slow]), *([QUANTO] if case in ("int4", "int2") else [])]


@pytest.fixture
def copies_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU an offloaded cache is where it was, and there are no streams."""
    monkeypatch.setattr(torch, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: NoStream())


class NoStream(nullcontext[None]):
    """A stream of work that waits for none."""

    def wait_stream(self, other: object) -> None:
        pass


@pytest.mark.parametrize("case", [pytest.param(case, marks=marks(case)) for case in CASES])
def test_each_step_holds_what_a_real_one_does(case: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    entries, options = CASES[case]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(entries))
    asked = Generation(**({"prompt": PROMPT, "max_new_tokens": NEW} | options))
    with generator_of(f"hf:{path}") as generator:
        found = generator.run(asked, BATCH)
        steps = [step for step, _ in generators._run(found.begun.steps, found.pieces, found.generation)]
    assert found.exact or asked.num_beams > 1
    held = [sum(layer.bytes for layer in step.cached) for step in steps[1:]]  # the setup first
    if asked.is_offloaded:
        request.getfixturevalue("copies_stay")
    assert held == list(real_caches(entries, asked))[-len(held) :]


def real_caches(entries: dict[str, Any], asked: Generation) -> Iterator[int]:
    """The bytes of the cache after each forward of a real run, but for the last, which frees it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**entries)
    dtype = torch.bfloat16 if "dtype" in entries else torch.float32
    model = getattr(transformers, entries["architectures"][0])(config).to(dtype).eval()
    sizes: list[int] = []

    def returned(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        names = ("past_key_values", "cache_params")
        cache = next(found for name in names if (found := getattr(output, name, None)) is not None)
        sizes.append(sum(stored(cache).values()))

    model.register_forward_hook(returned, with_kwargs=True)
    tokens = torch.randint(1, 100, (BATCH, asked.prompt))
    config = {
        "max_new_tokens": asked.max_new_tokens,
        "min_new_tokens": asked.max_new_tokens,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    settings = {name: value for name, value in asked.arguments.items() if name != "max_new_tokens"}
    with torch.no_grad():
        model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings, **config)
    yield from sizes


def stored(cache: Any) -> dict[int, int]:
    """The bytes of each storage that an object holds, however deep."""
    found: dict[int, int] = {}
    for tensor in tensors_in(cache):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]] if is_wrapper(tensor) else [tensor]
        for part in parts:
            found |= (
                stored(part)
                if is_wrapper(part)
                else {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()}
            )
    return found


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is made of others."""
    return hasattr(tensor, "__tensor_flatten__")
