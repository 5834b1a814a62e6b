"""Questions about a program: a script, or the code of a ``with`` block, on a GPU that isn't there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memsize.analysis.program import VirtualGpu
    from memsize.device.config import AllocatorConfig
    from memsize.records.fit import Fit
    from memsize.records.program import ProgramRun


def run(
    script: str | os.PathLike[str],
    arguments: Iterable[str] = (),
    *,
    gpu: str | None = None,
    steps: int = 3,
    module: bool = False,
    config: AllocatorConfig | str | None = None,
    allow_writes: bool = False,
) -> ProgramRun:
    """What a script that was written for a GPU would do to one, from a run of it on a GPU that isn't there.

    `script` runs in this process with `arguments` as its command line (with `module`, the module of that name, as
    ``python -m`` runs it), until its optimizer has made `steps` steps; 0 runs it to its end. What it computes on the
    GPU has no values, and numbers that it reads from there are stand-ins. Files that were there before are left alone
    unless `allow_writes` is set. `gpu` and `config` are as for `trace`.

    Raises `InputError` where there is no such script, and `ForwardError` when the script itself fails.
    """
    from memsize.analysis.program import run_program
    from memsize.device.cards import card
    from memsize.device.config import AllocatorConfig
    from memsize.errors import ForwardError
    from memsize.records.gpu import DEFAULT_GPU

    where = card(gpu or DEFAULT_GPU)
    found, error = run_program(
        os.fspath(script),
        tuple(arguments),
        where,
        AllocatorConfig.of(config),
        steps=steps,
        module=module,
        allow_writes=allow_writes,
    )
    if error is not None and not found.refused:
        raise ForwardError(f"{script} failed: {type(error).__name__}: {error}", found.trace) from error
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
) -> Fit:
    """The largest value of a script's own argument that fits a GPU, by running the script with one after another.

    `script` runs as by `run`, with `arguments` as its command line, of which `vary` names one with a whole number:
    ``"batch-size"`` for ``--batch-size 8``, ``"train.batch_size"`` for ``train.batch_size=8``. `gpu`, `budget` and
    `margin` are as for `fit`, `config` as for `trace`; `steps` training steps are made in each run. Where the platform
    forks, each run is a process of its own.

    Raises `InputError` where there is no such script or argument, or where it has no effect on the GPU's memory; and
    `ForwardError` where the script fails with the value that it is given.
    """
    from memsize.device.budget import budgets
    from memsize.device.config import AllocatorConfig
    from memsize.spec.script import VariedScript
    from memsize.spec.stack import Stack

    varied = VariedScript.of(os.fspath(script), tuple(arguments), vary)
    settings = AllocatorConfig.of(config)
    capacities = budgets(gpu, budget, margin, Stack.of(None), settings.memory_fraction)
    from memsize.analysis.fit.script import fit_script as fitted

    return fitted(varied, capacities, settings, steps=steps, say=progress or (lambda _: None))


def virtual_gpu(
    gpu: str | None = None,
    *,
    steps: int = 0,
    config: AllocatorConfig | str | None = None,
    allow_writes: bool = False,
) -> AbstractContextManager[VirtualGpu]:
    """Let the code in a ``with`` block have a GPU that isn't there, as `run` gives it to a script.

        with memsize.virtual_gpu("t4") as gpu:
            train(Net().cuda())
        gpu.run, gpu.trace

    The block ends after `steps` optimizer steps (0: at its own end). Modules that it moves to the GPU are back on the
    CPU, with their values, when it is over. Raises `InputError` when one is open already.
    """
    from memsize.analysis import program
    from memsize.device.cards import card
    from memsize.device.config import AllocatorConfig
    from memsize.records.gpu import DEFAULT_GPU

    where = card(gpu or DEFAULT_GPU)
    settings = AllocatorConfig.of(config)
    return program.virtual_gpu(where, settings, steps=steps, allow_writes=allow_writes)
