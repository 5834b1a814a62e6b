"""Several ranks of a program as a document: whether all fit, ranks beside one another, and the worst from inside."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

from memsize.documents import MOST_SENTENCES, Document, findings_data
from memsize.documents.program import ProgramDocument
from memsize.documents.sections import (
    Bars,
    Chart,
    Findings,
    Remark,
    ScenarioView,
    Section,
    Table,
    Title,
    role_part,
)
from memsize.records.cells import Label
from memsize.records.fields import role_fields
from memsize.records.finding import Finding
from memsize.records.ranks import GROUP_FIELDS, RankGroup, RankRuns, spans
from memsize.records.roles import in_order

SCHEMA: Final = "memsize.ranks/1"
_TOLD_OF_ALL: Final = ("run-out-of-memory", "run-fits")
"""Codes of findings that are left out for a single rank, since the findings about all ranks cover them."""


class RanksDocument(Document[RankRuns]):
    """Ranks beside one another."""

    @cached_property
    def _worst(self) -> ProgramDocument:
        return ProgramDocument(self.answer.worst.run)

    def sections(self) -> tuple[Section, ...]:
        """The verdict and the ranks first, then the rank that needs most memory, as in a run of that rank alone."""
        runs = self.answer
        return (ranks_title(runs), *self.opening(), rank_table(runs), *self._remarks(), *self._worst.inside())

    def verdict(self) -> tuple[Finding, ...]:
        """The findings, most important first, at most `MOST_SENTENCES`."""
        return self.answer.findings[:MOST_SENTENCES]

    def _remarks(self) -> tuple[Findings, ...]:
        """Findings that the verdict does not show in full, then findings about the rank that needs most memory."""
        codes = {finding.code for finding in self.verdict() if not finding.brief}
        rest = (finding for finding in self.findings if finding.code not in codes)
        own = (finding for finding in self._worst.findings if finding.code not in _TOLD_OF_ALL)
        remarks = (*rest, *own)
        return (Findings("Why", remarks),) if remarks else ()

    def scenes(self) -> tuple[ScenarioView, ...]:
        """The run of the rank that needs most over time."""
        return self._worst.scenes()

    def bars(self) -> Bars | None:
        """The bytes alive at the peak of each kind of rank, by role; `None` if no rank has any."""
        groups = [group for group in self.answer.groups if group.run.peak.roles]
        parts = map(role_part, in_order(role for group in groups for role in group.run.peak.roles))
        rows = ((Label(spans(group.ranks)), dict(group.run.peak.roles)) for group in groups)
        return Bars.of(f"alive at the peak, by {self.answer.noun}", parts, rows) if groups else None

    def picture(self) -> Chart:
        """The run of the rank that needs most over time."""
        return self._worst.picture()

    def figures(self, unit: str) -> dict[str, Any]:
        """Each kind of rank with the figures of its run."""
        runs = self.answer
        return {
            "schema": SCHEMA,
            "program": runs.program,
            "size": runs.size,
            "nodes": runs.nodes,
            "groups": [_group_data(group, unit) for group in runs.groups],
            "findings": findings_data(runs.findings, unit),
        }


def _group_data(group: RankGroup, unit: str) -> dict[str, Any]:
    run = ProgramDocument(group.run).figures(unit)
    return {"ran": group.ran, "between": group.between, "run": run}


def ranks_title(runs: RankRuns) -> Title:
    """The program's command line, how many ranks it has, and where they run."""
    ranks = f"{runs.size} {runs.noun}{'' if runs.size == 1 else 's'}"
    machines = f" on {runs.nodes} nodes" if runs.nodes > 1 else ""
    return Title(runs.program, ((f"{ranks}{machines}",), (f"each on {runs.groups[0].run.card.name}",)))


def rank_table(runs: RankRuns) -> Table:
    """One row for each kind of rank."""
    roles = role_fields([group.run.peak.roles for group in runs.groups], of="run.peak.roles")
    below = Remark(runs.named(runs.worst), "shown below", f"no {runs.noun} needs more")
    return Table.of(
        "ranks",
        _title(f"{runs.noun}s"),
        GROUP_FIELDS.titled(ranks=f"{runs.noun}s").plus(*roles),
        runs.groups,
        caption=f"{_title(runs.noun)}s beside one another, each at its own peak",
        remarks=(below,) if len(runs.groups) > 1 else (),
    )


def _title(noun: str) -> str:
    return noun[0].upper() + noun[1:]
