"""What stands on the dispatch key: a kernel for every operator of which CUDA decides something.

They are put there once per process, on first use; those of a library's operators once the library is imported.

Source: torch/library.py (kernels in Python).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from memsize.semantics import attention, autocast, dropout, encoder, norms, onehot, rnn, softmax
from memsize.semantics.key import KEY, NAMESPACE, Kernel

_lock = threading.Lock()
_libraries: list[Any] = []
_registered: set[str] = set()
"""Names of the operators that have their kernel on the key."""


def register_kernels() -> None:
    """Put the kernels on the key that aren't."""
    with _lock:
        if not _libraries:
            fallback = torch.library.Library("_", "IMPL", KEY.name)
            fallback.fallback(torch.library.fallthrough_kernel, KEY.name)
            _libraries.append(fallback)
        elif not any(name not in _registered and torch._C._dispatch_has_kernel(name) for name in autocast.LATE):
            return
        _register({name: kernel for name, kernel in _kernels().items() if name not in _registered})


def _kernels() -> Mapping[str, Kernel]:
    """Every kernel by operator name. What autocast wraps is decided on after its casts; attention does both itself."""
    decided = {**dropout.kernels(), **norms.kernels(), **onehot.kernels(), **rnn.kernels(), **softmax.kernels()}
    return {**decided, **autocast.kernels(decided), **attention.kernels(), **encoder.kernels()}


def _register(kernels: Mapping[str, Kernel]) -> None:
    """Put `kernels` on the key; the libraries that hold them must stay alive."""
    libraries: dict[str, torch.library.Library] = {}
    for name, kernel in kernels.items():
        namespace, _, own = name.rpartition("::")
        namespace = namespace or NAMESPACE
        if namespace not in libraries:
            libraries[namespace] = torch.library.Library(namespace, "IMPL", KEY.name)
        libraries[namespace].impl(own, kernel)
        _registered.add(name)
    _libraries.extend(libraries.values())
