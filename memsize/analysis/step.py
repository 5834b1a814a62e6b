"""`StepTrace`: one trace of a run and its GPU estimate; `Guard`: that estimate against a budget, and beside CUDA's; and
the step, or another answer, that a saved run holds.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from dataclasses import dataclass, field as attribute, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from memsize import files
from memsize.analysis.findings.unfinished_runs import lagging, out_of_memory
from memsize.analysis.timeline import pickled, timeline
from memsize.analysis.watch import LoopWatch
from memsize.device.allocator_config import AllocatorConfig, config_of
from memsize.device.cards import card
from memsize.device.gpu_estimate import estimate_gpu
from memsize.errors import BudgetError, InputError, UnknownScenarioError
from memsize.printable import printable
from memsize.records.aggregates import live_bytes, split_phase
from memsize.records.answer import Saveable
from memsize.records.fields import FlatTable
from memsize.records.finding import moment_in_words
from memsize.records.generation import GenerationReport
from memsize.records.gpu import DEFAULT_GPU, GpuEstimate
from memsize.records.kinds import KINDS, SAVED_KINDS
from memsize.records.program import ProgramRun
from memsize.records.report import Report
from memsize.records.roles import noun
from memsize.records.run_file import read_run
from memsize.records.timeline import LengthRow, Timeline
from memsize.records.trace import Trace
from memsize.spec.requests import OnExcess
from memsize.units import format_bytes, format_span, format_together

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure


@dataclass(frozen=True, repr=False)
class StepTrace(Saveable):
    """A run of some training steps, or of one inference, and its peak on a GPU.

    `trace` is the record itself; `gpu` names the simulated card, and `config` sets the allocator.
    """

    kind: ClassVar = "step"

    trace: Trace
    gpu: str = DEFAULT_GPU
    config: AllocatorConfig = attribute(default_factory=AllocatorConfig)
    lengths: tuple[LengthRow, ...] = ()
    """What the allocator reserves if the lengths of texts vary."""

    @cached_property
    def peak(self) -> GpuEstimate:
        """The peak: `requested`, `allocated`, `reserved`, `device`, `roles`, `storages`, all in bytes."""
        return estimate_gpu(self.trace, card(self.gpu), config=self.config)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The values assumed where the run met a value that only real data has."""
        return self.trace.assumptions

    @property
    def events(self) -> DataFrame:
        """One row per event: bytes that appear or disappear, live bytes after it, role, op, layer and phase."""
        trace = self.trace
        rows = (
            (
                event.storage,
                event.delta,
                live,
                trace.storages[event.storage].role,
                event.op,
                trace.layers[event.layer].path if event.layer >= 0 else None,
                trace.phases[event.phase],
            )
            for event, live in zip(trace.events, live_bytes(trace.events), strict=True)
        )
        columns = ("storage", "delta", "live", "role", "op", "layer", "phase")
        return FlatTable(columns, rows, sizes=("delta", "live")).frame()

    def as_timeline(self) -> Timeline:
        """Return the live memory after each event, as `memsize.timeline` does."""
        return replace(timeline(self.trace, self.config, card(self.gpu)), lengths=self.lengths)

    @property
    def timeline(self) -> DataFrame:
        """One row per event: its phase, step, layer and op, live bytes by role after it, allocated and reserved."""
        return self.as_timeline().tables()["events"].frame()

    @property
    def collectives(self) -> DataFrame:
        """One row per kind and size of collective and step of this rank: how often, of how many bytes, among how many.

        `bytes` is the whole of what is gathered, scattered or reduced each time. Empty for a process that is alone.
        """
        counts = Counter(
            (split_phase(self.trace.phases[collective.phase])[1], collective.kind, collective.ranks, collective.bytes)
            for collective in self.trace.collectives
        )
        rows = ((*key[:3], count, key[3]) for key, count in counts.items())
        return FlatTable(("step", "kind", "ranks", "count", "bytes"), rows, sizes=("bytes",)).frame()

    def plot(self, unit: str | None = None) -> Figure:
        """Live bytes by role over the run's events as a figure of plotly, in `unit`; what the allocator holds as lines.

        Raises `OutputError` without plotly.
        """
        return self.as_timeline().plot(unit)

    def snapshot(self, path: str | Path) -> None:
        """Write a PyTorch memory snapshot, which https://pytorch.org/memory_viz opens, to `path`."""
        files.write(path, pickled(self.trace, self.config), overwrite=True)

    def _repr_html_(self) -> str:
        return self.as_timeline()._repr_html_()

    def __repr__(self) -> str:
        peak, scenario = self.peak, self.trace.scenario
        under = "" if scenario == "as-given" else f" under {scenario}"
        sizes = f"peak {format_bytes(peak.allocated)} allocated, {format_bytes(peak.reserved)} reserved"
        return printable(f"<memsize.StepTrace {self.trace.model}{under} on {self.gpu}: {sizes}>")

    def __str__(self) -> str:
        peak = self.peak
        where = f"in {moment_in_words(peak.peak_phase, peak.peak_layer)}"
        under = "" if self.trace.scenario == "as-given" else f" under {self.trace.scenario}"
        stack = f" with {self.trace.stack}" if self.trace.stack else ""
        rank = f", {self.trace.world}" if self.trace.world.size > 1 else ""
        lines = [f"{self.trace.model}{under} on {self.gpu}{stack}{rank}: {where}"]
        levels = {name: getattr(peak, name) for name in ("requested", "allocated", "reserved")}
        sizes = format_together([*levels.values(), *peak.roles.values()])
        lines += [f"  {name:<10} {sizes[size]}" for name, size in levels.items()]
        lines += [f"  device     {format_span(*peak.device)}"]
        width = max(map(len, ("optimizer state", *peak.roles)))
        lines += [f"    {role:<{width}}  {sizes[size]}" for role, size in peak.roles.items()]
        if peak.collectives:
            kinds = (f"{item.count} × {item.kind} of {format_bytes(item.bytes)}" for item in peak.collectives)
            lines.append(f"  in a step  {', '.join(kinds)} together")
        if peak.streams:
            parts = (f"{item.name} {format_bytes(item.reserved)}" for item in peak.streams)
            lines.append(f"  streams    {', '.join(parts)} reserved")
        if peak.lag:
            lines.append(lagging(peak.lag, peak.reserved).text())
        if peak.shortage:
            lines.append(out_of_memory(peak.shortage, "the run", self.gpu).text())
        return "\n".join(map(printable, lines))


