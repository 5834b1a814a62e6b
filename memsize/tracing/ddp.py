"""The buckets of `DistributedDataParallel`, in which a process sends gradients to the others.

They exist from the first step on. Parameters fill them in reverse order, and a bucket is closed once it has reached its
limit; the first one's is smaller, so that communication starts early. Without ``gradient_as_bucket_view`` each gradient
is stored twice, in ``.grad`` and in its bucket; with it, gradients are views of the buckets and are never freed.
Source: `torch.nn.parallel.DistributedDataParallel` and ``compute_bucket_assignment_by_size`` of its reducer.

Known limits: parameters that DDP is configured to ignore are still counted in the buckets; NCCL's own buffers lie
outside PyTorch's allocator; communication hooks are not run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from memsize.tracing.ledger import Ledger

_FIRST_LIMIT = 2**20
_LIMIT = 25 * 2**20


@dataclass(frozen=True, slots=True)
class Buckets:
    """The buckets of `DistributedDataParallel`: their limit in bytes, and whether gradients are views of them."""

    limit: int = _LIMIT
    views: bool = False

    def sizes(self, parameters: Iterable[torch.Tensor]) -> list[tuple[torch.dtype, int]]:
        """The dtype and elements of each bucket."""
        closed: list[tuple[torch.dtype, int]] = []
        filling: dict[torch.dtype, int] = {}
        first: set[torch.dtype] = set()
        for parameter in reversed(list(parameters)):
            dtype = parameter.dtype
            filling[dtype] = filling.get(dtype, 0) + parameter.numel()
            if filling[dtype] * dtype.itemsize >= (self.limit if dtype in first else min(_FIRST_LIMIT, self.limit)):
                closed.append((dtype, filling.pop(dtype)))
                first.add(dtype)
        return [*closed, *filling.items()]

    def hold(self, parameters: list[torch.Tensor], ledger: Ledger) -> list[torch.Tensor]:
        """Allocate the buckets, which last for the whole training, as gradients; returns the tensors to keep alive."""
        if self.views:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
                ledger.mark(parameter.grad, "gradient")
            return []
        device = ledger.device
        buckets = [torch.empty(count, dtype=dtype, device=device) for dtype, count in self.sizes(parameters)]
        for bucket in buckets:
            ledger.mark(bucket, "gradient")
        return buckets


def buckets_of(model: nn.Module) -> Buckets | None:
    """The buckets of a model that `DistributedDataParallel` wraps, None for any other."""
    model = getattr(model, "_orig_mod", model)
    if type(model).__name__ != "DistributedDataParallel":
        return None
    limit = int(getattr(model, "bucket_bytes_cap", _LIMIT))
    return Buckets(limit, bool(getattr(model, "gradient_as_bucket_view", False)))


def bucket_bytes(model: nn.Module) -> tuple[int, bool] | None:
    """The bytes of the buckets of `model`, and whether gradients are views of them; None where it has no buckets."""
    buckets = buckets_of(model)
    if buckets is None:
        return None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return sum(dtype.itemsize * count for dtype, count in buckets.sizes(trained)), buckets.views
