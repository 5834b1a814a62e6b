"""A timeline as a document: what it is of, its chart, and how each phase runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memsize.documents import Document
from memsize.documents.collectives import collective_tables
from memsize.documents.sections import Chart, Phrase, Section, Table, Title, listed
from memsize.documents.streams import stream_tables
from memsize.documents.versions import versions
from memsize.records.fields import role_fields
from memsize.records.finding import Finding, Moment
from memsize.records.roles import noun
from memsize.records.timeline import PHASE_FIELDS, PhaseSummary, Timeline, courses, to_data
from memsize.units import Bytes


class TimelineDocument(Document[Timeline]):
    """A timeline. Its data are columns of numbers, one for each event."""

    indent = None

    def sections(self) -> tuple[Section, ...]:
        """Everything in reading order; of a run without events there is nothing to show but the title."""
        found = self.answer
        if not len(found):
            return (timeline_title(found),)
        return (
            timeline_title(found),
            *self.opening(),
            Chart(found),
            course_table(courses(found)),
            alive_table(courses(found)),
            *collective_tables(found.collectives),
            *stream_tables(found.streams),
            *listed("Assumed", found.assumptions),
            *listed("Notes", found.notes),
        )

    def verdict(self) -> tuple[Finding, ...]:
        """Where the peak is, and what most of it consists of."""
        return (peak_finding(self.answer),) if len(self.answer) else ()

    def versions(self) -> tuple[Phrase, ...]:
        """The release of PyTorch that ran, and the GPU."""
        return versions((self.answer,), [self.answer.card] if self.answer.card else ())

    def picture(self) -> Chart:
        """The run over time."""
        return Chart(self.answer)

    def figures(self, unit: str) -> dict[str, Any]:
        """The columns, and the peak."""
        return to_data(self.answer)


def timeline_title(found: Timeline) -> Title:
    """The model, how it was run, and its peak in the allocator's terms."""
    peak = found.peak
    phrases: list[tuple[str | Bytes, ...]] = [(str(found.world),)] if found.world.size > 1 else []
    phrases += [] if found.scenario == "as-given" else [("as", found.scenario)]
    phrases += [("on", found.card.name)] if found.card else []
    if len(found):
        phrases += [
            ("at most", Bytes(peak.bytes), f"live, in {found.phase_at(peak.event)}"),
            (Bytes(max(found.allocated)), "allocated"),
            (Bytes(max(found.reserved)), "reserved"),
        ]
    return Title(found.model, tuple(phrases))


def peak_finding(found: Timeline) -> Finding:
    """The peak in a sentence, with the roles that hold most of it."""
    peak = found.peak
    largest = sorted(peak.roles, key=lambda role: -peak.roles[role])[:3]
    shares = ", ".join(f"{{r{place}}} of {noun(role)}" for place, role in enumerate(largest))
    values: dict[str, object] = {f"r{place}": Bytes(peak.roles[role]) for place, role in enumerate(largest)}
    values |= {"peak": Bytes(peak.bytes), "phase": str(found.phase_at(peak.event)), "at": peak.layer or peak.op}
    at = " at {at}" if values["at"] else ""
    template = f"Most is alive in {{phase}}{at}, {{peak}}: {shares}."
    return Finding("peak", template, values, bytes=peak.bytes, moment=Moment(found.scenario, peak.event))


def course_table(summaries: Sequence[PhaseSummary]) -> Table:
    """One row per phase: what it starts with, and when and where it is highest."""
    table = Table.of("phases", "Phases", PHASE_FIELDS, summaries, caption="Live bytes, phase by phase")
    return table.without_empty("steps")


def alive_table(summaries: Sequence[PhaseSummary]) -> Table:
    """One row per phase: what is alive by role at its highest moment. Roles add up to what is live then."""
    roles = role_fields([each.summit.roles for each in summaries], of="summit.roles")
    fields = PHASE_FIELDS.only("name", "steps").plus(*roles)
    table = Table.of("alive", "Alive", fields, summaries, caption="Alive at the highest moment of each phase")
    return table.without_empty("steps")
