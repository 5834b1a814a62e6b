"""What every command answers with: a value that prints, shows itself in a notebook, becomes JSON and says why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from memsize.records.finding import Finding

if TYPE_CHECKING:
    from memsize.documents.sections import Section


class Why(tuple[Finding, ...]):
    """The findings of an answer, most important first; it prints as numbered sentences, in a notebook as a list."""

    def __repr__(self) -> str:
        return "\n".join(f"{n}. {finding.text()}" for n, finding in enumerate(self, 1)) or "nothing to explain"

    def _repr_html_(self) -> str:
        from memsize.documents.sections import Findings, Notes
        from memsize.render.html import embedded

        return embedded([Findings("Why", self) if self else Notes("Why", (repr(self),))])


class Answer:
    """The base of the answers. Each has findings, sections for its readers, and a way to be drawn in a format."""

    __slots__ = ()

    if TYPE_CHECKING:
        # No attribute of the class: a dataclass would take it for the default of its own field.
        @property
        def findings(self) -> tuple[Finding, ...]:
            """What was found out, most important first."""

    def why(self) -> Why:
        """The findings, most important first."""
        return Why(self.findings)

    def to_json(self, path: str | Path | None = None) -> str:
        """The answer as JSON text, also written to `path` when given."""
        text = self._drawn("json")
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Save the answer to `path` (``run.memsize``), with everything that it is drawn from; `memsize.load` reads it.

        A file that exists is replaced with `overwrite`, if it is a saved run. Raises `OutputError` where it can't be.
        """
        from memsize.records.run_file import write_run

        write_run(path, self, overwrite=overwrite)

    def __str__(self) -> str:
        return self._drawn("text").rstrip("\n")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from memsize.render.html import embedded

        return embedded(self._sections())

    def _sections(self) -> Sequence[Section]:
        """What a reader is shown."""
        raise NotImplementedError

    def _drawn(self, form: str) -> str:
        """The answer in one of the formats of `memsize.render.FORMATS`."""
        raise NotImplementedError
