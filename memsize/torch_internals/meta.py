"""Whether a tensor is a `meta` tensor, whatever it says: stand-ins for tensors on a virtual GPU deny it."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn import Parameter

_attribute: Any = vars(torch._C.TensorBase)["is_meta"]
_read: Final = _attribute.__get__
_replaced: Final = vars(torch.Tensor)
_PLAIN: Final = (torch.Tensor, Parameter)


def is_meta(tensor: torch.Tensor) -> bool:
    """Return the original ``tensor.is_meta``, also while that attribute is replaced.

    Modes and subclasses that watch PyTorch's functions would be asked first, and look the attribute up by its name.
    """
    if "is_meta" not in _replaced:
        return tensor.is_meta
    if type(tensor) in _PLAIN and not torch._C._len_torch_function_stack():
        return bool(_read(tensor))
    with torch._C.DisableTorchFunction():
        return bool(_read(tensor))
