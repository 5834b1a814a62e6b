"""Attention's kernels: their results, the tensors that they save for backward, and their temporaries and workspaces.

Source: aten/src/ATen/native/transformers/cuda/attention.cu, attention_backward.cu, flash_attn/flash_api.cpp and
cudnn/MHA.cpp. Limit: of flash attention's first version, until PyTorch 2.1, only the forward is known.

Which kernel runs the backward of memory-efficient attention: mem_eff_attention/kernels/cutlassB.h (the order in which
they are tried), generate_kernels.py (which need more shared memory than some GPUs have), kernel_backward.h
(`workspace_size`) and attention_backward.cu (`num_splits_key`). Known limit: whether a kernel's shared memory suffices
follows from the generator's comments, not from its size.

FlexAttention is that of the kernels that torch.compile makes of it: nothing of the size of the scores is ever held. The
forward returns the output, in the query's order of dimensions, and for each row the log of its sum and its greatest
score in float32; the backward keeps query, key, value, output, sums and the block mask, and takes one float32 number a
row while it runs. A mask that `create_block_mask` makes is reduced to its blocks as it is computed where that is
compiled, and held otherwise.

Sources: torch/_higher_order_ops/flex_attention.py (``flex_attention_fake_impl``,
``flex_attention_backward_fake_tensor_mode``, the autocast), torch/_inductor/kernel/flex/flex_attention.py (``delta``).
Known limits: tensors that a score function reads are followed where its closure holds them, and their gradients are
counted whole; the split kernels of decoding, which take partial sums, are not told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch

from memsize.kernels.registry import Temporary, shape_rule, temporaries_of
from memsize.kernels.semantics import current, simulated_release
from memsize.kernels.strides import Shape, permuted
from memsize.kernels.tensors import Tensor, are_floating, are_plain, empty, like, strided
from memsize.spec import stack

_aten = torch.ops.aten
_CUDNN_DROPOUT = 8
"""Where cuDNN's backward has the probability, behind the output."""

_BY_LENGTH = (3, 1, 2, 0)
"""The dimensions of (batch, heads, length, head size), innermost first, when a position's heads lie side by side."""


def _fits(query: Any, key: Any, value: Any) -> bool:
    if not are_floating(query, key, value) or not query.dim() == key.dim() == value.dim() == 4:
        return False
    batch, width, keys = query.shape[0], query.shape[3], tuple(key.shape)
    return keys[0] == batch and keys[3] == width and keys[:3] == tuple(value.shape[:3])


def _by_length(shape: Shape, dtype: torch.dtype) -> Tensor:
    return strided(shape, permuted(shape, _BY_LENGTH), dtype)


