"""Compiled code: what it keeps, allocates and frees, against eager code, arithmetic, and PyTorch's own compiler."""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._ordered_set import OrderedSet
from torch.utils.checkpoint import checkpoint

import memsize
from memsize import ForwardError
from memsize.documents import document
from memsize.records.trace import PRIVATE_POOL, Trace
from memsize.units import format_bytes, parse_bytes
from tests.models import Ledger
from tests.process import open_simulation
from tests.records import alive, live_bytes, totals

COMPILED = "+compile"


class Gelus(nn.Module):
    """Pointwise steps between two products: compiled, they are one kernel without results in between."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x).exp().sin() * 2).cos())


class Attention(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Breaking(nn.Module):
    """A branch on a known number in the middle, at which Dynamo breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).exp()
        torch._dynamo.graph_break()
        return self.second(x.sin())


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def traced_anew(model: nn.Module, scenario: str, size: tuple[int, ...] = (32, 64), **options: Any) -> Trace:
    options.setdefault("optimizer", "sgd")
    return memsize.trace(model, input_size=size, batch_size=8, scenario=scenario, **options).trace


@cache
def traced(model: Callable[[], nn.Module], scenario: str, **options: Any) -> Trace:
    """The trace that several tests look at, of what `model` makes."""
    return traced_anew(model(), scenario, **options)


def peak(trace: Trace) -> int:
    return max(live_bytes(trace.events))


@contextmanager
def default_partition() -> Iterator[None]:
    """The partition that saves what autograd would save, instead of Inductor's."""
    import torch._inductor.config as config
    from torch._functorch.partitioners import default_partition as partition
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Default(CustomPartitionerFn):
        def __call__(self, gm: Any, joint_inputs: Any, **options: Any) -> Any:
            options.pop("compiler", None)
            return partition(gm, joint_inputs, **options)

        def uuid(self) -> str:
            return "default"

    with config.patch(custom_partitioner_fn=Default()):
        yield


class WrittenOut(nn.Module):
    """Attention that Inductor's patterns replace by an operator, and whose projection they pad."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.middle = nn.Sequential(nn.Linear(width, 1001), nn.ReLU(inplace=True), nn.Linear(1001, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        weights = F.dropout((q @ k.transpose(-2, -1) / 4).softmax(-1), 0.1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.middle(x)


@pytest.mark.thorough
@pytest.mark.parametrize("scenario", ["fp32", "amp-bf16"])
def test_what_is_passed_over_changes_nothing(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(WrittenOut(), WrittenOut(), Attention(), Attention())
    shorter = traced_anew(model, scenario + COMPILED)
    monkeypatch.setattr("memsize.compile.patterns._functions", lambda _: frozenset())
    monkeypatch.setattr("memsize.compile.gpu.shortcuts", lambda: ())
    monkeypatch.setattr("memsize.compile.region.tracing_shortcuts", lambda: ())
    monkeypatch.setattr("memsize.compile.region._existing_frozen", nullcontext)
    monkeypatch.setattr("memsize.compile.backend._t", lambda original, matrix: original(matrix))
    monkeypatch.setattr("memsize.compile.devices.Move._moves", lambda *_: True)
    whole = traced_anew(model, scenario + COMPILED)
    assert (shorter.events, shorter.storages, shorter.notes) == (whole.events, whole.storages, whole.notes)


class Histogram(nn.Module):
    """Counts integers as CUDA's `histc` does, and the CPU's does not: so experts get their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.gate(x)
        return scores * torch.histc(scores.argmax(-1).int(), bins=4, min=0, max=3)


class Scattered(nn.Module):
    """Operators that are decomposed by their device: random zeros and ones, a convolution's bias, a grid, an index."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        images = self.conv(x.unsqueeze(1))
        images = images * images.new_empty((len(x), 1, 1, 1)).bernoulli_(0.5) + torch.bernoulli(images, p=0.5)
        sampled = F.grid_sample(images, torch.zeros(len(x), 4, 4, 2, device=x.device))
        rows = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        return sampled.flatten(1).index_reduce(0, rows, sampled.flatten(1), "mean")


def test_operators_are_decomposed_as_on_cuda() -> None:
    trace = traced(Scattered, "fp32" + COMPILED)
    assert not [note for note in trace.notes if "could not be" in note]
    assert "sum" in {s.op for s in trace.storages if s.role == "gradient" and s.shape == (4,)}


class Normalized(nn.Module):
    """Subtracts means that are written out where it runs, as torchvision's detectors do."""

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.as_tensor([0.4, 0.5, 0.6], dtype=x.dtype, device=x.device)
        scale = torch.tensor([[0.1 * column for column in range(64)]], device=x.device)
        return torch.exp(x - mean[:, None]) * scale


def test_constants_of_a_graph_are_on_the_gpu() -> None:
    """Inductor writes the means into the kernel, and reads the scales, which are more than eight, from a tensor that is
    part of the code: a run has the input and the result, of 8 x 3 x 64 floats each.
    """
    trace = traced_anew(Normalized(), "fp32" + COMPILED, (3, 64), optimizer=None)
    assert not [note for note in trace.notes if "could not be" in note]
    assert peak(trace) == 2 * 8 * 3 * 64 * 4


def test_traced_operators_have_the_rules_of_cuda() -> None:
    assert not [note for note in traced(Histogram, "fp32" + COMPILED).notes if "could not be" in note]


@pytest.mark.thorough
def test_pointwise_steps_are_one_kernel_and_are_recomputed() -> None:
    eager, compiled = traced(Gelus, "fp32"), traced(Gelus, "fp32" + COMPILED)
    one = 8 * 32 * 64 * 4  # bytes of a float32 activation
    # Eager code keeps the product, exp, sin, its double, silu and cos; compiled code the product and what the second
    # product multiplies. The input is kept by both.
    assert totals(compiled).saved_bytes == 3 * one
    assert totals(eager).saved_bytes > totals(compiled).saved_bytes
    assert peak(compiled) < peak(eager)


