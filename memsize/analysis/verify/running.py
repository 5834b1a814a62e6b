"""One workload run for real: the same loop as the prediction's, on a device, with a gauge reading its memory.

The last of `steps` steps is the one whose allocations are recorded. Two more follow that do not count: one in which
operations are marked, and one for MemTracker.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from memsize.analysis.verify.cuda_memory import Gauge
from memsize.analysis.verify.history import Change
from memsize.analysis.verify.marking import Mark, Marks, placed
from memsize.analysis.verify.tracked import tracked_peak
from memsize.errors import InputError
from memsize.internals.isolation import collector_paused
from memsize.internals.pytree import tensors_in
from memsize.records.measurement import Log, MeasuredWorkload, Measurement, Peaks, Stack
from memsize.spec.training import Training
from memsize.tracing.run import Setup
from memsize.units import format_bytes
from memsize.workloads.training import Loop

SEED: Final = 0
_MOST_SKIPPED: Final = 20
"""Steps that a GradScaler may leave out before the run goes on without them: its first scale overflows some nets."""


@dataclass(frozen=True)
class Plan:
    """What to run: a function that builds it on the gauge's device, and how it is trained (None: one inference)."""

    workload: MeasuredWorkload
    realize: Callable[[], Setup]
    training: Training | None
    track: bool = True


def measure(plan: Plan, gauge: Gauge) -> Measurement:
    """What the workload takes. Running out of memory is a measurement too: it is said in `error`.

    Raises `InputError` where the process holds memory on the device already, `ScenarioError` for a scenario that cannot
    be run there, and whatever the model's own code raises.
    """
    start = time.perf_counter()
    stack = gauge.stack()
    with _as_in_a_new_process(plan.workload, gauge):
        try:
            measured = _measured(plan, gauge, stack)
        except torch.OutOfMemoryError as error:
            measured = Measurement(plan.workload, stack, peaks=gauge.peaks(), error=_first_line(error))
    return replace(measured, seconds=round(time.perf_counter() - start, 3))


def _measured(plan: Plan, gauge: Gauge, stack: Stack) -> Measurement:
    setup = plan.realize()
    gauge.settle()  # what building it left behind
    gauge.reset()
    marks = Marks(str(gauge.device), gauge.count)
    step = _Inference(setup) if plan.training is None else _Steps(setup, marks, plan.training)
    skipped = step.warmed_up()
    before = gauge.peaks()
    gauge.reset()
    with gauge.recorded() as events:
        step()
    steady, device = gauge.peaks(), gauge.use()
    measured = Measurement(plan.workload, stack, Peaks.most([before, steady]), steady, device, skipped)
    log = _placed(events, marks, setup, step, gauge)
    return replace(measured, log=log, **_tracked(plan, setup, step, gauge))


def _placed(events: list[Change], marks: Marks, setup: Setup, step: _Step, gauge: Gauge) -> Log:
    """The recorded step's log, with the places that one more step shows."""
    with gauge.recorded() as marked:
        first = gauge.count()
        with marks.listening(setup) as found, marks.clock.during("step"):
            step()
    return placed(events, marked, [Mark(start - first, stop - first, place) for start, stop, place in found])


def _tracked(plan: Plan, setup: Setup, step: _Step, gauge: Gauge) -> dict[str, Any]:
    if not plan.track:
        return {}
    try:
        return {"tracked": tracked_peak(step, (setup.model, *step.known()), gauge.device)}
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # what it cannot follow it may refuse in any way
        return {"untracked": f"{type(error).__name__}: {_first_line(error)}"}


class _Inference:
    """One forward without gradients at a time; the result of the last one is gone when the next begins."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.result: Any = None

    def __call__(self) -> None:
        self.result = None
        args, kwargs = self.setup.call
        with torch.no_grad(), self.setup.autocast():
            self.result = self.setup.model(*args, **kwargs)

    def warmed_up(self) -> int:
        """Nothing: a prediction is that of the first forward."""
        return 0

    def known(self) -> Iterable[Any]:
        """The inputs. The last result is let go, as every call does at its start."""
        self.result = None
        return tensors_in(self.setup.call)


class _Steps:
    """Training steps."""

    def __init__(self, setup: Setup, marks: Marks, training: Training) -> None:
        self.setup = setup
        self.steps = training.steps
        self.loop = Loop(setup, marks, training)

    def __call__(self) -> None:
        with torch.enable_grad():
            self.loop()

    def warmed_up(self) -> int:
        """Run all steps but the last, and again what the scaler leaves out; returns how many that were."""
        skipped = 0
        for _ in range(self.steps - 1):
            while skipped < _MOST_SKIPPED and self._is_skipped():
                skipped += 1
        return skipped

    def _is_skipped(self) -> bool:
        """Run one step; whether the scaler left out its update because a gradient was not finite."""
        scaler = self.loop.scaler
        if scaler is None or not scaler.is_enabled():
            self()
            return False
        before = scaler.get_scale()
        self()
        return scaler.get_scale() < before

    def known(self) -> Iterable[Any]:
        loop = self.loop
        held = (self.setup.call, loop.losses.targets, loop.masters or [], loop.average)
        return (loop.optimizer, *tensors_in(held))


_Step = _Inference | _Steps


@contextmanager
def _as_in_a_new_process(workload: MeasuredWorkload, gauge: Gauge) -> Iterator[None]:
    """Nothing on the device before, seeds set, cuDNN as asked; all of it put back after, and nothing left behind."""
    gauge.settle()
    if gauge.held():
        held = format_bytes(gauge.held())
        raise InputError(f"this process holds {held} on the GPU already: verify measures one that holds nothing yet")
    benchmark = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = workload.benchmark
    devices = [gauge.device] if gauge.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), collector_paused(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(workload.seed)
            yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        gauge.settle()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
