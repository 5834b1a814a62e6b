"""Questions about a program: a script, or the code of a ``with`` block, on a GPU that isn't there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from memsize.api.keywords import takes
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.budget import budgets
from memsize.device.cards import card
from memsize.errors import ForwardError
from memsize.records.gpu import DEFAULT_GPU
from memsize.records.program import ProgramRun
from memsize.spec.file_requests import FitScriptRequest, RunRequest, VirtualGpuRequest
from memsize.spec.vary import VariedScript

if TYPE_CHECKING:
    from memsize.analysis.program import VirtualGpu
    from memsize.records.finding import Finding
    from memsize.records.fit import Fit
    from memsize.records.ranks import RankRuns
    from memsize.records.world import World
    from memsize.virtual.guards.child_processes import Settings


_STEPS = 3
"""How many steps are run again of a script that runs to its end."""


@takes(RunRequest)
def run(request: RunRequest, *, progress: Callable[[str], None] | None = None) -> ProgramRun | RankRuns:
    """Report what a script that was written for a GPU would do to one, from a run of it on a GPU that isn't there.

    `script` runs in this process with `arguments` as its command line, until its optimizer has made `steps` steps.
    Unless it is `training_only`, its epoch ends then, and it goes on to its first evaluation and checkpoint. What it
    computes on the GPU has no values, and numbers that it reads from there are stand-ins. Files that were there before
    are left alone unless `allow_writes` is set. Without an `allocator`, its settings are those of the environment when
    the script first uses it.

    `gpus` is for a script that ``torchrun`` starts once for each GPU: how many there are on all `nodes` together. It
    is run as process `rank` of them; ``"all"`` and ``"distinct"`` run several, each in a process of its own where the
    platform forks, and the answer is then a `RankRuns`. A script that runs out of memory is run again, in a process of
    its own where the platform forks, to learn what its steps need and which batch fits.

    Raises `InputError` where there is no such script or rank, and `ForwardError` when the script itself fails; of
    several ranks it says in the answer which failed.
    """
    answer, error = run_program(request, progress or (lambda _: None))
    if isinstance(answer, ProgramRun) and error is not None and not answer.ran_out:
        from memsize.analysis.findings.program import CAUSES

        causes = "".join(f"\n{finding.text()}" for finding in answer.findings if finding.code in CAUSES)
        why = f"{request.script} failed: {type(error).__name__}: {error}{causes}"
        raise ForwardError(why, answer.trace) from error
    return answer


def run_program(
    request: RunRequest, report_progress: Callable[[str], None], begin: Callable[[], None] = lambda: None
) -> tuple[ProgramRun | RankRuns, BaseException | None]:
    """Run a script, and return what ended it beside the answer; of several ranks the answer says that itself.

    `begin` is called when the request is known to be one that can be run.
    """
    gpu, rank = request.gpu, request.rank
    where = card(gpu.name or DEFAULT_GPU)
    allocator = AllocatorConfig.parse_optional(gpu.allocator, gpu.releases.release)
    world = request.world
    path, arguments = os.fspath(request.script), tuple(map(str, request.arguments))
    begin()
    from memsize.analysis.ranks import import_packages, others_asked, run_as_rank, run_ranks
    from memsize.virtual.guards.child_processes import Settings

    settings = Settings(
        where,
        allocator,
        request.steps,
        world,
        stack=gpu.releases,
        allowed=request.allow_writes,
        offline=request.offline,
        goes_on=not request.training_only,
        stands_in=request.checkpoint is not None,
    )
    if world is None:
        return _run_alone(request, settings, report_progress)
    if isinstance(rank, int):
        return run_as_rank(path, arguments, settings, module=request.module, progress=report_progress)
    if not request.module:
        import_packages(path, where, allocator)

    def run_rank(world: World) -> ProgramRun:
        return run_as_rank(path, arguments, settings._replace(world=world), module=request.module)[0]

    with others_asked(run_rank, world):
        return run_ranks(run_rank, world, rank, jobs=request.jobs, progress=report_progress), None


def _run_alone(
    request: RunRequest, settings: Settings, report_progress: Callable[[str], None]
) -> tuple[ProgramRun, BaseException | None]:
    """Run a script that is one process; one that runs out of memory once more, with as much as it needs."""
    from memsize.analysis.fit.script_search import UnboundedScript
    from memsize.analysis.fit.whole_step import with_whole_steps
    from memsize.analysis.program import run_program
    from memsize.virtual.program_code import whole_number_defaults
    from memsize.virtual.saved_weights import Files

    path, arguments, started = os.fspath(request.script), tuple(map(str, request.arguments)), time.monotonic()
    files, module = Files(settings.allowed), request.module
    with whole_number_defaults() as defaults:
        run, error = run_program(path, arguments, settings, module=module, files=files, progress=report_progress)
    if run.ran_out:
        again = settings._replace(steps=settings.steps or _STEPS, goes_on=False)
        script = UnboundedScript(path, again, module, files)
        run = with_whole_steps(run, script, arguments, defaults, started, report_progress)
    return run, error


@takes(FitScriptRequest)
def fit_script(
    request: FitScriptRequest,
    *,
    progress: Callable[[str], None] | None = None,
    found: Callable[[Finding], None] | None = None,
) -> Fit:
    """The largest value of a script's own argument that fits a GPU, by running the script with one after another.

    `script` runs as by `run`, with `arguments` as its command line, of which `vary` names one with a whole number:
    ``"batch-size"`` for ``--batch-size 8``, ``"train.batch_size"`` for ``train.batch_size=8``. Where the platform
    forks, each run is a process of its own. `found` is called with what a row says once it is known.

    Raises `InputError` where there is no such script or argument, or where it has no effect on the GPU's memory; and
    `ForwardError` where the script fails with the value that it is given.
    """
    script = VariedScript.of(os.fspath(request.script), tuple(map(str, request.arguments)), request.vary)
    gpu = request.gpu
    allocator = AllocatorConfig.parse_optional(gpu.allocator)
    fraction = (allocator or AllocatorConfig.of_environment(os.environ)).memory_fraction
    capacities = budgets(gpu.name, request.budget, request.margin, gpu.releases, fraction, request.beside)
    from memsize.analysis.fit.script_search import fit_script as search

    report_progress, show = progress or (lambda _: None), found or (lambda _: None)
    return search(script, capacities, allocator, steps=request.steps, progress=report_progress, tell=show)


@takes(VirtualGpuRequest)
def virtual_gpu(request: VirtualGpuRequest) -> AbstractContextManager[VirtualGpu]:
    """Let the code in a ``with`` block have a GPU that isn't there, as `run` gives it to a script.

        with memsize.virtual_gpu("t4") as gpu:
            train(Net().cuda())
        gpu.run, gpu.trace

    The block ends after `steps` optimizer steps (0: at its own end). Modules that it moves to the GPU are back on the
    CPU, with their values, when it is over. Raises `InputError` when one is open already, and for a process that is in
    a group already.
    """
    from memsize.analysis import program
    from memsize.virtual.guards.child_processes import Settings

    gpu = request.gpu
    allocator = AllocatorConfig.parse_optional(gpu.allocator, gpu.releases.release)
    where = card(gpu.name or DEFAULT_GPU)
    return program.virtual_gpu(
        Settings(where, allocator, request.steps, request.world, stack=gpu.releases, allowed=request.allow_writes)
    )
