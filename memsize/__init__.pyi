"""Written by `python -m tests.stub` from the signatures of the functions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from torch import nn, optim

from memsize.analysis.program import VirtualGpu as VirtualGpu
from memsize.analysis.step import Guard as Guard, StepTrace as StepTrace
from memsize.checkpoints.checkpoint_report import CheckpointReport as CheckpointReport
from memsize.device.allocator_config import AllocatorConfig as AllocatorConfig
from memsize.errors import (
    BudgetError as BudgetError,
    CheckpointError as CheckpointError,
    ForwardError as ForwardError,
    InputError as InputError,
    MemsizeError as MemsizeError,
    OutputError as OutputError,
    ScenarioError as ScenarioError,
    TargetError as TargetError,
    UnknownValueError as UnknownValueError,
)
from memsize.interrupt import Interrupted as Interrupted
from memsize.records.check import Check as Check
from memsize.records.comparison import Comparison as Comparison
from memsize.records.explanation import Explanation as Explanation
from memsize.records.finding import Finding as Finding
from memsize.records.fit import Fit as Fit
from memsize.records.generation import GenerationReport as GenerationReport
from memsize.records.layout import LayoutReport as LayoutReport
from memsize.records.program import ProgramRun as ProgramRun
from memsize.records.ranks import RankRuns as RankRuns
from memsize.records.report import Report as Report
from memsize.records.serving import ServingReport as ServingReport
from memsize.records.sweep import Sweep as Sweep
from memsize.records.timeline import Timeline as Timeline
from memsize.records.trace import Trace as Trace
from memsize.records.verification import Verification as Verification
from memsize.records.world import World as World
from memsize.spec.generation import Generation as Generation, Serving as Serving
from memsize.spec.inputs import InputSpec as InputSpec
from memsize.spec.model_request import ModelRequest as ModelRequest
from memsize.spec.parallel import Parallel as Parallel
from memsize.spec.scenario import Scenario as Scenario
from memsize.spec.stack import Gpu as Gpu, Stack as Stack
from memsize.spec.training import Training as Training

__version__: str

def check(
    paths: str | PathLike[str] | Iterable[str | PathLike[str]] = (),
    *,
    update: bool = False,
    select: str | Iterable[str] = "",
    ignore: str | Iterable[str] = "",
    progress: Callable[[str], None] | None = None,
) -> Check: ...
def checkpoint(
    path: str | PathLike[str],
    *,
    against: nn.Module | str | None = None,
    arguments: Mapping[str, object] | None = None,
) -> CheckpointReport: ...
def diff(
    before: Any,
    after: Any,
    input_size: str | Sequence[Any] | InputSpec | Any = None,
    *,
    input_data: Any = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    arguments: Mapping[str, object] | None = None,
    mode: Literal["train", "eval"] | None = None,
    whole: bool = False,
    train: Training | str | Callable[[Any], Any] | None = None,
    steps: int = 3,
    loss: str | Callable[[Any], Any] | None = None,
    gradient_accumulation_steps: int = 1,
    ema: bool = False,
    set_to_none: bool = True,
    scaler: bool | None = None,
    gpu: Gpu | str | None = None,
    stack: Stack | str | None = None,
    allocator: AllocatorConfig | str | None = None,
    execute: bool = False,
    scenarios: str | Iterable[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison: ...
def explain(
    snapshot: str | PathLike[str],
    *,
    against: Any = None,
    device: int | None = None,
) -> Explanation: ...
def fit(
    model: nn.Module | str | PathLike[str] | ModelRequest,
    input_size: str | Sequence[Any] | InputSpec | Any = None,
    *,
    input_data: Any = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    arguments: Mapping[str, object] | None = None,
    mode: Literal["train", "eval"] | None = None,
    whole: bool = False,
    vary: str = "batch",
    prompt: int | None = None,
    generation: Generation | None = None,
    max_new_tokens: int = 128,
    cache_implementation: str | None = None,
    kv_cache_dtype: str | None = None,
    num_beams: int = 1,
    prefill_chunk_size: int | None = None,
    uneven: bool = False,
    gpu: Gpu | str | Iterable[str] | None = None,
    stack: Stack | str | None = None,
    allocator: AllocatorConfig | str | None = None,
    budget: str | int | None = None,
    margin: str | int = "0",
    scenarios: str | Iterable[str] | None = None,
    train: Training | str | Callable[[Any], Any] | None = None,
    loss: str | Callable[[Any], Any] | None = None,
    gradient_accumulation_steps: int = 1,
    ema: bool = False,
    set_to_none: bool = True,
    scaler: bool | None = None,
    parallel: str | Iterable[str] | None = None,
    gpus: int | str | Iterable[int] | None = None,
    remedies: bool | None = None,
    crossovers: bool = False,
    progress: Callable[[str], None] | None = None,
    found: Callable[[Finding], None] | None = None,
) -> Fit: ...
def fit_script(
    script: str | PathLike[str],
    arguments: Iterable[str],
    *,
    vary: str,
    steps: int = 3,
    gpu: Gpu | str | Iterable[str] | None = None,
    allocator: AllocatorConfig | str | None = None,
    budget: str | int | None = None,
    margin: str | int = "0",
    progress: Callable[[str], None] | None = None,
    found: Callable[[Finding], None] | None = None,
) -> Fit: ...
def generate(
    model: nn.Module | str | PathLike[str] | ModelRequest,
    input_size: str | Sequence[Any] | InputSpec | Any = None,
    *,
    input_data: Any = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    arguments: Mapping[str, object] | None = None,
    whole: bool = False,
    prompt: int | str | Iterable[int] = 512,
    generation: Generation | None = None,
    max_new_tokens: int = 128,
    cache_implementation: str | None = None,
    kv_cache_dtype: str | None = None,
    num_beams: int = 1,
    prefill_chunk_size: int | None = None,
    uneven: bool = False,
    assistant_model: nn.Module | str | None = None,
    prompt_lookup_num_tokens: int | None = None,
    batch_size: int | str | Iterable[int] = 1,
    step: Callable[..., Any] | str | None = None,
    scenarios: str | Iterable[str] | None = None,
    gpu: Gpu | str | None = None,
    stack: Stack | str | None = None,
    allocator: AllocatorConfig | str | None = None,
    progress: Callable[[str], None] | None = None,
) -> GenerationReport: ...
def guard(
    model: nn.Module,
    optimizer: optim.Optimizer | None,
    batch: Any,
    *,
    loss: str | Callable[[Any], Any] | None = None,
    gradient_accumulation_steps: int = 1,
    budget: str | int | None = None,
    on_excess: Literal["warn", "raise", "ignore"] = "warn",
    scenario: str = "as-given",
    gpu: Gpu | str | None = None,
) -> Guard: ...
def init(
    model: nn.Module | str | PathLike[str] | ModelRequest,
    input_size: str | Sequence[Any] | InputSpec | Any = None,
    folder: str | PathLike[str] = ".",
    *,
    input_data: Any = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    arguments: Mapping[str, object] | None = None,
    mode: Literal["train", "eval"] | None = None,
    whole: bool = False,
    train: Training | str | Callable[[Any], Any] | None = None,
    loss: str | Callable[[Any], Any] | None = None,
    gradient_accumulation_steps: int = 1,
    ema: bool = False,
    set_to_none: bool = True,
    scaler: bool | None = None,
    gpu: Gpu | str | None = None,
    scenario: str = "as-given",
) -> tuple[Path, str]: ...
def layout(
    model: nn.Module | str | PathLike[str] | ModelRequest,
    input_size: str | Sequence[Any] | InputSpec | Any = None,
    *,
    input_data: Any = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    arguments: Mapping[str, object] | None = None,
    mode: Literal["train", "eval"] | None = None,
    scenario: str = "as-given",
    progress: Callable[[str], None] | None = None,
) -> LayoutReport: ...
def load(
    path: str | PathLike[str],
) -> Any: ...
def report(
    model: nn.Module | str | PathLike[str] | ModelRequest,
    input_size: str | Sequence[Any] | InputSpec | Any = None,
    *,
    input_data: Any = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    arguments: Mapping[str, object] | None = None,
    mode: Literal["train", "eval"] | None = None,
    whole: bool = False,
    train: Training | str | Callable[[Any], Any] | None = None,
    steps: int = 3,
    loss: str | Callable[[Any], Any] | None = None,
    gradient_accumulation_steps: int = 1,
    ema: bool = False,
    set_to_none: bool = True,
    scaler: bool | None = None,
    parallel: Parallel | str | None = None,
    gpu: Gpu | str | None = None,
    stack: Stack | str | None = None,
    allocator: AllocatorConfig | str | None = None,
    execute: bool = False,
    scenarios: str | Iterable[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report: ...
def run(
    script: str | PathLike[str],
    arguments: Iterable[str] = (),
    *,
    gpu: Gpu | str | None = None,
    stack: Stack | str | None = None,
    allocator: AllocatorConfig | str | None = None,
    steps: int = 3,
    module: bool = False,
    allow_writes: bool = False,
    offline: bool = False,
    gpus: int | None = None,
    nodes: int = 1,
    one_process: bool = False,
    rank: int | Literal["all", "distinct"] = 0,
    jobs: int | None = 1,
    progress: Callable[[str], None] | None = None,
) -> ProgramRun | RankRuns: ...
def serve(
    model: nn.Module | str | PathLike[str] | ModelRequest,
    input_size: str | Sequence[Any] | InputSpec | Any = None,
    *,
    input_data: Any = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    arguments: Mapping[str, object] | None = None,
    whole: bool = False,
    serving: Serving | None = None,
    gpu_memory_utilization: float = 0.9,
    block_size: int = 16,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    max_model_len: int | None = None,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str | None = None,
    scenarios: str | Iterable[str] | None = None,
    gpu: Gpu | str | None = None,
    stack: Stack | str | None = None,
    progress: Callable[[str], None] | None = None,
) -> ServingReport: ...
def shape_rule(
    *names: str,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
def sweep(
    grid: str | PathLike[str] | Mapping[str, Any],
    *,
    results: str | PathLike[str] | None = None,
    retry: bool = False,
    fresh: bool = False,
    jobs: int | None = None,
    backend: Literal["loky", "dask", "ray"] = "loky",
    scheduler: str | None = None,
    timeout: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Sweep: ...
def timeline(
    model: nn.Module | str | PathLike[str] | ModelRequest,
    input_size: str | Sequence[Any] | InputSpec | Any = None,
    *,
    input_data: Any = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    arguments: Mapping[str, object] | None = None,
    mode: Literal["train", "eval"] | None = None,
    whole: bool = False,
    train: Training | str | Callable[[Any], Any] | None = None,
    steps: int = 3,
    loss: str | Callable[[Any], Any] | None = None,
    gradient_accumulation_steps: int = 1,
    ema: bool = False,
    set_to_none: bool = True,
    scaler: bool | None = None,
    parallel: Parallel | str | None = None,
    gpu: Gpu | str | None = None,
    stack: Stack | str | None = None,
    allocator: AllocatorConfig | str | None = None,
    execute: bool = False,
    scenario: str = "as-given",
    progress: Callable[[str], None] | None = None,
) -> Timeline: ...
def trace(
    model: nn.Module | str | PathLike[str] | ModelRequest,
    input_size: str | Sequence[Any] | InputSpec | Any = None,
    *,
    input_data: Any = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    arguments: Mapping[str, object] | None = None,
    mode: Literal["train", "eval"] | None = None,
    whole: bool = False,
    optimizer: Training | str | Callable[[Any], Any] | None = "adamw",
    steps: int = 3,
    loss: str | Callable[[Any], Any] | None = None,
    gradient_accumulation_steps: int = 1,
    ema: bool = False,
    set_to_none: bool = True,
    scaler: bool | None = None,
    parallel: Parallel | str | None = None,
    gpu: Gpu | str | None = None,
    stack: Stack | str | None = None,
    allocator: AllocatorConfig | str | None = None,
    execute: bool = False,
    scenario: str = "as-given",
    step: Callable[..., Any] | None = None,
    world: World | None = None,
) -> StepTrace: ...
def verify(
    model: nn.Module | str | PathLike[str] | ModelRequest,
    input_size: str | Sequence[Any] | InputSpec | Any = None,
    *,
    input_data: Any = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    arguments: Mapping[str, object] | None = None,
    mode: Literal["train", "eval"] | None = None,
    train: Training | str | Callable[[Any], Any] | None = None,
    steps: int = 3,
    loss: str | Callable[[Any], Any] | None = None,
    gradient_accumulation_steps: int = 1,
    ema: bool = False,
    set_to_none: bool = True,
    scaler: bool | None = None,
    scenario: str = "as-given",
    device: int = 0,
    against: str | PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Verification: ...
def virtual_gpu(
    gpu: Gpu | str | None = None,
    *,
    stack: Stack | str | None = None,
    allocator: AllocatorConfig | str | None = None,
    steps: int = 0,
    allow_writes: bool = False,
    world: World | None = None,
) -> AbstractContextManager[VirtualGpu]: ...
