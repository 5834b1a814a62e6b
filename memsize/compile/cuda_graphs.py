"""CUDA graphs of compiled code: the private pool that a graph's inputs, results and everything between them share.

The first call of a graph warms up, the second is recorded, later ones are replayed. All three take memory of one pool,
which other code never gets back. A recording, and each replay, has its inputs copied into the pool, but for parameters
and for what another graph made. When a new iteration begins, what graphs made in the one before is overwritten, and
counts as freed.

PyTorch's counter `memory_allocated` doesn't see replays; here they take again what was recorded.

Source: torch/_inductor/cudagraph_trees.py (`CUDAGraphTreeManager._run`, `CUDAWarmupNode`, `CUDAGraphNode`),
torch/cuda/graphs.py (`graph.__enter__`), torch/_inductor/output_code.py (`cudagraph_partition_post_compile`).
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch._dynamo.mutation_guard import GenerationTracker
from torch._inductor import compile_fx, output_code
from torch.utils._python_dispatch import _disable_current_modes

from memsize.compile.generated import Call, running_ledger
from memsize.processes.patches import Patch
from memsize.torch_internals.isolation import iteration_marks
from memsize.tracing.ledger import Ledger

State = Literal["warm up", "record", "replay"]


class CudaGraphs:
    """The graphs of one run, which share a pool. Inductor decides what becomes a graph."""

    def __init__(self) -> None:
        self._results: list[weakref.ref[torch.Tensor]] = []
        """What graphs made in this iteration."""
        self._generation: int | None = None
        self._awaits_backward = False
        self._is_warming_up = False
        """Whether a graph was warmed up in this iteration: no other is recorded before the next one then."""
        self._has_pool = False

    def patches(self) -> Iterator[Patch]:
        """Make Inductor hand what it would record to `captured`."""
        yield compile_fx, "cudagraphify", self.captured
        yield output_code, "maybe_handle_backward_generation", self._uncaptured

    def captured(
        self,
        model: Call,
        static_input_idxs: Sequence[int] = (),
        *,
        is_backward: bool = False,
        is_inference: bool = False,
        mutated_input_idxs: Sequence[int] = (),
        **_: Any,
    ) -> Call:
        """Return `model` with its memory in the pool. Each size of a dynamic graph is one of its own."""
        static, mutated = frozenset(static_input_idxs), frozenset(mutated_input_idxs)
        calls = defaultdict[tuple[int, ...], Counter[str]](Counter)

        def run(args: list[Any]) -> Any:
            ledger = running_ledger()
            if ledger is None:
                return model(args)
            self._begin_iteration(ledger)
            copied = [i for i, arg in enumerate(args) if i not in static and _is_outside(ledger, arg)]
            if not mutated.isdisjoint(copied):
                return model(args)  # a graph would change the copy
            calls_of_size = calls[tuple(arg for arg in args if isinstance(arg, int))]
            state = self._next_state(calls_of_size)
            calls_of_size[state] += 1
            with self._capturing(ledger, state):
                if state != "warm up":
                    _copy_into_pool(ledger, args, copied)
                results = model(args)
            self._results += [weakref.ref(t) for t in results if isinstance(t, Tensor) and ledger.is_pooled(t)]
            self._awaits_backward = not is_backward and (self._awaits_backward or not is_inference)
            return results

        return run

    def _next_state(self, calls: Counter[str]) -> State:
        self._is_warming_up = self._is_warming_up or not calls
        if self._is_warming_up:
            return "warm up"
        return "replay" if calls["record"] else "record"

    @contextmanager
    def _capturing(self, ledger: Ledger, state: State) -> Iterator[None]:
        if state != "replay":
            ledger.free_workspaces()
        if state == "record" or not self._has_pool:  # the pool is made by an empty recording
            ledger.empty_cache()
        self._has_pool = True
        with ledger.private_pool(), ledger.workspaces_apart():
            yield

    def _begin_iteration(self, ledger: Ledger) -> None:
        """Free what the graphs of the iteration before made, if a new one has begun."""
        marks = iteration_marks()
        generation = marks or GenerationTracker.generation
        if generation == self._generation or (self._awaits_backward and not marks):
            return
        self._generation, self._is_warming_up = generation, False
        for result in self._results:
            if (tensor := result()) is not None:
                ledger.end(tensor)
        self._results.clear()

    def _uncaptured(self, graph: Any, _device: Any) -> None:
        """A backward that is no graph lets the next iteration begin all the same."""
        if not graph.fx_kwargs["is_backward"]:
            return
        call = graph.current_callable

        def run(args: list[Any]) -> Any:
            self._awaits_backward = False
            return call(args)

        graph.current_callable = run


def _is_outside(ledger: Ledger, argument: Any) -> bool:
    return isinstance(argument, Tensor) and not ledger.is_pooled(argument)


def _copy_into_pool(ledger: Ledger, args: list[Any], copied: Sequence[int]) -> None:
    """Replace arguments by copies; the originals are freed once all are copied."""
    copies = {}
    for i in copied:
        with _disable_current_modes():
            copies[i] = torch.empty_strided(args[i].shape, args[i].stride(), dtype=args[i].dtype, device="meta")
        ledger.allocated(copies[i], "copy_")
    for i, copy in copies.items():
        args[i] = copy
