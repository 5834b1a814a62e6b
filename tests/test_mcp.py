"""`memsize mcp`, spoken to by the client of the official SDK over stdin and stdout."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import memsize
from memsize.cli import run
from tests.conftest import ROOT

pytest.importorskip("mcp")

import anyio
import anyio.from_thread
from jsonschema import Draft202012Validator
from mcp import Client, MCPError, StdioServerParameters, stdio_client

NET = "from torch import nn\n\n\ndef net(width=4):\n    return nn.Linear(8, width)\n"
ENDLESS = """
import os, time
from pathlib import Path

def net():
    Path("process").write_text(str(os.getpid()))
    while True:
        time.sleep(0.01)
"""
GREEDY = "from torch import nn\n\n\ndef net():\n    return nn.Linear(8, 4 + 0 * len(bytearray(4 << 30)))\n"


class Agent:
    """A client and its server, which may read `folder`; calls are made from any thread, one or several at once."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        arguments = ["-m", "memsize", "mcp", str(folder), *options]
        environment = {"PYTHONPATH": str(ROOT), "MEMSIZE_CUDNN": "none", "OMP_NUM_THREADS": "1"}
        server = StdioServerParameters(command=sys.executable, args=arguments, env=environment)
        self._portal = anyio.from_thread.start_blocking_portal()
        self._client: Any = Client(stdio_client(server))

    @contextmanager
    def connected(self) -> Iterator[Agent]:
        """Start the server, and end it."""
        with self._portal as self.portal, self.portal.wrap_async_context_manager(self._client) as self.client:
            yield self

    def call(self, tool: str, **arguments: Any) -> tuple[str, bool]:
        """The text of an answer, and whether it is an error."""
        answer = self.portal.call(lambda: self.client.call_tool(tool, arguments))
        return answer.content[0].text, answer.is_error


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("outer") / "project"
    folder.mkdir()
    (folder / "net.py").write_text(NET)
    (folder / "endless.py").write_text(ENDLESS)
    with Agent(folder).connected() as agent:
        yield agent


def test_the_inputs_are_those_of_the_requests(agent: Agent) -> None:
    tools = {tool.name: tool for tool in agent.portal.call(agent.client.list_tools).tools}
    assert [*tools] == "report fit run timeline generate serve explain checkpoint gpus".split()
    for tool in tools.values():
        Draft202012Validator.check_schema(tool.input_schema)
    report, script = tools["report"].input_schema["properties"], tools["run"].input_schema
    assert report["batch_size"] == {"type": "integer", "description": "Samples per batch. Default: 1.", "minimum": 1}
    assert report["mode"]["enum"] == ["train", "eval"]
    assert script["required"] == ["script"] and "allow_writes" not in script["properties"]


