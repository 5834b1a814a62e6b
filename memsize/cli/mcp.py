"""`memsize mcp`: the commands as tools of the Model Context Protocol, over stdin and stdout.

A call of a tool is one command in a process of its own, which can be limited and ended. Where processes can be forked
they come from one that has imported PyTorch already, so that no call waits for that.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from memsize.cli.command import command
from memsize.cli.tools import Tool, tools
from memsize.cli.working import stdout_to_stderr
from memsize.errors import InputError, MemsizeError, UnknownInputError, quoted
from memsize.processes.workers import can_fork, cores
from memsize.spec.file_requests import McpRequest
from memsize.units import parse_bytes
from memsize.version import VERSION

_TICK: Final = 0.02
_MOST_ANSWERS: Final = 100
"""Answers whose data is kept to be read, the newest."""
_INSTRUCTIONS: Final = """\
memsize predicts what PyTorch models and scripts hold in a GPU's memory, without a GPU. Start with `report` for what
each byte is for, `fit` for the largest batch that fits, `run` for a training script as it is. Answers are short; all
figures of an answer are in the resource that it links to, as JSON."""


@command(
    McpRequest,
    answers=False,
    epilog="""\b
    Examples:
      memsize mcp
      memsize mcp ~/project --timeout 600 --memory 32GiB
    """,
)
def mcp(request: McpRequest) -> None:
    """Serve memsize's commands to an agent, as tools of the Model Context Protocol, over stdin and stdout.

    They read and run files of FOLDER alone, and overwrite none. Each call is a process of its own, which ends when the
    agent cancels it. It needs: pip install 'memsize[mcp]'.
    """
    folder = Path(request.folder).resolve()
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder")
    memory = request.memory if isinstance(request.memory, int) else parse_bytes(request.memory)
    if find_spec("mcp") is None:
        raise InputError("memsize mcp needs the package mcp: pip install 'memsize[mcp]'")
    os.chdir(folder)
    context = start_processes()  # first, to import PyTorch while this process imports the SDK
    import anyio

    with tempfile.TemporaryDirectory(prefix="memsize-") as scratch:
        anyio.run(_ToolServer(context, Limits(folder, request.timeout, memory), Path(scratch)).serve)


class _ToolServer:
    """Answers the messages of one client. `scratch` has a folder for each call."""

    def __init__(self, context: Any, limits: Limits, scratch: Path) -> None:
        self._context = context
        self._limits = limits
        self._scratch = scratch
        self._tools = tools()
        self._calls = 0
        self._answers: dict[str, Path] = {}
        """The saved answers by the addresses of their resources."""

    async def serve(self) -> None:
        """Answer until stdin ends."""
        from anyio import CapacityLimiter
        from mcp.server.lowlevel import Server
        from mcp.server.stdio import stdio_server

        self._side_by_side = CapacityLimiter(cores())
        server: Any = Server(
            "memsize",
            version=VERSION,
            instructions=_INSTRUCTIONS,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._list_resources,
            on_read_resource=self._read_resource,
        )
        async with stdio_server() as (incoming, outgoing):
            await server.run(incoming, outgoing, server.create_initialization_options())

    async def _list_tools(self, context: Any, _: Any) -> Any:
        from mcp import types

        hints = types.ToolAnnotations(read_only_hint=True, open_world_hint=False)
        return types.ListToolsResult(
            tools=[
                types.Tool(name=name, description=tool.description, input_schema=tool.schema, annotations=hints)
                for name, tool in self._tools.items()
            ]
        )

    async def _call_tool(self, context: Any, request: Any) -> Any:
        from mcp import types

        try:
            if request.name not in self._tools:
                raise UnknownInputError("tool", request.name, self._tools)
            text, failed, saved = await self._answer(context, self._tools[request.name], request.arguments or {})
        except MemsizeError as error:
            text, failed, saved = f"error: {error}", True, None
        content: list[Any] = [types.TextContent(text=text)]
        if saved is not None:
            content.append(self._resource(saved))
        return types.CallToolResult(content=content, is_error=failed)

    async def _answer(self, context: Any, tool: Tool, values: dict[str, Any]) -> tuple[str, bool, str | None]:
        """The answer of a tool, whether it failed, and the address of its resource, if it has one."""
        from memsize.cli import run

        tool.check_inside(values, self._limits.folder)
        self._calls += 1
        scratch = self._scratch / str(self._calls)
        saved = scratch / "answer.memsize"
        text, failed = await self._output_of(run, tool.command_line(values, saved), scratch, context)
        if not saved.is_file():
            return text, failed, None
        address = f"memsize://answers/{self._calls}"
        self._answers[address] = saved
        if len(self._answers) > _MOST_ANSWERS:
            self._answers.pop(next(iter(self._answers))).unlink()
        return text, failed, address

    async def _output_of(self, run: Any, arguments: Any, scratch: Path, context: Any) -> tuple[str, bool]:
        """The output of a call, and whether it failed; raises `InputError` where it takes too long."""
        from anyio import move_on_after, sleep

        scratch.mkdir()
        call = Call(self._context, run, arguments, scratch, self._limits)
        async with self._side_by_side, self._started(call):
            start = time.monotonic()
            with move_on_after(self._limits.seconds):
                while call.is_running:
                    await sleep(_TICK)
                    for line in call.progress():
                        await context.session.report_progress(time.monotonic() - start, message=line)
                return call.result()
        raise InputError(f"this took longer than {self._limits.seconds:g} s: memsize mcp --timeout sets the limit")

    @asynccontextmanager
    async def _started(self, call: Call) -> AsyncIterator[None]:
        """Start a call; it is over in the end, whatever ends it."""
        from anyio import CancelScope, to_thread

        try:
            await to_thread.run_sync(call.start)
            yield
        finally:
            with CancelScope(shield=True):
                await to_thread.run_sync(call.end)

    def _resource(self, address: str) -> Any:
        from mcp import types

        description = "All data of the answer, as JSON."
        return types.ResourceLink(uri=address, name=address, description=description, mime_type="application/json")

    async def _list_resources(self, context: Any, _: Any) -> Any:
        from mcp import types

        return types.ListResourcesResult(resources=[self._resource(address) for address in self._answers])

    async def _read_resource(self, context: Any, request: Any) -> Any:
        from mcp import MCPError, types

        address = str(request.uri)
        if address not in self._answers:
            raise MCPError(types.INVALID_PARAMS, f"no answer {quoted(address)}")
        self._calls += 1
        scratch = self._scratch / str(self._calls)
        text, failed = await self._output_of(_print_json, self._answers[address], scratch, context)
        if failed:
            raise MCPError(types.INTERNAL_ERROR, text)
        contents = types.TextResourceContents(uri=address, mime_type="application/json", text=text)
        return types.ReadResourceResult(contents=[contents])


def _print_json(saved: Path) -> int:
    from memsize import load
    from memsize.render import render

    print(render(load(saved), "json"), end="")
    return 0


_MOST_LINES: Final = 20
"""Lines of stderr that an error shows: the end of a traceback."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The folder that calls run in, and what each may take: seconds, and bytes for every process."""

    folder: Path
    seconds: float
    memory: int


