"""A report as a document: its layers, its scenarios side by side, their peaks on a GPU, and why.

Adding up a column of the layer table gives the same figure of the whole model, at every depth and in every format. A
figure that is not known is `Missing` in a table and null in the data, where the scenario's `reason` says why.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

from memsize.analysis.timeline import timeline
from memsize.device.allocator_config import config_of
from memsize.device.cards import card
from memsize.documents import MOST_SENTENCES, MOST_SHORT_ROWS, Document, findings_data, plain, renamed, values_of
from memsize.documents.generation import phase_tables
from memsize.documents.sections import (
    Bars,
    Chart,
    Limit,
    Part,
    Phrase,
    Remark,
    ScenarioView,
    Section,
    Stop,
    Strip,
    Table,
    Title,
)
from memsize.documents.shared import (
    compared_collectives,
    compared_streams,
    input_text,
    listed,
    role_part,
    said_once,
    versions,
)
from memsize.errors import OutputError
from memsize.records.aggregates import COUNTED, Row, Totals, own_rows, stored_dtypes, visible
from memsize.records.fields import (
    SCENARIO,
    Fields,
    FlatTable,
    Label,
    Path,
    role_fields,
    shown,
)
from memsize.records.finding import Finding, moment_in_words, optimizer_in_words
from memsize.records.gpu import DEFAULT_GPU, LIVE_FIELDS, GpuEstimate, Shortage
from memsize.records.report import (
    COLUMNS,
    LAYER_FIELDS,
    SCENARIO_FIELDS,
    SHARES,
    Report,
    ScenarioResult,
    column_keys,
    figures,
)
from memsize.records.roles import in_order
from memsize.records.trace import Trace
from memsize.units import Bytes

SCHEMA: Final = "memsize.report/1"

_FIRST: Final = (
    "interrupted",
    "out-of-memory",
    "training-peak",
    "inference-peak",
    "pipeline-phases",
    "no-training-step",
    "compiled",
)
"""Codes of findings that the verdict puts first: they answer a question about training, a GPU or compiled code."""

_RUN_FIGURES: Final = frozenset(
    "cast_bytes output_bytes saved_bytes saved_cast_bytes input_bytes saved_input_bytes inference_bytes training_bytes"
    .split()
)  # fmt: skip


@dataclass(frozen=True)
class ReportDocument(Document[Report]):
    """A report. `depth` cuts the layer table; `columns` picks from `COLUMNS`, by default those that say something."""

    depth: int | None = None
    columns: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.columns is not None:
            object.__setattr__(self, "columns", column_keys(self.columns))
        if self.depth is not None and self.depth < 0:
            raise OutputError(f"depth {self.depth} is below the model itself, which is depth 0")

    def sections(self) -> tuple[Section, ...]:
        report = self.answer
        estimates = (estimate for result in report.scenario_results for estimate in (result.training, result.inference))
        runs = [((r.label,), r.training) for r in self.answer.scenario_results if r.training]
        traffic = compared_collectives([SCENARIO], ((label, training.collectives) for label, training in runs))
        return (
            title(report),
            *self.opening(),
            *([Stop(report.stopped)] if report.stopped else []),
            *phase_tables(report.scenario_results),
            layer_table(report, self.depth, self.columns),
            *([scenario_table(report)] if report.scenario_results else []),
            *([peak_table(report), living_table(report)] if any(estimates) else []),
            *(*traffic, *compared_streams([SCENARIO], ((label, training.streams) for label, training in runs))),
            *self.reasons(),
            *listed("Assumed", report.assumptions),
            *listed("Notes", report.remarks),
        )

    def verdict(self) -> tuple[Finding, ...]:
        brief = [finding for finding in self.answer.findings if finding.brief or finding.code == "no-input"]
        return tuple(sorted(brief, key=lambda finding: finding.code not in _FIRST))[:MOST_SENTENCES]

    def bars(self) -> Bars | None:
        """The bytes alive at the peaks of training steps, or else those in memory when backward starts, by scenario.

        Each byte is counted once there: a saved input counts as kept. Of a forward that keeps nothing for backward, as
        that of a pipeline, it is the peak on the GPU, or what is there before the forward.
        """
        report = self.answer
        peaks = {"a training step": [(result.label, result.training) for result in report.scenario_results]}
        keeps = _keeps_for_backward(report)
        if not keeps:
            peaks["inference"] = [(result.label, result.inference) for result in report.scenario_results]
        for what, estimates in peaks.items():
            if looks := [(label, estimate.roles) for label, estimate in estimates if estimate]:
                parts = map(role_part, in_order(role for _, roles in looks for role in roles))
                bars = Bars.of(f"peak of {what}", parts, looks)
                return replace(bars, limit=Limit(report.gpu, card(report.gpu).bytes))
        rows = []
        for result in report.scenario_results:
            if sums := result.totals:
                sizes = {"parameter": sums.parameter_bytes, "buffer": sums.buffer_bytes}
                sizes |= {"attribute": sums.attribute_bytes, "master weight": sums.master_bytes}
                sizes |= {"cast copy": sums.cast_bytes, "kept": sums.saved_bytes - sums.saved_cast_bytes}
                rows.append((result.label, sizes | {"input": sums.input_bytes - sums.saved_input_bytes}))
        moment = "backward" if keeps else "the forward"
        return Bars.of(f"in memory when {moment} starts", _PARTS, rows) if report.scenario_results else None

    def scenes(self) -> tuple[ScenarioView, ...]:
        report = self.answer
        runs = {result.name: (result.title, result.trace) for result in report.scenario_results if result.trace}
        # A model that is stored in float32 is its own fp32.
        same = (
            name for name, (_, trace) in runs.items() if replace(trace, scenario=report.trace.scenario) == report.trace
        )
        first = next(same, report.trace.scenario)
        runs = {first: ("the model as it is", report.trace)} | {n: run for n, run in runs.items() if n != first}
        about = next((f.moment.scenario for f in self.verdict() if f.moment and f.moment.scenario in runs), first)
        runs = {about: runs[about], **runs}
        return tuple(ScenarioView(name, hint, partial(self._inside, trace)) for name, (hint, trace) in runs.items())

    def _inside(self, trace: Trace) -> tuple[Table | Chart, ...]:
        report = self.answer
        table = layer_table(replace(report, trace=trace), self.depth, self.columns)
        if not trace.events:
            return (table,)
        run_timeline = timeline(trace, config_of(report), card(report.gpu or DEFAULT_GPU))
        steps = len(run_timeline.steps)
        what = f"{steps} training step{'' if steps == 1 else 's'}" if steps else "a forward of the whole model"
        return Chart(run_timeline, f"Live bytes over {what}"), table

    def in_short(self) -> Title:
        report = self.answer
        peak: tuple[Phrase, ...] = () if report.peak is None else (("peak", Bytes(report.peak)),)
        active = report.active_parameters
        count = f"{report.parameters:,} parameters" + ("" if active is None else f", {active:,} active per token")
        return Title(report.model, ((count,), *peak))

    def shorter(self, section: Section) -> Iterator[Section]:
        """Yield the layer table one level less deep each time, down to the model's children, and then the largest."""
        if isinstance(section, Title):
            yield replace(
                section, phrases=(*section.phrases[: 1 if self.answer.trace.inputs else 0], *_strips(self.answer))
            )
        elif not isinstance(section, Table) or section.name != "layers":
            yield from super().shorter(section)
        elif self.depth is None:
            deepest = max((layer.depth for layer in self.answer.trace.layers), default=0)
            cuts: list[tuple[int | None, int | None]] = [(depth, None) for depth in range(deepest, 0, -1)]
            cuts += [(1, most) for most in range(MOST_SHORT_ROWS, 0, -1)]
            yield from (replace(layer_table(self.answer, depth, self.columns, n), hint="") for depth, n in cuts)

    def tables(self) -> dict[str, FlatTable]:
        table = layer_table(self.answer, self.depth, self.columns or COLUMNS)
        names = {column.key: column.name for column in LAYER_FIELDS.columns}
        return self.answer.tables() | {"layers": FlatTable(tuple(map(names.__getitem__, table.keys)), table.rows)}

    def versions(self) -> tuple[Phrase, ...]:
        return versions((self.answer.trace,), (card(self.answer.gpu),) if self.answer.gpu else ())

    def figures(self, unit: str) -> dict[str, Any]:
        report, trace, totals = self.answer, self.answer.trace, self.answer.totals
        layers = [_layer_data(row) for row in own_rows(trace)]
        return {
            "schema": SCHEMA,
            "model": report.model,
            **values_of(trace, "scenario", "torch", "training", "batch_size"),
            "inputs": plain(trace.inputs),
            "parameters": {"count": totals.parameters, "trainable": totals.trainable, "bytes": totals.parameter_bytes}
            | ({} if report.active_parameters is None else {"active": report.active_parameters}),
            "buffers": {"bytes": totals.buffer_bytes},
            "attributes": {"bytes": totals.attribute_bytes},
            "totals": _run_only(figures(totals), trace),
            "layers": [_run_only(layer, trace) for layer in layers],
            "tensors": plain(trace.tensors),
            "scenarios": [
                _scenario_data(result, report.fp32) | {"layers": result.trace and _layer_columns(result.trace, layers)}
                for result in report.scenario_results
            ],
            "findings": findings_data(report.findings, unit),
            "assumptions": report.assumptions,
            "notes": report.remarks,
            "gpu": report.gpu or None,
            "stack": trace.stack or None,
            "optimizer": report.optimizer or None,
            "failure": plain(report.stopped),
            "missing": report.missing,
        }


