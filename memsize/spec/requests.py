"""Requests: one for each command and function of memsize, put together from parts that they share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from memsize.errors import InputError
from memsize.records.world import World
from memsize.spec.generation import GENERATED, SERVED, Draft, Generation, Serving
from memsize.spec.model_request import ModelRequest, parse_arguments
from memsize.spec.options import REQUIRED, option, part
from memsize.spec.parallel import Parallel
from memsize.spec.scenario import DEFAULT
from memsize.spec.stack import Gpu
from memsize.spec.training import Training

if TYPE_CHECKING:
    from torch import nn, optim  # noqa: F401 - of annotations that are texts

Backend = Literal["loky", "dask"]
OnExcess = Literal["warn", "raise", "ignore"]
Which = Literal["all", "distinct"]
"""The ranks that are run: all, or the few that show that the others are the same."""
_Path = str | os.PathLike[str]
_TRAINING: Final = {
    "when": "train",
    "purpose": "training steps: name an optimizer with {}, such as adamw",
    "optimizer": {"default": None},
}


_model: Final = partial(part, ModelRequest, keywords=ModelRequest.of)
_scenario: Final = partial(
    option, "as-given", help="How to store and run the model.", flags=("-s", "--scenario"), metavar="NAME"
)
_parallel: Final = partial(
    option,
    None,
    "Simulate training on several GPUs and show one of them: ddp=8[,views], fsdp=8[,offload], hsdp=4x8, tp=8, "
    "pp=4, ep=8, fsdp=8,tp=8,pp=4, dp=4.",
    metavar="STRATEGY",
)
_execute: Final = partial(
    option, False, "Run with real values on the CPU: for models with data-dependent control flow."
)
_compile: Final = partial(
    option, False, help="Compile the model with torch.compile, and show it beside the model as it is written."
)
_jobs: Final = partial(option, flags=("-j", "--jobs"), shown="one per core", least=1)
_budget: Final = partial(option, None, "Memory of the device, instead of the GPU's: 15109MiB, 24GB.", metavar="SIZE")
_margin: Final = partial(option, "0", "Memory to leave free: 500MiB, or 5% of the device.", metavar="SIZE")
_steps: Final = partial(option, help="Stop after N optimizer steps; 0 runs the program to its end.", least=0)
_allow_writes: Final = partial(option, False, "Let the program write to files that were there before.")


def _scenarios(usual: Iterable[str], help: str = "Scenarios separated by commas, or all.") -> Any:
    settings = {"flags": ("-s", "--scenario"), "kind": "list", "metavar": "NAMES"}
    return option(None, help, shown=", ".join(usual), **settings)


def _gpus(also: str = "", **changes: Any) -> Any:
    help = f"GPUs to simulate: t4, a100,h100{also} or local (this machine's)."
    several = {"annotation": "Gpu | str | Iterable[str] | None", "kind": "list", "types": ()}
    return part(Gpu, name={"help": help, "metavar": "NAMES", **several}, **changes)


_NO_RANK: Final = "no rank {!r}: a number from 0, all or distinct"


def _rank(text: str) -> int | Which:
    """The rank called `text`: a number, ``all`` or ``distinct``."""
    if text in get_args(Which):
        return text  # type: ignore[return-value]
    if not text.isdecimal():
        raise InputError(_NO_RANK.format(text))
    return int(text)


_OF_TRAINING: Final = ("lora", "adapter", "base", "freeze", "imbalance")


def _trained_if_adapted(request: Any, is_trained: bool = True) -> None:
    """Train a request's model with the usual optimizer where it has adapters and nothing else was asked for."""
    if request.training is None and is_trained and request.model.mode != "eval" and request.model.trained_parts.adapter:
        object.__setattr__(request, "training", Training())


@dataclass(frozen=True, kw_only=True)
class _ModelRun:
    model: ModelRequest = _model()
    training: Training | None = part(Training, **_TRAINING)
    parallel: Parallel | str | None = _parallel()
    gpu: Gpu = part(Gpu)
    execute: bool = _execute()

    def __post_init__(self) -> None:
        _trained_if_adapted(self, getattr(self, "step", None) is None)


@dataclass(frozen=True, kw_only=True)
class ReportRequest(_ModelRun):
    """A report on each byte of a model."""

    scenarios: str | Iterable[str] | None = _scenarios(DEFAULT)
    compile: bool = _compile()


