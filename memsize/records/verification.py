"""`Verification`: a prediction beside what was measured, as a value that can be read, drawn and saved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar, Final, Literal, NamedTuple

from memsize.records.answer import Answer
from memsize.records.fields import FlatTable
from memsize.records.finding import Finding
from memsize.records.gpu import Interval
from memsize.records.measurement import (
    AllocationLog,
    ConvolutionWorkspace,
    Measurement,
    OpLocation,
    Peaks,
    SavedMeasurements,
    read,
)
from memsize.records.run_file import is_run_file, read_run

if TYPE_CHECKING:
    from pandas import DataFrame

FIGURES: Final = ("requested", "allocated", "reserved", "device")
"""What is compared: the allocator's peaks, and what the process takes on the device."""


class FigureComparison(NamedTuple):
    """One figure beside its measurement. `predicted` is an interval where cuDNN or the CUDA context makes it one."""

    figure: str
    benchmark: bool
    predicted: Interval
    measured: int | None

    @property
    def difference(self) -> int | None:
        """Predicted less measured, from the nearer end of the interval: 0 inside."""
        return None if self.measured is None else off_by(self.predicted, self.measured)

    @property
    def share(self) -> float | None:
        """The difference as a share of what was measured."""
        return None if self.difference is None or not self.measured else self.difference / self.measured

    def record(self) -> dict[str, object]:
        """The figure as files have it."""
        return {
            "figure": self.figure,
            "benchmark": self.benchmark,
            "predicted": self.predicted.low,
            "predicted_most": self.predicted.high,
            "measured": self.measured,
            "difference": self.difference,
            "share": self.share,
        }


_SIZES: Final = ("predicted", "predicted_most", "measured", "difference")


def off_by(predicted: Interval, measured: int) -> int:
    """By how much the nearer end of an interval is above (> 0) or below a measurement; 0 where it is inside."""
    if predicted.low <= measured <= predicted.high:
        return 0
    return (predicted.low if measured < predicted.low else predicted.high) - measured


@dataclass(frozen=True, slots=True)
class VerifiedRun:
    """One measurement and the prediction of the same run."""

    measurement: Measurement
    prediction: Prediction

    @property
    def comparisons(self) -> tuple[FigureComparison, ...]:
        """One for each figure."""
        said, seen = self.prediction, self.measurement
        benchmark = seen.workload.benchmark
        found = [
            FigureComparison(
                name,
                benchmark,
                Interval(getattr(said.least, name), getattr(said.most, name)),
                None if seen.peaks is None or seen.error else getattr(seen.peaks, name),
            )
            for name in FIGURES[:-1]
        ]
        used = None if seen.device is None or seen.error else seen.device.bytes
        return (*found, FigureComparison("device", benchmark, said.device, used))

    @property
    def tracked(self) -> FigureComparison | None:
        """MemTracker's peak beside what was allocated; None where it could not follow the step."""
        seen = self.measurement
        if seen.tracked is None or seen.peaks is None:
            return None
        said = Interval(seen.tracked, seen.tracked)
        return FigureComparison("MemTracker", seen.workload.benchmark, said, seen.peaks.allocated)


@dataclass(frozen=True, repr=False)
class Verification(Answer):
    """What `memsize verify` found: each run on the GPU beside its prediction, and where they differ.

    `runs` are one workload's: cuDNN's benchmark off and, where convolutions run, on. `command` is what made it.
    """

    kind: ClassVar = "verification"

    runs: tuple[VerifiedRun, ...]
    notes: tuple[str, ...] = ()
    command: str = ""
    version: str = ""
    alignment: Alignment | None = None
    """The allocations of the first run's last step beside the predicted ones; None where none were recorded."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """None: the differences say where a prediction is off, and no rule says why."""
        return ()

    @property
    def model(self) -> str:
        """The model's name."""
        return self.runs[0].measurement.workload.model

    @property
    def comparisons(self) -> tuple[FigureComparison, ...]:
        """Every figure of every run."""
        return tuple(comparison for run in self.runs for comparison in run.comparisons)

    def tables(self) -> dict[str, FlatTable]:
        """`figures` and `differences`, as the properties of these names have them."""
        found = self.alignment.differences if self.alignment else ()
        return {
            "figures": FlatTable.of((each.record() for each in self.comparisons), _SIZES),
            "differences": FlatTable(
                ("difference", "phase", "layer", "op", "predicted", "measured", "at_peak"),
                [(d.kind, d.place.phase, d.place.layer, d.place.op, d.predicted, d.real, d.at_peak) for d in found],
                ("predicted", "measured"),
            ),
        }

    @property
    def figures(self) -> DataFrame:
        """One row per figure and run, in bytes."""
        return self.tables()["figures"].frame().astype({"measured": "Int64", "difference": "Int64"})

    @property
    def differences(self) -> DataFrame:
        """One row per allocation of the last step that is not as predicted, in their order."""
        return self.tables()["differences"].frame().astype({"predicted": "Int64", "measured": "Int64"})

    def saved(self, *, logs: bool = True) -> SavedMeasurements:
        """The measurements alone, as a file has them; `logs` keeps the allocations of the last step."""
        kept = (run.measurement if logs else replace(run.measurement, log=None) for run in self.runs)
        return SavedMeasurements(tuple(kept), self.command, datetime.now(UTC).date().isoformat(), self.version)


DifferenceKind = Literal["predicted only", "real only", "other size", "freed later", "freed earlier"]
"""How the real step differs: an allocation that it lacks, one that was not foreseen, another size, another end."""


@dataclass(frozen=True, slots=True)
class AllocationDifference:
    """One allocation that is not as predicted. Bytes are None on the side that lacks it.

    `place` is where the prediction has it, or the real step where only that does. `at_peak` says whether it is alive
    at the peak of the step, on either side.
    """

    kind: DifferenceKind
    place: OpLocation
    predicted: int | None
    real: int | None
    at_peak: bool

    @property
    def bytes(self) -> int:
        """How much more the real step has at some moment (< 0: how much less)."""
        if self.kind in ("freed later", "freed earlier"):
            held = self.real or 0
            return held if self.kind == "freed later" else -held
        return (self.real or 0) - (self.predicted or 0)


@dataclass(frozen=True, slots=True)
class Alignment:
    """What two logs share and where they differ, in order of the step."""

    predicted: int
    real: int
    matched: int
    differences: tuple[AllocationDifference, ...]
    """How many allocations each log has, how many are matched, and what is not the same."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The peaks of a run: the `least` and the `most` that the workspaces of its convolutions make of them, the same
    where those are known. `device` is reserved and the CUDA context. `log` holds what the last step allocates and
    frees."""

    least: Peaks
    most: Peaks
    device: Interval
    steady: int
    log: AllocationLog
    convolutional: bool = False
    """Whether a convolution runs: cuDNN's workspaces and its benchmark are theirs."""
    workspaces: tuple[ConvolutionWorkspace, ...] = ()
    """What cuDNN itself says that those convolutions take; nothing where it was not asked."""
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_measurements(path: str) -> SavedMeasurements:
    """The measurements in a file: of a saved verification, or of one that holds them alone.

    Raises `InputError` where it is neither.
    """
    if not is_run_file(path):
        return read(path)
    found: Verification = read_run(path, {Verification.kind: Verification}.get)
    return found.saved()
