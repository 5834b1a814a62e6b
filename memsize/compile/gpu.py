"""The GPU that Inductor compiles for: its properties, and a backend that plans memory and leaves kernels out.

Inductor decides by the properties of the device how reductions are split and which operations are fused. Its own
scheduler and wrapper run unchanged; only the bodies of kernels, which need Triton and take no memory, are not written.

Source: torch/_inductor/codegen/common.py (`register_backend_for_device`), codegen/simd.py (`codegen_node_schedule`),
codegen/triton.py (`TritonKernel.call_kernel`), codegen/triton_split_scan.py, codegen/wrapper.py, torch/_dynamo/
device_interface.py. Of products that are padded: fx_passes/pad_mm.py (`can_pad`, `is_mm_compute_bound`, `should_pad`).
Of switches: torch/_inductor/config.py and torch/_functorch/config.py of PyTorch 2.4 to 2.14, and pull request 129043 of
June 2024. Of methods that need a
driver: torch/csrc/autograd/python_variable_indexing.cpp (`THPVariable_getitem`), tools/autograd/templates/
python_variable_methods.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch
import torch._inductor.config as inductor_config
import torch._inductor.scheduler as inductor_scheduler
from torch import _meta_registrations
from torch._dynamo import device_interface
from torch._functorch import config as functorch, partitioners
from torch._inductor import config as inductor, ir, utils
from torch._inductor.codecache import CacheBase
from torch._inductor.codegen import common, triton_split_scan
from torch._inductor.codegen.triton import TritonKernel, TritonScheduling
from torch._inductor.codegen.triton_combo_kernel import ComboKernel
from torch._inductor.codegen.triton_split_scan import TritonSplitScanKernel
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, SubgraphPythonWrapperCodegen
from torch._inductor.fx_passes import pad_mm
from torch._inductor.graph import GraphLowering
from torch._inductor.pattern_matcher import PatternMatcherPass
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch.fx import GraphModule
from torch.utils import _triton
from torch.utils._python_dispatch import _disable_current_modes

from memsize.compile.cuda_graphs import CudaGraphs
from memsize.compile.devices import GpuProperties
from memsize.compile.generated import Origins
from memsize.compile.patterns import applied_where_likely
from memsize.compile.shortcuts import shortcuts
from memsize.kernels.semantics import simulated_release
from memsize.processes.patches import Patch, Patches, calling, wrapping
from memsize.spec.stack import Release
from memsize.units import MiB


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


class PlannedSplitScan(TritonSplitScanKernel):
    """A cumulative sum, say, whose rows several blocks share: it takes a word of each for its status and its result."""

    codegen_kernel = PlannedKernel.codegen_kernel
    call_kernel = PlannedKernel.call_kernel

    def scan(self, dtypes: Any, combine_fn: Any, values: Any) -> Any:
        size = utils.upcast_compute_type(dtypes[0]).itemsize
        word = 4 if size <= 2 else 8 if size <= 4 else 24
        blocks = utils.sympy_product(
            utils.ceildiv(count, inductor.triton.min_split_scan_rblock) if prefix.startswith("r") else count
            for prefix, count in self.numels.items()
        )
        self.args.workspace(nelem=word * blocks, zero_fill=True)
        return values


class PlannedScheduling(TritonScheduling):
    """The scheduling of Triton's kernels, none of which is defined or timed."""

    kernel_type = PlannedKernel
    _numbers = count()

    def define_kernel(self, src_code: str, node_schedule: Any, kernel: Any) -> str:
        return f"kernel_{next(self._numbers)}"

    def codegen_sync(self) -> None:
        return None


_LAUNCHES: Final = {"codegen", "codegen_with_epilogue_fusion"} & vars(ir.UserDefinedTritonKernel).keys()
"""The methods that write the launch of a program's own Triton kernel, which writes to existing tensors."""


def _one_by_one(nodes: list[Any], *_: Any, **__: Any) -> list[list[Any]]:
    """Groups of one: kernels that run side by side in one allocate what each of them does, and free it together."""
    return [[node] for node in nodes]


