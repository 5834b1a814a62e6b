"""An answer for other programs: all of its data as JSON, or its first table as comma-separated values; what is alive as
a profile for https://www.speedscope.app; a check as GitHub's annotations, or as JUnit XML for test reports.

JSON and csv have stable names and exact bytes, whatever the unit, and are drawn piece by piece. A profile's samples are
stacks, outermost call first, whose weights are bytes. Source of its fields:
https://github.com/jlfwong/speedscope/blob/main/src/lib/file-format-spec.ts
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice
from typing import Any, Final
from xml.etree import ElementTree as Xml

from memsize.documents import Case, Document
from memsize.documents.sections import Chart
from memsize.errors import OutputError
from memsize.printable import printable
from memsize.records.fields import FlatTable
from memsize.records.roles import noun
from memsize.render import WHOLE, Screen
from memsize.render.cell_text import MODEL
from memsize.version import VERSION

_AT_ONCE: Final = 1000
"""Rows of a table that are drawn together: the encoder makes fifty small texts of one, and keeps all to the end."""
_FORMULA: Final = ("=", "+", "-", "@")
"""What a formula begins with, by OWASP's list; tabs and line ends are written as escapes anyway."""
_NUMBER: Final = re.compile(r"[+-]?[0-9]+([.][0-9]+)?")


def draw_json(document: Document[Any], unit: str, screen: Screen = WHOLE) -> Iterator[str]:
    """Yield the JSON of `document` piece by piece; `unit` is for the sentences of findings, figures are in bytes."""
    data, indent = document.data(unit), document.indent
    if indent is None:
        yield from (_dumps(data), "\n")
        return
    inner = "\n" + " " * indent
    before = "{"
    for name, value in data.items():
        yield f"{before}{inner}{_dumps(name)}: "
        parts = _records(value, indent) if isinstance(value, FlatTable) else (_dumps(value, indent),)
        yield from (part.replace("\n", inner) for part in parts)
        before = ","
    yield "\n}\n"


def _records(table: FlatTable, indent: int) -> Iterator[str]:
    rows = iter(table.rows)
    before, end = "[", "[]"
    while some := [dict(zip(table.columns, row, strict=True)) for row in islice(rows, _AT_ONCE)]:
        # Without the brackets of the list around them.
        yield before + _dumps(some, indent)[1:-2]
        before, end = ",", "\n]"
    yield end


def _dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=False)


def draw_csv(document: Document[Any], unit: str, screen: Screen = WHOLE) -> Iterator[str]:
    """The first of the flat tables of `document`: a header row and no total row; several values in a cell are separated
    by a semicolon.
    """
    table = next(iter(document.tables().values()))
    lines = chain((table.columns,), (map(_value, row) for row in table.rows))
    while some := [*islice(lines, _AT_ONCE)]:
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows(some)
        yield file.getvalue()


def _value(cell: object) -> object:
    """A cell as a spreadsheet shows it: a text that begins like a formula would be run, unless it is a number."""
    text = "; ".join(map(str, cell)) if isinstance(cell, tuple) else cell
    if not isinstance(text, str):
        return text
    text = printable(text)
    return f"'{text}" if text.startswith(_FORMULA) and not _NUMBER.fullmatch(text) else text


_SCHEMA: Final = "https://www.speedscope.app/file-format-schema.json"
_UNKNOWN: Final = "(no line recorded)"


def draw_speedscope(document: Document[Any], unit: str, screen: Screen = WHOLE) -> str:
    """The profile of the picture of `document`; raises `OutputError` where that is not a run over time."""
    chart = document.picture()
    if not isinstance(chart, Chart) or not len(chart.timeline):
        raise OutputError(f"this {document.answer.kind} records no run whose calls speedscope could show")
    stacks = Counter[tuple[str, ...]]()
    for storage, size in _alive(chart):
        stacks[tuple(_calls(chart, storage))] += size
    frames = {name: number for number, name in enumerate(dict.fromkeys(name for stack in stacks for name in stack))}
    profile = {
        "type": "sampled",
        "name": chart.timeline.model,
        "unit": "bytes",
        "startValue": 0,
        "endValue": stacks.total(),
        "samples": [[frames[name] for name in stack] for stack in stacks],
        "weights": list(stacks.values()),
    }
    content = {
        "$schema": _SCHEMA,
        "exporter": f"memsize {VERSION}",
        "name": chart.timeline.model,
        "shared": {"frames": [{"name": name} for name in frames]},
        "profiles": [profile],
    }
    return json.dumps(content, ensure_ascii=False) + "\n"


