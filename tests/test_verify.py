"""`memsize verify`: the real run on a stand-in for a GPU, what is read off a GPU, files, formats and the command."""

from __future__ import annotations

import csv
import inspect
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memsize
from memsize import Training, Verification
from memsize.cli import run
from memsize.errors import InputError, OutputError, ScenarioError
from memsize.render import FORMATS, render
from tests import records
from tests.conftest import Python
from tests.gpus import snapshot
from tests.kernels import Convolution, Plans
from tests.measurements import (
    NO_LOCATION,
    AllocationEvent,
    ConvolutionWorkspace,
    CudaMemory,
    DeviceUse,
    Experiment,
    MeasuredWorkload,
    Measurement,
    OpLocation,
    OpSpan,
    Peaks,
    SoftwareStack,
    Weightless,
    allocation_events,
    convolves,
    cuda_memory,
    executable,
    located,
    log_of,
    materialize,
    measure,
    predict,
    verification_of,
    verify_measurements,
    verify_step,
    workspaces,
)
from tests.models import inputs_from_data, inputs_from_specs, parse_inputs, scenario_named
from tests.pages import check_golden as check
from tests.records import AllocationDifference, Interval, Prediction, VerifiedRun, off_by
from tests.standin import CONTEXT, STACK, StandIn
from tests.test_step import Checkpointed, without_onednn

__all__ = ["without_onednn"]  # a fixture of every test here: oneDNN's kernels are the CPU's affair

BLAS = 8_519_680
"""cuBLAS's workspace on an A100; a CPU has none."""
MIB = 2**20


def case(
    model: nn.Module,
    size: str,
    scenario: str = "fp32",
    train: Training | None = None,
    batch: int = 4,
    mode: bool = True,
) -> Experiment:
    inputs = inputs_from_specs(parse_inputs([size]), batch)
    return Experiment(type(model).__name__, model, inputs, mode, scenario_named(scenario), train)


def checked(what: Experiment) -> Verification:
    with StandIn() as memory:
        return verify_step(what, memory, lambda _: None)


def perceptron() -> nn.Module:
    with Weightless():
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


SGD = Training("sgd-momentum:foreach", loss="mean")


# -- the whole way, on the CPU -----------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("scenario", ["fp32", "bf16", "fp16", "amp-bf16", "apex-O2", "apex-O3"])
def test_a_training_step_is_as_predicted(scenario: str) -> None:
    """Every allocation of the last step; the peaks differ by the two workspaces that a CPU does not have."""
    found = checked(case(perceptron(), "64", scenario, SGD))
    assert found.alignment is not None
    assert found.alignment.differences == ()
    assert found.alignment.matched >= 12
    requested, allocated, *_ = found.comparisons
    assert requested.difference == allocated.difference == 2 * BLAS


def test_an_inference_is_as_predicted_but_for_the_workspace() -> None:
    found = checked(case(perceptron(), "64", mode=False))
    assert found.alignment is not None
    assert found.alignment.differences == (
        AllocationDifference("predicted only", OpLocation("forward", "0", "addmm"), BLAS, None, True),
    )
    # weights and biases (64·128 + 128 + 128·10 + 10)·4, input 4·64·4, and of the outputs two layers' at a time
    weights = (64 * 128 + 128 + 128 * 10 + 10) * 4
    seen = found.runs[0].measurement
    assert seen.peaks is not None and seen.peaks.requested == weights + 4 * 64 * 4 + 2 * 4 * 128 * 4
    assert seen.peaks == seen.steady


