"""What a model's forward asks for, in words."""

from __future__ import annotations

import inspect

from torch import nn


def wanted_inputs(model: nn.Module) -> str:
    """The arguments of the model's forward, and how to give them on the command line."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return "give one with --input SHAPE"
    taken = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in taken if p.default is p.empty]
    names = ", ".join(needed or [p.name for p in taken][:3]) or "nothing by name"
    how = (
        "give each with --input SHAPE or --input name=SHAPE:DTYPE, without the batch dimension (in Python: input_size)"
    )
    return f"its forward takes {names}; {how}"
