"""`memsize.guard`: the predicted peak of a training loop against the memory that there is, before its first step."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memsize.analysis.step import Guard
from memsize.api.keywords import takes
from memsize.api.models import trace
from memsize.errors import BudgetError, InputError, quoted
from memsize.spec.model_request import ModelRequest
from memsize.spec.requests import GuardRequest, OnExcess, TraceRequest
from memsize.units import parse_bytes

if TYPE_CHECKING:
    from torch import nn


@takes(GuardRequest)
def guard(request: GuardRequest) -> Guard:
    """Predict the peak of a training loop before its first step, and warn or stop where the memory isn't there.

        guard = memsize.guard(model, optimizer, batch)
        ...                                 # your loop
        guard.predicted, guard.measured()   # under the names of torch.cuda.memory_stats

    `optimizer` is yours, as it will be used, or None for inference; `batch` is what the model's forward takes: a
    tensor, a tuple of positional inputs, or a mapping of keyword inputs. None of them is run, moved or changed, and
    random generators stay as they are. `budget` is what PyTorch may reserve, in bytes or as ``"16 GiB"``; None is what
    is free on the CUDA device plus what PyTorch holds of it, and without CUDA nothing is compared. `on_excess` warns
    with a `UserWarning` or raises `BudgetError`. `scenario`, `loss`, `gradient_accumulation_steps` and `gpu` are those
    of `trace`; `gpu` is by default the one of this machine where there is CUDA.

    Raises `BudgetError`, and what `trace` raises.
    """
    import torch

    training = request.training
    step = trace(
        TraceRequest(
            model=ModelRequest.of(request.model, input_data=request.batch),
            scenario=request.scenario,
            training=training and replace(training, optimizer=remade(request.model, training.optimizer)),
            gpu=replace(request.gpu, name=request.gpu.name or ("local" if torch.cuda.is_available() else None)),
        )
    )
    prediction = Guard(step, budget_of(request.budget))
    warn_or_stop(prediction, request.on_excess, stacklevel=4)
    return prediction


def warn_or_stop(guard: Guard, on_excess: OnExcess, stacklevel: int = 2) -> None:
    """Say that a predicted peak exceeds its budget, as `on_excess` asks for it."""
    if guard.fits is not False or on_excess == "ignore":
        return
    if on_excess == "raise":
        raise BudgetError(guard.text())
    warnings.warn(guard.text(), stacklevel=stacklevel)


def remade(model: nn.Module, optimizer: Any) -> Callable[[list[Any]], Any]:
    """Return a function that makes an optimizer like this one for another copy of the model's trained parameters."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:  # those of accelerate and Lightning
        optimizer = inner
    if not hasattr(optimizer, "param_groups"):
        raise InputError(f"optimizer is {quoted(str(optimizer))}: give the one of your loop, or None")
    trained = (p for p in model.parameters() if p.requires_grad)
    numbers = {id(parameter): number for number, parameter in enumerate(trained)}
    groups = []
    for group in optimizer.param_groups:
        chosen = [numbers[id(p)] for p in group["params"] if id(p) in numbers]
        groups.append((chosen, {name: _plain(value) for name, value in group.items() if name != "params"}))
    arguments = inspect.signature(type(optimizer)).parameters
    defaults = {name: _plain(value) for name, value in optimizer.defaults.items() if name in arguments}

    def make(parameters: list[Any]) -> Any:
        groups_of_copy = ({"params": [parameters[n] for n in chosen]} | options for chosen, options in groups if chosen)
        return type(optimizer)([*groups_of_copy], **defaults)

    make.__name__ = type(optimizer).__name__
    return make


def _plain(value: Any) -> Any:
    """An option of an optimizer; a learning rate may be a tensor on the GPU."""
    return value.item() if hasattr(value, "item") else value


def budget_of(budget: str | int | None) -> int | None:
    """The bytes that PyTorch may reserve: those that are given, else what is free for it; None without CUDA."""
    if budget is not None:
        return parse_bytes(budget) if isinstance(budget, str) else budget
    import torch

    if not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved()
