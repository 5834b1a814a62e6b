"""Python processes that begin with torch and memsize imported: forked from one that has imported them.

A process takes seconds to import PyTorch, and milliseconds to be forked from one that has. `python tests/forked.py
SOCKET ARGUMENTS…` does what `python ARGUMENTS…` does, with a folder, an environment and standard files of its own, and
ends as that would. Tests of how a process starts, of signals and of what it imports start Python itself instead.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import types
import warnings
from contextlib import suppress
from typing import Any

_SIZE = struct.Struct("!I")
_OLD: list[Any] = []
_DEFAULT_FILTERS = len(warnings.filters)
"""How many Python has itself: they are behind those of modules that were imported."""


def serve(listener: socket.socket) -> dict[str, Any]:
    """Fork a process for each request, until stdin ends. Returns the request, in each of these processes."""
    import gc

    import torch

    from memsize.cli import run

    # What a report imports. It leaves nothing else behind, which tests/test_undisturbed.py checks.
    torch.set_num_threads(1)
    assert run(["report", "notebooks/model.py:Test", "--input", "3,64,64"]) == 0
    sys.stdout.flush()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        readable, _, _ = select.select([listener, 0], [], [])
        if 0 in readable:
            raise SystemExit
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return _fork_and_watch(connection)
        connection.close()


def _fork_and_watch(connection: socket.socket) -> dict[str, Any]:
    """Return the request in a process of its own, whose status is sent back. It ends where the other end is closed."""
    size, files, *_ = socket.recv_fds(connection, _SIZE.size, 3)
    with connection.makefile("rb") as stream:
        request: dict[str, Any] = json.loads(stream.read(*_SIZE.unpack(size)))
    process = os.fork()
    if process == 0:
        connection.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        return request
    for file in files:
        os.close(file)
    ended = threading.Event()
    end = lambda: connection.recv(1) or ended.is_set() or os.kill(process, signal.SIGKILL)  # noqa: E731
    threading.Thread(target=end, daemon=True).start()
    _, status = os.waitpid(process, 0)
    ended.set()
    connection.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))
    os._exit(0)


def be(request: dict[str, Any]) -> None:
    """Run a request's arguments, as `python` would that was started with them."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _open_standard_files()
    arguments = request["arguments"]
    # Filters of modules that were imported are before those of the command line, and those are before Python's own.
    filters = warnings.filters[-_DEFAULT_FILTERS:]
    del warnings.filters[-_DEFAULT_FILTERS:]
    while arguments[0] == "-W":
        sys.warnoptions.append(arguments[1])
        warnings.simplefilter(arguments[1], append=True)
        del arguments[:2]
    warnings.filters.extend(filters)
    sys.path[:2] = filter(None, request["environment"].get("PYTHONPATH", "").split(os.pathsep))
    how, what, *rest = arguments
    if how == "-m":
        sys.argv[:] = [what, *rest]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        assert how == "-c"
        sys.argv[:] = ["-c", *rest]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(main))


def _open_standard_files() -> None:
    # Those that were open are kept: without a user they would close the descriptors, which are others' by now.
    _OLD.extend((sys.stdin, sys.stdout, sys.stderr))
    encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding=encoding, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding=encoding, closefd=False)
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(
        os.fdopen(2, "wb", 0, closefd=False), encoding, "backslashreplace", write_through=True
    )


def ask(address: str, arguments: list[str]) -> int:
    """Have `arguments` run by a process of the server's, on the files of this one; returns its exit status."""
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    data = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [_SIZE.pack(len(data))], [0, 1, 2])
        connection.sendall(data)
        answer = connection.recv(4)
    if len(answer) < 4:
        raise SystemExit("the server that processes are forked from ended")
    status: int = struct.unpack("!i", answer)[0]
    if status < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        be(serve(socket.socket(fileno=int(sys.argv[2]))))
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
