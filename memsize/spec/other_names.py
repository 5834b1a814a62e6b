"""Names that PyTorch, other libraries and other tools have for options of memsize."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "--arg guidance_scale=3.5": ("guidance-scale",),
    "--arg height=1024": ("height",),
    "--arg num_inference_steps=28": ("num-inference-steps",),
    "--arg width=1024": ("width",),
    "--base int8": ("load-in-8bit",),
    "--base nf4": ("load-in-4bit",),
    "--batch-size": ("batch", "bs", "bsz", "micro-batch-size", "per-device-train-batch-size"),
    "--budget": ("max-memory", "memory", "vram"),
    "--capacity-factor": ("capacity", "expert-capacity", "moe-capacity-factor", "moe-expert-capacity-factor"),
    "--compile": ("compiled", "torch-compile"),
    "--enable-lora": ("lora-modules", "lora-paths"),
    "--against": ("model",),
    "--gpu": ("card", "device"),
    "--gpus": ("devices", "n-gpus", "nproc-per-node", "num-gpus", "num-processes", "world-size"),
    "--gradient-accumulation-steps": ("accumulate", "accumulation-steps", "grad-accum"),
    "--input": ("image-size", "input", "input-shape", "shape", "sizes"),
    "--lora r=16": ("lora-r", "lora-rank", "peft", "r", "rank"),
    "--lora r=16 --base nf4": ("qlora",),
    "--loss": ("criterion", "loss-fn"),
    "--seq-len": ("context", "max-len", "max-length", "max-seq-length", "max-seq-len", "seq-length", "sequence-length"),
    "--max-new-tokens": ("max-length", "max-tokens", "new-tokens"),
    "--max-model-len": ("context-length", "max-len", "max-length", "max-seq-len", "max-tokens", "seq-len"),
    "--max-num-seqs": ("batch-size", "concurrency", "max-batch-size", "max-running-requests"),
    "--parallel fsdp": ("ddp", "deepspeed", "fsdp", "strategy", "zero-stage"),
    "--prompt": ("input-len", "prompt-len", "prompt-length"),
    "--remedies": ("activation-checkpointing", "checkpoint", "gradient-checkpointing", "offload"),
    "--scenario": ("base", "dtype", "precision", "quantization", "scenario", "scenarios", "torch-dtype"),
    "--scenario amp-bf16": ("amp", "autocast", "mixed-precision", "use-amp"),
    "--scenario bf16": ("bf16", "bfloat16"),
    "--scenario fp16": ("fp16", "half"),
    "--speculative-config": (
        "draft-model",
        "num-speculative-tokens",
        "speculative-algorithm",
        "speculative-draft-model-path",
        "speculative-eagle-topk",
        "speculative-model",
        "speculative-num-draft-tokens",
        "speculative-num-steps",
    ),
    "--tp": ("num-gpus", "pipeline-parallel-size", "pp", "tp"),
    "--train": ("backward", "optim", "optimizer", "train", "train-step", "training"),
}
"""By the option, as a command line writes it."""


def other_name(name: str, flags: Collection[str]) -> str | None:
    """The option among `flags` that is meant by another tool's `name`, such as ``--optimizer`` or ``load_in_4bit``."""
    plain = name.lstrip("-").replace("_", "-")
    return next((option for option, names in _NAMES.items() if plain in names and option.split()[0] in flags), None)
