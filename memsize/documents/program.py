"""A program's run as a document: the verdict, its phases, and the largest tensors at the peak with their lines."""

from __future__ import annotations

from typing import Any, Final

from memsize.analysis.timeline import timeline
from memsize.device.config import AllocatorConfig
from memsize.documents import Document, findings_data, plain
from memsize.documents.sections import Cell, Column, Findings, Path, Section, Specs, Table, Title, listed
from memsize.documents.timeline import alive_table, course_table
from memsize.records.program import Assumed, LiveTensor, ProgramRun
from memsize.records.roles import noun
from memsize.records.trace import TensorSpec
from memsize.units import Bytes

SCHEMA: Final = "memsize.program/1"


class ProgramDocument(Document[ProgramRun]):
    """A program's run."""

    def sections(self) -> tuple[Section, ...]:
        """The verdict first, then what it rests on."""
        run = self.answer
        found = timeline(run.trace, AllocatorConfig(), run.card)
        tables = (course_table(found), alive_table(found)) if len(found) else ()
        return (
            program_title(run),
            *((Findings("In short", run.findings),) if run.findings else ()),
            *tables,
            *((tensor_table(run),) if run.tensors else ()),
            *listed("Assumed", tuple(map(_assumed, run.assumed))),
            *listed("Not written", run.unwritten),
            *listed("Notes", run.trace.notes),
        )

    def data(self, unit: str) -> dict[str, Any]:
        """Everything but the trace."""
        run = self.answer
        return {
            "schema": SCHEMA,
            "program": run.program,
            "gpu": run.card.name,
            "gpu_bytes": run.card.bytes,
            "capacity": run.capacity,
            "steps": run.steps,
            "stopped": run.stopped,
            "failure": run.failure,
            "peak": _peak_data(run),
            "tensors": [tensor._asdict() for tensor in run.tensors],
            "refused": [refused._asdict() for refused in run.refused],
            "survivors": [each._asdict() for each in run.survivors],
            "kept_gradients": run.kept_gradients,
            "unwritten": run.unwritten,
            "assumed": [assumed._asdict() for assumed in run.assumed],
            "findings": findings_data(run.findings, unit),
            "notes": run.trace.notes,
        }


def _peak_data(run: ProgramRun) -> dict[str, Any]:
    peak = plain(run.peak)
    peak.pop("storages")
    return {**peak, "device": run.peak.device._asdict(), "roles": dict(run.peak.roles)}


def program_title(run: ProgramRun) -> Title:
    """The program's command line, how far it ran, and where."""
    steps = f"{run.steps} step{'' if run.steps == 1 else 's'}"
    return Title(run.program, ((steps,), (f"on {run.card.name}",)))


def tensor_table(run: ProgramRun) -> Table:
    """One row for each of the largest storages alive at the peak."""
    columns = (
        Column("bytes", "holds", "bytes", 100, "what it takes"),
        Column("role", "as", "text", 98, "what it is for"),
        Column("spec", "tensor", "specs", 70, "its first tensor"),
        Column("line", "made at", "text", 99, "the line of the program that made it"),
        Column("layer", "in", "name", 90, "the module that was running"),
        Column("op", "by", "text", 80, "the op that made it"),
        Column("phase", "phase", "text", 60, "when it was made"),
    )
    return Table("tensors", "Tensors", columns, tuple(map(_cells, run.tensors)), caption="Largest at the peak")


def _cells(tensor: LiveTensor) -> tuple[Cell, ...]:
    return (
        Bytes(tensor.bytes),
        noun(tensor.role),
        Specs((TensorSpec(tensor.dtype, tensor.shape),)),
        tensor.line,
        None if tensor.layer is None else Path(tensor.layer),
        tensor.op,
        tensor.phase,
    )


def _assumed(assumed: Assumed) -> str:
    return f"{assumed.text} ({assumed.line})" if assumed.line else assumed.text
