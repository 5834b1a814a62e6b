"""Values of compiled code's results that follow from values that are known, such as the boxes of a detector's targets.

A program may decide by them. Uncompiled, each operator computes them beside its result on `meta`; compiled code has no
operators, so that the part of its graph that needs nothing else runs on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._python_dispatch import _disable_current_modes

from memsize.compile.devices import CPU, Move
from memsize.known_values.data_dependent import first_assumption
from memsize.known_values.values import ConstantState, constant_of, is_small, set_constant, state_of
from memsize.torch_internals.pytree import tensors_in


class _Part(NamedTuple):
    """The part of a graph that computes the results at `positions`, from its arguments at those in `needed`."""

    module: GraphModule
    positions: Sequence[int]
    needed: Sequence[int]


def with_known_results(compiled: Callable[..., Any], module: GraphModule) -> Callable[..., Any]:
    """The `compiled` code of `module`, a graph of Dynamo's, with the values of results where they are known."""
    part = _computable(module)
    if part is None:
        return compiled

    def call(*args: Any) -> Any:
        values = _values(part, args)
        results = compiled(*args)
        for position, value in values.items():
            if isinstance(result := results[position], Tensor) and result.shape == value.shape:
                set_constant(result, value, ConstantState(first_assumption(list(map(state_of, tensors_in(args))))))
        return results

    return call


def _computable(module: GraphModule) -> _Part | None:
    """The part of a graph whose values may be known: small tensors that are computed from small arguments."""
    small, dependent = set[Node](), set[Node]()
    for node in module.graph.nodes:
        inputs = node.all_input_nodes
        if node.op in ("get_attr", "output") or not small.issuperset(inputs) or not _is_small(node):
            continue
        if node.op != "placeholder" and node.is_impure():
            continue
        small.add(node)
        if node.op == "placeholder" or not dependent.isdisjoint(inputs):
            dependent.add(node)
    results: Any = module.graph.output_node().args[0]
    computed = [n for n, node in enumerate(results) if node in dependent and node.op != "placeholder"]
    if not computed:
        return None
    graph, copies = Graph(), dict[Node, Node]()
    graph.graph_copy(module.graph, copies)
    graph.output([copies[results[n]] for n in computed])
    graph.eliminate_dead_code()
    needed = [n for n, node in enumerate(graph.find_nodes(op="placeholder")) if node.users]
    return _Part(Move(CPU).graph(GraphModule(module, graph)), computed, needed)


def _is_small(node: Node) -> bool:
    tensors = tensors_in(node.meta.get("example_value"))
    return bool(tensors) and all(
        all(type(size) is int for size in tensor.shape) and is_small(tensor) and not tensor.requires_grad
        for tensor in tensors
    )


def _values(part: _Part, args: Sequence[Any]) -> dict[int, Tensor]:
    """The values of the results of `part`, by their positions; none where an argument's are not known."""
    constants = {n: constant_of(args[n]) if isinstance(args[n], Tensor) else None for n in part.needed}
    if any(constant is None for constant in constants.values()):
        return {}
    with _disable_current_modes(), torch.no_grad():
        copies = [constant.clone() if (constant := constants.get(n)) is not None else None for n in range(len(args))]
        return dict(zip(part.positions, Interpreter(part.module).run(*copies), strict=True))
