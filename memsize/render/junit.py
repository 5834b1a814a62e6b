"""Checks as JUnit XML, which continuous integration shows as tests: one suite for each group of cases."""

from __future__ import annotations

from itertools import groupby
from typing import Any
from xml.etree import ElementTree as Xml

from memsize.documents import Case, Document
from memsize.printable import printable
from memsize.render.screen import WHOLE, Screen


def draw(document: Document[Any], unit: str, screen: Screen = WHOLE) -> str:
    """Every case of `document`: an error fails it; a warning or a note is told in its output."""
    cases = document.cases(unit)
    suites = Xml.Element("testsuites", {"name": "memsize"} | _counts(cases))
    for group, some in groupby(cases, key=lambda case: case.group):
        members = tuple(some)
        suite = Xml.SubElement(suites, "testsuite", {"name": printable(group)} | _counts(members))
        for case in members:
            _add(suite, case)
    Xml.indent(suites)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{Xml.tostring(suites, encoding="unicode")}\n'


def _counts(cases: tuple[Case, ...]) -> dict[str, str]:
    errors = sum(case.failed_to_run for case in cases)
    failures = sum(case.severity == "error" for case in cases) - errors
    return {"tests": str(len(cases)), "failures": str(failures), "errors": str(errors)}


def _add(suite: Xml.Element, case: Case) -> None:
    attributes = {
        "classname": printable(case.group),
        "name": printable(case.name),
        "file": case.file,
        "line": str(case.line),
    }
    element = Xml.SubElement(suite, "testcase", attributes)
    if case.severity is None:
        return
    text = printable(case.text)
    if case.severity == "error":
        kind = "error" if case.failed_to_run else "failure"
        Xml.SubElement(element, kind, type=case.code, message=text).text = text
    else:
        Xml.SubElement(element, "system-out").text = f"{case.severity} {case.code}: {text}"
