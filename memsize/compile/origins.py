"""The module, the line and the operation that each buffer of a compiled graph comes from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch.fx import Node

from memsize.processes.user_code import is_outside

_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_SEPARATORS = re.compile(r"\.__self__|\._modules\['|'\]\._modules\['|\['|'\]|\.")


class Origin(NamedTuple):
    """The operation that a buffer is the result of. `path` is its module's, from the module that was compiled."""

    op: str = ""
    path: str = ""
    line: tuple[str, int] | None = None


class Origins:
    """The origins of one graph's buffers, by number."""

    def __init__(self) -> None:
        self._numbers: dict[Origin, int] = {}
        self._order: dict[Node, int] = {}

    @staticmethod
    def of(graph: Any) -> Origins:
        """The origins of Inductor's `graph`."""
        while getattr(graph, "parent", None) is not None:
            graph = graph.parent
        origins: Origins = vars(graph).setdefault("memsize_origins", Origins())
        return origins

    def number(self, nodes: Iterable[Node], is_extern: bool = False) -> int:
        """The number of the origin of a buffer that is made of the results of `nodes`, the last of which counts; of a
        fused kernel's, the last whose module is known."""
        last = max(nodes, key=lambda n: (is_extern or bool(_modules(n)), self._position(n)), default=None)
        return self._numbers.setdefault(Origin() if last is None else origin_of(last), len(self._numbers))

    def listed(self) -> list[Origin]:
        """The origins in the order of their numbers."""
        return list(self._numbers)

    def _position(self, node: Node) -> int:
        if node not in self._order:
            self._order.update({other: index for index, other in enumerate(node.graph.nodes)})
        return self._order[node]


def origin_of(node: Node) -> Origin:
    """The operation, module and line of a node of a graph that AOTAutograd traced."""
    packet = getattr(node.target, "overloadpacket", node.target)
    innermost = next(reversed(_modules(node).values()), ("",))[0]
    return Origin(getattr(packet, "__name__", str(packet)), module_path(innermost), _line(node))


def _modules(node: Node) -> dict[str, Any]:
    """The modules that ran where the node was traced, or, in a backward, its forward."""
    return node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}


def module_path(text: str) -> str:
    """``blocks.0.mlp`` from Dynamo's ``L['self']._modules['blocks']._modules['0'].mlp``, whatever `self` is called.

    Since PyTorch 2.14 a module that was compiled in place is ``L['fn'].__self__``.
    """
    return ".".join([part for part in _SEPARATORS.split(text) if part][2:])


def _line(node: Node) -> tuple[str, int] | None:
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return next(((file, int(line)) for file, line in reversed(frames) if is_outside(file)), None)
