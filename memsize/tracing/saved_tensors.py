"""Handles that autograd holds in the place of the tensors that it saves for backward, so that we know what it keeps
alive.

torch.func.grad, vjp, jacrev and hessian, by which meta-learning takes gradients inside a forward, refuse to run where
hooks for saved tensors are set, since hooks would have to know of their wrapped tensors. The ledger's does, and it is
the only one during a run that the user did not set: they run, and what they keep for backward is counted like anything
else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from memsize.known_values.propagation import carry_over
from memsize.model.tensor_storage import PLAIN_TYPES
from memsize.processes.simulation import Override, ThreadPatches


class SavedTensor:
    """A handle that autograd holds in the place of a tensor that it saves for backward, and releases with its graph.

    `tensor` is the saved one without its graph: a graph that held its own result would never be freed. `storages` are
    the indexes of the storages that it keeps alive, without parameters and buffers, and `layer` and `line` are where it
    was saved.
    """

    __slots__ = ("__weakref__", "layer", "line", "storages", "tensor")

    def __init__(self, tensor: torch.Tensor, storages: Sequence[int], layer: int, line: int) -> None:
        self.tensor = tensor
        self.storages = storages
        self.layer = layer
        self.line = line


def saving(save: Callable[[torch.Tensor], SavedTensor]) -> saved_tensors_hooks:
    """The region in which autograd holds what `save` returns in the place of each tensor.

    Its hooks are no user's: a selective checkpoint (`torch.utils.checkpoint`, 2.14), which warns of those that tensors
    pass by, looks on as from PyTorch's own.
    """
    hook = partial(save)
    vars(hook).update(_checkpoint_internal=True, _user_hooks=None)
    return saved_tensors_hooks(hook, attrgetter("tensor"))


def without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` without its graph: itself where no graph made it, so that autograd sees a later ``.data = …``."""
    functional = torch._C._functorch
    if functional.is_gradtrackingtensor(tensor):
        # A handle without the innermost transform's graph, whose nodes would keep their own outputs.
        return functional._wrap_for_grad(functional.get_unwrapped(tensor), functional.maybe_get_level(tensor))
    if tensor.is_leaf:
        return tensor
    if type(tensor) not in PLAIN_TYPES:
        return tensor.detach()
    with torch._C._DisableTorchDispatch():
        alias = tensor.data  # not detach(), which would cut the outer graphs of torch.func's transforms too
    return carry_over(tensor, alias)


def read_saved(ctx: torch.autograd.function.BackwardCFunction) -> tuple[torch.Tensor | None, ...]:
    """`ctx.saved_tensors` as it is without hooks, where parameters are the program's own, with their attributes."""
    return tuple(map(_own_leaf, _saved_tensors.__get__(ctx)))


def _own_leaf(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or not tensor.is_leaf or not tensor.requires_grad:
        return tensor
    with torch.enable_grad():
        view = tensor.view_as(tensor)
    accumulates: Any = None if view.grad_fn is None else view.grad_fn.next_functions[0][0]
    return getattr(accumulates, "variable", tensor)


_saved_tensors: Any = vars(torch._C._FunctionBase)["saved_tensors"]


# -- torch.func -------------------------------------------------------------------------------------------------------


@contextmanager
def functional_transforms_allowed() -> Iterator[None]:
    """While open, `torch.func` takes no offence at the hooks of this thread's run."""
    with _patches.active():
        yield


def functional_transforms_suspended() -> AbstractContextManager[None]:
    """A region in which `torch.func` is the original, as Dynamo knows it."""
    return _patches.suspended()


_allowed = Override(torch.autograd.graph, "disable_saved_tensors_hooks", lambda _, error_message: nullcontext())
_patches = ThreadPatches(lambda: (_allowed,))
