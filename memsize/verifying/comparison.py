"""`Verification`: a prediction beside what was measured, as a value that can be read, drawn and saved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from memsize.answers.answer import Answer
from memsize.device import Interval
from memsize.findings.finding import Finding
from memsize.verifying.alignment import Alignment, align
from memsize.verifying.measurement import Measurement, Saved, encode
from memsize.verifying.prediction import Prediction

if TYPE_CHECKING:
    from pandas import DataFrame

    from memsize.sections.parts import Section

FIGURES: Final = ("requested", "allocated", "reserved", "device")
"""What is compared: the allocator's peaks, and what the process takes on the device."""


class Comparison(NamedTuple):
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


def off_by(predicted: Interval, measured: int) -> int:
    """By how much the nearer end of an interval is above (> 0) or below a measurement; 0 where it is inside."""
    if predicted.low <= measured <= predicted.high:
        return 0
    return (predicted.low if measured < predicted.low else predicted.high) - measured


@dataclass(frozen=True, slots=True)
class Checked:
    """One measurement and the prediction of the same run."""

    measurement: Measurement
    prediction: Prediction

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """One for each figure."""
        said, seen = self.prediction, self.measurement
        benchmark = seen.workload.benchmark
        found = [
            Comparison(
                name,
                benchmark,
                Interval(getattr(said.least, name), getattr(said.most, name)),
                None if seen.peaks is None or seen.error else getattr(seen.peaks, name),
            )
            for name in FIGURES[:-1]
        ]
        used = None if seen.device is None or seen.error else seen.device.bytes
        return (*found, Comparison("device", benchmark, said.device, used))

    @property
    def tracked(self) -> Comparison | None:
        """MemTracker's peak beside what was allocated; None where it could not follow the step."""
        seen = self.measurement
        if seen.tracked is None or seen.peaks is None:
            return None
        said = Interval(seen.tracked, seen.tracked)
        return Comparison("MemTracker", seen.workload.benchmark, said, seen.peaks.allocated)


@dataclass(frozen=True, repr=False)
class Verification(Answer):
    """What `memsize verify` found: each run on the GPU beside its prediction, and where they differ.

    `runs` are one workload's: cuDNN's benchmark off and, where convolutions run, on. `command` is what made it.
    """

    runs: tuple[Checked, ...]
    notes: tuple[str, ...] = ()
    command: str = ""
    version: str = ""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """None: the differences say where a prediction is off, and no rule says why."""
        return ()

    @property
    def model(self) -> str:
        """The model's name."""
        return self.runs[0].measurement.workload.model

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Every figure of every run."""
        return tuple(comparison for run in self.runs for comparison in run.comparisons)

    @cached_property
    def alignment(self) -> Alignment | None:
        """The allocations of the first run's last step beside the predicted ones; None where none were recorded."""
        run = self.runs[0]
        return None if run.measurement.log is None else align(run.prediction.log, run.measurement.log)

    @property
    def figures(self) -> DataFrame:
        """One row per figure and run, in bytes."""
        from pandas import DataFrame

        rows = [
            (each.figure, each.benchmark, *each.predicted, each.measured, each.difference, each.share)
            for each in self.comparisons
        ]
        columns = ["figure", "benchmark", "predicted", "predicted_most", "measured", "difference", "share"]
        return DataFrame(rows, columns=columns).astype({"measured": "Int64", "difference": "Int64"})

    @property
    def differences(self) -> DataFrame:
        """One row per allocation of the last step that is not as predicted, in their order."""
        from pandas import DataFrame

        found = self.alignment.differences if self.alignment else ()
        rows = [(d.kind, d.place.phase, d.place.layer, d.place.op, d.predicted, d.real, d.at_peak) for d in found]
        columns = ["difference", "phase", "layer", "op", "predicted", "measured", "at_peak"]
        return DataFrame(rows, columns=columns).astype({"predicted": "Int64", "measured": "Int64"})

    def saved(self, *, logs: bool = True) -> Saved:
        """The measurements alone, as a file has them; `logs` keeps the allocations of the last step."""
        kept = (run.measurement if logs else replace(run.measurement, log=None) for run in self.runs)
        return Saved(tuple(kept), self.command, datetime.now(UTC).date().isoformat(), self.version)

    def save(self, path: str | Path) -> None:
        """Write the measurements to `path`; `memsize.verify(…, against=path)` compares with them without a GPU."""
        Path(path).write_text(json.dumps(encode(self.saved())) + "\n", encoding="utf-8")

    def _sections(self) -> Sequence[Section]:
        from memsize.sections.verification import sections

        return sections(self)

    def _drawn(self, form: str) -> str:
        from memsize.render.verification import render

        return render(self, form)
