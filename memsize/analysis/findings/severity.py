"""How serious each finding of a report is to a check, and those of the check itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from memsize.analysis.findings.report import RULES
from memsize.records.check import Severity

OWN: Final[Mapping[str, Severity]] = {
    "over-limit": "error",
    "does-not-fit": "error",
    "grew": "error",
    "shrank": "note",
}
"""What a check itself finds."""

_SERIOUS: Final[Mapping[str, Severity]] = {
    "out-of-memory": "error",
    "wrapper-misreports": "warning",
    "data-parallel-replicas": "warning",
    "low-bits-in-wide-containers": "warning",
    "unregistered-tensors": "warning",
    "pruned-parameters-grow": "warning",
    "no-gradient-flows": "warning",
    "unused-parameters": "warning",
}

SEVERITY: Final[Mapping[str, Severity]] = {**OWN, **{code: _SERIOUS.get(code, "note") for code in RULES.codes}}
"""The severity of every code that a check may name. A report's notes explain and are no problem: a check that is not
asked for them leaves them out."""