def _writing(generate: Callable[..., Any]) -> Any:
    def generate_here(wrapper: Any, node: Any) -> None:
        wrapper.writeline(_here(node))
        generate(wrapper, node)

    return generate_here


_PREDICATE: Final = re.compile(r"if (.+)\.item\(\):")
"""The line that a `torch.cond` begins with."""


class PlannedWrapper(PythonWrapperCodegen):
    """Inductor's wrapper, which also says of each allocation where it comes from, and asks nothing of a driver."""

    @staticmethod
    def create(is_subgraph: bool, *args: Any, **kwargs: Any) -> Any:
        wrapper: Any = PlannedPart if is_subgraph else PlannedWrapper
        return wrapper(*args, **kwargs) if is_subgraph else wrapper()

    def codegen_device_guard_enter(self, *args: Any, **kwargs: Any) -> None:
        return None

    def codegen_device_guard_exit(self) -> None:
        """End with a line: what precedes it is planned, also where that frees a kernel's scratch memory."""
        self.writeline("pass")

    def generate_tma_descriptor(self, desc: Any) -> None:
        """Name nothing: a tensor is described to a launch, which is not written (`_LAUNCHES`)."""
        self.writeline(f"{desc.name} = None")

    def writeline(self, line: Any) -> None:
        """How often a `while_loop` runs depends on data: here twice, after which it takes no more."""
        wrapper: Any = super()
        if line in ("while should_loop:", "while True:"):
            line = "for _ in range(2):"
        elif isinstance(line, str) and (predicate := _PREDICATE.fullmatch(line)):
            line = f"if takes_first({predicate[1]}):"
        wrapper.writeline(line)

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
    capability: tuple[int, int],
    graphs: CudaGraphs,
    measured: Callable[[PaddingTrial], None],
    lowered: Callable[[GraphLowering], None] = lambda graph: None,
) -> Iterator[None]:
    """While open, Inductor compiles graphs on `CUDA` for a GPU of this capability, and writes no kernels. What it would
    record becomes one of the CUDA `graphs`. `measured` is called with what measuring a product would take, `lowered`
    with each graph.

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
        wrapping(GraphLowering, "constant_name", _constant_on_gpu),
        (_meta_registrations, "device_hint", lambda _: "cuda"),  # graphs are traced with fakes on the CPU
        (GraphModule, "print_readable", lambda *_, **__: ""),  # a key of caches, which are off
        wrapping(PatternMatcherPass, "apply", applied_where_likely),
        *((ir.UserDefinedTritonKernel, name, lambda *_: None) for name in _LAUNCHES),
        (triton_split_scan, "TritonSplitScanKernel", PlannedSplitScan),
        (ComboKernel, "horizontal_partition", staticmethod(_one_by_one)),
        (partitioners, "functionalize_rng_ops", lambda _joint, forward, backward, *_: (forward, backward)),
        *shortcuts(),
        *without_driver(),
        *graphs.patches(),
        *padding(properties, measured),
    ]
    try:
        interfaces.update(names)
        common.register_backend_for_device("cuda", PlannedScheduling, PlannedWrapper)
        forget_device()
        with Patches().applied(patches), inductor_config.patch(_SETTINGS), switches_of(simulated_release()):
            yield
    finally:
        for registry, entries in zip((interfaces, codegens), before, strict=True):
            registry.clear()
            registry.update(entries)
        forget_device()


def forget_device() -> None:
    """Clear the caches of PyTorch's answers about the GPU: what Triton has for it, how large it is."""
    cached = (DeviceProperties.create, CacheBase.get_system, utils.get_gpu_type, utils.is_big_gpu)
    for function in (*cached, *vars(_triton).values()):
        if hasattr(function, "cache_clear"):
            function.cache_clear()


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


