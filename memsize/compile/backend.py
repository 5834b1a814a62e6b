"""The backend that Dynamo gives its graphs to: AOTAutograd, the partitioner and Inductor as PyTorch calls them.

Dynamo's graphs are of `meta` tensors. They are traced with fakes on the CPU, on which CUDA's semantics apply; what the
partitioner makes of them is moved to CUDA and lowered by Inductor.

Source: torch/_inductor/compile_fx.py (`compile_fx`, `compile_fx_inner`), torch/_dynamo/backends/debugging.py
(`aot_eager`), torch/_dynamo/backends/cudagraphs.py. Of decompositions: torch/_refs/__init__.py (`native_layer_norm`),
torch/_decomp/decompositions.py (`native_batch_norm_helper`), torch/_inductor/decomposition.py (`mm`, `addmm`, `bmm`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor
from torch._decomp.decompositions import _grid_sampler_2d
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.cudagraphs import find_input_mutations
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch._functorch.partitioners import min_cut_rematerialization_partition as min_cut
from torch._inductor import compile_fx, config, decomposition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import count_tangents, num_fw_fixed_arguments
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import Graph, GraphModule, Interpreter
from torch.fx._lazy_graph_module import _LazyGraphModule

from memsize.compile.autotuning import LEAST_MULTIPROCESSORS, most_measured
from memsize.compile.cuda_graphs import CudaGraphs
from memsize.compile.devices import CPU, CUDA, META, GpuProperties, Move
from memsize.compile.generated import running_ledger
from memsize.compile.gpu import PaddingTrial, flushed, planning
from memsize.compile.known_results import with_known_results
from memsize.kernels.attention import flex_attention
from memsize.kernels.semantics import current, switched_on
from memsize.processes.patches import Patches, assigned, wrapping
from memsize.records.aggregates import live_bytes
from memsize.torch_internals.meta import suspended
from memsize.torch_internals.pytree import tensors_in
from memsize.tracing.ledger import Ledger
from memsize.tracing.named_devices import named_gpu
from memsize.tracing.overrides import compilation
from memsize.units import format_bytes

Note = Callable[[str], None]
Boxed = Callable[[list[Any]], Any]


class Compiler:
    """Compiles graphs for a GPU of this `capability`; `note` receives what the figures of compiled code rest on.

    If it `measures`, what it takes to measure padding is part of the run, as in the first on a machine, whose cache has
    no times.
    """

    def __init__(self, capability: tuple[int, int], note: Note, measures: bool = False) -> None:
        self._capability = capability
        self.note = note
        self._measures = measures
        self._trials: dict[str, range] = {}
        """The events of each measurement, by its key."""
        self._graphs = CudaGraphs()
        self._unfused: list[range] = []
        """The events of each call of a graph that could not be lowered."""
        self._measured: list[tuple[int, int, str]] = []
        """What measuring kernels takes, after how many events, and what they are measured for."""
        self._ledger: Ledger | None = None
        """That of the run, once there was such a graph."""
        self.is_answered = False
        """Whether there were graphs, or PyTorch said why there are none."""

    def conclude(self) -> None:
        """Note where the peak lies, if graphs could not be lowered: fused, fewer of their results are stored; and if
        kernels are measured: their operands are copied. Note also if there were no graphs.
        """
        if not self.is_answered:
            self.note(_NO_GRAPH)
        if self._ledger is None:
            return
        live, unfused = live_bytes(self._ledger.events), set(chain.from_iterable(self._unfused))
        peak = max(live, default=0)
        if unfused:
            least = max((size for index, size in enumerate(live) if index not in unfused), default=0)
            sizes = format_bytes(least), format_bytes(peak)
            self.note(_BETWEEN.format(*sizes) if least < peak else _ELSEWHERE.format(*sizes))
        if self._trials:
            trials = set(chain.from_iterable(self._trials.values()))
            least = max((size for index, size in enumerate(live) if index not in trials), default=0)
            if least < peak:
                self.note(_MEASURED.format(format_bytes(least), format_bytes(peak), _TO_PAD))
        if self._measured:
            most, purpose = max((size + (live[event - 1] if event else 0), why) for event, size, why in self._measured)
            if most > peak:
                self.note(_MEASURED.format(format_bytes(peak), format_bytes(most), purpose))
        if any(purpose == _TO_TUNE for *_, purpose in self._measured):
            self.note(_UNFUSED_PRODUCTS)

    def __call__(self, module: GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
        """Compile a graph of Dynamo's with these `options` of Inductor."""
        tunes = any(options.get(name, attrgetter(name)(config)) for name in _TUNING)
        compiling = partial(
            compile_fx.compile_fx,
            inner_compile=partial(self._lower, self._measure if tunes else lambda _: None),
            config_patches={name: value for name, value in options.items() if name not in _ON_GPU},
            decompositions=cuda_decompositions(),
        )
        return self._traced(compiling, module, inputs)

    def aot_eager(self, module: GraphModule, inputs: Sequence[Any]) -> Any:
        """Partition a graph of Dynamo's into a forward and a backward, whose operations run one by one."""
        return self._traced(aot_autograd(fw_compiler=_partitioned, partition_fn=min_cut), module, inputs)

    def cudagraphs(self, module: GraphModule, inputs: Sequence[Any]) -> Any:
        """Make CUDA graphs of a forward and a backward, which keep what autograd would."""

        def captured(graph: GraphModule, values: Sequence[Any], **kind: bool) -> Any:
            backward = kind.get("is_backward")
            fixed = count_tangents(graph) if backward else num_fw_fixed_arguments(len(inputs), len(values))
            mutated = tuple(find_input_mutations(graph.graph))
            call = _partitioned(graph, values)
            return _boxed(self._graphs.captured(call, range(fixed), mutated_input_idxs=mutated, **kind))

        compiling = aot_autograd(
            fw_compiler=captured,
            bw_compiler=partial(captured, is_backward=True),
            inference_compiler=partial(captured, is_inference=True),
        )
        return self._traced(compiling, module, inputs)

    def _traced(self, compiling: Callable[..., Any], module: GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile a graph with fakes on the CPU; where that fails, run it as it is written."""
        self.is_answered = True
        if _is_on_cpu(module):
            return module.forward
        _fuse_attention(module)
        move, as_traced = Move(CPU), _copied(module)
        try:
            with (
                planning(self._capability, self._graphs, self._measure_padding),
                _tracing(),
                _fakes_moved(move),
            ):
                moved = [move.value(fake) for fake in _fakes(module, inputs)]
                return with_known_results(compiling(move.graph(module), moved), as_traced)
        except SkipFrame as reason:
            self.note(_SKIPPED.format(reason))
            raise
        except (RestartAnalysis, torch.OutOfMemoryError):
            raise  # Dynamo begins anew, with a constant for a float that no tensor can stand for; padding is measured
        except Exception as error:
            self.note(_UNTRACED.format(_reason(error)))
            return Interpreter(Move(META).graph(as_traced)).run

    def _lower(
        self, lowered: Callable[[GraphLowering], None], module: GraphModule, inputs: Sequence[Any], **options: Any
    ) -> Any:
        move, as_traced = Move(CUDA), _copied(module)
        with planning(self._capability, self._graphs, self._measure_padding, lowered), suspended(), _originals():
            try:
                moved = [move.value(value) for value in inputs]
                return compile_fx.compile_fx_inner(move.graph(module, is_propagated=True), moved, **options)
            except Exception as error:
                _raise_skipped(error)
                self.note(_UNLOWERED.format(_reason(error)))
                return _boxed(partial(self._run_unfused, _one_by_one(as_traced)))

    def _measure(self, graph: GraphLowering) -> None:
        """Note what max-autotune takes for a graph."""
        gpu = GpuProperties.of(self._capability)
        if gpu.multi_processor_count >= LEAST_MULTIPROCESSORS and (most := most_measured(graph, flushed(gpu))):
            self._add_measured(_TO_TUNE, most)

    def _measure_padding(self, trial: PaddingTrial) -> None:
        ledger = running_ledger()
        if not self._measures or ledger is None:
            self._add_measured(_TO_PAD, trial.bytes)
        elif trial.key not in self._trials:
            self._ledger, before = ledger, len(ledger.events)
            _allocate_trial(trial, ledger)
            self._trials[trial.key] = range(before, len(ledger.events))

    def _add_measured(self, purpose: str, size: int) -> None:
        if (ledger := running_ledger()) is not None:
            self._ledger = ledger
            self._measured.append((len(ledger.events), size, purpose))

    def _run_unfused(self, call: Boxed, args: list[Any]) -> Any:
        if (ledger := running_ledger()) is None:
            return call(args)
        self._ledger, before = ledger, len(ledger.events)
        try:
            return call(args)
        finally:
            self._unfused.append(range(before, len(ledger.events)))


def _allocate_trial(trial: PaddingTrial, ledger: Ledger) -> None:
    """Allocate and free what a measurement takes (`InductorBenchmarker.benchmark_gpu`)."""

    def allocated(*sizes: int) -> list[Tensor]:
        with torch._C._DisableTorchDispatch():
            tensors = [torch.empty(size, dtype=torch.uint8, device=META) for size in sizes]
        ledger.last_op = "pad_mm"
        for tensor in tensors:
            ledger.enter(tensor, "workspace", ledger.last_op)
        return tensors

    operands = allocated(*trial.operands)
    ledger.open_blas_handle("pad_mm")
    for results in trial.results:
        allocated(*results)
        buffer = allocated(trial.buffer)
        allocated(*results)
        del buffer
    del operands


def _raise_skipped(error: Exception) -> None:
    """Let Dynamo skip a frame, and memory run out: Inductor wraps both where its caches are off."""
    reason = getattr(error, "inner_exception", error)
    if isinstance(reason, (SkipFrame, torch.OutOfMemoryError)):
        raise reason from None


def _is_on_cpu(module: GraphModule) -> bool:
    """Whether a graph computes on the CPU alone, as one that draws a number, whose results other code may read."""
    tensors = tensors_in([node.meta.get("example_value") for node in module.graph.nodes])
    return {tensor.device.type for tensor in tensors} == {CPU.type}


def _fuse_attention(module: GraphModule) -> None:
    """Let FlexAttention be its kernels, which Inductor would make with Triton, also where a checkpoint is around it."""
    for part in module.modules():
        if isinstance(part, GraphModule):
            for node in part.graph.find_nodes(op="call_function", target=torch.ops.higher_order.flex_attention):
                node.target = flex_attention
            part.recompile()


def _copied(module: GraphModule) -> GraphModule:
    """The graph as it is now, which compilers change in place; its code is written when it is called."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return _LazyGraphModule(module, graph)


def _fakes_moved(move: Move) -> AbstractContextManager[None]:
    """Move the fakes of what a graph holds itself, such as an optimizer's state."""
    return Patches().applied([wrapping(FakeTensorMode, "from_tensor", move.result)])


def _fakes(module: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a graph as Dynamo traced it with."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [_fake(node.meta.get("example_value", value), value) for node, value in zip(nodes, inputs, strict=True)]


def _fake(fake: Any, value: Any) -> Any:
    """The fake of an input, or the input where it is the tensor of a float, whose symbol AOTAutograd looks up."""
    return fake if getattr(fake, "item_memo", None) is None else value


_UNLOWERED = (
    "a compiled graph could not be lowered here ({}): it keeps what compiled code keeps for backward, but its "
    "operations run unfused, so the real peak may be lower"
)

_BETWEEN = "at the peak tensors hold {} to {}: with none to all of the results in graphs that could not be lowered"

_ELSEWHERE = "tensors hold {} at the peak, which is not in a graph that could not be lowered"

_MEASURED = "at the peak tensors hold {} to {}: {} copies the operands of products, unless a cache has their times"
_TO_TUNE = "to measure kernels, max-autotune"
_TO_PAD = "to measure whether padding pays, the compiler"

_UNFUSED_PRODUCTS = "products that max-autotune fuses with what follows them may need less"

_NO_GRAPH = (
    "torch.compile compiled nothing: Dynamo skips what it was given, or breaks the graph at each operation; on a GPU, "
    "TORCH_LOGS=graph_breaks names the lines"
)

_SKIPPED = "torch.compile leaves code uncompiled on this GPU ({}): it runs eagerly there too"

_UNTRACED = "a compiled graph could not be traced here ({}): it runs eagerly, and may need less memory, or more"


def _reason(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _partitioned(module: GraphModule, _inputs: Sequence[Any]) -> Any:
    """Run one graph of a partition as it is; a backward comes here once it runs."""
    with suspended(), _originals():
        return _one_by_one(module)


def _one_by_one(module: GraphModule) -> Boxed:
    """A function that runs the operations of a graph on stand-ins, and frees its arguments as it goes. An interpreter
    holds the results of its last run.
    """
    moved = Move(META).graph(module)
    return _boxed(lambda args: Interpreter(moved).boxed_run(args))


def _boxed(call: Boxed) -> Boxed:
    """A function that AOTAutograd calls with a list, which it empties."""
    boxed = partial(call)
    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


@contextmanager
def _tracing() -> Iterator[None]:
    """CUDA's semantics for the fakes of a trace, which follows Dynamo's."""
    semantics, part = current(), compilation()
    assert semantics and part, "compiled code is for a simulated GPU, in the region that is for it"
    with (
        switched_on(semantics.for_fakes()),
        assigned(part, "is_tracing", False),
        Patches().applied(
            [
                wrapping(FunctionalTensor, "to", _to_mesh),
                (decomposition, "is_gpu", lambda _: True),
                wrapping(decomposition, "use_scatter_fallback", _scattered),
                wrapping(joint_graph, "lazy_init", _with_patterns),
            ]
        ),
    ):
        yield


def _scattered(original: Callable[..., bool], *args: Any) -> bool:
    """Whether a scattering stays an operator, as on CUDA: the device is the last argument but one."""
    return original(*args[:-2], CUDA.type, args[-1])


def _with_patterns(original: Callable[..., None], device: torch.device | None = None) -> None:
    """The patterns of a graph without inputs are made where it is traced, though there is a GPU."""
    original(CPU)


def _to_mesh(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """A tensor that is divided over GPUs goes to the device of their mesh, which is named: here it stays on the CPU."""
    args = tuple(CPU if named_gpu(argument) else argument for argument in args)
    return original(tensor, *args, **kwargs)


@contextmanager
def _originals() -> Iterator[None]:
    """PyTorch's own functions, also where a backward is lowered once it runs."""
    part = compilation()
    assert part, "graphs are compiled in the region that is for it"
    with part.lowered(), assigned(part, "is_tracing", False):
        yield


_TUNING: Final = ("max_autotune", "max_autotune_gemm")
"""Inductor's options by which it measures products."""
_ON_GPU: Final = (*_TUNING, "max_autotune_pointwise", "coordinate_descent_tuning")
"""The options that run something on a GPU, and are left out."""


_aten = torch.ops.aten


def cuda_decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's decompositions as they are on CUDA, for graphs that are traced with fakes on the CPU.

    Norms keep their statistics in the input's dtype on the CPU, and in float32 on CUDA; products with a row or column
    of one element become sums on the CPU, and outer products on CUDA. Random zeros and ones are kernels of their own on
    the CPU.
    """
    table = dict(select_decomp_table())
    table.update({norm: partial(_in_float32, table[norm]) for norm in _NORMS if norm in table})
    table.update({_aten.mm.default: _mm, _aten.addmm.default: _addmm, _aten.grid_sampler_2d.default: _grid_sampler})
    table.update({_aten.bernoulli.p: _bernoulli, _aten.bernoulli_.float: _bernoulli_})
    if transposed := table.get(_aten.t.default):
        table[_aten.t.default] = partial(_t, transposed)
    table.pop(_aten.bmm.default, None)
    return table


_NORMS: Final = (
    _aten.native_layer_norm.default,
    _aten.native_batch_norm.default,
    _aten._native_batch_norm_legit.default,
    _aten._native_batch_norm_legit.no_stats,
    _aten._native_batch_norm_legit_functional.default,
)


def _in_float32(norm: Callable[..., Any], tensor: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """A norm computes in float32 in any case."""
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    result, *statistics = norm(tensor.to(wide), *args)
    return (result.to(tensor.dtype), *statistics)


def _t(original: Callable[..., Tensor], matrix: Tensor) -> Tensor:
    """The result of `t`, without the two decompositions that its own goes through."""
    if matrix.dim() != 2:
        return original(matrix)
    permuted: Tensor = _aten.permute.default(matrix, [1, 0])
    return permuted


def _bernoulli(tensor: Tensor, p: float = 0.5, *, generator: object = None) -> Tensor:
    return torch.rand_like(tensor, dtype=torch.float32) < p


def _bernoulli_(tensor: Tensor, p: float = 0.5, *, generator: object = None) -> Tensor:
    return tensor.copy_(_bernoulli(tensor, p))


def _grid_sampler(image: Tensor, grid: Tensor, mode: int = 0, padding: int = 0, align_corners: bool = False) -> Tensor:
    """On CUDA the grid is expanded to all channels."""
    sampled: Tensor = _grid_sampler_2d(
        image,
        grid=grid,
        interpolation_mode=mode,
        padding_mode=padding,
        align_corners=align_corners,
        _expand_grid=True,
    )
    return sampled


def _is_outer(one: Tensor, other: Tensor) -> bool:
    return bool(one.shape[-1] == 1 and one.shape[0] != 1 and other.shape[1] != 1)


def _mm(one: Tensor, other: Tensor, out_dtype: torch.dtype | None = None) -> Any:
    return one * other if out_dtype is None and _is_outer(one, other) else NotImplemented


def _addmm(start: Tensor, one: Tensor, other: Tensor, out_dtype: Any = None, beta: Any = 1, alpha: Any = 1) -> Any:
    if out_dtype is not None or not _is_outer(one, other):
        return NotImplemented
    return alpha * (one * other) + beta * start
