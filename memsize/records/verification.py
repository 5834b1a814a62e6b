"""`Verification`: a prediction beside what was measured, as a value that can be read, drawn and saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple

from memsize.records.answer import Answer, TableFrame
from memsize.records.codec import NotEmpty
from memsize.records.fields import (
    Cell,
    Change,
    Fields,
    FlatTable,
    Label,
    Missing,
    Path,
    Signed,
    Words,
    field,
)
from memsize.records.finding import Finding
from memsize.records.gpu import Interval
from memsize.records.measurement import (
    AllocationLog,
    ConvolutionWorkspace,
    Measurement,
    OpLocation,
    Peaks,
)
from memsize.units import Bytes

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


_HINTS: Final = {
    "requested": "bytes that live tensors ask for",
    "allocated": "the caching allocator's blocks",
    "reserved": "the caching allocator's segments",
    "device": "memory of the process on the device",
    "MemTracker": "the peak that PyTorch's MemTracker predicts for the same step",
}
_UNMEASURED: Final = Missing("nothing was measured")


def _measured(value: Any, cell: Callable[[Any], Cell]) -> Cell:
    return _UNMEASURED if value is None else cell(value)


_UP_TO: Final = "the highest prediction, where cuDNN's workspaces or the CUDA context are unknown"

FIGURE_FIELDS: Final = Fields[FigureComparison](
    field("figure", "peak", "name", 100, "the figure that is compared"),
    field("benchmark", "cudnn.benchmark", "text", 100, "torch.backends.cudnn.benchmark in that run"),
    field("predicted", "predicted", "bytes", 98, "the lowest prediction", get="predicted.low"),
    field("predicted_most", "up to", "bytes", 92, _UP_TO, key="most", get="predicted.high"),
    field("measured", "measured", "bytes", 99, "the figure on the GPU", nullable=True),
    field("difference", "off by", "signed", 96, "predicted minus measured; 0 inside the interval", nullable=True),
    field("share", "%", "change", 95, "the same as a share of what was measured"),
    cell={
        "figure": lambda row, _: Label(row.figure, hint=_HINTS[row.figure]),
        "benchmark": lambda row, _: "on" if row.benchmark else "off",
        "predicted_most": lambda row, _: Bytes(row.predicted.high) if row.predicted.high > row.predicted.low else None,
        "measured": lambda row, _: _measured(row.measured, Bytes),
        "difference": lambda row, _: _measured(row.difference, Signed),
        "share": lambda row, _: _measured(row.share, Change),
    },
)


def off_by(predicted: Interval, measured: int) -> int:
    """Return the nearer end of an interval less a measurement; 0 where the measurement is inside."""
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
        comparisons = [
            FigureComparison(
                name,
                benchmark,
                Interval(getattr(said.least, name), getattr(said.most, name)),
                None if seen.peaks is None or seen.error else getattr(seen.peaks, name),
            )
            for name in FIGURES[:-1]
        ]
        used = None if seen.device is None or seen.error else seen.device.bytes
        return (*comparisons, FigureComparison("device", benchmark, said.device, used))

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
    """The answer of `memsize verify`: each run on the GPU beside its prediction, and where they differ.

    `runs` are one workload's: cuDNN's benchmark off and, where convolutions run, on. `command` is the command line that
    was run.
    """

    kind: ClassVar = "verification"

    runs: Annotated[tuple[VerifiedRun, ...], NotEmpty()]
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
        return {
            "figures": FIGURE_FIELDS.flat(self.comparisons),
            "differences": DIFFERENCE_FIELDS.flat(self.alignment.differences if self.alignment else ()),
        }

    figures = TableFrame("figures", "One row per figure and run, in bytes.")
    differences = TableFrame(
        "differences", "One row per allocation of the last step that is not as predicted, in order."
    )


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
        """Real less predicted bytes at the moment where the two differ (< 0: the real step has less)."""
        if self.kind in ("freed later", "freed earlier"):
            freed_bytes = self.real or 0
            return freed_bytes if self.kind == "freed later" else -freed_bytes
        return (self.real or 0) - (self.predicted or 0)


DIFFERENCE_FIELDS: Final = Fields[AllocationDifference](
    field("difference", "in the real step", "text", 95, "the kind of difference", get="kind", key="kind"),
    field("phase", "phase", "text", 80, "the phase of the step", get="place.phase"),
    field("layer", "layer", "name", 100, "the layer that allocates it", get="place.layer"),
    field("op", "op", "text", 98, "the operation that allocates it", get="place.op"),
    field("predicted", "predicted", "bytes", 97, "its bytes as predicted", nullable=True),
    field("measured", "measured", "bytes", 97, "its bytes as measured", key="real", nullable=True, get="real"),
    field("at_peak", "at the peak", "words", 85, "whether it is alive at the peak", key="peak"),
    cell={
        "layer": lambda row, _: "(outside the model)" if row.place.layer is None else Path(row.place.layer),
        "at_peak": lambda row, _: Words(("yes",) if row.at_peak else ()),
    },
)


@dataclass(frozen=True, slots=True)
class Alignment:
    """The matching allocations of two logs and their differences, in order of the step."""

    predicted: int
    real: int
    matched: int
    differences: tuple[AllocationDifference, ...]
    """Counts of the allocations of each log and of the matched ones; `differences` lists the others."""


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