MODELS: dict[str, tuple[Callable[[], nn.Module], str, Training]] = {
    "checkpointed": (Checkpointed, "32", SGD),
    "accumulated": (perceptron, "64", replace(SGD, gradient_accumulation_steps=3)),
    "averaged": (perceptron, "64", replace(SGD, ema=True)),
    "zeroed in place": (perceptron, "64", replace(SGD, set_to_none=False)),
    "frozen": (lambda: _frozen(perceptron()), "64", SGD),
    "tied": (lambda: _Tied(), "8:int64:0..30", Training("sgd:foreach", loss="mean")),
    "attribute": (lambda: _Attribute(), "64", SGD),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(4)), "24", SGD),
}


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 16)
        self.head = nn.Linear(16, 31, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


class _Attribute(nn.Module):
    """A tensor that `to` does not move: large enough that a weightless constructor does not make it."""

    def __init__(self) -> None:
        super().__init__()
        with Weightless():
            self.table = torch.randn(64, 128)
            self.fc = nn.Linear(128, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x @ self.table)


def _frozen(model: nn.Module) -> nn.Module:
    model[0].requires_grad_(False)  # type: ignore[index,operator]
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_each_way_to_train_runs_for_real(name: str) -> None:
    build, size, training = MODELS[name]
    found = checked(case(build(), size, train=training))
    assert found.alignment is not None
    kinds = [(d.kind, d.place.op, d.predicted, d.real) for d in found.alignment.differences]
    # an embedding's gradient is sorted by CUDA, and a tied one is added to the head's out of place on both
    assert [kind for kind in kinds if kind[1] != "embedding_dense_backward"] == []
    assert found.alignment.matched


def test_a_convolutional_net_is_run_twice() -> None:
    what = case(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), "3,8,8", train=SGD)
    assert convolves(what.trace(STACK)) and not convolves(case(perceptron(), "64").trace(STACK))
    found = checked(what)
    assert [each.measurement.workload.benchmark for each in found.runs] == [False, True]
    assert [each.prediction.convolutional for each in found.runs] == [True, True]
    assert all(low <= high for low, high in (each.predicted for each in found.comparisons))
    plain, benchmarked = (each.prediction.most.requested for each in found.runs)
    assert plain < benchmarked
    assert torch.backends.cudnn.benchmark is False


def test_the_users_model_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    checked(case(model, "8", train=SGD))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(random, torch.get_rng_state())


def test_memtracker_says_what_was_allocated() -> None:
    seen = checked(case(perceptron(), "64", train=SGD)).runs[0]
    assert seen.tracked is not None and seen.measurement.peaks is not None
    # it does not round to blocks on a CPU: the loss and three gradients of it are no part of its count there
    assert 0.97 < seen.tracked.predicted.low / seen.measurement.peaks.allocated <= 1


class _Untrackable(nn.Module):
    """Calls itself once more from outside: MemTracker takes that for the next iteration and gives up."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.again = True

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x))


def test_what_memtracker_cannot_follow_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed._tools.mem_tracker import MemTracker

    def refuse(self: Any, *known: Any) -> None:
        raise NotImplementedError("no such tensors\nand more")

    monkeypatch.setattr(MemTracker, "track_external", refuse)
    seen = checked(case(_Untrackable(), "8", train=SGD))
    assert seen.runs[0].measurement.untracked == "NotImplementedError: no such tensors"
    assert seen.runs[0].tracked is None
    assert "MemTracker could not follow the step" in render(seen, "text")


class _Full(nn.Module):
    """Runs out of memory where no trace would."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has …")
        return self.fc(x)


def test_running_out_of_memory_is_a_measurement() -> None:
    found = checked(case(_Full(), "8", train=SGD))
    assert found.runs[0].measurement.error == "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert all(comparison.measured is None for comparison in found.comparisons[:3])
    assert found.alignment is None
    assert "the run ended: CUDA out of memory" in render(found, "text")


def test_a_process_that_holds_memory_is_refused() -> None:
    with StandIn() as memory:
        plan = case(perceptron(), "64").plan(memory.device)
        memory.settle()
        kept = torch.zeros(2**18)
        with pytest.raises(InputError, match=r"holds 1.00 MiB on the GPU already"):
            measure(plan, memory)
    assert kept.numel() == 2**18


class _Overflowing(nn.Module):
    """Its gradients overflow until the scale is small enough."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * 1e35


def test_steps_that_the_scaler_leaves_out_are_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first scale is 65,536; 65,536 · 1e35 is above float32's 3.4e38, and so is half of it down to 2,048."""
    original, made = torch.GradScaler, list[torch.GradScaler]()

    def scaler(_: str) -> torch.GradScaler:
        made.append(original("cpu"))
        return made[-1]

    monkeypatch.setattr(torch, "GradScaler", scaler)
    training = Training("sgd:foreach", loss="sum", scaler=True)
    seen = checked(case(_Overflowing(), "8", train=training)).runs[0].measurement
    assert seen.skipped >= 5
    assert made[-1].get_scale() == 65_536 / 2**seen.skipped


