"""Models by a library's own names, and inputs that are made for them or by the user's function."""

from __future__ import annotations

import json
import logging
import os
import sys
import types
import warnings
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import memsize
from benchmarks.zoo.operators import declare
from memsize import InputSpec
from memsize.cli import run
from memsize.errors import InputError, TargetError
from tests.conftest import Python, Write
from tests.known_values import constant_of
from tests.models import (
    InputRequest,
    Target,
    hubs,
    inputs_from_data,
    inputs_from_maker,
    inputs_from_specs,
    load,
    load_inputs,
    parse_input,
    parse_target,
    tensors_in,
)

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
# Embedding and head 2·100·32, final norm 32; per layer q and o 2·32·32, k and v 2·16·32, MLP 3·32·64, norms 2·32.
TINY_PARAMETERS = 2 * 3200 + 32 + 2 * (2048 + 1024 + 6144 + 64)


def refused(target: str, **arguments: object) -> str:
    with pytest.raises(TargetError) as caught:
        load(target, arguments)
    return str(caught.value)


# What the text says


@pytest.mark.parametrize("text", ["net/config.json", "net"])
def test_a_config_or_its_folder_is_a_model_of_transformers(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "config.json").write_text("{}")
    assert parse_target(text) == Target(None, None, text, "hf")


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("timm:resnet18", Target(None, None, "resnet18", "timm")),
        ("timm:vit?img_size=384&act=gelu", Target(None, None, "vit", "timm", (("img_size", 384), ("act", "gelu")))),
        ("torchvision:vgg11", Target(None, None, "vgg11", "torchvision")),
        ("hf:org/name", Target(None, None, "org/name", "hf")),
        ("timm.models:resnet18", Target(None, "timm.models", "resnet18")),
        ("nets:Net?width=64&act=a:b", Target(None, "nets", "Net", options=(("width", 64), ("act", "a:b")))),
    ],
)
def test_reads_a_target(text: str, target: Target) -> None:
    assert parse_target(text) == target


def test_a_file_takes_arguments_for_its_constructor_after_a_question_mark(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text("from torch import nn\ndef build(width=4): return nn.Linear(3, width)\n")
    assert memsize.report(f"{path}:build?width=7").parameters == 7 * (3 + 1)
    assert memsize.report(f"{path}:build?width=7", arguments={"width": 2}).parameters == 2 * (3 + 1)
    assert "has no argument 'depth': did you mean width" in refused(f"{path}:build?depth=7")


TRAINS = """
from torch import nn, ones
net = nn.Linear(3, 1)
def step():
    for _ in range(2): net(ones(2, 3)).sum().backward()
{guard}
    for epoch in range(2):
        with open({file!r}, "a") as log:
            net(ones(2, 3)).sum().backward()
            log.write("trained")
"""


@pytest.mark.parametrize(("guard", "trains"), [("if True:", True), ('if __name__ == "__main__":', False)])
def test_a_file_that_trains_when_it_is_imported_is_not_imported(
    guard: str, trains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINS.format(guard=guard, file=str(tmp_path / "log")))
    if trains:
        assert refused("train.py:net").startswith(
            "train.py trains when it is imported (line 9): memsize run train.py simulates it as a script"
        )
    else:
        assert memsize.report("train.py:net", (3,)).parameters == 4
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("name", ["last.pt", "model.safetensors"])
def test_a_checkpoint_that_is_not_there_is_no_module(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").touch()
    assert refused(name) == f"no such file: {name}"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("timm:", "no name"),
        ("hf: ", "no name"),
        ("timm:a?b", "cannot read 'b'"),
        ("timm:a?b=1,c=2", "& separates arguments, as in timm:a.width=64&depth=2"),
        ("timm:a?=1", "=1"),
        ("net:Net?64", "write it like net:Net"),
    ],
)
def test_refuses_what_names_nothing(text: str, part: str) -> None:
    with pytest.raises(TargetError, match=part):
        parse_target(text)


# transformers


@pytest.fixture(scope="module")
def operators() -> None:
    """Where torchvision's compiled ops do not fit this torch, they are declared."""
    declare()


@pytest.fixture(scope="module")
def transformers(operators: None) -> Any:
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("transformers")
        _ = module.LlamaForCausalLM
    logging.disable(level)
    return module


@pytest.fixture
def tiny(write: Write, transformers: Any) -> Path:
    """A folder with the config of a two-layer Llama."""
    return write("tiny/config.json", json.dumps(TINY)).parent


def made(target: str, request: InputRequest | None = None, **arguments: object) -> dict[str, Any]:
    maker = load(target, arguments).inputs
    assert maker is not None
    found = maker.make(request or InputRequest())
    assert isinstance(found, dict)
    return found


def shapes(inputs: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in inputs.items()}


def test_a_config_becomes_the_model_that_it_names(tiny: Path, transformers: Any) -> None:
    real = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    for place in (tiny, tiny / "config.json"):
        loaded = load(f"hf:{place}")
        assert {n: (p.shape, p.dtype) for n, p in loaded.module.named_parameters()} == {
            n: (p.shape, p.dtype) for n, p in real.named_parameters()
        }
        assert sum(p.numel() for p in loaded.module.parameters()) == TINY_PARAMETERS
        assert loaded.name.endswith("(LlamaForCausalLM)") and loaded.notes == ()