def test_an_answer_is_the_commands_own_and_its_data_a_resource(
    agent: Agent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(agent.folder)
    command = "report net.py:net -i 8 -b 2 --arg width=6 -s fp32,fp16 -f agent".split()
    assert run(command) == 0
    arguments = {"input": ["8"], "batch_size": 2, "arguments": {"width": 6}, "scenarios": ["fp32", "fp16"]}
    answer = agent.portal.call(lambda: agent.client.call_tool("report", {"target": "net.py:net", **arguments}))
    text, link = answer.content
    assert text.text == capsys.readouterr().out and not answer.is_error
    assert link.uri in [resource.uri for resource in agent.portal.call(agent.client.list_resources).resources]
    (whole,) = agent.portal.call(agent.client.read_resource, link.uri).contents
    report = memsize.report("net.py:net", (8,), batch_size=2, arguments={"width": 6}, scenarios="fp32,fp16")
    assert json.loads(whole.text)["layers"] == json.loads(report.to_json())["layers"]


def test_the_answer_and_the_next_commands(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit on two GPUs says what does not fit, and leads to commands that run on the first of them."""
    monkeypatch.chdir(agent.folder)
    arguments = {"target": "net.py:net", "input": ["8"], "gpu": ["t4", "a100"], "batch_size": 2**40, "train": "sgd"}
    text, is_error = agent.call("fit", **arguments, scenarios="fp32")
    assert not is_error and "does not fit" in text.partition("Why")[0]
    commands = [shlex.split(line, comments=True) for line in text.partition("Next\n")[2].splitlines()]
    options = ["net.py:net", "--input=8", f"--batch-size={2**40}", "--scenario=fp32", "--train=sgd", "--gpu=t4"]
    assert [name for _, name, *_ in commands] == ["timeline", "report"]
    assert all(sorted(rest) == sorted(options) for _, _, *rest in commands)
    text, _ = agent.call("timeline", target="net.py:net", input=["8"])
    assert [line.split()[:2] for line in text.partition("Next\n")[2].splitlines()] == [
        ["memsize", name] for name in ("fit", "report")
    ]


def test_no_resource_of_that_name(agent: Agent) -> None:
    for address in ("memsize://answers/0", "memsize://answers/../1", "file:///etc/passwd"):
        with pytest.raises(MCPError, match="no answer"):
            agent.portal.call(agent.client.read_resource, address)


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("report", {"target": "../other.py:net", "input": ["8"]}),
        ("report", {"target": "{outer}/other.py:net", "input": ["8"]}),
        ("report", {"target": "link.py:net", "input": ["8"]}),
        ("report", {"target": "HEAD:../other.py:net", "input": ["8"]}),
        ("report", {"target": "~/other.py:net"}),
        ("report", {"target": "hf:../config.json"}),
        ("report", {"target": "net.py:net", "inputs": "../other.py:net"}),
        ("report", {"target": "net.py:net", "arguments": {"width": "/etc/passwd"}}),
        ("report", {"target": "os:system", "arguments": {"command": "touch came"}}),
        ("report", {"target": "click:edit"}),
        ("report", {"target": "builtins:exec"}),
        ("run", {"script": "../other.py"}),
        ("run", {"script": "timeit", "module": True}),
        ("checkpoint", {"path": "/etc/passwd"}),
        ("explain", {"snapshot": "net.py", "against": "../other.memsize"}),
    ],
)
def test_what_is_outside_the_folder(tool: str, arguments: dict[str, Any], agent: Agent) -> None:
    outer = agent.folder.parent
    (outer / "other.py").write_text(f"open({str(outer / 'came')!r}, 'w')\n{NET}")
    with suppress(FileExistsError):
        (agent.folder / "link.py").symlink_to(outer / "other.py")
    named = {key: value.format(outer=outer) if isinstance(value, str) else value for key, value in arguments.items()}
    text, failed = agent.call(tool, **named)
    assert failed and "outside" in text and str(agent.folder) in text and len(text.splitlines()) == 1
    assert not (outer / "came").exists() and not (agent.folder / "came").exists()


def test_an_error_that_links_to_a_page_is_no_path(agent: Agent) -> None:
    message = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 1.00 GiB is "
        "free. Of the allocated memory 20.00 GiB is allocated by PyTorch, and 2.50 GiB is reserved by PyTorch but "
        "unallocated. See (https://docs.pytorch.org/docs/stable/notes/cuda.html)"
    )
    text, failed = agent.call("explain", snapshot=message)
    assert not failed and text.startswith("error   GPU 0, of 24.0 GiB")


@pytest.mark.parametrize(
    ("tool", "arguments", "part"),
    [
        ("report", {"targt": "net.py"}, "no argument 'targt': did you mean target"),
        ("reprot", {}, "no tool 'reprot': did you mean report"),
        ("report", {"target": "net.py:net", "batch_size": 0}, "0 is not in the range x>=1"),
        ("report", {"target": "net.py:net", "batch_size": [1]}, "batch_size is '[1]'"),
        ("report", {"target": "net.py:net", "whole": "yes"}, "whole is 'yes': it should be true or false"),
        ("report", {"target": "net.py:net", "arguments": "width=6"}, "it should be a table"),
        ("run", {}, "missing argument 'PROGRAM'"),
        ("run", {"script": "net.py", "allow_writes": True}, "no argument 'allow_writes'"),
    ],
)
def test_what_cannot_be_meant(tool: str, arguments: dict[str, Any], part: str, agent: Agent) -> None:
    text, failed = agent.call(tool, **arguments)
    assert failed and part in text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(st.text(max_size=4), values, max_size=2),
    max_leaves=4,
)


@settings(max_examples=20)
@given(
    tool=st.sampled_from(["gpus", "checkpoint", "explain", "run"]),
    arguments=st.dictionaries(
        st.sampled_from(["pattern", "path", "snapshot", "device", "script", "arguments", "steps", "against"])
        | st.text(max_size=4),
        json_values,
        max_size=3,
    ),
)
def test_any_request_is_answered(tool: str, arguments: dict[str, Any], agent: Agent) -> None:
    text, failed = agent.call(tool, **arguments)
    assert text and "bug in memsize" not in text
    assert failed or tool == "gpus"


def test_ten_at_once(agent: Agent) -> None:
    futures = [
        agent.portal.start_task_soon(
            agent.client.call_tool,
            "report",
            {"target": "net.py:net", "input": ["8"], "arguments": {"width": width}, "scenarios": "fp32"},
        )
        for width in range(1, 11)
    ]
    answers = [future.result().content[0].text for future in futures]
    # 8 weights and a bias for each output.
    assert [f"{9 * width} parameters" in text for width, text in enumerate(answers, 1)] == [True] * 10


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _begun(folder: Path) -> int:
    """The process of an endless call, once it runs."""
    written, until = folder / "process", time.monotonic() + 100
    while not (written.exists() and written.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    process = int(written.read_text())
    assert _is_alive(process)
    return process


def _wait_until_gone(process: int) -> None:
    until = time.monotonic() + 100
    while _is_alive(process) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _is_alive(process)


def test_a_call_that_is_cancelled_ends_with_its_process(agent: Agent) -> None:
    future = agent.portal.start_task_soon(agent.client.call_tool, "report", {"target": "endless.py:net"})
    process = _begun(agent.folder)
    future.cancel()
    _wait_until_gone(process)
    assert "Tesla T4" in agent.call("gpus", pattern="t4")[0]


@pytest.mark.thorough
def test_a_call_that_takes_too_long_or_too_much(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    (tmp_path / "greedy.py").write_text(GREEDY)
    with Agent(tmp_path, "--timeout", "20", "--memory", "3GiB").connected() as agent:
        text, failed = agent.call("report", target="greedy.py:net", input=["8"])
        assert failed and "memory" in text.lower()
        text, failed = agent.call("report", target="endless.py:net")
        assert failed and text == "error: this took longer than 20 s: memsize mcp --timeout sets the limit"
        assert not _is_alive(int((tmp_path / "process").read_text()))


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="kills a process")
def test_a_call_ends_with_its_server(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    messages = [
        {"id": 1, "method": "initialize", "params": hello},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": "report", "arguments": {"target": "endless.py:net"}}},
    ]
    lines = "".join(json.dumps({"jsonrpc": "2.0", **message}) + "\n" for message in messages)
    with subprocess.Popen(
        [sys.executable, "-m", "memsize", "mcp", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as server:
        assert server.stdin is not None
        server.stdin.write(lines.encode())
        server.stdin.flush()
        process = _begun(tmp_path)
        server.kill()
    _wait_until_gone(process)


def test_options_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, part in ((["nowhere"], "nowhere is not a folder"), (["--timeout", "0"], "timeout")):
        assert run(["mcp", *arguments]) == 2
        assert part in capsys.readouterr().err
