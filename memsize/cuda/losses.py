"""What CUDA's kernels of reduced losses allocate: the loss of each element, which is then added up.

Source: aten/src/ATen/native/Loss.cpp (`mse_loss_out`, `smooth_l1_loss_out`, `huber_loss`), the same on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from memsize.cuda.registry import Temporary, temporaries_of

_aten = torch.ops.aten


@temporaries_of(_aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.huber_loss.default)
def terms(tensor: Tensor, target: Tensor, reduction: int = 1, *_: Any) -> Iterator[Temporary]:
    """One for each element, in the dtype of the inputs; unreduced, they are the result itself."""
    if reduction:
        yield Temporary(tuple(torch.broadcast_shapes(tensor.shape, target.shape)), tensor.dtype)
