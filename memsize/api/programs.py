"""Questions about a program: a script, or the code of a ``with`` block, on a GPU that isn't there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from memsize.analysis.program import VirtualGpu
    from memsize.device.allocator_config import AllocatorConfig
    from memsize.records.finding import Finding
    from memsize.records.fit import Fit
    from memsize.records.program import ProgramRun
    from memsize.records.ranks import RankRuns, Which
    from memsize.records.world import World
    from memsize.spec.stack import Stack


@overload
def run(
    script: str | os.PathLike[str],
    arguments: Iterable[str] = ...,
    *,
    gpu: str | None = ...,
    steps: int = ...,
    module: bool = ...,
    config: AllocatorConfig | str | None = ...,
    stack: Stack | str | None = ...,
    allow_writes: bool = ...,
    gpus: int | None = ...,
    nodes: int = ...,
    rank: int = ...,
    one_process: bool = ...,
    progress: Callable[[str], None] | None = ...,
) -> ProgramRun: ...


@overload
def run(
    script: str | os.PathLike[str],
    arguments: Iterable[str] = ...,
    *,
    gpu: str | None = ...,
    steps: int = ...,
    module: bool = ...,
    config: AllocatorConfig | str | None = ...,
    stack: Stack | str | None = ...,
    allow_writes: bool = ...,
    gpus: int,
    nodes: int = ...,
    rank: Which,
    one_process: bool = ...,
    jobs: int | None = ...,
    progress: Callable[[str], None] | None = ...,
) -> RankRuns: ...


def run(
    script: str | os.PathLike[str],
    arguments: Iterable[str] = (),
    *,
    gpu: str | None = None,
    steps: int = 3,
    module: bool = False,
    config: AllocatorConfig | str | None = None,
    stack: Stack | str | None = None,
    allow_writes: bool = False,
    gpus: int | None = None,
    nodes: int = 1,
    rank: int | Which = 0,
    one_process: bool = False,
    jobs: int | None = 1,
    progress: Callable[[str], None] | None = None,
) -> ProgramRun | RankRuns:
    """What a script that was written for a GPU would do to one, from a run of it on a GPU that isn't there.

    `script` runs in this process with `arguments` as its command line (with `module`, the module of that name, as
    ``python -m`` runs it), until its optimizer has made `steps` steps; 0 runs it to its end. What it computes on the
    GPU has no values, and numbers that it reads from there are stand-ins. Files that were there before are left alone
    unless `allow_writes` is set. `gpu` and `config` are as for `trace`; without a `config`, the allocator's settings
    are those that ``PYTORCH_CUDA_ALLOC_CONF`` or ``PYTORCH_ALLOC_CONF`` holds when the script first uses it. `stack` is
    its PyTorch and CUDA, as for `trace`.

    `gpus` is for a script that ``torchrun`` starts once for each GPU: how many there are on all `nodes` together. It
    is run as process `rank` of them. With ``"all"`` each rank is run, in a process of its own where the platform forks,
    `jobs` side by side (None: one per core); with ``"distinct"`` the first and the last, and those between only where
    they differ. The answer is then a `RankRuns`. With `one_process` the script is started once and has all `gpus`, and
    `rank` is that of the GPU that is looked at. `progress` is called with what is being done.

    Raises `InputError` where there is no such script or rank, and `ForwardError` when the script itself fails; of
    several ranks it says in the answer which failed.
    """
    from memsize.analysis.findings.program import CAUSES
    from memsize.analysis.ranks import import_packages, others_asked, run_as_rank, run_ranks
    from memsize.device.allocator_config import AllocatorConfig
    from memsize.device.cards import card
    from memsize.errors import ForwardError
    from memsize.records.gpu import DEFAULT_GPU
    from memsize.spec.rank_choice import asked_world
    from memsize.spec.stack import Stack

    where, software = card(gpu or DEFAULT_GPU), Stack.of(stack)
    settings = AllocatorConfig.parse_optional(config, software.release)
    world = asked_world(gpus, nodes, rank, one_process)
    path = os.fspath(script)
    run_rank = partial(
        run_as_rank,
        path,
        tuple(arguments),
        where,
        settings,
        steps=steps,
        module=module,
        allow_writes=allow_writes,
        stack=software,
    )
    if world is not None and not isinstance(rank, int):
        if not module:
            import_packages(path, where, settings)
        with others_asked(lambda each: run_rank(world=each), world):
            return run_ranks(lambda each: run_rank(world=each)[0], world, rank, jobs, progress)
    found, error = run_rank(world=world, progress=progress or (lambda _: None))
    if error is not None and not found.ran_out:
        causes = "".join(f"\n{each.text()}" for each in found.findings if each.code in CAUSES)
        raise ForwardError(f"{script} failed: {type(error).__name__}: {error}{causes}", found.trace) from error
    return found


def fit_script(
    script: str | os.PathLike[str],
    arguments: Iterable[str],
    *,
    vary: str,
    gpu: str | Iterable[str] | None = None,
    budget: str | int | None = None,
    margin: str | int = 0,
    steps: int = 3,
    config: AllocatorConfig | str | None = None,
    progress: Callable[[str], None] | None = None,
    found: Callable[[Finding], None] | None = None,
) -> Fit:
    """The largest value of a script's own argument that fits a GPU, by running the script with one after another.

    `script` runs as by `run`, with `arguments` as its command line, of which `vary` names one with a whole number:
    ``"batch-size"`` for ``--batch-size 8``, ``"train.batch_size"`` for ``train.batch_size=8``. `gpu`, `budget` and
    `margin` are as for `fit`, `config` as for `run`; `steps` training steps are made in each run. Where the platform
    forks, each run is a process of its own. `progress` and `found` are as for `fit`.

    Raises `InputError` where there is no such script or argument, or where it has no effect on the GPU's memory; and
    `ForwardError` where the script fails with the value that it is given.
    """
    from memsize.device.allocator_config import AllocatorConfig
    from memsize.device.budget import budgets
    from memsize.spec.script_command import VariedScript
    from memsize.spec.stack import Stack

    varied = VariedScript.of(os.fspath(script), tuple(arguments), vary)
    settings = AllocatorConfig.parse_optional(config)
    fraction = (settings or AllocatorConfig.of_environment(os.environ)).memory_fraction
    capacities = budgets(gpu, budget, margin, Stack.of(None), fraction)
    from memsize.analysis.fit.script_search import fit_script as fitted

    say, tell = progress or (lambda _: None), found or (lambda _: None)
    return fitted(varied, capacities, settings, steps=steps, progress=say, tell=tell)


def virtual_gpu(
    gpu: str | None = None,
    *,
    steps: int = 0,
    config: AllocatorConfig | str | None = None,
    allow_writes: bool = False,
    world: World | None = None,
) -> AbstractContextManager[VirtualGpu]:
    """Let the code in a ``with`` block have a GPU that isn't there, as `run` gives it to a script.

        with memsize.virtual_gpu("t4") as gpu:
            train(Net().cuda())
        gpu.run, gpu.trace

    The block ends after `steps` optimizer steps (0: at its own end). Modules that it moves to the GPU are back on the
    CPU, with their values, when it is over. With a `world`, such as ``World(8, rank=3)``, the block is that process of
    a distributed job. Raises `InputError` when one is open already, and for a process that is in a group already.
    """
    from memsize.analysis import program
    from memsize.device.allocator_config import AllocatorConfig
    from memsize.device.cards import card
    from memsize.records.gpu import DEFAULT_GPU

    where = card(gpu or DEFAULT_GPU)
    settings = AllocatorConfig.parse_optional(config)
    return program.virtual_gpu(where, settings, steps=steps, allow_writes=allow_writes, world=world)
