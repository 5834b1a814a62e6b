"""Attention on CUDA: which kernel runs.

Flash, cuDNN and the memory-efficient kernel never materialise the scores; the mathematical path does. The choice is
PyTorch's: backends in its order of priority, each refused by the first rule that it breaks. Rules honour the user's
`torch.nn.attention.sdpa_kernel` regions and flags.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h (the rules),
aten/src/ATen/native/transformers/attention.cpp (padding, mask conversion). Limits: dense tensors only; grouped heads
reach the memory-efficient kernel on no version (newer ones may allow it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import copysign
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from memsize.cuda import autocast
from memsize.kernels.semantics import Semantics, current
from memsize.torch_internals.meta import Kernel, key_excluded, overload

Backend = Literal["flash", "efficient", "cudnn", "math"]
_HALVES = (torch.float16, torch.bfloat16)
_FLASH_HEAD = 256
_PREFERS_CUDNN = 91500
_MASK_ALIGNMENT = 8


class Attention(NamedTuple):
    """One call of attention, with the GPU that it would run on."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None
    grouped: bool = False
    capability: tuple[int, int] = (8, 0)
    cudnn: int = 91501

    @property
    def differentiates(self) -> bool:
        """Whether backward will need the softmax statistics."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


Rule = Callable[[Attention], bool]


def choose_backend(call: Attention) -> Backend:
    """The backend that CUDA would choose; raises RuntimeError when the user's flags leave none."""
    names: dict[int, Backend] = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
    order = tuple(names[index] for index in torch._C._get_sdp_priority_order() if index in names)
    is_default = order == ("flash", "efficient", "math", "cudnn")
    # Hopper and Blackwell put cuDNN first where it is new enough.
    if is_default and call.capability[0] in (9, 10) and call.cudnn > _PREFERS_CUDNN:
        order = ("cudnn", "flash", "efficient", "math")
    for backend in order:
        if can_run(backend, call):
            return backend
    raise RuntimeError("no attention kernel that is switched on can run this call: allow SDPBackend.MATH")


def can_run(backend: Backend, call: Attention) -> bool:
    return all(rule(call) for rule in _RULES[backend])


def _is_four_dimensional(call: Attention) -> bool:
    return call.query.dim() == call.key.dim() == call.value.dim() == 4


def _has_batch_and_heads(call: Attention) -> bool:
    """The same batch for all; the same heads, or with `enable_gqa` heads that key and value share evenly."""
    (query, heads), (key, shared), (value, other) = (t.shape[:2] for t in (call.query, call.key, call.value))
    return query == key == value and shared == other and (heads == shared or (call.grouped and heads % shared == 0))


def _has_tokens(call: Attention) -> bool:
    return call.query.shape[-2] > 0 and call.key.shape[-2] > 0


def _is_dense_in_heads(call: Attention) -> bool:
    """The last dimension of every tensor has stride 1, the mask's too."""
    is_dense = all(t.stride(-1) == 1 for t in (call.query, call.key, call.value))
    return is_dense and (call.mask is None or call.mask.stride(-1) == 1)


def _is_dense_or_single(call: Attention) -> bool:
    is_single = call.query.shape[-1] == 1 and (call.mask is None or call.mask.stride(-1) == 1)
    return is_single or _is_dense_in_heads(call)


def _has_dtype(call: Attention, dtypes: tuple[torch.dtype, ...]) -> bool:
    return call.query.dtype in dtypes and call.query.dtype == call.key.dtype == call.value.dtype


def _is_half(call: Attention) -> bool:
    return _has_dtype(call, _HALVES if call.capability >= (8, 0) else (torch.float16,))


def _has_flash_backward(call: Attention) -> bool:
    """Consumer GPUs lack the shared memory for the backward of heads above 192."""
    major, minor = call.capability
    is_small = (8, 6) <= (major, minor) <= (8, 9) or (12, 0) <= (major, minor) <= (12, 1)
    head = call.query.shape[-1]
    return not (is_small and call.differentiates) or head <= 192 or (call.dropout == 0 and head > 224)


