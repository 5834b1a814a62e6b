"""What ops return, by a shape rule or by PyTorch's `meta` kernel: the oracle is a real run on the CPU, for a rule also
the `meta` kernel where the CPU has none."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch._ops import OpOverload

from memsize import shape_rule
from tests.conftest import Python
from tests.kernels import (
    SPARSE_RULES,
    SPARSE_TABLE,
    TABLE,
    MetaMemo,
    convolution,
    in_coordinates,
    kernel_copies,
    kernel_temporaries,
    rules,
    sparse_rule,
    strides,
    windows,
)
from tests.models import Ledger, MetaDispatchMode

Tensor = torch.Tensor
META = torch.device("meta")
RULES = rules()


def overload(name: str) -> OpOverload:
    packet, _, which = name.removeprefix("aten::").partition(".")
    found: OpOverload = getattr(getattr(torch.ops.aten, packet), which or "default")
    return found


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def last(*shape: int) -> Tensor:
    """A channels-last image or volume."""
    return torch.empty_strided(shape, strides.channels_last(shape), device=META)


def whole(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int64)


def truth(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.bool)


def on_cpu(value: Any) -> Any:
    """The same arguments with real tensors of zeros; the same memory layout, overlaps included."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
    if isinstance(value, (list, tuple)):
        return type(value)(map(on_cpu, value))
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    return torch.device("cpu") if value == META else value


def described(value: Any) -> Any:
    """Shape, dtype and strides (of dimensions that have any use for them) in the same structure."""
    if isinstance(value, Tensor):
        steps = [step for size, step in zip(value.shape, value.stride(), strict=True) if size > 1]
        return tuple(value.shape), value.dtype, tuple(steps) if value.numel() else None
    if isinstance(value, (list, tuple)):
        return [described(item) for item in value]
    return value


def answer(name: str, *args: Any, **kwargs: Any) -> Any:
    """By the op's rule, which has to know; where there is none, by PyTorch."""
    rule = RULES[overload(name)]
    result = MetaMemo().run(overload(name), args, kwargs) if rule is None else rule(*args, **kwargs)
    assert result is not NotImplemented, name
    return result


def in_place(name: str) -> bool:
    return overload(name)._overloadpacket.__name__.endswith("_")


# -- the table: arguments for every rule that isn't elementwise -------------------------------------------------------

IMAGE, LAST, VOLUME, ROWS = meta(2, 4, 8, 6), last(2, 4, 8, 6), meta(2, 4, 6, 8, 6), meta(3, 5, 8)
HALF = meta(2, 4, 8, 6, dtype=torch.float16)
LIST = [meta(3, 4), meta(5), meta()]
C4, C8 = meta(4), meta(8)
CONV = ([2, 1], [1, 0], [1, 2], False, [0, 0], 2)
POOL = ([3, 2], [2, 2], [1, 0], [1, 1], True)
AVERAGE = ([3, 2], [2, 2], [1, 0], True, True, None)

