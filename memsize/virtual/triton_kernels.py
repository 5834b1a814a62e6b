"""Triton kernels on a virtual GPU: their launches are left out.

A kernel writes to the tensors that it is given, and PyTorch's allocator hears nothing of it, so that all there is to do
is to forget what was known of their values. A kernel that takes scratch memory (`triton.set_allocator`) takes none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from memsize.known_values.values import state_of
from memsize.processes.patches import Patch
from memsize.torch_internals.pytree import arguments_in
from memsize.virtual.gpu_ledger import VirtualLedger

MODULE: Final = "triton.runtime.autotuner"
"""What imports the rest of Triton's launching, and is imported with it."""
_NOTE: Final = (
    "Triton kernels are not run: they write to tensors that are there, and take no memory of PyTorch's allocator"
)


def later(ledger: VirtualLedger) -> dict[str, Callable[[Any], Iterator[Patch]]]:
    """What is replaced in Triton once the program has imported it."""

    def left_out(kernel: Any, *args: Any, **options: Any) -> None:
        ledger.evaluator.notes[_NOTE] = None
        for tensor in arguments_in((args, options)):
            known = state_of(tensor)
            if known is not None:
                known.invalidate()

    def replacements(module: Any) -> Iterator[Patch]:
        yield module.Autotuner, "run", left_out
        yield sys.modules["triton.runtime.jit"].JITFunction, "run", left_out

    return {MODULE: replacements}
