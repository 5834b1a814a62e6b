"""PyTorch's registry of flops, imported without Triton.

`torch.utils.flop_counter` imports Triton where it is installed, to accept formulas for its kernels. That takes a fifth
as long as importing torch, and what it makes before the collector is frozen (`isolation`) is reported as leaked when
the process ends. Source: torch/utils/flop_counter.py (2.11 to 2.14); Triton 3.9, which is bound by nanobind.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Final

_KERNELS: Final = "triton.runtime.jit"


class _JitMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        kernels: Any = getattr(sys.modules.get(_KERNELS), "JITFunction", cls)
        return kernels is not cls and isinstance(instance, kernels)


class JITFunction(metaclass=_JitMeta):
    """The class of Triton's kernels, whose instances are recognised once the program has imported Triton."""


if _KERNELS not in sys.modules:
    _module: Any = ModuleType(_KERNELS)
    _module.JITFunction = JITFunction
    sys.modules[_KERNELS] = _module
    try:
        from torch.utils.flop_counter import flop_registry, shape_wrapper
    finally:
        del sys.modules[_KERNELS]
else:
    from torch.utils.flop_counter import flop_registry, shape_wrapper

__all__ = ["flop_registry", "shape_wrapper"]
