"""PEFT's comparison of adapters: FLUX.2-klein trained on a few images, with the adapters' published configurations.

The script of June and July 2026, with which the results were made, adds the adapter on the CPU. DINOv2, which judges
the images, and the transformer stay on the GPU; the text encoder and the VAE are there until the embeddings of the
prompts and the latents of the images are: these stay in segments of the two models. Evaluations are not part of the
figures; each ends with an empty cache. All 750 steps count: `reserved` is the most of any, and its interval has that of
other orders of the driver's addresses.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import memsize
from benchmarks.published.environments import ENVIRONMENTS, ready
from benchmarks.published.recipes.long_training import ORDERS, Addresses, LongTraining
from benchmarks.published.rows import Row

_MODEL: Final = {
    "in_channels": 128,
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "guidance_embeds": False,
}
"""What the checkpoint's configuration has where it differs from the class's defaults."""
_QWEN: Final = {
    "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}  # fmt: skip
TEXT: Final = 512
PROMPT: Final = 32
"""Tokens of a prompt, about; the rest of `TEXT` is masked."""
EXPERIMENTS: Final = "method_comparison/image-gen/experiments"
IMAGES: Final = 14
"""Of twenty, those that are not kept for validation and tests."""
REPEATS: Final = 1000
BATCH: Final = 2
STEPS: Final = 750
EVALUATED: Final = 100
"""Steps between two evaluations."""
RECORDED: Final = (1, 2, 3)
"""Steps that are run; the last of them stands for those that follow."""
RANKED: Final = (101, 102, 103)
"""AdaLoRA takes ranks away from here on."""
_LATER, _RISING = "torch=2.13,cuda=13.0", (False, False)
"""The runs of July, on a later image of the machine. The averages of each hundred steps, which the results have too,
are those of addresses that rise and are not assigned again: of GLoRA 11,016, 11,564 and then 11,528 MiB.
"""
RANKS_FINAL: Final = 549
"""After this step AdaLoRA drops its averages, and takes less."""


def predict(row: Row) -> tuple[int, int, int]:
    """The row's figure, and the least and the most of it, in bytes."""
    assert row.source.environment is not None
    sys.path.insert(0, str(ready(ENVIRONMENTS[row.source.environment]) / "src"))
    sys.modules.setdefault("torchao", None)  # type: ignore[arg-type]
    by_order = _run(row.values["run"], row.source.gpu, row.source.stack)
    allocated, reserved = by_order[_RISING if row.source.stack == _LATER else ORDERS[0]]
    if row.figure == "allocated":
        return allocated, allocated, allocated
    figures = [figure for _, figure in by_order.values()]
    return reserved, min(figures), max(figures)


@cache
def _run(name: str, gpu: str, stack: str) -> dict[tuple[bool, bool], tuple[int, int]]:
    """What is allocated on average after the first steps, and what is reserved at most, by each of `ORDERS`."""
    with memsize.virtual_gpu(gpu, stack=stack) as region:
        before, recorded = _record(name)
    last = RANKS_FINAL if recorded != RECORDED else 300 if name.startswith("full-finetuning") else STEPS
    figures = {}
    for order in ORDERS:
        levels = LongTraining(region.trace, len(recorded), Addresses(*order)).run(recorded, last, EVALUATED)
        allocated = sum(level.allocated for level in levels[:EVALUATED]) // EVALUATED
        figures[order] = allocated - before, max(level.reserved for level in levels) - before
    return figures


