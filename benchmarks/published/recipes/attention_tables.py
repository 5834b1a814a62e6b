"""The tables of eager beside SDPA attention in the documentation of transformers: half precision, no optimizer.

All come from two scripts, which hold the last output while the next one is made. Models are built as `from_pretrained`
builds them, in half precision from the start, so that what a constructor makes in float32 stays so; the script for
inference then casts everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import transformers
from torch import nn

from benchmarks.published.recipes.run import traced
from benchmarks.published.rows import Row
from memsize.analysis.step import StepTrace
from memsize.loading.weightless import Weightless

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

WITHOUT_MASK: Final = frozenset({"distilbert/train"})
"""Scripts that pass no attention mask."""


def predict(row: Row) -> StepTrace:
    """The run of a row: steps without an optimizer, or forwards."""
    model = _built(row)
    if "/train" in row.source.name:
        return traced(row, model, _training, _texts(row))
    return traced(row, model.eval().to(torch.float16), _inference, _masked(row))


def _built(row: Row) -> nn.Module:
    model, config, values = MODELS[row.source.name]
    build: Callable[..., nn.Module] = getattr(transformers, model)._from_config
    with Weightless():
        return build(
            getattr(transformers, config)(**values),
            torch_dtype=torch.float16,
            attn_implementation=row.values["attention"],
        )


def _texts(row: Row) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(int(row.values["batch"]), int(row.values["length"]), dtype=torch.int64)
    if row.source.name in WITHOUT_MASK:
        return {"input_ids": tokens}
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def _masked(row: Row) -> dict[str, torch.Tensor]:
    """The script's floating mask leaves out one token."""
    tokens = torch.ones(int(row.values["batch"]), int(row.values["length"]), dtype=torch.int64)
    mask = torch.ones(tokens.shape)
    mask[0, 0] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def _training(model: nn.Module) -> Callable[..., None]:
    model.train()
    tensors: dict[str, Any] = {}

    def body(**inputs: torch.Tensor) -> None:
        model.zero_grad()
        tensors["outputs"] = model(**inputs)
        tensors["loss"] = tensors["outputs"].logits.sum()
        tensors["loss"].backward()

    return body


def _inference(model: nn.Module) -> Callable[..., None]:
    tensors: dict[str, Any] = {}

    def body(**inputs: torch.Tensor) -> None:
        with torch.no_grad():
            tensors["output"] = model(**inputs)

    return body
