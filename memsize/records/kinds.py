"""The registry of answers: one entry for each kind, with its record, its document, its command and its function.

Records and documents are import paths, ``"module:Name"`` below `memsize` and `memsize.documents`, resolved when they
are needed: listing the kinds imports none of them, and showing one answer imports no other's code.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any, Final, NamedTuple

RENDERER: Final = "memsize.render"
"""The package that draws every answer, by its import path: print() and notebooks ask a record for its text."""


class AnswerKind(NamedTuple):
    """One kind of answer.

    `name` is the `kind` of its record and the word in saved files. `document` is empty for a kind that no format draws,
    `command` and `function` (of the package) for one that no command or function returns. A kind that is not `saved`
    cannot be written to a file.
    """

    name: str
    record: str
    document: str = ""
    command: str = ""
    function: str = ""
    saved: bool = True

    @property
    def record_type(self) -> Any:
        """The class of its record. It is imported now."""
        return resolve_name(f"memsize.{self.record}")

    @property
    def document_type(self) -> Any:
        """The class of its document. It is imported now."""
        return resolve_name(f"memsize.documents.{self.document}")

    @property
    def reader(self) -> str:
        """The hint how to read a saved run of this kind: by its command, or by `memsize.load` for a comparison."""
        return f"memsize {self.command} shows it" if self.name != "comparison" else "memsize.load reads it"


_ENTRIES: Final = (
    AnswerKind("report", "records.report:Report", "report:ReportDocument", "report", "report"),
    AnswerKind("step", "analysis.step:StepTrace", "", "timeline", "trace"),
    AnswerKind(
        "timeline", "records.timeline:Timeline", "timeline:TimelineDocument", "timeline", "timeline", saved=False
    ),
    AnswerKind("program", "records.program:ProgramRun", "program:ProgramDocument", "run", "run"),
    AnswerKind("ranks", "records.ranks:RankRuns", "program:RanksDocument", "run", "run"),
    AnswerKind("fit", "records.fit:Fit", "fit:FitDocument", "fit", "fit"),
    AnswerKind(
        "generation", "records.generation:GenerationReport", "generation:GenerationDocument", "generate", "generate"
    ),
    AnswerKind("serving", "records.serving:ServingReport", "serving:ServingDocument", "serve", "serve"),
    AnswerKind("sweep", "records.sweep:Sweep", "sweep:SweepDocument", "sweep", "sweep"),
    AnswerKind("layout", "records.layout:LayoutReport", "layout:LayoutDocument", "layout", "layout"),
    AnswerKind(
        "checkpoint",
        "checkpoints.checkpoint_report:CheckpointReport",
        "checkpoint:CheckpointDocument",
        "checkpoint",
        "checkpoint",
    ),
    AnswerKind(
        "verification", "records.verification:Verification", "verification:VerificationDocument", "verify", "verify"
    ),
    AnswerKind("comparison", "records.comparison:Comparison", "comparison:ComparisonDocument", "diff", "diff"),
    AnswerKind("check", "records.check:Check", "check:CheckDocument", "check", "check"),
    AnswerKind(
        "explanation", "records.explanation:Explanation", "explanation:ExplanationDocument", "explain", "explain"
    ),
    AnswerKind("error", "records.error:OutOfMemoryReport", "error:ErrorDocument", "explain", "explain"),
    AnswerKind("why", "records.answer:FindingList", "comparison:WhyDocument", saved=False),
)

KINDS: Final = {entry.name: entry for entry in _ENTRIES}
"""Every kind of answer by its name."""

SAVED_KINDS: Final = {name: entry for name, entry in KINDS.items() if entry.saved}
"""The kinds that a saved run may hold."""