@dataclass(frozen=True, kw_only=True)
class DiffRequest:
    """A comparison of two models, revisions, saved runs or checkpoints."""

    before: Any = option(REQUIRED, "", positional=True)
    after: Any = option(REQUIRED, "", positional=True)
    model: ModelRequest = part(ModelRequest, keywords=partial(ModelRequest.of, ""), without=("model",))
    training: Training | None = part(Training, **_TRAINING)
    gpu: Gpu = part(Gpu)
    execute: bool = _execute()
    scenarios: str | Iterable[str] | None = _scenarios(
        ("as-given",), "Scenarios to compare, separated by commas, or all."
    )


@dataclass(frozen=True, kw_only=True)
class TimelineRequest(_ModelRun):
    """Live memory over training steps, or over one inference."""

    scenario: str = _scenario()
    compile: bool = _compile(help="Compile the model with torch.compile.")


@dataclass(frozen=True, kw_only=True)
class TraceRequest(TimelineRequest):
    """The same in Python, where a loop of one's own can take the place of the usual one, as one process of many."""

    training: Training | None = part(
        Training, when="optimizer", purpose=_TRAINING["purpose"], optimizer={"key": "optimizer"}
    )
    step: Callable[..., Any] | None = option(None, "A loop in place of the usual one.", written=False)
    world: World | None = option(None, "The process of a distributed job.", written=False)