def _record(name: str) -> tuple[int, Sequence[int]]:
    """Run the script up to its first steps, each of which ends with an empty cache to tell it from the next; what was
    reserved before, which the script subtracts from all its figures, and the numbers of the steps.
    """
    encoder, vae = _text_encoder(), _vae()
    transformer, adapter = _transformer(name)
    nn.Linear(1, 1).to("cuda")
    before = torch.cuda.memory_reserved()
    indices = torch.cat([torch.randperm(IMAGES, device="cuda") for _ in range(REPEATS)])
    judge = _judge()
    transformer.to("cuda").train()
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-4, weight_decay=1e-4)
    embeddings, text_ids = _embeddings(encoder)
    latents = _latents(vae)
    torch.cuda.empty_cache()
    allocates = adapter == "ADALORA"
    recorded = (*RECORDED, *RANKED) if allocates else RECORDED
    body = _Step(transformer, optimizer, indices, embeddings, text_ids, latents, allocates)
    for step in recorded:
        body.done = step - 1
        body()
        torch.cuda.empty_cache()
    torch.empty(1, device="cuda")
    del judge
    return before, recorded


def _in_bfloat16(make: Callable[[], nn.Module]) -> Any:
    """A module on the CPU. It is made on the GPU, where nothing is computed."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        module = make()
    torch.set_default_dtype(default)
    module.requires_grad_(False).eval().to("cpu")
    torch.cuda.empty_cache()
    return module


def _experiment(name: str) -> Path:
    import peft

    method, _, variant = name.partition("--")
    return Path(peft.__file__).parents[2] / EXPERIMENTS / method / variant


def _transformer(name: str) -> tuple[Any, str]:
    from diffusers import Flux2Transformer2DModel
    from peft import PeftConfig, get_peft_model

    transformer: Any = _in_bfloat16(lambda: Flux2Transformer2DModel(**_MODEL)).requires_grad_(True)
    transformer.enable_gradient_checkpointing()
    folder = _experiment(name)
    if name.startswith("full-finetuning"):
        return transformer.requires_grad_(True), ""
    config = PeftConfig.from_pretrained(folder)
    adapted = get_peft_model(transformer, config, autocast_adapter_dtype=True)
    return adapted, str(config.peft_type.value)


def _judge() -> nn.Module:
    """DINOv2 base in float32: 86,580,480 numbers."""
    import transformers

    config = transformers.Dinov2Config(image_size=518)
    return transformers.Dinov2Model(config).to("cuda").eval()


def _text_encoder() -> nn.Module:
    """Qwen3 4B, on the CPU: the pipeline's encoder of prompts."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _in_bfloat16(lambda: Qwen3ForCausalLM(Qwen3Config(**_QWEN)))


def _vae() -> Any:
    from diffusers import AutoencoderKLFlux2

    return _in_bfloat16(AutoencoderKLFlux2)


def _embeddings(encoder: Any) -> tuple[Tensor, Tensor]:
    """Embeddings of the prompts, from three layers of the encoder, and their positions."""
    parts, ids = [], []
    encoder.to("cuda")
    with torch.no_grad():
        for _ in range(IMAGES):
            parts.append(_embedded(encoder).repeat(1, 1, 1))
            ids.append(torch.cartesian_prod(*map(torch.arange, (1, 1, 1, TEXT))).unsqueeze(0).to("cuda"))
    encoder.to("cpu")
    return torch.cat(parts, dim=0), torch.cat(ids, dim=0)


def _embedded(encoder: Any) -> Tensor:
    """A prompt's embeddings: it fills a part of `TEXT` tokens, the rest is masked."""
    tokens = torch.zeros(1, TEXT, dtype=torch.int64).to("cuda")
    mask = (torch.arange(TEXT) < PROMPT).long().unsqueeze(0).to("cuda")
    output = encoder(input_ids=tokens, attention_mask=mask, output_hidden_states=True, use_cache=False)
    layers = torch.stack([output.hidden_states[layer] for layer in (10, 20, 30)], dim=1)
    return layers.permute(0, 2, 1, 3).reshape(1, TEXT, -1)


