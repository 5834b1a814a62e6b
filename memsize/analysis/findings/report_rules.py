"""The rules of a report, most important first, and how serious each of their findings is to a check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from memsize.analysis.findings import precision, structure, training
from memsize.records.check import Severity

RULES = precision.RULES + training.RULES + structure.RULES

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