def _has_efficient_head(call: Attention) -> bool:
    is_half = call.query.dtype in _HALVES
    has_tensor_cores = call.capability[0] >= 8 or (call.capability[0] == 7 and is_half)
    alignment = 4 if call.capability[0] >= 8 else 1
    if has_tensor_cores:  # 16 bytes
        alignment = max(alignment, 8 if is_half else 4)
    head, value = call.query.shape[-1], call.value.shape[-1]
    return head == call.key.shape[-1] and head > 0 and value > 0 and head % alignment == 0 == value % alignment


def _has_cudnn_shape(call: Attention) -> bool:
    query, key, value = call.query.shape, call.key.shape, call.value.shape
    heads = (query[-1], value[-1])
    is_small = max(heads) <= 128 or (heads == (192, 128) and call.capability[0] in (9, 10))
    return is_small and not any(head % 8 for head in heads) and key[-2] > 1 and not (call.dropout and query[-2] == 1)


def _has_cudnn_mask(call: Attention) -> bool:
    """A mask of two or four dimensions, each full or 1, without gradient."""
    if call.mask is None:
        return True
    full = (*call.query.shape[:3], call.key.shape[2])
    dims = call.mask.dim()
    fits = all(size in (1, want) for size, want in zip(call.mask.shape[::-1], full[::-1], strict=False))
    return dims in (2, 4) and fits and not call.mask.requires_grad


_RULES: dict[Backend, tuple[Rule, ...]] = {
    "flash": (
        lambda call: torch._C._get_flash_sdp_enabled(),
        lambda call: (8, 0) <= call.capability <= (12, 1),
        lambda call: call.mask is None,
        _is_four_dimensional,
        lambda call: call.query.shape[-1] == call.key.shape[-1] == call.value.shape[-1] <= _FLASH_HEAD,
        _has_flash_backward,
        lambda call: not call.causal or call.query.shape[-2] == call.key.shape[-2],
        _is_half,
        _has_batch_and_heads,
        _has_tokens,
        _is_dense_or_single,
    ),
    "efficient": (
        lambda call: torch._C._get_mem_efficient_sdp_enabled(),
        lambda call: (5, 0) <= call.capability <= (12, 1),
        _is_four_dimensional,
        _has_efficient_head,
        _has_tokens,
        _is_dense_in_heads,
        lambda call: call.query.shape[:2] == call.key.shape[:2] == call.value.shape[:2],
        lambda call: _is_half(call) or _has_dtype(call, (torch.float16, torch.float32)),
    ),
    "cudnn": (
        lambda call: torch._C._get_cudnn_sdp_enabled(),
        lambda call: (8, 0) <= call.capability <= (12, 1) and call.cudnn >= 90000,
        _is_four_dimensional,
        _is_half,
        _has_cudnn_mask,
        lambda call: call.dropout * 16 == int(call.dropout * 16) and not (call.dropout and 91100 < call.cudnn < 91400),
        _has_batch_and_heads,
        _has_tokens,
        _is_dense_or_single,
        _has_cudnn_shape,
    ),
    "math": (lambda call: torch._C._get_math_sdp_enabled(),),
}


