"""`Side`: all that is known of one of two models or files that are compared, whichever answer it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memsize.analysis.step import StepTrace
from memsize.checkpoints.checkpoint_report import CheckpointReport
from memsize.checkpoints.contents import Tensor
from memsize.errors import InputError
from memsize.records.aggregates import split_phase
from memsize.records.comparison import FigureOf
from memsize.records.finding import Finding
from memsize.records.gpu import GpuEstimate
from memsize.records.program import ProgramRun
from memsize.records.report import Report
from memsize.records.trace import Layer, StoredTensor, Trace


@dataclass(frozen=True, slots=True)
class Side:
    """One side: its run, what it is called (empty: as its model is), and what was found about it.

    `runs` are the runs and `peaks` the peaks of inference and training by scenario, where those are known. `file` has
    the size of a checkpoint's files and the bytes of its parts.
    """

    trace: Trace
    name: str = ""
    runs: tuple[tuple[str, Trace], ...] = ()
    peaks: tuple[tuple[str, FigureOf, GpuEstimate], ...] = ()
    findings: tuple[Finding, ...] = ()
    gpu: str = ""
    optimizer: str = ""
    notes: tuple[str, ...] = ()
    file: Mapping[str, int] | None = None

    @classmethod
    def of(cls, answer: Any, name: str = "") -> Side:
        """The side that an answer is; raises `InputError` for one that is about no single model."""
        match answer:
            case Trace():
                return cls(answer, name)
            case Report():
                return _of_report(answer, name)
            case StepTrace(trace, gpu):
                return cls(trace, name, peaks=((trace.scenario, _peak_of(trace), answer.peak),), gpu=gpu)
            case ProgramRun(trace=trace, peak=peak, findings=findings, card=card):
                peaks = ((trace.scenario, _peak_of(trace), peak),)
                return cls(trace, name, peaks=peaks, findings=findings, gpu=card.name)
            case CheckpointReport():
                parts: dict[str, int] = {part.kind: part.bytes for part in answer.breakdown.parts}
                return cls(_as_trace(answer), name, findings=answer.findings, file={"size": answer.size, **parts})
        kind = getattr(answer, "kind", type(answer).__name__)
        raise InputError(
            f"a {kind} cannot be compared: give models, reports, steps, saved runs of these, or checkpoints"
        )


def _peak_of(trace: Trace) -> FigureOf:
    return "training peak" if any(split_phase(phase)[0] == "backward" for phase in trace.phases) else "inference peak"


def _of_report(report: Report, name: str) -> Side:
    results = report.scenario_results
    peaks: list[tuple[str, FigureOf, GpuEstimate]] = []
    for result in results:
        peaks += [(result.name, "inference peak", result.inference)] if result.inference else []
        peaks += [(result.name, "training peak", result.training)] if result.training else []
    runs = tuple((result.name, result.trace) for result in results if result.trace)
    notes = (*report.assumptions, *report.remarks)
    return Side(
        trace=report.trace,
        name=name,
        runs=runs,
        peaks=tuple(peaks),
        findings=report.findings,
        gpu=report.gpu,
        optimizer=report.optimizer,
        notes=notes,
    )


def _as_trace(report: CheckpointReport) -> Trace:
    """The tensors of a file as those of a model, with a layer for each key that they stand under.

    What belongs to the model counts as parameters: a file does not tell them from buffers.
    """
    weights = {id(tensor) for tensor in report.breakdown.of("model")}
    tensors = tuple(_stored(tensor, id(tensor) in weights) for tensor in report.contents.tensors)
    paths: dict[str, None] = {"": None}
    for tensor in tensors:
        steps = tensor.layer.split(".") if tensor.layer else []
        paths |= dict.fromkeys(".".join(steps[: depth + 1]) for depth in range(len(steps)))
    above = {path.rpartition(".")[0] for path in paths if path}
    layers = tuple(_layer(path, path not in above) for path in paths)
    return Trace(
        model=report.contents.path,
        scenario="as saved",
        training=False,
        batch_size=None,
        torch="",
        inputs=(),
        layers=layers,
        tensors=tensors,
    )


def _stored(tensor: Tensor, is_weight: bool) -> StoredTensor:
    return StoredTensor(
        name=tensor.name,
        kind="parameter" if is_weight else "attribute",
        layer=tensor.name.rpartition(".")[0],
        spec=tensor.spec,
        elements=tensor.elements,
        bytes=tensor.bytes,
        reported_bytes=tensor.bytes,
        trainable=bool(tensor.trainable),
        tied_to=tensor.shared_with,
        wrapper=tensor.wrapper,
    )


def _layer(path: str, leaf: bool) -> Layer:
    depth = path.count(".") + 1 if path else 0
    return Layer(
        path=path,
        type="",
        depth=depth,
        leaf=leaf,
        calls=0,
        outputs=(),
        parameters=0,
        trainable=0,
        parameter_bytes=0,
        buffer_bytes=0,
        output_bytes=0,
        saved_bytes=0,
        cast_bytes=0,
    )
