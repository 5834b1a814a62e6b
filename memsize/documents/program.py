"""A program's run as a document: the verdict, its phases, and the largest tensors at the peak with their lines.

Several ranks of one are whether all fit, the ranks beside one another, and the worst from inside.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

from memsize.analysis.timeline import timeline
from memsize.device.allocator_config import config_of
from memsize.documents import Document, findings_data, plain, values_of
from memsize.documents.sections import (
    Bars,
    Chart,
    Findings,
    Phrase,
    Remark,
    ScenarioView,
    Section,
    Strip,
    Table,
    Title,
    collective_tables,
    listed,
    role_part,
    stream_tables,
    versions,
)
from memsize.documents.timeline import alive_table, course_table
from memsize.records.cells import Label
from memsize.records.fields import role_fields
from memsize.records.peak_by_module import MODULE_FIELDS, peak_by_module
from memsize.records.program import CHILD_FIELDS, HOST_FIELDS, TENSOR_FIELDS, Assumed, ProgramRun
from memsize.records.ranks import GROUP_FIELDS, RankRuns, spans
from memsize.records.roles import in_order
from memsize.records.timeline import Timeline, step_courses

SCHEMA: Final = "memsize.program/1"
RANKS_SCHEMA: Final = "memsize.ranks/1"
_LINES: Final = 5
"""The most lines shown for one assumption."""
_TOLD_OF_ALL: Final = ("run-out-of-memory", "run-fits")
"""Codes of findings that are left out for a single rank, since the findings about all ranks cover them."""


class ProgramDocument(Document[ProgramRun]):
    """A program's run."""

    only_brief = False

    @cached_property
    def _timeline(self) -> Timeline:
        run = self.answer
        return timeline(run.trace, config_of(run), run.card, few=0)

    def sections(self) -> tuple[Section, ...]:
        run = self.answer
        steps = f"{run.steps} step{'' if run.steps == 1 else 's'}"
        ranks = ((str(run.trace.world),),) if run.trace.world.size > 1 else ()
        stack = f" with {run.trace.stack}" if run.trace.stack else ""
        peak = run.peak
        memory = Strip(peak.requested, peak.allocated, peak.reserved, peak.device, run.card.bytes)
        strip = ((memory,),) if peak.requested else ()
        title = Title(run.program, (*ranks, (steps,), (f"on {run.card.name}{stack}",), *strip))
        return (title, *self.opening(), *self.reasons(), *self.inside())

    def inside(self) -> tuple[Section, ...]:
        """The sections behind the verdict: phases, modules, collectives, streams, tensors, processes and notes."""
        run = self.answer
        summaries = step_courses(self._timeline)
        tables = (course_table(summaries), alive_table(summaries), module_table(run)) if summaries else ()
        return (
            *tables,
            *collective_tables(run.peak.collectives),
            *stream_tables(run.peak.streams),
            *((tensor_table(run),) if run.tensors else ()),
            *((child_table(run),) if run.children else ()),
            *((host_table(run),) if run.trace.host.needs else ()),
            *listed("Assumed", tuple(map(_assumed, run.assumed))),
            *listed("Not written", run.unwritten),
            *listed("Notes", run.trace.notes),
        )

    def scenes(self) -> tuple[ScenarioView, ...]:
        run = self.answer
        if not run.trace.events:
            return ()
        run_timeline = self._timeline
        return (
            ScenarioView("run", run.program, lambda: (Chart(run_timeline), course_table(step_courses(run_timeline)))),
        )

    def main_table(self) -> str:
        return "tensors" if self.answer.tensors else super().main_table()

    def bars(self) -> Bars | None:
        rows = [(role_part(role), size) for role, size in self.answer.peak.roles.items() if size]
        return Bars.of_whole("alive at the peak", rows) if rows else None

    def picture(self) -> Chart:
        return Chart(self._timeline)

    def versions(self) -> tuple[Phrase, ...]:
        return versions((self.answer.trace,), (self.answer.card,))

    def figures(self, unit: str) -> dict[str, Any]:
        run = self.answer
        peak = plain(run.peak)
        peak.pop("storages")
        after, growth = run.went_on, run.growth
        return {
            "schema": SCHEMA,
            "program": run.program,
            "gpu": run.card.name,
            "gpu_bytes": run.card.bytes,
            "stack": run.trace.stack or None,
            **values_of(run, "capacity", "steps", "stopped", "failure", "failed_at"),
            "needs_gpu": run.needs_gpu and run.needs_gpu._asdict(),
            "peak": {
                **peak,
                "device": run.peak.device._asdict(),
                "roles": dict(run.peak.roles),
                "streams": [entry._asdict() for entry in run.peak.streams],
                "lag": run.peak.lag and run.peak.lag._asdict(),
            },
            "tensors": [tensor._asdict() for tensor in run.tensors],
            "refused": [refused._asdict() for refused in run.refused],
            "went_on": after and {"steps": after.steps, "device": after.device and after.device._asdict()},
            "modules": [share._asdict() for share in peak_by_module(run.trace)],
            "growth": growth and {**growth._asdict(), "holder": growth.holder and growth.holder._asdict()},
            "kept_gradients": run.kept_gradients and run.kept_gradients._asdict(),
            **values_of(run, "waits", "unwritten"),
            "host": run.trace.host._asdict(),
            "children": [child._asdict() for child in run.children],
            "assumed": [assumed._asdict() for assumed in run.assumed],
            "findings": findings_data(run.findings, unit),
            "notes": run.trace.notes,
        }