def _constant_on_gpu(original: Callable[..., str], graph: Any, name: str, device: torch.device | None = None) -> str:
    """The name of a constant on a device: a GPU's has no values here."""
    if device is None or device.type != "cuda":
        return original(graph, name, device)
    with _disable_current_modes():
        copy: str = graph.allocate_non_dup_const_name(f"{name}_cuda0", graph.constants[name].to("meta"))
    return copy


class PaddingTrial(NamedTuple):
    """The bytes with which it is measured whether padding a product pays: the `operands` that are there throughout, and
    the `results` of a call without padding and of one with it, beside the `buffer` that flushes the L2 cache.
    """

    key: str
    """Equal products are measured once."""
    operands: tuple[int, ...]
    results: tuple[tuple[int, ...], ...]
    buffer: int

    @property
    def bytes(self) -> int:
        """The most at one moment."""
        return sum(self.operands) + self.buffer + max(map(sum, self.results))


def padding(properties: GpuProperties, measured: Callable[[PaddingTrial], None]) -> Iterator[Patch]:
    """The patches by which products are padded as on a GPU of these properties, also in graphs traced on the CPU.

    Inductor measures whether padding a product pays whose sizes are no multiple of 8, such as 50,257 words or a prompt
    of 11 tokens. It means to do so for those that keep the GPU busy, rather than its memory, but takes a GPU for a
    thousand times slower than it is: it multiplies MHz where Triton expects kHz. (Names in PyTorch's own table since
    2.9 are exact, and of the GPUs' only the L4 is among them.) Here the products that it means are padded: kernels
    without padding cannot load whole vectors. `measured` is called with what finding out takes.
    """
    is_busy: list[bool] = []

    def is_measured(original: Callable[..., bool], *args: Any) -> bool:
        is_busy[:] = [original(*args)]
        return True

    yield pad_mm, "check_device", lambda *_: True
    yield pad_mm, "has_triton", lambda: True
    yield wrapping(pad_mm, "is_mm_compute_bound", is_measured)
    yield wrapping(pad_mm, "should_pad_bench_key", _measuring, measured, flushed(properties))
    yield pad_mm, "get_cached_should_pad", lambda key: is_busy[0]
    yield utils, "get_gpu_dram_gbps", lambda: properties.memory
    yield (
        utils,
        "get_device_tflops",
        lambda dtype: properties.single if dtype is torch.float32 else properties.half,
    )


def _measuring(
    measured: Callable[[PaddingTrial], None],
    buffer: int,
    original: Callable[..., str],
    match: Any,
    one: Any,
    other: Any,
    *args: Any,
) -> str:
    """Random operands, padded ones and their product (pad_mm.py, `_should_pad`). What the graph computes could be made
    padded, and is before it is measured; an input is padded in each call.
    """
    key = original(match, one, other, *args)
    *batch, rows, inner, columns = (_hint(size) for size in (*one.shape, other.shape[-1]))
    padded = [size + pad_mm.get_padded_length(size, pad_mm.get_alignment_size(one)) for size in (rows, inner, columns)]
    unit = math.prod(batch) * one.dtype.itemsize
    operands, copies = [rows * inner * unit, inner * columns * unit], list[int]()
    for name, before, after in (
        ("mat1", operands[0], padded[0] * padded[1]),
        ("mat2", operands[1], padded[1] * padded[2]),
    ):
        if after * unit != before:
            (operands if pad_mm.should_exclude_padding_time(match, name) else copies).append(after * unit)
    results = (rows * columns * unit,), (*copies, padded[0] * padded[2] * unit)
    measured(PaddingTrial(key, tuple(operands), results, buffer))
    return key


_FLUSHED: Final[dict[Release, int]] = {(2, 6): 256_000_000, (2, 7): 256 * MiB}
"""The buffer of Triton's own `do_bench`, by the first release in which it is another: triton/testing.py of 3.0 and 3.1,
triton/backends/nvidia/driver.py of 3.2; torch/_inductor/runtime/benchmarking.py (`InductorBenchmarker`) from 2.7 on.
"""


