"""Workloads and the runner, where a test looks at runs that no public function returns."""

from __future__ import annotations

from memsize.analysis.fit.offloaded_parts import offload_layers as offload_layers, offload_models as offload_models
from memsize.analysis.generation import generator as generator
from memsize.analysis.generation.generator import (
    Generated as Generated,
    Generator as Generator,
    Sample as Sample,
    Traced as Traced,
)
from memsize.analysis.generation.step_polynomials import (
    Curve as Curve,
    Polynomials as Polynomials,
    weighted as weighted,
)
from memsize.analysis.generation.steps import Step as Step, Structure as Structure
from memsize.analysis.report import (
    ReportBuilder as ReportBuilder,
    _Parts as _Parts,
    counts_without_running as counts_without_running,
    torchinfo_reading as torchinfo_reading,
)
from memsize.analysis.runner import Runner as Runner
from memsize.analysis.serving.kv_blocks import FULL as FULL, SLIDING as SLIDING, block_layout as block_layout
from memsize.api.opened import assisted as assisted, model_of as model_of, opened as opened, prompts_of as prompts_of
from memsize.loading.hubs.diffusion import _Tokenizer as _Tokenizer
from memsize.ranks.sharding import _chunked as _chunked, each_once as each_once
from memsize.ranks.strategies import blocks_in_line as blocks_in_line, blocks_of as blocks_of
from memsize.spec.generation import Draft as Draft
from memsize.spec.parallel import on_each as on_each, parse_parallel as parse_parallel
from memsize.spec.stack import INSTALLED as INSTALLED
from memsize.workloads import (
    Forward as Forward,
    Inference as Inference,
    Workload as Workload,
    generation as generation,
    kept_for_backward as kept_for_backward,
)
from memsize.workloads.generation import GenerationSteps as GenerationSteps
from memsize.workloads.kv_caches import CachedLayer as CachedLayer, OnGpuWithHost as OnGpuWithHost
from memsize.workloads.parallel import spread_setup as spread_setup, stage_traces as stage_traces
from memsize.workloads.pipeline_phases import in_phases as in_phases, phases_of as phases_of
from memsize.workloads.training import (
    OwnLoop as OwnLoop,
    StepRepetition as StepRepetition,
    TrainingSteps as TrainingSteps,
)