# Interpolations, and whether their corners are aligned.
INTERPOLATIONS: dict[str, tuple[bool, ...]] = {
    **{f"upsample_nearest{rank}d": () for rank in (1, 2, 3)},
    **{f"_upsample_nearest_exact{rank}d": () for rank in (1, 2, 3)},
    **{f"upsample_{kind}": (True,) for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")},
    **{f"_upsample_{kind}2d_aa": (False,) for kind in ("bilinear", "bicubic")},
}

# Compared with a real run.
REAL: dict[str, list[tuple[Any, ...]]] = {
    "mm": [(meta(3, 4), meta(4, 5)), (meta(4, 3).t(), meta(5, 4).t())],
    "bmm": [(meta(2, 3, 4), meta(2, 4, 5)), (meta(2, 4, 3).mT, meta(2, 4, 5))],
    "mv": [(meta(3, 4), C4)],
    "dot": [(C4, C4)],
    "vdot": [(C4, C4)],
    "addmm": [(start, meta(3, 4), meta(4, 5)) for start in (meta(5), meta(3, 5), meta())],
    "_addmm_activation": [(meta(5), meta(3, 4), meta(4, 5))],
    "baddbmm": [(meta(2, 3, 5), meta(2, 3, 4), meta(2, 4, 5)), (meta(5), meta(2, 3, 4), meta(2, 4, 5))],
    "addmv": [(meta(3), meta(3, 4), C4)],
    "addmm_": [(meta(3, 5), meta(3, 4), meta(4, 5))],
    "baddbmm_": [(meta(2, 3, 5), meta(2, 3, 4), meta(2, 4, 5))],
    "_trilinear": [(meta(2, 3), meta(4, 3, 5), meta(2, 5), [1, 3], [0], [1, 2], [2, 3])],
    "convolution": [
        (IMAGE, meta(6, 2, 3, 3), meta(6), *CONV),
        (IMAGE, meta(6, 4, 1, 1), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        (LAST, meta(6, 2, 3, 3), None, *CONV),
        (IMAGE, last(6, 2, 3, 3), None, *CONV),
        (IMAGE, meta(4, 3, 3, 2), meta(6), [2, 2], [1, 0], [1, 1], True, [1, 0], 2),
        (meta(2, 4, 9), meta(6, 4, 3), meta(6), [2], [1], [1], False, [0], 1),
        (meta(2, 9, 4).mT, meta(6, 4, 3), None, [2], [1], [1], False, [0], 1),
        (VOLUME, meta(2, 4, 3, 3, 3), None, [1, 2, 1], [1], [1], False, [0], 1),
    ],
    "convolution_backward": [
        (meta(2, 6, 4, 2), IMAGE, meta(6, 2, 3, 3), [6], *CONV, [True, True, True]),
        (meta(2, 6, 4, 2), IMAGE, meta(6, 2, 3, 3), None, *CONV, [False, True, False]),
    ],
    "native_layer_norm": [(ROWS, [8], C8, C8, 1e-5), (ROWS.transpose(0, 1), [8], None, None, 1e-5)],
    "native_layer_norm_backward": [
        (ROWS, ROWS, [8], meta(3, 5, 1), meta(3, 5, 1), C8, C8, [True, True, True]),
        (ROWS, ROWS, [8], meta(3, 5, 1), meta(3, 5, 1), None, None, [True, False, False]),
    ],
    "native_group_norm": [(IMAGE, C4, C4, 2, 4, 48, 2, 1e-5), (IMAGE, None, None, 2, 4, 48, 4, 1e-5)],
    "native_group_norm_backward": [
        (IMAGE, IMAGE, meta(2, 2), meta(2, 2), C4, 2, 4, 48, 2, [True, True, True]),
    ],
    "_native_batch_norm_legit.no_stats": [(IMAGE, C4, C4, True, 0.1, 1e-5), (LAST, None, None, True, 0.1, 1e-5)],
    "_native_batch_norm_legit": [(IMAGE, C4, C4, C4, C4, True, 0.1, 1e-5)],
    "native_batch_norm": [(x, C4, C4, C4, C4, True, 0.1, 1e-5) for x in (IMAGE, LAST, VOLUME, meta(5, 4))],
    "native_batch_norm_backward": [
        (x, x, C4, C4, C4, C4, C4, True, 1e-5, [True, mask, mask]) for x in (IMAGE, LAST) for mask in (True, False)
    ],
    "_weight_norm_interface": [(meta(3, 4, 5), meta(3, 1, 1))],
    "_weight_norm_interface_backward": [(meta(3, 4, 5), meta(3, 4, 5), meta(3, 1, 1), meta(3, 1, 1), 0)],
    "max_pool2d_with_indices": [(x, *POOL) for x in (IMAGE, LAST, meta(4, 8, 6))] + [(IMAGE, [2])],
    "max_pool3d_with_indices": [(VOLUME, [3], [2], [1]), (meta(4, 6, 8, 6), [2])],
    "avg_pool2d": [(x, *AVERAGE) for x in (IMAGE, LAST, meta(4, 8, 6))],
    "avg_pool3d": [(VOLUME, [3], [2], [1])],
    "max_pool2d_with_indices_backward": [(meta(2, 4, 5, 3), x, *POOL, whole(2, 4, 5, 3)) for x in (IMAGE, LAST)][:1],
    "max_pool3d_with_indices_backward": [
        (meta(2, 4, 3, 4, 3), VOLUME, [2], [2], [0], [1], False, whole(2, 4, 3, 4, 3)),
    ],
    "avg_pool2d_backward": [(meta(2, 4, 5, 3), IMAGE, *AVERAGE)],
    "avg_pool3d_backward": [(meta(2, 4, 3, 4, 3), VOLUME, [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None)],
    "_adaptive_avg_pool2d": [(x, [3, 2]) for x in (IMAGE, LAST, meta(4, 8, 6))],
    "_adaptive_avg_pool3d": [(VOLUME, [3, 2, 1])],
    "_adaptive_avg_pool2d_backward": [(meta(2, 4, 3, 2), IMAGE)],
    "_adaptive_avg_pool3d_backward": [(meta(2, 4, 3, 2, 1), VOLUME)],
    "adaptive_max_pool2d": [(x, [3, 2]) for x in (IMAGE, LAST, meta(4, 8, 6))],
    "adaptive_max_pool3d": [(VOLUME, [3, 2, 1])],
    "adaptive_max_pool2d_backward": [(meta(2, 4, 3, 2), IMAGE, whole(2, 4, 3, 2))],
    "adaptive_max_pool3d_backward": [(meta(2, 4, 3, 2, 1), VOLUME, whole(2, 4, 3, 2, 1))],
    "_softmax": [(x, -1, False) for x in (ROWS, LAST, meta())],
    "_log_softmax": [(x, 0, False) for x in (ROWS, LAST)],
    "_safe_softmax": [(ROWS, -1), (ROWS, -1, torch.float64)],
    "_softmax_backward_data": [(x, x, 1, torch.float32) for x in (ROWS, LAST)],
    "_log_softmax_backward_data": [(x, x, 1, torch.float32) for x in (ROWS, LAST)],
    "nll_loss_forward": [
        (meta(6, 4), whole(6), None, 1, -100), (meta(6, 4), whole(6), C4, 0, 0), (C4, whole(), None, 2, 0),
    ],
    "nll_loss_backward": [(meta(), meta(6, 4), whole(6), None, 1, -100, meta())],
    "nll_loss2d_forward": [(IMAGE, whole(2, 8, 6), None, reduction, -100) for reduction in (0, 1)],
    "nll_loss2d_backward": [(meta(), IMAGE, whole(2, 8, 6), None, 1, -100, meta())],
    "binary_cross_entropy": [(ROWS, ROWS, None, reduction) for reduction in (0, 1, 2)],
    "binary_cross_entropy_backward": [(meta(), ROWS, ROWS, None, 1)],
    "binary_cross_entropy_with_logits": [(ROWS, ROWS, None, None, reduction) for reduction in (0, 1, 2)],
    **{loss: [(ROWS, ROWS, r) for r in (0, 1, 2)] + [(ROWS, meta(5, 8), 0)] for loss in ("mse_loss", "smooth_l1_loss")},
    "huber_loss": [(ROWS, ROWS, reduction) for reduction in (0, 1, 2)],
    "mse_loss_backward": [(meta(), ROWS, ROWS, 1), (ROWS, ROWS, ROWS, 0), (meta(), LAST, LAST, 1)],
    "smooth_l1_loss_backward": [(meta(), x, x, 1, 1.0) for x in (ROWS, LAST)],
    "huber_loss_backward": [(meta(), x, x, 1, 1.0) for x in (ROWS, LAST)],
    **{
        name: [(x, dims, keep) for x in (ROWS, LAST) for dims in ([1], [0, -1], []) for keep in (False, True)]
        for name in ("sum.dim_IntList", "mean.dim", "amax", "amin")
    },
    "logsumexp": [(ROWS, [1]), (LAST, [0, -1], True)],
    **{name: [(ROWS,), (LAST,), (meta(),)] for name in ("sum", "prod", "mean", "max", "min", "any", "all")},
    "prod.dim_int": [(ROWS, 1), (truth(3, 4), 0, True)],
    **{
        f"{name}.correction": [(ROWS,), (ROWS, [1]), (LAST, [-1, 2])]
        for name in ("var", "std", "var_mean", "std_mean")
    },
    "linalg_vector_norm": [(ROWS,), (ROWS, 1, [0, 1], True), (LAST, 2, [1])],
    "norm.ScalarOpt_dim": [(ROWS, 2, [1], True)],
    "norm.Scalar": [(ROWS,)],
    "max.dim": [(ROWS, 1), (ROWS, -1, True)],
    "min.dim": [(ROWS, 1)],
    "argmax": [(ROWS,), (ROWS, 1), (ROWS, 0, True)],
    "argmin": [(ROWS, -1)],
    **{f"{name}.dim": [(truth(3, 4), 1), (ROWS, 0, True)] for name in ("any", "all")},
    **{f"{name}.dims": [(truth(3, 4), [0])] for name in ("any", "all")},
    "cumsum": [(ROWS, 1), (whole(3), 0), (LAST, 1), (truth(3), 0)],
    "cumprod": [(ROWS, 1)],
    "sort": [(ROWS,), (LAST, 1)],
    "topk": [(ROWS, 2), (ROWS, 3, 0)],
    "embedding": [(meta(9, 4), whole(2, 3)), (meta(9, 4), whole())],
    "embedding_dense_backward": [(meta(2, 3, 4), whole(2, 3), 9, -1, False)],
    "index_select": [(ROWS, 1, whole(7)), (ROWS, -1, whole())],
    "gather": [(ROWS, 1, whole(2, 9, 8))],
    "scatter.src": [(ROWS, 1, whole(2, 4, 8), ROWS), (LAST, 0, whole(1, 1, 1, 1), LAST)],
    "scatter.value": [(ROWS, 1, whole(2, 4, 8), 1.0)],
    "scatter_add": [(ROWS, 1, whole(2, 4, 8), ROWS)],
    "scatter_.src": [(ROWS, 1, whole(2, 4, 8), ROWS)],
    "scatter_.value": [(ROWS, 1, whole(2, 4, 8), 1.0)],
    "scatter_add_": [(ROWS, 1, whole(2, 4, 8), ROWS)],
    "index_add": [(ROWS, 1, whole(4), meta(3, 4, 8)), (LAST, -1, whole(2), meta(*LAST.shape[:-1], 2))],
    "index_add_": [(ROWS, 1, whole(4), meta(3, 4, 8)), (LAST, -1, whole(2), meta(*LAST.shape[:-1], 2))],
    "index_copy": [(ROWS, 1, whole(4), meta(3, 4, 8))],
    "index.Tensor": [
        (ROWS, [whole(7)]), (ROWS, [None, whole(2, 7)]), (ROWS, [whole(7), None, whole(2, 1)]),
        (ROWS, [None, whole(7), whole()]), (ROWS, [whole(), whole(2), whole(3, 1)]),
    ],
    "index_put": [
        (ROWS, [whole(7)], meta(7, 5, 8)), (ROWS, [whole(7)], meta()), (LAST, [None, whole(2)], meta(2, 2, 8, 6)),
    ],
    "_unsafe_index_put": [(ROWS, [whole(7)], meta(7, 5, 8))],
    "cat": [([ROWS, meta(3, 2, 8)], 1), ([IMAGE, LAST], -3), ([LAST, LAST], 1), ([meta(0), ROWS], 0)],
    "stack": [([ROWS, ROWS], 1), ([LAST, LAST], -1)],
    "constant_pad_nd": [
        (IMAGE, [1, 2]), (LAST, [1, 2, 0, 1]), (IMAGE, [-1, 2]), (IMAGE, [0, 0]), (IMAGE, [0, -1, -2, 0]),
        (LAST, [0, -1]),
    ],
    **{f"{kind}_pad1d": [(ROWS, [1, 2])] for kind in ("reflection", "replication")},
    **{f"{kind}_pad2d": [(IMAGE, [1, 2, 3, 4])] for kind in ("reflection", "replication")},
    **{f"{kind}_pad1d_backward": [(meta(3, 5, 11), ROWS, [1, 2])] for kind in ("reflection", "replication")},
    **{f"{kind}_pad2d_backward": [(meta(2, 4, 15, 9), IMAGE, [1, 2, 3, 4])] for kind in ("reflection", "replication")},
    "slice_backward": [(meta(3, 2, 8), [3, 5, 8], 1, 0, 2, 1)],
    "select_backward": [(meta(3, 8), [3, 5, 8], 1, 0)],
    "diagonal_backward": [(meta(4), [4, 4], 0, 0, 1)],
    "unfold_backward": [(meta(3, 2, 8, 2), [3, 5, 8], 1, 2, 2)],
    "new_zeros": [(ROWS, [2, 3]), (ROWS, [])],
    "new_ones": [(ROWS, [2, 3])],
    "new_empty": [(ROWS, [2, 3])],
    "new_full": [(ROWS, [2, 3], 1.0)],
    "repeat": [(ROWS, [2, 1, 3]), (ROWS, [2, 1, 1, 3])],
    "flip": [(ROWS, [1]), (LAST, [0, -1])],
    "roll": [(ROWS, [1], [1]), (ROWS, [2])],
    "bernoulli": [(ROWS,), (LAST,)],
    "_unsafe_view": [(ROWS, [-1]), (ROWS, [ROWS.numel()])],
    "tril": [(ROWS,), (LAST, 1)],
    "triu": [(ROWS,), (LAST, -1), (ROWS.transpose(1, 2), 1)],
    "glu": [(ROWS,), (IMAGE, 1)],
    "glu_backward": [(meta(3, 5, 4), ROWS, -1), (meta(2, 2, 8, 6), IMAGE, 1)],
    "_prelu_kernel": [(IMAGE, meta(1, 4, 1, 1))],
    "_prelu_kernel_backward": [(IMAGE, IMAGE, meta(1, 4, 1, 1))],
    "native_dropout": [(ROWS, 0.5, True), (LAST, 0.5, True), (ROWS, 0.5, False)],
    "native_dropout_backward": [(ROWS, truth(3, 5, 8), 2.0)],
    "where.self": [(truth(5, 1), ROWS, meta()), (truth(3, 5, 8), whole(8), ROWS)],
    "masked_fill.Scalar": [(ROWS, truth(5, 1), 0.0), (LAST, truth(1), 0.0)],
    "masked_fill.Tensor": [(ROWS, truth(5, 1), meta())],
    "masked_fill_.Scalar": [(ROWS, truth(5, 1), 0.0)],
    "masked_fill_.Tensor": [(ROWS, truth(5, 1), meta())],
    "clamp": [(ROWS, 0), (LAST, None, 1.0)],
    "clamp_": [(ROWS, 0, 1)],
    "elu_backward": [(ROWS, 1, 1, 1, False, ROWS)],
    "clone": [(ROWS,), (LAST,), (ROWS.transpose(0, 1),), (ROWS[:, ::2].transpose(0, 1),), (meta(1, 5).expand(3, 5),)],
    "im2col": [(IMAGE, [3, 2], [1, 2], [1, 0], [2, 1])],
    "col2im": [(meta(2, 24, 16), [8, 6], [3, 2], [1, 2], [1, 0], [2, 1])],
    "grid_sampler_2d": [(IMAGE, meta(2, 3, 5, 2), 0, 0, False)],
    "grid_sampler_2d_backward": [(meta(2, 4, 3, 5), IMAGE, meta(2, 3, 5, 2), 0, 0, False, [True, True])],
    "pixel_shuffle": [(IMAGE, 2)],
    "pixel_unshuffle": [(IMAGE, 2)],
    **{name: [(ROWS, [4], *flags)] for name, flags in INTERPOLATIONS.items() if name.endswith("1d")},
    **{name: [(IMAGE, [5, 7], *flags)] for name, flags in INTERPOLATIONS.items() if "2d" in name},
    **{name: [(VOLUME, [2, 3, 4], *flags)] for name, flags in INTERPOLATIONS.items() if name.endswith("3d")},
    **{
        f"{name}_backward": [(meta(3, 5, 4), [4], [3, 5, 8], *flags)]
        for name, flags in INTERPOLATIONS.items() if name.endswith("1d")
    },
    **{
        f"{name}_backward": [(meta(2, 4, 5, 7), [5, 7], [2, 4, 8, 6], *flags)]
        for name, flags in INTERPOLATIONS.items() if "2d" in name
    },
    **{
        f"{name}_backward": [(meta(2, 4, 2, 3, 4), [2, 3, 4], [2, 4, 6, 8, 6], *flags)]
        for name, flags in INTERPOLATIONS.items() if name.endswith("3d")
    },
    "rrelu_with_noise": [(ROWS, ROWS)],
    "rrelu_with_noise_backward": [(ROWS, ROWS, ROWS, 0.1, 0.3, True, False)],
    "log_sigmoid_backward": [(ROWS, ROWS, ROWS)],
    "_foreach_pow.ScalarAndTensor": [(2.0, LIST)],
    "_foreach_norm.Scalar": [(LIST,)],
    "_foreach_copy_": [(LIST, LIST)],
    "_foreach_zero_": [(LIST,)],
    "_transform_bias_rescale_qkv": [(meta(2, 5, 48), meta(48), 4)],
    "_masked_softmax": [(meta(2, 4, 5, 5), meta(5, 5).bool(), 3, 0)],
    "_amp_foreach_non_finite_check_and_unscale_": [(LIST, meta(), meta()), (LIST, meta(1), meta(1))],
}  # fmt: skip

QUERY, KEY = meta(2, 4, 40, 16), meta(2, 4, 24, 16)
BY_LENGTH = meta(2, 40, 4, 16).transpose(1, 2)
SEED = whole()

# Compared with the `meta` kernel: the CPU has no such kernel, or another one than CUDA.
# PyTorch 2.11 forgets the layout in the convolution's backward on `meta`, and only there.
_BACK = torch.ops.aten.convolution_backward(meta(2, 6, 4, 2), LAST, meta(6, 2, 3, 3), [6], *CONV, [True, False, False])[
    0
]
_FORMATTED = IMAGE if _BACK.is_contiguous() else LAST

_BF16 = torch.bfloat16
MODELLED: dict[str, list[tuple[Any, ...]]] = {
    "native_batch_norm": [(IMAGE, C4, C4, C4, C4, False, 0.1, 1e-5), (HALF, C4, C4, C4, C4, True, 0.1, 1e-5)],
    "native_layer_norm": [(HALF, [6], None, None, 1e-5)],
    "convolution_backward": [(meta(2, 6, 4, 2), _FORMATTED, meta(6, 2, 3, 3), [6], *CONV, [True, True, True])],
    "max_pool2d_with_indices_backward": [(meta(2, 4, 5, 3), LAST, *POOL, whole(2, 4, 5, 3))],
    "_grouped_mm": [
        (meta(48, 16, dtype=_BF16), meta(3, 16, 32, dtype=_BF16), whole(3).to(torch.int32)),
        (meta(3, 8, 16, dtype=_BF16), meta(3, 16, 24, dtype=_BF16)),
        (meta(16, 48, dtype=_BF16), meta(48, 32, dtype=_BF16), whole(3).to(torch.int32)),
    ],
    "_fused_rms_norm": [(ROWS, [8], C8, 1e-5), (HALF, [6], None, 1e-5)],
    "_fused_rms_norm_backward": [(ROWS, ROWS, [8], meta(3, 5, 1), C8, [True, True])],
    "cudnn_batch_norm": [(IMAGE, C4, C4, C4, C4, training, 0.1, 1e-5) for training in (True, False)],
    "cudnn_batch_norm_backward": [
        (IMAGE, IMAGE, C4, C4, C4, C4, C4, 1e-5, meta(0, dtype=torch.uint8)),
    ],
    "_scaled_dot_product_flash_attention": [(q, KEY, KEY, 0.1) for q in (QUERY, BY_LENGTH)],
    "_scaled_dot_product_flash_attention_backward": [
        (QUERY, QUERY, KEY, KEY, QUERY, meta(2, 4, 40), None, None, 40, 24, 0.0, False, SEED, SEED),
    ],
    "_scaled_dot_product_efficient_attention": [
        (QUERY, KEY, KEY, None, True), (BY_LENGTH, KEY, KEY, None, False), (QUERY, KEY, KEY, meta(2, 4, 40, 24), True),
    ],
    "_scaled_dot_product_efficient_attention_backward": [
        (QUERY, QUERY, KEY, KEY, bias, QUERY, meta(2, 4, 64), SEED, SEED, 0.0, [True, True, True, bias is not None])
        for bias in (None, meta(2, 4, 40, 24))
    ],
    "_scaled_dot_product_cudnn_attention": [(q, KEY, KEY, None, True) for q in (QUERY, BY_LENGTH)],
    "_scaled_dot_product_cudnn_attention_backward": [
        (QUERY, QUERY, KEY, KEY, QUERY, meta(2, 4, 40, 1), SEED, SEED, None, None, None, 40, 24, 0.0, False),
    ],
    # The CPU's own gelu is oneDNN's, which has layouts of its own.
    "gelu_backward": [(ROWS, ROWS), (LAST, LAST)],
}  # fmt: skip

# Answered by hand: PyTorch has these on CUDA alone. They do to a batch in parts what one batch norm does.
ALL, NONE = (True, True, True), (False, False, False)
ON_CUDA_ALONE: dict[str, list[tuple[tuple[Any, ...], Any]]] = {
    "batch_norm_stats": [((each, 1e-5), (C4, C4)) for each in (IMAGE, LAST, HALF)],
    "batch_norm_gather_stats_with_counts": [
        ((each, meta(3, 4), meta(3, 4), C4, C4, 0.1, 1e-5, meta(3)), (C4, C4))
        for each in (IMAGE, HALF, meta(0, 4, 8, 6))
    ],
    "batch_norm_elemt": [((each, C4, C4, C4, C4, 1e-5), each) for each in (IMAGE, LAST, HALF)],
    # Where channels lie innermost, in both the gradient and the input, the kernel does not look at what is asked for.
    "batch_norm_backward_reduce": [
        ((IMAGE, IMAGE, C4, C4, C4, *ALL), (C4, C4, C4, C4)),
        ((HALF, HALF, C4, C4, C4.half(), *ALL), (C4, C4, C4.half(), C4.half())),
        ((IMAGE, LAST, C4, C4, C4, *NONE), (None, None, None, None)),
        ((IMAGE, IMAGE, C4, C4, None, True, False, False), (C4, C4, None, None)),
        ((LAST, LAST, C4, C4, C4, *NONE), (C4, C4, C4, C4)),
        ((LAST, LAST, C4, C4, None, True, False, False), (C4, C4, meta(0), meta(0))),
    ],
    "batch_norm_backward_elemt": [
        ((grad, each, C4, C4, C4, C4, C4, whole(3).to(torch.int32)), made)
        for grad, each, made in ((IMAGE, IMAGE, IMAGE), (HALF, HALF, HALF), (LAST, LAST, LAST), (IMAGE, LAST, IMAGE))
    ],
}

# Ops whose arguments are keywords.
KEYWORDS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("sum.dim_IntList", (ROWS, [1]), {"dtype": torch.float64}),
    ("mean", (HALF,), {"dtype": torch.float32}),
    ("sort.stable", (ROWS,), {"stable": True}),
    ("div.Tensor_mode", (whole(3), meta(3)), {"rounding_mode": "floor"}),
    ("div.Tensor_mode", (ROWS, ROWS), {"rounding_mode": None}),
    ("div.Scalar_mode", (whole(3), 2), {"rounding_mode": "trunc"}),
    ("clone", (ROWS,), {"memory_format": torch.contiguous_format}),
    ("clone", (IMAGE,), {"memory_format": torch.channels_last}),
    ("_to_copy", (IMAGE,), {"dtype": torch.float16}),
    ("_to_copy", (LAST,), {"dtype": torch.bfloat16}),
    ("_to_copy", (ROWS[:, ::2].transpose(0, 1),), {"dtype": torch.bfloat16}),
    ("_to_copy", (IMAGE,), {"memory_format": torch.channels_last}),
    ("randn", ((2, 3),), {"device": META}),
    ("randn", ((2, 3),), {"device": META, "dtype": torch.float16}),
    ("randint", (9, (4,)), {"device": META}),
    ("randint.low", (2, 9, (4, 1)), {"device": META, "dtype": torch.int32}),
    ("arange", (5,), {"device": META}),
    ("arange.start", (2, 7), {"device": META}),
    ("arange.start_step", (9, 2, -2), {"device": META, "dtype": torch.int32}),
    *((f"{name}_like", (x,), {}) for name in ("empty", "zeros", "ones", "rand", "randn") for x in (ROWS, LAST)),
    ("full_like", (ROWS, 1.0), {"dtype": torch.float16}),
    ("randint_like", (ROWS, 5), {}),
    ("bernoulli", (ROWS,), {}),
]


def compare(name: str, args: Any, kwargs: dict[str, Any], device: str) -> None:
    mine = answer(name, *args, **kwargs)
    theirs = overload(name)(*args, **kwargs) if device == "meta" else overload(name)(*on_cpu(args), **on_cpu(kwargs))
    assert described(mine) == described(theirs)
    if in_place(name) and mine is not None and not isinstance(mine, tuple):
        assert mine is args[0]


@pytest.mark.parametrize("name", REAL)
def test_an_answer_agrees_with_a_real_run(name: str) -> None:
    for args in REAL[name]:
        compare(f"aten::{name}", args, {}, "cpu")


@pytest.mark.parametrize("name", MODELLED)
def test_a_rule_agrees_with_the_meta_kernel(name: str) -> None:
    for args in MODELLED[name]:
        compare(f"aten::{name}", args, {}, "meta")


@pytest.mark.parametrize("name", ON_CUDA_ALONE)
def test_a_rule_of_an_op_on_cuda_alone_agrees_with_what_it_does(name: str) -> None:
    for args, expected in ON_CUDA_ALONE[name]:
        assert described(answer(f"aten::{name}", *args)) == described(expected)
        assert answer_of_nothing(name, *args) is NotImplemented


def answer_of_nothing(name: str, tensor: Tensor, *args: Any) -> Any:
    """The rule's answer for a batch without dimensions."""
    return TABLE[f"aten::{name}"](torch.empty((), device="meta"), *args) if tensor.dim() else None


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize(
    "name", ["mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"]
)
def test_a_loss_holds_the_memory_that_a_real_one_holds(name: str, reduction: int) -> None:
    """Most reduced losses are one number in the memory of all terms."""
    op = getattr(torch.ops.aten, name).default
    options = (None, reduction) if name == "binary_cross_entropy" else (reduction,)
    real = op(torch.rand(5, 8), torch.rand(5, 8), *options)
    ours = RULES[op](meta(5, 8), meta(5, 8), *options)
    assert ours.shape == real.shape
    assert ours.untyped_storage().nbytes() == real.untyped_storage().nbytes()
    assert ours.untyped_storage().nbytes() == (4 if reduction and name == "huber_loss" else 4 * 5 * 8)
    # A real run hides what is allocated inside of an op. In half precision, 2 bytes for each term.
    inside = [each.bytes for each in kernel_temporaries(op, (meta(5, 8).half(), meta(8).half(), *options))]
    assert inside == ([2 * 5 * 8] if reduction and name in ("mse_loss", "smooth_l1_loss", "huber_loss") else [])


def test_a_folded_image_holds_the_memory_of_its_columns() -> None:
    """48 columns of 9 · 4 numbers for an image of 2 · 4 · 8 · 6: the gradient of `unfold` is that of the columns."""
    columns = (2, 36, 48)
    fold = torch.ops.aten.col2im.default
    arguments = ([8, 6], [3, 3], [1, 1], [1, 1], [1, 1])
    real, ours = fold(torch.rand(columns), *arguments), RULES[fold](meta(*columns), *arguments)
    assert described(ours) == described(real) and ours.shape == (2, 4, 8, 6)
    assert ours.untyped_storage().nbytes() == real.untyped_storage().nbytes() == 4 * 2 * 36 * 48
    with Ledger() as ledger:
        columns_of_image = torch.nn.functional.unfold(LAST, 3, padding=1)
    # channels last: the columns' first memory, like the image, and its copy are gone after the kernel
    image = LAST.numel() * 4
    assert columns_of_image.numel() == 9 * LAST.numel()
    assert [event.delta for event in ledger.events] == [9 * image, image, image, -image, -image]


@pytest.mark.parametrize(
    ("tensor", "cast"),
    [(truth(3, 4), 8 * 3 * 4), (whole(3, 4).to(torch.int32), 8 * 3 * 4), (whole(3, 4), 0), (meta(3, 4), 0)],
)
@pytest.mark.parametrize("reduce", [Tensor.sum, lambda x: x.sum(1), Tensor.prod])
def test_what_is_counted_is_cast_to_integers_of_8_bytes(
    reduce: Callable[[Tensor], Tensor], tensor: Tensor, cast: int
) -> None:
    """ReduceOpsUtils.h, `make_reduction`. In Liger-Kernel's loss it is 128 KiB of 16,384 targets."""
    with Ledger() as ledger:
        total = reduce(tensor)
    deltas = [event.delta for event in ledger.events]
    assert deltas == [total.untyped_storage().nbytes(), *([cast, -cast] if cast else [])]


@pytest.mark.parametrize(("name", "args", "kwargs"), KEYWORDS)
def test_keywords_are_read(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    compare(f"aten::{name}", args, kwargs, "cpu")


# -- elementwise ops: arguments made from the schema, in every layout -------------------------------------------------

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "row-major": lambda: meta(2, 3, 4, 5),
    "channels last": lambda: last(2, 3, 4, 5),
    "permuted": lambda: meta(4, 2, 5, 3).permute(1, 3, 0, 2),
    "sliced": lambda: meta(2, 3, 4, 10)[..., ::2],
    "expanded": lambda: meta(2, 3, 1, 5).expand(2, 3, 4, 5),
    "one channel": lambda: meta(1, 3, 1, 1),
    "a number": lambda: meta(),
}
_WHOLE_ONLY = ("bitwise",)
_LISTS = ("aten::_foreach_", "aten::_fused_")
_RECURRENT = ("aten::_cudnn_rnn", "aten::_thnn_fused_")  # see test_rnn_semantics
_TABLED = {f"aten::{name}" for name in (*REAL, *MODELLED, *ON_CUDA_ALONE)} | {
    f"aten::{name}" for name, _, _ in KEYWORDS
}
_TABLED |= {f"aten::{name}" for name in ("div_.Tensor_mode", "log_sigmoid_forward")}
_TABLED |= {"aten::_sparse_addmm", "aten::t"}  # rules for sparse tensors alone: see test_virtual_gpu
_TABLED |= {"aten::_fft_c2c", "aten::_fft_r2c", "aten::_fft_c2r"}  # see test_fft_semantics
_TABLED |= {"aten::addmm.dtype_out"}  # CUDA alone has it: Liger's loss in test_remedies
_TABLED |= {"aten::_weight_int4pack_mm"}  # CUDA alone has it: see test_quanto
OF_A_LIBRARY = ("bitsandbytes::", "quanto::")
"""Ops that PyTorch lacks: see test_bitsandbytes and test_quanto."""
ELEMENTWISE = sorted(
    name for name in TABLE if name not in _TABLED and not name.startswith((*_LISTS, *_RECURRENT, *OF_A_LIBRARY))
)


def arguments(name: str, layouts: tuple[str, ...]) -> list[Any]:
    """What the schema requires: tensors in these layouts, and numbers."""
    dtype = torch.int64 if any(word in name for word in _WHOLE_ONLY) else torch.float32
    tensors = iter(LAYOUTS[layout]().to(dtype) if dtype is torch.int64 else LAYOUTS[layout]() for layout in layouts)
    given = []
    for argument in overload(name)._schema.arguments:
        if argument.has_default_value():
            break
        kind = str(argument.type)
        given.append(next(tensors) if "Tensor" in kind else False if kind == "bool" else 2)
    return given


def tensor_count(name: str) -> int:
    required = (a for a in overload(name)._schema.arguments if not a.has_default_value())
    return sum("Tensor" in str(argument.type) for argument in required)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_elementwise_rule_agrees_with_a_real_run_in_every_layout(name: str) -> None:
    count = tensor_count(name)
    choices = (
        list(itertools.product(LAYOUTS, repeat=count)) if count < 3 else [(a, b, a) for a in LAYOUTS for b in LAYOUTS]
    )
    answered = 0
    for layouts in choices:
        args = arguments(name, layouts)
        mine = RULES[overload(name)](*args)
        if mine is NotImplemented:
            continue
        answered += 1
        assert described(mine) == described(overload(name)(*on_cpu(args))), layouts
        assert not in_place(name) or mine is args[0]
    assert answered, name


@pytest.mark.parametrize("name", sorted(name for name in TABLE if name.startswith("aten::_foreach_")))
def test_a_list_rule_agrees_with_a_real_run(name: str) -> None:
    if name.removeprefix("aten::") in REAL:
        return
    args: list[Any] = []
    for argument in overload(name)._schema.arguments:
        if argument.has_default_value():
            break
        kind = str(argument.type)
        args.append(
            LIST if kind == "List[Tensor]" else [1.0] * 3 if "List" in kind else meta() if kind == "Tensor" else 1.0
        )
    if name.endswith(("addcmul.Tensor", "addcdiv.Tensor", "addcmul_.Tensor", "addcdiv_.Tensor")):
        # One value per tensor, in a tensor on the CPU.
        assert RULES[overload(name)](*args[:-1], torch.ones(3)) is NotImplemented
        return
    assert described(answer(name, *args)) == described(overload(name)(*on_cpu(args)))


@pytest.mark.parametrize("name", sorted(name for name in TABLE if name.startswith("aten::_fused_a") or "sgd" in name))
def test_a_fused_optimizer_makes_nothing(name: str) -> None:
    states = sum("List" in str(a.type) for a in overload(name)._schema.arguments) - 2
    assert answer(name, LIST, LIST, *([LIST] * (states - 1)), []) is None
    assert RULES[overload(name)](LIST, LIST[:1], *([LIST] * states)) is NotImplemented


def test_cuda_keeps_no_buffer_of_log_sigmoid() -> None:
    result, buffer = answer("aten::log_sigmoid_forward", ROWS)
    assert result.shape == ROWS.shape
    assert buffer.shape == (0,)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("glu_backward", (meta(2, 2, 8, 6), LAST, 1)),  # cuda/GatedLinearUnit.cpp
        pytest.param(
            *("native_group_norm", (LAST, C4, C4, 2, 4, 48, 2, 1e-5)),  # group_norm.cpp
            marks=pytest.mark.skipif(
                tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14), reason="its meta kernel has CUDA's order"
            ),
        ),
        ("_log_softmax_backward_data", (LAST, LAST, 1, torch.float32)),  # SoftMax.cpp
    ],
)
def test_cuda_is_row_major_where_the_meta_kernel_keeps_channels_last(name: str, args: Any) -> None:
    mine, theirs = answer(f"aten::{name}", *args), overload(f"aten::{name}")(*args)
    first = [each[0] if isinstance(each, tuple) else each for each in (mine, theirs)]
    assert [each.is_contiguous() for each in first] == [True, False]


