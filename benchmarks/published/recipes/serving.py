"""Logs of servers: what vLLM and SGLang said of the parts of a card's memory, and of the cache that was left.

A row's words are the server's arguments, `model` (a config below), `gib` (the card's memory as the log has it) and the
`figure`: GiB of the weights, the step, both at once (``peak``), what is outside PyTorch, CUDA graphs or the cache, and
the cache in blocks or tokens.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import memsize
from benchmarks.published.rows import Row, half_digit
from memsize.device import cards
from memsize.records.serving import ServingRow
from memsize.units import GiB

_LLAMA: Final = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "dtype": "bfloat16",
}  # fmt: skip
_LLAMA_2: Final = _LLAMA | {
    "intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
    "dtype": "float16",
}  # fmt: skip
_QWEN: Final = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768,
}  # fmt: skip
_QWEN_1B: Final = _QWEN | {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
_QWEN_7B: Final = _QWEN | {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
_QWEN_32B: Final = _QWEN_7B | {
    "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
    "num_key_value_heads": 8,
}  # fmt: skip
_QWEN_3: Final = _QWEN_1B | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128,
    "num_hidden_layers": 36, "num_attention_heads": 32, "dtype": "bfloat16",
}  # fmt: skip
_QWEN_3_8B: Final = _QWEN_3 | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}
_GEMMA: Final = {
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "dtype": "bfloat16", "vocab_size": 262144,
    "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32,
    "num_key_value_heads": 16, "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 4,
    "attention_k_eq_v": True, "sliding_window": 1024, "max_position_embeddings": 262144,
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
}  # fmt: skip
_GEMMA_MOE: Final = _GEMMA | {
    "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
    "num_key_value_heads": 8, "num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128,
    "top_k_experts": 8, "moe_intermediate_size": 704,
}  # fmt: skip
_GEMMA_VISION: Final = {
    "model_type": "gemma4_vision", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72,
}  # fmt: skip
_QWEN_72B: Final = _QWEN_7B | {
    "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8,
}  # fmt: skip
_LLAMA_70B: Final = _LLAMA | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "max_position_embeddings": 131072,
}  # fmt: skip
_GRANITE: Final = _LLAMA | {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", "intermediate_size": 12800, "vocab_size": 49155,
    "num_hidden_layers": 40, "max_position_embeddings": 131072, "tie_word_embeddings": True,
}  # fmt: skip
_SIGLIP: Final = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
    "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip


def _gemma_3(hidden: int, inner: int, layers: int, heads: int, width: int) -> dict[str, Any]:
    """The config of Gemma 3 with images."""
    text = {
        "model_type": "gemma3_text", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": width, "sliding_window": 1024,
        "vocab_size": 262208, "max_position_embeddings": 131072, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }  # fmt: skip
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 256}
    return config | {"dtype": "bfloat16", "text_config": text, "vision_config": _SIGLIP}


_GPTQ: Final = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
_AWQ: Final = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
_PACKED: Final = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_OF_CHANNELS: Final = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
_INT8: Final = _OF_CHANNELS | {"type": "int"}
_FP4: Final = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}


def _compressed(name: str, weights: dict[str, Any]) -> dict[str, Any]:
    """The entries of a checkpoint in one of the formats of compressed-tensors, with activations like its weights."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": weights}}
    of_checkpoint = {"quant_method": "compressed-tensors", "format": name, "ignore": ["lm_head"]}
    return {"quantization_config": of_checkpoint | {"config_groups": groups}}


_CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "llama-3.1-8b": _LLAMA | {"max_position_embeddings": 131072},
    "llama-3.1-8b-fp16": _LLAMA | {"max_position_embeddings": 131072, "dtype": "float16"},
    "llama-3-8b": _LLAMA | {"max_position_embeddings": 8192},
    "opt-125m": {"architectures": ["OPTForCausalLM"], "model_type": "opt", "dtype": "float16"},
    "llama-2-7b-gptq": _LLAMA_2 | {"quantization_config": _GPTQ | {"desc_act": True}},
    "zephyr-7b-awq": _LLAMA_2
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "intermediate_size": 14336}
    | {"num_key_value_heads": 8, "max_position_embeddings": 32768, "sliding_window": 4096}
    | {"quantization_config": _AWQ},
    "qwen2.5-1.5b": _QWEN_1B | {"dtype": "bfloat16"},
    "qwen2.5-1.5b-fp16": _QWEN_1B | {"dtype": "float16"},
    "qwen2.5-math-1.5b": _QWEN_1B | {"dtype": "bfloat16", "max_position_embeddings": 4096},
    "qwen2.5-3b": _QWEN_1B
    | {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16}
    | {"dtype": "bfloat16"},
    "qwen2.5-0.5b": _QWEN_1B
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    | {"dtype": "bfloat16"},
    "qwen2.5-0.5b-fp16": _QWEN_1B
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    | {"dtype": "float16"},
    "qwen2.5-7b": _QWEN_7B,
    "qwen2.5-7b-fp16": _QWEN_7B | {"dtype": "float16"},
    "qwen2.5-7b-fp8": _QWEN_7B | _compressed("float-quantized", _OF_CHANNELS),
    "qwen2.5-7b-gptq": _QWEN_7B | {"dtype": "float16", "quantization_config": _GPTQ | {"desc_act": False}},
    "r1-distill-qwen-7b": _QWEN_7B | {"max_position_embeddings": 131072},
    "r1-distill-qwen-7b-fp16": _QWEN_7B | {"max_position_embeddings": 131072, "dtype": "float16"},
    "phi-4-gptq": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 5120, "intermediate_size": 17920,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352,
        "max_position_embeddings": 16384, "original_max_position_embeddings": 16384, "dtype": "float16",
        "pad_token_id": 0, "quantization_config": _GPTQ | {"desc_act": False},
    },
    "qwen3-4b-fp16": _QWEN_3
    | {"hidden_size": 2560, "intermediate_size": 9728, "dtype": "float16", "max_position_embeddings": 40960},
    "qwen3-8b": _QWEN_3_8B,
    "qwen3-8b-fp8": _QWEN_3_8B | _compressed("float-quantized", _OF_CHANNELS),
    "qwen3-8b-nvfp4": _QWEN_3_8B | _compressed("nvfp4-pack-quantized", _FP4),
    "qwen3-8b-fp16": _QWEN_3_8B | {"dtype": "float16"},
    "qwen3-32b": _QWEN_3_8B
    | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "r1-distill-qwen-32b-fp8": _QWEN_32B
    | _compressed("float-quantized", _OF_CHANNELS)
    | {"dtype": "float16", "max_position_embeddings": 131072},
    "qwen3-14b": _QWEN_3_8B
    | {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
    "qwen3-32b-awq": _QWEN_3_8B
    | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64}
    | {"max_window_layers": 64, "dtype": "float16", "quantization_config": _AWQ},
    "qwen3-30b-a3b-fp16": _QWEN_3_8B
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "num_experts": 128}
    | {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144, "num_hidden_layers": 48}
    | {"num_key_value_heads": 4, "dtype": "float16"},
    "deepseek-coder-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "num_attention_heads": 16,
        "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400, "max_position_embeddings": 163840,
        "topk_method": "greedy", "n_group": 1, "topk_group": 1, "tie_word_embeddings": False, "dtype": "float16",
    },
    "codellama-7b": _LLAMA_2 | {"vocab_size": 32016, "max_position_embeddings": 16384, "dtype": "bfloat16"},
    "granite-3.1-8b": _GRANITE,
    "granite-3.1-2b": _GRANITE | {"hidden_size": 2048, "intermediate_size": 8192},
    "llama-3.1-8b-int8": _LLAMA
    | {"max_position_embeddings": 131072, "dtype": "float16"}
    | _compressed("int-quantized", _INT8),
    "llama-3.1-8b-gptq": _LLAMA
    | {"max_position_embeddings": 131072, "dtype": "float16", "quantization_config": _GPTQ | {"desc_act": True}},
    "llama-3.3-70b-fp8": _LLAMA_70B | _compressed("float-quantized", _OF_CHANNELS),
    "llama-3.3-70b-int8": _LLAMA_70B | _compressed("int-quantized", _INT8),
    "mixtral-8x7b": _LLAMA
    | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 32000}
    | {"max_position_embeddings": 32768, "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2.5-7b-int8": _QWEN_7B | _compressed("int-quantized", _INT8),
    "qwen2.5-72b": _QWEN_72B,
    "kimi-dev-72b": _QWEN_72B | {"max_position_embeddings": 131072},
    "qwen2.5-32b": _QWEN_32B,
    "qwq-32b": _QWEN_32B | {"max_position_embeddings": 131072},
    "qwen2.5-72b-gptq": _QWEN
    | {"hidden_size": 8192, "intermediate_size": 29696, "num_hidden_layers": 80, "num_attention_heads": 64}
    | {"num_key_value_heads": 8, "vocab_size": 152064, "dtype": "float16", "tie_word_embeddings": False}
    | {"quantization_config": _GPTQ | {"desc_act": False}},
    "qwen3-1.7b": _QWEN_1B
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16"},
    "qwen3-235b-fp8": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096, "dtype": "bfloat16",
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_experts": 128,
        "num_experts_per_tok": 8, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"],
        },
    },
    "gemma-3-4b": _gemma_3(2560, 10240, 34, 8, 256),
    "gemma-3-12b": _gemma_3(3840, 15360, 48, 16, 256),
    "gemma-3-27b": _gemma_3(5376, 21504, 62, 32, 128),
    "mistral-small-3.1-int8": {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "dtype": "bfloat16",
        "image_token_index": 10, "spatial_merge_size": 2, "multimodal_projector_bias": False,
        "vision_feature_layer": -1, "tie_word_embeddings": False,
        "text_config": {
            "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
            "max_position_embeddings": 131072, "sliding_window": None, "tie_word_embeddings": False,
        },
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 1024, "image_size": 1540, "intermediate_size": 4096,
            "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "head_dim": 64,
        },
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "int-quantized",
            "ignore": ["lm_head", "re:.*vision.*", "re:.*multi_modal.*"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT8, "input_activations": _INT8}},
        },
    },
    "gemma-4-31b-awq": {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "dtype": "bfloat16",
        "text_config": _GEMMA, "vision_config": _GEMMA_VISION,
        "quantization_config": {
            "quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*vision.*"],
            "config_groups": {"0": {"weights": _PACKED}},
        },
    },
    "gemma-4-26b-a4b": {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "dtype": "bfloat16",
        "text_config": _GEMMA_MOE,
        "vision_config": _GEMMA_VISION,
    },
    "llama-3.2-11b-vision": {
        "architectures": ["MllamaForConditionalGeneration"], "model_type": "mllama", "dtype": "bfloat16",
        "text_config": {"model_type": "mllama_text_model"},
        "vision_config": {
            "model_type": "mllama_vision_model", "image_size": 448, "intermediate_layers_indices": [3, 7, 15, 23, 30],
        },
    },
}  # fmt: skip
_CONFIGS |= {
    name: _CONFIGS[base] | {"dtype": "bfloat16"}
    for name, base in (("qwen3-30b-a3b", "qwen3-30b-a3b-fp16"), ("deepseek-v2-lite", "deepseek-coder-v2-lite"))
}
_DELTA: Final = {
    "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "vocab_size": 248320, "mamba_ssm_dtype": "float32", "dtype": "bfloat16",
    "max_position_embeddings": 262144, "tie_word_embeddings": False, "mtp_num_hidden_layers": 1,
}  # fmt: skip
_CONFIGS["qwen3.8-27b"] = _DELTA | {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 5120,
    "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4,
    "linear_num_value_heads": 48,
}  # fmt: skip
_CONFIGS["qwen3.6-35b-a3b"] = _DELTA | {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "hidden_size": 2048,
    "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
_CONFIGS |= {
    name: _DELTA
    | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": hidden}
    | {"intermediate_size": inner, "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4}
    | {"linear_num_value_heads": 32, "tie_word_embeddings": name == "qwen3.5-4b"}
    for name, hidden, inner in (("qwen3.5-4b", 2560, 9216), ("qwen3.5-9b", 4096, 12288))
}
_CONFIGS["qwen3.5-0.8b"] = _CONFIGS["qwen3.5-4b"] | {
    "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
    "num_key_value_heads": 2, "linear_num_value_heads": 16,
}  # fmt: skip
_CONFIGS["qwen3-next-80b"] = _DELTA | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
    "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
    "linear_num_value_heads": 32, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "vocab_size": 151936, "partial_rotary_factor": 0.25,
    "mamba_ssm_dtype": None,
}  # fmt: skip
_CONFIGS["gemma-3-1b"] = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "dtype": "bfloat16", "hidden_size": 1152,
    "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 256, "sliding_window": 512, "vocab_size": 262144, "max_position_embeddings": 32768,
}  # fmt: skip
_CONFIGS["llama-3-70b-awq"] = _LLAMA_70B | {
    "max_position_embeddings": 8192,
    "dtype": "float16",
    "quantization_config": _AWQ,
}
_CONFIGS["qwen3-vl-30b"] = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe", "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "text_config": _CONFIGS["qwen3-30b-a3b"]
    | {"model_type": "qwen3_vl_moe_text", "max_position_embeddings": 262144}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}},
    "vision_config": {
        "model_type": "qwen3_vl_moe", "depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304,
        "out_hidden_size": 2048, "patch_size": 16, "deepstack_visual_indexes": [8, 16, 24],
    },
}  # fmt: skip
_NEMOTRON: Final = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "dtype": "bfloat16", "head_dim": 128,
    "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "vocab_size": 131072,
    "max_position_embeddings": 262144, "tie_word_embeddings": False, "mamba_ssm_cache_dtype": "float32",
}  # fmt: skip
_CONFIGS["nemotron-3-nano-30b"] = _NEMOTRON | {
    "hybrid_override_pattern": "MEMEM*" + "EMEMEM*" * 4 + "EMEMEMEM*" + "EMEMEMEME", "hidden_size": 2688,
    "intermediate_size": 1856, "num_attention_heads": 32, "num_key_value_heads": 2, "mamba_num_heads": 64,
    "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_CONFIGS["nemotron-3-nano-4b"] = _NEMOTRON | {
    "hybrid_override_pattern": "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-", "hidden_size": 3136,
    "intermediate_size": 12544, "num_attention_heads": 40, "num_key_value_heads": 8, "mamba_num_heads": 96,
    "mamba_head_dim": 80, "mamba_ssm_cache_dtype": "float16",
}  # fmt: skip
_CONFIGS["granite-4.0-h-1b"] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 1536,
    "num_hidden_layers": 40, "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_n_heads": 48,
    "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "shared_intermediate_size": 4096,
    "intermediate_size": 4096, "num_local_experts": 0, "num_experts_per_tok": 0, "vocab_size": 100352,
    "tie_word_embeddings": True, "position_embedding_type": "nope", "max_position_embeddings": 131072,
    "dtype": "bfloat16",
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
}  # fmt: skip
_PHI: Final = {name: entry for name, entry in _CONFIGS["phi-4-gptq"].items() if name != "quantization_config"}
_CONFIGS["phi-4"] = _PHI | {"dtype": "bfloat16"}
_ABOUT: Final = ("model", "figure", "gib")


