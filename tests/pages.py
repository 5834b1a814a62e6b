"""What tests read a document and a web page with."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from html.parser import HTMLParser
from pathlib import Path

from memsize.documents import document
from memsize.documents.sections import Table
from memsize.records.answer import Renderable
from memsize.render import bars as bars, figures as figures, html as html, plot as plot
from memsize.render.html import LIBRARIES as LIBRARIES, SCRIPTS as SCRIPTS, _bars as _bars, script as script

GOLDEN = Path(__file__).parent / "golden"
MARKS = "[█░▒▓▀▐▞▄▙▜▘▚▟▖▌▛▗▝]"
"""What bars without colours are made of."""


def check_golden(name: str, text: str) -> None:
    """That `text` is the golden file of this name, or, where it is asked for, that it becomes it.

    A page is kept without the style and the scripts that all pages share.
    """
    kept = content(text) if name.endswith(".html") else text
    path = GOLDEN / name
    if os.environ.get("MEMSIZE_GOLDEN") == "write":
        path.write_text(kept, encoding="utf-8")
    assert kept == path.read_text(encoding="utf-8")


def content(page: str) -> str:
    """A page without its style sheets, its scripts and their hash, and the versions that drew it."""
    emptied = re.sub(r"(<(style|script|footer)[^>]*>).*?(</\2>)", r"\1\3", page, flags=re.DOTALL)
    return re.sub(r"sha256-[A-Za-z0-9+/=]+", "sha256-…", emptied)


def table_of(answer: Renderable, name: str, **view: object) -> Table:
    """The table of this name in an answer's document."""
    return next(part for part in document(answer, **view).sections() if isinstance(part, Table) and part.name == name)


class Tags(HTMLParser):
    """Checks that tags nest; keeps their names, the texts of titles, and the scripts that would run."""

    VOID = ("meta", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.titles: list[str] = []
        self.scripts: list[str] = []
        self._type: str | None = None
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self._type = dict(attrs).get("type")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "title":
            self.titles.append(data)
        if self.open and self.open[-1] == "script" and self._type is None:
            self.scripts.append(data)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(page: str, fragment: str) -> None:
    """That a page and the part of one that a notebook shows are whole, and fetch nothing.

    The only script that runs is the one that the page's own policy names; a notebook gets none.
    """
    for text in (page, fragment):
        tags = Tags(text)
        assert not {"link", "img", "iframe", "object", "base"} & set(tags.seen)
        assert "://" not in content(text)
        assert "url(" not in text and "@import" not in text
    assert "script" not in Tags(fragment).seen
    (script,) = Tags(page).scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'" in page
