"""flash_attn 2.8 beside its attention: rotary embeddings, norms with a residual, and cross-entropy, by Triton kernels.

Source: flash-attention 2.8.3, `flash_attn/layers/rotary.py`, `flash_attn/ops/triton/rotary.py`, `layer_norm.py` and
`cross_entropy.py`, `flash_attn/losses/cross_entropy.py`. Known limit: two norms of one sum (`weight1`), scales of rows
and losses of a vocabulary divided among processes are refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

_PROGRAMS: Final = 8
"""Rows of partial gradients of a norm's weight, for each multiprocessor."""


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *_: Any, inplace: bool = False, **options: Any) -> Tensor:
    """Rotate heads: the result is new memory, or `x` itself."""
    contiguous = cos.contiguous(), sin.contiguous()
    del contiguous
    return x if inplace else torch.empty_like(x)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, inplace: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.inplace = inplace
        return apply_rotary(x, cos, sin, inplace=inplace)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return apply_rotary(gradient, *ctx.saved_tensors, inplace=ctx.inplace), None, None, None


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False, *_: Any, **options: Any
) -> Tensor:
    """Rotate heads, differentiably."""
    return _Rotary.apply(x, cos, sin, inplace)  # type: ignore[no-untyped-call,no-any-return]


class _RotaryInPlace(torch.autograd.Function):
    """Rotates heads of packed queries, keys and values where they are, also their gradients."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, *tables: Tensor | None) -> Tensor:
        ctx.save_for_backward(*tables)
        return _rotated(packed, *tables)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _rotated(gradient, *ctx.saved_tensors), *(None for _ in ctx.saved_tensors)


def _rotated(packed: Tensor, *tables: Tensor | None) -> Tensor:
    for cos, sin in zip(tables[::2], tables[1::2], strict=True):
        if cos is not None and sin is not None:
            apply_rotary(packed, cos, sin, inplace=True)
    return packed


def apply_rotary_emb_qkv_(
    qkv: Tensor, cos: Tensor, sin: Tensor, cos_k: Tensor | None = None, sin_k: Tensor | None = None, *_: Any, **__: Any
) -> Tensor:
    """Rotate packed queries and keys in place."""
    return _RotaryInPlace.apply(qkv, cos, sin, cos_k, sin_k)  # type: ignore[no-untyped-call,no-any-return]


def apply_rotary_emb_kv_(kv: Tensor, cos: Tensor, sin: Tensor, *_: Any, **options: Any) -> Tensor:
    """Rotate packed keys in place."""
    return _RotaryInPlace.apply(kv, cos, sin)  # type: ignore[no-untyped-call,no-any-return]


class RotaryEmbedding(nn.Module):
    """Rotary embeddings with their tables, made for the longest sequence so far: one for each dtype that it gets."""

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.scale_base = dim, base, scale_base
        self.inv_freq = nn.Buffer(self._frequencies(device), persistent=False)
        self.scale = nn.Buffer(torch.empty(0 if scale_base is None else dim // 2, device=device), persistent=False)
        self._length = 0
        self._tables: list[Tensor] = []

    def _frequencies(self, device: Any) -> Tensor:
        return 1.0 / (self.base ** (torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim))

    def _update(self, length: int, like: Tensor) -> None:
        tables = self._tables
        if tables and length <= self._length and tables[0].dtype == like.dtype and tables[0].device == like.device:
            return
        self._length = length
        positions = torch.arange(length, device=like.device, dtype=torch.float32)
        frequencies = self.inv_freq if self.inv_freq.dtype == torch.float32 else self._frequencies(like.device)
        angles = torch.outer(positions, frequencies)
        if self.scale_base is None:
            self._tables = [function(angles).to(like.dtype) for function in (torch.cos, torch.sin)]
            return
        power = (torch.arange(length, dtype=torch.float32, device=self.scale.device) - length // 2) / self.scale_base
        scale = self.scale ** power[:, None]
        pairs = [(operation, function) for operation in (torch.mul, torch.div) for function in (torch.cos, torch.sin)]
        self._tables = [operation(function(angles), scale).to(like.dtype) for operation, function in pairs]

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """Rotate packed queries and keys, or queries and packed keys, in place."""
        if max_seqlen is not None or isinstance(seqlen_offset, int):
            self._update(max_seqlen or qkv.shape[1] + int(seqlen_offset), qkv)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, *self._tables)
        queries = apply_rotary_emb(qkv, self._tables[0], self._tables[1], inplace=True)
        return queries, apply_rotary_emb_kv_(kv, *self._tables[-2:])


class _Norm(torch.autograd.Function):
    """The norm of ``x + residual``, which is kept for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        dropout: float,
        sum_dtype: torch.dtype | None,
        dtypes: tuple[bool, torch.dtype | None],
    ) -> Any:
        is_rms, out_dtype = dtypes
        shape = x.shape
        rows = x.reshape(-1, shape[-1])
        out = torch.empty_like(rows, dtype=out_dtype or x.dtype)
        is_new = residual is not None or sum_dtype not in (None, x.dtype) or dropout > 0
        total = torch.empty_like(rows, dtype=sum_dtype or x.dtype) if is_new else rows
        mean = None if is_rms else rows.new_empty(len(rows), dtype=torch.float32)
        scale = rows.new_empty(len(rows), dtype=torch.float32)
        seeds = torch.randint(2**32, (len(rows),), device=x.device) if dropout > 0 else None
        ctx.save_for_backward(total, weight, bias, seeds, mean, scale)
        ctx.dtype, ctx.has_residual, ctx.drops = x.dtype, residual is not None, dropout > 0
        return out.reshape(shape), total.reshape(shape)

    @staticmethod
    def backward(ctx: Any, of_out: Tensor, of_total: Tensor) -> Any:
        total, weight, bias, *_ = ctx.saved_tensors
        of_x = torch.empty_like(total, dtype=ctx.dtype)
        apart = ctx.has_residual and (ctx.dtype != total.dtype or ctx.drops)
        of_residual = torch.empty_like(total) if apart else of_x
        programs = torch.cuda.get_device_properties(total.device).multi_processor_count * _PROGRAMS
        parts = [total.new_empty((programs, len(p)), dtype=torch.float32) for p in (weight, bias) if p is not None]
        of_weight = parts[0].sum(0).to(weight.dtype)
        of_bias = None if bias is None else parts[1].sum(0).to(bias.dtype)
        shape = of_out.shape
        return of_x.view(shape), of_weight, of_bias, of_residual.view(shape) if ctx.has_residual else None, *3 * (None,)


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: None = None,
    weight1: None = None,
    bias1: None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """The norm of ``dropout(x) + residual``, with the sum where `prenorm`."""
    if any(option is not None for option in (x1, weight1, bias1, rowscale)) or (return_dropout_mask and dropout_p):
        raise NotImplementedError("memsize simulates flash_attn's norms without a second norm, rowscale and masks")
    sum_dtype = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else None
    passed = x, weight, bias, residual, dropout_p, sum_dtype, (is_rms_norm, out_dtype)
    out, total = _Norm.apply(*passed)  # type: ignore[no-untyped-call]
    masks = (None, None) if return_dropout_mask else ()
    results = (out, *((total,) if prenorm else ()), *masks)
    return results if len(results) > 1 else out