def predict(row: Row) -> tuple[float, float, float]:
    """The figure of a row, and the least and the most that it may be: GiB, blocks or tokens."""
    served, *ends = (_of_size(row, size) for size in _sizes(row))
    sizes = {"weights": served.weights, "step": served.profile, "peak": served.weights + served.profile}
    if row.figure in sizes:
        size = sizes[row.figure] / GiB
        return size, size, size
    beside = {"outside": served.non_torch, "graphs": served.graphs}
    if row.figure in beside:
        low, high = beside[row.figure]
    else:
        name = {"cache": "available"}.get(row.figure, row.figure)
        intervals = [getattr(one.paged, name) for one in (served, *ends)]
        if ends:
            (middle, _), (low, _), (_, high) = intervals
            return middle, low, high
        ((low, high),) = intervals
    scale = GiB if row.figure in ("cache", *beside) else 1
    return (low + high) / 2 / scale, low / scale, high / scale


def _sizes(row: Row) -> tuple[float | None, ...]:
    """The size of the cache in GiB where it is given, and the least and the most that a log may have rounded to it."""
    given = row.values.get("kv_cache_memory")
    if given is None:
        return (None,)
    size, half = float(given.removesuffix("GiB")), half_digit(given.removesuffix("GiB"))
    return size, size - half, size + half


