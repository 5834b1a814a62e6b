"""CUDA graphs and private memory pools: what would be captured runs at once, from the ordinary pool.

Source: torch/cuda/graphs.py and memory.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from memsize.processes.patches import Patch

_EAGER = (
    "CUDA graphs are not captured: what they would replay runs once, and memory that a graph keeps for itself until it "
    "is gone is not in these figures"
)
_numbers = itertools.count(1)


def replacements(note: Callable[[str], None]) -> Iterator[Patch]:
    """What `torch.cuda` makes graphs and pools with; `note` is called where the program captures one."""
    cuda: Any = torch.cuda

    class CUDAGraph:
        """A graph whose capture is an ordinary run, and whose replay does nothing: its outputs are there."""

        def __init__(self, keep_graph: bool = False) -> None:
            self._pool = _handle()

        def capture_begin(self, *args: Any, **options: Any) -> None:
            note(_EAGER)

        def pool(self) -> Any:
            return self._pool

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *args, **kwargs: None  # capture_end, instantiate, replay, reset, debug_dump …

    class MemPool:
        """A pool that takes nothing for itself."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.id = _handle()

        def use_count(self) -> int:
            return 1

        def snapshot(self, include_traces: bool = True) -> list[Any]:
            return []

    for owner in (cuda, cuda.graphs):
        yield owner, "CUDAGraph", CUDAGraph
        yield owner, "graph_pool_handle", _handle
    yield cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False
    for owner in (cuda, cuda.memory):
        yield owner, "MemPool", MemPool
        yield owner, "use_mem_pool", _in_pool


def _handle() -> tuple[int, int]:
    return 0, next(_numbers)


def _in_pool(pool: Any, device: Any = None) -> AbstractContextManager[None]:
    return nullcontext()