def kernels() -> Mapping[str, Kernel]:
    """The kernel of `scaled_dot_product_attention`, which applies autocast's casts itself, then chooses a backend."""
    return {"scaled_dot_product_attention": _attention}


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    semantics = current()
    with key_excluded:
        tensors: list[Any] = [query, key, value, attn_mask]
        casting = autocast.active()
        if casting is not None:
            tensors = autocast.cast_arguments(tensors, autocast.region_dtype(), casting)
        if semantics is not None and _is_valid(tensors, is_causal, semantics):
            query, key, value, mask = tensors
            gpu = (semantics.capability, semantics.cudnn)
            call = Attention(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, *gpu)
            backend = choose_backend(call)
            # CUDA's own kernels have rules for meta tensors, but none for CPU tensors.
            if semantics.is_stand_in(query) or backend == "math":
                if mask is not None and mask.dtype is torch.bool:
                    least = -torch.inf
                    call = call._replace(
                        mask=torch.where(mask, 0.0, torch.full((), least, dtype=query.dtype, device=mask.device))
                    )
                return _RUNS[backend](call)
        plain = overload("scaled_dot_product_attention")
        result: Tensor = plain(*tensors, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return result


def _is_valid(tensors: list[Any], causal: bool, semantics: Semantics) -> bool:
    """Whether the backend of the call is decided here. PyTorch itself refuses, or handles, all other calls."""
    query, _, _, mask = tensors
    if any(t.is_nested or t.dim() < 2 or t.dtype is not query.dtype for t in tensors[:3]):
        return False
    if not all(semantics.stands_for_cuda(t) and t.device == query.device for t in tensors[:3]):
        return False
    is_known = mask is None or mask.dtype in (torch.bool, torch.float32, query.dtype)
    return is_known and (mask is None or not (causal or mask.is_nested))


def _flash(call: Attention) -> Tensor:
    """Heads are padded to a multiple of 8 before autograd sees them, so backward keeps the padded copies."""
    head = call.query.shape[-1]
    padded = [call.query, call.key, call.value]
    if head % 8:
        padded = [torch.nn.functional.pad(tensor, (0, -head % 8)) for tensor in padded]
    scale = head**-0.5 if call.scale is None else call.scale
    flash = overload("_scaled_dot_product_flash_attention")
    out: Tensor = flash(*padded, call.dropout, call.causal, False, scale=scale)[0]
    return out if out.shape[-1] == head else out[..., :head]


def _efficient(call: Attention) -> Tensor:
    efficient = overload("_scaled_dot_product_efficient_attention")
    bias = call.mask
    if bias is not None:
        # Copied into padded rows first unless every row begins on a multiple of 8.
        if bias.stride(-1) != 1 or any(stride % _MASK_ALIGNMENT for stride in bias.stride()[:-1]):
            last = bias.shape[-1]
            bias = torch.nn.functional.pad(bias, (0, _MASK_ALIGNMENT - last % _MASK_ALIGNMENT))[..., :last]
        bias = bias.expand((*call.query.shape[:3], call.key.shape[2]))
    tensors = (call.query, call.key, call.value)
    out: Tensor = efficient(*tensors, bias, call.differentiates, call.dropout, call.causal, scale=call.scale)[0]
    return out


def _cudnn(call: Attention) -> Tensor:
    attend = overload("_scaled_dot_product_cudnn_attention")
    tensors = (call.query, call.key, call.value, call.mask)
    out: Tensor = attend(*tensors, call.differentiates, call.dropout, call.causal, False, scale=call.scale)[0]
    return out


def _math(call: Attention) -> Tensor:
    """As attention.cpp `_scaled_dot_product_attention_math`, which adds a mask to a copy of the scores where a dispatch
    mode looks on. It returns the weights as well, in the dtype of the query: they are cast before the last product.
    """
    dtype, tensors = call.query.dtype, (call.query, call.key, call.value)
    if dtype in _HALVES and not torch._C._get_math_sdp_allow_fp16_bf16_reduction():
        tensors = tuple(tensor.float() for tensor in tensors)  # type: ignore[assignment]
    _, key, value = tensors
    scale = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
    factor = abs(scale) ** 0.5
    query, mask = tensors[0] * copysign(factor, scale), call.mask
    if call.causal:
        seen = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        mask = torch.where(seen, query.new_zeros(()), query.new_full((), -torch.inf))
    if call.grouped:
        key, value = (_repeated(tensor, query) for tensor in (key, value))
    scores = query @ (key.transpose(-2, -1) * factor)
    if mask is not None:
        scores.add_(mask)
    weights = overload("_safe_softmax")(scores, -1)
    del scores
    if call.dropout > 0:
        weights = overload("native_dropout")(weights, call.dropout, True)[0]
    returned = weights.to(dtype)
    out: Tensor = (weights @ value).to(dtype)
    del returned
    return out


def _repeated(tensor: Tensor, query: Tensor) -> Tensor:
    """The key or value of grouped heads, once for each head of the query."""
    times = query.shape[-3] // tensor.shape[-3]
    return tensor if times == 1 else tensor.repeat_interleave(times, -3)


_RUNS: dict[Backend, Callable[[Attention], Tensor]] = {
    "flash": _flash,
    "efficient": _efficient,
    "cudnn": _cudnn,
    "math": _math,
}
