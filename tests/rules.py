"""Rules that make findings, which tests give evidence of their own."""

from __future__ import annotations

from memsize.analysis.explain import error_text as error_text, explanation as explanation
from memsize.analysis.findings import (
    generation as generation,
    layout as layout,
    precision as precision,
    program as program,
    report_rules as report_rules,
    sweep as sweep,
    training as training,
)
from memsize.analysis.findings.evidence import (
    Crossover as Crossover,
    Evidence as Evidence,
    find_crossover as find_crossover,
)
from memsize.analysis.findings.ranks import RANK_RULES as RANK_RULES
from memsize.analysis.findings.unfinished_runs import lagging as lagging, out_of_memory as out_of_memory

LAYOUT_RULES, PROGRAM_RULES, SWEEP_RULES = layout.RULES, program.RULES, sweep.RULES