@pytest.mark.parametrize("scenario", ["int8-dynamic", "nf4", "int4-weight"])
def test_what_no_gpu_runs_is_refused(scenario: str) -> None:
    with pytest.raises(ScenarioError, match="cannot be run on a GPU here"):
        case(perceptron(), "64", scenario).plan(torch.device("cpu")).build()


def test_int8_weights_are_torchaos() -> None:
    pytest.importorskip("torchao")
    setup = case(perceptron(), "64", "int8-weight").plan(torch.device("cpu")).build()
    assert type(setup.model[0].weight.data).__name__ == "Int8Tensor"  # type: ignore[index]
    found = checked(case(perceptron(), "64", "int8-weight", mode=False))
    # data, scales and zero points are there; MemTracker asks a wrapper for a storage that it does not have
    assert found.runs[0].measurement.peaks is not None


def test_a_model_made_real_keeps_its_structure() -> None:
    model = nn.LSTM(8, 16, 2)
    before = [tuple(parameter.shape) for parameter in model.parameters()]
    materialize(model, torch.device("cpu"))
    assert [tuple(parameter.shape) for parameter in model.parameters()] == before
    assert all(a is b for a, b in zip(model._flat_weights, model.parameters(), strict=True))
    assert not model._weights_have_changed()  # or the first forward would lay them out once more
    tied = _Tied().to("meta")
    tied.head.weight = tied.embedding.weight
    tied.embedding.weight.requires_grad_(False)
    materialize(tied, torch.device("cpu"))
    assert tied.head.weight is tied.embedding.weight and not tied.head.weight.requires_grad
    norm = nn.BatchNorm1d(8192, device="meta")
    materialize(norm, torch.device("cpu"))
    assert bool((norm.weight == 1).all() and (norm.running_var == 1).all())


def test_an_executable_copy_has_values_everywhere() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, device="meta"))
    model.scale = torch.ones(4, device="meta")  # type: ignore[assignment]  # neither a parameter nor a buffer
    copied = executable(model)
    assert torch.equal(copied[0].weight, model[0].weight) and copied[0].weight is not model[0].weight
    assert not copied.scale.is_meta and not any(tensor.is_meta for tensor in copied.state_dict().values())
    assert model[1].weight.is_meta and model.scale.is_meta  # the user's own is left as it is


def test_a_checkpoint_inside_the_model_is_recomputed_for_real() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(self.fc, x, use_reentrant=False)
            return result

    found = checked(case(Half(), "16", train=SGD))
    assert found.alignment is not None and found.alignment.differences == ()


# -- what a prediction is ----------------------------------------------------------------------------------------------


def test_the_stack_decides_workspaces_and_context() -> None:
    hopper = replace(STACK, capability=(9, 0), torch="2.11.0+cu130")
    assert workspaces(hopper) == (32 * MIB, MIB, None, True, (132, 2048))
    assert workspaces(replace(hopper, torch="2.13.0", cublas_config=":4096:8")) == (
        32 * MIB,
        0,
        None,
        True,
        (132, 2048),
    )
    what = case(perceptron(), "64")
    said = what.predict(hopper)
    eager = what.predict(replace(hopper, module_loading="EAGER"))
    assert (eager.device.low - said.device.low) > 500 * MIB < eager.device.high - said.device.high
    unknown = what.predict(replace(hopper, torch="9.9", cuda="99", module_loading="LAZY"))
    assert 300 * MIB < unknown.device.low - unknown.least.reserved < 600 * MIB
    expandable = what.predict(replace(hopper, allocator="expandable_segments:True"))
    assert expandable.least.reserved != said.least.reserved  # in steps of 20 MiB, and not of 32 at once


def test_the_log_of_a_prediction_is_its_last_step() -> None:
    whole = case(perceptron(), "64", train=SGD).trace(STACK)
    said = predict(whole, STACK)
    assert {each.phase for each in said.log.places} <= {"zero_grad", "forward", "loss", "backward", "optimizer", "step"}
    # gradients of the step before are there from before
    assert min(entry.storage for entry in said.log.entries) < 0
    last = [e for e in whole.events if whole.phases[e.phase].endswith(" 3")]
    assert [entry.delta for entry in said.log.entries] == [event.delta for event in last]
    assert said.steady <= said.least.requested


CONVOLVED = 4 * 2 * (16 * 16 * 16 + 32 * 14 * 14) + 2 * 32 * 16 * 9
"""Bytes of a float16 convolution's input (4, 16, 16, 16), output (4, 32, 14, 14) and weight (32, 16, 3, 3)."""


