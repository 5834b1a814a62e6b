"""`torch.jit.trace`, which runs a program's code and records its ops as a graph.

While it records, `tensor.shape` holds tensors in the place of numbers, so that the graph knows where they come from.
Code that is none of the program's runs `untraced`: it wants numbers, and has no business in the graph.

Source: torch/csrc/jit/frontend/tracer.cpp, aten/src/ATen/TracerMode.h (2.11 to 2.14).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch

is_tracing: Final[Any] = torch._C._get_tracing_state
"""Whether this thread records a graph: the graph's state, or None."""
_set: Any = torch._C._set_tracing_state  # type: ignore[attr-defined]
_convolution: Any = torch._convolution
_OF_CONVOLUTION: Final = 9
"""So many arguments of `_convolution` are those of `convolution`."""
_TRACER: Any = torch._C._parse_dispatch_key("Tracer")
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded


class _Suspended(threading.local):
    """The states of graphs that are not recorded for the time being, the innermost last."""

    def __init__(self) -> None:
        self.states: list[Any] = []


_suspended = _Suspended()


@contextmanager
def untraced() -> Iterator[None]:
    """While open, nothing is recorded in this thread."""
    state = is_tracing()
    _suspended.states.append(state)
    try:
        if state is None:
            yield
        else:
            with _recording_allowed():
                _set(None)
                try:
                    yield
                finally:
                    _set(state)
    finally:
        _suspended.states.pop()


@contextmanager
def traced_again() -> Iterator[None]:
    """While open within `untraced`, the program's own code is recorded after all, if it was before."""
    state = _suspended.states[-1] if _suspended.states else None
    if state is None:
        yield
    else:
        _set(state)
        try:
            yield
        finally:
            _set(None)


def record_convolution(args: Any) -> torch.Tensor:
    """Run `aten.convolution`, and record `_convolution`, as PyTorch's kernel would behind the dispatch mode."""
    cudnn: Any = torch.backends.cudnn
    options = (cudnn.benchmark, cudnn.deterministic, cudnn.enabled, cudnn.allow_tf32)
    with _recording_allowed(), ExitStack() as stack:
        # PyTorch 2.13 brought a kernel for `meta` (torch/_meta_registrations.py).
        if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_convolution", "Meta"):
            library = stack.enter_context(torch.library._scoped_library("aten", "IMPL", "Meta"))
            library.impl("_convolution", lambda *args: torch.ops.aten.convolution.default(*args[:_OF_CONVOLUTION]))
        recorded: torch.Tensor = _convolution(*args, *options)
    return recorded


def record_as(tensor: torch.Tensor, recorded: torch.Tensor) -> None:
    """Let `tensor` stand in the graph for what is recorded as `recorded`."""
    torch._C._set_value_trace(tensor, torch._C._get_value_trace(recorded))  # type: ignore[attr-defined]


@contextmanager
def _recording_allowed() -> Iterator[None]:
    """While open, the dispatch key that records is not excluded, as it is inside an op; nor could it be switched."""
    excluded = _is_excluded(_TRACER)
    _exclude(_TRACER, False)
    try:
        yield
    finally:
        _exclude(_TRACER, excluded)
