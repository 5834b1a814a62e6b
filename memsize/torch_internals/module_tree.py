"""The modules of a model by path, listed in a loop: `nn.Module.named_modules` passes each through a generator per level."""

from __future__ import annotations

from torch import nn


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the pairs that ``model.named_modules()`` yields: each module once, by its first path."""
    pairs, met, waiting = [], set[nn.Module](), [("", model)]
    while waiting:
        path, module = pair = waiting.pop()
        if module in met:
            continue
        met.add(module)
        pairs.append(pair)
        prefix = f"{path}." if path else ""
        children = [(prefix + name, child) for name, child in module._modules.items() if child is not None]
        waiting += reversed(children)
    return pairs
