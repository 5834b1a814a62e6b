"""The gradient of Mish on CUDA: one kernel, where PyTorch computes the formula step by step on `meta`.

It is the one activation with a kernel for CPU and CUDA alone (native_functions.yaml, `mish_backward`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from memsize.cuda.semantics import current
from memsize.torch_internals.dispatch_key import Kernel, key_excluded, overload
from memsize.torch_internals.meta import is_meta


def kernels() -> Mapping[str, Kernel]:
    """The kernel of `mish_backward`."""
    return {"mish_backward": _mish_backward}


def _mish_backward(grad: Tensor, tensor: Tensor) -> Tensor:
    semantics = current()
    is_stand_in = semantics is not None and semantics.meta and is_meta(tensor)
    with key_excluded:
        if is_stand_in and not torch.is_grad_enabled():  # else autograd wants the formula
            with torch._C._AutoDispatchBelowAutograd():
                return overload("mish_backward")(grad, tensor)  # type: ignore[no-any-return]
        return overload("mish_backward")(grad, tensor)  # type: ignore[no-any-return]
