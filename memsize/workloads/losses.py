"""The loss that a training step minimises: the user's, the model's own, or the one that its output suggests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import torch
from torch.nn import functional

from memsize.errors import InputError
from memsize.known_values.values import set_constant
from memsize.torch_internals.pytree import tensors_in
from memsize.tracing.ledger import Ledger

Loss = Callable[[Any], torch.Tensor]


class Losses:
    """Computes the loss of a step. Targets are made once, as inputs; `name` then tells which loss was used."""

    def __init__(self, wanted: str | Loss | None, ledger: Ledger) -> None:
        self.wanted = wanted
        self.ledger = ledger
        self.name = ""
        self.targets: dict[tuple[Any, ...], torch.Tensor] = {}

    def __call__(self, output: Any) -> torch.Tensor:
        if callable(self.wanted):
            self.name = getattr(self.wanted, "__name__", "the given function")
            return self.wanted(output)
        self.name = self.wanted or _suggested(output)
        return _KINDS[self.name][0](self, output)

    @property
    def note(self) -> str:
        """A note about the loss that was used."""
        return f"the loss is {_KINDS[self.name][1] if self.name in _KINDS else self.name}"

    def own(self, output: Any) -> torch.Tensor:
        """The loss that the model itself returned: its output's entry of that name, else its only or first number."""
        loss = _named(output, "loss")
        if loss is not None:
            return loss if loss.dim() == 0 else loss.mean()
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, torch.Tensor) and first.dim() == 0 and first.requires_grad:
            return first
        raise InputError("the model returns no loss of its own: choose another with --loss")

    def cross_entropy(self, output: Any) -> torch.Tensor:
        """Cross-entropy of the logits: classes last in 2 and 3 dimensions, second in 4 and more (segmentation)."""
        named = _named(output, "logits")
        logits = _floating(output)[0] if named is None else named
        if logits.dim() == 3:
            logits = logits.flatten(0, 1)
        shape = (logits.shape[0], *logits.shape[2:])
        return functional.cross_entropy(logits, self._target(shape, torch.int64, logits.device))

    def with_target(self, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The first floating output, and a target like it."""
        first = _floating(output)[0]
        return first, self._target(tuple(first.shape), first.dtype, first.device)

    def _target(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        key = (shape, dtype)
        if key not in self.targets:
            with torch.no_grad():
                target = torch.empty(shape, dtype=dtype, device=device)
            if dtype is torch.int64 and target.is_meta:
                set_constant(target, torch.zeros((), dtype=dtype).expand(shape))
            elif not target.is_meta:
                target.zero_()
            self.ledger.mark(target, "input")
            self.targets[key] = target
        return self.targets[key]


def _total(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    return reduce(lambda total, term: total + term.to(total.dtype), terms)


_KINDS: dict[str, tuple[Callable[[Losses, Any], torch.Tensor], str]] = {
    "own": (Losses.own, "the model's own"),
    "cross_entropy": (Losses.cross_entropy, "cross-entropy of the output"),
    "mse": (
        lambda losses, output: functional.mse_loss(*losses.with_target(output)),
        "the mean squared error of the output",
    ),
    "bce": (
        lambda losses, output: functional.binary_cross_entropy_with_logits(*losses.with_target(output)),
        "the binary cross-entropy of the output",
    ),
    "mean": (
        lambda _, output: _total(tensor.mean() for tensor in _floating(output)),
        "the mean of the floating outputs",
    ),
    "sum": (lambda _, output: _total(tensor.sum() for tensor in _floating(output)), "the sum of the floating outputs"),
}
"""How each loss is computed, and what notes call it."""


def _suggested(output: Any) -> str:
    if _named(output, "loss") is not None:
        return "own"
    if _named(output, "logits") is not None:
        return "cross_entropy"
    tensors = _floating(output)
    is_logits = len(tensors) == 1 and tensors[0].dim() in (2, 3) and tensors[0].shape[-1] > 1
    return "cross_entropy" if is_logits else "mean"


def _named(output: Any, name: str) -> torch.Tensor | None:
    value = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
    return value if isinstance(value, torch.Tensor) else None


def _floating(output: Any) -> list[torch.Tensor]:
    tensors = [t for t in dict.fromkeys(tensors_in(output)) if t.is_floating_point() and t.requires_grad]
    if not tensors:
        raise InputError("no output of the model requires a gradient: there is nothing to train")
    return tensors