def _latents(vae: Any) -> Tensor:
    """The latents of all images, two images at a time."""
    from diffusers import Flux2KleinPipeline

    mean = vae.bn.running_mean.view(1, -1, 1, 1)
    deviation = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
    vae.to("cuda")
    parts = []
    with torch.no_grad():
        mean, deviation = mean.to("cuda"), deviation.to("cuda")
        for _ in range(0, IMAGES, BATCH):
            pixels = torch.zeros(BATCH, 3, 512, 512).to("cuda", torch.bfloat16)
            latents = vae.encode(pixels).latent_dist.mode()
            latents = Flux2KleinPipeline._patchify_latents(latents)
            latents = (latents - mean) / deviation
            parts.append(latents)
    vae.to("cpu")
    return torch.cat(parts, dim=0)


class _Step:
    """One step of the script's loop; its variables live until the next step replaces them."""

    def __init__(
        self,
        transformer: Any,
        optimizer: Any,
        indices: Tensor,
        embeddings: Tensor,
        text_ids: Tensor,
        latents: Tensor,
        allocates: bool,
    ) -> None:
        self.transformer, self.optimizer, self.indices = transformer, optimizer, indices
        self.embeddings, self.text_ids, self.latents = embeddings, text_ids, latents
        self.allocates, self.done = allocates, 0
        self.local: dict[str, Tensor] = {}
        self.losses: list[Tensor] = []

    def __call__(self) -> None:
        self._draw()
        self.optimizer.zero_grad(set_to_none=True)
        self._loss()
        self.local["loss"].backward()
        nn.utils.clip_grad_norm_(self.transformer.parameters(), 1.0)
        self.optimizer.step()
        self.done += 1
        if self.allocates:
            self.transformer.base_model.update_and_allocate(self.done)
        self.losses.append(self.local["loss"])

    def _draw(self) -> None:
        local, at = self.local, self.done * BATCH
        local["batch"] = self.indices[at : at + BATCH].to(dtype=torch.long)
        local["latents"] = self.latents.index_select(0, local["batch"])
        local["embeddings"] = self.embeddings.index_select(0, local["batch"])
        local["text ids"] = self.text_ids.index_select(0, local["batch"])
        positions = torch.cartesian_prod(torch.arange(1), torch.arange(32), torch.arange(32), torch.arange(1))
        local["positions"] = positions.unsqueeze(0).expand(BATCH, -1, -1).to("cuda")
        local["noise"] = torch.randn_like(local["latents"])
        local["timesteps"] = torch.full((BATCH,), 500.0).to("cuda")
        local["sigmas"] = torch.full((BATCH, 1, 1, 1), 0.5, dtype=torch.bfloat16).to("cuda")
        local["noisy"] = (1.0 - local["sigmas"]) * local["latents"] + local["sigmas"] * local["noise"]
        local["packed"] = local["noisy"].reshape(BATCH, 128, 32 * 32).permute(0, 2, 1)

    def _loss(self) -> None:
        local = self.local
        output = self.transformer(
            hidden_states=local["packed"],
            timestep=local["timesteps"] / 1000,
            guidance=None,
            encoder_hidden_states=local["embeddings"],
            txt_ids=local["text ids"],
            img_ids=local["positions"],
            return_dict=False,
        )[0]
        local["prediction"] = _unpacked(output[:, : local["packed"].size(1)], local["positions"])
        local["weighting"] = torch.ones_like(local["sigmas"])
        local["target"] = local["noise"] - local["latents"]
        errors = (local["prediction"].float() - local["target"].float()) ** 2
        loss = torch.mean((local["weighting"].float() * errors).reshape(BATCH, -1), 1)
        local["loss"] = loss.mean()


def _unpacked(tokens: Tensor, positions: Tensor) -> Tensor:
    """Tokens put where their positions say, image by image."""
    images = []
    for data, places in zip(tokens, positions, strict=True):
        flat = places[:, 1].to(torch.int64) * 32 + places[:, 2].to(torch.int64)
        side = math.isqrt(len(data))
        result = torch.zeros((side * side, data.shape[1]), device=data.device, dtype=data.dtype)
        result.scatter_(0, flat.unsqueeze(1).expand(-1, data.shape[1]), data)
        images.append(result.view(side, side, -1).permute(2, 0, 1))
    return torch.stack(images, dim=0)
