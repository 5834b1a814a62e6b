"""ViT-L/16 of torchvision, fine-tuned to ten classes: the log of rasbt/pytorch-memory-optim.

Its scripts hold the outputs and the loss of the last batch; Fabric runs the model under autocast, or in bfloat16 with
outputs in float32. Five updates, since fragments add to the reserved memory of the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

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
    inputs = {"targets": torch.zeros(int(row.values["batch"]), dtype=torch.int64)}
    loop = partial(_loop, mixed=precision == "amp-fp16", accumulated=accumulated, sgd="optimizer" in row.values)
    return traced(row, model.to(dtype), loop, inputs, 5 * accumulated + 1)


class EarlierAdam(torch.optim.Optimizer):
    """Adam's foreach update as it was before July 2023: it made a second tensor for each parameter on the way.

    The log was measured with a build of June; pytorch/pytorch#104780 removed that tensor.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            first, second = (
                [self._state(parameter, name) for parameter in parameters] for name in ("exp_avg", "exp_avg_sq")
            )
            _update(parameters, first, second, group)

    def _state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter)
        buffer: torch.Tensor = state[name]
        return buffer


def _update(
    parameters: Sequence[torch.Tensor], first: list[torch.Tensor], second: list[torch.Tensor], group: dict[str, Any]
) -> None:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    momentum, decay = group["betas"]
    torch._foreach_mul_(first, momentum)
    torch._foreach_add_(first, gradients, alpha=1 - momentum)
    torch._foreach_mul_(second, decay)
    torch._foreach_addcmul_(second, gradients, gradients, 1 - decay)
    roots = torch._foreach_sqrt(second)
    torch._foreach_div_(roots, 1.0)
    divisors = torch._foreach_add(roots, group["eps"])
    torch._foreach_addcdiv_(list(parameters), first, divisors, -group["lr"])


def _loop(model: nn.Module, *, mixed: bool, accumulated: int, sgd: bool) -> Callable[..., None]:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-5) if sgd else EarlierAdam(model.parameters())
    scaler = torch.amp.GradScaler("cuda") if mixed else None
    tensors: dict[str, torch.Tensor] = {}
    done = 0

    dtype = next(model.parameters()).dtype

    def body(targets: torch.Tensor) -> None:
        nonlocal done
        # The loader's loop holds a batch until the next one is there.
        tensors["features"] = torch.empty(len(targets), 3, 224, 224, device="meta")
        with torch.autocast("cuda", torch.float16, enabled=mixed):
            output = model(tensors["features"].to(dtype))
        tensors["logits"] = output.float()
        del output
        tensors["loss"] = nn.functional.cross_entropy(tensors["logits"], targets) / accumulated
        if accumulated == 1:
            optimizer.zero_grad()
        (tensors["loss"] if scaler is None else scaler.scale(tensors["loss"])).backward()
        if done % accumulated == 0:
            optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
            if accumulated > 1:
                optimizer.zero_grad()
        done += 1

    return body
