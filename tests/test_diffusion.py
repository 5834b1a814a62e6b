"""Pipelines of diffusers from their configs: what they store, one generation, and a training step of a part."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import memsize
from memsize import ModelRequest
from memsize.cli import run
from memsize.documents import document
from memsize.records.trace import Event
from tests.deep import plans_of
from tests.gpus import Replays, card, estimate_gpu, phase_peaks
from tests.models import SCENARIOS
from tests.records import layer, toy
from tests.workloads import (
    INSTALLED,
    Inference,
    Runner,
    _Tokenizer,
    in_phases,
    offload_layers,
    offload_models,
    opened,
    phases_of,
)

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
            diffusers.UNet2DConditionModel.from_config(config_of(folder, "unet")),
            diffusers.AutoencoderKL.from_config(config_of(folder, "vae")),
            transformers.CLIPTextModel(transformers.CLIPTextConfig.from_pretrained(folder / "text_encoder")),
        )
        for parameter in module.parameters()
    )
    assert report.parameters == sizes


def test_what_a_gpu_needs_for_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is kept for backward: bars are of the peak."""
    report = memsize.report(f"diffusers:{folder}", scenarios="fp16", gpu="t4")
    assert document(report).verdict()[0].code == "inference-peak"
    peak = report.scenario_results[0].inference
    bars = document(report).bars()
    assert bars.title.startswith("peak of inference") and sum(bars.bars[0].sizes) == peak.requested
    # Sums over all layers and steps, as a summary's total, would say nothing.
    assert run(["report", f"diffusers:{folder}", "--scenario", "fp16", "--gpu", "t4", "--format", "markdown"]) == 0
    headings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| scenario ")]
    assert not any("total" in heading or "outputs" in heading for heading in headings)
    assert any("parameters" in heading for heading in headings)


