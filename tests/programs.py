"""Programs on a virtual GPU without library workspaces: what is allocated is what the test allocates."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memsize import AllocatorConfig, ProgramRun, World
from memsize.analysis.program import program_run, run_program
from memsize.analysis.ranks import run_ranks as run_ranks
from memsize.device.cards import card
from memsize.ranks.peers import LonelyStore as LonelyStore
from memsize.virtual.gpu_tensors import is_stand_in as is_stand_in
from memsize.virtual.host_memory import HostMemory as HostMemory, pages_read as pages_read
from memsize.virtual.ledger.stream_order import AHEAD as AHEAD, StreamOrder as StreamOrder
from memsize.workloads.program import Program, Settings
from tests.models import Workspaces


def program(name: str = "t4", steps: int = 0, world: World | None = None) -> Program:
    """A program that has not begun."""
    return Program("test", Settings(card(name), AllocatorConfig(), steps, world=world), Workspaces())


@contextmanager
def gpu(name: str = "t4", steps: int = 0, world: World | None = None) -> Iterator[Program]:
    """A virtual GPU for the code of a test."""
    run = program(name, steps, world)
    with run.open():
        yield run


def record_of(run: Program, command: str = "test") -> ProgramRun:
    """The record of what a program showed."""
    return program_run(run, command, None)


def run_script(
    folder: Path, text: str, *arguments: str, progress: Callable[[str], None] = lambda _: None, **options: Any
) -> tuple[ProgramRun, BaseException | None]:
    """The record of a script that is written to `train.py` and run on a T4, with the error that ended it, if any."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(text), encoding="utf-8")
    return run_program(str(script), arguments, _on_a_t4(**options), progress=progress)


def run_module(name: str) -> ProgramRun:
    """The record of a module that is run on a T4, as with ``python -m``."""
    return run_program(name, (), _on_a_t4(), module=True)[0]


def _on_a_t4(**options: Any) -> Settings:
    return Settings(card("t4"), AllocatorConfig(), **options)
