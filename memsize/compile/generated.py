"""The code that Inductor generated, run with tensors that have no memory.

The wrapper's own Python allocates, reuses and deletes, in its order; calls of its kernels are not part of it. Calls of
ATen's kernels run as those of any other code do, and take what they take. `Origins` has the module, the line and the
operation that each buffer comes from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch.fx import Node

from memsize.processes.simulation import current
from memsize.processes.user_code import is_outside
from memsize.torch_internals.meta import suspended
from memsize.tracing.control_flow import FIRST_BRANCH, depends_on_data
from memsize.tracing.ledger import Ledger

Call = Callable[[list[Any]], Any]
_ALLOCATIONS: Final = "cpu cpu_pinned cuda xpu mtia"


def loaded(source: str, origins: Origins, constants: dict[str, Any], forward: bool | None) -> tuple[Call, Any]:
    """Load generated `source`; return its function, which takes a list of arguments and empties it, and what calls the
    parts of it, if it has any.

    `forward` says whether a forward can be differentiated; it is None of a backward.
    """
    namespace: dict[str, Any] = {"__name__": "memsize.compiled"}
    exec(compile(source, "<compiled>", "exec"), namespace)
    listed = origins.listed()
    region = _Region(listed, forward if any(origin.path for origin in listed) else None)
    for device in _ALLOCATIONS.split():
        namespace[f"empty_strided_{device}"] = region.allocate
    namespace.update(here=region.here, takes_first=_takes_first, extern_kernels=_ExternKernels(), **constants)
    return partial(region.run, namespace["call"]), namespace.get("runner")


class _Region:
    """Compiled code that runs: allocations belong to the modules and lines of their origins."""

    def __init__(self, origins: list[Origin], forward: bool | None) -> None:
        self._origins = origins
        self._forward = forward
        self._op = ""

    def run(self, call: Call, args: list[Any]) -> Any:
        ledger = running_ledger()
        with suspended():
            if ledger is None:
                return call(args)
            with ledger.inside_compiled(args, self._forward):
                return call(args)

    def here(self, number: int) -> None:
        """Attribute all following allocations to the origin of this number."""
        origin, ledger = self._origins[number], running_ledger()
        self._op = origin.op
        if ledger is not None:
            ledger.move_to(origin.path, origin.line)

    def allocate(self, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        ledger = running_ledger()
        with torch._C._DisableTorchDispatch():
            tensor = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        if ledger is not None:
            ledger.allocated(tensor, self._op)
        return tensor


def _takes_first(predicate: Any) -> Any:
    """Whether `torch.cond` takes its first branch: also where that depends on data."""
    if not depends_on_data(predicate):
        return predicate
    if ledger := running_ledger():
        ledger.evaluator.notes[FIRST_BRANCH] = None
    return True


class _ExternKernels:
    """ATen's kernels that write into a buffer of the plan (``extern_kernels.mm(a, b, out=buf3)``)."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        packet = getattr(torch.ops.aten, name, None)
        if packet is None:
            raise NotImplementedError(f"compiled code calls {name}, whose memory is unknown")
        return partial(_called, packet)


def _called(packet: Any, *args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> Any:
    if out is None:
        return packet(*args, **kwargs)
    if ledger := running_ledger():
        ledger.launched(packet.default, args, kwargs)
    return out


def running_ledger() -> Ledger | None:
    """The ledger of the run that this thread is in."""
    simulation = current()
    return simulation.get(Ledger) if simulation else None


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
        fused kernel's, the last that computes something in the code that was compiled.
        """
        last = max(nodes, key=lambda n: (is_extern or _computes(n), self._position(n)), default=None)
        return self._numbers.setdefault(Origin() if last is None else origin_of(last), len(self._numbers))

    def listed(self) -> list[Origin]:
        """The origins in the order of their numbers."""
        return list(self._numbers)

    def _position(self, node: Node) -> int:
        if node not in self._order:
            self._order.update({other: index for index, other in enumerate(node.graph.nodes)})
        return self._order[node]


def origin_of(node: Node) -> Origin:
    """The operation, module and line of a node of a graph that AOTAutograd traced. A buffer of a parameter's or an
    input's values is a copy in the layout that an operation wants.
    """
    if node.op == "placeholder":
        user = next(iter(node.users), None)
        return Origin("clone") if user is None else origin_of(user)._replace(op="clone")
    packet = getattr(node.target, "overloadpacket", node.target)
    innermost = next(reversed(_modules(node).values()), ("",))[0]
    return Origin(getattr(packet, "__name__", str(packet)), module_path(innermost), _line(node))


def _computes(node: Node) -> bool:
    """Whether `node` computes something where its module or line is known: Inductor's passes add others."""
    schema = getattr(node.target, "_schema", None)
    is_view = schema is not None and any(result.alias_info for result in schema.returns)
    return not is_view and bool(_modules(node) or node.meta.get("stack_trace"))


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