def flushed(properties: GpuProperties) -> int:
    """The bytes that are written before a kernel is measured, so that none of its operands is in the L2 cache."""
    release = simulated_release()
    return next((size for first, size in _FLUSHED.items() if release and release < first), properties.L2_cache_size)


def _hint(size: Any) -> int:
    """A size, of any number the one that the compiler goes by."""
    return size if isinstance(size, int) else int(size.node.hint)


SINCE: Final[dict[Release, tuple[tuple[Any, str], ...]]] = {
    (2, 5): ((inductor, "optimize_scatter_upon_const_tensor"),),
    (2, 6): ((inductor, "reorder_for_peak_memory"), (functorch, "donated_buffer")),
    (2, 7): ((inductor, "inplace_padding"), (inductor, "online_softmax")),
    (2, 8): ((inductor, "triton.coalesce_tiling_analysis"), (functorch, "treat_parameters_as_free_to_save")),
    (2, 10): (
        (inductor, "loop_index_inversion_in_fusion"),
        (inductor, "loop_ordering_after_fusion"),
        (inductor, "triton.mix_order_reduction"),
    ),
    (2, 12): (
        (inductor, "delay_realize_cheap_outputs"),
        (inductor, "keep_addmm_fused_for_half_dtypes"),
        (functorch, "guess_tangent_strides_as_outputs"),
    ),
    (2, 13): ((inductor, "loop_reindexing_after_fusion"),),
}
"""By the first release in which they are on."""


def lacking(release: Release | None) -> list[tuple[Any, str]]:
    """The switches of the installed compiler that `release` doesn't have yet."""
    later = [switch for first, switches in SINCE.items() if release and release < first for switch in switches]
    return [(module, name) for module, name in later if name in module._config]


@contextmanager
def switches_of(release: Release | None) -> Iterator[None]:
    """While open, what `release` of PyTorch's compiler doesn't do yet is off; None is the installed one."""
    off = {module: {name: False for of, name in lacking(release) if of is module} for module in (inductor, functorch)}
    with inductor.patch(off[inductor]), functorch.patch(off[functorch]):
        yield


_aten = torch.ops.aten


def without_driver() -> Iterator[Patch]:
    """The patches by which methods work on fakes of CUDA tensors whose Python binding first makes the tensor's device
    the current one: that needs a driver, and the operators that they call need none.
    """
    for name, operator in _METHODS.items():
        yield torch.Tensor, name, calling(_through(operator), getattr(torch.Tensor, name))


def _through(operator: Callable[..., Any]) -> Callable[..., Any]:
    def called(original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (operator if tensor.device.type == "cuda" else original)(tensor, *args, **kwargs)

    return called


def _indexed(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """``tensor[index]``: numbers, slices and None make views; tensors select."""
    parts = list(index) if isinstance(index, tuple) else [index]
    named = sum(part is not None and part is not Ellipsis for part in parts)
    if Ellipsis in [part for part in parts if not isinstance(part, torch.Tensor)]:
        position = next(i for i, part in enumerate(parts) if part is Ellipsis)
        parts[position : position + 1] = [slice(None)] * (tensor.dim() - named)
    dim, chosen = 0, list[torch.Tensor | None]()
    for part in parts:
        if isinstance(part, int) and not isinstance(part, bool):
            tensor = _aten.select.int(tensor, dim, part)
            continue
        if part is None:
            tensor = _aten.unsqueeze(tensor, dim)
        elif isinstance(part, slice):
            tensor = _aten.slice.Tensor(tensor, dim, part.start, part.stop, part.step or 1)
        chosen.append(part if isinstance(part, torch.Tensor) else None)
        dim += 1
    return _aten.index.Tensor(tensor, chosen) if any(part is not None for part in chosen) else tensor


_METHODS: Final[dict[str, Callable[..., Any]]] = {
    "__getitem__": _indexed,
    "__invert__": _aten.bitwise_not,
    "contiguous": _aten.contiguous,
    "copy_": _aten.copy_,
    "nonzero": _aten.nonzero,
}