@pytest.mark.parametrize(
    ("dims", "inside"),
    [
        ([1], ["copy of the input"]),
        ([1, 2], ["first result"]),  # the copy is gone when the second result is made
        ([1, 2, 3], ["first result", "second result"]),
    ],
)
def test_a_tensor_is_rolled_row_by_row_and_dimension_by_dimension(dims: list[int], inside: list[str]) -> None:
    """cuda/TensorTransformations.cu, `roll_cuda`; TensorTransformations.h, `roll_common`."""
    arguments = (LAST, [1] * len(dims), dims)
    assert answer("aten::roll", *arguments).is_contiguous()
    op = torch.ops.aten.roll.default
    copies = [tensor for tensor, _ in kernel_copies(op, arguments, {})]
    assert len(copies) + len(kernel_temporaries(op, arguments)) == len(inside)


def test_cuda_keeps_the_norms_of_half_precision_weights_in_float32() -> None:
    # cuda/WeightNorm.cu
    half = (meta(3, 4, 5, dtype=torch.float16), meta(3, 1, 1, dtype=torch.float16))
    weight, norms = answer("aten::_weight_norm_interface", *half)
    assert (weight.dtype, norms.dtype) == (torch.float16, torch.float32)


# -- what a rule leaves to PyTorch ------------------------------------------------------------------------------------

