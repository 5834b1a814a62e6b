"""The rules of a report, most important first."""

from __future__ import annotations

from memsize.analysis.findings import omissions, precision, structure, training

RULES = precision.RULES + training.RULES + structure.RULES + omissions.RULES