def module_table(run: ProgramRun) -> Table:
    """One row for each module, or group of modules. The rows add up to the peak."""
    shares = peak_by_module(run.trace)
    fields = MODULE_FIELDS.plus(*role_fields([share.roles for share in shares]))
    return Table.of("modules", "Modules", fields, shares, caption="Alive at the peak of the run, by module")


def tensor_table(run: ProgramRun) -> Table:
    """One row for each of the largest storages alive at the peak."""
    fields = TENSOR_FIELDS.only("bytes", "role", "spec", "line", "layer", "op", "phase")
    return Table.of("tensors", "Tensors", fields, run.tensors, caption="Largest at the peak")


def child_table(run: ProgramRun) -> Table:
    """One row for each process that the program started, in the order in which they ended."""
    return Table.of("processes", "Processes", CHILD_FIELDS, run.children, caption="Processes that the script started")


def host_table(run: ProgramRun) -> Table:
    """One row for each kind of host memory."""
    return Table.of("host", "Host memory", HOST_FIELDS, run.trace.host.rows, caption="Memory of the host")


def _assumed(assumed: Assumed) -> str:
    lines = assumed.lines
    shown = f"{', '.join(lines[:_LINES])}{f' and {len(lines) - _LINES} more' if len(lines) > _LINES else ''}"
    return f"{assumed.text} ({shown})" if lines else assumed.text


class RanksDocument(Document[RankRuns]):
    """Ranks beside one another."""

    only_brief = False

    @cached_property
    def _worst(self) -> ProgramDocument:
        return ProgramDocument(self.answer.worst.run)

    def sections(self) -> tuple[Section, ...]:
        runs = self.answer
        codes = {finding.code for finding in self.verdict() if not finding.brief}
        rest = (finding for finding in self.findings if finding.code not in codes)
        own = (finding for finding in self._worst.findings if finding.code not in _TOLD_OF_ALL)
        remarks = (*rest, *own)
        ranks = f"{runs.size} {runs.noun}{'' if runs.size == 1 else 's'}"
        machines = f" on {runs.nodes} nodes" if runs.nodes > 1 else ""
        roles = role_fields([group.run.peak.roles for group in runs.groups], of="run.peak.roles")
        below = Remark(runs.named(runs.worst), "shown below", f"no {runs.noun} needs more")
        title = f"{runs.noun[0].upper()}{runs.noun[1:]}s"
        return (
            Title(runs.program, ((f"{ranks}{machines}",), (f"each on {runs.groups[0].run.card.name}",))),
            *self.opening(),
            Table.of(
                "ranks",
                title,
                GROUP_FIELDS.titled(ranks=f"{runs.noun}s").plus(*roles),
                runs.groups,
                caption=f"{title} beside one another, each at its own peak",
                remarks=(below,) if len(runs.groups) > 1 else (),
            ),
            *((Findings("Why", remarks),) if remarks else ()),
            *self._worst.inside(),
        )

    def scenes(self) -> tuple[ScenarioView, ...]:
        return self._worst.scenes()

    def bars(self) -> Bars | None:
        groups = [group for group in self.answer.groups if group.run.peak.roles]
        parts = map(role_part, in_order(role for group in groups for role in group.run.peak.roles))
        rows = ((Label(spans(group.ranks)), dict(group.run.peak.roles)) for group in groups)
        return Bars.of(f"alive at the peak, by {self.answer.noun}", parts, rows) if groups else None

    def picture(self) -> Chart:
        return self._worst.picture()

    def figures(self, unit: str) -> dict[str, Any]:
        runs = self.answer
        return {
            "schema": RANKS_SCHEMA,
            **values_of(runs, "program", "size", "nodes"),
            "groups": [
                values_of(group, "ran", "between") | {"run": ProgramDocument(group.run).figures(unit)}
                for group in runs.groups
            ],
            "findings": findings_data(runs.findings, unit),
        }
