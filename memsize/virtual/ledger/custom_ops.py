"""Ops that a program or a package defines in Python: their bodies run on the virtual GPU as on a real one.

`torch.library.custom_op`, `triton_op`, `register_kernel` and `Library.impl` give PyTorch's dispatcher a function in
Python. On the GPU the one for CUDA is called, or else that for any device: what it allocates counts, and its ops are
seen one by one. A body may need the GPU itself, as that of a wrapper around an extension; then the op's fake stands for
it.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final

import torch

from memsize.errors import first_line
from memsize.virtual.device_assignment import any_own_meta, on_gpu

_OF_PYTORCH: Final = frozenset(
    """aten prims prim profiler c10d _c10d_functional _c10d_functional_autograd c10d_functional _dtensor device_mesh
    fsdp symm_mem bucketing streams inductor export quantized quantized_decomposed semi_structured flex_lib torch_attn
    torchvision higher_order rngprims debugprims""".split()
)
"""Namespaces of ops whose Python kernels are PyTorch's own: memsize knows what these do on a GPU."""
_KERNEL: Final = re.compile(r"^(\w+)(?:\[alias\])?: registered at (.+):\d+ ::", re.MULTILINE)
_GPU, _CPU = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in ("CUDA", "CPU"))
_NEEDS_GPU: Final = (RuntimeError, ImportError, OSError, AssertionError)
"""What code raises that does not find its GPU."""


def backend_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the dispatch key of the Python function that runs `func` where its arguments are, None without one."""
    if func.namespace in _OF_PYTORCH:
        return None
    values = (*args, *kwargs.values())
    if any_own_meta(values):
        return None
    goes_to_gpu = on_gpu(values) or any(isinstance(v, torch.device) and v.type == "cuda" for v in values)
    name, keys = ("CUDA", _GPU) if goes_to_gpu else ("CPU", _CPU)
    return keys if _runs_python(func.name(), name) else None


@cache
def _runs_python(op: str, backend: str) -> bool:
    """Whether the kernel of `op` for a backend is a Python function, by where it was registered."""
    files = dict(_KERNEL.findall(torch._C._dispatch_dump(op)))
    return str(files.get(backend) or files.get("CompositeExplicitAutograd", "")).endswith(".py")


def needs_gpu(error: Exception) -> bool:
    """Whether a body may have raised `error` because the GPU is not there."""
    return isinstance(error, _NEEDS_GPU) and not isinstance(error, torch.OutOfMemoryError)


def replaced_note(func: Any, error: Exception) -> str:
    """Return the note for the report on an op whose fake stood for its body."""
    return (
        f"the body of {func.name()} needs a real GPU ({type(error).__name__}: {first_line(error)}): only the results "
        "of its fake are in these figures"
    )
