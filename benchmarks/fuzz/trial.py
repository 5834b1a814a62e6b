"""One run of the command line in a forked process: under limits, watched by an audit hook, its output read later."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memsize.cli import run

SECRET: Final = "fuzz-secret-5f1c"
"""In the environment of every trial; nothing has a reason to show it."""
CANARY: Final = "canary"
"""A file in the folder of every trial that must stay as it is."""

_PATIENCE: Final = 120
"""Seconds after which a trial is stopped that waits, for a pipe, say."""
_MOST_SECONDS: Final = 30
"""CPU seconds after which one is stopped that works."""
_ADDRESSES: Final = 6 << 30
_NEVER = re.compile(
    r"subprocess\.|os\.(system|exec|posix_spawn|spawn|fork|kill)|socket\.|urllib\.|http\.|ftplib|smtplib|webbrowser|pty\."
)
_NOT_OUTSIDE = re.compile(r"shutil\.|os\.(remove|rename|rmdir|mkdir|chmod|chown|link|symlink|truncate|utime)")
"""Audit events that are faults anywhere, and those that are outside of the trial's folder."""
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True, slots=True)
class Trial:
    """A command line with the files it is about, which `prepare` writes into its folder.

    `outputs` are the files that it is told to write. A `strict` trial reads data alone: nothing may be imported,
    compiled or executed for it.
    """

    kind: str
    arguments: tuple[str, ...]
    prepare: Callable[[Path], None]
    outputs: frozenset[str] = frozenset()
    strict: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trial ended: its exit status, what is wrong with it, CPU seconds, and MiB on top of what it began with."""

    status: int
    faults: tuple[str, ...]
    seconds: float
    memory: float


def attempt(trial: Trial, folder: Path) -> Outcome:
    """Run `trial` in `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    work = folder / "work"
    work.mkdir()
    (work / CANARY).write_text(CANARY)
    trial.prepare(work)
    before = _listing(work)
    pid = os.fork()
    if pid == 0:
        _be_the_child(trial, work, folder)
    _, status, used = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    data = _read_events(folder / "events")
    faults = [
        *_faults(code, folder, "--debug" in trial.arguments),
        *data["events"],
        *_litter(work, before, trial.outputs),
    ]
    return Outcome(code, tuple(dict.fromkeys(faults)), used.ru_utime + used.ru_stime, data["memory"])


def _be_the_child(trial: Trial, work: Path, folder: Path) -> None:
    """What the forked process does; it never returns."""
    status = 99
    try:
        _redirect(folder)
        os.chdir(work)
        os.environ["MEMSIZE_FUZZ_SECRET"] = SECRET
        signal.alarm(_PATIENCE)
        resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECONDS, _MOST_SECONDS))
        addresses = _resident("VmSize") + _ADDRESSES
        resource.setrlimit(resource.RLIMIT_AS, (addresses, addresses))
        start = _resident("VmRSS", reset=True)
        events: list[str] = []
        watching = _watch(events, work, trial)
        watching.append(True)
        status = run(trial.arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        watching.clear()
        memory = (_resident("VmHWM") - start) / 2**20
        (folder / "events").write_text(json.dumps({"events": events, "memory": memory}))
    except BaseException as error:  # the parent reports it
        print(f"Traceback: {error!r}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def _redirect(folder: Path) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, descriptor)
        os.close(handle)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _watch(events: list[str], work: Path, trial: Trial) -> list[bool]:
    """Add what happens and must not to `events`, while the list that is returned holds something."""
    watching: list[bool] = []
    inside = os.path.realpath(work)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not watching:
            return
        path = str(arguments[0]) if arguments else ""
        if event == "open":
            flags = arguments[2] if isinstance(arguments[2], int) else 0
            # Descriptors, and temporary names in the folder itself, are ours to write.
            if flags & _WRITES and not isinstance(arguments[0], int) and not _is_in(path, inside):
                events.append(f"opens {path} to write")
            return
        never = _NEVER.match(event) or (trial.strict and event in ("import", "exec", "compile"))
        if never or (_NOT_OUTSIDE.match(event) and not _is_in(path, inside)):
            events.append(f"{event} of {path[:80]}")

    sys.addaudithook(hook)
    return watching


def _is_in(path: str, folder: str) -> bool:
    real = os.path.realpath(path)
    return real.startswith(folder + os.sep) or real == os.devnull


def _resident(which: str, reset: bool = False) -> int:
    """Bytes of memory that this process has (VmRSS) or had at most since `reset` (VmHWM), or of its addresses (VmSize);
    Linux only.
    """
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which))
    return int(line.split()[1]) * 1024


def _read_events(file: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return {"events": [], "memory": 0.0}
    return data


def _faults(code: int, folder: Path, debug: bool) -> Sequence[str]:
    """What is wrong with the exit status and with what was said."""
    out, err = ((folder / name).read_bytes().decode("utf-8", "backslashreplace") for name in ("out", "err"))
    faults = [] if code in (0, 2) else [f"status {code}: {err[-300:].strip()}"]
    if "Traceback" in err and not debug:
        faults.append("traceback")
    if code == 2 and not re.search(r"(?i)^error: ", err, re.MULTILINE):
        faults.append(f"no error is said: {err[:200]!r}")
    if len(err) > (20_000 if debug else 5000):
        faults.append(f"{len(err):,} characters of errors")
    if SECRET in out + err:
        faults.append("shows the environment")
    return faults + [f"shows {c!r}" for c in sorted(obeyed(out) | obeyed(err))]


def obeyed(shown: str) -> set[str]:
    """The characters of `shown` that a terminal would obey, or that turn the direction of text."""
    if shown.replace("\n", "").replace("\t", "").isprintable():
        return set()
    return {c for c in shown if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}


def _listing(folder: Path) -> dict[str, tuple[int, int, int]]:
    entries = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        entries[str(path.relative_to(folder))] = (status.st_mode, status.st_size, status.st_mtime_ns)
    return {
        name: facts for name, facts in entries.items() if (folder / name).is_symlink() or not (folder / name).is_dir()
    }


def _litter(work: Path, before: dict[str, tuple[int, int, int]], outputs: frozenset[str]) -> Sequence[str]:
    """What changed in the folder beyond the file that was asked for."""
    after = _listing(work)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    return [f"touches {name!r}" for name in sorted(changed) if name not in outputs and "__pycache__" not in name]