@pytest.mark.parametrize(("columns", "rows", "padded"), [(1001, 1024, 1008), (1000, 1024, 1000), (1001, 8, 1001)])
def test_odd_products_are_padded_where_the_gpu_computes(columns: int, rows: int, padded: int) -> None:
    """To a multiple of 8 in half precision. 8 rows are bound by an A100's memory: 8·512·1001 products over
    8·512 + 512·1001 + 8·1001 elements are 8 for each, and it does 1000·312/2039/2 = 76 in the same time."""
    model = nn.Sequential(nn.Linear(1024, 512, bias=False), nn.Linear(512, columns, bias=False))
    compiled = traced_anew(model, "bf16" + COMPILED, (rows // 8, 1024), optimizer=None)
    assert {s.shape[1] for s in compiled.storages if s.op == "mm" and len(s.shape) == 2} == {512, padded}


@pytest.mark.thorough
@pytest.mark.parametrize("scenario", ["fp32", "amp-bf16"])
def test_nothing_is_left_that_eager_code_would_not_leave(scenario: str) -> None:
    left = [live_bytes(traced(Attention, name).events)[-1] for name in (scenario, scenario + COMPILED)]
    assert left[0] == left[1]


class Sums(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(-1)


@pytest.mark.parametrize(("dtype", "word"), [("fp32", 8), ("bf16", 8)])
def test_blocks_that_share_a_cumulative_sum_exchange_their_parts(dtype: str, word: int) -> None:
    """In blocks of 256 of a million numbers, which are added up in float32: each has a word for its status and sum."""
    options: dict[str, Any] = {"input_size": (2**20,), "batch_size": 1, "optimizer": None, "gpu": "a100"}
    trace = memsize.trace(Sums(), scenario=dtype + COMPILED, **options).trace
    assert [s.bytes for s in trace.storages if s.role == "temporary"] == [2**20 // 256 * word]
    assert not [note for note in trace.notes if "lowered" in note]


class Drawn(nn.Module):
    """A detector's transform: it draws one of its sizes on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * (5,)[int(torch.empty(1).uniform_(0, 1).item())]).sin()


def test_code_that_is_for_the_cpu_alone_runs_there() -> None:
    trace = memsize.trace(Drawn(), input_size=(64,), batch_size=4, scenario="fp32+compile", optimizer=None).trace
    assert [(s.role, s.bytes) for s in trace.storages] == [("input", 4 * 64 * 4), ("output", 4 * 64 * 4)]


class Experts(nn.Module):
    """Dynamo skips it: its graph breaks in a loop, at an operation whose result depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(x[:, 0] == number)
            out.index_add_(0, rows, expert(x[rows]))
        return out


def test_a_model_of_which_nothing_is_compiled_needs_what_it_needs_uncompiled() -> None:
    """What Dynamo leaves of the first step holds frames, and so the result of that step."""
    options: dict[str, Any] = {"input_size": (32,), "batch_size": 64, "optimizer": "sgd", "steps": 3}
    eager, compiled = (memsize.trace(Experts(), scenario=s, **options).trace for s in ("fp32", "fp32+compile"))
    assert [event.delta for event in compiled.events] == [event.delta for event in eager.events]


def test_allocations_belong_to_layers_and_lines() -> None:
    compiled = traced(Attention, "fp32" + COMPILED)
    results = [s for s in compiled.storages if s.op == "_scaled_dot_product_efficient_attention"]
    attention = max(results, key=lambda storage: storage.bytes)
    assert compiled.layers[attention.layer].path == "" and attention.role == "activation"
    product = next(s for s in compiled.storages if s.op == "addmm" and s.shape == (256, 192))
    assert compiled.layers[product.layer].path == "qkv"
    line = compiled.line_of(compiled.storages.index(product))
    assert line is not None and line.startswith("test_compile.py:")


def test_gradients_and_parameters_keep_their_roles() -> None:
    compiled = traced(Attention, "fp32" + COMPILED)
    by_role = {"parameter": 0, "gradient": 0}
    last = len(compiled.events)
    for storage, size in alive(compiled, last - 1).items():
        role = compiled.storages[storage].role
        if role in by_role:
            by_role[role] += size
    parameters = sum(p.numel() * 4 for p in Attention().parameters())
    assert by_role == {"parameter": parameters, "gradient": parameters}


def test_a_graph_break_is_no_obstacle() -> None:
    eager, compiled = traced(Breaking, "fp32"), traced(Breaking, "fp32" + COMPILED)
    assert peak(compiled) <= peak(eager)
    assert {s.op for s in compiled.storages} >= {"addmm", "mm"}


def test_steps_after_the_first_compile_nothing_anew() -> None:
    with compiled_graphs() as graphs:
        compiled = traced_anew(Attention(), "fp32" + COMPILED, steps=3)
    assert len(graphs) == 1
    phases = {name: index for index, name in enumerate(compiled.phases)}
    deltas = [
        sorted(event.delta for event in compiled.events if event.phase == phases[f"backward {step}"]) for step in (2, 3)
    ]
    assert deltas[0] == deltas[1]


def test_pytorchs_own_containers_are_one_graph() -> None:
    """Dynamo skips the frame of `nn.Sequential.forward`: `torch.compile` wraps it in one that it does not skip."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Tanh(), nn.Linear(64, 64))
    eager, compiled = ({s.op for s in traced_anew(model, name).storages} for name in ("fp32", "fp32" + COMPILED))
    assert {"sigmoid", "tanh"} <= eager and {"sigmoid", "tanh"} & compiled == {"tanh"}


def test_autocast_casts_inside_compiled_code() -> None:
    compiled = traced(Gelus, "amp-bf16" + COMPILED)
    products = {s.dtype for s in compiled.storages if s.op in ("mm", "addmm") and s.role == "activation"}
    assert products == {"bfloat16"}


def test_an_inference_frees_as_it_goes() -> None:
    eager, compiled = traced(Gelus, "fp32", optimizer=None), traced(Gelus, "fp32" + COMPILED, optimizer=None)
    assert peak(compiled) <= peak(eager)
    assert len(compiled.events) < len(eager.events)


class Checkpointed(nn.Module):
    """Attention under a checkpoint, whose kernel is random: its dropout is drawn twice, from one state."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.thorough
@pytest.mark.parametrize("scenario", ["bf16", "fp32"])
def test_random_operations_are_recomputed_under_a_checkpoint(scenario: str) -> None:
    """What is kept for backward is the input of each of two blocks: 8 · 32 · 64 values."""
    compiled = traced(Checkpointed, scenario + COMPILED)
    assert not [note for note in compiled.notes if "could not be" in note]
    assert totals(compiled).saved_bytes == 2 * 8 * 32 * 64 * (2 if scenario == "bf16" else 4)


def test_what_cannot_be_lowered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.graph as graph

    def refuses(self: Any, *args: Any) -> Any:
        raise NotImplementedError("aten.mystery has no lowering")

    monkeypatch.setattr(graph.GraphLowering, "codegen", refuses)
    eager, compiled = traced(Gelus, "fp32"), traced_anew(Gelus(), "fp32" + COMPILED)
    (note,) = {note for note in compiled.notes if "could not be lowered here" in note}
    assert "aten.mystery" in note
    elsewhere = f"tensors hold {format_bytes(peak(compiled))} at the peak, which is not in a graph"
    assert [note for note in compiled.notes if elsewhere in note]
    forward = traced_anew(Gelus(), "fp32" + COMPILED, optimizer=None)
    (between,) = {note for note in forward.notes if "at the peak tensors hold" in note}
    least, shown = re.findall(r"[\d.,]+ [KMG]iB", between)
    assert shown == format_bytes(peak(forward)) and parse_bytes(least) < parse_bytes(shown)
    assert totals(compiled).saved_bytes < totals(eager).saved_bytes  # what the partition saves is known all the same
    assert live_bytes(compiled.events)[-1] == live_bytes(eager.events)[-1]


def test_bfloat16_is_not_compiled_on_a_gpu_without_it() -> None:
    """PyTorch skips such code on a T4, and runs it as it is written."""
    eager, compiled = (traced_anew(Gelus(), scenario, gpu="t4") for scenario in ("bf16", "bf16" + COMPILED))
    assert [e.delta for e in compiled.events] == [e.delta for e in eager.events]
    assert [note for note in compiled.notes if "BF16 is not supported" in note and "runs eagerly there too" in note]
    assert not [note for note in compiled.notes if "could not be" in note]


@pytest.mark.parametrize("model", [Gelus, Checkpointed])
def test_what_cannot_be_traced_runs_as_it_is_written(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    with warnings.catch_warnings(action="ignore"):
        from torch._higher_order_ops import wrap
        from torch._inductor import compile_fx

    if model is Checkpointed and not hasattr(wrap, "_always_prefer_recompute"):
        pytest.skip("up to PyTorch 2.11, a checkpoint of Dynamo's that runs as it is written keeps everything")

    def refuses(*args: Any, **options: Any) -> Any:
        raise NotImplementedError("aten.mystery has no fake")

    monkeypatch.setattr(compile_fx, "compile_fx", refuses)
    eager, compiled = traced(model, "fp32"), traced_anew(model(), "fp32" + COMPILED)
    assert any("could not be traced" in note and "aten.mystery" in note for note in compiled.notes)
    assert totals(compiled).saved_bytes == totals(eager).saved_bytes


@pytest.mark.thorough
@pytest.mark.parametrize("scenario", ["fp32", "amp-bf16", "bf16"])
@pytest.mark.parametrize("model", [Gelus, Attention, perceptron])
def test_the_default_partition_saves_what_eager_code_saves(model: Any, scenario: str) -> None:
    with default_partition():
        compiled = traced_anew(model(), scenario + COMPILED)
    assert totals(compiled).saved_bytes == totals(traced(model, scenario)).saved_bytes


@pytest.mark.thorough
def test_the_compiler_is_imported_only_when_it_is_asked_for(python: Any) -> None:
    code = (
        "import sys, torch, memsize; memsize.report(torch.nn.Linear(4, 4), input_size=(4,)); "
        "assert not {'torch._inductor', 'memsize.compile.region'} & sys.modules.keys()"
    )
    assert python("-c", code).returncode == 0


def test_compile_shows_each_scenario_beside_itself_compiled() -> None:
    table = memsize.report(Gelus(), input_size=(32, 64), batch_size=8, scenarios="fp32", compile=True).scenarios
    assert list(table.index) == ["fp32", "fp32+compile"]
    assert table.loc["fp32+compile", "saved_bytes"] == 3 * 8 * 32 * 64 * 4
    assert table.loc["fp32", "saved_bytes"] > table.loc["fp32+compile", "saved_bytes"]


def test_what_compiled_code_pads_is_not_recomputed() -> None:
    """The square keeps a product of 4,101 columns. Compiled code pads them to 4,104, a multiple of 8, and aligns rows
    to 128 B, every 4,160 numbers.
    """

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4096, 4101, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x).square()

    options: dict[str, Any] = {"input_size": (4096, 4096), "batch_size": 1, "scenarios": "bf16", "compile": True}
    report = memsize.report(Net(), gpu="a100", **options)
    (finding,) = (finding for finding in report.findings if finding.code == "compiled")
    eager, compiled = (totals(result.trace).saved_bytes for result in report.scenario_results if result.trace)
    assert compiled - eager == (4095 * 4160 + 4104 - 4096 * 4101) * 2 == finding.bytes
    size = format_bytes(finding.bytes, "KiB")
    assert finding.in_brief("KiB") == (
        f"bf16+compile keeps {size} more for backward than bf16. What both keep takes {size} more in compiled code's "
        "layouts."
    )


def test_a_report_says_what_compiled_code_recomputes_and_keeps() -> None:
    """Eager code keeps the input, the results of exp, of the doubling, silu and cos; compiled code the input, the first
    product and cos. Inference holds two tensors in eager code, and in compiled code a product and what is made of it.
    """
    options: dict[str, Any] = {"input_size": (32, 64), "batch_size": 8, "scenarios": "fp32", "compile": True}
    report = memsize.report(Gelus(), train="sgd", **options)
    (finding,) = (finding for finding in report.findings if finding.code == "compiled")
    one = 8 * 32 * 64 * 4
    assert finding.bytes == 2 * one
    kept = (
        "fp32+compile keeps {c} less for backward than fp32: it recomputes {o}, and keeps mm in Linear ({m}) instead."
    )
    recomputed = "exp in Gelus ({m}), mul in Gelus ({m}) and silu in Gelus ({m})"
    expected = kept.format(c="128.00 KiB", m="64.00 KiB", o=recomputed.format(m="64.00 KiB"))
    assert finding.in_brief("KiB") == expected
    eager, compiled = (result.training for result in report.scenario_results)
    assert eager and compiled
    lower = (eager.requested - compiled.requested) / 1024
    assert finding.text("KiB").startswith(f"{expected} Its training peak is {lower:.2f} KiB lower: ")
    assert finding in document(report).verdict()


def test_modes_that_keep_the_same_are_described_once_in_a_verdict() -> None:
    scenarios = "fp32+compile,fp32+compile:max-autotune-no-cudagraphs"
    report = memsize.report(Gelus(), (32, 64), batch_size=8, scenarios=scenarios)
    assert [f.values["name"] for f in report.findings if f.code == "compiled"] == scenarios.split(",")
    (described,) = (finding for finding in document(report).verdict() if finding.code == "compiled")
    assert described.values["name"] == "fp32+compile"


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_model_that_comes_compiled_is_shown_as_it_is_written_with_a_note(wrapped: bool) -> None:
    model: Any = Gelus()
    if wrapped:
        model = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    eager, compiled = traced_anew(model, "fp32"), traced_anew(model, "fp32" + COMPILED)
    assert [any("torch.compile is ignored" in n for n in trace.notes) for trace in (eager, compiled)] == [True, False]
    assert totals(compiled).saved_bytes < totals(eager).saved_bytes


def test_a_model_that_comes_with_compiled_parts_is_shown_compiled_so() -> None:
    """Two blocks, one of which is compiled: it keeps three tensors, and the other five; the second's input is the
    first's result, which the first does not keep. A trace is of the model as it comes."""
    model = nn.Sequential(Gelus(), Gelus())
    model[0] = torch.compile(model[0])
    report = memsize.report(model, input_size=(32, 64), batch_size=8)
    totals_by_name = {result.name: result.totals for result in report.scenario_results}
    one, compiled = 8 * 32 * 64 * 4, totals_by_name["as-given+compile"]
    assert compiled and compiled.saved_bytes == (3 + 5) * one
    assert any(note == "scenarios with +compile compile what the model compiles itself: 0" for note in report.remarks)
    step = memsize.trace(model, input_size=(32, 64), batch_size=8, optimizer="sgd")
    assert totals(step.trace).saved_bytes == (3 + 5) * one
    assert "fp32" in totals_by_name and not isinstance(model[0], Gelus)


def test_fit_looks_for_the_compiled_batch_where_the_uncompiled_one_is() -> None:
    """A product takes its input and its result, compiled or not. The compiled search begins at the uncompiled answer:
    it compiles that size and the next one only.
    """
    model = nn.Linear(512, 512, bias=False)
    with compiled_graphs() as graphs:
        fit = memsize.fit(model, input_size=(4096, 512), compile=True, budget="1GiB")
    sizes = fit.rows.set_index("scenario")["size"]
    assert sizes["as-given+compile"] == sizes["as-given"] and len(graphs) == 2


@pytest.mark.thorough
def test_fit_finds_the_larger_batch_of_compiled_code() -> None:
    fit = memsize.fit(Gelus(), input_size=(4096, 64), scenarios="fp32", compile=True, train="sgd", budget="1GiB")
    sizes = fit.rows.set_index("scenario")["size"]
    assert sizes["fp32+compile"] > sizes["fp32"]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers, self.head = nn.Embedding(64, 64), Gelus(), nn.Linear(64, 64)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.layers(self.words(input_ids))[:, -1:])


def generating(model: nn.Module, input_ids: Tensor, max_new_tokens: int) -> Tensor:
    for _ in range(max_new_tokens):
        input_ids = torch.cat([input_ids, model(input_ids).argmax(-1)], 1)
    return input_ids


def test_a_generation_compiles_each_call_of_the_model() -> None:
    options: dict[str, Any] = {"scenarios": "fp32", "compile": True, "prompt": 4096, "max_new_tokens": 2}
    rows = memsize.generate(Words(), "512:int64", step=generating, **options).rows.set_index("scenario")
    # Eager code holds what silu gave, its exp and the sin of that; compiled code a product and what it makes of it.
    one = 4096 * 64 * 4
    more = 256 if torch.__version__.startswith("2.11.") else 0  # there, compiled code holds a small tensor more
    assert rows.loc["fp32", "prefill_peak"] - rows.loc["fp32+compile", "prefill_peak"] >= one - more


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_long_generation_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[None] = []
    monkeypatch.setattr("memsize.compile.region.dynamo.reset", lambda reset=torch._dynamo.reset: resets.append(reset()))
    memsize.generate(Words(), "512:int64", step=generating, scenarios="fp32+compile", prompt=64, max_new_tokens=20)
    assert len(resets) == 1  # not anew for each length at which a step is traced


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"execute": True}, "compiled code is not predicted for runs on the CPU"),
        ({"parallel": "dp=2"}, "compiled code is not predicted under dp=2, .*: use ddp=2"),
    ],
)
def test_what_is_not_predicted_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(memsize.MemsizeError, match=message):
        memsize.timeline(Gelus(), input_size=(32, 64), train="sgd", compile=True, **options)


