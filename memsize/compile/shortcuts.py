"""Shortcuts in Inductor's scheduler, which decides as it does without them.

Pairs of kernels that could be fused grow with the square of a model's depth, as each block reads the same tables of
rotary embeddings; and the symbols of sizes are looked up in every kernel, also of graphs that have none.

Source: torch/_inductor/scheduler.py (`Scheduler.can_fusion_increase_peak_memory`, `get_scheduler_node_symbol_uses`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch._inductor import scheduler
from torch._inductor.codegen import wrapper
from torch._inductor.scheduler import Scheduler
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from memsize.processes.patches import Patch, assigned, wrapping


def shortcuts() -> Iterator[Patch]:
    """The patches; without those of functions that the installed release doesn't have."""
    yield wrapping(Scheduler, "fuse_nodes", _fused)
    if hasattr(scheduler, "get_scheduler_node_symbol_uses"):
        yield wrapping(scheduler, "get_scheduler_node_symbol_uses", _symbols)


def _fused(original: Callable[..., Any], *args: Any) -> Any:
    """Describe a buffer's size once, not for each pair: it doesn't change while kernels are fused."""
    keys: dict[str, Any] = {}
    describe = wrapper.buffer_reuse_key

    def key(buffer: Any) -> Any:
        name = buffer.get_name()
        if name not in keys:
            keys[name] = describe(buffer)
        return keys[name]

    with assigned(wrapper, "buffer_reuse_key", key):
        return original(*args)


def _symbols(original: Callable[..., Any], node: Any) -> Any:
    return original(node) if V.graph.sizevars.shape_env.var_to_range else OrderedSet[Any]()
