"""GPUs, and what the caching allocator makes of a run on one: for tests of everything that is about them."""

from __future__ import annotations

from memsize.analysis.timeline import pickled as pickled, snapshot as snapshot, timeline as timeline
from memsize.analysis.varying_lengths import joined as joined, rows_of as rows_of, training_of as training_of
from memsize.device import compiled_replay as compiled_replay
from memsize.device.allocation_events import (
    OMITTED as OMITTED,
    AllocationEvents as AllocationEvents,
    flow_of as flow_of,
    is_estimated as is_estimated,
    requests as requests,
    variants as variants,
)
from memsize.device.allocator_config import IGNORED as IGNORED, settings_in as settings_in
from memsize.device.budget import (
    budget_of as budget_of,
    budgets as budgets,
    larger_budgets as larger_budgets,
    spread_over as spread_over,
)
from memsize.device.cards import CARDS as CARDS, card as card, processors as processors
from memsize.device.cuda_context import (
    Build as Build,
    Code as Code,
    cuda_context as cuda_context,
    loadings as loadings,
    nearest_code as nearest_code,
)
from memsize.device.cuda_libraries import (
    cublas_workspace as cublas_workspace,
    cublaslt_workspace as cublaslt_workspace,
    keeps_cublaslt_workspace as keeps_cublaslt_workspace,
    torch_release as torch_release,
)
from memsize.device.gpu_estimate import Replays as Replays, estimate_gpu as estimate_gpu, phase_peaks as phase_peaks
from memsize.device.replay import (
    BoundedReplay as BoundedReplay,
    Prefixes as Prefixes,
    replay as replay,
    replay_within as replay_within,
)
from memsize.records.gpu import Card as Card, Interval as Interval
from memsize.tracing.ddp import Buckets as Buckets
