"""Ops that `torch.library.custom_op`, `triton_op`, `register_kernel` and `Library.impl` define by a Python function."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, Final

import torch

from memsize.errors import first_line
from memsize.known_values.values import state_of
from memsize.processes.patches import assigned
from memsize.torch_internals.pytree import arguments_in

_OF_PYTORCH: Final = frozenset(
    """aten prims prim profiler c10d _c10d_functional _c10d_functional_autograd c10d_functional _dtensor device_mesh
    fsdp symm_mem bucketing streams inductor export quantized quantized_decomposed semi_structured flex_lib torch_attn
    torchvision higher_order rngprims debugprims""".split()
)
"""Namespaces of ops whose Python kernels are PyTorch's own: memsize knows what these do on a GPU."""
_KERNEL: Final = re.compile(r"^(\w+)(?:\[alias\])?: registered at (.+):\d+ ::", re.MULTILINE)
_KEYS: Final = {name: torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in ("CUDA", "CPU")}
TRITON: Final = "triton.runtime.autotuner", "triton.runtime.jit"
"""Modules of Triton with the classes `Autotuner` and `JITFunction`, whose `run` launches a kernel."""


def body_of(func: Any, backend: str = "CUDA") -> Any:
    """Return the dispatch key of the Python function that runs `func` on a backend, None without one."""
    if func.namespace in _OF_PYTORCH:
        return None
    return _KEYS[backend] if _runs_python(func.name(), backend) else None


@cache
def _runs_python(op: str, backend: str) -> bool:
    """Whether the kernel of `op` for a backend is a Python function, by where it was registered."""
    files = dict(_KERNEL.findall(torch._C._dispatch_dump(op)))
    return str(files.get(backend) or files.get("CompositeExplicitAutograd", "")).endswith(".py")


def replaced_by_fake(func: Any, error: Exception) -> str:
    """Say that the body of `func` could not run without a GPU."""
    return (
        f"the body of {func.name()} needs a real GPU ({type(error).__name__}: {first_line(error)}): only the results "
        "of its fake are in these figures"
    )


def left_out(*args: Any, **options: Any) -> None:
    """Replace the launch of a Triton kernel: it writes to tensors that are there, whose values are unknown then."""
    for tensor in arguments_in((args, options)):
        state = state_of(tensor)
        if state is not None:
            state.invalidate()


@contextmanager
def without_launches() -> Iterator[None]:
    """While open, Triton kernels are not launched."""
    with ExitStack() as regions:
        for module, name in zip(TRITON, ("Autotuner", "JITFunction"), strict=True):
            if module in sys.modules:
                launcher = getattr(sys.modules[module], name)
                regions.enter_context(assigned(launcher, "run", left_out))
        yield