def _of_size(row: Row, size: float | None) -> ServingRow:
    """What a server says of a row with a cache of so many GiB."""
    options = {name: value for name, value in row.values.items() if name not in _ABOUT}
    if size is not None:
        options["kv_cache_memory"] = f"{round(size * GiB)} B"
    return _served(row.source.gpu, row.source.stack, row.values["model"], row.values.get("gib"), tuple(options.items()))


@cache
def _served(gpu: str, server: str, model: str, gib: str | None, options: tuple[tuple[str, str], ...]) -> ServingRow:
    arguments: dict[str, Any] = {"scenarios": "as-given"} | {name: _value(value) for name, value in options}
    if tokens := arguments.pop("mtp", None):
        arguments["speculative_config"] = json.dumps({"method": "mtp", "num_speculative_tokens": tokens})
    own = {} if gib is None else {cards._key(gpu): replace(cards.card(gpu), bytes=round(float(gib) * GiB), spread=0)}
    with tempfile.TemporaryDirectory() as folder, patch.dict(cards._BY_KEY, own):
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(_CONFIGS.get(model, {})))
        target = f"hf:{path}" if model in _CONFIGS else model  # a model that memsize knows by its name
        report = memsize.serve(target, gpu=gpu, server=server, **arguments)
    return report.ran[0]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
