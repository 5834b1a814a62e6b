"""Pipelines of diffusers from their configs: what they store, one generation, and a training step of a part."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import memsize
from memsize.documents import document

diffusers: Any = pytest.importorskip("diffusers")
transformers: Any = pytest.importorskip("transformers")
SIDE, WIDTH = 64, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Stable Diffusion, without weights."""
    root = tmp_path_factory.mktemp("pipeline")
    blocks = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
    text = transformers.CLIPTextConfig(
        hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=100
    )
    unet = diffusers.UNet2DConditionModel(
        sample_size=SIDE // 2,
        cross_attention_dim=WIDTH,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **blocks,
    )
    vae = diffusers.AutoencoderKL(
        latent_channels=4,
        sample_size=SIDE,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        **blocks,
    )
    text.save_pretrained(root / "text_encoder")
    unet.save_config(root / "unet")
    vae.save_config(root / "vae")
    diffusers.DDIMScheduler().save_config(root / "scheduler")
    index = {
        "_class_name": "StableDiffusionPipeline",
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "requires_safety_checker": False,
        "safety_checker": [None, None],
        "scheduler": ["diffusers", "DDIMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (root / "model_index.json").write_text(json.dumps(index))
    return root


def test_a_generation(folder: Path) -> None:
    report = memsize.report(f"diffusers:{folder}", batch_size=2, scenarios="as-given")
    outputs = {layer.path: layer.outputs for layer in report.trace.layers}
    # Guidance makes two rows of each prompt; the latents have half the sides of the image.
    assert tuple(outputs["unet.conv_in"][0].spec.shape) == (4, 32, SIDE // 2, SIDE // 2)
    assert tuple(outputs["vae.decoder"][0].spec.shape) == (2, 3, SIDE, SIDE)
    sizes = sum(
        parameter.numel()
        for module in (
            diffusers.UNet2DConditionModel.from_config(json.loads((folder / "unet" / "config.json").read_text())),
            diffusers.AutoencoderKL.from_config(json.loads((folder / "vae" / "config.json").read_text())),
            transformers.CLIPTextModel(transformers.CLIPTextConfig.from_pretrained(folder / "text_encoder")),
        )
        for parameter in module.parameters()
    )
    assert report.parameters == sizes


def test_what_a_gpu_needs_for_it(folder: Path) -> None:
    """Nothing is kept for backward: bars are of the peak."""
    report = memsize.report(f"diffusers:{folder}", scenarios="fp16", gpu="t4")
    assert document(report).verdict()[0].code == "inference-peak"
    peak = report.scenario_results[0].inference
    bars = document(report).bars()
    assert bars.title.startswith("peak of inference") and sum(bars.bars[0].sizes) == peak.requested


def test_options_of_a_generation(folder: Path) -> None:
    target = f"diffusers:{folder}?guidance=1&steps=3&height=128&width=64"
    trace = memsize.report(target, batch_size=2, scenarios="as-given").trace
    layers = {layer.path: layer for layer in trace.layers}
    assert tuple(layers["unet.conv_in"].outputs[0].spec.shape) == (2, 32, 64, SIDE // 2)
    assert layers["unet.conv_in"].calls == 3
    with pytest.raises(memsize.MemsizeError, match="guidance_scale"):
        memsize.report(f"diffusers:{folder}?guidance_scal=1")


def test_generating_tokens_names_the_report(folder: Path) -> None:
    target = f"diffusers:{folder}"
    with pytest.raises(memsize.MemsizeError, match=r"no tokens: memsize report 'diffusers:.*height=1024") as raised:
        memsize.generate(target)
    assert f"'{target}?height=1024&steps=2'" in str(raised.value)


def largest_of_decoder(target: str) -> int:
    trace = memsize.report(target, batch_size=1, scenarios="as-given").trace
    layers = [layer.path.startswith("vae.decoder") for layer in trace.layers]
    return max(storage.bytes for storage in trace.storages if storage.layer >= 0 and layers[storage.layer])


def test_tiles_of_the_autoencoder(folder: Path) -> None:
    target = f"diffusers:{folder}?height=128&width=128&steps=1"
    # The decoder works on tiles with the sides of the images that it was made for: half of these.
    assert largest_of_decoder(f"{target}&tiling=True") * 4 == largest_of_decoder(target)


@pytest.mark.thorough
def test_tiles_are_a_remedy(folder: Path) -> None:
    target = f"diffusers:{folder}?height=128&width=128&steps=1"
    tiled = memsize.fit(f"{target}&tiling=True", batch_size=2, gpu="a100", scenarios="fp16").fit_rows[0]
    fit = memsize.fit(target, batch_size=2, gpu="a100", scenarios="fp16", remedies=True)
    assert fit.remedied is not None
    rows = {row.name: row for row in fit.remedied.rows}
    assert rows["VAE tiling"].peak == tiled.peak
    assert rows["VAE slicing"].peak is not None


def test_adapters_of_a_part(folder: Path) -> None:
    step = memsize.report(
        f"diffusers:{folder}/unet", batch_size=2, train="adamw", lora="r=4,targets=to_q;to_v", scenarios="as-given"
    )
    trained = [tensor for tensor in step.trace.tensors if tensor.trainable]
    assert trained and all("lora" in tensor.name for tensor in trained)


def test_a_scheduler_that_computes_with_numpy(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder, tmp_path / "euler")
    diffusers.EulerDiscreteScheduler(timestep_spacing="leading").save_config(tmp_path / "euler" / "scheduler")
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"][1] = "EulerDiscreteScheduler"
    (tmp_path / "euler" / "model_index.json").write_text(json.dumps(index))
    report = memsize.report(f"diffusers:{tmp_path / 'euler'}?steps=3", batch_size=1, scenarios="as-given")
    assert {layer.path: layer.calls for layer in report.trace.layers}["unet"] == 3


def test_a_pipeline_of_the_hub(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the local cache, by its Hub id alone; and a part of a preset by its name."""
    repository = tmp_path / "models--org--small"
    shutil.copytree(folder, repository / "snapshots" / "0123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    report = memsize.report("org/small", batch_size=1, scenarios="as-given")
    assert report.model == "diffusers:org/small (StableDiffusionPipeline)"
    assert memsize.report("diffusers:org/small/unet", scenarios="as-given").model.endswith("(UNet2DConditionModel)")
    with pytest.raises(memsize.MemsizeError, match="no folder, file, preset or cached config"):
        memsize.report("diffusers:org/smal")


def test_a_part_of_a_preset() -> None:
    """SDXL's UNet has 2,567 million parameters: the authors say 2.6 billion."""
    report = memsize.report("diffusers:stabilityai/stable-diffusion-xl-base-1.0/unet", scenarios="as-given")
    assert round(report.parameters / 1e9, 1) == 2.6
    assert any("preset stabilityai/stable-diffusion-xl-base-1.0" in note for note in report.notes)
    with pytest.raises(memsize.MemsizeError, match="unet"):
        memsize.report("diffusers:stabilityai/stable-diffusion-xl-base-1.0/unett")


def test_what_is_no_pipeline(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(memsize.MemsizeError, match="model_index"):
        memsize.report(f"diffusers:{tmp_path}")
    with pytest.raises(memsize.MemsizeError, match="UNet2DConditionModel"):
        memsize.report(f"diffusers:{folder}/vae")
