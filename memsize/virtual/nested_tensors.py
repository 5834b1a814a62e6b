"""Nested tensors on a virtual GPU: those of jagged layout, whose attention is a kernel of CUDA's.

A jagged tensor is Python code around a tensor of all values and one of offsets. One of strided layout is C++ code that
refuses `meta`: it is refused here in words that name the other.

Source: torch/nested/_internal/sdpa.py (`_select_sdp_backend`); aten/src/ATen/NestedTensorImpl.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.nested._internal.sdpa
from torch.nn.attention import SDPBackend

from memsize.cuda.attention_backend import Attention, Backend, can_run
from memsize.kernels.semantics import current
from memsize.processes.patches import Patch, wrapping
from memsize.torch_internals.meta import is_meta
from memsize.tracing.named_devices import named_gpu

_REFUSED: Final = ("NestedTensorImpl storage must be", "'NestedTensorMeta' backend")
STRIDED: Final = (
    "memsize cannot simulate nested tensors of strided layout on a GPU, which attention over jagged ones makes too "
    "where no fused kernel takes it: use layout=torch.jagged, and attention without a mask"
)
_sdpa: Any = torch.nested._internal.sdpa
_BACKENDS: Final[dict[Backend, SDPBackend]] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""In PyTorch's order for jagged tensors."""


def replacements() -> Iterator[Patch]:
    """Patch the constructor of strided ones."""
    nested: Any = torch._C._nested  # type: ignore[attr-defined]
    yield wrapping(nested, "nested_tensor", _strided)


def of_driver() -> Iterator[Patch]:
    """Patch the choice of an attention kernel for jagged ones, which compiled code makes too while it is traced."""
    yield wrapping(_sdpa, "_select_sdp_backend", _selected)


def is_refused(error: RuntimeError) -> bool:
    """Whether `error` is PyTorch's for a nested tensor of strided layout on `meta`."""
    return any(text in str(error) for text in _REFUSED)


def _strided(original: Callable[..., Any], tensors: Any, *args: Any, **options: Any) -> Any:
    device = options.get("device")
    if named_gpu(device) or (device is None and any(getattr(tensor, "is_cuda", False) for tensor in tensors)):
        raise RuntimeError(STRIDED)
    return original(tensors, *args, **options)


def _selected(original: Callable[..., Any], *arguments: Any) -> Any:
    semantics = current()
    if semantics is None or not is_meta(arguments[0]):
        return original(*arguments)
    query, key, value, mask, dropout, causal, grouped = arguments
    gpu = (semantics.capability, semantics.cudnn)
    call = Attention(query, key, value, mask, dropout, causal, None, grouped, *gpu)
    params = torch.backends.cuda.SDPAParams(*arguments)
    for name in _BACKENDS:
        if can_run(name, call) and getattr(_sdpa, f"_can_use_{name}_sdpa_jagged")(params):
            return _BACKENDS[name]
    return SDPBackend.ERROR
