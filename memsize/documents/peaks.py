"""What a GPU would show at the peaks of each scenario, and what is alive at one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memsize.documents.sections import Cell, Column, Label, Path, Remark, Section, Table, role_column
from memsize.records.roles import Role, in_order
from memsize.units import Bytes

if TYPE_CHECKING:
    from memsize.records.gpu import Living, Outlook
    from memsize.records.report import Report, ScenarioResult


def peak_sections(report: Report) -> tuple[Section, ...]:
    """The peaks of all scenarios, and the largest storages alive at the first one; nothing if none were asked for."""
    outlooks = [outlook for result in report.scenario_results for outlook in (result.training, result.inference)]
    first = next((outlook for outlook in outlooks if outlook), None)
    return (peak_table(report), living_table(report)) if first else ()


def peak_table(report: Report) -> Table:
    """One row per scenario and run: its peak in the allocator's terms, and what is alive there by role."""
    results = [(result, run) for result in report.scenario_results for run in ("inference", "training")]
    shown = [(result, run, look) for result, run in results if (look := _outlook(result, run))]
    roles = in_order(role for _, _, look in shown for role in look.roles)
    columns = (
        Column("scenario", "scenario", "name", 100, "how the model is stored and run"),
        Column("run", "peak of", "text", 98, "one forward without gradients, or a training step"),
        Column("requested", "requested", "bytes", 95, "what tensors ask for"),
        Column("allocated", "allocated", "bytes", 90, "the caching allocator's blocks"),
        Column("reserved", "reserved", "bytes", 92, "the caching allocator's segments"),
        Column("device_low", "device from", "bytes", 80, "reserved and the CUDA context, at least"),
        Column("device_high", "to", "bytes", 80, "reserved and the CUDA context, at most"),
        Column("phase", "in", "text", 85, "the phase that the peak falls in"),
        Column("layer", "at", "name", 70, "the layer that the peak falls in"),
        *(role_column(role, " alive at the peak") for role in roles),
    )
    return Table(
        name="peaks",
        title="Peaks",
        caption=_title(report),
        columns=columns,
        rows=tuple(_peak_row(result, run, look, roles) for result, run, look in shown),
        remarks=tuple(
            Remark(result.name, "training", result.untrained) for result in report.scenario_results if result.untrained
        ),
    )


def living_table(report: Report, count: int = 8) -> Table:
    """The largest storages alive at the peak of the first scenario that has one."""
    result, look = next((r, look) for r in report.scenario_results if (look := r.training or r.inference))
    columns = (
        Column("bytes", "bytes", "bytes", 100, "the storage's size"),
        Column("role", "role", "text", 95, "what it is for"),
        Column("layer", "layer", "name", 90, "the layer that it belongs to or was made in"),
        Column("op", "op", "text", 70, "the op that made it"),
        Column("phase", "made in", "text", 60, "the phase that it was made in"),
        Column("tensor", "tensor", "text", 80, "its dtype and shape"),
    )
    run = "training" if result.training else "inference"
    return Table(
        name="living",
        title="Alive at the peak",
        caption=f"Alive at the peak of {result.name}, {run}: the largest",
        columns=columns,
        rows=tuple(_living_row(living) for living in look.storages[:count]),
    )


def _title(report: Report) -> str:
    # A100, H100, L4 and RTX begin with a vowel when they are read out.
    article = "an" if report.gpu[:1] in "AHLR" else "a"
    trained = f", training with {report.optimizer}" if report.optimizer else ""
    return f"Peaks on {article} {report.gpu}{trained}"


def _outlook(result: ScenarioResult, run: str) -> Outlook | None:
    return result.inference if run == "inference" else result.training


def _peak_row(result: ScenarioResult, run: str, look: Outlook, roles: Sequence[Role]) -> tuple[Cell, ...]:
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


def _living_row(living: Living) -> tuple[Cell, ...]:
    tensor = f"{living.dtype}[{','.join(map(str, living.shape))}]"
    return (
        Bytes(living.bytes),
        living.role,
        None if living.layer is None else Path(living.layer),
        living.op,
        living.phase,
        tensor,
    )
