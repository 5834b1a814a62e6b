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
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

from memsize.analysis.findings.program import RANK_RULES
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
from memsize.spec.requests import Which

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
            self.runs |= zip(batch, self._side_by_side(batch), strict=True)

    def _side_by_side(self, ranks: Sequence[int]) -> list[ProgramRun]:
        if not can_fork():
            return [self.rank(rank) for rank in ranks]
        with side_by_side(len(ranks)), Workers(self, self.progress) as workers:
            if len(ranks) == 1:
                return [workers.apart(("rank", ranks[0]))]
            return workers.answers([("rank", rank) for rank in ranks])

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
    """All ranks of a program that is run as one of `world`, or as many as it takes to know what each holds; `run_rank`
    runs one of them.

    `jobs` are run side by side; None: one for each core.
    """
    processes = RankProcesses(run_rank, world, cores() if jobs is None else jobs, progress)
    if which == "all":
        processes.run(range(world.size))
        between: dict[int, int] = {}
    else:
        between = distinct(processes)
    runs = RankRuns(world.size, world.nodes, tuple(_groups(processes.runs, between)))
    return replace(runs, findings=RANK_RULES.findings(runs))


def run_as_rank(
    path: str,
    arguments: Sequence[str],
    card: Card,
    config: AllocatorConfig | None,
    *,
    module: bool,
    world: World | None,
    progress: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> tuple[ProgramRun, BaseException | None]:
    """`run_program` with the same arguments, for which other ranks run too where this one waits for what they send."""
    run = partial(run_program, path, arguments, card, config, module=module, **options)

    def imports() -> None:
        if not module:
            import_packages(path, card, config)

    with others_asked(lambda other_world: run(world=other_world), world, imports):
        return run(world=world, progress=progress)


@contextmanager
def others_asked(
    run_rank: Callable[[World], object], world: World | None, prepare: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """While open, ranks of `world` that wait for what another one sends get it: `run_rank` runs that one in a process
    apart, as far as that, once `prepare` has done what all of them need.
    """
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


def _groups(runs: dict[int, ProgramRun], between: dict[int, int]) -> Iterator[RankGroup]:
    waiting = sorted(runs)
    while waiting:
        run = runs[waiting[0]]
        ran = tuple(rank for rank in waiting if _same(run, runs[rank]))
        yield RankGroup(ran, run, tuple(rank for rank, like in between.items() if like in ran))
        waiting = [rank for rank in waiting if rank not in ran]


def _same(one: ProgramRun, other: ProgramRun) -> bool:
    """Whether two ranks did the same on their GPUs: what either did with copies on the host is no part of it."""

    def on_gpu(trace: Trace) -> Trace:
        """Drop the rank, the notes, and the ops after which memory was let go of, which may be of the host."""
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
    with virtual_gpu(card, config, steps=0, allow_writes=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (*names, *_LATE):
            # What fails here fails in the script too, or was meant to.
            with contextlib.suppress(Exception):
                spec: Any = find_spec(name.partition(".")[0])
                if spec is not None and bool(spec.origin) and is_library(spec.origin):
                    importlib.import_module(name)