WRONG: dict[str, list[tuple[Any, ...]]] = {
    "mm": [(meta(3, 4), meta(5, 4)), (meta(3, 4), meta(4, 5, dtype=torch.float16)), (meta(4), meta(4, 5))],
    "_grouped_mm": [(meta(), meta()), (meta(4), meta(4, 5)), (meta(2, 3, 4, 5), meta(2, 3, 5, 6)), (ROWS, ROWS)],
    "addmm": [(meta(6), meta(3, 4), meta(4, 5)), (meta(2, 3, 5), meta(3, 4), meta(4, 5))],
    "bmm": [(meta(2, 3, 4), meta(3, 4, 5))],
    "convolution": [
        (IMAGE, meta(6, 3, 3, 3), None, *CONV),
        (IMAGE, meta(6, 2, 9, 9), None, *CONV),
        (IMAGE, meta(6, 2, 3, 3), meta(5), *CONV),
        (HALF, meta(6, 2, 3, 3), None, *CONV),
        (meta(4, 8, 6), meta(6, 2, 3, 3), None, *CONV),
        (IMAGE, meta(4, 3, 3, 2), None, [2, 2], [1, 0], [1, 1], True, [2, 0], 2),
    ],
    "native_batch_norm": [(IMAGE, meta(5), C4, C4, C4, True, 0.1, 1e-5), (IMAGE, C4, C4, None, None, False, 0.1, 1e-5)],
    "native_layer_norm": [(ROWS, [5], meta(5), None, 1e-5), (ROWS, [8], meta(5), None, 1e-5)],
    "native_group_norm": [(IMAGE, C4, C4, 2, 4, 48, 3, 1e-5)],
    "max_pool2d_with_indices": [(IMAGE, [2, 2], [1], [2]), (IMAGE, [9]), (meta(8, 6), [2])],
    "add.Tensor": [
        (meta(3), meta(4)),
        (meta(3, dtype=torch.complex64), meta(3)),
        (truth(3), truth(3)),
        (ROWS, torch.ones(8)),
    ],
    "add_.Tensor": [(meta(3), meta(2, 3)), (whole(3), meta(3)), (meta(1, 3).expand(2, 3), meta(2, 3))],
    "pow.Tensor_Scalar": [(whole(3), -1)],
    "_softmax": [(ROWS, 3, False)],
    "nll_loss_forward": [(meta(6, 4), whole(5), None, 1, -100), (meta(6, 4), meta(6), None, 1, -100)],
    "sum.dim_IntList": [(ROWS, [3]), (ROWS, [1, 1])],
    "embedding": [(meta(9, 4), meta(2, 3))],
    "cat": [([ROWS, meta(3, 5, 7)], 1), ([ROWS, HALF], 0), ([], 0), ([ROWS, ROWS], 3)],
    "stack": [([ROWS, meta(3, 5, 7)], 0)],
    "index_add": [(ROWS, 1, whole(4), meta(3, 5, 8)), (ROWS, 1, whole(2, 2), meta(3, 4, 8)), (ROWS, 3, whole(4), ROWS)],
    "index_add_": [
        (ROWS, 1, whole(4), meta(3, 5, 8)),
        (ROWS, 1, whole(2, 2), meta(3, 4, 8)),
        (ROWS, 3, whole(4), ROWS),
    ],
    "scatter_.src": [
        (ROWS, 1, whole(3, 4, 8), meta(3, 4, 7)),
        (ROWS, 1, whole(4, 4, 8), meta(4, 4, 8)),
        (ROWS, 1, whole(3, 4), ROWS),
        (ROWS, 3, whole(3, 4, 8), ROWS),
        (ROWS, 1, whole(3, 4, 8), HALF),
        (meta(1, 3).expand(2, 3), 1, whole(2, 3), meta(2, 3)),
    ],
    "_foreach_add_.List": [(LIST, LIST[:2]), (LIST, [meta(4, 3), meta(5), meta()])],
    "_amp_foreach_non_finite_check_and_unscale_": [(LIST, meta(2), meta()), (LIST, meta(), whole())],
    "clamp": [(whole(3), 0.5), (ROWS,)],
    "arange": [(5.5,), (5,)],
    "upsample_nearest2d": [(ROWS, [2, 2]), (IMAGE, [0, 2])],
    "_scaled_dot_product_flash_attention": [(QUERY, meta(2, 4, 24, 8), meta(2, 4, 24, 8))],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_rule_leaves_what_is_wrong_or_unusual_to_pytorch(name: str) -> None:
    for args in WRONG[name]:
        assert RULES[overload(f"aten::{name}")](*args) is NotImplemented, described(list(args))


def test_a_rule_answers_for_meta_tensors_only() -> None:
    for name in ("mm", "add.Tensor", "relu", "sum"):
        count = tensor_count(f"aten::{name}")
        assert RULES[overload(f"aten::{name}")](*[torch.ones(2, 2)] * count) is NotImplemented


# -- sparse tensors in coordinates ------------------------------------------------------------------------------------


def coo(device: str, first: int = 0, count: int = 6, half: bool = False) -> Tensor:
    """`count` rows of 9, from the first on: a CPU adds up what is at equal indices, and CUDA doesn't."""
    values = torch.zeros(count, 3, device=device, dtype=torch.float16 if half else torch.float32)
    with warnings.catch_warnings():  # before 2.13 PyTorch warns once where nobody has chosen whether it checks
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
        return in_coordinates(torch.arange(first, first + count, device=device)[None], values, torch.Size((40, 3)))


def expanded(device: str) -> Tensor:
    return in_coordinates(coo(device)._indices(), torch.zeros(1, device=device).expand(6, 3), torch.Size((40, 3)))


SPARSE: dict[str, list[Callable[[str], tuple[Any, ...]]]] = {
    "clone": [lambda d: (coo(d),), lambda d: (expanded(d),)],
    "neg": [lambda d: (coo(d),)],
    "neg_": [lambda d: (coo(d),)],
    "copy_": [lambda d: (coo(d), coo(d, 6, 4)), lambda d: (coo(d, half=True), coo(d, 6, 4))],
    "zero_": [lambda d: (coo(d),)],
    "_to_dense": [lambda d: (coo(d),)],
    "sparse_mask": [lambda d: (torch.zeros(40, 3, device=d), coo(d))],
    **{f"{op}{end}": [lambda d: (coo(d), 2.0)] for op in ("mul", "div") for end in (".Tensor", "_.Tensor")},
    **{f"{op}{end}": [lambda d: (coo(d), 2.0)] for op in ("mul", "div") for end in (".Scalar", "_.Scalar")},
    **{
        f"{op}{end}.Tensor": [
            lambda d: (coo(d), coo(d, 6, 4)),
            lambda d: (coo(d), coo(d, 0, 0)),
            lambda d: (coo(d, 0, 0), coo(d)),
            lambda d: (torch.zeros(40, 3, device=d), coo(d)),
        ]
        for op in ("add", "sub")
        for end in ("", "_")
    },
}
SPARSE["mul.Tensor"].append(lambda d: (torch.ones((), device=d), coo(d)))
SPARSE["add.Tensor"].append(lambda d: (coo(d), coo(d, 6, 4, half=True)))
SPARSE["add_.Tensor"].append(lambda d: (coo(d, half=True), coo(d, 6, 4)))
SPARSE["add_.Tensor"].append(lambda d: (torch.zeros(40, 3, device=d, dtype=torch.float16), coo(d)))


def parts(value: Any) -> Any:
    if value.layout is torch.strided:
        return described(value)
    return tuple(value.shape), value.is_coalesced(), described(value._indices()), described(value._values())


@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_rule_agrees_with_a_real_run(name: str) -> None:
    for make in SPARSE[name]:
        given, real = make("meta"), make("cpu")
        before = given[0]
        result = SPARSE_RULES[overload(f"aten::{name}")](*given)
        assert result is not NotImplemented
        expected = overload(f"aten::{name}")(*real)
        assert parts(result) == parts(expected)
        if in_place(f"aten::{name}"):
            assert parts(given[0]) == parts(real[0])
            assert result is before


def test_every_sparse_rule_is_compared() -> None:
    assert {f"aten::{name}" for name in SPARSE} == set(SPARSE_TABLE)


SPARSE_WRONG: dict[str, list[tuple[Any, ...]]] = {
    "clone": [(meta(3),)],
    "copy_": [(meta(3), meta(3))],
    "add.Tensor": [(coo("meta"), meta(40, 3)), (meta(3), coo("meta")), (meta(3), meta(3))],
    "add_.Tensor": [(coo("meta"), meta(40, 3)), (meta(3, 3), coo("meta")), (whole(40, 3), coo("meta"))],
    "mul.Tensor": [(coo("meta"), meta(40, 3)), (coo("meta"), coo("meta")), (meta(3), 2.0)],
    "div_.Tensor": [(coo("meta"), meta(40, 3)), (meta(3), 2.0)],
    "mul_.Tensor": [(coo("meta"), coo("meta"))],
    "sparse_mask": [(meta(3, 3), coo("meta")), (coo("meta"), coo("meta"))],
}


@pytest.mark.parametrize("name", SPARSE_WRONG)
def test_a_sparse_rule_leaves_what_is_wrong_or_dense_to_pytorch(name: str) -> None:
    for args in SPARSE_WRONG[name]:
        assert SPARSE_RULES[overload(f"aten::{name}")](*args) is NotImplemented


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_dense_and_sparse_tensors_are_not_copied_into_each_other(device: str) -> None:
    dense, sparse = torch.zeros(40, 3, device=device), coo(device)
    for target, source in ((dense, sparse), (sparse, dense)):
        with (
            MetaDispatchMode(device),
            pytest.raises(RuntimeError, match="between dense and sparse Tensors is not impl"),
        ):
            target.copy_(source)


def test_list_rules_know_dense_tensors_only() -> None:
    for name, *more in (
        ("_foreach_norm.Scalar",),
        ("_foreach_mul_.Scalar", 2.0),
        ("_foreach_add_.List", [coo("meta")]),
    ):
        assert RULES[overload(f"aten::{name}")]([coo("meta")], *more) is NotImplemented


# -- the table itself -------------------------------------------------------------------------------------------------


def test_every_name_is_an_op_of_the_installed_torch() -> None:
    for name in sorted(name for name in TABLE | SPARSE_TABLE if not name.startswith(OF_A_LIBRARY)):
        assert RULES[overload(name)] is TABLE.get(name), name
        assert SPARSE_RULES[overload(name)] is SPARSE_TABLE.get(name), name


def test_a_second_rule_for_an_op_is_refused() -> None:
    with pytest.raises(ValueError, match="has a shape rule already"):
        shape_rule("aten::mm")(lambda: None)
    with pytest.raises(ValueError, match="has a shape rule already"):
        sparse_rule("aten::clone")(lambda: None)


def test_a_rule_is_found_although_its_op_had_none_before() -> None:
    op = torch.ops.aten.special_airy_ai.default
    assert RULES[op] is None
    rule = shape_rule(op.name())(lambda tensor: tensor)
    assert RULES[op] is rule
    del TABLE[op.name()]
    RULES.clear()


# -- arithmetic -------------------------------------------------------------------------------------------------------

SIZES = st.integers(1, 9)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Any, ...]:
    rank = draw(st.integers(1, 3))
    each = st.lists(st.integers(1, 3), min_size=rank, max_size=rank)
    groups, transposed = draw(st.integers(1, 2)), draw(st.booleans())
    ins, outs = (draw(st.integers(1, 2)) * groups for _ in range(2))
    image = (draw(st.integers(1, 2)), ins, *draw(st.lists(SIZES, min_size=rank, max_size=rank)))
    kernel = draw(each)
    weight = (ins, outs // groups, *kernel) if transposed else (outs, ins // groups, *kernel)
    padding = draw(st.lists(st.integers(0, 2), min_size=rank, max_size=rank))
    extra = [draw(st.integers(0, 1)) if transposed else 0 for _ in range(rank)]
    return image, weight, draw(each), padding, draw(each), transposed, extra, groups


@given(convolutions(), st.booleans())
def test_convolution_agrees_with_a_real_run(case: tuple[Any, ...], is_last: bool) -> None:
    shape, weight_shape, *options = case
    image = last(*shape) if is_last else meta(*shape)
    args = (image, meta(*weight_shape), None, *options)
    mine = RULES[torch.ops.aten.convolution.default](*args)
    try:
        theirs = torch.ops.aten.convolution.default(*on_cpu(args))
    except RuntimeError:
        assert mine is NotImplemented
        return
    if not theirs.numel():
        return
    assert mine is not NotImplemented
    assert mine.shape == theirs.shape
    expected = strides.is_channels_last(image.shape, image.stride())
    assert mine.is_contiguous() if not expected else mine.stride() == strides.channels_last(mine.shape)


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(0, 1), st.integers(1, 2), st.booleans(), SIZES, SIZES,
    st.booleans(),
)  # fmt: skip
def test_max_pooling_agrees_with_a_real_run(
    kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool, height: int, width: int, is_last: bool
) -> None:
    image = last(2, 3, height, width) if is_last else meta(2, 3, height, width)
    args = (image, [kernel], [stride], [padding], [dilation], ceil_mode)
    op = torch.ops.aten.max_pool2d_with_indices.default
    mine = RULES[op](*args)
    try:
        theirs = op(*on_cpu(args))
    except RuntimeError:
        assert mine is NotImplemented
        return
    assert described(mine) == described(theirs)


