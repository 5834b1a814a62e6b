"""Searches for the largest size and for remedies, as tests look into them."""

from __future__ import annotations

from memsize import Finding
from memsize.analysis.findings import fit as fit
from memsize.analysis.findings.fit import FitEvidence
from memsize.analysis.fit.footprint import (
    Footprint as Footprint,
    Forecast as Forecast,
    limit_of as limit_of,
    replay_with_capacity as replay_with_capacity,
)
from memsize.analysis.fit.optimized_models import (
    Adam8bit as Adam8bit,
    Share as Share,
    StepInBackward as StepInBackward,
    keep_the_last_logits as keep_the_last_logits,
    repeated_blocks as repeated_blocks,
)
from memsize.analysis.fit.remedy_trials import SEGMENT as SEGMENT, remedies_of as remedies_of
from memsize.analysis.fit.results import likely_size as likely_size
from memsize.analysis.fit.run_cache import (
    GenerationRunCache as GenerationRunCache,
    RunCache as RunCache,
    RunVariant as RunVariant,
)
from memsize.analysis.fit.search import LIMIT as LIMIT, MOST_RUNS as MOST_RUNS, Search as Search
from memsize.analysis.fit.step_remedies import (
    RANK as RANK,
    STEP_REMEDIES as STEP_REMEDIES,
    accumulation as accumulation,
    fewer_checkpoints as fewer_checkpoints,
    least_recomputation as least_recomputation,
    memory_budgets as memory_budgets,
    more_gpus as more_gpus,
)
from memsize.analysis.remedies import (
    Need as Need,
    NotApplicable as NotApplicable,
    RemedySearch as RemedySearch,
    try_remedies as try_remedies,
)
from memsize.spec import requests as requests
from memsize.spec.requests import FitRequest as FitRequest, ReportRequest as ReportRequest
from memsize.spec.vary import (
    Dimension as Dimension,
    Lengths as Lengths,
    VariedScript as VariedScript,
    Vary as Vary,
    parse_lengths as parse_lengths,
    parse_vary as parse_vary,
)


def findings_of(evidence: FitEvidence, code: str) -> list[Finding]:
    """The findings of a code among those that all rules about a fit make."""
    return [finding for finding in fit.RULES.findings(evidence) if finding.code == code]
