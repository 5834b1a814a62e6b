"""The largest step of a server, and the part of a model that each of its GPUs stores.

The step is what vLLM runs to find out how much memory is left for the cache (`GPUModelRunner.profile_run`): a forward,
without a cache, of all the tokens that a step may have; the head on one row of each sequence; and a sampling by top-k
and top-p, which sorts the logits in float32 (`vllm/v1/sample/ops/topk_topp_sampler.py`).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memsize.errors import InputError
from memsize.records.trace import Trace
from memsize.torch_internals.pytree import tensors_in
from memsize.tracing.run import Run, Setup
from memsize.workloads import Inference, Proof, Workload

_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_PADDED = 64


@dataclass(frozen=True, slots=True)
class ProfileRun(Workload):
    """One step without a cache: the last tokens of `seqs` texts are sampled; `tp` cards share the vocabulary."""

    seqs: int
    tp: int = 1

    @property
    def proof(self) -> Proof:
        return Inference().proof

    def run(self, setup: Setup) -> Trace:
        body, head = text_model(setup.model, setup.name)
        tokens = _tokens(setup)
        run = Run(setup)
        with run.recording(), torch.no_grad(), setup.precision.autocast():
            hidden = body(tokens, use_cache=False).last_hidden_state
            last = hidden[: self.seqs, -1].contiguous()
            width = getattr(head, "weight", last).dtype
            logits = head(last.to(width) if width.is_floating_point else last)  # Mamba's residuals are in float32
            if self.tp > 1:
                logits = torch.cat([logits] * self.tp, dim=-1)
            run.result = _sampled(logits)
        return run.trace()


def text_model(model: nn.Module, name: str) -> tuple[Any, nn.Module]:
    """Return a language model without its head, and the head. Raises `InputError` where it has no such parts."""
    body = getattr(model, "base_model", None)
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    if body is None or body is model or not isinstance(outputs, nn.Module):
        raise InputError(f"{name} cannot be served: it takes a body and a head, as in transformers' language models")
    return body, outputs


def _tokens(setup: Setup) -> torch.Tensor:
    args, kwargs = setup.call
    return kwargs["input_ids"] if "input_ids" in kwargs else next(iter(tensors_in(args)))


def _sampled(logits: torch.Tensor) -> torch.Tensor:
    """Filter logits by a top-k of the whole vocabulary and a top-p."""
    logits = logits.float()
    ordered, places = logits.sort(dim=-1)
    ordered.masked_fill_(ordered < ordered[:, :1], -torch.inf)
    shares = ordered.softmax(dim=-1)
    torch.cumsum(shares, dim=-1, out=shares)
    ordered.masked_fill_(shares <= 0.01, -torch.inf)
    return logits.scatter_(dim=-1, index=places, src=ordered)


# -- one GPU's part ---------------------------------------------------------------------------------------------------


def divided(config: Any, tp: int, name: str) -> dict[str, object]:
    """Compute the config entries of one GPU's part, as vLLM divides a model.

    Heads, the width between the layers of an MLP and the vocabulary are divided; fewer key-value heads than GPUs are
    repeated (`vllm/model_executor/models/llama.py`). The vocabulary is first padded to a multiple of 64
    (`vllm/model_executor/layers/vocab_parallel_embedding.py`). Raises `InputError` where `tp` GPUs cannot share the
    model.
    """
    if config is None:
        raise InputError(f"{name} has no config: without it memsize cannot divide it among cards")
    entries = vars(config)
    missing = [entry for entry in ("num_attention_heads", "num_key_value_heads", "vocab_size") if entry not in entries]
    if missing or not hasattr(config, "head_dim"):
        entry = (missing or ["head_dim"])[0]
        raise InputError(f"{name} has no {entry} in its config: without it memsize cannot divide it among cards")
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    _whole(heads, tp, "attention heads", name)
    if groups % tp and tp % groups:
        raise InputError(f"{name} has {groups} heads of keys and values: {tp} cards can neither divide nor repeat them")
    part: dict[str, object] = {
        "head_dim": config.head_dim or config.hidden_size // heads,
        "num_attention_heads": heads // tp,
        "num_key_value_heads": max(groups // tp, 1),
        "vocab_size": _whole(-(-config.vocab_size // _PADDED) * _PADDED, tp, "padded tokens in its vocabulary", name),
        "pad_token_id": None,  # it may be in another card's part
    }
    widths = {entry: entries[entry] for entry in _WIDTHS if entries.get(entry)}
    return part | {entry: _whole(width, tp, f"as its {entry}", name) for entry, width in widths.items()}


def part_of(model: Any, tp: int, name: str) -> nn.Module:
    """Build, on meta, the part of a model of transformers that one of `tp` GPUs stores. Raises as `divided` does."""
    config = copy.deepcopy(getattr(model, "config", None))
    for entry, value in divided(config, tp, name).items():
        setattr(config, entry, value)
    with torch.device("meta"):
        part: nn.Module = type(model)._from_config(config, dtype=model.dtype)
    part.generation_config = model.generation_config
    return part.eval()


def _whole(count: int, tp: int, what: str, name: str) -> int:
    if count % tp:
        raise InputError(f"{name} has {count:,} {what}: tp {tp} does not divide them")
    return count // tp
