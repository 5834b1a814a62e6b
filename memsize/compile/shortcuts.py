"""Shortcuts in Dynamo and in Inductor, which decide as they do without them.

Pairs of kernels that could be fused grow with the square of a model's depth, as each block reads the same tables of
rotary embeddings; the symbols of sizes are looked up in every kernel, also of graphs that have none; the rules of
dtypes are listed anew for every operation of a kernel; numbers are compared and expanded as expressions are; and source
files are tokenized, and origins sorted, for the text of logs and comments.

Source: torch/_inductor/scheduler.py (`Scheduler.can_fusion_increase_peak_memory`, `get_scheduler_node_symbol_uses`),
torch/_inductor/sizevars.py (`SizeVarAllocator`), torch/_inductor/dtype_propagation.py, torch/_dynamo/funcname_cache.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo import symbolic_convert
from torch._inductor import ir, scheduler
from torch._inductor.codegen import wrapper
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.scheduler import Scheduler
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from memsize.processes.patches import Patch, assigned, wrapping


def shortcuts() -> Iterator[Patch]:
    """The patches; without those of functions that the installed release doesn't have."""
    yield wrapping(Scheduler, "fuse_nodes", _fused)
    if "__new__" in vars(DtypePropagationOpsHandler):  # it makes one handler for all
        yield wrapping(DtypePropagationOpsHandler, "__init__", _listed_once)
    yield wrapping(SizeVarAllocator, "statically_known_equals", _equals)
    yield wrapping(SizeVarAllocator, "simplify", _simplified)
    yield ir.ExternKernel, "codegen_comment", lambda *_: None
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


def tracing_shortcuts() -> Iterator[Patch]:
    if hasattr(symbolic_convert, "get_funcname"):
        yield symbolic_convert, "get_funcname", lambda *_: None


def _listed_once(original: Callable[..., None], handler: Any) -> None:
    if not vars(handler):
        original(handler)


def _equals(original: Callable[..., bool], sizes: Any, left: Any, right: Any) -> bool:
    if _is_number(left) and _is_number(right):
        return bool(left == right)
    return original(sizes, left, right)


def _simplified(original: Callable[..., Any], sizes: Any, expression: Any) -> Any:
    return expression if getattr(expression, "is_Integer", False) else original(sizes, expression)


def _is_number(size: Any) -> bool:
    return type(size) is int or getattr(size, "is_Integer", False)


def _symbols(original: Callable[..., Any], node: Any) -> Any:
    return original(node) if V.graph.sizevars.shape_env.var_to_range else OrderedSet[Any]()
