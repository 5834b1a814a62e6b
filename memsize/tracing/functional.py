"""`torch.func` inside a forward: gradients as functions, as meta-learning takes them.

torch.func.grad, vjp, jacrev and hessian refuse to run where hooks for saved tensors are set, since hooks would have to
know of their wrapped tensors. The ledger's does, and it is the only one during a run that the user did not set: they
run, and what they keep for backward is counted like anything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memsize.torch_internals.thread_patches import Function, Override, ThreadPatches


@contextmanager
def functional_transforms_allowed() -> Iterator[None]:
    """While open, `torch.func` takes no offence at the hooks of this thread's run."""
    with _patches.active():
        yield


def of_the_same_level(tensor: torch.Tensor) -> torch.Tensor:
    """Return a stand-in for a saved `tensor`: itself, or a handle without the graph of the innermost transform.

    A node of that graph would otherwise keep its own output, and both would outlive the transform.
    """
    functional = torch._C._functorch
    if not functional.is_gradtrackingtensor(tensor):
        return tensor
    return functional._wrap_for_grad(functional.get_unwrapped(tensor), functional.maybe_get_level(tensor))


def _not_disabled(_: Function) -> Function:
    @contextmanager
    def disabled(error_message: str) -> Iterator[None]:
        yield

    return disabled


_patches = ThreadPatches(lambda: (Override(torch.autograd.graph, "disable_saved_tensors_hooks", _not_disabled),))
