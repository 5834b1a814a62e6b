"""`Fit`: the largest sizes that fit, what binds them, and what would make more fit, as a value to read and tabulate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memsize.answers.answer import Answer
from memsize.findings.finding import Finding
from memsize.fitting.budget import Budget
from memsize.fitting.rows import FitRow, Remedied
from memsize.record import InputTensor, Trace

if TYPE_CHECKING:
    from pandas import DataFrame

    from memsize.sections.parts import Section


@dataclass(frozen=True, slots=True, repr=False)
class Fit(Answer):
    """What fits: one row per scenario and GPU, findings about them, remedies, and the traces behind it all.

    `vary` names what was searched for, `asked` the size that was asked about (None: the largest), `optimizer` the
    training's, if there is one.
    """

    model: str
    inputs: tuple[InputTensor, ...]
    vary: str
    budgets: tuple[Budget, ...]
    fit_rows: tuple[FitRow, ...]
    asked: int | None = None
    optimizer: str = ""
    findings: tuple[Finding, ...] = ()
    remedied: Remedied | None = None
    notes: tuple[str, ...] = ()
    traces: Mapping[tuple[str, int], Trace] = field(default_factory=dict)
    runs: int = 0

    @property
    def rows(self) -> DataFrame:
        """One row per scenario and GPU; sizes are counts, everything else is bytes."""
        from pandas import DataFrame

        from memsize.sections.fit import records

        whole = ("size", "budget", "peak", "headroom", "next_size", "next_peak", "per_step", "fixed", "runs")
        return DataFrame(list(records(self))).astype(dict.fromkeys(whole, "Int64"))

    @property
    def remedies(self) -> DataFrame:
        """One row per remedy that was tried; empty where none was."""
        from pandas import DataFrame

        columns = ("name", "title", "cost", "outcome", "peak", "saved", "reason")
        rows = self.remedied.rows if self.remedied else ()
        frame = DataFrame([[getattr(row, name) for name in columns] for row in rows], columns=list(columns))
        return frame.astype({"peak": "Int64", "saved": "Int64"})

    def _sections(self) -> Sequence[Section]:
        from memsize.sections.fit import sections

        return sections(self)

    def _drawn(self, form: str) -> str:
        from memsize.render.fit import render

        return render(self, form)
