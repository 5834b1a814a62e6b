"""`memsize run`: a script that was written for a GPU, unchanged, on a GPU that isn't there."""

from __future__ import annotations

import contextlib
import sys
import traceback
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from memsize.cli.messages import say
from memsize.cli.options import (
    WITH_SNAPSHOT,
    allocator_option,
    gpu_option,
    jobs_option,
    output_options_for,
    stack_option,
)
from memsize.cli.output import Destination
from memsize.cli.progress import Progress
from memsize.cli.saved import is_saved
from memsize.cli.working import interrupts_raised, working
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.cards import card
from memsize.errors import InputError
from memsize.interrupt import INTERRUPTED
from memsize.records.gpu import DEFAULT_GPU, Card
from memsize.records.program import ProgramRun
from memsize.records.ranks import RankRuns
from memsize.spec.rank_choice import asked_world, parse_rank
from memsize.spec.stack import Stack

_STAND_INS = "memsize: nothing is computed on the GPU: losses and metrics that the program prints are stand-ins"
_LAUNCHERS = frozenset(("torchrun", "accelerate", "deepspeed", "mpirun"))
_LAUNCHING_MODULES = frozenset(("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"))


steps_option = click.option(
    "--steps",
    default=3,
    show_default=True,
    type=click.IntRange(min=0),
    metavar="N",
    help="Stop after N optimizer steps; 0 runs the program to its end.",
)

writes_option = click.option(
    "--allow-writes", is_flag=True, help="Let the program write to files that were there before."
)


@click.command(
    short_help="Run your own script on a GPU you don't have.",
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
@gpu_option
@stack_option
@allocator_option
@steps_option
@click.option("-m", "module", is_flag=True, help="PROGRAM is a module, as for python -m.")
@writes_option
@click.option("--gpus", type=int, metavar="N", help="Run it as one of N processes, one for each GPU of a job.")
@click.option("--nodes", default=1, show_default=True, metavar="N", help="Machines that the GPUs are spread over.")
@click.option("--one-process", is_flag=True, help="Start it once, with all N GPUs: for nn.DataParallel, device_map.")
@click.option(
    "--rank",
    default="0",
    show_default=True,
    metavar="RANK",
    help="Which of the processes (or GPUs): its number, all, or distinct: as many as it takes to know what each holds.",
)
@jobs_option
@output_options_for(WITH_SNAPSHOT)
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    gpu: str | None,
    stack: str | None,
    allocator: str | None,
    steps: int,
    module: bool,
    allow_writes: bool,
    gpus: int | None,
    nodes: int,
    one_process: bool,
    rank: str,
    jobs: int | None,
    program: str,
    arguments: tuple[str, ...],
    output: Destination,
) -> int:
    """Run PROGRAM, a Python script that trains or runs a model on a GPU, as on a machine that has one.

    Its tensors on the GPU take their place in a simulated memory and hold no values; everything else is the program's
    own. It is stopped after a few optimizer steps. PROGRAM may also be a saved run.
    """
    where, software, which = card(gpu or DEFAULT_GPU), Stack.of(stack), parse_rank(rank)
    config = AllocatorConfig.parse_optional(allocator, software.release)
    world = asked_world(gpus, nodes, which, one_process)
    if not module and is_saved(program):
        if arguments:
            raise InputError(f"{program} is a saved run, which takes no arguments: write {arguments[0]} before it")
        from memsize.analysis.saved_runs import load_kind

        _answer(load_kind(program, ProgramRun.kind, RankRuns.kind), output)
        return 0
    _check_started(program, module)
    options: dict[str, Any] = {"steps": steps, "module": module, "allow_writes": allow_writes, "stack": software}
    if isinstance(which, int):
        return _run_one(program, arguments, where, config, options | {"world": world}, output)
    from memsize import api

    with working() as progress:
        several = api.run(
            program,
            arguments,
            gpu=gpu,
            config=config,
            gpus=gpus or 1,
            nodes=nodes,
            rank=which,
            one_process=one_process,
            jobs=jobs,
            progress=progress,
            **options,
        )
    _answer(several, output)
    return 0 if all(group.run.failure is None for group in several.groups) else 1


def _run_one(
    program: str,
    arguments: tuple[str, ...],
    where: Card,
    config: AllocatorConfig | None,
    options: dict[str, Any],
    output: Destination,
) -> int:
    """Run the program in this process, report what it did, and return the status of the command."""
    say(_STAND_INS)

    # stdout is the program's, unless figures for a machine are to come out of it.
    own = contextlib.nullcontext() if output.file or output.format == "text" else contextlib.redirect_stdout(sys.stderr)
    with own:
        from memsize.analysis.ranks import run_as_rank

        with interrupts_raised(), Progress(beside=(sys.stdout, sys.stderr)) as progress:
            found, error = run_as_rank(program, arguments, where, config, progress=progress, **options)
    if isinstance(error, KeyboardInterrupt) and not found.trace.events:
        raise error
    if isinstance(error, InputError) and not found.steps:
        raise error
    if isinstance(error, SystemExit) and not found.trace.events:
        return _status(error)
    if error is not None:
        _show(error)
    _answer(found, output)
    return _status(error)


def _status(error: BaseException | None) -> int:
    """The exit status of a program that ended so; its own where it chose one."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 0 if error is None else 1


def _check_started(program: str, module: bool) -> None:
    """Raise `InputError` where PROGRAM is no script or module that trains, or only starts one in other processes."""
    if (program in _LAUNCHING_MODULES) if module else (Path(program).name in _LAUNCHERS):
        raise InputError(
            f"{program} starts processes, one for each GPU: give the script itself and how many, as in memsize run "
            "--gpus 8 train.py …"
        )
    if not module and not Path(program).is_file():
        raise InputError(f"no such script: {program} (-m runs a module)")
    if module and not _is_found(program.partition(".")[0]):
        raise InputError(f"no such module: {program} (without -m a script is run)")


def _is_found(module: str) -> bool:
    return (find_spec(module) or PathFinder.find_spec(module, [str(Path.cwd())])) is not None


def _answer(found: ProgramRun | RankRuns, output: Destination) -> None:
    output.keep(found)
    if output.format == "snapshot":
        from memsize.analysis.snapshot import pickled
        from memsize.device.allocator_config import config_of

        run = found.worst.run if isinstance(found, RankRuns) else found
        output.write(pickled(run.trace, config_of(run)))
    else:
        output.write(output.drawn(found))


def _show(error: BaseException) -> None:
    """The program's own traceback, from its first line on; nothing where it was asked to end."""
    from memsize.processes.user_code import shown_as_python_would

    if not isinstance(error, (SystemExit, KeyboardInterrupt)):
        shown_as_python_would(error)
        traceback.print_exception(error)