@given(st.lists(st.integers(1, 4), max_size=4), st.lists(st.integers(1, 4), max_size=4))
def test_broadcast_agrees_with_torch(one: list[int], other: list[int]) -> None:
    try:
        expected = tuple(torch.broadcast_shapes(one, other))
    except RuntimeError:
        assert strides.broadcast([one, other]) is None
        return
    assert strides.broadcast([one, other]) == expected


@st.composite
def operands(draw: st.DrawFn) -> list[Tensor]:
    """Tensors over one shape, each permuted, broadcast and sliced in its own way."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    tensors = []
    for _ in range(draw(st.integers(1, 3))):
        order = draw(st.permutations(range(len(shape))))
        own = [draw(st.sampled_from((size, 1))) for size in shape]
        gap = draw(st.integers(1, 2))
        base = torch.empty([own[dim] * gap for dim in order])
        view = base[tuple(slice(None, None, gap) for _ in order)].permute(*(order.index(d) for d in range(len(shape))))
        tensors.append(view.expand(shape) if draw(st.booleans()) else view)
    return tensors


@given(operands())
def test_sorted_strides_agree_with_the_tensor_iterator(tensors: list[Tensor]) -> None:
    """A number among the operands keeps PyTorch from its shortcuts."""
    shape = strides.broadcast([t.shape for t in tensors])
    assert shape is not None
    expected = torch.ops.aten.add.Tensor(*tensors, alpha=1) if len(tensors) == 2 else None
    if len(tensors) == 1:
        expected = torch.ops.aten.mul.Tensor(tensors[0], 2)
    elif expected is not None and tensors[0].shape == tensors[1].shape:
        return
    if expected is not None:
        assert strides.elementwise(shape, [(t.shape, t.stride()) for t in tensors]) == expected.stride()


@given(st.lists(st.integers(0, 4), max_size=5))
def test_dense_layouts(shape: list[int]) -> None:
    row_major = strides.contiguous(shape)
    assert row_major == torch.empty(shape).stride()
    assert strides.is_dense(shape, row_major)
    assert 0 in shape or strides.is_dense(shape, strides.channels_last(shape))


@given(st.lists(st.integers(1, 3), min_size=4, max_size=4), st.permutations(range(4)), st.integers(1, 2))
def test_channels_last_is_what_pytorch_takes_for_it(shape: list[int], order: list[int], gap: int) -> None:
    base = torch.empty([shape[dim] for dim in order])[..., ::gap]
    image = base.permute(*(order.index(dim) for dim in range(4)))
    larger = torch.ops.aten.upsample_nearest2d.default(image, [3, 3])
    is_last = larger.stride() == strides.channels_last(larger.shape)
    assert strides.is_channels_last(image.shape, image.stride()) == is_last


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "dilation", "expected"),
    [(64, 3, 1, 0, 1, 62), (224, 7, 2, 3, 1, 112), (5, 3, 2, 0, 1, 2), (6, 2, 1, 0, 3, 3)],
)
def test_convolution_sizes(size: int, kernel: int, stride: int, padding: int, dilation: int, expected: int) -> None:
    # 64 - 2; (224 + 6 - 7) // 2 + 1; (5 - 3) // 2 + 1; a kernel of 2 spread by 3 spans 4, 6 - 4 + 1.
    assert convolution.forward_size(size, kernel, stride, padding, dilation) == expected
    back = convolution.transposed_size(expected, kernel, stride, padding, dilation, 0)
    assert back == size - (size + 2 * padding - dilation * (kernel - 1) - 1) % stride


def test_pooling_counts_a_partial_window_only_with_ceil_mode() -> None:
    # 5 values in pairs: two whole pairs, and one half; a window that starts in the padding behind doesn't count.
    assert windows.pooled_size(5, 2, 2, 0, 1, False) == 2
    assert windows.pooled_size(5, 2, 2, 0, 1, True) == 3
    assert windows.pooled_size(3, 2, 2, 1, 1, True) == 2


@pytest.mark.parametrize("step", [0, -1])
def test_a_range_that_leads_away_from_its_end_is_left_to_pytorch(step: int) -> None:
    assert RULES[overload("aten::arange.start_step")](0, 10, step, device=META) is NotImplemented


def test_efficient_attention_keeps_sums_of_whole_blocks_of_32_rows() -> None:
    query = torch.empty(2, 3, 40, 8, device=META)
    _, sums, *_ = RULES[overload("aten::_scaled_dot_product_efficient_attention")](query, query, query, None, True)
    assert sums.shape == (2, 3, 64)


# -- what rules are for -----------------------------------------------------------------------------------------------

_STEP = """
import sys
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from memsize.kernels import rules