def test_options_of_a_generation(folder: Path) -> None:
    target = f"diffusers:{folder}?guidance=1&steps=3&height=128&width=64"
    trace = memsize.report(target, batch_size=2, scenarios="as-given").trace
    layers = {layer.path: layer for layer in trace.layers}
    assert tuple(layers["unet.conv_in"].outputs[0].spec.shape) == (2, 32, 64, SIDE // 2)
    assert layers["unet.conv_in"].calls == 3
    with pytest.raises(memsize.MemsizeError, match="guidance_scale"):
        memsize.report(f"diffusers:{folder}?guidance_scal=1")
    with pytest.raises(memsize.MemsizeError, match="has no option 'offload': known: prompt, height"):
        memsize.report(f"diffusers:{folder}?offload=model")


def test_phases_of_a_generation(folder: Path) -> None:
    """Weights of each phase's parts and of all others add up; guidance doubles the rows of the denoising alone."""
    target = f"diffusers:{folder}?height=128&width=128"
    report = memsize.generate(target, batch_size=2, gpu="a100", scenarios="as-given")
    assert isinstance(report, memsize.Report)
    inference = report.scenario_results[0].inference
    assert inference is not None
    _, denoising, decoding = inference.phases
    assert [phase.phase for phase in inference.phases] == ["text encoding", "denoising", "decoding"]
    assert [phase.parts for phase in inference.phases] == [("text_encoder",), ("unet",), ("vae",)]
    highest = max(inference.phases, key=lambda phase: phase.requested)
    assert (highest.requested, highest.phase) == (inference.requested, inference.peak_phase)
    assert inference.allocated == max(phase.allocated for phase in inference.phases)
    assert inference.reserved == decoding.reserved  # nothing is given back
    stored = {name: stored_bytes(folder, name) for name in ("text_encoder", "unet", "vae")}
    for phase, part in zip(inference.phases, stored, strict=True):
        assert phase.weights == stored[part]
        assert phase.other_weights == sum(stored.values()) - stored[part]
        assert phase.weights + phase.other_weights + phase.activations == phase.requested
    unguided = memsize.generate(f"{target}&guidance_scale=1", batch_size=2, gpu="a100", scenarios="as-given")
    assert unguided.scenario_results[0].inference.phases[1].activations < denoising.activations
    codes = [finding.code for finding in document(report).verdict()]
    assert codes[:2] == ["inference-peak", "pipeline-phases"]
    data = document(report).figures("MiB")["scenarios"][0]["inference"]["phases"]
    assert [row["requested"] for row in data] == [phase.requested for phase in inference.phases]
    table = next(section for section in document(report).sections() if getattr(section, "name", "") == "phases")
    assert len(table.rows) == 3


def config_of(folder: Path, part: str) -> Any:
    return json.loads((folder / part / "config.json").read_text())


def stored_bytes(folder: Path, part: str) -> int:
    """Parameters and buffers of a part of the folder, in float32."""
    config = config_of(folder, part)
    module: Any = {
        "text_encoder": lambda: transformers.CLIPTextModel(transformers.CLIPTextConfig.from_dict(config)),
        "unet": lambda: diffusers.UNet2DConditionModel.from_config(config),
        "vae": lambda: diffusers.AutoencoderKL.from_config(config),
    }[part]()
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def test_options_of_tokens_are_refused(folder: Path) -> None:
    for options in ({"prompt": 64}, {"max_new_tokens": 2}, {"num_beams": 2}):
        (name,) = options
        problem = rf"{name} is for tokens; its options follow its name: \?height=1024"
        with pytest.raises(memsize.MemsizeError, match=problem):
            memsize.generate(f"diffusers:{folder}", **options)
    with pytest.raises(memsize.MemsizeError, match="one batch size"):
        memsize.generate(f"diffusers:{folder}", batch_size="1,2")
    with pytest.raises(memsize.MemsizeError, match="memsize generate 'diffusers:"):
        memsize.serve(f"diffusers:{folder}")


def test_parts_are_never_in_training_mode(folder: Path) -> None:
    """Dropout of a text encoder, such as T5's, is off in a report, too, which is of training mode elsewhere."""
    with opened(ModelRequest.of(f"diffusers:{folder}", mode="train")) as pipeline:
        model = pipeline.run[1].train()
    assert not any(module.training for module in model.modules())


OFFLOADS = {
    "to": (),
    "enable_model_cpu_offload": (offload_models,),
    "enable_sequential_cpu_offload": (offload_layers,),
}


@pytest.mark.thorough
@pytest.mark.parametrize("method", OFFLOADS)
def test_offloads_against_the_hooks_of_accelerate(folder: Path, method: str) -> None:
    """The pipeline's own methods on a simulated GPU reserve and allocate as much, to the byte."""
    pytest.importorskip("accelerate")
    gpu, (text, unet, vae) = card("a100"), (config_of(folder, part) for part in ("text_encoder", "unet", "vae"))
    with memsize.virtual_gpu(gpu.name), torch.no_grad():
        pipeline = diffusers.StableDiffusionPipeline(
            text_encoder=transformers.CLIPTextModel(transformers.CLIPTextConfig.from_dict(text)).eval(),
            unet=diffusers.UNet2DConditionModel.from_config(unet).eval(),
            vae=diffusers.AutoencoderKL.from_config(vae).eval(),
            tokenizer=_Tokenizer(77),
            scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        pipeline.set_progress_bar_config(disable=True)
        pipeline.to("cuda") if method == "to" else getattr(pipeline, method)(device="cuda")
        torch.cuda.reset_peak_memory_stats()
        pipeline(prompt=["", ""], height=128, width=128, num_inference_steps=2, output_type="pt")
        measured = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    target = ModelRequest.of(f"diffusers:{folder}?height=128&width=128", batch_size=2, mode="eval")
    with opened(target) as subject:
        runner = Runner(*subject.run, gpu=gpu, plans=plans_of(gpu, INSTALLED))
        peak = estimate_gpu(runner.run(Inference(), SCENARIOS["as-given"], edits=OFFLOADS[method]), gpu)
    assert (peak.allocated, peak.reserved) == measured


def test_offloaded_weights(folder: Path) -> None:
    """Under model offload a phase needs less by the weights of all other parts, and nothing else."""
    target = ModelRequest.of(f"diffusers:{folder}", batch_size=1, mode="eval")
    with opened(target) as subject:
        runner = Runner(*subject.run)
        runs = {edits: runner.run(Inference(), SCENARIOS["as-given"], edits=edits) for edits in OFFLOADS.values()}
        phases = phases_of(runner.model)
    usual, by_part, by_layer = (list(phase_peaks(run, None, Replays(timeline=True), phases)) for run in runs.values())
    assert [phase.other_weights for phase in by_part] == [0, 0, 0]
    assert [phase.requested for phase in by_part] == [phase.requested - phase.other_weights for phase in usual]
    assert all(layer.requested < part.requested for layer, part in zip(by_layer, by_part, strict=True))


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
    assert rows["sequential offload"].peak < rows["model offload"].peak < fit.fit_rows[0].peak


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


def test_the_timestep_of_a_clip_is_on_the_gpu(tmp_path: Path) -> None:
    """CogVideoX embeds it as the pipeline passes it: nothing there is mixed with tensors of the CPU."""
    text = transformers.T5Config(d_model=WIDTH, d_ff=64, d_kv=8, num_layers=1, num_heads=4, vocab_size=100)
    text.save_pretrained(tmp_path / "text_encoder")
    size = {"sample_width": 8, "sample_height": 8, "sample_frames": 5, "max_text_seq_length": 8}
    sizes = size | {"num_attention_heads": 2, "attention_head_dim": 16, "text_embed_dim": WIDTH, "num_layers": 1}
    diffusers.CogVideoXTransformer3DModel(**sizes, time_embed_dim=16).save_config(tmp_path / "transformer")
    diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4, sample_height=64, sample_width=64
    ).save_config(tmp_path / "vae")
    diffusers.CogVideoXDDIMScheduler().save_config(tmp_path / "scheduler")
    index = {
        "_class_name": "CogVideoXPipeline",
        "scheduler": ["diffusers", "CogVideoXDDIMScheduler"],
        "text_encoder": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "T5Tokenizer"],
        "transformer": ["diffusers", "CogVideoXTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLCogVideoX"],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    target = f"diffusers:{tmp_path}?num_frames=5&height=64&width=64&max_sequence_length=8"
    report = memsize.report(target, batch_size=1, scenarios="as-given")
    assert not [note for note in report.notes if "makes a tensor on the CPU" in note]
    assert {layer.path: layer.calls for layer in report.trace.layers}["transformer"] == 2
    part = memsize.report(f"diffusers:{tmp_path}/transformer", batch_size=3, train="adamw", scenarios="bf16")
    # One latent frame of the first, one of the four others, with 16 channels; and 8 tokens of text.
    shapes = [list(tensor.spec.shape) for tensor in part.trace.inputs]
    assert shapes[:2] == [[3, 2, 16, 8, 8], [3, 8, WIDTH]] and part.scenario_results[0].training is not None
    (tmp_path / "scheduler" / "scheduler_config.json").unlink()
    with pytest.raises(memsize.MemsizeError, match=r"^cannot read .*scheduler_config.json: No such file or directory$"):
        memsize.report(target)


def test_a_generation_that_is_too_large_names_what_to_try(folder: Path) -> None:
    report = memsize.generate(f"diffusers:{folder}?height=8192&width=8192", gpu="t4", scenarios="fp16")
    short, peak, phases = document(report).verdict()[:3]
    assert "does not fit on Tesla T4: it runs out of memory in the denoising" in short.text()
    assert peak.text().startswith("With enough memory, inference in fp16 peaks at ")
    assert phases.in_brief().endswith(
        ": enable_model_cpu_offload() frees them. memsize fit tries that, and tiling and slicing in the autoencoder."
    )


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
    with pytest.raises(
        memsize.MemsizeError, match=r"^no such folder: sd15: .*stable-diffusion-v1-5/stable-diffusion-v1-5"
    ):
        memsize.report("diffusers:sd15")
    with pytest.raises(memsize.MemsizeError, match="no folder, file, preset or cached config"):
        memsize.report("diffusers:org/smal")


def test_a_part_of_a_preset() -> None:
    """SDXL's UNet has 2,567 million parameters: the authors say 2.6 billion."""
    report = memsize.report("stabilityai/stable-diffusion-xl-base-1.0/unet", scenarios="as-given")
    assert round(report.parameters / 1e9, 1) == 2.6
    assert any("preset stabilityai/stable-diffusion-xl-base-1.0" in note for note in report.notes)
    with pytest.raises(memsize.MemsizeError, match="unet"):
        memsize.report("diffusers:stabilityai/stable-diffusion-xl-base-1.0/unett")


def test_what_is_no_pipeline(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(memsize.MemsizeError, match="model_index"):
        memsize.report(f"diffusers:{tmp_path}")
    with pytest.raises(memsize.MemsizeError, match="UNet2DConditionModel"):
        memsize.report(f"diffusers:{folder}/vae")


def test_a_pipeline_names_the_part_to_train(folder: Path) -> None:
    with pytest.raises(memsize.InputError, match=rf"^a pipeline only generates; train its unet, {folder}/unet$"):
        memsize.fit(f"diffusers:{folder}", train="adamw", gpu="t4", scenarios="as-given")


def test_events_between_parts() -> None:
    """Before the first part they belong to its phase, else to the phase that they follow; a setup stays as it is."""
    layers = tuple(layer(path, "Module") for path in ("", "vae", "unet"))
    events = ((1, "setup"), (0, "forward"), (2, "forward"), (-1, "forward"), (0, "forward"), (1, "forward"))
    phases = ("setup", "forward")
    recorded = tuple(Event(0, 8, phases.index(name), index, "") for index, name in events)
    run = replace(toy(), layers=layers, phases=phases, events=recorded)
    divided = in_phases(run, {"vae": "decoding", "unet": "denoising"})
    assert [divided.phases[event.phase] for event in divided.events] == ["setup", *["denoising"] * 4, "decoding"]
    assert in_phases(run, {}) is run