def start_processes() -> BaseContext:
    """The source of processes for calls. Where they are forked, the one that they come from starts now."""
    if not can_fork():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.preload"])
    with stdout_to_stderr():  # what imports print is no message of the protocol
        forkserver.ensure_running()
    return context


class Call:
    """One command in a process of its own: `run` is a function of `arguments` that prints, and returns a status.

    Its files are in `scratch`: what it prints, and its messages.
    """

    def __init__(self, context: Any, run: Callable[[Any], int], arguments: Any, scratch: Path, limits: Limits) -> None:
        self._files = scratch / "stdout", scratch / "stderr"
        self._read = 0
        for file in self._files:
            file.touch()
        self._process: BaseProcess = context.Process(target=_serve, args=(run, arguments, self._files, limits))

    def start(self) -> None:
        """Start the process; waits until there is one to fork from."""
        self._process.start()

    @property
    def is_running(self) -> bool:
        """Tell whether the process has not ended yet."""
        return self._process.is_alive()

    def progress(self) -> list[str]:
        """The lines on what it does that are new since the last time."""
        with self._files[1].open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        lines = whole.decode(errors="replace").splitlines()
        return [line.removeprefix("memsize: ") for line in lines if line.startswith("memsize: ")]

    def result(self) -> tuple[str, bool]:
        """The output, with the end of its messages if it failed, and whether it did."""
        text = self._files[0].read_text(encoding="utf-8", errors="replace")
        status = self._process.exitcode
        if not status:
            return text, False
        messages = self._files[1].read_text(encoding="utf-8", errors="replace").splitlines()
        if status < 0:
            messages.append(f"error: the process was ended by {signal.Signals(-status).name}")
        return "\n".join((*text.splitlines(), *messages[-_MOST_LINES:])), True

    def end(self) -> None:
        """Kill the process, and those that it started."""
        if self._process.pid is not None:
            with contextlib.suppress(OSError, AttributeError):  # it has ended already; Windows has no groups
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()


def _serve(run: Callable[[Any], int], arguments: Any, files: Sequence[Path], limits: Limits) -> None:
    """The process of a call, from its first line on."""
    gc.freeze()  # a collection would copy every page of what was imported
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    threading.Thread(target=_end_with_server, daemon=True).start()
    for descriptor, (path, flags) in enumerate(
        ((os.devnull, os.O_RDONLY), *((str(file), os.O_WRONLY | os.O_APPEND) for file in files))
    ):
        opened = os.open(path, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(limits.folder)
    _limit_memory(limits.memory)
    sys.exit(run(arguments))


def _end_with_server() -> None:
    """End this process, and those that it started, when the server has ended, however it did."""
    server = multiprocessing.parent_process()
    if server is not None:
        server.join()
    if hasattr(os, "killpg"):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _limit_memory(limit: int) -> None:
    """Let this process, and each that it starts, allocate at most `limit` bytes."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has none; a lower one may be set already
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
