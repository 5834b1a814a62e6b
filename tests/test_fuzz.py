"""The fuzzer runs, repeats itself, finds nothing in memsize, and finds what is wrong in a command that is."""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, strategies as st

from benchmarks.fuzz import checkpoints, commands, saved_runs, trial
from benchmarks.fuzz.trial import CANARY, Trial, attempt
from memsize import cli
from tests.conftest import Python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.mark.thorough
def test_a_short_run_finds_nothing(python: Python) -> None:
    done = python("-m", "benchmarks.fuzz", "--trials", "20", "--seed", "suite")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [row[:2] for row in rows] == [[kind, "20"] for kind in ("checkpoint", "saved", "options", "models")]
    for _, runs, answered, refused, faults, *_ in rows:
        assert int(answered) > 0 and int(refused) > 0 and int(faults) == 0
        assert int(answered) + int(refused) == int(runs)


def test_the_same_number_makes_the_same_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at another time, which archives note for each file."""

    def made(number: int, folder: Path) -> tuple[tuple[str, ...], dict[str, bytes]]:
        folder.mkdir()
        found = checkpoints.trials(Random(f"seed:{number}"))
        found.prepare(folder)
        return found.arguments, {path.name: path.read_bytes() for path in folder.iterdir()}

    first = [made(number, tmp_path / f"a{number}") for number in range(20)]
    monkeypatch.setattr("time.localtime", lambda *_: (2031, 5, 6, 7, 8, 9, 0, 126, 0))
    assert [made(number, tmp_path / f"b{number}") for number in range(20)] == first
    for kind in (commands.option_trials, commands.model_trials):
        assert kind(Random(3)).arguments == kind(Random(3)).arguments


@pytest.mark.thorough
@given(st.integers(0, 2**32))
def test_no_damaged_run_is_a_fault(seed: int) -> None:
    """Each is shown or refused."""
    arguments, content = saved_runs.damaged_run(Random(seed))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path(saved_runs.NAME).write_bytes(content)
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            status = cli.run(arguments)
    assert status in (0, 2), (seed, arguments, err.getvalue())
    assert (status == 2) == ("error: " in err.getvalue()) and not trial.obeyed(out.getvalue() + err.getvalue())


def test_a_made_pickle_is_never_one_that_touches_the_canary(tmp_path: Path) -> None:
    """What a trial's pickle would do if anything ran it shows as a file."""
    assert any(b"touch" in checkpoints.made_pickle(Random(number)) for number in range(20))


def says(status: int, out: str = "", err: str = "error: no") -> int:
    print(out)
    if status == 2:
        print(err, file=sys.stderr)
    return status


DEEDS: dict[str, tuple[Callable[[], object], str]] = {
    "status": (lambda: 1, "status 1"),
    "exit": (lambda: os._exit(7), "status 7"),
    "traceback": (lambda: 1 / 0, "traceback"),
    "no error": (lambda: says(2, err="oh"), "no error is said"),
    "long error": (lambda: says(2, err="error: " + "x" * 6000), "characters of errors"),
    "escape": (lambda: says(0, "\x1b[2J"), r"shows '\x1b'"),
    "direction": (lambda: says(2, err="error: \u202e"), r"shows '\u202e'"),
    "secret": (lambda: says(0, os.environ["MEMSIZE_FUZZ_SECRET"]), "shows the environment"),
    "program": (lambda: subprocess.run(["true"], check=True) and 0, "subprocess.Popen"),
    "shell": (lambda: os.system(f"touch {CANARY}2") and 0, "os.system"),
    "made": (lambda: os.system(f"touch {CANARY}2") and 0, f"touches '{CANARY}2'"),
    "connection": (lambda: socket.socket().close() or 0, "socket.__new__"),
    "outside": (lambda: open("/tmp/elsewhere", "a").close() or 0, "opens /tmp/elsewhere to write"),
    "canary": (lambda: Path(CANARY).write_text("x") and 0, f"touches '{CANARY}'"),
    "removal": (lambda: os.remove(CANARY) or 0, f"touches '{CANARY}'"),
    "import": (lambda: __import__("this") and 0, "import of this"),
    "code": (lambda: exec("1") or 0, "exec of"),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_what_a_command_must_not_do_is_found(deed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    do, fault = DEEDS[deed]

    def run(_: Sequence[str]) -> int:
        return int(do())  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(trial, "run", run)
    outcome = attempt(Trial("x", (), lambda _: None), tmp_path / "trial")
    assert any(fault in each for each in outcome.faults), outcome


def test_a_command_that_does_nothing_wrong_has_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: Sequence[str]) -> int:
        Path("answer").write_text("x" * 2**20)
        held = bytearray(64 * 2**20)
        return len(held) and says(0, "größe\t…")

    monkeypatch.setattr(trial, "run", run)
    with mmap.mmap(-1, 8 * 2**30, mmap.MAP_PRIVATE, mmap.PROT_READ):  # as a process with many libraries
        outcome = attempt(Trial("x", (), lambda _: None, frozenset({"answer"})), tmp_path / "trial")
    assert outcome.faults == () and outcome.status == 0 and 60 < outcome.memory < 100
    assert attempt(Trial("x", (), lambda _: None), tmp_path / "trial").faults == ("touches 'answer'",)