@contextmanager
def estimates() -> Iterator[list[int]]:
    """The peak of each graph's own buffers, as Inductor's scheduler estimates it, in the order of compilation.

    The other estimate, `estimate_peak_memory`, takes a graph's results off where they are made until PyTorch 2.12.
    """
    from torch._inductor import memory
    from torch._inductor.graph import GraphLowering

    peaks: list[int] = []
    original = GraphLowering._update_scheduler

    def updated(graph: Any) -> None:
        original(graph)
        nodes, outputs = graph.scheduler.nodes, OrderedSet(graph.get_output_names())
        freeable = memory.get_freeable_input_buf(nodes, OrderedSet(graph.graph_inputs))
        peaks.append(memory.estimate_peak_memory_allocfree(nodes, freeable, outputs)[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphLowering, "_update_scheduler", updated)
        yield peaks


@pytest.mark.parametrize("scenario", ["fp32", "amp-bf16"])
@pytest.mark.parametrize("model", [Gelus, pytest.param(Attention, marks=pytest.mark.thorough)])
def test_the_forward_peaks_where_inductor_says(model: Any, scenario: str) -> None:
    """The estimate knows no buffer that is written in place."""
    import torch._inductor.config as config

    with estimates() as peaks, config.patch(inplace_buffers=False):
        trace = traced_anew(model(), scenario + COMPILED)
    forward = trace.phases.index("forward 1")
    own = [e for e in trace.events if e.phase == forward and trace.storages[e.storage].role != "workspace"]
    seeds = 2 * 8  # of the attention's dropout, which memory-efficient attention without dropout leaves on the CPU
    assert peaks[0] - max(live_bytes(own)) == (seeds if model is Attention and scenario == "fp32" else 0)


# -- PyTorch's own compiled code on the CPU ----------------------------------------------------------------------------

_KERNEL = re.compile(r"^(cpp_fused\w*) = async_compile", re.MULTILINE)


class Softmaxes(nn.Module):
    """Attention whose scores are made, over words: an embedding, reductions, products of three dimensions."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words, self.qkv = nn.Embedding(100, width), nn.Linear(width, 3 * width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(self.words(x.abs().long()))).chunk(3, dim=-1)
        return self.head((q @ k.transpose(1, 2)).softmax(dim=-1) @ v)


class Pooled(nn.Module):
    """Statistics that are updated, pooling, and a dtype that is halved. Convolutions reorder weights where they run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm2d(3), nn.Linear(192, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.silu(self.norm(x)), 2).to(torch.bfloat16)
        return self.head(x.flatten(1).float()).log_softmax(dim=-1)


def strided(tensor: Tensor, device: str) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def allocated_by(call: Any, args: list[Any]) -> int:
    """The most bytes that PyTorch's allocator has given out for copies of `args` and a call, by its profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call([strided(a, "cpu").copy_(a) if isinstance(a, Tensor) else a for a in args])
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def predicted_for(source: str, args: list[Any]) -> int:
    """The same of the code that Inductor wrote for the CPU, run without its kernels on tensors without memory."""
    from memsize.compile.generated import Origins, loaded

    ledger = Ledger()
    call, _ = loaded(source, Origins(), dict.fromkeys(_KERNEL.findall(source), lambda *_: None), None)
    meta = [strided(a, "meta") if isinstance(a, Tensor) else a for a in args]
    with open_simulation() as simulation, simulation.with_part(Ledger, ledger), ledger:
        for tensor in meta:
            if isinstance(tensor, Tensor):
                ledger.enter(tensor, "temporary", "")
        del tensor
        call(meta)
    return max(live_bytes(ledger.events))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "size"),
    [(Gelus, (32, 64)), (Softmaxes, (16,)), (Pooled, (3, 16, 16))],
    ids=["gelus", "softmaxes", "pooled"],
)
def test_code_for_the_cpu_takes_what_it_takes_for_real(model: Any, size: tuple[int, ...]) -> None:
    """Forward and backward of Inductor's C++ backend, which really run."""
    with warnings.catch_warnings(action="ignore"):
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    pairs: list[tuple[int, int]] = []

    def lowered(graph: Any, inputs: Any, **options: Any) -> Any:
        compiled = compile_fx_inner(graph, inputs, **options)

        def run(args: list[Any]) -> Any:
            pairs.append((predicted_for(compiled.source_code, args), allocated_by(compiled, args)))
            return compiled(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    with warnings.catch_warnings(action="ignore"):
        compiled = torch.compile(
            model(), backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=lowered)
        )
        compiled(torch.rand(8, *size)).sum().backward()
    torch._dynamo.reset()
    predicted, real = zip(*pairs, strict=True)
    assert len(real) == 2
    assert predicted == real


# -- programs that compile ---------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn
import torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        assert x.is_cuda and x.device.type == "cuda"
        x = x + torch.arange(64, device=x.device) + torch.ones(64, device="cuda")
        return self.down(F.gelu(self.up(x)).sin().exp())

model = nn.Sequential(Block(), Block()).cuda()
optimizer = torch.optim.AdamW(model.parameters())

def loss_of(x):
    return model(x).square().mean()

def update():
    optimizer.step()

{lines}
for _ in range(3):
    loss_of(torch.randn(512, 64, device="cuda")).backward()
    update()
    optimizer.zero_grad()
"""


def most_in(trace: Trace, phase: str) -> int:
    number = trace.phases.index(phase)
    return max(
        live for live, event in zip(live_bytes(trace.events), trace.events, strict=True) if event.phase == number
    )


@contextmanager
def compiled_graphs() -> Iterator[list[str]]:
    """The graphs of Dynamo's that are compiled meanwhile."""
    with warnings.catch_warnings(action="ignore"):
        from memsize.compile.backend import Compiler
    graphs: list[str] = []
    original = Compiler.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compiler, "__call__", lambda *args: (graphs.append("graph"), original(*args))[1])
        yield graphs