@dataclass(frozen=True, kw_only=True)
class GuardRequest:
    """The peak of a training loop of one's own, before its first step."""

    model: nn.Module = option(REQUIRED, "", positional=True)
    training: Training | None = part(
        Training,
        when="optimizer",
        purpose=_TRAINING["purpose"],
        without=("steps", "ema", "set_to_none", "scaler"),
        optimizer={"annotation": "optim.Optimizer | None", "key": "optimizer", "default": None}
        | {"positional": True, "required": True},
    )
    batch: Any = option(REQUIRED, "", positional=True)
    budget: str | int | None = option(None, "What PyTorch may reserve.", written=False)
    on_excess: OnExcess = option("warn", "What to do where it is not enough.", choices=get_args(OnExcess))
    scenario: str = _scenario()
    gpu: Gpu = part(Gpu, without=("stack", "allocator"))


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """A prediction compared with a real GPU."""

    model: ModelRequest = _model(without=("whole", *_OF_TRAINING))
    training: Training | None = part(Training, **_TRAINING)
    scenario: str = _scenario()
    device: int = option(0, "CUDA device to run on.", least=0)
    against: _Path | None = option(
        None, "Compare with a saved measurement of the same step instead, without a GPU.", kind="path", metavar="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class LayoutRequest:
    """The effect of channels last on a model."""

    model: ModelRequest = _model(without=("whole", *_OF_TRAINING))
    scenario: str = _scenario()


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """The largest batch, length or number of sequences that fits."""

    model: ModelRequest = _model(
        batch_size={
            "help": "Check whether this batch fits, and what would make it fit. With --vary: the fixed batch size.",
            "shown": None,
        },
        mode={"shown": "train with --train, else eval"},
    )
    vary: str = option(
        "batch",
        "What to vary: batch, context, both as context,batch, seq_len, image, or dimensions such as 0:1 or "
        "input_ids:1 (0 is the batch).",
        metavar="WHAT",
    )
    prompt: int | None = option(None, "Generate after a prompt of N tokens.", shown="512", least=1)
    generation: Generation | None = part(Generation, when="any")
    gpu: Gpu = _gpus(", all (the smallest that fits)")
    budget: str | int | None = _budget()
    margin: str | int = _margin()
    scenarios: str | Iterable[str] | None = _scenarios(DEFAULT)
    compile: bool = _compile()
    training: Training | None = part(Training, without=("steps",), **_TRAINING)
    parallel: str | Iterable[str] | None = option(
        None,
        "Train on several GPUs: ddp=8[,views], fsdp=8[,offload] …, as for memsize timeline. Give several to "
        "compare them.",
        kind="texts",
        metavar="STRATEGY",
    )
    gpus: int | str | Iterable[int] | None = option(
        None,
        "Numbers of GPUs to compare, for --parallel fsdp, ddp or hsdp=x8: 1..128 (doubling), or 6,12.",
        kind="list",
        metavar="NUMBERS",
    )
    remedies: bool | None = option(
        None,
        "Try what would make it fit.",
        flags=("--remedies/--no-remedies",),
        shown="if the batch in --batch-size doesn't fit",
    )

    def __post_init__(self) -> None:
        _trained_if_adapted(self, self.generation is None and self.prompt is None)


@dataclass(frozen=True, kw_only=True)
class FitScriptRequest:
    """The largest value of a script's own argument that fits."""

    script: _Path = option(REQUIRED, "", positional=True)
    arguments: Iterable[str] = option(REQUIRED, "", positional=True, kind="texts")
    vary: str = option(
        REQUIRED,
        "The argument of the script to vary: batch-size for --batch-size 8 or batch_size=8.",
        flags=("--vary-argument",),
        metavar="NAME",
    )
    steps: int = option(3, "Optimizer steps of each run.", least=1)
    gpu: Gpu = _gpus(without=("stack",))
    budget: str | int | None = _budget()
    margin: str | int = _margin()


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """The memory of a language model while it generates."""

    model: ModelRequest = _model(without=("source", "seq_len", "batch_size", "mode", "freeze"))
    prompt: int | str | Iterable[int] = option(
        512, "Tokens of the prompt; several lengths.", kind="list", metavar="N,…"
    )
    generation: Generation = part(Generation)
    assistant_model: nn.Module | str | None = option(
        None,
        "A smaller model, which proposes tokens before each step.",
        metavar="TARGET",
    )
    prompt_lookup_num_tokens: int | None = option(None, "N tokens before each step, looked up in the prompt.", least=1)
    batch_size: int | str | Iterable[int] = option(
        1,
        "Sequences at once; several sizes.",
        flags=("-b", "--batch", "--batch-size"),
        kind="list",
        metavar="N,…",
    )
    step: Callable[..., Any] | str | None = option(
        None, "A loop in place of generate: file.py:function.", metavar="FUNCTION"
    )
    scenarios: str | Iterable[str] | None = _scenarios(GENERATED)
    compile: bool = _compile()
    gpu: Gpu = part(Gpu)

    @property
    def draft(self) -> Draft | None:
        """The source of the tokens that are proposed before each step."""
        return Draft.of(self.assistant_model, self.prompt_lookup_num_tokens)


@dataclass(frozen=True, kw_only=True)
class ServeRequest:
    """The memory of a paged server."""

    model: ModelRequest = _model(without=("source", "seq_len", "batch_size", "mode", *_OF_TRAINING))
    serving: Serving = part(Serving)
    scenarios: str | Iterable[str] | None = _scenarios(SERVED)
    gpu: Gpu = part(Gpu, without=("allocator",))


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A script of one's own on a GPU that isn't there."""

    script: _Path = option(REQUIRED, "", key="script", positional=True, metavar="PROGRAM")
    arguments: Iterable[str] = option((), "", positional=True, kind="texts")
    gpu: Gpu = part(Gpu)
    steps: int = _steps(3)
    training_only: bool = option(False, "Stop after the steps, before the evaluation and the checkpoint that follow.")
    checkpoint: str | None = option(
        None,
        "Replace a missing checkpoint that the program loads by one with the shapes of the model that loads it.",
        choices=("stand-in",),
    )
    module: bool = option(False, "PROGRAM is a module, as for python -m.", flags=("-m",))
    allow_writes: bool = _allow_writes()
    offline: bool = option(False, "Keep the program from connecting to other machines.")
    gpus: int | None = option(None, "Run it as one of the N processes of a job, one per GPU.")
    nodes: int = option(1, "Machines that the GPUs are spread over.")
    one_process: bool = option(False, "Start it once, with all N GPUs: for nn.DataParallel, device_map.")
    rank: int | Which = option(
        0,
        "Which of the processes (or GPUs) to run: a number, all, or distinct (only as many as differ).",
        kind="text",
        read=_rank,
        metavar="RANK",
    )
    jobs: int | None = _jobs(1, "Processes that run scenarios side by side.")

    @property
    def world(self) -> World | None:
        """The process that is run, of several the first; None for a program that is started by itself.

        With `one_process` there is only one, which has all the GPUs, and `rank` is that of a GPU. Raises `InputError`
        where there is no such process.
        """
        if not isinstance(self.rank, int) and self.rank not in get_args(Which):
            raise InputError(_NO_RANK.format(self.rank))
        if self.gpus is not None:
            rank = self.rank if isinstance(self.rank, int) else 0
            return World(self.gpus, rank, self.nodes, one_process=self.one_process)
        if self.rank != 0 or self.nodes != 1 or self.one_process:
            raise InputError("ranks and nodes are those of a program on several GPUs: say how many, as in --gpus 8")
        return None


@dataclass(frozen=True, kw_only=True)
class CellRequest:
    """A cell of a notebook on a GPU that isn't there."""

    gpu: Gpu = part(Gpu, without=("stack",))
    steps: int = _steps(3)
    allow_writes: bool = _allow_writes()


@dataclass(frozen=True, kw_only=True)
class VirtualGpuRequest:
    """A GPU that isn't there, for a ``with`` block."""

    gpu: Gpu = part(Gpu, name={"positional": True})
    steps: int = _steps(0)
    allow_writes: bool = _allow_writes()
    world: World | None = option(None, "The process of a distributed job.", written=False)


@dataclass(frozen=True, kw_only=True)
class CheckpointRequest:
    """The contents of a checkpoint, by size."""

    path: _Path = option(REQUIRED, "", positional=True, kind="path", metavar="FILE")
    against: nn.Module | str | None = option(
        None,
        "Compare with the tensors of this model, a target of memsize report such as model.py:Net.",
        metavar="TARGET",
    )
    arguments: Mapping[str, object] | None = option(
        None,
        "Argument for its constructor. Repeatable.",
        flags=("--arg",),
        kind="table",
        read=parse_arguments,
        metavar="NAME=VALUE",
    )


@dataclass(frozen=True, kw_only=True)
class ExplainRequest:
    """An explanation of a memory snapshot of a real GPU."""

    snapshot: _Path = option(REQUIRED, "", positional=True, kind="path", metavar="FILE")
    against: Any = option(
        None,
        "Compare with this snapshot, or with the peak that this saved run predicts: of memsize run, timeline or "
        "report --train.",
        kind="path",
        metavar="FILE",
    )
    device: int | None = option(None, "GPU to explain.", shown="the fullest", least=0)


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """A grid of models, scenarios, batch sizes and GPUs."""

    grid: _Path | Mapping[str, Any] = option(REQUIRED, "", positional=True, kind="path", metavar="FILE")
    results: _Path | None = option(
        None,
        "Keep each cell in this file, and run only those that it lacks.",
        kind="path",
        metavar="FILE",
        shown="FILE's name, ending in .jsonl",
    )
    retry: bool = option(False, "Run the cells again that failed.")
    fresh: bool = option(False, "Forget the results that are there, and run all cells.")
    jobs: int | None = _jobs(None, "Processes that run cells side by side.")
    backend: Backend = option(
        "loky", "Where cells run: loky on this machine, dask on a cluster.", choices=get_args(Backend)
    )
    scheduler: str | None = option(None, "The cluster's scheduler: tcp://10.0.0.1:8786.", metavar="ADDRESS")
    timeout: float | None = option(None, "Give up on a cell after this time.", metavar="SECONDS")


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """A project's models against its limits and baselines."""

    paths: _Path | Iterable[_Path] = option((), "", positional=True, kind="texts")
    update: bool = option(False, "Write the baselines instead of comparing with them.")
    select: str | Iterable[str] = option(
        "", "Findings that count as errors, separated by commas.", kind="list", metavar="CODES"
    )
    ignore: str | Iterable[str] = option(
        "", "Findings to leave out, separated by commas.", kind="list", metavar="CODES"
    )

    @property
    def projects(self) -> tuple[Path, ...]:
        """The files and folders; the working folder where none is named."""
        paths = (self.paths,) if isinstance(self.paths, str | os.PathLike) else tuple(self.paths)
        return tuple(map(Path, paths or (".",)))


@dataclass(frozen=True, kw_only=True)
class InitRequest:
    """The first section of a project."""

    model: ModelRequest = _model()
    training: Training | None = part(Training, without=("steps",), **_TRAINING)
    gpu: Gpu = part(Gpu, without=("stack", "allocator"))
    scenario: str = _scenario(help="How to store and run it.")
    folder: _Path = option(".", "", positional=True, kind="path")


@dataclass(frozen=True, kw_only=True)
class WatchRequest:
    """A job on a real GPU beside its prediction."""

    pid: int = option(0, "", positional=True, metavar="[PID]", least=1)
    run: _Path | None = option(None, "Compare with the peak that this saved run predicts.", kind="path", metavar="RUN")
    interval: float = option(1.0, "Read the memory this often.", least=0.001, metavar="SECONDS", shown="1")


@dataclass(frozen=True, kw_only=True)
class NamesRequest:
    """Names that options and targets take."""

    pattern: str = option("*", "A part of a name, or with * the whole of it, without regard to case.", positional=True)


@dataclass(frozen=True, kw_only=True)
class McpRequest:
    """The tools of an MCP server, and what a call may take."""

    folder: _Path = option(".", "", positional=True, kind="path")
    timeout: float = option(300.0, "End a call after this time.", least=0.1, metavar="SECONDS", shown="300")
    memory: str | int = option("16GiB", "Memory that each process of a call may take.", metavar="SIZE")
