"""The memory in which Inductor's max-autotune measures kernels: copies of a product's operands, its result, a buffer.

A product is measured when its graph is compiled: each kind once, and not at all where a cache on disk has its times.

Source: torch/_inductor/select_algorithm.py (`AlgorithmSelectorCache.get_inputs`), torch/_inductor/runtime/
benchmarking.py (`InductorBenchmarker.benchmark_gpu`), torch/_inductor/utils.py (`is_big_gpu`).
"""

from __future__ import annotations

from typing import Any, Final

from torch._inductor import ir
from torch._inductor.graph import GraphLowering

_MEASURED: Final = frozenset(f"extern_kernels.{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution"))
"""The products for which Triton has templates too."""
LEAST_MULTIPROCESSORS: Final = 68
"""A GPU with fewer is not measured."""


def most_measured(graph: GraphLowering, flushed: int) -> int:
    """The most bytes that measuring one product of `graph` takes, with a buffer of so many bytes that flushes the L2
    cache; 0 where no product is measured.
    """
    products = [op for op in graph.operations if getattr(op, "python_kernel_name", None) in _MEASURED]
    return max((flushed + _operands(product) for product in products), default=0)


def _operands(product: Any) -> int:
    # Of a view, all of the buffer that it is of is copied.
    bases = (node.unwrap_view() if isinstance(node, ir.BaseView) else node for node in product.inputs)
    return sum(map(_bytes, (*{base.get_name(): base for base in bases}.values(), product)))


def _bytes(buffer: Any) -> int:
    elements = buffer.get_layout().storage_size()
    is_known = isinstance(elements, int) or elements.is_Integer
    return int(elements) * buffer.get_dtype().itemsize if is_known else 0
