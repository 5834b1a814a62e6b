"""ViT-L/16 of torchvision, fine-tuned to ten classes: the log of rasbt/pytorch-memory-optim.

Its scripts hold the outputs and the loss of the last batch; Fabric runs the model under autocast, or in bfloat16 with
outputs in float32. All updates of an epoch are played: in bfloat16 with 16 images, `reserved` grows until the 16th.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torchvision
from torch import nn

import memsize
from benchmarks.published.recipes.long_training import ORDERS, Addresses, LongTraining
from benchmarks.published.rows import Row

IMAGES: Final = 45_000
"""Of CIFAR-10, those that are not kept for validation."""
RECORDED: Final = (1, 2, 3)
"""Updates that are run; the last of them stands for those that follow."""


def predict(row: Row) -> tuple[int, int, int]:
    """What is reserved after an epoch, and the least and the most of it by each of `ORDERS`."""
    batch, accumulated = int(row.values["batch"]), int(row.values.get("accumulate", "1"))
    with memsize.virtual_gpu(row.source.gpu, stack=row.source.stack) as region:
        _record(row.values, batch, accumulated)
    last = IMAGES // batch // accumulated
    trainings = (LongTraining(region.trace, len(RECORDED), Addresses(*order)) for order in ORDERS)
    figures = [training.run(RECORDED, last, last + 1)[-1].reserved for training in trainings]
    return figures[0], min(figures), max(figures)


def _record(values: Mapping[str, str], batch: int, accumulated: int) -> None:
    """Run the first updates, each of which ends with an empty cache to tell it from the next. The first comes after one
    batch.
    """
    model = torchvision.models.vit_l_16(weights=None)
    model.heads.head = nn.Linear(1024, 10)
    model = model.to(torch.bfloat16 if values["precision"] == "bf16" else torch.float32).cuda()
    body = _loop(model, mixed=values["precision"] == "amp-fp16", accumulated=accumulated, sgd="optimizer" in values)
    torch.cuda.empty_cache()
    for done in range((len(RECORDED) - 1) * accumulated + 1):
        body(batch)
        if done % accumulated == 0:
            torch.cuda.empty_cache()
    torch.empty(1, device="cuda")


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


def _loop(model: nn.Module, *, mixed: bool, accumulated: int, sgd: bool) -> Callable[[int], None]:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-5) if sgd else EarlierAdam(model.parameters())
    scaler = torch.amp.GradScaler("cuda") if mixed else None
    tensors: dict[str, torch.Tensor] = {}
    done = 0

    dtype = next(model.parameters()).dtype

    def body(batch: int) -> None:
        nonlocal done
        # The loader's loop holds a batch until the next one is there.
        tensors["features"] = torch.empty(batch, 3, 224, 224, device="cuda")
        tensors["targets"] = torch.zeros(batch, dtype=torch.int64, device="cuda")
        with torch.autocast("cuda", torch.float16, enabled=mixed):
            output = model(tensors["features"].to(dtype))
        tensors["logits"] = output.float()
        del output
        tensors["loss"] = nn.functional.cross_entropy(tensors["logits"], tensors["targets"]) / accumulated
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