def run_script(text: str, gpu: str = "a100", **options: Any) -> Trace:
    with TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(text)
        return memsize.run(script, gpu=gpu, **options).trace


@cache
def run_with_graphs(lines: str) -> tuple[Trace, int]:
    """The trace of the script with these lines, at which several tests look, and how many graphs were compiled."""
    with compiled_graphs() as graphs:
        return run_script(SCRIPT.format(lines=lines)), len(graphs)


def ran(lines: str) -> Trace:
    return run_with_graphs(lines)[0]


COMPILED_LINES = {
    "a model": "model = torch.compile(model)",
    "a model, in place": "model.compile(fullgraph=True)",
    "a block": "for block in model: block.compile(dynamic=False)",
    "a function": "loss_of = torch.compile(loss_of)",
}


@pytest.mark.thorough
@pytest.mark.parametrize("lines", COMPILED_LINES.values(), ids=COMPILED_LINES)
def test_a_program_compiles(lines: str) -> None:
    eager, compiled = ran(""), ran(lines)
    assert most_in(compiled, "forward 2") < most_in(eager, "forward 2")
    assert live_bytes(compiled.events)[-1] == live_bytes(eager.events)[-1]
    assert not [note for note in compiled.notes if "could not be lowered" in note]
    paths = {compiled.layers[s.layer].path for s in compiled.storages if s.op == "addmm" and s.role == "activation"}
    assert paths == {"0.up", "1.up"} | ({"0.down", "1.down"} & paths)


