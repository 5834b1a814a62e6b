"""Models whose config says that their checkpoint is quantized: as it stores them, and as they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import memsize

pytest.importorskip("transformers")

HIDDEN, WIDE, VOCABULARY = 256, 512, 1000
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "torch_dtype": "bfloat16",
}
SHAPES = [(HIDDEN, HIDDEN)] * 4 + [(WIDE, HIDDEN)] * 2 + [(HIDDEN, WIDE)]
"""Outputs and inputs of the linear layers of the block."""
REST = 2 * (2 * VOCABULARY * HIDDEN + 3 * HIDDEN)
"""Bytes of the embedding, the head and the norms in bfloat16."""


def target(folder: Path, quantization: object, config: dict[str, Any] = LLAMA) -> str:
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return f"hf:{folder}"


def parameter_bytes(folder: Path, quantization: object) -> int:
    report = memsize.report(target(folder, quantization), seq_len=16, scenarios="as-given")
    return int(report.totals.parameter_bytes)


def gptq(outputs: int, inputs: int) -> int:
    groups = inputs // 128
    return inputs * outputs // 2 + groups * outputs // 2 + 2 * groups * outputs + 4 * inputs


def awq(outputs: int, inputs: int) -> int:
    groups = inputs // 64
    return inputs * outputs // 2 + groups * outputs // 2 + 2 * groups * outputs


def packed(outputs: int, inputs: int) -> int:
    return inputs * outputs // 2 + 2 * outputs * (inputs // 128) + 16  # the shape: two int64


PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
CHANNELS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


@pytest.mark.parametrize(
    ("quantization", "of_a_weight"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, gptq),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, awq),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            lambda n, k: n * k + 4 * (n // 128) * (k // 128),
        ),
        ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, lambda n, k: n * k + 4 * n),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "ignore": ["lm_head"],
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": PACKED}},
            },
            packed,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "ignore": ["re:.*lm_head"],
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": CHANNELS}},
            },
            lambda n, k: n * k + 2 * n,
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, lambda n, k: n * k // 2 + n * k // 16 + 4),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, lambda n, k: n * k // 2 + 4 * n * k // 64 + 64),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, lambda n, k: n * k + 4 * n),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
            lambda n, k: n * k // 2 + n * k // 64 + 4 * (n * k // 64 // 256) + 4 * (16 + 1 + 256),
        ),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, None),
    ],
)  # fmt: skip
def test_the_weights_are_as_the_checkpoint_stores_them(quantization: Any, of_a_weight: Any, tmp_path: Path) -> None:
    if of_a_weight is None:  # torchao converts the head too: int8, a float32 and an int8 for each output
        shapes, rest = [*SHAPES, (VOCABULARY, HIDDEN)], REST - 2 * VOCABULARY * HIDDEN
        assert parameter_bytes(tmp_path, quantization) == rest + sum(n * k + 5 * n for n, k in shapes)
    else:
        assert parameter_bytes(tmp_path, quantization) == REST + sum(of_a_weight(n, k) for n, k in SHAPES)


@pytest.mark.parametrize(
    ("quantization", "hides"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, False),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, False),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, False),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, True),  # the scales are no parameters
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, True),  # int8 shows as bfloat16
    ],
)
def test_only_wrappers_that_hide_their_parts_are_said_to_misreport(
    quantization: Any, hides: bool, tmp_path: Path
) -> None:
    report = memsize.report(target(tmp_path, quantization), seq_len=16, scenarios="as-given")
    assert ("wrapper-misreports" in [finding.code for finding in report.why()]) is hides
    assert (report.tensors["reported_bytes"].sum() == report.tensors["bytes"].sum()) is not hides


def test_fp8_blocks_are_those_of_transformers_own_layer(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import FP8Linear

    config = LLAMA | {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 4}
    stored = target(tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128]}, config)
    tensors = memsize.report(stored, seq_len=16, scenarios="as-given").tensors.set_index("name")
    with torch.device("meta"):
        layer = FP8Linear(192, 320, block_size=(128, 128))
    assert tensors.bytes["model.layers.0.mlp.up_proj.weight"] == sum(
        p.numel() * p.element_size() for p in layer.parameters() if p.dim() == 2
    )


def test_gpt_oss_stores_its_experts_alone_in_mxfp4(tmp_path: Path) -> None:
    from transformers import GptOssConfig
    from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_local_experts": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1000,
        "layer_types": ["full_attention"],
    }
    config = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "torch_dtype": "bfloat16"} | sizes
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    report = memsize.report(target(tmp_path, quantization, config), seq_len=16, scenarios="as-given")
    with torch.device("meta"):
        experts = Mxfp4GptOssExperts(GptOssConfig(**sizes))
    tensors = report.tensors.set_index("name")
    for name in ("gate_up_proj", "down_proj"):
        values = getattr(experts, name).numel()
        # a scale for 32 elements, which are 16 bytes
        assert tensors.bytes[f"model.layers.0.mlp.experts.{name}"] == values + 2 * values // 32
    converted = set(tensors.index[tensors.wrapper.fillna("").astype(bool)])
    assert converted == {f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "aqlm"},
        {"quant_method": "gptq", "bits": None},
        {"quant_method": "fp8", "weight_block_size": 128},
        {"quant_method": "compressed-tensors"},
        {"quant_method": 5},
        "gptq",
    ],
)
def test_a_config_that_is_not_read_is_said(quantization: object, tmp_path: Path) -> None:
    report = memsize.report(target(tmp_path, quantization), seq_len=16, scenarios="as-given")
    assert report.totals.parameter_bytes == REST + 2 * sum(n * k for n, k in SHAPES)
    assert "they are shown unquantized" in str(report)