ALLOCATED: Final = "allocated_bytes.all.peak"
RESERVED: Final = "reserved_bytes.all.peak"
"""The peaks' names in `torch.cuda.memory_stats`."""


@dataclass(frozen=True)
class Guard:
    """The predicted `step`, and the bytes that PyTorch's allocator may take (None: nobody knows)."""

    step: StepTrace
    budget: int | None
    on_excess: OnExcess = "warn"
    _loop: LoopWatch = attribute(default_factory=LoopWatch, init=False, compare=False, repr=False)

    @property
    def fits(self) -> bool | None:
        """Whether the predicted reserved memory is within the budget; None without one."""
        return None if self.budget is None else self.step.peak.reserved <= self.budget

    @property
    def predicted(self) -> dict[str, int]:
        """The predicted peaks in bytes, by their names in `torch.cuda.memory_stats`."""
        return {ALLOCATED: self.step.peak.allocated, RESERVED: self.step.peak.reserved}

    def measured(self) -> dict[str, int] | None:
        """The peaks that CUDA measured so far, by the same names; None without CUDA."""
        import torch

        if not torch.cuda.is_available():
            return None
        stats = torch.cuda.memory_stats()
        return {name: stats.get(name, 0) for name in (ALLOCATED, RESERVED)}

    def check(self) -> str:
        """Take what CUDA measured at the start of a step of the loop; returns a line on it, for a progress bar.

        Where the step would exceed the budget, since memory has grown from step to step, it warns or raises
        `BudgetError` before. Without CUDA it only tells the prediction.
        """
        import torch

        predicted = format_bytes(self.step.peak.allocated)
        if not torch.cuda.is_available():
            return f"predicted {predicted}"
        loop = self._loop
        loop.add(torch.cuda.memory_stats())
        if self.budget is not None and loop.expected > self.budget:
            needs = f"step {len(loop.starts)} will need {format_bytes(loop.expected)}"
            there = f"{format_bytes(self.budget)} are available: memory grows from step to step"
            self.exceed(f"{needs}, {there}", stacklevel=3)
        current, most = format_bytes(loop.starts[-1]), format_bytes(loop.peaks[-1])
        return f"{current} allocated, at most {most}, predicted {predicted}"

    def exceed(self, text: str, stacklevel: int = 2) -> None:
        """Say that there is not enough memory, as `on_excess` asks for it."""
        if self.on_excess == "raise":
            raise BudgetError(text)
        if self.on_excess == "warn":
            warnings.warn(text, stacklevel=stacklevel)

    def text(self) -> str:
        """The prediction in a sentence: what it needs, what is there, and what most of it is."""
        peak = self.step.peak
        role, size = max(peak.roles.items(), key=lambda item: item[1], default=("activation", 0))
        where = moment_in_words(peak.peak_phase, peak.peak_layer)
        needs = f"{self.step.trace.model} needs {format_bytes(peak.reserved)} at its peak, in {where}"
        there = "" if self.budget is None else f"; {format_bytes(self.budget)} are available"
        return f"{needs}{there}. The largest part is {noun(role)}: {format_bytes(size)}."