def test_floats_of_a_graph_of_any_size_are_inputs() -> None:
    """Dynamo makes an input of a norm's epsilon; tracing begins anew where no tensor can stand for it."""
    lines = "model = nn.Sequential(model, nn.LayerNorm(64)).cuda()"
    eager, compiled = ran(lines), ran(f"{lines}; model = torch.compile(model, dynamic=True)")
    assert most_in(compiled, "forward 2") < most_in(eager, "forward 2")
    assert not [note for note in compiled.notes if "could not be" in note]


def test_a_transform_of_torch_func_is_compiled() -> None:
    """It refuses saved-tensor hooks, such as those of a run. The gradient of a sum of exp is exp: one tensor more."""
    trace = run_script(
        "import torch\ngradient = torch.compile(torch.func.grad(lambda x: x.exp().sum()))\n"
        "gradient(torch.randn(64, 64, device='cuda'))"
    )
    assert peak(trace) == 2 * 64 * 64 * 4
    assert not trace.failure and not [note for note in trace.notes if "could not be" in note]
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()


def test_with_compiled_autograd_each_backward_is_compiled_by_itself() -> None:
    lines = "model = torch.compile(model)"
    usual, compiled = ran(lines), ran(f"with torch._dynamo.config.patch(compiled_autograd=True): {lines}")
    assert [event.delta for event in compiled.events] == [event.delta for event in usual.events]
    assert [note[:33] for note in compiled.notes if note not in usual.notes] == ["compiled autograd is not followed"]


def test_later_calls_run_the_code_that_the_first_one_compiled() -> None:
    """Guards are made where no mode of a run is active, and pass where they are."""
    assert run_with_graphs("model = torch.compile(model)")[1] == 1


def test_a_compiled_backward_frees_what_it_has_used() -> None:
    trace = ran("model = torch.compile(model)")
    backward = trace.phases.index("backward 2")
    events = [event for event in trace.events if event.phase == backward]
    used = next(i for i, e in enumerate(events) if e.delta < 0 and trace.storages[e.storage].role == "activation")
    assert any(event.delta > 0 for event in events[used:])


ON_THE_GPU = """
import torch
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * x.new_tensor(2.0)
    @staticmethod
    def backward(context, gradient):
        return gradient * torch.tensor(2.0, device=gradient.device)
up = torch.nn.Linear(64, 64, device="cuda")
def scaled(x):
    with torch.cuda.device(x.device):
        return {}
torch.compile(scaled, fullgraph=True)(torch.randn(32, 64, device="cuda")).sum().backward()
torch.compiler.reset()
"""


def test_compiled_code_names_its_gpu_and_asks_for_its_properties() -> None:
    """What is there already is not copied; a warp has 32 threads."""
    asking = 'up(x.cuda()).to("cuda") * torch.cuda.get_device_properties("cuda").warp_size'
    asking = f'Doubled.apply({asking} * torch.tensor(2.0, device="cuda"))'
    named = run_script(ON_THE_GPU.format(asking))
    plain = run_script(
        ON_THE_GPU.replace("with torch.cuda.device(x.device)", "if True").format("up(x) * 32 * 2.0 * 2.0")
    )
    assert [event.delta for event in named.events] == [event.delta for event in plain.events]
    assert named.notes == plain.notes


