"""Several ranks of one program: each is run in a process of its own where the platform forks.

Which ranks are `distinct` follows from how PyTorch shards: by `torch.chunk`, so that a rank's part of a dimension is
never larger than that of a rank before it. Where the first and the last rank of a job come out the same, so do those
between. Where they differ, the same is asked of each half, and first of all ranks but rank 0: that one often has more
to do, such as saving. Ranks that send each other messages are stages of a pipeline, and of stages nothing of the kind
is known: then all are run.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Final

from memsize.analysis.findings.ranks import RANK_RULES
from memsize.analysis.program import run_program, virtual_gpu
from memsize.device.allocator_config import AllocatorConfig
from memsize.processes.rank_processes import opened
from memsize.processes.user_code import is_library, parsed
from memsize.processes.workers import Workers, can_fork, cores, side_by_side, silent
from memsize.records.gpu import Card
from memsize.records.program import ProgramRun
from memsize.records.ranks import RankGroup, RankRuns
from memsize.records.trace import UNUSED, Trace
from memsize.records.world import ALONE, World
from memsize.spec.file_requests import Which
from memsize.virtual.guards.child_processes import Settings

_MESSAGES: Final = frozenset(("send", "receive"))


@dataclass(eq=False)
class RankProcesses:
    """The ranks of a program, each run once: `jobs` of them side by side."""

    run_rank: Callable[[World], ProgramRun]
    world: World
    jobs: int
    progress: Callable[[str], None] = lambda _: None
    runs: dict[int, ProgramRun] = field(default_factory=dict)

    def run(self, ranks: Sequence[int]) -> None:
        """Run those of `ranks` that were not run yet."""
        waiting = [rank for rank in dict.fromkeys(ranks) if rank not in self.runs]
        for start in range(0, len(waiting), self.jobs):
            batch = waiting[start : start + self.jobs]
            named = f"rank{'s' if len(batch) > 1 else ''} {', '.join(map(str, batch))}"
            self.progress(f"running {named} of {self.world.size}, {len(self.runs)} done")
            if not can_fork():
                runs = [self.rank(rank) for rank in batch]
            else:
                with side_by_side(len(batch)), Workers(self, self.progress) as workers:
                    calls = [("rank", rank) for rank in batch]
                    runs = workers.answers(calls) if len(batch) > 1 else [workers.apart(calls[0])]
            self.runs |= zip(batch, runs, strict=True)

    def rank(self, rank: int) -> ProgramRun:
        """One rank's run; nobody reads what it prints."""
        with silent() if can_fork() else nullcontext():
            return self.run_rank(replace(self.world, rank=rank))


def run_ranks(
    run_rank: Callable[[World], ProgramRun],
    world: World,
    which: Which,
    jobs: int | None,
    progress: Callable[[str], None] = lambda _: None,
) -> RankRuns:
    """Run `which` ranks of a program with `run_rank`, `jobs` side by side (None: one for each core)."""
    processes = RankProcesses(run_rank, world, cores() if jobs is None else jobs, progress)
    if which == "all":
        processes.run(range(world.size))
        between: dict[int, int] = {}
    else:
        between = distinct(processes)
    groups: list[RankGroup] = []
    waiting = sorted(processes.runs)
    while waiting:
        run = processes.runs[waiting[0]]
        ran = tuple(rank for rank in waiting if _same(run, processes.runs[rank]))
        groups.append(RankGroup(ran, run, tuple(rank for rank, like in between.items() if like in ran)))
        waiting = [rank for rank in waiting if rank not in ran]
    runs = RankRuns(world.size, world.nodes, tuple(groups))
    return replace(runs, findings=RANK_RULES.findings(runs))


def run_as_rank(
    path: str,
    arguments: Sequence[str],
    settings: Settings,
    *,
    module: bool,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[ProgramRun, BaseException | None]:
    """`run_program` with the same arguments, for which other ranks run too where this one waits for what they send."""

    def run(world: World) -> tuple[ProgramRun, BaseException | None]:
        return run_program(path, arguments, settings._replace(world=world), module=module)

    def imports() -> None:
        if not module:
            import_packages(path, settings.card, settings.config)

    with others_asked(run, settings.world, imports):
        return run_program(path, arguments, settings, module=module, progress=progress)


@contextmanager
def others_asked(
    run_rank: Callable[[World], object], world: World | None, prepare: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """While open, ranks that wait for what another sends get it: `run_rank` runs that one in a process apart."""
    if world is None or world.one_process:
        yield
        return
    with opened(lambda rank: run_rank(replace(world, rank=rank)), prepare):
        yield


def distinct(processes: RankProcesses) -> dict[int, int]:
    """Run the ranks by which the others are known: for each of these, one that was run and is the same."""
    represented: dict[int, int] = {}
    runs, parts = processes.runs, [(0, processes.world.size - 1)]
    processes.run(parts[0])
    while parts:
        if any(collective.kind in _MESSAGES for run in runs.values() for collective in run.trace.collectives):
            processes.run(range(processes.world.size))
            return {}
        cut: list[tuple[int, int]] = []
        for low, high in parts:
            if _same(runs[low], runs[high]):
                represented |= dict.fromkeys(range(low + 1, high), low)
            elif high - low > 1:
                middle = (low + high + 1) // 2 if low else 1
                cut += [(low, middle), (middle, high)]
        processes.run([rank for part in cut for rank in part])
        parts = cut
    return represented


def _same(one: ProgramRun, other: ProgramRun) -> bool:
    """Whether two ranks did the same on their GPUs: what either did with copies on the host is no part of it."""

    def on_gpu(trace: Trace) -> Trace:  # memory that an op let go of may be of the host
        events = tuple(event if event.delta > 0 else event._replace(op="") for event in trace.events)
        return replace(trace, world=ALONE, notes=(), host=UNUSED, events=events)

    return on_gpu(one.trace) == on_gpu(other.trace)


_LATE: Final = ("torch._dynamo", "torch.distributed.optim")
"""What the first optimizer of a process imports, and the first process group."""


def import_packages(path: str, card: Card, config: AllocatorConfig | None) -> None:
    """Import what the script at `path` imports at its top level from installed packages, and what PyTorch will."""
    tree = parsed(path)
    names: list[str] = []
    for node in tree.body if tree else ():
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    with virtual_gpu(Settings(card, config, steps=0)), warnings.catch_warnings(action="ignore"):
        for name in (*names, *_LATE):
            # What fails here fails in the script too, or was meant to.
            with contextlib.suppress(Exception):
                spec: Any = find_spec(name.partition(".")[0])
                if spec is not None and bool(spec.origin) and is_library(spec.origin):
                    importlib.import_module(name)
