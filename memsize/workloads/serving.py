"""The largest step of a server: its tokens through the model without a cache, the head on one row of each sequence.

That is what vLLM runs to find out how much is left for the cache (`GPUModelRunner.profile_run`): a forward of all the
tokens that a step may have, and a sampling by top-k and top-p, which sorts the logits in float32
(`vllm/v1/sample/ops/topk_topp_sampler.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memsize.errors import InputError
from memsize.records.trace import Trace
from memsize.torch_internals.pytree import tensors_in
from memsize.tracing.run import Run, Setup


@dataclass(frozen=True, slots=True)
class ProfileRun:
    """One step without a cache. The logits of the last token of the first `seqs` texts are sampled; `tp` cards have a
    part of the vocabulary each, and gather them.
    """

    seqs: int
    tp: int = 1

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
    """A language model without its head, and the head. Raises `InputError` where it has no such parts."""
    body = getattr(model, "base_model", None)
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    if body is None or body is model or not isinstance(outputs, nn.Module):
        raise InputError(f"{name} cannot be served: it takes a body and a head, as in transformers' language models")
    return body, outputs


def _tokens(setup: Setup) -> torch.Tensor:
    args, kwargs = setup.call
    return kwargs["input_ids"] if "input_ids" in kwargs else next(iter(tensors_in(args)))


def _sampled(logits: torch.Tensor) -> torch.Tensor:
    """What is left of logits by a top-k of all of them and a top-p."""
    logits = logits.float()
    ordered, places = logits.sort(dim=-1)
    ordered.masked_fill_(ordered < ordered[:, :1], -torch.inf)
    shares = ordered.softmax(dim=-1)
    torch.cumsum(shares, dim=-1, out=shares)
    ordered.masked_fill_(shares <= 0.01, -torch.inf)
    return logits.scatter_(dim=-1, index=places, src=ordered)
