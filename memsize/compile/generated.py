"""The code that Inductor generated, run with tensors that have no memory.

The wrapper's own Python allocates, reuses and deletes, in its order; calls of its kernels are not part of it. Calls of
ATen's kernels run as those of any other code do, and take what they take.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from memsize.compile.origins import Origin, Origins
from memsize.processes.simulation import current
from memsize.torch_internals.dispatch_key import suspended
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
    namespace.update(here=region.here, extern_kernels=_ExternKernels(), **constants)
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
