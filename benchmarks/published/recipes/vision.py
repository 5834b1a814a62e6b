"""ViT-L/16 of torchvision, fine-tuned to ten classes: the log of rasbt/pytorch-memory-optim.

Its scripts hold the outputs and the loss of the last batch; Fabric runs the model under autocast, or in bfloat16 with
outputs in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torchvision
from torch import nn

from benchmarks.published.recipes.run import traced
from benchmarks.published.rows import Row
from memsize.analysis.step import StepTrace
from memsize.loading.weightless import Weightless


def predict(row: Row) -> StepTrace:
    """Steps of the row's precision, batch, accumulation and optimizer."""
    with Weightless():
        model = torchvision.models.vit_l_16(weights=None)
        model.heads.head = nn.Linear(1024, 10)
    precision, accumulated = row.values["precision"], int(row.values.get("accumulate", "1"))
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    batch = int(row.values["batch"])
    inputs = {
        "features": torch.empty(batch, 3, 224, 224, device="meta", dtype=dtype),
        "targets": torch.zeros(batch, dtype=torch.int64),
    }
    loop = partial(_loop, mixed=precision == "amp-fp16", accumulated=accumulated, sgd="optimizer" in row.values)
    return traced(row, model.to(dtype), loop, inputs, 2 * accumulated + 1)


def _loop(model: nn.Module, *, mixed: bool, accumulated: int, sgd: bool) -> Callable[..., None]:
    model.train()
    optimizer = (torch.optim.SGD if sgd else torch.optim.Adam)(model.parameters(), lr=5e-5)
    scaler = torch.amp.GradScaler("cuda") if mixed else None
    held: dict[str, torch.Tensor] = {}
    done = 0

    def body(features: torch.Tensor, targets: torch.Tensor) -> None:
        nonlocal done
        with torch.autocast("cuda", torch.float16, enabled=mixed):
            output = model(features)
        held["logits"] = output.float()
        del output
        held["loss"] = nn.functional.cross_entropy(held["logits"], targets) / accumulated
        if accumulated == 1:
            optimizer.zero_grad()
        (held["loss"] if scaler is None else scaler.scale(held["loss"])).backward()
        if done % accumulated == 0:
            optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
            if accumulated > 1:
                optimizer.zero_grad()
        done += 1

    return body
