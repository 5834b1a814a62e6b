"""Methods of tensors on CUDA whose Python binding first makes the tensor's device the current one.

That needs a driver, also for fakes. The operators that these methods call need none.

Source: torch/csrc/autograd/python_variable_indexing.cpp (`THPVariable_getitem`), tools/autograd/templates/
python_variable_methods.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from memsize.processes.patches import Patch, calling

_aten = torch.ops.aten


def without_driver() -> Iterator[Patch]:
    """The patches by which these methods work on fakes of CUDA tensors."""
    for name, operator in _METHODS.items():
        yield torch.Tensor, name, calling(_through(operator), getattr(torch.Tensor, name))


def _through(operator: Callable[..., Any]) -> Callable[..., Any]:
    def called(original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (operator if tensor.device.type == "cuda" else original)(tensor, *args, **kwargs)

    return called


def _indexed(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """``tensor[index]``: numbers, slices and None make views; tensors select."""
    parts = list(index) if isinstance(index, tuple) else [index]
    named = sum(part is not None and part is not Ellipsis for part in parts)
    if Ellipsis in [part for part in parts if not isinstance(part, torch.Tensor)]:
        position = next(i for i, part in enumerate(parts) if part is Ellipsis)
        parts[position : position + 1] = [slice(None)] * (tensor.dim() - named)
    dim, chosen = 0, list[torch.Tensor | None]()
    for part in parts:
        if isinstance(part, int) and not isinstance(part, bool):
            tensor = _aten.select.int(tensor, dim, part)
            continue
        if part is None:
            tensor = _aten.unsqueeze(tensor, dim)
        elif isinstance(part, slice):
            tensor = _aten.slice.Tensor(tensor, dim, part.start, part.stop, part.step or 1)
        chosen.append(part if isinstance(part, torch.Tensor) else None)
        dim += 1
    return _aten.index.Tensor(tensor, chosen) if any(part is not None for part in chosen) else tensor


_METHODS: Final[dict[str, Callable[..., Any]]] = {
    "__getitem__": _indexed,
    "__invert__": _aten.bitwise_not,
    "contiguous": _aten.contiguous,
    "copy_": _aten.copy_,
    "nonzero": _aten.nonzero,
}