def test_transformers_is_not_asked_for_all_its_names(
    tiny: Path, transformers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing them takes half a second, more than a report of most models."""

    def listed(_: Any) -> list[str]:
        raise AssertionError

    monkeypatch.setattr(type(transformers), "__dir__", listed)
    assert load(f"hf:{tiny}").name.endswith("(LlamaForCausalLM)")
    assert load("hf:LlamaModel", {"num_hidden_layers": 1}).name.endswith("(LlamaModel)")


def test_a_report_needs_no_input(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", f"hf:{tiny}", "-b", "2", "--seq-len", "16", "-f", "json", "--scenario", "fp32"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(i["name"], i["shape"]) for i in found["inputs"]] == [("input_ids", [2, 16]), ("attention_mask", [2, 16])]
    # The head returns 2·16·100 float32.
    head = next(layer for layer in found["layers"] if layer["path"] == "lm_head")
    assert head["output_bytes"] == 2 * 16 * 100 * 4


def test_made_inputs_are_those_that_a_user_would_give(tiny: Path) -> None:
    ids = ["input_ids=64:int64", "attention_mask=64:int64"]
    given = memsize.report(f"hf:{tiny}", ids, scenarios="fp32,amp-bf16")
    assert memsize.report(f"hf:{tiny}", scenarios="fp32,amp-bf16").scenario_results == given.scenario_results


def test_a_training_step_and_a_fit_make_their_inputs_too(tiny: Path) -> None:
    step = memsize.trace(f"hf:{tiny}", optimizer="sgd", batch_size=2, seq_len=8)
    assert step.trace.inputs[0].spec.shape == (2, 8)


def test_layers_are_divided_by_the_models_own_plan(tiny: Path) -> None:
    """Of 22,976 - 7 x 32 numbers a half, of the norms all. Each layer sums up after its attention and its MLP."""
    traces = {
        parallel: memsize.trace(
            f"hf:{tiny}", optimizer="sgd", batch_size=2, seq_len=8, parallel=parallel, scenario="fp32"
        ).trace
        for parallel in ("tp=2", "fsdp=4,tp=2")
    }
    norms = 32 * (1 + 2 * 2)
    for parallel, trace in traces.items():
        held = (TINY_PARAMETERS - norms) // 2 + norms
        shards = 4 if "fsdp" in parallel else 1
        # of 50 rows of the embedding and the head, each of four shards has 13
        held += 2 * (4 * 13 - 50) * 32 if shards == 4 else 0
        assert sum(each.bytes for each in trace.tensors if each.kind == "parameter") == 4 * held // shards
        sums = [each for each in trace.collectives if each.kind == "all-reduce" and each.ranks == 2]
        in_forward = [each for each in sums if trace.phases[each.phase] == "forward 2"]
        # the embedding's sum, too
        assert [each.bytes for each in in_forward] == [2 * 8 * 32 * 4] * (1 + 2 * 2)
        assert trace.world.size == 2 * shards
        assert "tp: the model's own tp_plan" in " ".join(trace.notes)


def test_what_is_divided_and_then_sharded_is_never_whole(tiny: Path) -> None:
    """Each of two shards of each half of a layer; what divides them beforehand is nobody's memory."""
    trace = memsize.trace(f"hf:{tiny}", optimizer="sgd", seq_len=8, parallel="fsdp=2,tp=2", scenario="fp32").trace
    made = [event.delta for event in trace.events if trace.phases[event.phase] == "setup" and event.delta > 0]
    assert sum(made) < 4 * TINY_PARAMETERS // 2
    shards = sum(each.bytes for each in trace.tensors if each.kind == "parameter")
    assert 4 * TINY_PARAMETERS // 4 <= shards < 4 * TINY_PARAMETERS // 2


def test_each_stage_has_its_half_of_the_layers_that_are_divided(tiny: Path) -> None:
    """Of two layers each of two stages has one, with two norms; the last has the third norm and the head."""
    traces = [
        memsize.trace(
            f"hf:{tiny}", optimizer="sgd", seq_len=8, parallel=f"tp=2,pp=2,rank={rank}", scenario="fp32"
        ).trace
        for rank in (0, 3)
    ]
    ends, norms = 100 * 32, 2 * 32
    layer = (TINY_PARAMETERS - 2 * ends - 32) // 2 - norms
    held = [sum(each.bytes for each in trace.tensors if each.kind == "parameter") for trace in traces]
    assert held == [4 * (layer // 2 + norms + ends // 2), 4 * (layer // 2 + norms + 32 + ends // 2)]
    for trace in traces:
        assert {each.ranks for each in trace.collectives} == {2}
        assert [note.partition(":")[0] for note in trace.notes[:2]] == ["pp", "tp"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "{tiny}?num_attention_heads=4",
            "2 key and value heads cannot be divided evenly over tp=4; tp=2 works",
        ),
        ("gpt2?n_layer=1&n_embd=32&n_head=4&vocab_size=100", "GPT2LMHeadModel has no plan for tensor parallelism"),
    ],
)
def test_models_that_cannot_be_divided(tiny: Path, target: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        memsize.trace(f"hf:{target.format(tiny=tiny)}", optimizer="sgd", seq_len=8, parallel="tp=4", scenario="fp32")


def test_the_length_of_texts_follows_the_config(tiny: Path) -> None:
    assert shapes(made(f"hf:{tiny}")) == {"input_ids": (1, 64), "attention_mask": (1, 64)}
    assert shapes(made(f"hf:{tiny}", InputRequest(3, 128)))["input_ids"] == (3, 128)
    # RoBERTa's 514 positions have room for 512 tokens.
    assert shapes(made("hf:roberta?num_hidden_layers=1&max_position_embeddings=130"))["input_ids"] == (1, 128)


def test_ids_are_plain_tokens_that_end_a_sentence(tiny: Path) -> None:
    ids = made(f"hf:{tiny}", eos_token_id=7, pad_token_id=3, bos_token_id=1)["input_ids"][0].tolist()
    assert ids == [2] * 63 + [7]


def test_entries_can_be_replaced(tiny: Path) -> None:
    assert len(load(f"hf:{tiny}?num_hidden_layers=1").module.model.layers) == 1  # type: ignore[union-attr,arg-type]
    assert load(f"hf:{tiny}", {"dtype": "bfloat16"}).module.lm_head.weight.dtype is torch.bfloat16  # type: ignore[union-attr]
    kind = load(f"hf:{tiny}", {"architectures": "LlamaForSequenceClassification"}).name
    assert kind.endswith("(LlamaForSequenceClassification)")
    assert "did you mean hidden_size" in refused(f"hf:{tiny}", hidden_sise=3)


def test_lists_with_an_entry_per_layer_follow_their_number(write: Write, transformers: Any) -> None:
    data = TINY | {"model_type": "qwen3", "architectures": None, "layer_types": ["full_attention"] * 2}
    write("qwen/config.json", json.dumps(data))
    loaded = load(f"hf:{write('qwen/x', '').parent}?num_hidden_layers=1")
    assert loaded.module.config.layer_types == ["full_attention"]  # type: ignore[union-attr]
    assert loaded.name.endswith("(Qwen3ForCausalLM)")


def test_the_dtype_of_a_config_is_the_models(write: Write, transformers: Any) -> None:
    write("half/config.json", json.dumps(TINY | {"torch_dtype": "bfloat16"}))
    report = memsize.report(f"hf:{write('half/x', '').parent}", scenarios="as-given")
    assert report.totals.parameter_bytes == 2 * TINY_PARAMETERS


@pytest.mark.parametrize(
    ("target", "kind", "expected"),
    [
        (
            "t5?num_layers=1",
            "T5ForConditionalGeneration",
            {"input_ids": (1, 512), "decoder_input_ids": (1, 512), "attention_mask": (1, 512)},
        ),
        ("bert?num_hidden_layers=1", "BertForMaskedLM", {"input_ids": (1, 512), "attention_mask": (1, 512)}),
        ("vit?num_hidden_layers=1&image_size=96", "ViTForImageClassification", {"pixel_values": (1, 3, 96, 96)}),
        ("resnet?depths=[1,1,1,1]&num_channels=1", "ResNetForImageClassification", {"pixel_values": (1, 1, 224, 224)}),
        (
            "whisper?encoder_layers=1&decoder_layers=1",
            "WhisperForConditionalGeneration",
            {"input_features": (1, 80, 3000), "decoder_input_ids": (1, 448)},
        ),
        ("wav2vec2?num_hidden_layers=1", "Wav2Vec2ForCTC", {"input_values": (1, 16_000)}),
        (
            "speech_to_text?encoder_layers=1&decoder_layers=1",
            "Speech2TextForConditionalGeneration",
            {"input_features": (1, 512, 80), "decoder_input_ids": (1, 512)},
        ),
        ("gemma4_audio?num_hidden_layers=1", "Gemma4AudioModel", {"input_features": (1, 512, 128)}),
        (
            "clip",
            "CLIPModel",
            {"input_ids": (1, 77), "pixel_values": (1, 3, 224, 224), "attention_mask": (1, 77)},
        ),
        (
            "videomae?num_hidden_layers=1&hidden_size=48&num_attention_heads=2",
            "VideoMAEForVideoClassification",
            {"pixel_values": (1, 16, 3, 224, 224)},
        ),
        (
            "audio-spectrogram-transformer?num_hidden_layers=1",
            "ASTForAudioClassification",
            {"input_values": (1, 1024, 128)},
        ),
        ("LlamaModel?num_hidden_layers=1", "LlamaModel", {"input_ids": (1, 512), "attention_mask": (1, 512)}),
    ],
)
def test_architectures_and_their_inputs(
    target: str, kind: str, expected: dict[str, tuple[int, ...]], transformers: Any
) -> None:
    loaded = load(f"hf:{target}")
    assert type(loaded.module).__name__ == kind
    assert loaded.inputs is not None
    assert shapes(loaded.inputs.make(InputRequest())) == expected


@pytest.mark.thorough
def test_an_image_stands_among_the_ids(transformers: Any) -> None:
    found = made("hf:llava", InputRequest(2, 10))
    # 576 patches of a 336-pixel image, then the text.
    assert shapes(found)["input_ids"] == (2, 586)
    config = load("hf:llava").module.config
    assert int((found["input_ids"][0] == config.image_token_id).sum()) == 576  # type: ignore[union-attr]


TEXT = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 99}
SERIES: dict[str, Any] = {
    "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 3], "num_time_features": 2, "d_model": 16,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
}  # fmt: skip
VISION = {
    "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "patch_size": 14,
    "image_size": 56,
}  # fmt: skip
QWEN_VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 14}
QWEN_TEXT = TEXT | {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
TINY_KINDS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    # 8 steps that are looked at, and 3 that the longest lag reaches back.
    "time_series_transformer": (
        SERIES,
        {"past_values": (2, 11), "past_time_features": (2, 11, 2), "past_observed_mask": (2, 11)}
        | {"future_values": (2, 4), "future_time_features": (2, 4, 2)},
    ),
    "informer": (SERIES, {"past_values": (2, 11), "past_time_features": (2, 11, 2)}),
    "autoformer": (SERIES | {"label_length": 4}, {"past_values": (2, 11), "past_time_features": (2, 11, 2)}),
    "patchtst": (
        {"context_length": 32, "num_input_channels": 3, "patch_length": 8, "d_model": 16, "ffn_dim": 16}
        | {"num_hidden_layers": 1, "num_attention_heads": 2},
        {"past_values": (2, 32, 3)},
    ),
    "layoutlm": (TEXT | {"max_position_embeddings": 20}, {"input_ids": (2, 20), "bbox": (2, 20, 4)}),
    # The positions of RoBERTa's kin begin behind the token that pads, 1.
    "camembert": (TEXT | {"max_position_embeddings": 20}, {"input_ids": (2, 18)}),
    "perceiver": (
        {"num_latents": 4, "d_latents": 16, "d_model": 16, "num_blocks": 1, "num_self_attends_per_block": 1}
        | {"num_self_attention_heads": 2, "num_cross_attention_heads": 2, "max_position_embeddings": 20},
        {"inputs": (2, 20), "attention_mask": (2, 20)},
    ),
    "dac": (
        {"encoder_hidden_size": 8, "decoder_hidden_size": 32, "downsampling_ratios": [2, 4]}
        | {"upsampling_ratios": [4, 2], "n_codebooks": 2},
        {"input_values": (2, 1, 16_000)},
    ),
    # 56 / 14 = 4 patches a side, of 3 · 14 · 14 values in two frames each; 2 × 2 of them make one token: 4 tokens.
    "qwen2_vl": (
        {"vision_config": QWEN_VISION, "text_config": QWEN_TEXT | {"max_position_embeddings": 80}}
        | {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8},
        {"pixel_values": (2 * 16 * 16, 3 * 2 * 14 * 14), "image_grid_thw": (2, 3), "mm_token_type_ids": (2, 80)},
    ),
    "qwen2_5_vl_vision": (
        {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32},
        {"hidden_states": (2 * 256, 3 * 2 * 14 * 14), "grid_thw": (2, 3)},
    ),
    "paligemma": (
        {"vision_config": VISION | {"model_type": "siglip_vision_model"}, "projection_dim": 32}
        | {
            "text_config": TEXT
            | {"model_type": "gemma", "head_dim": 16, "max_position_embeddings": 40, "num_key_value_heads": 2}
        },
        # 16 patches stand before the text.
        {"pixel_values": (2, 3, 56, 56), "token_type_ids": (2, 38)},
    ),
    "siglip2_vision_model": (
        {"num_patches": 16, "patch_size": 4, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
        | {"num_attention_heads": 2},
        {"pixel_values": (2, 16, 48), "spatial_shapes": (2, 2), "pixel_attention_mask": (2, 16)},
    ),
}


def with_numbers(tensor: Any) -> Any:
    """What `tensor` stands for, on the CPU."""
    return tensor if not tensor.is_meta else torch.rand(tensor.shape, dtype=tensor.dtype, device="cpu")


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_the_model_really_takes_these_inputs(kind: str, transformers: Any) -> None:
    entries, expected = TINY_KINDS[kind]
    loaded = load(f"hf:{kind}", entries)
    maker = loaded.inputs
    assert maker is not None
    given: Any = maker.make(InputRequest(2, training=False))
    assert {name: tuple(given[name].shape) for name in expected} == expected
    assert "only text" not in (maker.note or "")
    real = type(loaded.module)(loaded.module.config).eval()  # type: ignore[operator,arg-type]
    with torch.no_grad():
        output = real(**{name: with_numbers(value) for name, value in given.items()})
    trace = memsize.trace(loaded.module, input_data=given, optimizer=None, mode="eval").trace
    ours = [output.spec.shape for output in trace.layers[0].outputs]
    assert ours == [tuple(tensor.shape) for tensor in tensors_in(output)]
    assert sum(layer.parameters for layer in trace.layers) == sum(p.numel() for p in real.parameters())


def test_text_alone_is_said_to_be_alone(transformers: Any) -> None:
    # The projector's width, 1408, is not that of the encoder: nobody can say how many tokens a sound takes.
    maker = load("hf:granite_speech?encoder_config={'num_layers':1}").inputs
    assert maker is not None and maker.note is not None
    assert "only text" in maker.note and "input_features" in maker.note


def test_images_are_counted_in_the_dtype_of_the_config(transformers: Any) -> None:
    # Its tower takes no float32 once its weights are bfloat16; it makes 16 · 16 tokens of an image of 1024 pixels.
    entries = {
        "vision_config": {"num_hidden_layers": 2, "global_attn_indexes": [1]},
        "text_config": {"num_hidden_layers": 1},
    }
    found = shapes(made("hf:got_ocr2", dtype="bfloat16", **entries))
    assert found["input_ids"][1] - 256 == 512 and found["pixel_values"] == (1, 3, 1024, 1024)


def test_tokens_of_images_get_a_place_in_the_vocabulary(transformers: Any) -> None:
    loaded = load("hf:llava", {"text_config": TEXT | {"model_type": "llama"}, "image_token_index": 32_000})
    assert loaded.module.config.image_token_index == 98  # type: ignore[union-attr]
    assert any("image_token_index is 32000: token 98 of 99 stands for it" in note for note in loaded.notes)


def test_a_model_without_a_forward(transformers: Any) -> None:
    with pytest.raises(InputError, match="BarkModel has no forward of its own"):
        made("hf:bark")


def test_parts_that_no_auto_class_knows(transformers: Any) -> None:
    assert load("hf:siglip_text_model?num_hidden_layers=1").name.endswith("(SiglipTextModel)")
    # A head comes first.
    assert load("hf:mllama_text_model?num_hidden_layers=1").name.endswith("(MllamaForCausalLM)")


def test_recognition_of_speech_needs_characters(transformers: Any) -> None:
    loaded = load("hf:wav2vec2-conformer?num_hidden_layers=1")
    assert loaded.name.endswith("(Wav2Vec2ConformerForSequenceClassification)")


def test_the_processors_size_is_taken_where_the_model_has_none(write: Write, transformers: Any) -> None:
    folder = write("seg/config.json", json.dumps({"model_type": "segformer", "depths": [1, 1, 1, 1]})).parent
    write("seg/preprocessor_config.json", json.dumps({"size": {"height": 64, "width": 96}}))
    assert shapes(made(f"hf:{folder}")) == {"pixel_values": (1, 3, 64, 96)}


def test_sequences_are_for_texts(transformers: Any) -> None:
    with pytest.raises(InputError, match="takes images"):
        made("hf:resnet?depths=[1,1,1,1]", InputRequest(1, 128))


@pytest.mark.parametrize(
    ("target", "part"),
    [
        ("sam3_tracker_video", r"\(inference_session\): its forward takes inference_session; .* --inputs FUNCTION"),
        # What has a default that the forward does not run with, and what this type takes in a form of its own.
        ("lxmert?l_layers=1&x_layers=1&r_layers=1", r"\(visual_feats, visual_pos\): its forward takes input_ids"),
        ("bros?num_hidden_layers=1", r"\(bbox\): its forward takes input_ids, bbox"),
        ("kosmos-2", r"\(image_embeds_position_mask\): its forward takes input_ids, pixel_values"),
        ("granite_speech_encoder?num_layers=1", r"\(hidden_states\)"),
    ],
)
def test_inputs_that_nobody_knows(target: str, part: str, transformers: Any) -> None:
    with pytest.raises(InputError, match=part):
        made(f"hf:{target}")


def test_a_config_that_would_build_without_end(
    write: Write, transformers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = json.dumps(TINY | {"num_hidden_layers": 10**9})
    assert refused(f"hf:{write('a.json', endless)}").endswith(
        "a.json has 1,000,000,000 as its num_hidden_layers: no model has more than 10,000"
    )
    assert "as its num_labels" in refused(f"hf:{write('b.json', json.dumps(TINY | {'num_labels': 10**9}))}")
    nested = {"model_type": "segformer", "depths": [1, 1, 10**6, 1]}
    assert "1,000,000 as its depths" in refused(f"hf:{write('c.json', json.dumps(nested))}")
    monkeypatch.setattr(hubs, "MOST_MODULES", 30)
    assert "d.json has more than 30 modules" in refused(f"hf:{write('d.json', json.dumps(TINY))}")
    monkeypatch.undo()
    assert not torch.nn.modules.module._global_module_registration_hooks
    made(f"hf:{write('d.json', json.dumps(TINY))}")


def test_a_config_that_cannot_be_read(write: Write, tmp_path: Path, transformers: Any) -> None:
    (tmp_path / "long.json").touch()
    os.truncate(tmp_path / "long.json", 2**24 + 1)
    assert "cannot read long.json as a config: it has 16,777,217 bytes" in refused(f"hf:{tmp_path / 'long.json'}")
    many = write("many.json", "[" + "{}," * 250_000 + "{}]")
    assert "about 500,002 values, more than memsize reads (500,000)" in refused(f"hf:{many}")
    named = write("named.json", '{"model_type": "\\u001b]0;x\\u0007"}')
    assert refused(f"hf:{named}").isprintable()


def test_what_is_no_config(write: Write, transformers: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refused(f"hf:{tmp_path / 'empty'}")
    assert "no such file" in refused(f"hf:{tmp_path / 'other.json'}")
    assert "neither model_type nor architectures" in refused(f"hf:{write('a.json', '{}')}")
    assert "cannot read b.json" in refused(f"hf:{write('b.json', '{')}")
    own = {"model_type": "mine", "auto_map": {"AutoModel": "modeling_mine.Mine"}}
    assert "code of its own" in refused(f"hf:{write('c.json', json.dumps(own))}")
    wrong = json.dumps(TINY | {"hidden_size": "wide"})
    assert "is not a LlamaConfig" in refused(f"hf:{write('d.json', wrong)}")
    assert "did you mean" in refused("hf:lama")
    saved = "(--online fetches its config; one that you saved is hf:config.json, or of a pipeline diffusers:FOLDER)"
    assert saved in refused("hf:no-such/model")


# timm and torchvision, by stand-ins and, where they are installed, for real


class Stand(types.ModuleType):
    """A module with these attributes."""

    def __init__(self, name: str, **attributes: Any) -> None:
        super().__init__(name)
        vars(self).update(attributes)


class Classifier(nn.Module):
    def __init__(self, channels: int = 3, size: tuple[int, int, int] | None = None) -> None:
        super().__init__()
        self.body = nn.Conv2d(channels, 8, 3)
        self.pretrained_cfg = {"input_size": size or (channels, 96, 64)}

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mean((2, 3))


def test_a_timm_model_has_the_size_of_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def create_model(name: str, **options: Any) -> nn.Module:
        asked.update(name=name, **options)
        return Classifier(options.get("in_chans", 3), (3, 96, 64))

    stand = Stand("timm", create_model=create_model, is_model=lambda name: name == "tiny", list_models=lambda: ["tiny"])
    monkeypatch.setitem(sys.modules, "timm", stand)
    loaded = load("timm:tiny?in_chans=1", {"drop": 0.5})
    assert asked == {"name": "tiny", "pretrained": False, "in_chans": 1, "drop": 0.5}
    assert loaded.inputs is not None and loaded.name == "timm:tiny"
    assert [t.shape for t in loaded.inputs.make(InputRequest(4))] == [(4, 1, 96, 64)]
    resized = load("timm:tiny?img_size=32").inputs
    assert resized is not None
    assert [t.shape for t in resized.make(InputRequest())] == [(1, 3, 32, 32)]
    assert "did you mean tiny?" in refused("timm:tyni")
    assert "downloaded" in refused("timm:hf-hub:org/name")
    assert "no pretrained weights" in refused("timm:tiny?pretrained=True")
    with pytest.raises(InputError, match="takes images"):
        memsize.report("timm:tiny", seq_len=5)


def test_libraries_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, library in (("timm:x", "timm"), ("torchvision:x", "torchvision"), ("hf:x", "transformers")):
        monkeypatch.setitem(sys.modules, library, None)
        message = refused(name)
        assert message.count("\n") == 0
        assert library in message


BROKEN = "raise RuntimeError('operator torchvision::nms does not exist')\n"


@pytest.mark.slow
def test_a_broken_torchvision_breaks_nothing_else(write: Write, warm_python: Python, transformers: Any) -> None:
    write("torchvision/__init__.py", BROKEN)
    write("PIL/__init__.py", "")
    for module in ("Image", "ImageOps", "ImageDraw", "ImageFont"):
        write(
            f"PIL/{module}.py",
            "class Image: ...\nclass Resampling:\n    NEAREST = BOX = BILINEAR = HAMMING = BICUBIC = LANCZOS = 0\n",
        )
    vit = "hf:vit?num_hidden_layers=1&hidden_size=32&num_attention_heads=2&intermediate_size=32"
    code = f"from memsize.cli import run\nprint(run(['report', {vit!r}]), run(['report', 'torchvision:vgg11']))"
    done = warm_python("-c", code)
    assert done.stdout.splitlines()[-1] == "0 2", done.stderr
    error = done.stderr.strip().splitlines()[-1]
    assert "installed torchvision cannot be imported" in error and "torchvision::nms does not exist" in error


@pytest.fixture(scope="module")
def real_torchvision(operators: torch.library.Library | None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchvision")


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("resnet18", {}, [(2, 3, 224, 224)]),
        ("inception_v3", {"init_weights": False}, [(2, 3, 299, 299)]),
        ("lraspp_mobilenet_v3_large", {}, [(2, 3, 520, 520)]),
        ("vit_b_16", {"image_size": 64}, [(2, 3, 64, 64)]),
        ("vit_h_14", {}, [(2, 3, 224, 224)]),  # its usual weights are of 518
        ("r3d_18", {}, [(2, 3, 16, 112, 112)]),
        ("raft_small", {}, [(2, 3, 520, 960)] * 2),
    ],
)
def test_torchvision_models(
    name: str, options: dict[str, Any], expected: list[tuple[int, ...]], real_torchvision: Any
) -> None:
    loaded = load(f"torchvision:{name}", options)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        none = {"weights_backbone": None} if "lraspp" in name else {}
        real = real_torchvision.models.get_model(name, weights=None, **none, **options)
    assert sum(p.numel() for p in loaded.module.parameters()) == sum(p.numel() for p in real.parameters())
    assert loaded.inputs is not None
    assert [tuple(t.shape) for t in loaded.inputs.make(InputRequest(2))] == expected


def test_a_detector_is_given_objects_in_training(real_torchvision: Any) -> None:
    maker = load("torchvision:maskrcnn_resnet50_fpn").inputs
    assert maker is not None
    images, objects = maker.make(InputRequest(2))
    assert [tuple(image.shape) for image in images] == [(3, 800, 1066)] * 2
    assert {name: tuple(t.shape) for name, t in objects[0].items()} == {
        "boxes": (2, 4),
        "labels": (2,),
        "masks": (2, 800, 1066),
    }
    assert len(maker.make(InputRequest(2, training=False))) == 1
    ssd = load("torchvision:ssd300_vgg16").inputs
    assert ssd is not None
    assert tuple(ssd.make(InputRequest())[0][0].shape) == (3, 300, 300)


@pytest.mark.thorough
@pytest.mark.parametrize("scenario", ["fp32", "fp16", "amp-bf16"])
def test_a_detector_finds_and_learns_in_any_precision(real_torchvision: Any, scenario: str) -> None:
    found = memsize.trace("torchvision:maskrcnn_resnet50_fpn", optimizer=None, mode="eval", scenario=scenario)
    # 100 objects, each with its mask over the whole image: one after the other, then all in one.
    masks = 100 * 800 * 1066 * (2 if scenario == "fp16" else 4)
    assert max(s.bytes for s in found.trace.storages) == masks
    assert any("cover the whole image" in assumption for assumption in found.assumptions)
    trained = memsize.trace("torchvision:maskrcnn_resnet50_fpn", optimizer="sgd", steps=1, scenario=scenario)
    gradients = sum(s.bytes for s in trained.trace.storages if s.role == "gradient")
    assert gradients == sum(layer.trainable for layer in trained.trace.layers) * (2 if scenario == "fp16" else 4)


def test_torchvision_names(real_torchvision: Any) -> None:
    assert "did you mean resnet18" in refused("torchvision:resnte18")
    assert "no pretrained weights" in refused("torchvision:resnet18", weights="DEFAULT")


def test_timm_models(real_torchvision: Any) -> None:
    timm = pytest.importorskip("timm")
    loaded = load("timm:test_vit?num_classes=7")
    real = timm.create_model("test_vit", num_classes=7)
    assert {n: p.shape for n, p in loaded.module.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}
    assert loaded.inputs is not None
    assert [tuple(t.shape) for t in loaded.inputs.make(InputRequest(2))] == [(2, *real.pretrained_cfg["input_size"])]


# Inputs from the user's function


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        return self.embed(ids)


INPUTS = """
import torch

def batched(batch_size):
    return {"ids": torch.randint(0, 50, (batch_size, 6))}

def lengthy(batch_size, training, seq_len=4):
    return torch.zeros(batch_size, seq_len, dtype=torch.int64)

def fixed():
    return (torch.zeros(3, 5, dtype=torch.int64),)

def huge(batch_size):
    return {"ids": torch.zeros(2, 3, dtype=torch.int64), "scale": torch.rand(batch_size, 2**30)}

def needy(size):
    return torch.zeros(size)

def nothing():
    pass

def failing():
    return 1 / 0

number = 3
"""


@pytest.fixture
def functions(write: Write) -> str:
    return str(write("inputs.py", INPUTS))


def first_shape(functions: str, name: str, request: InputRequest | None = None) -> tuple[int, ...]:
    feed = inputs_from_maker(load_inputs(f"{functions}:{name}"), request or InputRequest())
    args, kwargs = feed.call()
    return tuple((*args, *kwargs.values())[0].shape)


def test_a_function_is_asked_for_what_it_can_give(functions: str) -> None:
    assert first_shape(functions, "batched", InputRequest(4)) == (4, 6)
    assert first_shape(functions, "lengthy", InputRequest(4)) == (4, 4)
    assert first_shape(functions, "lengthy", InputRequest(4, 9)) == (4, 9)
    assert first_shape(functions, "fixed") == (3, 5)


def test_its_values_stay_known(functions: str) -> None:
    _, kwargs = inputs_from_maker(load_inputs(f"{functions}:batched"), InputRequest(2)).call()
    values = constant_of(kwargs["ids"])
    assert values is not None and int(values.max()) < 50


def test_large_tensors_are_never_made(functions: str) -> None:
    feed = inputs_from_maker(load_inputs(f"{functions}:huge"), InputRequest(64))
    assert feed.call()[1]["scale"].shape == (64, 2**30)  # 256 GiB


def test_random_numbers_are_as_before(functions: str) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first_shape(functions, "batched")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("needy", "needs size"),
        ("nothing", "returned None"),
        ("failing", "at inputs.py:23: ZeroDivisionError"),
    ],
)
def test_what_is_wrong_with_a_function(functions: str, name: str, part: str) -> None:
    with pytest.raises(InputError, match=part):
        first_shape(functions, name)


