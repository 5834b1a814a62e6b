"""Optimizers on a twin, as CUDA would have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from memsize.errors import InputError
from memsize.tracing.ledger import Ledger
from memsize.tracing.nest import tensors_in
from memsize.training import parse_optimizer

_SUPPORTED = ("_get_foreach_kernels_supported_devices", "_get_fused_kernels_supported_devices")


def make_optimizer(kind: str | Callable[[Any], Any], parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimizer that `kind` names (see `memsize.training.parse_optimizer`) or makes of the parameters.

    Raises `InputError` when its options do not suit it.
    """
    try:
        if callable(kind):
            made: torch.optim.Optimizer = kind(parameters)
            return made
        spec = parse_optimizer(kind)
        return getattr(torch.optim, spec.cls)(parameters, **spec.options)  # type: ignore[no-any-return]
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"the optimizer {kind!r} cannot be made: {error}") from error


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """While open, optimizers choose foreach and fused implementations for `meta` parameters as they do for CUDA's."""
    originals = {name: getattr(torch_optimizer, name) for name in _SUPPORTED if hasattr(torch_optimizer, name)}
    for name, original in originals.items():
        setattr(torch_optimizer, name, lambda original=original: [*original(), "meta"])
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch_optimizer, name, original)


@contextmanager
def steps_watched(ledger: Ledger) -> Iterator[None]:
    """While open, every optimizer's `step` is its own phase, and the state that it makes is marked."""
    phases: list[Any] = []

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        phases.append(ledger.clock.during("optimizer"))
        phases[-1].__enter__()

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        phases.pop().__exit__(None, None, None)
        for tensor in tensors_in(list(optimizer.state.values())):
            ledger.mark(tensor, "optimizer state")

    handles = (
        torch_optimizer.register_optimizer_step_pre_hook(before),
        torch_optimizer.register_optimizer_step_post_hook(after),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