REMEMBERED = """
import torch
from torch._dynamo.device_interface import CudaInterface
torch.compile(lambda x: x.sin())(torch.ones(4, device="cuda"))
assert CudaInterface.Worker.get_device_properties(0).multi_processor_count == {}
"""


def test_the_compiler_asks_for_the_gpu_of_the_run() -> None:
    """PyTorch remembers a process's GPUs, and so those of runs before. A T4 has 40 multiprocessors, an A100 108."""
    for gpu, count in (("t4", 40), ("a100", 108)):
        run_script(REMEMBERED.format(count), gpu=gpu)
    from torch._dynamo.device_interface import caching_worker_device_properties

    assert not caching_worker_device_properties


LAUNCHED = """
import torch, triton
from torch.library import triton_op, wrap_triton

@triton.jit
def doubled(x, out):
    pass

@triton_op("memsize_tests::double", mutates_args={})
def double(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    wrap_triton(doubled)[(1,)](x, out)
    return out

double.register_autograd(lambda context, gradient: gradient)
up = torch.nn.Linear(64, 64, device="cuda")
torch.compile(lambda x: double(up(x)).sin().sum())(torch.randn(32, 64, device="cuda")).backward()
"""


def test_a_compiled_triton_kernel_writes_to_buffers_of_its_operator() -> None:
    """Its operator is traced: the buffer that it makes is saved for sin, as the input is for `up`."""
    pytest.importorskip("triton", reason="comes with PyTorch's CUDA builds")
    trace = run_script(LAUNCHED)
    assert not [note for note in trace.notes if "could not be" in note]
    assert [s.op for s in trace.storages if s.role == "activation" and s.bytes == 32 * 64 * 4] == ["randn", "empty"]


LOSS = """
import torch
from torch.nn.functional import cross_entropy

@torch.compile(fullgraph=True)
def capped(logits):
    return torch.tanh(logits / 30) * 30

@torch.compile(fullgraph=True)
def loss_of(x, weight, targets):
    return cross_entropy(capped(x @ weight.T).float(), targets)

x, weight = (torch.randn(size, 64, dtype=torch.bfloat16, device="cuda") for size in (1024, 8192))
loss = loss_of(x, weight.requires_grad_(), torch.zeros(1024, dtype=torch.int64, device="cuda"))
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
loss.backward()
assert (torch.cuda.max_memory_allocated() - before) // 2**20 == {}
"""


@pytest.mark.parametrize(("stack", "most"), [("torch=2.4", 16 + 32), ("torch=2.5", 16)])
def test_until_2_4_the_gradient_of_a_loss_starts_as_a_tensor_of_zeros(stack: str, most: int) -> None:
    """Of 1024 × 8192 logits, which take 16 MiB; in float32, as the gradient of what `nll_loss` takes, 32. A compiled
    function that another calls is part of its graph."""
    run_script(LOSS.format(most), stack=stack)
    with pytest.raises(memsize.MemsizeError):
        run_script(LOSS.format(most + 1), stack=stack)


MULTIPLIED = """
import torch
import math as {name}
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 64)

    def forward(self, x):
        return torch.relu(self.body(x)) * {name}.pi

model = torch.compile(nn.Sequential(Block(), Block()).cuda())
model(torch.randn(8, 64, device="cuda")).sum().backward()
"""


def test_a_second_script_of_a_process_is_compiled_with_its_own_globals() -> None:
    """The frame is that of `nn.Sequential`, which both share; Dynamo reads the block's globals in `__main__`."""
    first, second = (run_script(MULTIPLIED.format(name=name)) for name in ("one", "other"))
    assert [event.delta for event in first.events] == [event.delta for event in second.events]


DESCRIBED = """
import torch, triton
from triton.tools.tensor_descriptor import TensorDescriptor

@triton.jit
def copied(description, out):
    pass

def scaled(x):
    out = torch.empty_like(x)
    {}
    return up(out).sin().sum()

up = torch.nn.Linear(64, 64, device="cuda")
torch.compile(scaled, fullgraph=True)(torch.randn(8, 64, device="cuda")).backward()
"""


def test_a_compiled_triton_kernel_takes_descriptors_of_tensors() -> None:
    pytest.importorskip("triton", reason="is not always installed")
    described = run_script(DESCRIBED.format("copied[(1,)](TensorDescriptor.from_tensor(x, [8, 64]), out)"), "h100")
    plain = run_script(DESCRIBED.format("copied[(1,)](x, out)"), "h100")
    assert [event.delta for event in described.events] == [event.delta for event in plain.events]


SCRIPT_OF_ONE = """
import torch, torch.nn.functional as F
from torch import nn

up = nn.Linear(1024, 1024, bias=False, device="cuda")
loss_of = torch.compile(lambda x: F.silu(up(x)).sum())
optimizer = torch.optim.SGD(up.parameters())
x = torch.randn(4096, 1024, device="cuda")
for _ in range(2):
    loss_of(x).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def switches() -> dict[str, bool]:
    """The switches of Inductor and AOTAutograd."""
    with warnings.catch_warnings(action="ignore"):
        from torch._functorch import config as functorch
        from torch._inductor import config as inductor
    values = inductor.get_config_copy() | functorch.get_config_copy()
    return {name: value for name, value in values.items() if isinstance(value, bool)}


@contextmanager
def switched_off() -> Iterator[set[str]]:
    """The switches that are on by themselves, and off while graphs are compiled."""
    usual, off = switches(), set[str]()
    with warnings.catch_warnings(action="ignore"):
        from torch._inductor import compile_fx
    original = compile_fx.compile_fx

    def compiled(*args: Any, **options: Any) -> Any:
        off.update(name for name, value in switches().items() if usual[name] and not value)
        return original(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_fx, "compile_fx", compiled)
        yield off
    assert switches() == usual


UNCHECKED = {"size_asserts", "alignment_asserts"}
"""Off in any release: compiled code computes nothing here."""
LATER = {
    *("loop_index_inversion_in_fusion", "loop_ordering_after_fusion", "triton.mix_order_reduction"),
    *("delay_realize_cheap_outputs", "keep_addmm_fused_for_half_dtypes", "loop_reindexing_after_fusion"),
    "guess_tangent_strides_as_outputs",
}
"""On since 2.10 or later."""
SINCE_2_6 = {
    *("reorder_for_peak_memory", "donated_buffer", "inplace_padding", "online_softmax"),
    *("triton.coalesce_tiling_analysis", "treat_parameters_as_free_to_save"),
}


@pytest.mark.parametrize(
    ("stack", "largest", "lacking"),
    [
        ("torch=2.9", 2 * 16 + 2 * 4, LATER),
        ("torch=2.5", 3 * 16 + 4, LATER | SINCE_2_6),
        ("torch=2.4", 3 * 16 + 4, LATER | SINCE_2_6 | {"optimize_scatter_upon_const_tensor"}),
    ],
)
def test_a_release_does_only_what_it_does_yet(stack: str, largest: int, lacking: set[str]) -> None:
    """x, the product and its gradient have 16 MiB each, the weight and its gradient 4. From 2.6 on the gradient of the
    product is written into the product, which nothing else needs, and the weight's comes on top; until 2.5 the peak is
    where both are alive. Beside them are workspaces of forward and backward, the loss and its gradient."""
    with switched_off() as off:
        trace = run_script(SCRIPT_OF_ONE, stack=stack)
    beside = 2 * 8_519_680 + 2 * 4
    assert most_in(trace, "backward 2") == largest * 2**20 + beside
    assert off - UNCHECKED == {name for name, is_on in switches().items() if is_on and name in lacking}
    (rules,) = [note for note in trace.notes if "compiled by the rules" in note]
    count = re.search(rf", without (\d+) of its optimizations, which {stack.partition('=')[2]} lacks:", rules)
    assert count and len(off - UNCHECKED) <= int(count[1]) <= len(off)


SCRIPT_OF_TWO = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
layers = [nn.Linear(512, 512, bias=False) for _ in range(8)]  # 1 MiB of weights each
model = nn.Sequential(*(nn.Sequential(layer, nn.SiLU()) for layer in layers)).cuda()
model = DistributedDataParallel(torch.compile(model), bucket_cap_mb={cap})
for _ in range(2):
    model(torch.randn(64, 512, device="cuda")).sum().backward()
"""


