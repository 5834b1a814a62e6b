"""Activation checkpointing that a program switches on and that recomputes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from memsize.processes.patches import LatePatches, wrapping
from memsize.tracing.module_calls import ModuleRecord

WRAPPERS: Final = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_SWITCHES: Final = ("gradient_checkpointing", "grad_checkpointing")
"""Attributes of modules by which transformers and diffusers, and timm and open_clip, switch it on."""


class CheckpointingCalls:
    """The calls of `apply_activation_checkpointing` that match no module; `line` says where the program is."""

    def __init__(self, line: Callable[[], str]) -> None:
        self.without_match: str | None = None
        """The line of the last one."""
        self._line = line

    def later(self) -> dict[str, LatePatches]:
        """Return the patch of the function, for when its module is imported."""
        return {WRAPPERS: lambda module: (wrapping(module, "apply_activation_checkpointing", self._applied),)}

    def _applied(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        before = sum(1 for _ in model.modules())
        result = original(model, *args, **kwargs)
        if sum(1 for _ in model.modules()) == before:
            self.without_match = self._line()
        return result


def switched_on(records: Iterable[ModuleRecord]) -> str | None:
    """The attribute of the first module that has checkpointing switched on, by its path."""
    for record in records:
        try:
            attributes = vars(record.module)
        except ReferenceError:
            continue
        for name in _SWITCHES:
            if attributes.get(name) is True:
                return f"{record.path}.{name}" if record.path else name
    return None