def convolved() -> Experiment:
    return case(nn.Conv2d(16, 32, 3, bias=False), "16,16,16", mode=False, scenario="fp16")


def test_an_estimated_workspace_may_be_twice_as_large() -> None:
    """Without cuDNN: from no workspace, where tensors alone are the peak, to twice that of all three operands."""
    said = convolved().predict(STACK)
    assert said.least.requested == CONVOLVED
    assert said.most.requested == CONVOLVED + 2 * CONVOLVED
    assert said.workspaces == ()
    benchmarked = convolved().predict(STACK, benchmark=True)
    assert (benchmarked.least.requested, benchmarked.most.requested) == (CONVOLVED, CONVOLVED + 3 * CONVOLVED)


def test_recorded_workspaces_are_exact() -> None:
    (convolution,) = asked_of(convolved())
    said = convolved().predict(STACK, recorded=[ConvolutionWorkspace(str(convolution), 5000)])
    assert said.least == said.most
    assert said.least.requested == CONVOLVED + 5000
    assert said.workspaces == (ConvolutionWorkspace(str(convolution), 5000),)
    # of a benchmark the greediest plan was recorded; it may run any
    benchmarked = convolved().predict(STACK, benchmark=True, recorded=[ConvolutionWorkspace(str(convolution), 9000)])
    assert (benchmarked.least.requested, benchmarked.most.requested) == (CONVOLVED, CONVOLVED + 9000)


def asked_of(what: Experiment) -> list[Convolution]:
    plans = Plans(STACK.capability)
    what.trace(STACK, plans)
    return list(plans.answers)


@pytest.mark.parametrize(
    ("low", "high", "measured", "difference"),
    [(10, 20, 15, 0), (10, 20, 10, 0), (10, 20, 20, 0), (10, 20, 25, -5), (10, 20, 4, 6), (10, 10, 10, 0)],
)
def test_off_by(low: int, high: int, measured: int, difference: int) -> None:
    assert off_by(Interval(low, high), measured) == difference


# -- what is read off a GPU --------------------------------------------------------------------------------------------

TRACE = [
    {"action": "segment_alloc", "addr": 4096, "size": 2 * MIB, "stream": 0},
    {"action": "alloc", "addr": 4096, "size": 100, "stream": 0},
    {"action": "free_requested", "addr": 8192, "size": 700, "stream": 0},
    {"action": "free_completed", "addr": 8192, "size": 700, "stream": 0},
    {"action": "alloc", "addr": 8192, "size": 600, "stream": 0},
    {"action": "free_requested", "addr": 4096, "size": 100, "stream": 0},
    {"action": "free_completed", "addr": 4096, "size": 100, "stream": 0},
    {"action": "alloc", "addr": 4096, "size": 300, "stream": 0},
    {"action": "oom", "device_free": 0, "size": 900, "stream": 0},
    {"action": "snapshot", "addr": 0, "size": 0, "stream": 0},
]


def test_a_history() -> None:
    # an address is used again by another storage; what was there before the history is below 0
    assert list(allocation_events(TRACE)) == [(0, 100), (-1, -700), (1, 600), (0, -100), (2, 300)]


def test_the_history_in_a_snapshot_is_the_trace() -> None:
    """memsize writes snapshots as PyTorch does: reading one gives the events that it was made of."""
    trace = case(perceptron(), "64", train=SGD).trace(STACK)
    found = list(allocation_events(snapshot(trace)["device_traces"][0]))
    assert [change.delta for change in found] == [event.delta for event in trace.events]
    ids: dict[int, int] = {}
    assert all(ids.setdefault(e.storage, c.storage) == c.storage for e, c in zip(trace.events, found, strict=True))


A, B = OpLocation("forward", "a", "mm"), OpLocation("backward", "a", "mm")


def test_places_come_from_the_marked_step() -> None:
    marked = [AllocationEvent(0, 512), AllocationEvent(1, 1024), AllocationEvent(1, -1024), AllocationEvent(2, 2048)]
    # the marked step has one allocation that the other lacks, and lacks the last
    events = [AllocationEvent(0, 512), AllocationEvent(1, 2048), AllocationEvent(-1, -64), AllocationEvent(2, 4096)]
    marks = [OpSpan(0, 1, A), OpSpan(1, 3, B)]
    assert located(events, marked, marks) == log_of(
        [(0, 512, A), (1, 2048, B), (-1, -64, NO_LOCATION), (2, 4096, NO_LOCATION)]
    )
    # as many of other sizes between two that are the same: a router sends other tokens
    routed = [AllocationEvent(0, 512), AllocationEvent(1, 700), AllocationEvent(2, 2048)]
    assert located(routed, marked, marks) == log_of([(0, 512, A), (1, 700, B), (2, 2048, B)])