RULES = rules()

class Answering(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        rule = RULES[func]
        result = NotImplemented if rule is None else rule(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result

torch.set_default_device("meta")
mode = Answering()
mode.__enter__()
toy = nn.Sequential(nn.Conv2d(3, 30, 3), nn.ReLU(), nn.Conv2d(30, 50, 3), nn.Flatten(), nn.Linear(180000, 1))
small = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
    nn.Dropout(0.3), nn.ConvTranspose2d(8, 8, 2, 2), nn.GroupNorm(2, 8), nn.SiLU(), nn.AvgPool2d(2),
    nn.Upsample(scale_factor=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
)
encoder = nn.TransformerEncoder(
    nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True), 2, enable_nested_tensor=False
)
tokens = nn.Sequential(nn.Embedding(100, 32), encoder, nn.Linear(32, 100))
images = torch.randn(2, 3, 64, 64)
for training in (True, False):
    for model, given in ((toy, images), (small, images), (tokens, torch.randint(100, (2, 9)))):
        model.train(training)
        output = model(given).flatten(0, -2)
        loss = nn.functional.cross_entropy(output, torch.empty(output.shape[:1], dtype=torch.int64))
        (loss + output.pow(2).mean()).backward()
heavy = [name for name in ("torch._dynamo", "sympy", "torch.fx.experimental.symbolic_shapes") if name in sys.modules]
assert not heavy, heavy
"""


def test_a_step_of_ordinary_models_imports_neither_dynamo_nor_sympy(
    warm_python: Python,
) -> None:
    done = warm_python("-c", _STEP)
    assert done.returncode == 0, done.stderr
