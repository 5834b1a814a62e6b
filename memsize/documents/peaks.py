"""The peaks of a report on a GPU: by scenario and run, by role, and the largest tensors alive there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memsize.device.cards import card
from memsize.documents.sections import Bars, Limit, Remark, Table, role_part, said_once
from memsize.records.cells import Cell, Label, Path
from memsize.records.fields import Column, role_fields
from memsize.records.finding import moment_in_words, optimizer_in_words
from memsize.records.gpu import GpuEstimate, LiveStorage, Shortage
from memsize.records.report import Report, ScenarioResult
from memsize.records.roles import Role, in_order
from memsize.units import Bytes


def scenario_label(result: ScenarioResult) -> Label:
    """A scenario's name, marked where its figures are modelled."""
    return Label(result.name, result.status == "modelled", result.title)


def peak_bars(report: Report) -> Bars:
    """What is alive by role at each scenario's peak of a training step, beside the memory of the GPU."""
    looks = [(result, result.training) for result in report.scenario_results if result.training]
    bars = Bars.of(
        "peak of a training step",
        map(role_part, in_order(role for _, look in looks for role in look.roles)),
        ((scenario_label(result), look.roles) for result, look in looks),
    )
    return replace(bars, limit=Limit(report.gpu, card(report.gpu).bytes))


def peak_table(report: Report) -> Table:
    """One row per scenario and run: its peak in the allocator's terms, and what is alive there by role."""
    runs = [(r, run, look) for r in report.scenario_results for run, look in _estimates(r) if look]
    roles = in_order(role for _, _, look in runs for role in look.roles)
    columns = (
        Column("scenario", "scenario", "name", 100, "how the model is stored and run"),
        Column("run", "peak of", "text", 98, "one forward without gradients, or a training step"),
        Column("requested", "requested", "bytes", 95, "what tensors ask for"),
        Column("allocated", "allocated", "bytes", 90, "the caching allocator's blocks"),
        Column("reserved", "reserved", "bytes", 92, "the caching allocator's segments"),
        Column("device_low", "device from", "bytes", 80, "reserved and what is outside PyTorch, at least"),
        Column("device_high", "to", "bytes", 80, "reserved and what is outside PyTorch, at most", beside="device_low"),
        Column("phase", "in", "text", 85, "the phase that the peak falls in", alone="phase"),
        Column("layer", "at", "name", 70, "the layer that the peak falls in", alone="layer"),
        *role_fields([look.roles for _, _, look in runs], " alive at the peak"),
    )
    # A100, H100, L4 and RTX begin with a vowel when they are read out.
    article = "an" if report.gpu[:1] in "AHLR" else "a"
    stack = f" with {report.trace.stack}" if report.trace.stack else ""
    trained = f", training with {optimizer_in_words(report.optimizer)}" if report.optimizer else ""
    return Table(
        name="peaks",
        title="Peaks",
        caption=f"Peaks on {article} {report.gpu}{stack}{trained}",
        columns=columns,
        rows=tuple(_peak_cells(result, run, look, roles) for result, run, look in runs),
        remarks=said_once(
            (
                *(Remark(r.name, "training", r.untrained) for r in report.scenario_results if r.untrained),
                *(Remark(r.name, run, _short(look.shortage)) for r, run, look in runs if look.shortage),
            )
        ),
    )


def _short(shortage: Shortage) -> str:
    where = moment_in_words(shortage.phase, shortage.layer)
    if shortage.certain:
        return f"does not fit: it runs out of memory in {where}; its peaks are those with enough memory"
    outside = "a large CUDA context and NCCL's buffers" if shortage.nccl else "a large CUDA context"
    return f"may not fit: with {outside} it runs out of memory in {where}"


def _estimates(result: ScenarioResult) -> tuple[tuple[str, GpuEstimate | None], ...]:
    return ("inference", result.inference), ("training", result.training)


def _peak_cells(result: ScenarioResult, run: str, look: GpuEstimate, roles: Sequence[Role]) -> tuple[Cell, ...]:
    return (
        Label(result.name, result.status == "modelled", result.title),
        run,
        Bytes(look.requested),
        Bytes(look.allocated),
        Bytes(look.reserved),
        Bytes(look.device.low),
        Bytes(look.device.high),
        look.peak_phase,
        Path(look.peak_layer) if look.peak_layer else "",
        *(Bytes(look.roles.get(role, 0)) for role in roles),
    )


def living_table(report: Report, count: int = 8) -> Table:
    """The largest storages alive at the peak of the first scenario that has one, of its training if that was run."""
    result, look = next((r, look) for r in report.scenario_results if (look := r.training or r.inference))
    columns = (
        Column("bytes", "bytes", "bytes", 100, "the storage's size"),
        Column("role", "role", "text", 95, "what it is for"),
        Column("layer", "layer", "name", 90, "the layer that it belongs to or was made in"),
        Column("op", "op", "text", 70, "the op that made it"),
        Column("phase", "made in", "text", 60, "the phase that it was made in"),
        Column("tensor", "tensor", "text", 80, "its dtype and shape"),
        Column("line", "line", "text", 75, "the line of the forward that made it"),
    )
    run = "training" if result.training else "inference"
    table = Table(
        name="living",
        title="Alive at the peak",
        caption=f"Alive at the peak of {result.name}, {run}: the largest",
        columns=columns,
        rows=tuple(map(_living_cells, look.storages[:count])),
    )
    return table.without_empty("line")


def _living_cells(living: LiveStorage) -> tuple[Cell, ...]:
    return (
        Bytes(living.bytes),
        living.role,
        None if living.layer is None else Path(living.layer),
        living.op,
        living.phase,
        f"{living.dtype}[{','.join(map(str, living.shape))}]",
        living.line,
    )
