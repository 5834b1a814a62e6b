"""Models and tensors that memsize refuses before anything touches them.

PyTorch cannot walk through a model that contains itself, or modules that cannot be hashed. A tensor may belong to a
tracer of PyTorch: a `FakeTensor` refers to its mode, and that to weak references that hold bare addresses. Copying
these frees an address twice, and the process crashes whenever that memory is used next.
"""

from __future__ import annotations

import torch
from torch import nn

from memsize.errors import MemsizeError, TargetError

_OUTSIDE = "call memsize outside of torch.func, make_fx and torch.compile"
_ADVICE = {
    "FakeTensor": "make it outside of FakeTensorMode (memsize allocates no weights either way)",
    "FunctionalTensor": _OUTSIDE,
}


def refuse_traced_model(model: nn.Module) -> None:
    """Raise `MemsizeError` where a parameter or buffer of `model` belongs to a tracer."""
    for path, module in model.named_modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    refuse_traced(tensor, f"{path}.{name}" if path else name)


def refuse_traced(tensor: torch.Tensor, name: str = "a tensor of the model or its input") -> None:
    """Raise `MemsizeError` for a tensor that belongs to a tracer: fake, functional, or wrapped by torch.func."""
    for kind in type(tensor).__mro__:
        if kind is torch.Tensor:
            break
        if kind.__name__ in _ADVICE and kind.__module__.startswith("torch."):
            raise MemsizeError(f"{name} is a {kind.__name__}: {_ADVICE[kind.__name__]}")
    if torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise MemsizeError(f"{name} belongs to a transformation of PyTorch's: {_OUTSIDE}")


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
