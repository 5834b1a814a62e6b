"""Magics of a notebook: ``%%memsize`` runs a cell on a GPU that isn't there, ``%memsize`` a command."""

from __future__ import annotations

import linecache
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from types import TracebackType
from typing import Any

import click

from memsize.cli import run
from memsize.cli.click_options import parameters, request_of
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.cards import card
from memsize.errors import MemsizeError
from memsize.processes.user_code import CELLS, shown_as_python_would
from memsize.records.gpu import DEFAULT_GPU
from memsize.records.program import ProgramRun
from memsize.spec.file_requests import CellRequest

_COMMAND = click.Command(
    "%%memsize",
    params=parameters(CellRequest),
    callback=lambda **values: request_of(CellRequest, values),
    add_help_option=False,
)


def load_ipython_extension(shell: Any) -> None:
    """Make the magics known to IPython: ``%load_ext memsize`` calls this."""
    shell.register_magic_function(partial(_run_cell, shell), "cell", "memsize")
    shell.register_magic_function(_run_line, "line", "memsize")


def _run_line(line: str) -> None:
    """Run a command as a terminal does: ``%memsize fit model.py:Net --gpu t4``."""
    run(_words(line))


def _run_cell(shell: Any, line: str, cell: str) -> ProgramRun:
    """Run a cell's code on a virtual GPU, in the notebook's own namespace; what was found is the value of the cell.

    What the code itself raises is raised again, with its own traceback, below what was found before it.
    """
    __tracebackhide__ = True  # to IPython, which leaves this call out of what it shows of errors
    from IPython.display import display

    from memsize.analysis.program import VirtualGpu, virtual_gpu
    from memsize.virtual.guards.child_processes import Settings

    request = _parsed(line)
    where, allocator = card(request.gpu.name or DEFAULT_GPU), AllocatorConfig.parse_optional(request.gpu.allocator)
    name = f"In [{len(shell.user_ns['In']) - 1}]"
    # The magic is the first line of the cell, and IPython leaves out empty lines after it.
    left_out = sum(1 for _ in takewhile(lambda text: not text.strip(), cell.splitlines()))
    source = "\n" * (1 + left_out) + shell.transform_cell(cell)
    code = compile(source, name, "exec", dont_inherit=True)
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    settings = Settings(where, allocator, request.steps, allowed=request.allow_writes)
    region, running = virtual_gpu(settings, name), list[VirtualGpu]()
    try:
        with _cells_named(shell, name), region as gpu:
            running.append(gpu)
            exec(code, shell.user_ns)
    except Exception as error:
        if running and (running[0].trace.events or running[0].run.refused):
            display(running[0].run)
        shown_as_python_would(error)
        raise error.with_traceback(_in_cell(error.__traceback__, name)) from None
    return gpu.run


def _words(line: str) -> list[str]:
    """The words of a magic's line; IPython shows an unclosed quotation as one line."""
    from IPython.core.error import UsageError

    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _parsed(line: str) -> CellRequest:
    from IPython.core.error import UsageError

    words = _words(line)
    try:
        request: CellRequest = _COMMAND.main(words, prog_name="%%memsize", standalone_mode=False)
        card(request.gpu.name or DEFAULT_GPU)
    except (click.ClickException, MemsizeError, ValueError) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        raise UsageError(text) from None
    return request


@contextmanager
def _cells_named(shell: Any, name: str) -> Iterator[None]:
    """While open, lines in functions of earlier cells are named by their cells too."""
    files = getattr(shell.compile, "_filename_map", {})
    CELLS.update({file: f"In [{number}]" for file, number in files.items()} | {name: name})
    try:
        yield
    finally:
        CELLS.clear()


def _in_cell(trace: TracebackType | None, name: str) -> TracebackType | None:
    frame = trace
    while frame is not None and frame.tb_frame.f_code.co_filename != name:
        frame = frame.tb_next
    return frame or trace
