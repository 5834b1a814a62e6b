"""Rules from numbers to causes: why memory did, or did not, shrink."""

from __future__ import annotations

from memsize.findings.finding import Finding

__all__ = ["Finding"]