def _alive(chart: Chart) -> Iterable[tuple[int, int]]:
    """The storages that are alive at the chart's moment, with their bytes."""
    run = chart.timeline
    last = run.peak.event if chart.moment is None else chart.moment
    sizes = Counter[int]()
    for storage, change in zip(run.storage[: last + 1], run.delta, strict=False):
        sizes[storage] += change
    return ((storage, size) for storage, size in sizes.items() if size)


def _calls(chart: Chart, number: int) -> Iterator[str]:
    """The calls that made a storage: those of its stack, or its lines, its module and its op; last its role."""
    run = chart.timeline
    storage = run.storages[number]
    line = run.lines[storage.line] if storage.line >= 0 else ""
    stack = chart.stacks[storage.line] if chart.stacks and storage.line >= 0 else ()
    yield from stack or (line.split(" > ") if line else [_UNKNOWN])
    if storage.layer >= 0:
        yield run.layers[storage.layer] or MODEL
    if storage.op and not stack:
        yield storage.op
    yield noun(storage.role)


_LEVELS: Final = {"error": "error", "warning": "warning", "note": "notice"}


def github(document: Document[Any], unit: str, screen: Screen = WHOLE) -> str:
    """GitHub workflow commands, which annotate the lines of a pull request.

    One line for each kind of problem of a target of `document`; an empty one where there is none.
    """
    lines = []
    for case in _together(document.cases(unit)):
        values = {"file": case.file.replace("\\", "/"), "line": str(case.line), "title": f"memsize: {case.code}"}
        properties = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in values.items())
        lines.append(f"::{_LEVELS[case.severity or 'note']} {properties}::{_escaped(f'{case.group}: {case.text}')}")
    return "\n".join(lines) + "\n"


def _together(cases: Iterable[Case]) -> Iterator[Case]:
    """Join problems of a kind in one target: a layer that is widened breaks the limits of five figures at once."""
    kinds: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        if case.severity:
            kinds.setdefault((case.group, case.file, case.line, case.code, case.severity), []).append(case)
    for first, *others in kinds.values():
        if others:
            texts = "".join(f"\n- {case.text}" for case in (first, *others))
            first = first._replace(
                name=",".join(case.name for case in (first, *others)), text=f"{len(others) + 1} figures{texts}"
            )
        yield first


def _escaped(text: str, more: str = "") -> str:
    """As GitHub's toolkit writes messages and, with `more`, properties."""
    text = "%0A".join(printable(line).replace("%", "%25") for line in text.split("\n"))
    for character in more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def junit(document: Document[Any], unit: str, screen: Screen = WHOLE) -> str:
    """JUnit XML: one suite for each group of cases of `document`.

    An error fails a case; a warning or a note is told in its output.
    """
    cases = document.cases(unit)
    suites = Xml.Element("testsuites", {"name": "memsize"} | _junit_counts(cases))
    for group, some in groupby(cases, key=lambda case: case.group):
        members = tuple(some)
        suite = Xml.SubElement(suites, "testsuite", {"name": printable(group)} | _junit_counts(members))
        for case in members:
            names = {"classname": printable(case.group), "name": printable(case.name)}
            element = Xml.SubElement(suite, "testcase", names | {"file": case.file, "line": str(case.line)})
            text = printable(case.text)
            if case.severity == "error":
                kind = "error" if case.failed_to_run else "failure"
                Xml.SubElement(element, kind, type=case.code, message=text).text = text
            elif case.severity is not None:
                Xml.SubElement(element, "system-out").text = f"{case.severity} {case.code}: {text}"
    Xml.indent(suites)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{Xml.tostring(suites, encoding="unicode")}\n'


def _junit_counts(cases: tuple[Case, ...]) -> dict[str, str]:
    errors = sum(case.failed_to_run for case in cases)
    failures = sum(case.severity == "error" for case in cases) - errors
    return {"tests": str(len(cases)), "failures": str(failures), "errors": str(errors)}