def test_what_is_no_function(functions: str) -> None:
    for text, part in (("missing", "has no 'missing'"), ("number", "is not a function")):
        with pytest.raises(TargetError, match=part):
            load_inputs(f"{functions}:{text}")
    with pytest.raises(TargetError, match="names no function"):
        load_inputs(functions)


def test_sizes_that_a_function_does_not_take(functions: str) -> None:
    with pytest.raises(InputError, match="takes no batch_size"):
        first_shape(functions, "fixed", InputRequest(4))
    with pytest.raises(InputError, match="takes no seq_len"):
        first_shape(functions, "batched", InputRequest(1, 7))


def test_the_command_takes_a_function(write: Write, functions: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = write("text.py", "from torch import nn\n\ndef build():\n    return nn.Embedding(50, 8)\n")
    command = ["report", f"{model}:build", "--inputs", f"{functions}:fixed", "--scenario", "fp32"]
    assert run(command) == 0
    assert "int64[3,5]" in capsys.readouterr().out
    assert run([*command, "--input", "5:int64"]) == 2
    assert "not as both" in capsys.readouterr().err
    assert run([*command[:2], "--input", "5:int64", "--seq-len", "3"]) == 2
    assert "inputs that memsize makes" in capsys.readouterr().err


def test_a_function_in_python() -> None:
    report = memsize.report(
        Text(), input_data=lambda batch_size: torch.zeros(batch_size, 7, dtype=torch.int64), batch_size=3
    )
    assert report.trace.inputs[0].spec.shape == (3, 7)
    with pytest.raises(InputError, match="give the input once"):
        memsize.trace(Text(), "7:int64", input_data=torch.zeros(1, 7, dtype=torch.int64))


# Nests


@dataclass
class Batch:
    ids: Tensor
    parts: dict[str, list[Tensor]]


def test_any_nest_of_tensors_is_taken_and_resized() -> None:
    feed = inputs_from_data((Batch(torch.zeros(2, 3), {"a": [torch.ones(2, dtype=torch.int64)]}),))
    assert feed.resizable and feed.batch_size == 2
    ((batch,), _) = feed.call(5)
    assert (batch.ids.shape, batch.parts["a"][0].shape) == ((5, 3), (5,))
    assert batch.ids.is_meta


def test_a_cast_input_keeps_its_values() -> None:
    _, kwargs = inputs_from_data({"boxes": torch.tensor([[1.0, 2, 3, 4]])}).call(floating=torch.float16)
    values = constant_of(kwargs["boxes"])
    assert kwargs["boxes"].dtype is torch.float16
    assert values is not None and values.dtype is torch.float16 and values.tolist() == [[1, 2, 3, 4]]


def test_a_packed_sequence_has_no_batch_dimension() -> None:
    packed = pack_sequence([torch.rand(4, 8), torch.rand(2, 8)])
    feed = inputs_from_data(packed)
    assert not feed.resizable
    report = memsize.report(nn.LSTM(8, 4), input_data=packed, scenarios="fp32")
    # 6 steps of 4 hidden values in all
    assert report.trace.layers[0].outputs[0].spec.shape == (6, 4)


def test_a_batch_encoding_gives_keywords() -> None:
    class BatchEncoding(UserDict):  # type: ignore[type-arg]
        """As transformers' tokenizers return them."""

    feed = inputs_from_data(BatchEncoding(ids=torch.zeros(2, 3, dtype=torch.int64)))
    args, kwargs = feed.call(4)
    assert args == () and kwargs["ids"].shape == (4, 3)


# Ranges


def test_a_range_is_spread_evenly() -> None:
    spec = parse_input("ids=6:int64:10..15")
    assert spec == InputSpec("ids", (6,), "int64", (10, 15)) and str(spec) == "ids=6:int64:10..15"
    _, kwargs = inputs_from_specs([spec], 2).call()
    values = constant_of(kwargs["ids"])
    assert values is not None
    assert values.min() == 10 and values.max() == 15
    assert values.flatten().bincount()[10:].min() >= 1


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("5:float32:0..3", "for integers"),
        ("5:bool:0..1", "for integers"),
        ("5:int4:0..7", "for integers"),
        ("5:int64:3..0", "it goes up"),
        ("5:int8:0..200", "fit the dtype"),
        ("5:uint8:-1..3", "fit the dtype"),
        ("5:int64:", "is not a range"),
        ("5:int64:0-3", "is not a range"),
    ],
)
def test_what_is_no_range(text: str, part: str) -> None:
    with pytest.raises(InputError, match=part):
        parse_input(text)