class _Cuda:
    """Answers for a GPU, and refuses arguments that the installed torch would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.real = {name: inspect.signature(getattr(torch.cuda, name)) for name in ("mem_get_info", "synchronize")}
        self.history = inspect.signature(torch.cuda.memory._record_memory_history)
        self.used = 900 * MIB
        stat = {"current": 0, "peak": 4096, "allocated": 17, "freed": 3}
        names = ("allocation", "requested_bytes", "allocated_bytes", "reserved_bytes")
        self.stats: dict[str, Any] = {name: {"all": dict(stat)} for name in names}
        answers: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_allocator_backend": lambda: "native",
            "synchronize": self._noted("synchronize"),
            "empty_cache": self._noted("empty_cache"),
            "reset_peak_memory_stats": self._noted("reset"),
            "device_memory_used": lambda device: self.used,
            "mem_get_info": lambda device: (60 * 2**30, 80 * 2**30),
            "get_device_name": lambda device: "NVIDIA H100 80GB HBM3",
            "get_device_capability": lambda device: (9, 0),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", lambda device: self.stats)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self._record)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [TRACE]})
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)
        monkeypatch.setattr(cuda_memory, "_nvml_of_this_process", lambda device: None)

    def _noted(self, name: str) -> Callable[..., None]:
        return lambda *args: self.calls.append(name)

    def _record(self, *args: Any, **options: Any) -> None:
        self.history.bind(*args, **options)
        self.calls.append(f"history {args[0]}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    return _Cuda(monkeypatch)


def test_the_memory_of_a_gpu(cuda: _Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setattr(cuda_memory, "_driver", lambda: "580.159.04")
    memory = CudaMemory()
    assert memory.device == torch.device("cuda", 0)
    assert (memory.count(), memory.live_bytes(), memory.peaks()) == (17, 0, Peaks(4096, 4096, 4096))
    memory.reset()
    memory.settle()
    assert cuda.calls.count("reset") == cuda.calls.count("empty_cache") == 1
    found = memory.stack()
    assert (found.gpu, found.capability, found.total, found.cuda, found.cudnn, found.driver, found.allocator) == (
        "NVIDIA H100 80GB HBM3",
        (9, 0),
        80 * 2**30,
        "13.0",
        91501,
        "580.159.04",
        "expandable_segments:True",
    )
    assert cuda.stats and (cuda.stats.clear() or memory.count() == 0)  # before the first allocation


def test_the_history_is_recorded(cuda: _Cuda) -> None:
    memory = CudaMemory()
    with memory.recorded() as found:
        assert found == []
    assert found == list(allocation_events(TRACE))
    assert [call for call in cuda.calls if call.startswith("history")] == ["history all", "history None"]
    with pytest.raises(ValueError, match="while recording"), memory.recorded():
        raise ValueError("while recording")
    assert cuda.calls[-1] == "history None"


def test_who_tells_the_devices_use(cuda: _Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = CudaMemory()
    cuda.used += 700 * MIB
    assert memory.use() == DeviceUse(700 * MIB, "NVML, growth of the device")
    monkeypatch.setattr(cuda_memory, "_nvml_used", lambda device: None)
    assert memory.use() == DeviceUse(20 * 2**30, "mem_get_info")
    monkeypatch.setattr(cuda_memory, "_nvml_of_this_process", lambda device: 5 * MIB)
    assert memory.use() == DeviceUse(5 * MIB, "NVML, this process")


def test_gpus_that_are_refused(cuda: _Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no GPU 3"):
        CudaMemory(3)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(InputError, match="own caching allocator"):
        CudaMemory()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="no GPU that PyTorch can use"):
        CudaMemory()


# -- files -------------------------------------------------------------------------------------------------------------

STACKS = st.builds(
    SoftwareStack,
    gpu=st.text(max_size=8),
    capability=st.tuples(st.integers(5, 12), st.integers(0, 9)),
    total=st.integers(0, 2**40),
    torch=st.text(max_size=8),
    python=st.text(max_size=8),
)


def test_a_replay_is_what_the_run_was() -> None:
    what = case(perceptron(), "64", train=SGD)
    found = checked(what)
    again = verify_measurements(what, [run.measurement for run in found.runs])
    assert again.comparisons == found.comparisons
    assert again.alignment == found.alignment


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (case(perceptron(), "64", "bf16", SGD), "its scenario is 'fp32', here it is 'bf16'"),
        (case(perceptron(), "64", train=SGD, batch=8), "its (batch_size|inputs) is"),
        (case(perceptron(), "64"), "its optimizer is 'sgd-momentum:foreach', here it is None"),
    ],
)
def test_a_file_of_another_run_is_refused(other: Experiment, says: str) -> None:
    saved = Measurement(case(perceptron(), "64", train=SGD).workload(), STACK)
    with pytest.raises(InputError, match=says):
        verify_measurements(other, [saved])


# -- what a reader gets ------------------------------------------------------------------------------------------------


def verification() -> Verification:
    """A convolutional net whose second run takes more, with every kind of difference; figures by hand, in bytes."""
    conv, norm = (
        OpLocation("forward", "stem.conv", "convolution"),
        OpLocation("forward", "stem.norm", "native_batch_norm"),
    )
    back, seed = OpLocation("backward", "stem.conv", "convolution_backward"), OpLocation("step", None, "ones_like")
    said = log_of([(0, 4 * MIB, conv), (1, 4 * MIB, norm), (2, 512, norm), (3, 512, seed), (0, -4 * MIB, back)])
    real = log_of(
        [(0, 4 * MIB, conv), (9, MIB, conv), (9, -MIB, conv), (0, -4 * MIB, conv), (1, 4 * MIB, norm), (2, 1024, norm)]
    )
    prediction = Prediction(
        Peaks(100 * MIB, 101 * MIB, 120 * MIB),
        Peaks(110 * MIB, 111 * MIB, 140 * MIB),
        Interval(420 * MIB, 790 * MIB),
        90 * MIB,
        said,
        assumptions=("data is finite",),
        notes=("the loss is cross-entropy of the output",),
    )
    work = MeasuredWorkload("net.py:Net", ("0=float32[8,3,32,32]",), 8, "amp-fp16", "adamw", steps=3)
    off = Measurement(
        work,
        STACK,
        Peaks(102 * MIB, 111 * MIB, 142 * MIB),
        Peaks(102 * MIB, 111 * MIB, 142 * MIB),
        DeviceUse(142 * MIB + CONTEXT, "NVML, this process"),
        skipped=2,
        tracked=99 * MIB,
        log=real,
    )
    on = replace(
        off, workload=replace(work, benchmark=True), error="CUDA out of memory", tracked=None, log=None, skipped=0
    )
    found = replace(
        verification_of((VerifiedRun(off, prediction), VerifiedRun(on, prediction))), notes=("Net is a note",)
    )
    return replace(found, command="memsize verify …", version="0.1.0")


def test_the_figures_against_arithmetic() -> None:
    found = verification()
    requested, allocated, reserved, device = found.runs[0].comparisons
    assert requested.difference == allocated.difference == 0  # 102 is in 100 to 110, 111 in 101 to 111
    assert reserved.difference == 140 * MIB - 142 * MIB and reserved.share == pytest.approx(-2 / 142)
    assert device.difference == 0
    tracked = found.runs[0].tracked
    assert tracked is not None and tracked.difference == (99 - 111) * MIB
    frame = found.figures
    assert list(frame["figure"]) == ["requested", "allocated", "reserved", "device"] * 2
    assert frame["difference"].isna().tolist() == [False] * 4 + [True] * 4
    kinds = list(found.differences["difference"])
    assert kinds == ["freed earlier", "real only", "other size", "predicted only"]


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "markdown"])
def test_golden(format: str) -> None:
    check(f"verification{FORMATS[format][0]}", render(verification(), format))


@pytest.mark.parametrize("width", [80, 200])
def test_golden_at_a_terminals_width(width: int) -> None:
    text = render(verification(), "text", width=width)
    assert max(map(len, text.splitlines())) <= width
    check(f"verification.{width}.txt", text)


def test_formats_as_data() -> None:
    found = verification()
    data = json.loads(render(found, "json"))
    assert data["schema"] == "memsize.verification/1"
    assert data["allocations"] == {"predicted": 4, "measured": 4, "matched": 3}
    assert [each["kind"] for each in data["differences"]] == list(found.differences["difference"])
    assert data["runs"][0]["figures"][2]["difference"] == -2 * MIB
    assert data["runs"][1]["error"] == "CUDA out of memory"
    rows = list(csv.DictReader(io.StringIO(render(found, "csv"))))
    assert [row["figure"] for row in rows] == ["requested", "allocated", "reserved", "device"] * 2
    assert "stem.conv" in found._repr_html_() and str(found) == render(found, "text").rstrip("\n")
    with pytest.raises(OutputError):
        render(found, "pdf")


def test_one_run_needs_no_column_for_the_benchmark() -> None:
    found = verification()
    assert "cudnn.benchmark" not in render(Verification(found.runs[:1]), "text")
    assert "on" in render(found, "text")


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def net(write: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    file: Path = write(
        "net.py",
        "from torch import nn\n\n\nclass Net(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))\n",
    )
    monkeypatch.chdir(file.parent)
    return file


def test_without_a_gpu_there_is_one_line(net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert run(["verify", "net.py", "--input", "16", "--train", "adamw"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: this machine has no GPU that PyTorch can use: verify runs the step for real on one\n"


def test_without_a_gpu_the_target_is_not_even_loaded(write: Any, warm_python: Python) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    write("net.py", "raise SystemExit('loaded')\n")
    done = warm_python("-m", "memsize", "verify", "net.py:Net", "--input", "16")
    assert done.returncode == 2
    assert done.stderr.startswith("error: this machine has no GPU")
    assert len(done.stderr.splitlines()) == 1


def stood_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    memory = StandIn()
    monkeypatch.setattr(cuda_memory, "CudaMemory", lambda device: memory)
    return memory


def test_the_command(net: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["verify", "net.py", "--input", "16", "--train", "sgd:foreach", "--loss", "mean"]
    with stood_in(monkeypatch):
        assert run([*arguments, "--save", "m.memsize", "-b", "4"]) == 0
    out, err = capsys.readouterr()
    assert "net.py:Net" in out and "stand-in" in out and "requested" in out and "MemTracker" in out
    assert "Wrote m.memsize" in err
    saved = memsize.load("m.memsize")
    assert saved.version == memsize.__version__ and saved.command.startswith("memsize")
    assert run([*arguments, "--against", "m.memsize", "-b", "4", "-f", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["runs"][0]["figures"][0]["difference"] == 2 * BLAS
    assert data["differences"] == []
    assert run([*arguments, "--against", "m.memsize", "-b", "8"]) == 2
    assert "the measurement is of another run" in capsys.readouterr().err
    assert run([*arguments, "--save", "m.memsize"]) == 2
    assert "--force" in capsys.readouterr().err


def test_a_model_runs_and_is_predicted_as_it_is() -> None:
    """Inputs whose dtype the user chose are cast in the run and in its prediction, or in neither."""
    model = nn.Linear(64, 32).bfloat16()
    for data in (torch.zeros(4, 64), torch.zeros(4, 64, dtype=torch.bfloat16)):
        inputs = inputs_from_data(data)
        what = Experiment("m", model, inputs, True, scenario_named("as-given"), Training("sgd", loss="mean", steps=2))
        found = checked(what)
        (seen,) = found.runs
        assert seen.measurement.workload.scenario == "as-given"
        # 64·32 + 32 weights, their gradients, the 4·64 inputs and the 4·32 outputs in 2 B
        assert what.trace(STACK).inputs[0].bytes == 4 * 64 * 2
        assert seen.prediction.least.requested == seen.measurement.steady.requested + 2 * BLAS  # forward and backward


def test_in_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = nn.Linear(16, 4)
    with stood_in(monkeypatch):
        found = memsize.verify(model, (16,), batch_size=2, train=SGD)
    assert isinstance(found, memsize.Verification)
    found.save(tmp_path / "m.memsize")
    found.to_json(tmp_path / "v.json")
    again = memsize.verify(model, (16,), batch_size=2, train=SGD, against=tmp_path / "m.memsize")
    assert again.comparisons == found.comparisons


def test_records_are_hand_built_without_torch() -> None:
    """A trace by hand is predicted too: no run is needed to compare a file."""
    said = predict(records.toy(), STACK)
    assert said.least.requested >= 0