def _layer_data(row: Row) -> dict[str, Any]:
    return {name: value for name, value in renamed(plain(row), dtypes="stored_as").items() if name != "layers"}


_SHOWN_ONLY: Final = frozenset("depth calls outputs marks aliases inputs kernel".split())
"""The fields of a layer that other scenarios do not repeat."""


def _layer_columns(trace: Trace, shown: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Figures of each layer of `trace` as columns, in the order of its layers, without those that are as `shown`."""
    own = [_layer_data(row) for row in own_rows(trace)]
    columns = {name: [row[name] for row in own] for name in shown[0] if name not in _SHOWN_ONLY}
    return {name: column for name, column in columns.items() if column != [row[name] for row in shown]}


def _run_only(figures: dict[str, Any], trace: Trace) -> dict[str, Any]:
    """Return `figures`; if the model was not run, the ones that need a run are `None`."""
    return figures if trace.ran else figures | dict.fromkeys(figures.keys() & _RUN_FIGURES)


def _scenario_data(result: ScenarioResult, baseline: Totals | None) -> dict[str, Any]:
    shares = ("parameter_bytes", "output_bytes", "saved_bytes", "inference", "training")
    return {
        **values_of(result, "name", "title", "status", "reason"),
        **figures(result.totals),
        "inference": _estimate_data(result.inference),
        "training": _estimate_data(result.training),
        "untrained": result.untrained,
        "of_fp32": {name.removesuffix("_bytes"): result.share(name, baseline) for name in shares},
    }


def _estimate_data(estimate: GpuEstimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    return asdict(estimate) | {
        name: [entry._asdict() for entry in getattr(estimate, name)] for name in ("storages", "streams", "phases")
    }


def title(report: Report) -> Title:
    """The model, its input and what it stores; the scenario where it is not run as given."""
    totals, inputs = report.totals, report.trace.inputs
    phrases: list[Phrase] = [("as", report.trace.scenario)] if report.trace.scenario != "as-given" else []
    if inputs:
        phrases.append((f"input{'s' if len(inputs) > 1 else ''}", ", ".join(map(input_text, inputs))))
    stored: list[str | Bytes] = [f"{totals.parameters:,} parameters,", Bytes(totals.parameter_bytes)]
    if dtypes := stored_dtypes(tensor for tensor in report.trace.tensors if tensor.kind in COUNTED):
        *first, last = dtypes
        stored.append(f"in {', '.join(first)} and {last}" if first else f"in {last}")
    if report.active_parameters is not None:
        stored.append(f"({report.active_parameters:,} active per token)")
    if totals.trainable != totals.parameters:
        stored.append(f"({totals.trainable:,} trainable)")
    phrases.append(tuple(stored))
    if totals.buffer_bytes:
        phrases.append(("buffers", Bytes(totals.buffer_bytes)))
    phrases += _strips(report)
    return Title(report.model, tuple(phrases))


def _strips(report: Report) -> Iterator[Phrase]:
    """The peak of the first scenario that has one, in all ways to count."""
    for result in report.scenario_results:
        if peak := result.training or result.inference:
            memory = Strip.of_peak(peak.requested, peak.allocated, peak.reserved, peak.device, card(report.gpu).bytes)
            yield (f"peak of {result.name}:", memory)
            return


_SUMMED: Final = (
    "parameters trainable parameter_bytes buffer_bytes attribute_bytes output_bytes saved_bytes cast_bytes"
).split()
_FROM_RUNS: Final = ("input", "output", "calls", "cast", "new", "saved", "mult_adds", "mult_adds_share")
"""The columns that are unknown if the model was not run."""


def layer_table(
    report: Report, depth: int | None = None, columns: Sequence[str] | None = None, most: int | None = None
) -> Table:
    """The layer table down to `depth`; its rows add up to its total. `layer` is always its first column.

    With `most`, all but so many rows with the largest figures are added up in one. So are those that a forward that
    failed did not reach.
    """
    rows, totals = visible(report.trace, depth), report.totals
    has_run = (row.calls or row.saved_bytes or row.output_bytes or "failed here" in row.marks for row in rows)
    shown = [row for row, ran in zip(rows, has_run, strict=True) if ran or not report.stopped]
    if most is not None:
        largest = sorted(shown, key=lambda row: row.parameter_bytes + row.saved_bytes, reverse=True)[:most]
        numbers = set(map(id, largest))  # to compare rows would take as long as all the rest of a deep model's report
        shown = [row for row in shown if id(row) in numbers]
    numbers = set(map(id, shown))
    others = [row for row in rows if id(row) not in numbers]
    table = Table.of(
        "layers",
        "Layers",
        LAYER_FIELDS,
        shown,
        totals,
        total=LAYER_FIELDS.total("so far" if report.stopped else "total", totals, totals),
        chosen=columns is not None,
        hint="Choose with --columns; a file or pipe has them all.",
    )
    if others:
        word = "not reached" if report.stopped and most is None else "other" if len(others) == 1 else "others"
        named = f"{len(others):,} {word}"
        table = replace(table, rows=(*table.rows, LAYER_FIELDS.total(Label(named), _added(others), totals)))
    if columns is not None:
        return table.picked(dict.fromkeys(("layer", *columns)))
    # A dtype that all share stands in the heading.
    dtypes = {row.dtypes for row in rows if row.parameter_bytes}
    unknown = [] if report.trace.ran else _FROM_RUNS
    table = table.without(*(["dtype"] if len(dtypes) < 2 else []), *unknown)
    return table.without_empty("buffers", "unregistered", "cast", "notes")


def _added(rows: Collection[Row]) -> Row:
    """The sums of `rows`."""
    sums = {name: sum(getattr(row, name) for row in rows) for name in _SUMMED}
    counts = [row.multiply_adds for row in rows if row.multiply_adds is not None]
    return Row("", "", 0, (), **sums, multiply_adds=sum(counts) if counts else None)


def _keeps_for_backward(report: Report) -> bool:
    """Whether anything is kept for backward: not by a pipeline, or a model whose parameters are all frozen."""
    return any(result.totals and result.totals.saved_bytes for result in report.scenario_results)


def scenario_table(report: Report) -> Table:
    """The scenarios side by side, each figure beside its share of float32's where that is known."""
    compared = report.fp32 and len(report.scenario_results) > 1
    fields = SCENARIO_FIELDS if compared else SCENARIO_FIELDS.without(*SHARES)
    remarks = said_once(
        Remark(entry.name, entry.status, entry.reason) for entry in report.scenario_results if entry.reason
    )
    left_out = [] if _keeps_for_backward(report) else ["saved_bytes", "training"]
    if not any(
        phase.startswith("forward") for phase in report.trace.phases
    ):  # of a pipeline: sums over all its steps, of which little is there at once
        left_out += ["output_bytes", "inference"]
    fields = fields.without(*left_out, *(f"{name}_of_fp32" for name in left_out))
    table = Table.of("scenarios", "Scenarios", fields, report.scenario_rows, remarks=remarks)
    return table.without_empty("buffers", "unregistered", "master", "cast")


_PARTS: Final = (
    role_part("parameter"),
    role_part("buffer"),
    Part("attribute", "not registered", "buffer"),
    role_part("master weight"),
    role_part("cast copy"),
    Part("kept", "kept for backward", "activation"),
    role_part("input"),
)


# -- peaks on a GPU ----------------------------------------------------------------------------------------------------


class _PeakRow(NamedTuple):
    """One run of a scenario: a forward without gradients (``"inference"``) or a training step, at its peak."""

    result: ScenarioResult
    run: str
    estimate: GpuEstimate


_DEVICE: Final = "reserved and what is outside PyTorch"
_PEAK_FIELDS: Final = Fields[_PeakRow](
    shown("scenario", "scenario", "name", 100, SCENARIO.help, get="result.label"),
    shown("run", "peak of", "text", 98, "one forward without gradients, or a training step"),
    shown("estimate.requested", "requested", "bytes", 95, "bytes that live tensors ask for", key="requested"),
    shown("estimate.allocated", "allocated", "bytes", 90, "the caching allocator's blocks", key="allocated"),
    shown("estimate.reserved", "reserved", "bytes", 92, "the caching allocator's segments", key="reserved"),
    shown("estimate.device.low", "nvidia-smi from", "bytes", 80, f"{_DEVICE}, at least", key="device_low"),
    shown("estimate.device.high", "to", "bytes", 80, f"{_DEVICE}, at most", key="device_high", beside="device_low"),
    shown("estimate.peak_phase", "in", "text", 85, "the phase that the peak falls in", key="phase", alone="phase"),
    shown("layer", "at", "name", 70, "the layer that the peak falls in", alone="layer"),
    cell={"layer": lambda row, _: Path(row.estimate.peak_layer) if row.estimate.peak_layer else ""},
)


def peak_table(report: Report) -> Table:
    """One row per scenario and run: its peak in the allocator's terms, and the bytes alive there by role."""
    rows = [
        _PeakRow(r, run, look)
        for r in report.scenario_results
        for run, look in (("inference", r.inference), ("training", r.training))
        if look
    ]
    roles = role_fields([row.estimate.roles for row in rows], " alive at the peak", of="estimate.roles")
    # A100, H100, L4 and RTX begin with a vowel when they are read out.
    article = "an" if report.gpu[:1] in "AHLR" else "a"
    stack = f" with {report.trace.stack}" if report.trace.stack else ""
    trained = f", training with {optimizer_in_words(report.optimizer)}" if report.optimizer else ""
    remarks = (
        *(Remark(r.name, "training", r.untrained) for r in report.scenario_results if r.untrained),
        *(Remark(r.name, run, _short(look.shortage)) for r, run, look in rows if look.shortage),
    )
    caption = f"Peaks on {article} {report.gpu}{stack}{trained}"
    return Table.of("peaks", "Peaks", _PEAK_FIELDS.plus(*roles), rows, caption=caption, remarks=said_once(remarks))


def _short(shortage: Shortage) -> str:
    where = moment_in_words(shortage.phase, shortage.layer)
    if shortage.certain:
        return f"does not fit: it runs out of memory in {where}; its peaks are those with enough memory"
    outside = "a large CUDA context and NCCL's buffers" if shortage.nccl else "a large CUDA context"
    return f"may not fit: with {outside} it runs out of memory in {where}"


def living_table(report: Report, count: int = 8) -> Table:
    """The largest storages alive at the first peak of a scenario: that of its training, or else of its inference."""
    result, look = next((r, look) for r in report.scenario_results if (look := r.training or r.inference))
    caption = f"Alive at the peak of {result.name}, {'training' if result.training else 'inference'}: the largest"
    table = Table.of("living", "Alive at the peak", LIVE_FIELDS, look.storages[:count], caption=caption)
    return table.without_empty("line")
