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


def _kind(name: str, record: str, command: str = "", saved: bool = True) -> AnswerKind:
    """A kind whose record and document are in the modules of its name; the function is called as the command is."""
    document, command = f"{name}:{name.title()}Document", command or name
    return AnswerKind(name, f"records.{name}:{record}", document, command, command, saved)


_ENTRIES: Final = (
    _kind("report", "Report"),
    AnswerKind("step", "analysis.step:StepTrace", "", "timeline", "trace"),
    _kind("timeline", "Timeline", saved=False),
    _kind("program", "ProgramRun", "run"),
    AnswerKind("ranks", "records.ranks:RankRuns", "program:RanksDocument", "run", "run"),
    _kind("fit", "Fit"),
    _kind("generation", "GenerationReport", "generate"),
    _kind("serving", "ServingReport", "serve"),
    _kind("sweep", "Sweep"),
    _kind("layout", "LayoutReport"),
    _kind("checkpoint", "CheckpointReport")._replace(record="checkpoints.checkpoint_report:CheckpointReport"),
    _kind("verification", "Verification", "verify"),
    _kind("comparison", "Comparison", "diff"),
    _kind("check", "Check"),
    _kind("explanation", "Explanation", "explain"),
    _kind("error", "OutOfMemoryReport", "explain"),
    AnswerKind("why", "records.answer:FindingList", "comparison:WhyDocument", saved=False),
)

KINDS: Final = {entry.name: entry for entry in _ENTRIES}
"""Every kind of answer by its name."""

SAVED_KINDS: Final = {name: entry for name, entry in KINDS.items() if entry.saved}
"""The kinds that a saved run may hold."""
