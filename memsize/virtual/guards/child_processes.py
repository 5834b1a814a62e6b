"""Processes that a program starts: they meet the same GPU, and leave files that were there before as they are.

A process that runs Python imports a ``sitecustomize`` module by way of ``PYTHONPATH``. It guards the files and lets the
process have the GPU once it imports torch; the results of its run on the GPU are written for the program. Any other
process may change files only in folders that the run has made (`memsize.virtual.guards.landlock`), and finds an
``nvidia-smi`` that answers for the same card.

This module does not need torch: processes that a process starts get the same.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from memsize.device.allocator_config import AllocatorConfig
from memsize.processes.patches import Patch, calling, environment, wrapping
from memsize.processes.simulation import open_simulation
from memsize.records.gpu import Card
from memsize.records.world import World
from memsize.spec.stack import INSTALLED, Stack
from memsize.virtual.driver import nvidia_smi
from memsize.virtual.driver.nvidia_smi import Gpu
from memsize.virtual.guards import landlock
from memsize.virtual.guards.file_guard import FileGuard

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

_PYTHON: Final = re.compile(r"(?:.*/)?python[\d.]*(?:\.exe)?$")
_SHEBANG: Final = re.compile(rb"#!.*\bpython[\d.]*\s")
_ISOLATING: Final = re.compile(r"-[a-zA-Z]*[EIS]")
"""Flags with which Python imports no ``sitecustomize``, or none of ``PYTHONPATH``."""
_START: Final = """\
import importlib.machinery, importlib.util, sys
sys.path[:] = [{package!r}, *(entry for entry in sys.path if entry != {folder!r})]
try:
    from memsize.analysis.child_program import start
except Exception as error:
    print(f"memsize: this process has no simulated GPU: {{error}}", file=sys.stderr)
else:
    start({folder!r})
sys.path.remove({package!r})
spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
if spec is not None:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
_SMI: Final = """\
#!/bin/sh
exec {} "$@"
"""
_LAUNCHERS: Final = frozenset({"accelerate", "deepspeed", "mpirun", "torchrun"})
_LAUNCHER_MODULES: Final = frozenset(
    {"accelerate.commands.launch", "torch.distributed.launch", "torch.distributed.run"}
)


NO_GPU_USE: Final[dict[str, Any]] = {
    "rank": None,
    "steps": 0,
    "reserved": 0,
    "low": 0,
    "high": 0,
    "ran_out": False,
}
"""The result of a process that never used the GPU, but for its command and how it failed."""


def is_launcher(program: str) -> bool:
    """Return whether `program`, a script or a module, starts one process for each GPU and uses none itself."""
    return program in _LAUNCHER_MODULES or Path(program).name in _LAUNCHERS


class Settings(NamedTuple):
    """The machine that a program has, which the processes that it starts have, too.

    `config` holds the settings of the caching allocator; None: those that the environment has when it is first used.
    The program ends after `steps` optimizer steps (0: at its own end). `world` is the job of which it is one process
    (None: it was started alone). Where it is not `bounded`, nothing is too large for the card. `stack` is the software
    on the GPU. `allowed` lets it change files that were there before, and `offline` keeps it from the network.
    After its steps it `goes_on` to its first evaluation and checkpoint. Where it loads one that is not there, another
    `stands_in` for it.
    """

    card: Card
    config: AllocatorConfig | None = None
    steps: int = 3
    world: World | None = None
    bounded: bool = True
    stack: Stack = INSTALLED
    allowed: bool = False
    offline: bool = False
    goes_on: bool = False
    stands_in: bool = False


@dataclass
class _Started:
    """A process that was started; `status` is None until the program has learnt how it ended."""

    command: str
    number: int
    runs_python: bool
    status: int | None = None

    @property
    def failure(self) -> str | None:
        """How the process failed; None for one that did not, or that was asked to end."""
        status = self.status or 0
        if status in (0, -signal.SIGTERM):
            return None
        return f"exit status {status}" if status > 0 else f"ended by {signal.Signals(-status).name}"