def rms_norm_fn(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **options: Any) -> Any:
    """The same without the mean."""
    return partial(layer_norm_fn, is_rms_norm=True)(x, weight, bias, *args, **options)


class RMSNorm(nn.Module):
    """A layer of `rms_norm_fn`."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, dropout_p: float = 0.0, **options: Any) -> None:
        super().__init__()
        factory = {name: options[name] for name in ("device", "dtype") if name in options}
        self.eps, self.dropout = eps, dropout_p
        self.weight = nn.Parameter(torch.ones(hidden_size, **factory))
        self.register_parameter("bias", None)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Any:
        options: dict[str, Any] = {"prenorm": prenorm, "residual_in_fp32": residual_in_fp32}
        dropout = self.dropout if self.training else 0.0
        return rms_norm_fn(x, self.weight, None, residual, eps=self.eps, dropout_p=dropout, **options)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, inplace: bool) -> Any:
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        losses, sums, squares = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(3))
        ctx.save_for_backward(logits, sums, labels)
        ctx.mark_non_differentiable(squares)
        ctx.inplace = inplace
        return losses, squares

    @staticmethod
    def backward(ctx: Any, of_losses: Tensor, _: Any) -> Any:
        logits = ctx.saved_tensors[0]
        return logits if ctx.inplace else torch.empty_like(logits), None, None


def cross_entropy_loss(
    logits: Tensor, labels: Tensor, *_: Any, inplace_backward: bool = False, process_group: Any = None, **options: Any
) -> Any:
    """The loss of each row of `logits`, and the part of it that keeps sums small."""
    if process_group is not None:
        raise NotImplementedError("memsize simulates flash_attn's cross-entropy without a process group")
    return _CrossEntropy.apply(logits, labels, inplace_backward)  # type: ignore[no-untyped-call]


class CrossEntropyLoss(nn.Module):
    """A layer of `cross_entropy_loss`; other options change no memory."""

    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", *_: Any, return_z_loss: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.ignore_index, self.reduction = ignore_index, reduction
        self.returns_both, self.options = return_z_loss, options

    def forward(self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None) -> Any:
        both = cross_entropy_loss(input, target, **self.options)
        if self.reduction == "mean":
            both = tuple(loss.sum() / (target != self.ignore_index).sum() for loss in both)
        elif self.reduction == "sum":
            both = tuple(loss.sum() for loss in both)
        return both if self.returns_both else both[0]


MODULES: Final[dict[str, dict[str, Any]]] = {
    "flash_attn.layers": {},
    "flash_attn.layers.rotary": {
        "RotaryEmbedding": RotaryEmbedding,
        "apply_rotary_emb": apply_rotary_emb,
        "apply_rotary_emb_func": apply_rotary_emb,
        "apply_rotary_emb_kv_": apply_rotary_emb_kv_,
        "apply_rotary_emb_qkv_": apply_rotary_emb_qkv_,
    },
    "flash_attn.ops": {},
    "flash_attn.ops.triton": {},
    "flash_attn.ops.triton.rotary": {"apply_rotary": apply_rotary},
    "flash_attn.ops.triton.layer_norm": {
        "RMSNorm": RMSNorm,
        "layer_norm_fn": layer_norm_fn,
        "rms_norm_fn": rms_norm_fn,
    },
    "flash_attn.ops.triton.cross_entropy": {"cross_entropy_loss": cross_entropy_loss},
    "flash_attn.losses": {},
    "flash_attn.losses.cross_entropy": {"CrossEntropyLoss": CrossEntropyLoss},
}
