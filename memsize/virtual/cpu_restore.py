"""What a block of code moves to a virtual GPU comes back when the block is over: its values are the user's own.

``model.cuda()`` moves a module in place, and a stand-in holds no values: without this, the weights of a model that was
there before the block would be lost with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memsize.processes.patches import Patch
from memsize.torch_internals.meta import is_meta


class Kept:
    """The tensors of the CPU that became stand-ins while this was open."""

    def __init__(self) -> None:
        self._swapped: list[tuple[Tensor, Tensor]] = []
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []

    def replacements(self) -> Iterator[Patch]:
        """What is replaced to see tensors go."""
        yield torch._C, "_swap_tensor_impl", self._swapping(torch._C._swap_tensor_impl)
        yield nn.Module, "_apply", self._applying(nn.Module._apply)

    def _swapping(self, original: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
        def swap(one: Tensor, other: Tensor) -> None:
            original(one, other)
            if is_meta(one) and not is_meta(other):
                self._swapped.append((one, other))

        return swap

    def _applying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            for name, buffer in module._buffers.items():
                if buffer is not None and not is_meta(buffer):
                    self._buffers.append((module, name, buffer))
            return original(module, *args, **kwargs)

        return apply

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put everything back at the end."""
        try:
            yield
        finally:
            for one, other in reversed(self._swapped):
                if is_meta(one):
                    torch._C._swap_tensor_impl(one, other)
            for module, name, buffer in reversed(self._buffers):
                now = module._buffers.get(name)
                if now is not None and is_meta(now):
                    module._buffers[name] = buffer
