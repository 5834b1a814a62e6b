"""A Python process that a program started: its files are guarded, and it has the GPU once it imports torch.

`start` is called before anything else of the process. Nothing here needs torch until then. The process is stopped
after as many optimizer steps as the program, and a rank that a launcher such as ``torchrun`` started is that rank.
What it took on the GPU is written for the process that started the program when it ends.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import shlex
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from memsize.errors import InputError, in_one_line
from memsize.processes.patches import Execute, ImportHook
from memsize.records.world import World
from memsize.virtual.guards.child_processes import NO_GPU_USE, ChildProcesses, Settings, is_launcher
from memsize.virtual.guards.file_guard import FileGuard, NetworkGuard

if TYPE_CHECKING:
    from memsize.workloads.program import Program


def start(folder: str) -> None:
    """Guard the files of this process, and let it have the GPU when it imports torch; `folder` is that of the run,
    which may have ended since the process began.
    """
    written = Path(folder) / "settings.pickle"
    if not written.exists():
        return
    settings: Settings = pickle.loads(written.read_bytes())
    regions = ExitStack()
    guard = FileGuard(settings.allowed)
    processes = ChildProcesses(guard, settings)
    regions.enter_context(guard.guarded())
    if settings.offline:
        regions.enter_context(NetworkGuard().guarded())
    regions.enter_context(processes.open(Path(folder)))
    process = os.getpid()
    programs: list[Program] = []

    def simulate() -> None:
        from memsize.loading.library_imports import torchvision_importable

        regions.enter_context(torchvision_importable())
        if any(map(is_launcher, sys.orig_argv[1:3])):  # the program, or -m and the module
            return
        from memsize.analysis.program import program_on
        from memsize.virtual.saved_weights import Files

        files = Files(guard.allowed)
        files.new, files.others_new = guard.new, guard.others_new
        own = settings._replace(world=_world() or settings.world)
        program = program_on(_command(), own, files, processes)
        regions.enter_context(program.open())
        programs.append(program)

    def end() -> None:
        if os.getpid() == process:  # not in one that it forked
            result = _result(programs)
            processes.announce()
            regions.close()
            if result is not None:
                processes.report(result)

    def execute(original: Execute, module: ModuleType) -> None:
        sys.meta_path.remove(hook)
        original(module)
        simulate()

    atexit.register(end)
    hook = ImportHook("torch".__eq__, execute)
    sys.meta_path.insert(0, hook)


_LONGEST: Final = 200
"""Characters of an error, of which a launcher's lists all of its processes."""


def _command() -> str:
    """The command of this process, or its name where multiprocessing started it."""
    if "--multiprocessing-fork" in sys.orig_argv:
        return multiprocessing.current_process().name
    return shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]])


def _world() -> World | None:
    """The job that a launcher put this process into, by the variables that it sets; None where it was started alone."""
    size, rank, local = (os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"))
    if not (size.isdigit() and rank.isdigit()):
        return None
    try:
        return World(int(size), int(rank), nodes=int(size) // int(local) if local.isdigit() and int(local) else 1)
    except InputError:
        return None


def _result(programs: list[Program]) -> dict[str, Any] | None:
    """Return the process's peak on the GPU, and the error that ended it, as data; None where there is neither."""
    error: BaseException | None = getattr(sys, "last_value", None)
    failed = {"failure": None if error is None else textwrap.shorten(in_one_line(error), _LONGEST, placeholder=" …")}
    program = next((program for program in programs if program.trace().events), None)
    if program is None:
        return None if error is None else {**NO_GPU_USE, "command": _command(), **failed}
    from memsize.device.gpu_estimate import estimate_gpu

    peak = estimate_gpu(program.trace(), program.card, config=program.memory.config)
    return {
        "command": program.name,
        "rank": None if program.world is None else program.world.rank,
        "steps": program.steps.done,
        "reserved": peak.reserved,
        "low": peak.device.low,
        "high": peak.device.high,
        "ran_out": bool(program.refused),
        **failed,
    }
