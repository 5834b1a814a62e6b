"""Configs of transformers that several tests begin with."""

from typing import Any, Final

SMALL_LLAMA: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "dtype": "bfloat16",
}
"""Two layers with four heads of 16, and two of keys and values; the vocabulary is left to the test."""
