"""Indexing and moving data on CUDA.

`one_hot` writes ones into zeros; on `meta` PyTorch compares instead, which makes a boolean tensor and a copy. Where the
number of classes has to come from the data, the op is left to PyTorch; a CPU would also check the smallest and the
largest class. `roll` and reflection padding make their argument contiguous first.

Source: aten/src/ATen/native/Onehot.cpp, cuda/TensorTransformations.cu (`roll_cuda`), cuda/ReflectionPad.cu.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from memsize.cuda.registry import copies_of, copy_unless_contiguous
from memsize.cuda.semantics import current
from memsize.torch_internals.dispatch_key import Kernel, key_excluded, overload

_aten = torch.ops.aten

copies_of(_aten.roll.default, _aten.reflection_pad2d.default)(copy_unless_contiguous)


def kernels() -> Mapping[str, Kernel]:
    """The kernel of `one_hot`."""
    return {"one_hot": _one_hot}


def _one_hot(index: Tensor, classes: int = -1) -> Tensor:
    semantics = current()
    with key_excluded:
        is_written = semantics is not None and semantics.stands_for_cuda(index) and index.dtype is torch.int64
        if not is_written or classes < 1:
            plain: Any = overload("one_hot")
            result: Tensor = plain(index, classes)
            return result
        if not index.numel():
            return index.new_empty((*index.shape, classes))
        zeros = torch.zeros((*index.shape, classes), dtype=index.dtype, device=index.device)
        return zeros.scatter_(-1, index.unsqueeze(-1), 1)