CASTING = """
import torch
from torch import nn

class Casting(nn.Linear):
    def forward(self, x):
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype("cuda"))
        return super().forward(x)

model = torch.compile(nn.Sequential(Casting(64, 64), nn.SiLU()).cuda(), fullgraph=True)
with torch.autocast("cuda", torch.bfloat16, enabled={enabled}):
    model(torch.randn(32, 64, device="cuda")).sum().backward()
"""


@pytest.mark.parametrize("enabled", [True, False])
def test_compiled_code_asks_whether_autocast_is_enabled(enabled: bool) -> None:
    """Dynamo calls PyTorch's functions while it traces, and the answers that stand for them in a run too."""
    trace = run_script(CASTING.format(enabled=enabled))
    products = {storage.dtype for storage in trace.storages if storage.op in ("mm", "addmm")}
    assert not trace.failure and ("bfloat16" in products) == enabled


SCRIPT_OF_BLOCKS = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cuda", (2,))
layers = [nn.Linear(512, 512, bias=False) for _ in range(3)]
model = nn.Sequential(*(torch.compile(nn.Sequential(layer, nn.SiLU())) for layer in layers))
for block in (*model, model):
    fully_shard(block, mesh=mesh)
for _ in range(2):
    model(torch.randn(64, 512, device="cuda")).sum().backward()
"""


def test_blocks_are_compiled_and_then_sharded() -> None:
    """As torchtitan does it: FSDP's hooks are those of the module that `torch.compile` returns."""
    with compiled_graphs() as compiled:
        trace = run_script(SCRIPT_OF_BLOCKS, gpus=2)
    assert not trace.failure and len(compiled) == 2  # a forward and a backward, which all blocks share
    gathered = [storage for storage in trace.storages if storage.role == "gathered parameter"]
    assert gathered and {storage.bytes for storage in gathered} == {512 * 512 * 4}


@pytest.mark.parametrize(("cap", "graphs"), [(2, 5), pytest.param(25, 2, marks=pytest.mark.thorough)])
def test_ddp_parts_graphs_at_its_buckets(cap: int, graphs: int) -> None:
    """Dynamo's DDPOptimizer, from the last of 8 layers: one, and then as many as fill `cap` MiB."""
    with compiled_graphs() as compiled:
        trace = run_script(SCRIPT_OF_TWO.format(cap=cap), gpus=2)
    assert len(compiled) == graphs
    paths = {trace.layers[s.layer].path for s in trace.storages if s.op == "mm" and s.role == "activation"}
    assert paths and not any("submod" in path for path in paths)


@pytest.mark.thorough
def test_a_compiled_optimizer_step_makes_the_state_and_fuses_its_update() -> None:
    eager, compiled = ran(""), ran("update = torch.compile(update)")
    states = [sum(s.bytes for s in trace.storages if s.role == "optimizer state") for trace in (eager, compiled)]
    assert states[1] >= states[0] > 0
    updates = [{t.phases[event.phase] for event in t.events} >= {"optimizer 2"} for t in (eager, compiled)]
    assert updates == [True, False]  # eager code needs temporaries, compiled code writes in place


FUSED_STEP = """
import torch
from torch import nn

model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)

@torch.compile
def update():
    optimizer.step()

for _ in range(2):
    model(torch.randn(32, 64, device="cuda")).sum().backward()
    update()
    optimizer.zero_grad()
"""


def test_a_compiled_fused_step_makes_the_state_and_runs_the_fused_kernel() -> None:
    """Dynamo breaks the graph at `_fused_adam`. Two moments of 64 x 64 + 64 floats, and two steps of 4 B on the GPU."""
    trace = run_script(FUSED_STEP)
    state = [(s.bytes, trace.phases[e.phase]) for s, e in made(trace) if s.role == "optimizer state"]
    assert sum(size for size, _ in state) == 2 * 4 * (64 * 64 + 64) + 2 * 4
    assert {phase for _, phase in state} == {"optimizer 1"}


def made(trace: Trace) -> list[tuple[Any, Any]]:
    """Storages with the events that make them."""
    return [(trace.storages[event.storage], event) for event in trace.events if event.delta > 0]


WHILE = "torch._higher_order_ops.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (torch.zeros(()), x))"


@pytest.mark.parametrize(
    ("value", "tensors"),
    [
        pytest.param("torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))", 2, id="x, a branch's"),
        pytest.param(WHILE, 3, id="x, the last run's, this one's"),
    ],
)
def test_control_flow_that_depends_on_data_is_lowered(value: str, tensors: int) -> None:
    trace = run_script(
        f"import torch, torch._higher_order_ops\ntorch.compile(lambda x: {value})(torch.randn(64, 64, device='cuda'))"
    )
    assert peak(trace) // (64 * 64 * 4) == tensors
    assert not trace.failure and not [note for note in trace.notes if "could not be" in note]


def test_a_verdict_names_the_operation_that_cannot_be_traced() -> None:
    scan = """
@torch.library.custom_op("traced::scan", mutates_args=())
def scan(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(0)
loss_of = torch.compile(lambda x: scan(x).sum())
"""
    with pytest.raises(ForwardError) as error:
        run_script(SCRIPT.format(lines=scan))
    reason = error.value.trace.failure.reason
    assert reason.startswith("TorchRuntimeError: There was no fake impl registered for <CustomOpDef(traced::scan)>")


