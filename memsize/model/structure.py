"""What PyTorch itself cannot walk through: models that contain themselves, and modules that cannot be hashed."""

from __future__ import annotations

from torch import nn

from memsize.errors import TargetError


def refuse_endless(model: nn.Module) -> None:
    """Raise `TargetError` where listing the modules of `model`, or calling its ``train()``, could not end well."""
    _visit(model, "", {}, set())


def _visit(module: nn.Module, path: str, above: dict[int, str], done: set[int]) -> None:
    if id(module) in above:
        outer = above[id(module)] or "the model itself"
        raise TargetError(f"{path} is {outer} again: train(), to() and half() of such a model never end")
    if id(module) in done:
        return
    if type(module).__hash__ is None:
        name = type(module).__name__
        raise TargetError(f"PyTorch cannot list modules of {name}, which cannot be hashed: give it a __hash__")
    done.add(id(module))
    above[id(module)] = path
    for name, child in module._modules.items():
        if child is not None:
            _visit(child, f"{path}.{name}" if path else name, above, done)
    del above[id(module)]
