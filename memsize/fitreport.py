"""`Fit`: the largest sizes that fit, what binds them, and what would make more fit, as a value to read and tabulate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from memsize.document import Why
from memsize.findings.finding import Finding
from memsize.fitting.budget import Budget
from memsize.fitting.rows import FitRow, Remedied
from memsize.record import InputTensor, Trace

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, slots=True, repr=False)
class Fit:
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

    def why(self) -> Why:
        """The findings, most important first."""
        return Why(self.findings)

    def to_json(self, path: str | Path | None = None) -> str:
        """The fit as JSON text, also written to `path` when given."""
        text = self._drawn("json")
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def __str__(self) -> str:
        return self._drawn("text")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from memsize.render.html import embedded
        from memsize.sections.fit import sections

        return embedded(sections(self))

    def _drawn(self, form: str) -> str:
        from memsize.render.fit import render

        return render(self, form)