@pytest.mark.thorough
def test_tensors_inside_wrappers_are_traced() -> None:
    """torchao's optimizer compiles its step; its moments hold a byte per number, and 4 B of scale per 256 of them."""
    pytest.importorskip("torchao.optim")
    with_wrappers = SCRIPT.replace("torch.optim.AdamW", "__import__('torchao.optim').optim.AdamW8bit")
    trace = run_script(with_wrappers.format(lines=""))
    assert any("compiled by the rules" in note for note in trace.notes)
    assert not [note for note in trace.notes if "could not be" in note]
    assert {s.dtype for s in trace.storages if s.role == "optimizer state" and s.bytes == 64 * 256} == {"uint8"}


def test_aot_eager_partitions_and_does_not_fuse() -> None:
    eager, compiled, partitioned = (
        ran(line) for line in ("", "model = torch.compile(model)", "model = torch.compile(model, backend='aot_eager')")
    )
    assert totals(partitioned).saved_bytes < totals(eager).saved_bytes
    assert most_in(compiled, "forward 2") < most_in(partitioned, "forward 2")
    assert live_bytes(partitioned.events)[-1] == live_bytes(eager.events)[-1]


def test_the_backend_of_cuda_graphs_keeps_what_eager_code_keeps_in_a_pool() -> None:
    """Its partition recomputes nothing. The first step warms up; the two later ones copy the input, 512 x 64 floats,
    and the weights of two blocks, which Dynamo hands to the backend as inputs like any other, into the pool."""
    eager, captured = (ran(line) for line in ("", "model = torch.compile(model, backend='cudagraphs')"))
    assert totals(captured).saved_bytes == totals(eager).saved_bytes
    copies = [s.bytes for s in captured.storages if s.op == "copy_" and s.stream == PRIVATE_POOL]
    assert copies.count(64 * 256 * 4) >= 2 * 2 * 2 and 512 * 64 * 4 in copies
    made_by_model = {s.stream for s in captured.storages if s.op in ("addmm", "gelu", "sin", "exp") and s.bytes > 4096}
    assert made_by_model == {PRIVATE_POOL}


def test_a_program_of_which_nothing_is_compiled_says_so() -> None:
    """PyTorch marks `checkpoint_sequential` as not to be traced, nor what it calls."""
    text = """
import torch
from torch.utils.checkpoint import checkpoint_sequential
layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda()
function = torch.compile(lambda x: checkpoint_sequential(layers, 2, x, use_reentrant=False))
function(torch.randn(8, 64, device="cuda")).sum().backward()
"""
    assert any(note.startswith("torch.compile compiled nothing") for note in run_script(text).notes)
    assert not any("compiled nothing" in note for note in ran("model = torch.compile(model)").notes)


def test_a_program_reads_what_compiled_code_computes_of_known_values() -> None:
    """As a detector that checks its targets: boxes that were scaled in compiled code have their heights."""
    text = """
import torch
@torch.compile
def scaled(boxes, image):
    ratio = torch.tensor(image.shape[-1] / 4, device=boxes.device)
    left, top, right, bottom = boxes.unbind(1)
    return image.exp(), torch.stack((left * ratio, top * ratio, right * ratio, bottom * ratio), dim=1)
_, boxes = scaled(torch.tensor([[1.0, 2.0, 5.0, 4.0]], device="cuda"), torch.empty(3, 8, 8, device="cuda"))
if (boxes[:, 2:] <= boxes[:, :2]).any():
    torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
torch.empty(int(boxes[0, 2]) << 10, dtype=torch.uint8, device="cuda")
"""
    trace = run_script(text)
    assert sorted(s.bytes for s in trace.storages if s.op == "empty") == [3 * 8 * 8 * 4, 10 << 10]


def test_a_graph_without_inputs_is_compiled_for_the_gpu() -> None:
    """The compiler then asks whether there is a GPU, on which it would make tensors for its patterns."""
    text = """
import torch
function = torch.compile(lambda: torch.arange(1024, dtype=torch.float32, device="cuda").exp().sin())
function()
"""
    trace = run_script(text)
    assert not [note for note in trace.notes if "could not be" in note]
    assert [s.bytes for s in trace.storages] == [1024 * 4]


def test_a_function_that_is_compiled_too_often_runs_eagerly() -> None:
    """Two sizes are allowed. Compiled, an exponential and a sine are one result; eagerly, both are stored."""
    text = """
import torch
torch._dynamo.config.recompile_limit = 2
function = torch.compile(lambda x: x.exp().sin(), dynamic=False)
for rows in (8, 16, 32):
    function(torch.empty(rows, 1024, device="cuda"))
"""
    trace = run_script(text)
    assert any("was compiled 2 times" in note and "config.recompile_limit" in note for note in trace.notes)
    results = Counter(s.bytes for s in trace.storages if s.op in ("exp", "sin"))
    assert results == {8 * 1024 * 4: 1, 16 * 1024 * 4: 1, 32 * 1024 * 4: 2}


def test_a_program_in_which_dynamo_raises_is_not_said_to_be_skipped() -> None:
    """`fullgraph` refuses a branch on data: the program meets the error, which says why nothing is compiled."""
    text = """
import torch
@torch.compile(fullgraph=True)
def doubled(x):
    return x * 2 if x.sum().item() > 0 else x
try:
    doubled(torch.randn(8, 64, device="cuda"))
except torch._dynamo.exc.UserError:
    print("refused")
"""
    notes = run_script(text).notes
    assert any("compiled by the rules" in note for note in notes)
    assert not any("compiled nothing" in note for note in notes)


def test_a_file_that_hides_triton_from_the_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "memsize.compile.region", None)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__file__="project/triton.py"))
    report = memsize.report(perceptron(), input_size=(64,), scenarios="fp32", compile=True)
    reasons = {result.name: result.reason for result in report.scenario_results}
    assert reasons["fp32"] is None
    assert "PyTorch's compiler cannot be imported" in reasons["fp32+compile"]
    assert "`import triton` finds project/triton.py" in reasons["fp32+compile"]


def test_another_backend_is_named() -> None:
    compiled = ran("model = torch.compile(model, backend='openxla')")
    assert any("backend openxla is not followed" in note for note in compiled.notes)
    assert [e.delta for e in compiled.events] == [e.delta for e in ran("").events]


def test_a_backend_that_pytorch_does_not_know_is_named_as_such() -> None:
    notes = ran("model = torch.compile(model, backend='inductr')").notes
    assert any("backend inductr is not followed, and PyTorch refuses it where no package" in note for note in notes)
    assert not any("PyTorch refuses it" in note for note in ran("model = torch.compile(model, backend='ts')").notes)
