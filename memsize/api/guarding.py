"""`memsize.guard`: the predicted peak of a training loop against the memory that there is, before its first step."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from memsize.analysis.step import Guard
from memsize.api.models import trace
from memsize.errors import BudgetError
from memsize.units import parse_bytes

if TYPE_CHECKING:
    from torch import nn

OnExcess = Literal["warn", "raise", "ignore"]


def guard(
    model: nn.Module,
    optimizer: Any,
    batch: Any,
    *,
    budget: str | int | None = None,
    on_excess: OnExcess = "warn",
    scenario: str = "as-given",
    loss: str | Callable[[Any], Any] | None = None,
    accumulate: int = 1,
    gpu: str | None = None,
) -> Guard:
    """Predict the peak of a training loop before its first step, and warn or stop where the memory isn't there.

        guard = memsize.guard(model, optimizer, batch)
        ...                                 # your loop
        guard.predicted, guard.measured()   # under the names of torch.cuda.memory_stats

    `optimizer` is yours, as it will be used, or None for inference; `batch` is what the model's forward takes: a
    tensor, a tuple of positional inputs, or a mapping of keyword inputs. None of them is run, moved or changed, and
    random generators stay as they are. `budget` is what PyTorch may reserve, in bytes or as ``"16 GiB"``; None is what
    is free on the CUDA device plus what PyTorch holds of it, and without CUDA nothing is compared. `on_excess` warns
    with a `UserWarning` or raises `BudgetError`. `scenario`, `loss`, `accumulate` and `gpu` are those of `trace`; `gpu`
    is by default the one of this machine where there is CUDA.

    Raises `BudgetError`, and what `trace` raises.
    """
    kind = None if optimizer is None else remade(model, optimizer)
    step = trace(
        model,
        input_data=batch,
        scenario=scenario,
        optimizer=kind,
        loss=loss,
        accumulate=accumulate,
        gpu=gpu or _local(),
    )
    found = Guard(step, budget_of(budget))
    warn_or_stop(found, on_excess, stacklevel=3)
    return found


def warn_or_stop(found: Guard, on_excess: OnExcess, stacklevel: int = 2) -> None:
    """Say that a predicted peak exceeds its budget, as `on_excess` asks for it."""
    if found.fits is not False or on_excess == "ignore":
        return
    if on_excess == "raise":
        raise BudgetError(found.text())
    warnings.warn(found.text(), stacklevel=stacklevel)


def remade(model: nn.Module, optimizer: Any) -> Callable[[list[Any]], Any]:
    """What makes an optimizer like this one of another copy of the model's trained parameters."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:  # those of accelerate and Lightning
        optimizer = inner
    places = {id(p): place for place, p in enumerate(p for p in model.parameters() if p.requires_grad)}
    groups = [
        (
            [places[id(p)] for p in group["params"] if id(p) in places],
            {name: _plain(value) for name, value in group.items() if name != "params"},
        )
        for group in optimizer.param_groups
    ]
    known = inspect.signature(type(optimizer)).parameters
    defaults = {name: _plain(value) for name, value in optimizer.defaults.items() if name in known}

    def make(parameters: list[Any]) -> Any:
        copies = [
            {"params": [parameters[place] for place in chosen], **options} for chosen, options in groups if chosen
        ]
        return type(optimizer)(copies, **defaults)

    make.__name__ = type(optimizer).__name__
    return make


def _plain(value: Any) -> Any:
    """An option of an optimizer; a learning rate may be a tensor on the GPU."""
    return value.item() if hasattr(value, "item") else value


def _local() -> str | None:
    import torch

    return "local" if torch.cuda.is_available() else None


def budget_of(budget: str | int | None) -> int | None:
    """The bytes that PyTorch may reserve: those that are given, else what is free for it; None without CUDA."""
    if budget is not None:
        return parse_bytes(budget) if isinstance(budget, str) else budget
    import torch

    if not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved()
