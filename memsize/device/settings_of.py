"""The settings of the caching allocator that an answer was made with."""

from __future__ import annotations

import json

from memsize.device.allocator_config import AllocatorConfig
from memsize.records.codec import coder
from memsize.records.generation import GenerationReport
from memsize.records.program import ProgramRun
from memsize.records.report import Report


def config_of(answer: Report | ProgramRun | GenerationReport) -> AllocatorConfig:
    """The settings of the caching allocator that `answer` was made with."""
    config: AllocatorConfig = coder(AllocatorConfig).read(json.loads(answer.allocator or "{}"))
    return config
