"""CUDA's autocast: which operators cast their arguments, and to what, and how long copies of weights live.

Everything is driven by PyTorch's own state, so that a user's nested and disabled regions count. `POLICIES` is the one
table of operators. Only those that the installed torch wraps get a kernel, so that each version behaves as it does:
2.12 added `rms_norm`, which an older release that is simulated leaves alone too, and dropped dimensions by name
(``.dimname``), 2.14 added `linalg_matrix_sqrth`. Operators of
other libraries are known by their full names, and get their kernels once their library is imported. A weight's copy
lives until PyTorch clears its cache at the end of the outermost region, or `cuda_semantics` ends.

Source: aten/src/ATen/autocast_mode.h (the lists and the wrappers), autocast_mode.cpp (the refused loss, `cached_cast`),
aten/src/ATen/cudnn/AutocastRNN.cpp; torchvision/csrc/ops/autocast (since 0.28 torchvision/_autograd_registrations.py).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from memsize.kernels.semantics import Semantics, current
from memsize.torch_internals.meta import Kernel, key_excluded, overload

Policy = Literal[
    "lower precision", "float32", "float32 and back", "float32 output", "float32 appended", "promote", "refused",
    "cuDNN RNN",
]  # fmt: skip
"""How autocast treats an operator: cast every floating argument to the region's dtype; cast them to float32; that, and
give the result the first argument's dtype; ask for a float32 result unless the caller named a dtype; call the overload
that takes a dtype, with float32; cast all to the widest dtype among them; refuse. A cuDNN RNN casts its flat weights in
one piece."""

_LISTS: dict[Policy, str] = {
    "lower precision": """
        _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
        conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
        einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
        _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
        scaled_dot_product_attention""",
    "float32": """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
        pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
        nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
        hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
        multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
        binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
        _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
        _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
        upsample_bicubic2d _upsample_bicubic2d_aa linalg_matrix_sqrth torchvision::nms""",
    "float32 and back": """
        torchvision::roi_align torchvision::roi_pool torchvision::ps_roi_align torchvision::ps_roi_pool
        torchvision::deform_conv2d""",
    "float32 output": """
        prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
        linalg_matrix_norm.str_ord sum sum.dim_IntList prod.dim_Dimname softmax.Dimname log_softmax.Dimname
        cumprod.dimname cumsum.dimname sum.dim_DimnameList""",
    "float32 appended": "norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim",
    "promote": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    "refused": "binary_cross_entropy",
    "cuDNN RNN": "_cudnn_rnn",
}
POLICIES: dict[str, Policy] = {name: policy for policy, names in _LISTS.items() for name in names.split()}
"""What autocast does to each CUDA operator, by name: without the namespace where that is ``aten``."""

_SINCE: Mapping[str, tuple[int, int]] = {"rms_norm": (2, 12)}
"""The releases of PyTorch that began to cast an operator which exists in older ones."""

LATE = tuple(name for name in POLICIES if "::" in name)
"""Operators that exist only once their library is imported."""

_POSITIONAL_DTYPE = {"softmax.int": 2, "log_softmax.int": 2}
"""The position of the result's dtype in operators that take it by position; all others take it by keyword."""
_WITH_DTYPE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "norm.Scalar": ("norm.ScalarOpt_dtype", (None, 2)),
    "norm.ScalarOpt_dim": ("norm.ScalarOpt_dim_dtype", (None, None, None, False)),
    "norm.names_ScalarOpt_dim": ("norm.names_ScalarOpt_dim_dtype", (None, None, None, False)),
}
"""The overloads with a dtype, and the defaults of the arguments before it."""


