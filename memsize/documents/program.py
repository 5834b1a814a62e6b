"""A program's run as a document: the verdict, its phases, and the largest tensors at the peak with their lines.

Several ranks of one are whether all fit, the ranks beside one another, and the worst from inside.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

from memsize.analysis.timeline import timeline
from memsize.device.allocator_config import config_of
from memsize.documents import MOST_SENTENCES, Document, findings_data, plain, values_of
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
)
from memsize.documents.shared import collective_tables, listed, role_part, stream_tables, versions
from memsize.documents.timeline import alive_table, course_table
from memsize.records.fields import Label, role_fields
from memsize.records.finding import Finding
from memsize.records.program import (
    CHILD_FIELDS,
    HOST_FIELDS,
    MODULE_FIELDS,
    TENSOR_FIELDS,
    Assumed,
    ProgramRun,
    peak_by_module,
)
from memsize.records.ranks import GROUP_FIELDS, RankRuns, spans
from memsize.records.roles import in_order
from memsize.records.timeline import Timeline, step_courses

SCHEMA: Final = "memsize.program/1"
RANKS_SCHEMA: Final = "memsize.ranks/1"
_LINES: Final = 5
"""The most lines shown for one assumption."""
_MANY_STEPS: Final = 10_000
_GROWS_FROM: Final = 0.01
"""The part of the GPU that growth takes in as many steps, from which it is in the verdict; less is a reason only."""
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
        memory = Strip.of_peak(peak.requested, peak.allocated, peak.reserved, peak.device, run.card.bytes)
        strip = ((memory,),) if peak.requested else ()
        title = Title(run.program, (*ranks, (steps,), (f"on {run.card.name}{stack}",), *strip))
        return (title, *self.opening(), *self.reasons(), *self.inside())

    def verdict(self) -> tuple[Finding, ...]:
        least = _GROWS_FROM * self.answer.card.bytes / _MANY_STEPS
        grown = [finding for finding in self.findings if finding.code != "run-grows" or (finding.bytes or 0) >= least]
        return tuple(grown)[:MOST_SENTENCES]

    def inside(self) -> tuple[Section, ...]:
        """The sections behind the verdict: phases, modules, collectives, streams, tensors, processes and notes."""
        run = self.answer
        summaries = step_courses(self._timeline)
        shares = peak_by_module(run.trace)
        fields = MODULE_FIELDS.plus(*role_fields([share.roles for share in shares]))
        modules = Table.of("modules", "Modules", fields, shares, caption="Alive at the peak of the run, by module")
        fields_of_tensors = TENSOR_FIELDS.only("bytes", "role", "spec", "line", "layer", "op", "phase")
        tables = (
            Table.of("tensors", "Tensors", fields_of_tensors, run.tensors, caption="Largest at the peak"),
            Table.of("processes", "Processes", CHILD_FIELDS, run.children, caption="Processes that the script started"),
            Table.of("host", "Host memory", HOST_FIELDS, run.trace.host.rows, caption="Memory of the host"),
        )
        return (
            *((course_table(summaries), alive_table(summaries), modules) if summaries else ()),
            *collective_tables(run.peak.collectives),
            *stream_tables(run.peak.streams),
            *(table for table in tables if table.rows),
            *listed("Assumed", tuple(map(_assumed, run.assumed))),
            *listed("Not written", run.unwritten),
            *listed("Notes", run.trace.notes),
        )

    def scenes(self) -> tuple[ScenarioView, ...]:
        run = self.answer
        if not run.trace.events:
            return ()
        seen = self._timeline
        return (ScenarioView("run", run.program, lambda: (Chart(seen), course_table(step_courses(seen)))),)

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
        del peak["storages"]
        return {
            "schema": SCHEMA,
            "program": run.program,
            "gpu": run.card.name,
            "gpu_bytes": run.card.bytes,
            "stack": run.trace.stack or None,
            **values_of(run, "capacity", "steps", "stopped", "failure", "failed_at", "needs_gpu"),
            "peak": peak,
            **values_of(run, "tensors", "refused", "went_on", "whole"),
            "modules": plain(peak_by_module(run.trace)),
            **values_of(
                run, "growth", "kept_gradients", "loaded_checkpoint", "unused_checkpointing", "waits", "unwritten"
            ),
            "host": plain(run.trace.host),
            "after": plain(run.after),
            **values_of(run, "children", "assumed"),
            "findings": findings_data(run.findings, unit),
            "notes": run.trace.notes,
        }


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
                caption=f"{title} side by side, each at its own peak",
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
