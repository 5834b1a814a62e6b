"""FlexAttention as the kernels that torch.compile makes of it: nothing of the size of the scores is ever held.

The forward returns the output, in the query's order of dimensions, and for each row the log of its sum and its greatest
score in float32; the backward keeps query, key, value, output, sums and the block mask, and takes one float32 number a
row while it runs. Sources: torch/_higher_order_ops/flex_attention.py (``flex_attention_fake_impl``,
``flex_attention_backward_fake_tensor_mode``, the autocast), torch/_inductor/kernel/flex/flex_attention.py (``delta``).

A mask that `create_block_mask` makes is reduced to its blocks as it is computed where that is compiled, and held
otherwise.

Known limits: tensors that a score function reads are followed where its closure holds them, and their gradients are
counted whole; the split kernels of decoding, which take partial sums, are not told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from memsize.kernels.registry import Temporary, temporaries_of
from memsize.kernels.strides import permuted
from memsize.kernels.tensors import Tensor, empty, strided

UNCOMPILED: Final = (
    "flex_attention is counted as the kernels that torch.compile makes of it: without torch.compile it holds the scores"
)

_LIBRARY: Final = torch.library.Library("memsize", "DEF")
_LIBRARY.define("flex_attention(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(
    "flex_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor sums) "
    "-> (Tensor, Tensor, Tensor)"
)
_FORWARD: Final = torch.ops.memsize.flex_attention.default
_BACKWARD: Final = torch.ops.memsize.flex_attention_backward.default


def returned(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, sums and greatest scores."""
    rows = tuple(query.shape[:3])
    return _ordered_like(query, (*rows, value.shape[3])), empty(rows, torch.float32), empty(rows, torch.float32)


def gradients(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, for every sample also where samples share keys."""
    batch = query.shape[0]
    return tuple(_ordered_like(tensor, (batch, *tensor.shape[1:])) for tensor in (query, key, value))


_LIBRARY.impl("flex_attention", returned, "Meta")
_LIBRARY.impl("flex_attention_backward", gradients, "Meta")


@temporaries_of(_BACKWARD)
def _row_sums(grad: Any, *_: Any, **__: Any) -> Iterator[Temporary]:
    yield Temporary(tuple(grad.shape[:3]))


def _ordered_like(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A dense tensor whose dimensions lie in memory in the order of those of `tensor`, the last one innermost."""
    last = len(shape) - 1
    order = sorted(range(last), key=lambda dim: (tensor.stride(dim), -dim))
    return strided(shape, permuted(shape, (last, *order)), tensor.dtype)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: tuple[Tensor, ...], *read: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        output, sums, greatest = _FORWARD(query, key, value)
        ctx.save_for_backward(query, key, value, output, sums, *mask, *read)
        ctx.read = len(read)
        ctx.mark_non_differentiable(greatest)
        return output, sums, greatest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums, *others = ctx.saved_tensors
        grads = list(_BACKWARD(grad, query, key, value, output, sums))
        for position, tensor in ((1, key), (2, value)):
            if tensor.shape[0] != query.shape[0]:  # one key for all queries of the batch
                grads[position] = grads[position].sum(0, keepdim=True)
        read = others[len(others) - ctx.read :]
        return *grads, None, *(torch.empty_like(tensor) for tensor in read)


def fused(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Any], block_mask: tuple[Any, ...], *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, sums and greatest scores, as `torch.nn.attention.flex_attention`'s operator does on CUDA."""
    if torch.is_autocast_enabled("cuda"):
        lower = torch.get_autocast_dtype("cuda")
        query, key, value = (tensor.to(lower) for tensor in (query, key, value))
    cells = getattr(score_mod, "__closure__", None) or ()
    read = [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, torch.Tensor)]
    mask = tuple(tensor for tensor in block_mask if isinstance(tensor, torch.Tensor))
    result: tuple[Tensor, Tensor, Tensor] = _Fused.apply(query, key, value, mask, *read)  # type: ignore[no-untyped-call]
    return result


def compiled_mask(
    create: Callable[..., Any], unrecorded: Callable[[], AbstractContextManager[None]]
) -> Callable[..., Any]:
    """Return `create_block_mask` as torch.compile makes it: without memory beside its result."""

    def created(*args: Any, **options: Any) -> Any:
        with unrecorded():
            mask = create(*args, **options)
        for name, value in vars(mask).items():
            if isinstance(value, torch.Tensor):
                setattr(mask, name, value.clone())
        return mask

    return created
