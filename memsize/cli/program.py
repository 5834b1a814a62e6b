"""`memsize run`: a script that was written for a GPU, unchanged, on a GPU that isn't there."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import traceback
from dataclasses import replace
from difflib import get_close_matches
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import click

from memsize.cli.command import WITH_SNAPSHOT, command, is_saved, misplaced
from memsize.cli.output import Destination
from memsize.cli.working import Progress, interrupts_raised, say, working
from memsize.errors import InputError
from memsize.interrupt import INTERRUPTED
from memsize.records.program import ProgramRun
from memsize.records.ranks import RankRuns
from memsize.spec.file_requests import RunRequest
from memsize.virtual.guards.child_processes import is_launcher

_USAGE_ERROR = 2
"""The exit status of argparse and click where they refuse the arguments."""
_PLACEHOLDERS = "memsize: no GPU is used: losses and metrics that the script prints are placeholders"


@command(
    RunRequest,
    formats=WITH_SNAPSHOT,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="""\b
    Examples:
      memsize run train.py --epochs 1 --batch-size 64
      memsize run --gpu t4 --steps 5 train.py --batch-size 64
      memsize run --gpu h100 -o step.html -m mypackage.train --config c.yaml
      memsize run --gpus 8 train_fsdp.py                   as torchrun --nproc-per-node 8 starts it, rank 0
      memsize run --gpus 32 --nodes 4 --rank distinct train_fsdp.py
      memsize run --gpus 4 --one-process --rank all train_dp.py

    \b
    Options of memsize come before the script, the script's own after it. A .pickle is a PyTorch memory snapshot, which
    https://pytorch.org/memory_viz displays.
    """,
)
def run(request: RunRequest, output: Destination) -> int:
    """Run PROGRAM, a Python script that trains or runs a model on a GPU, as on a machine that has one.

    Tensors on the GPU occupy simulated memory and hold no values; everything else runs as usual. The program is stopped
    after a few optimizer steps. PROGRAM may also be a saved run.
    """
    program = str(request.script)
    if not request.module and not Path(program).exists() and (installed := _command(program)):
        request, program = replace(request, script=installed), installed
    if not request.module and is_saved(program):
        if arguments := tuple(request.arguments):
            raise InputError(f"{program} is a saved run, which takes no arguments: write {arguments[0]} before it")
        from memsize.analysis.step import load_kind

        _answer(load_kind(program, ProgramRun.kind), output)
        return 0
    _check_started(program, request.module)
    if isinstance(request.rank, int):
        return _run_one(request, output)
    with working() as progress:
        from memsize import api

        ranks = api.run(request, progress=progress)
    assert isinstance(ranks, RankRuns)
    _answer(ranks, output)
    return 0 if all(group.run.failure is None for group in ranks.groups) else 1


def _run_one(request: RunRequest, output: Destination) -> int:
    """Run the program in this process, report what it did, and return the status of the command."""
    # stdout is the program's, unless figures for a machine are to come out of it.
    own = contextlib.nullcontext() if output.file or output.format == "text" else contextlib.redirect_stdout(sys.stderr)
    with own:
        from memsize import api

        with interrupts_raised(), Progress(beside=(sys.stdout, sys.stderr)) as progress:
            answer, error = api.run_program(request, progress, lambda: say(_PLACEHOLDERS))
    assert isinstance(answer, ProgramRun)
    if isinstance(error, KeyboardInterrupt) and not answer.trace.events:
        raise error
    if isinstance(error, InputError) and not answer.steps:
        raise error
    if isinstance(error, SystemExit) and not answer.trace.events:
        if error.code == _USAGE_ERROR:
            _warn_of_options(request, misplaced(request.arguments))
        return _status(error)
    if error is not None and not isinstance(error, SystemExit | KeyboardInterrupt):
        from memsize.processes.user_code import shown_as_python_would

        shown_as_python_would(error)
        traceback.print_exception(error)  # the program's own, from its first line on
    _answer(answer, output)
    if not request.module:
        source = Path(request.script).read_text(errors="replace")
        _warn_of_options(request, [name for name in misplaced(request.arguments) if name.strip("-") not in source])
    return _status(error)


def _warn_of_options(request: RunRequest, options: list[str]) -> None:
    """Say that the script got `options`, if there are any, which memsize has as well."""
    if options:
        say(
            f"memsize: the script got {', '.join(options)}. If meant for memsize, give options before the script: "
            f"memsize run {options[0]} … {request.script} …"
        )


def _status(error: BaseException | None) -> int:
    """The exit status after `error`; the program's own where it chose one."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 0 if error is None else 1


def _check_started(program: str, module: bool) -> None:
    """Raise `InputError` where PROGRAM is no script or module that trains, or only starts one in other processes."""
    if is_launcher(program):
        raise InputError(
            f"{program} starts processes, one for each GPU: give the script itself and how many, as in memsize run "
            "--gpus 8 train.py …"
        )
    if not module and not Path(program).is_file():
        is_model = Path(program.partition(":")[0]).is_file()
        hint = f"memsize timeline {program} trains a model" if is_model else "-m runs a module"
        if program.startswith("-"):
            options = [option for parameter in click.get_current_context().command.params for option in parameter.opts]
            near = get_close_matches(program.partition("=")[0], options, n=1, cutoff=0.75)
            hint = f"did you mean {near[0]}?" if near else "an option that memsize run does not have"
        hint = "give the script itself, without python" if re.fullmatch(r"(.*/)?python[\d.]*", program) else hint
        raise InputError(f"no such script: {program} ({hint})")
    package = program.partition(".")[0]
    if module and not (find_spec(package) or PathFinder.find_spec(package, [str(Path.cwd())])):
        raise InputError(f"no such module: {program} (without -m a script is run)")


def _command(name: str) -> str | None:
    """The script of a command that a package installs, such as ``trl``; None where no script of Python is called so."""
    path = shutil.which(name)
    if path is None:
        return None
    with open(path, "rb") as file:
        first = file.readline(200)
    return path if first.startswith(b"#!") and b"python" in first else None


def _answer(answer: ProgramRun | RankRuns, output: Destination) -> None:
    output.keep(answer)
    if output.format == "snapshot":
        from memsize.analysis.timeline import pickled
        from memsize.device.allocator_config import config_of

        run = answer.worst.run if isinstance(answer, RankRuns) else answer
        output.write(pickled(run.trace, config_of(run)))
    else:
        output.write(output.drawn(answer))
