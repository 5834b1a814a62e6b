"""The bodies of Inductor's kernels, each kind of which is generated once in a graph.

Generating a body tells which buffers a kernel reads from memory, which it stores, and which have to outlive it. Kernels
that differ by the names of their buffers alone, as those of repeated layers do, have this in common.

Source: torch/_inductor/codegen/simd.py (`codegen_node_schedule_with_kernel`), torch/_inductor/codegen/common.py
(`CSEProxy`, `KernelArgs`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from torch._inductor.scheduler import SchedulerNode
from torch._inductor.virtualized import V

_INNER: Final = frozenset({"scan", "sort", "inline_asm_elementwise"})
"""Operations with functions inside them, or with effects beyond reads and writes."""


class _Accesses(NamedTuple):
    """The buffers of a kernel's arguments and stores, by their positions among the names of its nodes."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sizes: tuple[Any, ...]
    stored: tuple[int, ...]
    needed: tuple[int, ...]


class KernelBody:
    def __init__(self, kernel: Any, nodes: Sequence[Any]) -> None:
        self._kernel = kernel
        self._nodes = nodes
        self._left = sum(isinstance(node, SchedulerNode) for node in nodes)
        self._key: Hashable = None
        self._names: dict[str, int] = {}
        self._is_begun = self._is_replayed = False

    def generate(self, original: Callable[..., None], node: SchedulerNode, *args: Any) -> None:
        """Generate the part of one node, unless the kernel is like one before."""
        generated: dict[Hashable, _Accesses] = vars(V.graph).setdefault("memsize_kernel_bodies", {})
        if not self._is_begun:
            self._is_begun = True
            self._key = self._likeness()
            if self._key is not None and (accesses := generated.get(self._key)):
                self._is_replayed = True
                self._replay(accesses)
        self._left -= 1
        if self._is_replayed:
            return
        original(node, *args)
        if not self._left and self._key is not None and (accesses := self._accesses()):
            generated[self._key] = accesses

    def _likeness(self) -> Hashable:
        """Return a key that kernels with the same accesses share; None where the accesses may follow from more."""
        graph, kernel = V.graph, self._kernel
        parts: list[Hashable] = []
        for node in self._nodes:
            if not isinstance(node, SchedulerNode):
                parts.append(node)
                continue
            if any(output.get_mutations() for output in node.get_outputs()):
                return None
            body = node._body
            if getattr(body, "has_partial_accumulate", False) or not _INNER.isdisjoint(body.op_counts):
                return None
            for access in (*node.read_writes.reads, *node.read_writes.writes):
                self._names.setdefault(access.name, len(self._names))
            blocks = (body.root_block, *body.subblocks.values())
            operations = tuple(part for block in blocks for part in self._operations(block))
            parts.append((body.sizes, tuple(body.indexing_exprs.values()), operations))
        if any(name in graph.scheduler.mutation_real_name for name in self._names):
            return None
        removed = tuple(name in graph.removed_buffers for name in self._names)
        in_place = tuple(
            (self._names.get(name), tuple(map(self._names.get, buffer.other_names)))
            for name, buffer in kernel.args.inplace_buffers.items()
        )
        sizes = tuple(kernel.numels.items())
        key = (sizes, kernel.persistent_reduction, kernel.cooperative_reduction, removed, in_place, *parts)
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def _operations(self, block: Any) -> Iterator[Hashable]:
        numbers: dict[Any, int] = {}

        def part(value: Any) -> Hashable:
            if isinstance(value, str):
                return self._names.get(value, value)
            if isinstance(value, (tuple, list)):
                return tuple(map(part, value))
            return ("result", numbers[value]) if value in numbers else (type(value), value)

        for node in block.graph.nodes:
            yield node.op, node.target, part(node.args), tuple((k, part(v)) for k, v in node.kwargs.items())
            numbers[node] = len(numbers)

    def _accesses(self) -> _Accesses | None:
        kernel, args = self._kernel, self._kernel.args
        named = (args.input_buffers, args.output_buffers, kernel.store_buffer_names, kernel.must_keep_buffers)
        if args.workspace_args or any(name not in self._names for names in named for name in names):
            return None
        inputs, outputs, stored, needed = (tuple(self._names[name] for name in names) for names in named)
        return _Accesses(inputs, outputs, tuple(args.sizevars), stored, needed)

    def _replay(self, accesses: _Accesses) -> None:
        kernel, names = self._kernel, list(self._names)
        for number in accesses.inputs:
            kernel.args.input(names[number])
        for number in accesses.outputs:
            kernel.args.output(names[number])
        for size in accesses.sizes:
            kernel.args.size(size)
        kernel.store_buffer_names.update(names[number] for number in accesses.stored)
        kernel.must_keep_buffers.update(names[number] for number in accesses.needed)


def generating(original: Callable[..., None], node: SchedulerNode, *args: Any) -> None:
    """Generate the part of a kernel's body that is of one node."""
    body: KernelBody | None = getattr(V.kernel, "planned_body", None)
    if body is None:
        original(node, *args)
    else:
        body.generate(original, node, *args)