class PredictedPeak(NamedTuple):
    """The highest moment of a saved run, with the model and the scenario that ran."""

    model: str
    scenario: str
    estimate: GpuEstimate


def predicted_peak(answer: Any) -> PredictedPeak:
    """The peak that a saved run predicts; raises `InputError` for a run that predicts none."""
    match answer:
        case StepTrace():
            return PredictedPeak(answer.trace.model, answer.trace.scenario, answer.peak)
        case ProgramRun():
            return PredictedPeak(answer.program, "as-given", answer.peak)
        case Report(scenario_results=results) if peaks := [
            (result.name, peak) for result in results if (peak := result.training or result.inference)
        ]:
            return PredictedPeak(answer.model, *peaks[0])
        case _:
            raise InputError(
                f"this saved {getattr(answer, 'kind', 'run')} predicts no peak: save memsize run, memsize timeline, or "
                "memsize report --train"
            )


# -- steps and other answers of saved runs -----------------------------------------------------------------------------


def load(path: str | os.PathLike[str]) -> Any:
    """The answer in a saved run; raises `InputError` where the file is none, is damaged, or newer than this memsize."""
    return read_run(path, lambda kind: SAVED_KINDS[kind].record_type if kind in SAVED_KINDS else None)


def load_kind(path: str | os.PathLike[str], kind: str) -> Any:
    """The answer in a saved run of this kind, or another that the same command returns; raises `InputError` also where
    another command returns it.
    """
    answer = load(path)
    if KINDS[answer.kind].command != KINDS[kind].command:
        article = "an" if answer.kind[0] in "aeiou" else "a"
        raise InputError(f"{path} holds {article} {answer.kind}: {KINDS[answer.kind].reader}")
    return answer


def load_step(path: str | os.PathLike[str], scenario: str | None) -> StepTrace:
    """The step in a saved run: the one of a timeline or a program, a generation's largest, or of a report the run under
    `scenario` (None: its layers').

    Raises `InputError`, and `ScenarioError` where the report has no such run.
    """
    answer = load(path)
    if isinstance(answer, (ProgramRun, GenerationReport)):
        answer = StepTrace(answer.trace, answer.card.name, config_of(answer))
    if not isinstance(answer, Report):
        step: StepTrace = answer if isinstance(answer, StepTrace) else load_kind(path, StepTrace.kind)
        if scenario is not None and step.trace.scenario != scenario:
            raise InputError(f"{path} was run under {step.trace.scenario}, and under no other scenario")
        return step
    runs = {result.name: result.trace for result in answer.scenario_results if result.trace}
    runs.setdefault(answer.trace.scenario, answer.trace)
    if scenario is not None and scenario not in runs:
        raise UnknownScenarioError("scenario", scenario, runs)
    trace = answer.trace if scenario is None else runs[scenario]
    return StepTrace(trace, answer.gpu or DEFAULT_GPU, config_of(answer))