class ChildProcesses:
    """The processes that a program starts. `gpu` returns the card as it is, None where this process does not use it."""

    def __init__(self, guard: FileGuard, settings: Settings, gpu: Callable[[], Gpu | None] = lambda: None) -> None:
        self.gpu = gpu
        self._guard = guard
        self.settings = settings
        self._folder = Path()
        self._is_open = False
        self._main: int | None = None
        """The process that reports on the run, where this is it or a fork of it."""
        self._started: list[_Started] = []
        self._by_popen = WeakKeyDictionary[subprocess.Popen[Any], _Started]()
        """Weakly, as pipes to a process close when the program lets go of it."""
        self._multiprocessing: list[BaseProcess] = []
        self._left_to_python: list[BaseProcess] = []
        """Those of them that Python waits for. Executors and managers of the standard library end theirs themselves."""
        self.results: tuple[dict[str, Any], ...] = ()
        """The results of the processes that used the GPU or failed, as they ended."""

    @contextmanager
    def open(self, folder: Path | None = None) -> Iterator[None]:
        """While open, started processes get the GPU and the guard; one of them passes the `folder` of the run."""
        if self._is_open:
            yield
            return
        with TemporaryDirectory(prefix="memsize-", ignore_cleanup_errors=True) as temporary:
            self._folder, self._is_open = folder or Path(temporary).resolve(), True
            if folder is None:
                self._main = os.getpid()
                for name in ("bin", "results", "new", "tmp"):
                    (self._folder / name).mkdir()
                package = str(Path(__file__).parents[3])
                (self._folder / "sitecustomize.py").write_text(
                    _START.format(folder=str(self._folder), package=package), "utf-8"
                )
                (self._folder / "settings.pickle").write_bytes(pickle.dumps(self.settings))
                smi = self._folder / "bin" / "nvidia-smi"
                script, state = nvidia_smi.__file__, self._folder / "gpu.json"
                words = map(shlex.quote, map(str, (sys.executable, "-I", "-S", script, state)))
                smi.write_text(_SMI.format(" ".join(words)), "utf-8")
                smi.chmod(0o755)
            self._guard.new.add(str(self._folder))
            self._guard.others_new = lambda: set().union(*(names for _, names in self._read("new")))
            variables = environment(self._environment(os.environ))
            with open_simulation() as simulation, simulation.patches.applied(self._patches()), variables:
                try:
                    yield
                finally:
                    self.results = tuple(self._read_results())

    def _environment(self, environment: Any) -> dict[str, str]:
        """Return the variables that let a process find the folder of the run, in front of what `environment` has."""
        return {
            name: os.pathsep.join((str(folder), *(part for part in (environment.get(name),) if part)))
            for name, folder in (("PYTHONPATH", self._folder), ("PATH", self._folder / "bin"))
            if str(folder) not in environment.get(name, "").split(os.pathsep)
        }

    def announce(self) -> None:
        """Write down what this process has made, and what it takes on the GPU, for those that it starts."""
        gpu = self.gpu()
        with suppress(FileNotFoundError):  # the run has ended before this process
            (self._folder / "new" / f"{os.getpid()}.json").write_text(json.dumps(sorted(self._guard.new)), "utf-8")
            if gpu is not None:
                (self._folder / "gpu.json").write_text(json.dumps(gpu._asdict()), "utf-8")

    def report(self, result: dict[str, Any]) -> None:
        """Write down what this process took on the GPU, for the process that started it."""
        with suppress(FileNotFoundError):
            number = len([*(self._folder / "results").iterdir()])
            (self._folder / "results" / f"{number:06d}-{os.getpid()}.json").write_text(json.dumps(result), "utf-8")

    def _read(self, folder: str) -> Iterator[tuple[Path, Any]]:
        """Yield what the processes of the run have written down, each with its file."""
        for file in sorted((self._folder / folder).glob("*.json")):
            with suppress(OSError, ValueError):  # it is being written, or its process was ended meanwhile
                yield file, json.loads(file.read_text("utf-8"))

    def _read_results(self) -> Iterator[dict[str, Any]]:
        ended = [*self._started]
        for process in self._multiprocessing:
            with suppress(ValueError):  # it was closed, as only one that has ended may be
                ended.append(_Started(process.name, process.pid or 0, True, process.exitcode))
        failed = {started.number: started for started in ended if started.runs_python and started.failure}
        for file, result in self._read("results"):
            started = failed.pop(int(file.stem.partition("-")[2]), None)
            if started is not None:
                result["failure"] = result["failure"] or started.failure
            yield result
        for started in failed.values():
            yield {**NO_GPU_USE, "command": started.command, "failure": started.failure}

    @property
    def failures(self) -> tuple[str, ...]:
        """One line for each program without Python that failed, perhaps for want of the right to change files."""
        return tuple(
            f"{started.command} ended with status {started.status}, perhaps because it may change only files in "
            "folders that the script has made (--allow-writes lets it change others)"
            for started in self._started
            if started.status and not started.runs_python
        )

    # -- how they are started -----------------------------------------------------------------------------------------

    def _patches(self) -> Iterator[Patch]:
        from multiprocessing.process import BaseProcess

        yield wrapping(subprocess.Popen, "__init__", self._starting)
        for name in ("poll", "wait"):
            yield wrapping(subprocess.Popen, name, self._noting_the_status)
        yield wrapping(BaseProcess, "start", self._noting_the_process)
        yield os, "system", _system
        for name in ("execv", "execve"):
            yield os, name, calling(self._replacing, getattr(os, name))

    def _starting(
        self,
        original: Callable[..., None],
        process: subprocess.Popen[Any],
        args: Any,
        bufsize: int = -1,
        executable: Any = None,
        *rest: Any,
        shell: bool = False,
        env: Any = None,
        **options: Any,
    ) -> None:
        self.announce()
        variables = dict(os.environ if env is None else env)
        variables |= self._environment(variables)
        words = _words(args, shell)
        program = _program(executable, words, variables, options.get("cwd"))
        is_python = program is not None and runs_python(program, words)
        if program is None or is_python or not self._is_limited:
            original(process, args, bufsize, executable, *rest, shell=shell, env=variables, **options)
        else:
            variables["TMPDIR"] = str(self._folder / "tmp")
            limits = ["--offline"] * self.settings.offline + ["--any-file"] * self._guard.allowed
            limited = [sys.executable, "-I", "-S", landlock.__file__, *limits, *self._writable, "--"]
            limited += [os.path.abspath(program), *words]
            original(process, limited, bufsize, None, *rest, shell=False, env=variables, **options)
            process.args = args
        started = _Started(shlex.join(words), process.pid, is_python)
        self._started.append(started)
        self._by_popen[process] = started

    def _noting_the_status(
        self, original: Callable[..., int | None], process: subprocess.Popen[Any], *args: Any, **options: Any
    ) -> int | None:
        status = original(process, *args, **options)
        if process in self._by_popen:
            self._by_popen[process].status = status
        return status

    def _noting_the_process(self, original: Callable[[BaseProcess], None], process: BaseProcess) -> None:
        module = getattr(vars(process)["_target"], "__module__", None) or type(process).__module__
        original(process)
        self._multiprocessing.append(process)
        if not process.daemon and module.partition(".")[0] not in sys.stdlib_module_names:
            self._left_to_python.append(process)

    def join(self, progress: Callable[[str], None]) -> None:
        """Wait for the processes that the program has left running, as Python does at its end."""
        for process in self._left_to_python:
            with suppress(ValueError):  # it was closed
                if process.is_alive():
                    progress(f"waiting for {process.name}, which the script started")
                process.join()

    @property
    def _is_limited(self) -> bool:
        return landlock.version() > 0 and (self.settings.offline or not self._guard.allowed)

    @property
    def _writable(self) -> list[str]:
        return [str(self._folder), *filter(os.path.isdir, self._guard.new)]

    def _replacing(self, original: Callable[..., Any], path: Any, args: Sequence[Any], *env: Any) -> Any:
        if os.getpid() == self._main:  # which has yet to report: it waits for the program and ends as that does
            raise SystemExit(subprocess.call(args, executable=path, env=env[0] if env else None))
        self.announce()
        is_python = runs_python(os.fsdecode(path), [*map(os.fsdecode, args)])
        if self._is_limited and not is_python and os.access(path, os.X_OK):  # rights that are given up are gone
            landlock.restrict(None if self._guard.allowed else self._writable, self.settings.offline)
        return original(path, args, *env)


