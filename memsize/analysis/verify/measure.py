"""Run a step for real, in the same loop as the prediction's, and measure the memory that it takes on its device.

The last of `steps` steps is the one whose allocations are recorded. Two more follow that do not count: one in which
each allocation's op is marked, and one for MemTracker.
"""

from __future__ import annotations

import time
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from memsize.analysis.runner import Runner
from memsize.analysis.verify.alignment import Window, gaps, matched
from memsize.analysis.verify.cuda_memory import AllocationEvent, CudaMemory
from memsize.errors import InputError, ScenarioError
from memsize.model.materialize import executable_call, materialize, real_copy
from memsize.model.meta_copy import in_mode, inside
from memsize.precision.quantized import apply_torchao
from memsize.precision.recipes import Recipe, apply_scenario, floating_dtype, run_precision
from memsize.processes.patches import assigned, collector_paused
from memsize.records.measurement import (
    NO_LOCATION,
    AllocationLog,
    MeasuredWorkload,
    Measurement,
    OpLocation,
    Peaks,
    SoftwareStack,
    log_of,
)
from memsize.spec.scenario import TORCHAO, Scenario
from memsize.spec.training import Training
from memsize.torch_internals.pytree import tensors_in
from memsize.tracing.ledger import Ledger
from memsize.tracing.module_calls import ModuleCallRecorder
from memsize.tracing.run import Setup, give_shapes
from memsize.units import format_bytes
from memsize.workloads.optimizers import steps_watched
from memsize.workloads.training import Loop

SEED: Final = 0
_MAX_SKIPPED: Final = 20
"""How many skipped steps of a GradScaler are run again: its first scale overflows some nets."""

_BY_TORCHAO: Final = {"int8-weight": "Int8WeightOnlyConfig", "fp8-weight": "Float8WeightOnlyConfig"}
"""Layouts that torchao itself produces, and its configuration for each."""


@dataclass(frozen=True)
class MeasurementPlan:
    """A run to measure: a function that builds its setup on the device, and its training (None: one inference).

    `track` asks for one more step under PyTorch's MemTracker.
    """

    workload: MeasuredWorkload
    build: Callable[[], Setup]
    training: Training | None
    track: bool = True


def measure(plan: MeasurementPlan, memory: CudaMemory) -> Measurement:
    """The memory that the workload takes. Running out of memory is a measurement too, with an `error`.

    Raises `InputError` where the process holds memory on the device already, `ScenarioError` for a scenario that cannot
    be run there, and whatever the model's own code raises.
    """
    start = time.perf_counter()
    stack = memory.stack()
    with _as_in_a_new_process(plan.workload, memory):
        try:
            measured = _measured(plan, memory, stack)
        except torch.OutOfMemoryError as error:
            measured = Measurement(plan.workload, stack, peaks=memory.peaks(), error=_message(error))
    return replace(measured, seconds=round(time.perf_counter() - start, 3))


