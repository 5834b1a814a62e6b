"""Requests about files: scripts, checkpoints, snapshots, grids, projects; and those about this machine and memsize."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from memsize.errors import InputError
from memsize.records.world import World
from memsize.spec.model_request import parse_arguments
from memsize.spec.options import REQUIRED, option, part
from memsize.spec.requests import beside_option, budget_option, gpus_option, margin_option
from memsize.spec.stack import Gpu

if TYPE_CHECKING:
    from torch import nn

Backend = Literal["loky", "dask"]
Which = Literal["all", "distinct"]
"""The ranks that are run: all, or the few that show that the others are the same."""
_Path = str | os.PathLike[str]
_jobs: Final = partial(option, flags=("-j", "--jobs"), shown="one per core", least=1)
_steps: Final = partial(option, help="Stop after N optimizer steps; 0 runs the program to its end.", least=0)
_allow_writes: Final = partial(option, False, "Let the program change existing files.")
_NO_RANK: Final = "no rank {!r}: a number from 0, all or distinct"


def _rank(text: str) -> int | Which:
    """The rank called `text`: a number, ``all`` or ``distinct``."""
    if text in get_args(Which):
        return text  # type: ignore[return-value]
    if not text.isdecimal():
        raise InputError(_NO_RANK.format(text))
    return int(text)


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
    gpu: Gpu = gpus_option(without=("stack",))
    budget: str | int | None = budget_option()
    margin: str | int = margin_option()
    beside: str | None = beside_option()


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
    module: bool = option(False, "The program is a module, as for python -m.", flags=("-m",))
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
    jobs: int | None = _jobs(1, "Processes that run ranks side by side.", shown="1")

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
            raise InputError("ranks and nodes need several GPUs: say how many, as in --gpus 8")
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
    """An explanation of an out-of-memory error or a memory snapshot of a real GPU."""

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
    retry: bool = option(False, "Run failed cells again.")
    fresh: bool = option(False, "Discard existing results, and run all cells.")
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
