"""Single training steps on a T4, as torch-preflight's `measure_cuda.py` measured them: AdamW under autocast.

The script asks `torch.cuda.is_bf16_supported()`, which counts emulation: on a T4 it takes bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from benchmarks.published.recipes.run import traced
from benchmarks.published.rows import Row
from memsize.analysis.step import StepTrace
from memsize.loading.weightless import Weightless

_TEXTS: Final = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config"),
    "distilbert": ("DistilBertModel", "DistilBertConfig"),
    "bert-base": ("BertModel", "BertConfig"),
}


def predict(row: Row) -> StepTrace:
    """Two steps: the second is the measured one."""
    name, batch, size = row.values["model"], int(row.values["batch"]), int(row.values["size"])
    if name == "resnet50":
        import torchvision

        with Weightless():
            model = torchvision.models.resnet50(weights=None)
        inputs = {
            "inputs": torch.empty(batch, 3, size, size, device="meta"),
            "targets": torch.zeros(batch, dtype=torch.int64),
        }
        return traced(row, model, partial(_loop, loss=_classified, rate=1e-4), inputs, 2)
    import transformers

    cls, config = _TEXTS[name]
    with Weightless():
        model = getattr(transformers, cls)(getattr(transformers, config)())
    tokens = {"ids": torch.zeros(batch, size, dtype=torch.int64)}
    return traced(row, model, partial(_loop, loss=_modelled if name == "gpt2" else _encoded, rate=1e-5), tokens, 2)


def _loop(model: nn.Module, *, loss: Callable[..., torch.Tensor], rate: float) -> Callable[..., None]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def body(**inputs: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            # The script's function holds its outputs until it returns.
            outputs: list[Any] = []
            value = loss(model, outputs, **inputs)
        value.backward()
        optimizer.step()

    return body


def _classified(model: nn.Module, outputs: list[Any], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(inputs), targets)


def _modelled(model: nn.Module, outputs: list[Any], ids: torch.Tensor) -> torch.Tensor:
    outputs.append(model(input_ids=ids, labels=ids))
    return outputs[0].loss  # type: ignore[no-any-return]


def _encoded(model: nn.Module, outputs: list[Any], ids: torch.Tensor) -> torch.Tensor:
    outputs.append(model(input_ids=ids))
    return outputs[0].last_hidden_state.float().pow(2).mean()  # type: ignore[no-any-return]
