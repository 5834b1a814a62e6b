"""Autograd's engine: the gradients that it returns, and its queue after a backward that failed, as a GPU leaves it.

A GPU's nodes wait in the queue of a thread of its own, which drops those of a backward that has failed. Nodes of the
CPU, which stand-ins take, wait in the queue of the thread that called: they keep their graph, and gradients on their
way, until a later backward takes them out (torch/csrc/autograd/engine.cpp).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Final

import torch

from memsize.processes.patches import Patch, wrapping

_INPUTS: Final = 4
"""The position of the tensors to differentiate by among the arguments of the engine."""


class _First(threading.local):
    """A result of a thread's first autograd node. The queue takes out the node with the highest number first."""

    def __init__(self) -> None:
        with torch.enable_grad():
            self.result = torch.zeros((), device="cpu", requires_grad=True).neg()


class BackwardQueue:
    """The queues of all threads; `aside` is the region in which autograd may run without being recorded.

    `returned` is called with a leaf and its gradient as soon as the engine has one to return.
    """

    def __init__(
        self,
        aside: Callable[[], AbstractContextManager[None]],
        returned: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        self._aside = aside
        self._returned = returned
        self._first = _First()

    def begin_thread(self) -> None:
        """Make the first node of this thread."""
        assert self._first.result.grad_fn is not None

    def replacements(self) -> Iterator[Patch]:
        """Patch the function with which PyTorch starts autograd's engine."""
        yield wrapping(torch.autograd, "_engine_run_backward", self._run_backward)

    def _run_backward(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        inputs = () if options.get("accumulate_grad") else args[_INPUTS]
        try:
            with ExitStack() as hooks:
                for leaf in filter(_takes_hooks, inputs):
                    hooks.callback(leaf.register_hook(partial(self._returned, leaf)).remove)
                return original(*args, **options)
        except torch.OutOfMemoryError:
            if torch._C._current_graph_task_id() == -1:
                # A backward whose only node is the last that the queue takes out empties it.
                with self._aside():
                    ones = (torch.ones((), device="cpu"),)
                    first = (self._first.result,)
                    original(first, ones, True, False, (), allow_unreachable=True, accumulate_grad=True)
            raise


def _takes_hooks(value: Any) -> bool:
    """Whether `value` is a leaf that requires gradients, and no edge of the graph."""
    return isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad
