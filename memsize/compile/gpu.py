"""The GPU that Inductor compiles for: its properties, and a backend that plans memory and leaves kernels out.

Inductor decides by the properties of the device how reductions are split and which operations are fused. Its own
scheduler and wrapper run unchanged; only the bodies of kernels, which need Triton and take no memory, are not written.

Source: torch/_inductor/codegen/common.py (`register_backend_for_device`), codegen/simd.py (`codegen_node_schedule`),
codegen/triton.py (`TritonKernel.call_kernel`), codegen/wrapper.py, torch/_dynamo/device_interface.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch._inductor.config as inductor_config
import torch._inductor.scheduler as inductor_scheduler
from torch._dynamo import device_interface
from torch._functorch import partitioners
from torch._inductor import ir
from torch._inductor.codecache import CacheBase
from torch._inductor.codegen import common
from torch._inductor.codegen.triton import TritonKernel, TritonScheduling
from torch._inductor.codegen.triton_combo_kernel import ComboKernel
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, SubgraphPythonWrapperCodegen
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch.fx import GraphModule

from memsize.compile.bindings import without_driver
from memsize.compile.cuda_graphs import CudaGraphs
from memsize.compile.gpu_properties import GpuProperties
from memsize.compile.origins import Origins
from memsize.compile.padding import padding
from memsize.compile.releases import switches_of
from memsize.kernels.semantics import current
from memsize.processes.patches import Patch, Patches


def _interface(properties: GpuProperties) -> type[device_interface.CudaInterface]:
    """A GPU that only has properties."""
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_compute_capability": properties.major * 10 + properties.minor,
        "is_bf16_supported": properties.major >= 8,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
    }
    cuda = device_interface.CudaInterface
    worker = type("Worker", (cuda.Worker,), _answering({"get_device_properties": properties}))
    return type("PlannedGpu", (cuda,), {**_answering(answers), "Worker": worker})


def _answering(answers: dict[str, Any]) -> dict[str, Any]:
    return {name: staticmethod(lambda *_, answer=answer, **__: answer) for name, answer in answers.items()}


class PlannedKernel(TritonKernel):
    """A kernel without a body: the scheduler learns from it which buffers are written in place or never made."""

    def codegen_kernel(self, name: str | None = None) -> str:
        return ""

    def call_kernel(self, name: str, node: Any = None, deallocate_ws: bool = True) -> None:
        wrapper = V.graph.wrapper_code
        for workspace in self.args.workspace_args:
            wrapper.generate_workspace_allocation(workspace)
        self.args.python_argdefs()
        if deallocate_ws:
            for workspace in reversed(self.args.workspace_args):
                wrapper.generate_workspace_deallocation(workspace)


class PlannedScheduling(TritonScheduling):
    """The scheduling of Triton's kernels, none of which is defined or timed."""

    kernel_type = PlannedKernel
    _numbers = count()

    def define_kernel(self, src_code: str, node_schedule: Any, kernel: Any) -> str:
        return f"kernel_{next(self._numbers)}"

    def codegen_sync(self) -> None:
        return None


def _one_by_one(nodes: list[Any], *_: Any, **__: Any) -> list[list[Any]]:
    """Groups of one: kernels that run side by side in one allocate what each of them does, and free it together."""
    return [[node] for node in nodes]


def _writing(generate: Callable[..., Any]) -> Any:
    def generate_here(wrapper: Any, node: Any) -> None:
        wrapper.writeline(_here(node))
        generate(wrapper, node)

    return generate_here


class PlannedWrapper(PythonWrapperCodegen):
    """Inductor's wrapper, which also says of each allocation where it comes from, and asks nothing of a driver."""

    @staticmethod
    def create(is_subgraph: bool, *args: Any, **kwargs: Any) -> Any:
        wrapper: Any = PlannedPart if is_subgraph else PlannedWrapper
        return wrapper(*args, **kwargs) if is_subgraph else wrapper()

    def codegen_device_guard_enter(self, *args: Any, **kwargs: Any) -> None:
        return None

    def codegen_device_guard_exit(self) -> None:
        return None

    def writeline(self, line: Any) -> None:
        """How often a `while_loop` runs depends on data: here twice, after which it takes no more."""
        wrapper: Any = super()
        wrapper.writeline("for _ in range(2):" if line in ("while should_loop:", "while True:") else line)

    def make_buffer_allocation(self, buffer: Any) -> str:
        return f"{_here(buffer)}; {super().make_buffer_allocation(buffer)}"

    generate_extern_kernel_out = _writing(PythonWrapperCodegen.generate_extern_kernel_out)
    generate_extern_kernel_alloc = _writing(PythonWrapperCodegen.generate_extern_kernel_alloc)
    generate_fallback_kernel = _writing(PythonWrapperCodegen.generate_fallback_kernel)


class PlannedPart(PlannedWrapper, SubgraphPythonWrapperCodegen):
    """The same of a graph inside another, or of a part that becomes a CUDA graph."""


def _here(buffer: Any) -> str:
    number = Origins.of(V.graph).number(getattr(buffer, "origins", ()), isinstance(buffer, ir.ExternKernel))
    return f"here({number})"


@contextmanager
def planning(
    capability: tuple[int, int], graphs: CudaGraphs, lowered: Callable[[GraphLowering], None] = lambda graph: None
) -> Iterator[None]:
    """While open, Inductor compiles graphs on `CUDA` for a GPU of this capability, and writes no kernels. What it would
    record becomes one of the CUDA `graphs`. `lowered` is called with each graph.

    What is random and recomputed draws anew: the states of generators, which graphs would save for it, are on the CPU.
    """
    properties = GpuProperties.of(capability)
    common.init_backend_registration()
    device_interface.get_registered_device_interfaces()  # PyTorch registers its own once: before they are copied
    interfaces: Any = device_interface.device_interfaces
    codegens: Any = common.device_codegens
    before = dict(interfaces), dict(codegens)
    names = dict.fromkeys(("cuda", "cuda:0"), _interface(properties))
    patches: list[Patch] = [
        (inductor_scheduler, "has_triton", lambda: True),
        (torch.cuda, "get_device_properties", lambda *_: properties),
        (torch.cuda, "get_device_capability", lambda *_: (properties.major, properties.minor)),
        (GraphLowering, "_compile_to_module", lambda graph: _unloaded(graph, lowered)),
        (GraphModule, "print_readable", lambda *_, **__: ""),  # a key of caches, which are off
        (ComboKernel, "horizontal_partition", staticmethod(_one_by_one)),
        (partitioners, "functionalize_rng_ops", lambda _joint, forward, backward, *_: (forward, backward)),
        *without_driver(),
        *graphs.patches(),
        *padding(properties),
    ]
    try:
        interfaces.update(names)
        common.register_backend_for_device("cuda", PlannedScheduling, PlannedWrapper)
        _forget_properties()
        release = semantics.release if (semantics := current()) else None
        with Patches().applied(patches), inductor_config.patch(_SETTINGS), switches_of(release):
            yield
    finally:
        for registry, entries in zip((interfaces, codegens), before, strict=True):
            registry.clear()
            registry.update(entries)
        _forget_properties()


def _forget_properties() -> None:
    DeviceProperties.create.cache_clear()
    CacheBase.get_system.cache_clear()


_SETTINGS: Final = {
    "force_disable_caches": True,
    "size_asserts": False,
    "alignment_asserts": False,
    "nan_asserts": False,
    "compile_threads": 1,
}
"""Compiled code is neither kept on disk nor checked while it runs: it computes nothing."""


def _unloaded(graph: GraphLowering, lowered: Callable[[GraphLowering], None]) -> Any:
    """Run Inductor's code generation; return, for the module that Inductor loads, what it wrote in a namespace of ours.

    Its `runner` calls the parts of a graph of which CUDA graphs are made; None where it has no parts.
    """
    from memsize.compile.generated import loaded

    code, _ = graph.codegen()
    lowered(graph)
    forward = None if graph.is_backward else not graph.is_inference
    constants = {**graph.constants, **graph.torchbind_constants}
    call, runner = loaded(code.value, Origins.of(graph), constants, forward)
    return SimpleNamespace(__file__="<memsize>", call=call, runner=runner)
