"""PyTorch's fused paths of `nn.TransformerEncoderLayer` and `nn.MultiheadAttention`, used in evaluation on a GPU.

Both modules check the device of their tensors first; `cuda_semantics` answers as on CUDA. The fused operators have no
inner calls that a dispatch mode sees, so what they allocate is written out here, op by op. Attention whose weights are
not requested goes through the flash or memory-efficient kernel where one can run; otherwise the scores are
materialised.

Source: aten/src/ATen/native/transformers/transformer.cpp (the layer), cuda/attention.cu (the attention), attention.cpp
(the masked softmax). Limits: dense tensors only, and no copies that the masked softmax makes of its mask. The nested
tensors that `nn.TransformerEncoder` makes of a padded batch are not simulated.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from memsize.cuda.attention_backend import Attention, choose_backend
from memsize.kernels.semantics import current
from memsize.torch_internals.meta import Kernel, overload

_ALIGNED_HEAD = 8


def kernels() -> Mapping[str, Kernel]:
    """The kernels of the fused layer and of the fused attention."""
    return {"_transformer_encoder_layer_fwd": encoder_layer, "_native_multi_head_attention": multi_head_attention}


def encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """One layer over `src` (batch, tokens, features), as `torch._transformer_encoder_layer_fwd` computes it."""
    if src.numel() == 0:
        return src.clone()

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, (embed_dim,), weight, bias, eps)

    x = norm(src, norm_weight_1, norm_bias_1) if norm_first else src
    projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
    x = multi_head_attention(x, x, x, embed_dim, num_heads, *projections, mask, False, True, mask_type)[0]
    x.add_(src)
    if not norm_first:
        x = norm(x, norm_weight_1, norm_bias_1)
    residual = x
    if norm_first:
        x = norm(x, norm_weight_2, norm_bias_2)
    x = _feed_forward(x, ffn_weight_1, ffn_bias_1, ffn_weight_2, ffn_bias_2, use_gelu)
    x.add_(residual)
    return x if norm_first else norm(x, norm_weight_2, norm_bias_2)


def _feed_forward(x: Tensor, first: Tensor, bias: Tensor, second: Tensor, last: Tensor, use_gelu: bool) -> Tensor:
    """The activation is fused into the first product."""
    flat = x.view(-1, x.shape[-1])
    inner: Tensor = overload("_addmm_activation")(bias, flat, first.t(), use_gelu=use_gelu)
    del flat
    return torch.addmm(last, inner, second.t()).view(*x.shape[:-1], -1)


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention over (batch, tokens, features) and, if they are needed, its weights, as
    `torch._native_multi_head_attention` computes it. The weights are averaged over the heads unless all are asked for.
    """
    if mask is None and not need_weights and query is key is value and _has_kernel(query, num_head):
        heads = functional.linear(query, qkv_weight, qkv_bias)
        queries, keys, values = (_split(part, num_head) for part in heads.chunk(3, -1))
        attended = functional.scaled_dot_product_attention(queries, keys, values)
        mixed = attended.transpose(1, 2).reshape(*query.shape[:2], embed_dim)
        return functional.linear(mixed, proj_weight, proj_bias), None
    # All scores are there. Query, key and value are one block, into whose first part the result goes.
    batch, tokens, _ = query.shape
    qkv = _projected(query, key, value, qkv_weight)
    q, k, v = (
        part.reshape(batch * num_head, tokens, -1)
        for part in overload("_transform_bias_rescale_qkv")(qkv, qkv_bias, num_head)
    )
    del qkv
    scores = torch.bmm(q, k.transpose(1, 2)).view(batch, num_head, tokens, tokens)
    if mask is None:
        overload("_softmax.out")(scores, -1, False, out=scores)
    else:
        scores = overload("_masked_softmax")(scores, mask.to(torch.bool), 3, mask_type)
    mixed = torch.bmm(scores.view(batch * num_head, tokens, tokens), v, out=q)
    weights: Tensor | None = scores if need_weights else None
    del scores
    projected = _merged(mixed.view(batch, num_head, tokens, -1), proj_weight, proj_bias)
    if weights is not None and average_attn_weights:
        weights = weights.sum(1)
        weights /= num_head
    return projected, weights


def _split(features: Tensor, heads: int) -> Tensor:
    """(batch, tokens, features) as (batch, heads, tokens, features per head)."""
    return features.view(*features.shape[:2], heads, -1).transpose(1, 2)


def _has_kernel(query: Tensor, heads: int) -> bool:
    semantics = current()
    if semantics is None or (query.shape[-1] // heads) % _ALIGNED_HEAD:
        return False
    part = _split(query, heads)
    call = Attention(part, part, part, capability=semantics.capability, cudnn=semantics.cudnn)
    return choose_backend(call) in ("flash", "efficient")


def _merged(mixed: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(batch, heads, tokens, features per head) as (batch, tokens, features), projected."""
    batch, heads, tokens, width = mixed.shape
    flat = mixed.transpose(1, 2).reshape(batch * tokens, heads * width)
    return functional.linear(flat, weight, bias).view(batch, tokens, -1)


def _projected(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """Query, key and value side by side: one product where they are the same, else one for each."""
    if query is key is value:
        return query @ weight.t()
    parts = weight.chunk(3)
    return torch.cat([x @ part.t() for x, part in zip((query, key, value), parts, strict=True)], 2)