@shape_rule("aten::_scaled_dot_product_flash_attention")
def _flash_returns(
    query: Any, key: Any, value: Any, _dropout: float = 0.0, _causal: bool = False, debug: bool = False, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    """Output like the query, or by length from packed sequences; the log of each row's sum in float32, and the state of
    the random numbers: two words of 8 bytes and an unused one (cuda/attention.cu, flash_api.cpp)."""
    if debug or torch.version.hip or not _fits(query, key, value) or value.shape[3] != query.shape[3]:
        return NotImplemented
    rows = query.shape[:3]
    states = empty((2,), torch.uint64), empty((), torch.uint64)
    sums = empty(rows, torch.float32)
    output = _by_length(query.shape, query.dtype) if _is_packed() else like(query)
    return output, sums, None, None, rows[2], key.shape[2], *states, empty((0,), query.dtype)


def _is_packed() -> bool:
    """Whether flash attention takes the sequences of a batch in one row: its first version did, until PyTorch 2.1."""
    release = simulated_release()
    return release is not None and release <= (2, 1)


@shape_rule("aten::_scaled_dot_product_flash_attention_backward", "aten::_scaled_dot_product_cudnn_attention_backward")
def _gradients_like_inputs(_grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    return (like(query), like(key), like(value)) if _fits(query, key, value) else NotImplemented


def efficient_rows(length: int) -> int:
    """The rows for which the memory-efficient kernel keeps a sum: whole blocks of 32 (`kAlignLSE`)."""
    return -(-length // 32) * 32


@shape_rule("aten::_scaled_dot_product_efficient_attention")
def _efficient_returns(
    query: Any, key: Any, value: Any, bias: Any, keep_sums: bool, dropout: float = 0.0, _causal: bool = False, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    """Output by length; sums in float32 where backward needs them. The seed and the offset of the random numbers are on
    the host, unless a CUDA graph is captured (cuda/attention.cu, "Seed and Offset Device"); `meta` says otherwise.
    Without dropout they are zeros, since 2.14 on the GPU: `_efficient_attention_forward` in libtorch_cuda.so of 2.14.1
    calls `at::zeros` twice with the query's options, 2.12's and 2.13's do not."""
    if torch.version.hip or not _fits(query, key, value) or not are_plain(bias):
        return NotImplemented
    batch, heads, length, _ = query.shape
    output = _by_length((batch, heads, length, value.shape[3]), query.dtype)
    sums = empty((batch, heads, efficient_rows(length) if keep_sums else 0), torch.float32)
    if _zeros_states() and not dropout:
        return output, sums, empty((), torch.int64), empty((), torch.int64)
    return output, sums, _on_host(), _on_host()


def _on_host() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device="cpu")


_ZEROED_SINCE: Final = (2, 14)


def _zeros_states() -> bool:
    simulated = simulated_release() or stack.release(torch.__version__)
    return simulated is not None and simulated >= _ZEROED_SINCE


@shape_rule("aten::_scaled_dot_product_efficient_attention_backward")
def _efficient_backward_returns(
    _grad: Any, query: Any, key: Any, value: Any, bias: Any, _out: Any, _sums: Any, _seed: Any, _offset: Any,
    _dropout: float, mask: Any, _causal: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    """Gradients by length. The rows of the bias's gradient are padded to a multiple of 16, and a slice is returned."""
    if not _fits(query, key, value) or not are_plain(bias):
        return NotImplemented
    gradients = (_by_length(t.shape, t.dtype) for t in (query, key, value))
    if bias is None or not mask[3]:
        return *gradients, None
    length = bias.shape[-1]
    return *gradients, empty((*bias.shape[:-1], -(-length // 16) * 16), bias.dtype)[..., :length]


@shape_rule("aten::_scaled_dot_product_cudnn_attention")
def _cudnn_returns(
    query: Any, key: Any, value: Any, bias: Any, _keep_sums: bool, _dropout: float = 0.0, _causal: bool = False,
    debug: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    """Output in the query's order of dimensions (cudnn/MHA.cpp); a seed and an offset of 8 bytes each."""
    if debug or not _fits(query, key, value) or not are_plain(bias):
        return NotImplemented
    rows, width = query.shape[:3], value.shape[3]
    if query.shape[3] == width:
        output = like(query)
    elif query.is_contiguous():
        output = empty((*rows, width), query.dtype)
    else:
        return NotImplemented
    states = empty((), torch.int64), empty((), torch.int64)
    return output, empty((*rows, 1), torch.float32), None, None, rows[2], key.shape[2], *states, None


# -- the operators of fused encoder layers ----------------------------------------------------------------------------


@shape_rule("aten::_transform_bias_rescale_qkv")
def _rescaled(qkv: Any, bias: Any, heads: int) -> Any:
    """Query, key and value by head, three parts of one block (cuda/attention.cu)."""
    if not are_plain(qkv, bias) or qkv.dim() != 3:
        return NotImplemented
    batch, tokens, width = qkv.shape
    return empty((3, batch, heads, tokens, width // 3 // heads), bias.dtype).unbind()


@shape_rule("aten::_masked_softmax")
def _masked_softmax(scores: Any, _mask: Any, _dim: int | None = None, _kind: int | None = None) -> Any:
    return like(scores) if are_plain(scores) else NotImplemented


# -- what the kernels take inside -------------------------------------------------------------------------------------


@temporaries_of(_aten._scaled_dot_product_flash_attention.default)
def _flash_forward_temporaries(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Iterator[Temporary]:
    """Copies of what does not lie as the packed kernel wants it: position by position, through all sequences."""
    for tensor in (query, key, value) if _is_packed() else ():
        batch, position = tensor.stride(0), tensor.stride(2)
        if tensor.shape[0] > 1 and batch != tensor.shape[2] * position:
            yield Temporary(tuple(tensor.shape), tensor.dtype)


@temporaries_of(_aten._scaled_dot_product_flash_attention_backward.default)
def _flash_backward_temporaries(grad: Any, query: Any, key: Any, *_: Any, **__: Any) -> Iterator[Temporary]:
    """The sum of each row's gradients, and the query's gradient in float32: whole blocks of 128 rows, a head of a
    multiple of 32. Where heads share keys, the gradients of keys and values for each head too.
    Source: transformers/cuda/flash_attn/flash_api.cpp `mha_bwd`.
    """
    batch, heads, length, head = query.shape
    rows, width = -(-length // 128) * 128, -(-head // 32) * 32 if head <= 192 else 256
    yield from _made_dense(grad)
    yield Temporary((batch, heads, rows))
    yield Temporary((batch, rows, heads, width))
    if key.shape[1] != heads:
        shape = (batch, key.shape[2], heads, head)
        yield from (Temporary(shape, query.dtype), Temporary(shape, query.dtype))


@temporaries_of(_aten._scaled_dot_product_efficient_attention_backward.default)
def _efficient_backward_temporaries(
    grad: Any, query: Any, key: Any, value: Any, _bias: Any, *more: Any, **_: Any
) -> Iterator[Temporary]:
    """The sum of each row's products of gradient and output, then the kernel's accumulators. Half precision computes
    the sums inside the kernel, float32 from the products, and then brings them into another order: these are gone when
    the accumulators are made.
    Source: transformers/cuda/attention_backward.cu, mem_eff_attention/kernel_backward.h `kKernelComputesDelta`.
    """
    batch, heads, length, head = query.shape
    is_half, width, dropout = query.dtype is not torch.float32, value.shape[3], more[4]
    semantics = current()
    size = accumulators(
        batch, heads, length, key.shape[2], head, width, half=is_half,
        capability=semantics.capability if semantics else (8, 0), dropout=bool(dropout),
    )  # fmt: skip
    yield from _made_dense(grad)
    yield Temporary((batch, heads, length))
    products = [] if is_half else [Temporary((batch, length, heads, width))]
    if products and heads > 1 and length > 1:
        products.append(Temporary((batch, length, heads)))
    yield from max(
        products, [Temporary((size,), torch.uint8)], key=lambda alive: sum(temporary.bytes for temporary in alive)
    )


@temporaries_of(_aten._scaled_dot_product_cudnn_attention.default)
def _cudnn_forward_temporaries(
    query: Any, key: Any, _value: Any, _bias: Any, _keep_sums: bool, dropout: float = 0.0, *_: Any, **__: Any
) -> Iterator[Temporary]:
    """cuDNN's workspace, which is that of its plan."""
    size = _plan_workspace(query, key, dropout)
    if size:
        yield Temporary((size,), torch.uint8)


@temporaries_of(_aten._scaled_dot_product_cudnn_attention_backward.default)
def _cudnn_backward_temporaries(
    grad: Any, query: Any, key: Any, _value: Any, out: Any, *more: Any, **__: Any
) -> Iterator[Temporary]:
    """cuDNN's workspace, in one piece: the sum of each row's gradients and the query's gradient, both in float32; where
    heads share keys, the gradients of keys and values for each head too; and that of the plan.
    Source: cuDNN's frontend, scaled_dot_product_flash_attention.h (`CompositeSDPABackwardNode`). PyTorch brings the
    output's gradient into the output's order first (cudnn/MHA.cpp).
    """
    batch, heads, length, head = query.shape
    if grad.stride() != out.stride():
        yield Temporary(tuple(grad.shape), grad.dtype)
    size = 4 * batch * heads * length * (head + 1) + _plan_workspace(query, key, more[_CUDNN_DROPOUT])
    if key.shape[1] != heads:
        size += 2 * query.element_size() * batch * heads * key.shape[2] * head
    yield Temporary((size,), torch.uint8)


def _plan_workspace(query: Any, key: Any, dropout: float) -> int:
    """The workspace in bytes, as cuDNN 9.24 answers for some hundred shapes: 256 B on Hopper. On Blackwell a bit
    for each score where there is dropout, in whole blocks of 128 rows and columns, and nothing without (lengths that
    are no multiple of 8 may take more). Elsewhere PyTorch does not prefer cuDNN, and nothing is known.
    """
    semantics = current()
    major = semantics.capability[0] if semantics else 0
    if major == 9:
        return 256
    if major < 10 or not dropout:
        return 0
    rows, columns = (-(-tensor.shape[2] // 128) * 128 for tensor in (query, key))
    return int(query.shape[0] * query.shape[1] * rows * columns // 8 + 128)


def _made_dense(grad: Any) -> Iterator[Temporary]:
    """A copy of the output's gradient, which kernels want by position and then by head."""
    if not grad.transpose(1, 2).is_contiguous():
        yield Temporary(tuple(grad.shape), grad.dtype)


# -- FlexAttention ----------------------------------------------------------------------------------------------------

UNCOMPILED_FLEX: Final = (
    "flex_attention is counted as the kernels that torch.compile makes of it: without torch.compile it holds the scores"
)

_LIBRARY: Final = torch.library.Library("memsize", "DEF")
_LIBRARY.define("flex_attention(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(
    "flex_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor sums) "
    "-> (Tensor, Tensor, Tensor)"
)
_FLEX: Final = torch.ops.memsize.flex_attention.default
_FLEX_BACKWARD: Final = torch.ops.memsize.flex_attention_backward.default


def flex_outputs(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, sums and greatest scores."""
    rows = tuple(query.shape[:3])
    return _ordered_like(query, (*rows, value.shape[3])), empty(rows, torch.float32), empty(rows, torch.float32)


def flex_gradients(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, for every sample also where samples share keys."""
    batch = query.shape[0]
    return tuple(_ordered_like(tensor, (batch, *tensor.shape[1:])) for tensor in (query, key, value))


_LIBRARY.impl("flex_attention", flex_outputs, "Meta")
_LIBRARY.impl("flex_attention_backward", flex_gradients, "Meta")


# The sum of each row.
temporaries_of(_FLEX_BACKWARD)(lambda grad, *_, **__: iter((Temporary(tuple(grad.shape[:3])),)))


def _ordered_like(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A dense tensor whose dimensions lie in memory in the order of those of `tensor`, the last one innermost."""
    last = len(shape) - 1
    order = sorted(range(last), key=lambda dim: (tensor.stride(dim), -dim))
    return strided(shape, permuted(shape, (last, *order)), tensor.dtype)


class _FlexAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: tuple[Tensor, ...], *read: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        output, sums, greatest = _FLEX(query, key, value)
        ctx.save_for_backward(query, key, value, output, sums, *mask, *read)
        ctx.read = len(read)
        ctx.mark_non_differentiable(greatest)
        return output, sums, greatest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums, *others = ctx.saved_tensors
        grads = list(_FLEX_BACKWARD(grad, query, key, value, output, sums))
        for position, tensor in ((1, key), (2, value)):
            if tensor.shape[0] != query.shape[0]:  # one key for all queries of the batch
                grads[position] = grads[position].sum(0, keepdim=True)
        read = others[len(others) - ctx.read :]
        return *grads, None, *(torch.empty_like(tensor) for tensor in read)


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Any], block_mask: tuple[Any, ...], *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, sums and greatest scores, as `torch.nn.attention.flex_attention`'s operator does on CUDA."""
    if torch.is_autocast_enabled("cuda"):
        lower = torch.get_autocast_dtype("cuda")
        query, key, value = (tensor.to(lower) for tensor in (query, key, value))
    cells = getattr(score_mod, "__closure__", None) or ()
    in_graph = others[2] if len(others) > 2 else ()  # what a traced score function reads
    values = [*(cell.cell_contents for cell in cells), *in_graph]
    read = [value for value in values if isinstance(value, torch.Tensor)]
    mask = tuple(tensor for tensor in block_mask if isinstance(tensor, torch.Tensor))
    result: tuple[Tensor, Tensor, Tensor] = _FlexAttention.apply(query, key, value, mask, *read)  # type: ignore[no-untyped-call]
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


ANY_HEAD = 65_536
"""The head size of kernels that take any."""
_LOCK = 4
"""Numbers in front of each block of the query's gradient: a lock, a counter and padding."""
_AT_ONCE = 200
"""Blocks of keys that are split off, in all heads of a batch, where their gradients need accumulators as well."""
_ENOUGH_HEADS = 256


class Kernel(NamedTuple):
    """Queries and keys of a block, the largest head size, and whether the gradients of a block's keys and values stay
    in registers."""

    queries: int
    keys: int
    head: int
    in_registers: bool


def kernel(head: int, *, half: bool, capability: tuple[int, int], dropout: bool) -> Kernel:
    """Return the kernel for heads of this size (the larger of key's and value's)."""
    for width in (32, 64):
        if head <= width:
            return Kernel(64, 64, width, half)
    width = 128 if head <= 128 else ANY_HEAD
    if half and head <= 96 and not dropout and capability in ((8, 6), (8, 9)):
        return Kernel(128, 64, 96, True)
    if not _has_wide_blocks(half, capability):
        return Kernel(64, 64, width, False)
    in_registers = half and width == 128
    return Kernel(128, 128 if in_registers and capability >= (8, 0) else 64, width, in_registers)


def _has_wide_blocks(half: bool, capability: tuple[int, int]) -> bool:
    """Whether there are kernels for blocks of 128 queries, and shared memory for them: not on Turing, and not on the
    GPUs of a generation that have 100 KB in each multiprocessor."""
    return capability in ((8, 0), (8, 7)) or capability[0] in (9, 10) or (half and capability == (7, 0))


def accumulators(
    batch: int, heads: int, queries: int, keys: int, head: int, value_head: int, *, half: bool,
    capability: tuple[int, int], dropout: bool,
) -> int:  # fmt: skip
    """Return the bytes of the kernel's workspace."""
    block = kernel(max(head, value_head), half=half, capability=capability, dropout=dropout)
    numbers = 0
    if half or capability >= (7, 0):
        tiles = -(-queries // block.queries) * -(-head // block.keys)
        numbers = tiles * (block.queries * block.keys + _LOCK)
    if half and not block.in_registers:
        widths = sum(-(-width // block.queries) * block.queries for width in (head, value_head))
        numbers += _splits(batch * heads, keys, block) * block.keys * widths
    return 4 * batch * heads * numbers


def _splits(heads: int, keys: int, block: Kernel) -> int:
    """The parts of the keys that run side by side, each with its accumulators; `heads` are those of all samples."""
    if heads >= _ENOUGH_HEADS and keys <= 2 * block.keys:
        return 1
    return max(1, min(-(-keys // block.keys), _AT_ONCE // heads))
