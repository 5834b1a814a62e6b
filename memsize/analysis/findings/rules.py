"""The rules from numbers to causes, most important first. Each looks at the evidence and says what it found, or
nothing.

A rule's codes are stable: scripts and tests name them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memsize.analysis.findings import parallel, peaks, precision, structure
from memsize.analysis.findings.evidence import Evidence
from memsize.records.finding import Finding

Rule = Callable[[Evidence], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    precision.mixed_dtypes,
    precision.wrappers_that_misreport,
    precision.summary_assumes_four_bytes,
    precision.amp_keeps_fp32_parameters,
    precision.what_binds_the_batch,
    peaks.training_peak,
    parallel.data_parallel,
    parallel.distributed,
    precision.quantization_leaves_layers,
    precision.low_bits_in_wide_containers,
    structure.unregistered,
    structure.pruned,
    structure.without_gradient,
    structure.tied,
    structure.unused,
    precision.what_halving_cannot_halve,
    precision.norms_kept_in_fp32,
    structure.buffers,
    structure.torchinfo_counts_differently,
)


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """Everything that the rules find, in their order."""
    return tuple(finding for rule in RULES for finding in rule(evidence))
