"""The dispatch key that nothing else in PyTorch uses, and how a thread switches it on and off.

The kernels of `memsize.cuda` are registered for this key: they intercept an op before autograd records it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

Kernel = Callable[..., Any]

KEY: torch._C.DispatchKey = torch._C.DispatchKey.__members__["AutocastIPU"]
NAMESPACE = "aten"
exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
include = torch._C._dispatch_tls_set_dispatch_key_included
is_included = torch._C._dispatch_tls_is_dispatch_key_included
is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


class _KeyExcluded:
    """Excludes the key while open. It needs no state, as a kernel runs only where the key is not excluded."""

    __slots__ = ()

    def __enter__(self) -> None:
        exclude(KEY, True)

    def __exit__(self, *_: object) -> None:
        exclude(KEY, False)


key_excluded: Final = _KeyExcluded()
"""Inside a kernel of the key: the ops that it calls go on to autograd and do not come back to the key."""


class suspended:  # noqa: N801 - reads as the context manager that it is
    """Call PyTorch without the kernels of the key: below autograd, CUDA's choices have been made already."""

    __slots__ = ("_was_excluded",)

    def __enter__(self) -> None:
        self._was_excluded = is_excluded(KEY)
        exclude(KEY, True)

    def __exit__(self, *_: object) -> None:
        exclude(KEY, self._was_excluded)


def overload(name: str) -> Any:
    """The callable of an operator (``"softmax.int"``, ``"torchvision::nms"``), without its Python wrapper's checks."""
    namespace, _, own = name.rpartition("::")
    packet, _, variant = own.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace or NAMESPACE), packet), variant or "default")._op
