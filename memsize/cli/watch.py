"""`memsize watch`: a job on a real GPU, beside what was predicted for it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import click

from memsize.cli.command import command
from memsize.cli.working import Progress, interrupts_raised, say
from memsize.errors import InputError
from memsize.spec.file_requests import WatchRequest

_ENDED = 3
"""Readings in a row without a process that was there: it has ended."""


@command(
    WatchRequest,
    answers=False,
    epilog="""\b
    Examples:
      memsize watch 12345
      memsize watch 12345 --run run.memsize
    """,
)
def watch(request: WatchRequest) -> None:
    """Watch the memory of the process PID on this machine's NVIDIA GPU until it ends, beside what a saved run predicts.

    It warns when the prediction needs more than is free, when the process takes more than predicted, and when it grows
    until the GPU is full. Without PID it is the only process on a GPU. It needs: pip install nvidia-ml-py.
    """
    from memsize.analysis.step import load, predicted_peak
    from memsize.analysis.watch import Nvml, Watch

    watched = Watch(None if request.run is None else predicted_peak(load(request.run)).estimate.device)
    nvml = Nvml()
    process = request.pid or _only(nvml.processes())
    warned: set[str] = set()
    start, missing = time.monotonic(), 0
    with interrupts_raised(), Progress(patience=0, tick=max(request.interval, 1)) as progress:
        try:
            while missing < _ENDED:
                reading = nvml.processes().get(process)
                if reading is None and watched.readings:
                    missing += 1
                elif reading is None:
                    _check_exists(process)
                    progress(f"waiting for process {process} to use a GPU")
                else:
                    missing = 0
                    watched.add(time.monotonic() - start, reading)
                    progress(watched.line())
                    for key, text in watched.warnings():
                        if key not in warned:
                            say(f"process {process}: {text}")
                        warned.add(key)
                time.sleep(request.interval)
        except KeyboardInterrupt:
            pass
    if watched.readings:
        click.echo(watched.summary())


def _only(processes: Mapping[int, object]) -> int:
    """The only process on a GPU; raises `InputError` where there is none, or several."""
    if len(processes) == 1:
        return next(iter(processes))
    listed = ", ".join(map(str, sorted(processes)))
    raise InputError(f"name a process by its PID: {f'on a GPU are {listed}' if listed else 'none uses a GPU yet'}")


def _check_exists(process: int) -> None:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        raise InputError(f"there is no process {process}") from None
    except PermissionError:  # somebody else's
        return