def _words(args: Any, shell: bool) -> list[str]:
    """Return the words of a command that `subprocess.Popen` takes."""
    single = isinstance(args, (str, bytes, os.PathLike))
    words = [os.fsdecode(word) for word in ([args] if single else args)]
    return ["/bin/sh", "-c", *words] if shell else words


def _program(executable: Any, words: Sequence[str], environment: dict[str, str], folder: Any) -> str | None:
    """Return the path of the program that a command starts; None where there is none."""
    if not words:
        return None
    name = os.fsdecode(executable or words[0])
    if os.path.dirname(name):
        name = os.path.join(os.fsdecode(folder or ""), name)
    return shutil.which(name, path=environment.get("PATH"))


def runs_python(program: str, words: Sequence[str]) -> bool:
    """Return whether a command runs Python, and so that it imports ``sitecustomize``."""
    if _PYTHON.match(program) or _PYTHON.match(os.path.realpath(program)):
        return not any(_ISOLATING.fullmatch(flag) for flag in takewhile(lambda word: word.startswith("-"), words[1:]))
    with suppress(OSError), open(program, "rb") as file:
        return bool(_SHEBANG.match(file.readline(200) + b" "))
    return False


def _system(command: Any) -> int:
    """`os.system`, by a process that `subprocess` starts; the status is that of `os.waitpid`."""
    status = subprocess.call(command, shell=True)
    return -status if status < 0 else status << 8
