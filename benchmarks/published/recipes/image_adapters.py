"""PEFT's comparison of adapters: FLUX.2-klein trained on a few images, with the adapters' published configurations.

The script of June and July 2026, with which the results were made, adds the adapter on the CPU. DINOv2, which judges
the images, and the transformer stay on the GPU; the text encoder and the VAE are there until the embeddings of the
prompts and the latents of the images are. Evaluations are not part of the figures; each ends with an empty cache.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import memsize
from benchmarks.published.environments import ENVIRONMENTS, ready
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
EXPERIMENTS: Final = "method_comparison/image-gen/experiments"
IMAGES: Final = 14
"""Of twenty, those that are not kept for validation and tests."""
REPEATS: Final = 1000
BATCH: Final = 2
STEPS: Final = 3
"""Before an evaluation, and after it: the first makes the optimizer's state."""


def predict(row: Row) -> int:
    """The row's figure, in bytes."""
    assert row.source.environment is not None
    sys.path.insert(0, str(ready(ENVIRONMENTS[row.source.environment]) / "src"))
    sys.modules.setdefault("torchao", None)  # type: ignore[arg-type]
    with memsize.virtual_gpu(row.source.gpu, stack=row.source.stack):
        return _run(row.values["run"])[row.figure]


def _run(name: str) -> Mapping[str, int]:
    transformer, adapter = _transformer(name)
    indices = torch.cat([torch.randperm(IMAGES, device="cuda") for _ in range(REPEATS)])
    judge = _judge()
    transformer.to("cuda").train()
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-4, weight_decay=1e-4)
    embeddings, text_ids, latents = _caches()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    body = _Step(transformer, optimizer, indices, embeddings, text_ids, latents, adapter == "ADALORA")
    allocated, highest, after = 0, 0, 0
    for _ in range(2):
        for _ in range(STEPS):
            body()
            after = max(after, torch.cuda.memory_reserved())
        allocated = allocated or torch.cuda.memory_allocated()
        highest = max(highest, torch.cuda.max_memory_reserved())
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    del judge
    return {"allocated": allocated, "reserved": highest, "after": after}


def _experiment(name: str) -> Path:
    import peft

    method, _, variant = name.partition("--")
    return Path(peft.__file__).parents[2] / EXPERIMENTS / method / variant


def _transformer(name: str) -> tuple[Any, str]:
    from diffusers import Flux2Transformer2DModel
    from peft import PeftConfig, get_peft_model

    with torch.device("cuda"):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        transformer = Flux2Transformer2DModel(**_MODEL)
        torch.set_default_dtype(default)
    transformer.enable_gradient_checkpointing()
    transformer.to("cpu")
    torch.cuda.empty_cache()
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


def _caches() -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings of three layers of the text encoder, their positions, and the latents of all images."""
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    parts = [torch.empty(1, 512, 7680, **kind) for _ in range(IMAGES)]  # type: ignore[call-overload]
    ids = [torch.empty(1, 512, 4, device="cuda", dtype=torch.int64) for _ in range(IMAGES)]
    embeddings, text_ids = torch.cat(parts, dim=0), torch.cat(ids, dim=0)
    del parts, ids
    images = [torch.empty(BATCH, 128, 32, 32, **kind) for _ in range(IMAGES // BATCH)]  # type: ignore[call-overload]
    return embeddings, text_ids, torch.cat(images, dim=0)


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
