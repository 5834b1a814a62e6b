"""The tables of eager beside SDPA attention in the documentation of transformers: half precision, no optimizer.

All come from two scripts, which hold the last output while the next one is made and measure all sizes in one process.
Models are built as `from_pretrained` builds them, in half precision from the start, so that what a constructor makes in
float32 stays so; the script for inference then casts everything.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, cast

import torch
import transformers
from torch import nn

import memsize
from benchmarks.published.rows import Row, rows

_OPT: Final = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "ffn_dim": 4096,
    "num_attention_heads": 16,
    "word_embed_proj_dim": 512,
    "do_layer_norm_before": False,
}
_PYTHIA: Final = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "vocab_size": 50304,
}
_ALBERT: Final = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "hidden_dropout_prob": 0,
    "attention_probs_dropout_prob": 0,
}
_GPT2_LARGE: Final = {"n_embd": 1280, "n_layer": 36, "n_head": 20}

MODELS: Final[Mapping[str, tuple[str, str, Mapping[str, Any]]]] = {
    "opt-350m/train": ("OPTForCausalLM", "OPTConfig", _OPT),
    "bert-base/train": ("BertLMHeadModel", "BertConfig", {}),
    "gpt2-large/train": ("GPT2LMHeadModel", "GPT2Config", _GPT2_LARGE),
    "pythia-410m/train": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _PYTHIA),
    "biogpt/train": ("BioGptForCausalLM", "BioGptConfig", {}),
    "biogpt/forward": ("BioGptModel", "BioGptConfig", {}),
    "distilbert/train": ("DistilBertForMaskedLM", "DistilBertConfig", {}),
    "albert-base/train": ("AlbertForSequenceClassification", "AlbertConfig", _ALBERT),
    "albert-base/train-mlm": ("AlbertForMaskedLM", "AlbertConfig", _ALBERT),
    "albert-base/forward": ("AlbertForSequenceClassification", "AlbertConfig", _ALBERT),
}
"""The class, its configuration's class, and what differs from that class's defaults, as the checkpoints have it."""

SAVED: Final[Mapping[str, tuple[str, int, Mapping[str, int]]]] = {
    "bert-base": ("BertForPreTraining", 4, {}),
    "gpt2-large": ("GPT2LMHeadModel", 4, {f"transformer.h.{n}.attn.bias": 4 * 1024 * 1024 for n in range(36)}),
    "pythia-410m": ("GPTNeoXForCausalLM", 2, {f"gpt_neox.layers.{n}.attention.bias": 2048 * 2048 for n in range(24)}),
    "distilbert": ("DistilBertForMaskedLM", 4, {}),
    "albert-base": ("AlbertForMaskedLM", 4, {"albert.pooler.weight": 4 * 768 * 768, "albert.pooler.bias": 4 * 768}),
}
"""Checkpoints in safetensors' format: the class whose parameters they hold, the bytes of an element, and what other
tensors they hold, in bytes.
"""
WITH_16_GB: Final = {"RTX 3080 Ti": "RTX A4000"}
"""A card of the same generation with the memory of a laptop's, on which those tables were measured."""
WARMUPS: Final = 2
STEPS: Final = 2
"""Of ten and a hundred: what follows takes about as much."""


def predict(row: Row) -> int:
    """The row's peak in its script's run."""
    return _run(row.source.name)[row.setting]


@cache
def _run(source: str) -> Mapping[str, int]:
    """The peaks of all settings of a source, in the order of the script: one process, one kind of attention after the
    other, each with all sizes.
    """
    of_source = rows([source])
    implementations = ("sdpa", "eager") if "/train" in source else ("eager", "sdpa")
    peaks = {}
    gpu = of_source[0].source.gpu
    with memsize.virtual_gpu(WITH_16_GB.get(gpu, gpu), stack=of_source[0].source.stack):
        for attention in implementations:
            model = _loaded(source, attention)
            for row in of_source:
                if row.values["attention"] == attention:
                    inputs = _inputs(row)
                    peaks[row.setting] = (_trained if "/train" in source else _inferred)(model, inputs)
            del model
            gc.collect()
    return peaks


def _loaded(source: str, attention: str) -> nn.Module:
    """`from_pretrained` under ``torch.device("cuda")``: up to 0.5, safetensors made the tensors that it read on that
    device, in the file's precision, and transformers read them before it built the model, in half precision.
    """
    name, config, values = MODELS[source]
    settings = getattr(transformers, config)(**values)
    with torch.device("cuda"):
        state = _checkpoint(settings, source)
        model = getattr(transformers, name)._from_config(
            settings, torch_dtype=torch.float16, attn_implementation=attention
        )
        del state
    return cast("nn.Module", model if "/train" in source else model.eval().to(torch.float16))


def _checkpoint(settings: Any, source: str) -> list[torch.Tensor]:
    """The file's tensors, by name."""
    if (family := source.partition("/")[0]) not in SAVED:
        return []
    name, element, others = SAVED[family]
    with torch.device("meta"):
        model = getattr(transformers, name)._from_config(settings)
    sizes = {name: element * weight.numel() for name, weight in model.named_parameters()} | others
    return [torch.empty(sizes[name], dtype=torch.uint8) for name in sorted(sizes)]


def _inputs(row: Row) -> dict[str, torch.Tensor]:
    """The script for training passes no mask; that of the other is floating, and leaves out one token."""
    tokens = torch.zeros(int(row.values["batch"]), int(row.values["length"]), dtype=torch.int64)
    if "/train" in row.source.name:
        return {"input_ids": tokens.to("cuda")}
    mask = torch.ones(tokens.shape)
    mask[0, 0] = 0
    return {"input_ids": tokens.to("cuda"), "attention_mask": mask.to("cuda")}


def _trained(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> int:
    """Steps without an optimizer. The last output and loss live until the next ones replace them."""
    model.train()
    for step in range(WARMUPS + STEPS):
        if step == WARMUPS:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.empty_cache()
        model.zero_grad()
        outputs = model(**inputs)
        loss = outputs.logits.sum()
        loss.backward()
    return torch.cuda.max_memory_allocated()


def _inferred(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> int:
    """Forwards, of which the last output lives until the next one replaces it."""
    outputs: list[Any] = []
    with torch.inference_mode():
        model(**inputs)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(STEPS):
            outputs[:] = [model(**inputs)]
    return torch.cuda.max_memory_allocated()
