"""`memsize mcp`: the commands as tools of the Model Context Protocol, over stdin and stdout."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from memsize.cli.calls import Call, Limits, start_processes
from memsize.cli.command import command
from memsize.cli.tools import Tool, tools
from memsize.errors import InputError, MemsizeError, UnknownInputError, quoted
from memsize.processes.workers import cores
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