def wrapped_operators() -> tuple[str, ...]:
    """The operators that the installed torch wraps for CUDA's autocast, with their namespaces."""
    return tuple(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"))


def autocast_region(dtype: torch.dtype) -> torch.autocast:
    """A real ``torch.autocast("cuda", dtype)`` region, on any machine; only inside `cuda_semantics`."""
    if current() is None:
        raise RuntimeError("a CUDA autocast region without CUDA needs cuda_semantics() around it")
    return torch.autocast("cuda", dtype=dtype)


def kernels(beneath: Mapping[str, Kernel] = MappingProxyType({})) -> Mapping[str, Kernel]:
    """Return the kernel of every operator that both the installed torch and the table contain.

    After its casts a kernel calls the operator, or the kernel `beneath` it where there is one.
    """
    wrapped = (name.removeprefix("aten::") for name in wrapped_operators())
    policies = ((name, _CASTINGS.get(POLICIES[name])) for name in wrapped if name in POLICIES)
    return {name: _kernel(name, casting, beneath.get(name)) for name, casting in policies if casting is not None}


Casting = Callable[[str, Any, Semantics, Any, Any], Any]
"""Calls an operator as its policy says, in an open region: from its name, what to call, and the caller's arguments."""


def _kernel(name: str, casting: Casting, beneath: Kernel | None) -> Kernel:
    since = _SINCE.get(name, (0, 0))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal beneath
        call = beneath = beneath or overload(name)
        with key_excluded:
            semantics = active()
            if semantics is None or (semantics.release or since) < since:
                return call(*args, **kwargs)
            return casting(name, call, semantics, args, kwargs)

    return kernel


def _all_cast(
    name: str, call: Any, semantics: Semantics, args: Any, kwargs: Any, dtype: torch.dtype | None = None
) -> Any:
    dtype = dtype or region_dtype()
    if kwargs:
        kwargs = dict(zip(kwargs, cast_arguments(tuple(kwargs.values()), dtype, semantics), strict=True))
    return call(*cast_arguments(args, dtype, semantics), **kwargs)


def _float32_and_back(name: str, call: Any, semantics: Semantics, args: Any, kwargs: Any) -> Any:
    result = call(*cast_arguments(args, torch.float32, semantics), **kwargs)
    dtype = args[0].dtype
    return result.to(dtype) if isinstance(result, Tensor) else tuple(part.to(dtype) for part in result)


def _promote(name: str, call: Any, semantics: Semantics, args: Any, kwargs: Any) -> Any:
    return call(*cast_arguments(args, _widest(args, region_dtype(), semantics), semantics), **kwargs)


def _widest(values: Sequence[Any], lower: torch.dtype, semantics: Semantics) -> torch.dtype:
    """float32 if an eligible tensor among `values` has it, else `lower`; any third dtype is an error, as in PyTorch."""
    widest = lower
    for value in values:
        if isinstance(value, Tensor):
            if not is_eligible(value, semantics):
                continue
            if torch.float32 in (widest, value.dtype):
                widest = torch.float32
            elif value.dtype is not lower:
                raise RuntimeError(f"CUDA autocast in {lower} promotes from {lower} and float32, not {value.dtype}")
        elif type(value) is list and value and isinstance(value[0], Tensor):
            widest = _widest(value, widest, semantics)
    return widest


def _float32_output(name: str, call: Any, semantics: Semantics, args: Any, kwargs: Any) -> Any:
    position = _POSITIONAL_DTYPE.get(name)
    if is_eligible(args[0], semantics):
        if position is None:
            kwargs["dtype"] = torch.float32 if kwargs.get("dtype") is None else kwargs["dtype"]
        elif len(args) <= position or args[position] is None:
            args = (*args[:position], torch.float32)
    return call(*args, **kwargs)


def _float32_appended(name: str, call: Any, semantics: Semantics, args: Any, kwargs: Any) -> Any:
    """Call the overload with a dtype: float32, or the first argument's own where it is not eligible."""
    dtype = torch.float32 if is_eligible(args[0], semantics) else args[0].dtype
    with_dtype, defaults = _WITH_DTYPE[name]
    return overload(with_dtype)(*args, *defaults[len(args) :], dtype=dtype)


def _refused(name: str, call: Any, semantics: Semantics, args: Any, kwargs: Any) -> Any:
    raise RuntimeError(
        f"CUDA autocast refuses {name}: its gradient overflows in half precision. "
        f"Leave out the sigmoid before it and use {name}_with_logits (BCEWithLogitsLoss)."
    )


_CASTINGS: dict[Policy, Casting] = {
    "lower precision": _all_cast,
    "float32": partial(_all_cast, dtype=torch.float32),
    "float32 and back": _float32_and_back,
    "float32 output": _float32_output,
    "float32 appended": _float32_appended,
    "promote": _promote,
    "refused": _refused,
}


# -- casts -------------------------------------------------------------------------------------------------------------

_is_enabled = torch._C.is_autocast_enabled
_lower_dtype = torch._C.get_autocast_dtype
_is_cache_enabled = torch._C.is_autocast_cache_enabled


class _Region(threading.local):
    is_inference = False
    """Whether this thread is in a region that stands in for an inference mode."""


region = _Region()


def active() -> Semantics | None:
    """Return this thread's semantics if a CUDA autocast region is open in it."""
    return current() if _is_enabled("cuda") else None


def region_dtype() -> torch.dtype:
    """Return the lower precision of the open region."""
    return _lower_dtype("cuda")


def cast_arguments(values: Sequence[Any], dtype: torch.dtype, semantics: Semantics) -> list[Any]:
    """Return `values` with every eligible tensor in `dtype`, also inside lists of tensors.

    The last argument is cast first: autocast's wrappers are C++ calls of casts, and gcc evaluates those from the right.
    """
    last_first = [
        cast(value, dtype, semantics)
        if isinstance(value, Tensor)
        else [cast(tensor, dtype, semantics) for tensor in value]
        if type(value) is list and value and isinstance(value[0], Tensor)
        else value
        for value in reversed(values)
    ]
    return last_first[::-1]


def cast(tensor: Tensor, dtype: torch.dtype, semantics: Semantics) -> Tensor:
    """Return `tensor` in `dtype`: itself where autocast leaves it alone, else a copy, the cached one of a weight."""
    own = tensor.dtype
    if own is dtype or not is_eligible(tensor, semantics):
        return tensor
    is_weight = own is torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
    is_inference = region.is_inference or torch.is_inference_mode_enabled()
    is_cached = is_weight and dtype is region_dtype() and _is_cache_enabled() and not is_inference
    if is_cached:
        # As in PyTorch, the dtype is not part of the key, and a copy made under `no_grad` passes gradients on later.
        entry = semantics.copies.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        with torch.enable_grad():
            copy = tensor.to(dtype)
        semantics.copies[id(tensor)] = (weakref.ref(tensor), copy)
    else:
        copy = tensor.to(dtype)
        is_weight = any(isinstance(t, torch.nn.Parameter) for t in (tensor, tensor._base))
    if semantics.observer is not None and is_weight:
        semantics.observer(tensor, copy)
    return copy


def is_eligible(tensor: Tensor, semantics: Semantics) -> bool:
    """Whether autocast may cast `tensor`: on the GPU, floating, not double."""
    return tensor.is_floating_point() and tensor.dtype is not torch.float64 and semantics.stands_for_cuda(tensor)
