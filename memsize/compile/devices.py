"""Graphs of fake tensors moved from one device to another, and the properties of the GPUs that they move to.

The backward of a traced graph needs autograd's engine, which asks the driver for a stream where tensors are on CUDA. So
graphs are traced with tensors on the CPU and are moved to CUDA afterwards, before they are lowered. Inductor decides by
the properties of the largest card of a compute capability (source: NVIDIA's data sheets of V100, T4, A100, A10, L40,
H100 and B200).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass, transform_subclass

from memsize.device.cards import DeviceProperties, threads_per_multiprocessor

CUDA: Final = torch.device("cuda", 0)
META: Final = torch.device("meta")
CPU: Final = torch.device("cpu")
_VALUES: Final = ("val", "example_value")
"""The names under which a node keeps its fake results."""
_CONSTANT: Final = torch.ops.aten.lift_fresh_copy.default


class Move:
    """Moves what is not on `device` there. A tensor that occurs several times is moved once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: dict[int, tuple[FakeTensor, FakeTensor]] = {}
        """By the id of the original, which is kept alive."""

    def value(self, value: Any) -> Any:
        """Move a tensor, a device, or those inside a container or a wrapper."""
        if isinstance(value, FakeTensor):
            return self._tensor(value)
        if is_traceable_wrapper_subclass(value):
            wrapper: Any = value
            moved = transform_subclass(wrapper, lambda _, inner: self.value(inner))
            return moved.requires_grad_(wrapper.requires_grad)
        if isinstance(value, torch.device):
            return self._device
        if isinstance(value, (list, tuple)):
            items = [self.value(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    def result(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Move what `function` returns."""
        return self.value(function(*args, **options))

    def graph(self, module: GraphModule, *, is_propagated: bool = False) -> GraphModule:
        """Move the fake results and the devices named in `module`, in place, and in the graphs inside it.

        Where fakes are propagated from its inputs anyway, only those of the inputs are moved.
        """
        for part in module.modules():
            if isinstance(part, GraphModule):
                is_renamed = False
                for node in list(part.graph.nodes):
                    if self._moves(node, is_propagated and part is module):
                        self._values(node)
                    is_renamed |= self._renames(node)
                    if is_propagated and node.target is _CONSTANT:
                        self._copies(node)
                if is_renamed:
                    part.recompile()
        return module

    def _moves(self, node: Node, is_propagated: bool) -> bool:
        return not is_propagated or node.op != "call_function"

    def _values(self, node: Node) -> None:
        for name in _VALUES:
            if name in node.meta:
                node.meta[name] = self.value(node.meta[name])

    def _renames(self, node: Node) -> bool:
        """Move the devices that `node` names; return whether it names any."""
        if node.op == "call_method" and node.target == "cuda":
            node.target, node.args, node.kwargs = "to", (node.args[0], self._device), {}
        is_moving = node.op == "call_method" and node.target == "to"
        if not any(_names_device(value) for value in (*node.args, *node.kwargs.values())):
            return False
        node.args = tuple(self._device if _names_device(a, is_moving) else a for a in node.args)
        node.kwargs = {k: self._device if _names_device(v, k == "device") else v for k, v in node.kwargs.items()}
        return True

    def _copies(self, constant: Node) -> None:
        """Copy a constant, whose values a trace holds on the CPU: where that is traced too, it omits the copy."""
        with constant.graph.inserting_after(constant):
            copy = constant.graph.call_function(torch.ops.prims.device_put.default, (constant, self._device))
        copy.meta = dict(constant.meta)
        constant.replace_all_uses_with(copy, lambda user: user is not copy)

    def _tensor(self, tensor: FakeTensor) -> FakeTensor:
        if tensor.device == self._device:
            return tensor
        if id(tensor) not in self._moved:
            self._moved[id(tensor)] = tensor, fake_like(tensor, tensor.fake_mode, self._device)
        return self._moved[id(tensor)][1]


def _names_device(value: Any, also_text: bool = True) -> bool:
    """Whether an argument of a node is a device, or its name, as in ``x.to("cuda")``."""
    is_name = also_text and isinstance(value, str) and value.partition(":")[0] in ("cuda", "cpu", "meta")
    return isinstance(value, torch.device) or is_name


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    with _disable_current_modes(), torch._C._DisableTorchDispatch():
        layout = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
    fake = FakeTensor(mode, layout, device)
    if tensor.requires_grad:
        fake.requires_grad_()
    return fake


_CARDS: Final[dict[tuple[int, int], tuple[int, int, float, float, float]]] = {
    (7, 0): (80, 6, 125, 15.7, 900),
    (7, 5): (40, 4, 65, 8.1, 320),
    (8, 0): (108, 40, 312, 19.5, 2039),
    (8, 6): (84, 6, 125, 31.2, 600),
    (8, 9): (142, 96, 181, 90.5, 864),
    (9, 0): (132, 50, 989, 67, 3350),
    (10, 0): (148, 126, 2250, 80, 8000),
}
"""Multiprocessors, MiB of L2 cache, TFLOPS in half and in single precision, and GB/s, by compute capability."""


@dataclass(frozen=True)
class GpuProperties(DeviceProperties):
    """The properties that Inductor reads, and the GPU's speeds: TFLOPS in half and in single precision, and GB/s."""

    L2_cache_size: int = 0
    half: float = 0
    single: float = 0
    memory: float = 0
    gcnArchName: str = ""  # noqa: N815 - PyTorch's name

    @classmethod
    def of(cls, capability: tuple[int, int]) -> GpuProperties:
        """Return the properties for a compute capability; the A100's are the default."""
        multiprocessors, l2_cache, half, single, memory = _CARDS.get(capability, _CARDS[8, 0])
        gpu = DeviceProperties("simulated", *capability, 0, multiprocessors, threads_per_multiprocessor(capability))
        return cls(**vars(gpu), L2_cache_size=l2_cache * 2**20, half=half, single=single, memory=memory)
