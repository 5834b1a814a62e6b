"""Checks for continuous integration: GitHub's annotations, and JUnit XML for test reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, Final
from xml.etree import ElementTree as Xml

from memsize.documents import Case, Document
from memsize.printable import printable
from memsize.render import WHOLE, Screen

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
