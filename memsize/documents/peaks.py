"""The peaks of a report on a GPU: by scenario and run, by role, and the largest tensors alive there."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from memsize.device.cards import card
from memsize.documents.sections import Bars, Limit, Remark, Table, role_part, said_once
from memsize.records.cells import Path
from memsize.records.fields import BYTES, NAME, SCENARIO, TEXT, Fields, role_fields, shown
from memsize.records.finding import moment_in_words, optimizer_in_words
from memsize.records.gpu import LIVE_FIELDS, GpuEstimate, Shortage
from memsize.records.report import Report, ScenarioResult
from memsize.records.roles import in_order


class _PeakRow(NamedTuple):
    """One run of a scenario: a forward without gradients (``"inference"``) or a training step, at its peak."""

    result: ScenarioResult
    run: str
    estimate: GpuEstimate


_PEAK_FIELDS: Final = Fields[_PeakRow](
    shown("scenario", "scenario", NAME, 100, SCENARIO.help, get=lambda row: row.result.label),
    shown("run", "peak of", TEXT, 98, "one forward without gradients, or a training step"),
    shown("estimate.requested", "requested", BYTES, 95, "what tensors ask for", key="requested"),
    shown("estimate.allocated", "allocated", BYTES, 90, "the caching allocator's blocks", key="allocated"),
    shown("estimate.reserved", "reserved", BYTES, 92, "the caching allocator's segments", key="reserved"),
    shown(
        "estimate.device.low",
        "device from",
        BYTES,
        80,
        "reserved and what is outside PyTorch, at least",
        key="device_low",
    ),
    shown(
        "estimate.device.high",
        "to",
        BYTES,
        80,
        "reserved and what is outside PyTorch, at most",
        key="device_high",
        beside="device_low",
    ),
    shown("estimate.peak_phase", "in", TEXT, 85, "the phase that the peak falls in", key="phase", alone="phase"),
    shown(
        "estimate.peak_layer",
        "at",
        NAME,
        70,
        "the layer that the peak falls in",
        cell=lambda row, _: Path(row.estimate.peak_layer) if row.estimate.peak_layer else "",
        key="layer",
        alone="layer",
    ),
)


def peak_bars(report: Report) -> Bars:
    """The bytes alive by role at the peak of each scenario's training step, beside the memory of the GPU."""
    looks = [(result, result.training) for result in report.scenario_results if result.training]
    bars = Bars.of(
        "peak of a training step",
        map(role_part, in_order(role for _, look in looks for role in look.roles)),
        ((result.label, look.roles) for result, look in looks),
    )
    return replace(bars, limit=Limit(report.gpu, card(report.gpu).bytes))


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
