"""Problems in the Static Analysis Results Interchange Format, version 2.1.0, which code scanning reads."""

from __future__ import annotations

import json
from typing import Any, Final
from urllib.parse import quote

from memsize.documents import Case, Document
from memsize.render.screen import WHOLE, Screen
from memsize.version import VERSION

_SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def draw(document: Document[Any], unit: str, screen: Screen = WHOLE) -> str:
    """One run with a result for each case of `document` that something is wrong with."""
    wrong = [case for case in document.cases(unit) if case.severity]
    codes = list(dict.fromkeys(case.code for case in wrong))
    driver = {"name": "memsize", "version": VERSION, "rules": [{"id": code} for code in codes]}
    results = [_result(case, codes.index(case.code)) for case in wrong]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False) + "\n"


def _result(case: Case, rule: int) -> dict[str, Any]:
    location = {
        "artifactLocation": {"uri": quote(case.file.replace("\\", "/")), "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": case.line},
    }
    return {
        "ruleId": case.code,
        "ruleIndex": rule,
        "level": case.severity,
        "message": {"text": f"{case.group}: {case.text}"},
        "locations": [{"physicalLocation": location}],
        "partialFingerprints": {"memsize/v1": f"{case.group}:{case.code}:{case.name}"},
    }
