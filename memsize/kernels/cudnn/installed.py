"""The releases of cuDNN on this machine, and the one that answers for a software stack."""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any, Final

from memsize.kernels.cudnn.backend import CudnnError
from memsize.kernels.cudnn.handle import HANDLED, HandleLibrary
from memsize.kernels.cudnn.plans import Convolution, Library, Plan, is_release

_FILE: Final = "libcudnn.so.9"
_PACKAGES: Final = ("nvidia/cudnn", "torch")
"""Packages that contain it: NVIDIA's own, and builds of PyTorch that bundle it."""
_INSIDE: Final = ("", "lib/", "nvidia/cudnn/lib/", "*/lib/", "*/nvidia/cudnn/lib/")
"""Where a folder of `MEMSIZE_CUDNN` may have it: NVIDIA's archives, a target of pip, or several of either."""
_VERSION: Final = re.compile(r"#define CUDNN_(?:MAJOR|MINOR|PATCHLEVEL) (\d+)")


_START: Final = """\
import runpy, sys
sys.path[:] = sys.argv.pop().split({!r})
runpy.run_module({!r}, run_name="__main__")
"""


class SeparateLibrary:
    """A libcudnn in a process of its own: two releases cannot be loaded into one, since their parts have equal names.

    The process is isolated, so that no program that is simulated passes its GPU on to it. Raises `CudnnError` where the
    library cannot be loaded or is too old.
    """

    def __init__(self, path: str) -> None:
        start, paths = _START.format(os.pathsep, __spec__.name), os.pathsep.join(entry for entry in sys.path if entry)
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        command = [sys.executable, "-I", "-c", start, path, paths]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True)
        atexit.register(self.close)
        try:
            self._release = self._read()[0]
        except CudnnError:
            self.close()
            raise

    def __str__(self) -> str:
        return str(self._release)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._process.communicate()

    def plan(self, convolution: Convolution, capability: tuple[int, int]) -> Plan | None:
        """As `Library.plan`."""
        return next(iter(self._ask("plan", convolution, capability)), None)

    def plans(self, convolution: Convolution, capability: tuple[int, int]) -> tuple[Plan, ...]:
        """As `Library.plans`."""
        return self._ask("plans", convolution, capability)

    def _ask(self, name: str, convolution: Convolution, capability: tuple[int, int]) -> tuple[Plan, ...]:
        assert self._process.stdin is not None
        try:
            print(json.dumps((name, str(convolution), capability)), file=self._process.stdin, flush=True)
        except OSError as error:
            raise CudnnError(f"the process of cuDNN ended: {error}") from error
        return tuple(Plan(workspace, frozenset(notes)) for workspace, notes in self._read())

    def _read(self) -> Any:
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline() or '{"error": "the process of cuDNN ended"}')
        if isinstance(answer, dict):
            raise CudnnError(answer["error"])
        return answer


def serve(path: str, questions: IO[str], answers: IO[str]) -> None:
    """Answer a line of JSON with a line of JSON, as `SeparateLibrary` asks."""

    def answer(value: object) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        library = _loadable(path)
    except (OSError, AttributeError, CudnnError) as error:
        return answer({"error": str(error)})
    answer([str(library)])
    for line in questions:
        name, convolution, capability = json.loads(line)
        question = Convolution.parse(convolution), tuple(capability)
        try:
            plans = library.plans(*question) if name == "plans" else filter(None, [library.plan(*question)])
            answer([(plan.workspace, sorted(plan.notes)) for plan in plans])
        except CudnnError as error:
            answer({"error": str(error)})


@cache
def installed(wanted: str | None = None) -> Library | SeparateLibrary | None:
    """The cuDNN of this machine that is `wanted`, else another one; None where there is none that can be asked.

    `MEMSIZE_CUDNN` names files or folders, parted like those of `PATH`, or is ``none``.
    """
    releases = {path: _release(path) for path in _candidates()}
    newest = sorted(releases, key=lambda path: _number(releases[path]), reverse=True)
    for path in sorted(newest, key=lambda path: not is_release(releases[path] or "", wanted)):
        library = _opened(path)
        if library is not None:
            return library
    return None


def _loadable(path: str) -> Library:
    """The library, in whichever way it can be asked. Raises as `Library` does."""
    try:
        return Library(path)
    except CudnnError:
        return HandleLibrary(path)


_loaded: list[str] = []
"""The library of this process, once there is one."""


@cache
def _opened(path: str) -> Library | SeparateLibrary | None:
    try:
        if _loaded or _number(_release(path)) in HANDLED:
            return SeparateLibrary(path)
        library = Library(path)
    except (OSError, AttributeError, CudnnError):
        return None
    _loaded.append(path)
    return library


def _candidates() -> Iterator[str]:
    named = os.environ.get("MEMSIZE_CUDNN")
    if named is not None:
        for entry in filter(None, named.split(os.pathsep)) if named.lower() != "none" else ():
            yield from _within(Path(entry)) if Path(entry).is_dir() else (entry,)
        return
    packages = (Path(entry) / folder / "lib" / _FILE for entry in sys.path if entry for folder in _PACKAGES)
    yield from (str(path) for path in packages if path.exists())
    yield _FILE  # of the system, or one that PyTorch has loaded


def _within(folder: Path) -> Iterator[str]:
    yield from (str(path) for inside in _INSIDE for path in sorted(folder.glob(inside + _FILE)))


def _release(path: str) -> str | None:
    """The release that the header beside a library names; None without one."""
    header = Path(path).parent.parent / "include" / "cudnn_version.h"
    try:
        return ".".join(_VERSION.findall(header.read_text())) or None
    except OSError:
        return None


def _number(release: str | None) -> int:
    """A release as cuDNN counts: 91501 for 9.15.1, 0 for one that is not known."""
    major, minor, patch = map(int, (release or "0.0.0").split("."))
    return 10_000 * major + 100 * minor + patch


if __name__ == "__main__":
    serve(sys.argv[1], sys.stdin, sys.stdout)