def _message(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _measured(plan: MeasurementPlan, memory: CudaMemory, stack: SoftwareStack) -> Measurement:
    setup = plan.build()
    memory.settle()  # what building the model left behind
    memory.reset()
    marker = OpMarker(str(memory.device), memory.count)
    step = _Step(setup, marker, plan.training)
    skipped = step.warmed_up()
    before = memory.peaks()
    memory.reset()
    with memory.recorded() as events:
        step()
    steady, device = memory.peaks(), memory.use()
    with memory.recorded() as marked:
        first = memory.count()
        with marker.listening(setup) as spans, marker.clock.during("step"):
            step()
    log = located(events, marked, [OpSpan(start - first, stop - first, location) for start, stop, location in spans])
    return Measurement(
        workload=plan.workload,
        stack=stack,
        peaks=Peaks.most([before, steady]),
        steady=steady,
        device=device,
        skipped=skipped,
        log=log,
        **(_tracked(step, memory.device) if plan.track else {}),
    )


class _Step:
    """The step to measure, as often as it is called: one of training, or a forward without gradients, whose result is
    dropped when the next begins.
    """

    def __init__(self, setup: Setup, marker: OpMarker, training: Training | None) -> None:
        self.setup = setup
        self.result: Any = None
        self.loop = Loop(setup, marker, training) if training else None
        self.steps = training.steps if training else 1  # what is predicted of a model that runs is the first forward

    def __call__(self) -> None:
        self.result = None
        args, kwargs = self.setup.call
        if self.loop is None:
            with torch.no_grad(), self.setup.precision.autocast():
                self.result = self.setup.model(*args, **kwargs)
        else:
            with torch.enable_grad():
                self.loop()

    def warmed_up(self) -> int:
        """Run all steps but the last, and again those that the scaler skips; returns how many it skipped."""
        scaler, skipped = self.loop and self.loop.scaler, 0
        for _ in range(self.steps - 1):
            is_skipped = True  # its update, because a gradient was not finite
            while is_skipped and skipped < _MAX_SKIPPED:
                before = scaler.get_scale() if scaler else 0.0
                self()
                is_skipped = bool(scaler and scaler.get_scale() < before)
                skipped += is_skipped
        return skipped

    def state(self) -> Iterable[Any]:
        """The tensors beside the model's, and the optimizer; without the last result, which every call drops first."""
        self.result, loop = None, self.loop
        if loop is None:
            return tensors_in(self.setup.call)
        return (loop.optimizer, *tensors_in((self.setup.call, loop.losses.targets, loop.masters or [], loop.average)))


@contextmanager
def _as_in_a_new_process(workload: MeasuredWorkload, memory: CudaMemory) -> Iterator[None]:
    """Start with nothing on the device, seeds set and cuDNN as asked; restore all of it after, and leave nothing."""
    memory.settle()
    if memory.live_bytes():
        live = format_bytes(memory.live_bytes())
        raise InputError(f"this process holds {live} on the GPU already: verify measures one that holds nothing yet")
    devices = [memory.device] if memory.device.type == "cuda" else []
    try:
        with (
            assigned(torch.backends.cudnn, "benchmark", workload.benchmark),
            torch.random.fork_rng(devices),
            collector_paused(),
            warnings.catch_warnings(action="ignore"),
        ):
            torch.manual_seed(workload.seed)
            yield
    finally:
        memory.settle()


class OpSpan(NamedTuple):
    """The allocations from number `start` up to `stop` are made at `location`."""

    start: int
    stop: int
    location: OpLocation


class OpMarker(Ledger):
    """Notes which op of which layer makes which of the allocator's allocations.

    `count` says how many allocations the allocator has made so far; it is read before and after each op. A dispatch
    mode changes a few things in PyTorch (composite formulas avoid in-place ops under one), so the step that is measured
    runs without it, and its allocations get their locations from the marked step by matching sizes.
    """

    def __init__(self, device: str, count: Callable[[], int]) -> None:
        super().__init__(device)
        self.spans: list[OpSpan] = []
        self._count = count
        self._paths: list[str] = []

    @contextmanager
    def listening(self, setup: Setup) -> Iterator[list[OpSpan]]:
        """While open, the ops of the setup's model are marked."""
        calls = ModuleCallRecorder(setup.model, self)
        calls.complete = True  # no tables are needed, only which module is running
        self._paths = [seen.path for seen in calls.seen]
        with calls.watched(), steps_watched(self), self:
            yield self.spans
        self.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = self._count()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        stop = self._count()
        if stop > start:
            clock = self.clock
            layer = self._paths[clock.layer] if clock.layer >= 0 else None
            location = OpLocation(clock.phases[clock.phase], layer, func._overloadpacket.__name__)
            self.spans.append(OpSpan(start, stop, location))
        return result


def located(
    events: Sequence[AllocationEvent], marked: Sequence[AllocationEvent], spans: Sequence[OpSpan]
) -> AllocationLog:
    """The log of `events`, each allocation at the location that the marked step has for it; frees have none.

    `spans` count the allocations of `marked` from 0; they rise and do not overlap.
    """
    sizes = [event.delta for event in events if event.delta > 0]
    others = [event.delta for event in marked if event.delta > 0]
    places = dict.fromkeys(range(len(sizes)), NO_LOCATION)
    pairs = matched(sizes, others)
    # A router sends other tokens to an expert in each step: between two matches, as many allocations of other sizes are
    # matched in order.
    for low, high, other_low, other_high in gaps(pairs, Window.of(sizes, others)):
        if high - low == other_high - other_low:
            pairs += zip(range(low, high), range(other_low, other_high), strict=True)
    for index, other in pairs:
        position = bisect_right(spans, other, key=lambda span: span.start) - 1
        if position >= 0 and other < spans[position].stop:
            places[index] = spans[position].location
    numbers = iter(range(len(sizes)))
    return log_of((*event, places[next(numbers)] if event.delta > 0 else NO_LOCATION) for event in events)


def _tracked(step: _Step, device: torch.device) -> dict[str, Any]:
    """The peak of PyTorch's own MemTracker in one more step, or why there is none, as fields of a `Measurement`.

    It follows tensors through a dispatch mode, counts each storage in blocks of 512 B, and knows neither workspaces nor
    segments: its peak compares with `allocated`.
    """
    try:
        from torch.distributed._tools.mem_tracker import MemTracker

        tracker = MemTracker()
        tracker.track_external(step.setup.model, *step.state())
        with tracker:
            step()
        return {"tracked": int(tracker.get_tracker_snapshot("peak").get(device, {}).get("Total", 0))}
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # MemTracker fails in many ways on what it cannot follow
        return {"untracked": f"{type(error).__name__}: {_message(error)}"}


def materialized_setup(runner: Runner, scenario: Scenario, device: torch.device) -> Setup:
    """A copy of the runner's model and its inputs on `device`, with values, ready to run under `scenario`.

    Weights that were not loaded get random values in the dtype in which the scenario keeps them; small tensors keep the
    values that the constructor gave them.

    Raises `ScenarioError` for a scenario that does not run on a GPU, or whose library is missing.
    """
    model = real_copy(inside(runner.model))
    recipe = _apply(model, scenario, device)
    in_mode(model, runner.training)
    call = executable_call(runner.call(scenario, recipe.floating), device)
    give_shapes(model, call=call, training=runner.training, device=str(device))
    autocast = partial(torch.autocast, device.type, getattr(torch, scenario.autocast)) if scenario.autocast else None
    return Setup(
        name=runner.name,
        scenario=scenario.name,
        model=model,
        call=call,
        training=runner.training,
        batch_size=runner.inputs.batch_size,
        device=str(device),
        precision=run_precision(scenario, autocast=autocast or nullcontext),
    )


def _apply(model: nn.Module, scenario: Scenario, device: torch.device) -> Recipe:
    """Apply `scenario` and move `model` to `device`: casts come before the move, torchao quantizes after it."""
    if scenario.recipe != "quantized":
        recipe = apply_scenario(model, scenario)
        materialize(model, device)
        return recipe
    layout = scenario.layout or ""
    config = layout.removeprefix(TORCHAO) if layout.startswith(TORCHAO) else _BY_TORCHAO.get(layout)
    if config is None:
        raise ScenarioError(f"{scenario.name} cannot be run on a GPU here: torchao:CONFIG runs what torchao quantizes")
    floating = floating_dtype(model) or torch.float32
    materialize(model, device)
    apply_torchao(model, config)
    return Recipe(model, floating)
