"""A timeline as a document: its title, its chart, and a row for each phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from memsize.documents import Document
from memsize.documents.sections import Chart, Phrase, Section, Strip, Table, Title
from memsize.documents.shared import collective_tables, listed, stream_tables, versions
from memsize.records.fields import role_fields
from memsize.records.finding import Finding, Moment
from memsize.records.roles import noun
from memsize.records.timeline import LENGTH_FIELDS, PHASE_FIELDS, LengthRow, PhaseSummary, Timeline, courses, to_data
from memsize.units import Bytes


class TimelineDocument(Document[Timeline]):
    """A timeline. Its data are columns of numbers, one for each event."""

    indent = None

    def sections(self) -> tuple[Section, ...]:
        timeline = self.answer
        if not len(timeline):
            return (timeline_title(timeline),)
        return (
            timeline_title(timeline),
            *self.opening(),
            Chart(timeline),
            course_table(courses(timeline)),
            alive_table(courses(timeline)),
            *_length_tables(timeline),
            *collective_tables(timeline.collectives),
            *stream_tables(timeline.streams),
            *listed("Assumed", timeline.assumptions),
            *listed("Notes", timeline.notes),
        )

    def verdict(self) -> tuple[Finding, ...]:
        """The peak in a sentence, with the roles that hold most of it; empty for a run without events."""
        timeline = self.answer
        if not len(timeline):
            return ()
        peak = timeline.peak
        largest = sorted(peak.roles, key=lambda role: -peak.roles[role])[:3]
        shares = ", ".join(f"{{r{position}}} of {noun(role)}" for position, role in enumerate(largest))
        values: dict[str, object] = {f"r{position}": Bytes(peak.roles[role]) for position, role in enumerate(largest)}
        values |= {"peak": Bytes(peak.bytes), "phase": str(timeline.phase_at(peak.event)), "at": peak.layer or peak.op}
        at = " at {at}" if values["at"] else ""
        template = f"The peak is {{peak}}, in {{phase}}{at}: {shares}."
        moment = Moment(timeline.scenario, peak.event)
        return (Finding("peak", template, values, bytes=peak.bytes, moment=moment), *_of_lengths(timeline.lengths))

    def versions(self) -> tuple[Phrase, ...]:
        return versions((self.answer,), [self.answer.card] if self.answer.card else ())

    def main_table(self) -> str:
        """None: the chart is the answer."""
        return ""

    def picture(self) -> Chart:
        return Chart(self.answer)

    def figures(self, unit: str) -> dict[str, Any]:
        return to_data(self.answer)


def timeline_title(timeline: Timeline) -> Title:
    """The model, how it was run, and its peak in the allocator's terms."""
    peak = timeline.peak
    phrases: list[Phrase] = [(str(timeline.world),)] if timeline.world.size > 1 else []
    phrases += [] if timeline.scenario == "as-given" else [("as", timeline.scenario)]
    phrases += [("on", timeline.card.name)] if timeline.card else []
    if len(timeline):
        card = timeline.card.bytes if timeline.card else 0
        phrases.append((Strip.of_peak(peak.bytes, max(timeline.allocated), max(timeline.reserved), card=card),))
    return Title(timeline.model, tuple(phrases))


def _of_lengths(rows: Sequence[LengthRow]) -> Iterator[Finding]:
    """Yield how much is reserved for texts of varying lengths, and the setting that needs least."""
    if not rows:
        return
    usual, fitting = rows[0], [row for row in rows if row.worst is not None]
    template = "Texts vary in length: in a random order, their batches "
    template += "run out of memory" if usual.expected is None else "reserve {expected}"
    template += (
        "; in the worst order, they run out of memory" if usual.worst is None else "; in the worst order, {worst}"
    )
    least = min(fitting, key=lambda row: row.worst or 0, default=usual)
    template += ". With {setting}, they reserve {least} at most." if least is not usual else "."
    sizes = {"expected": usual.expected, "worst": usual.worst, "least": least.worst}
    values = {name: Bytes(size) for name, size in sizes.items() if size is not None}
    yield Finding("lengths", template, {**values, "setting": least.setting}, bytes=usual.worst)


def _length_tables(timeline: Timeline) -> tuple[Table, ...]:
    caption = "Reserved over 48 steps whose texts vary in length"
    table = Table.of("lengths", "Varying lengths", LENGTH_FIELDS, timeline.lengths, caption=caption)
    return (table,) if timeline.lengths else ()


def course_table(summaries: Sequence[PhaseSummary]) -> Table:
    """One row per phase: the live bytes at its start, and when and where they are highest."""
    table = Table.of("phases", "Phases", PHASE_FIELDS, summaries, caption="Live bytes, phase by phase")
    return table.without_empty("steps")


def alive_table(summaries: Sequence[PhaseSummary]) -> Table:
    """One row per phase: the live bytes by role at its highest moment. Roles add up to the live bytes there."""
    roles = role_fields([summary.summit.roles for summary in summaries], of="summit.roles")
    fields = PHASE_FIELDS.only("name", "steps").plus(*roles)
    table = Table.of("alive", "Alive", fields, summaries, caption="Alive at the highest moment of each phase")
    return table.without_empty("steps")
