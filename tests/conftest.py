"""What every test may use: steady Hypothesis runs, the toy model's file, and the command line as a user starts it."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from benchmarks.zoo.operators import declare
from memsize.kernels.cudnn.plans import Library
from tests import arbitrary as arbitrary  # it registers strategies for records

# The plugin under test, also where the project was not installed anew since it became an entry point.
pytest_plugins = ["memsize.pytest_plugin", "pytester"]

FROM_THE_LAST = os.environ.get("PYTEST_XDIST_WORKER") == "gw1"
"""Whether this process reads the test files from the last to the first.

pytest rewrites each test file and keeps the result for other processes: of two that go through them in opposite
directions, each rewrites half of the files.
"""

Python = Callable[..., subprocess.CompletedProcess[str]]
Write = Callable[[str, str], Path]

ROOT = Path(__file__).resolve().parent.parent

# A shared machine stalls now and then: no deadline. The same examples every time: a red run can be repeated.
settings.register_profile(
    "memsize", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("memsize")
# `make fuzz` looks for other examples each time, at more than 100 where a test doesn't say how many.
settings.register_profile(
    "fuzz",
    settings.get_profile("memsize"),
    derandomize=False,
    max_examples=400,
    database=DirectoryBasedExampleDatabase(ROOT / ".hypothesis" / "examples"),
)

# What is shown must not depend on what else is installed: cuDNN is asked only by the tests that are about it. The
# library to test with is kept for processes that pytest starts, which import this again.
CUDNN = os.environ.setdefault("MEMSIZE_TESTED_CUDNN", os.environ.get("MEMSIZE_CUDNN", ""))
os.environ["MEMSIZE_CUDNN"] = "none"
# On a busy machine any command may be slow enough to say on stderr what it is doing.
os.environ["MEMSIZE_PROGRESS"] = "never"

# Thousands of tests are collected, and all of them stay: the collector would take a third of that time to find nothing.
gc.disable()

# Before anything imports torchvision: what it registers on the way to failing cannot be taken back.
declare()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn the order of the files round where `FROM_THE_LAST`."""
    report = yield
    if FROM_THE_LAST and isinstance(collector, pytest.Directory):
        report.result.reverse()
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give all processes the same order of tests, that of the files' names."""
    items.sort(key=lambda item: item.path)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the collector work in tests, and where other processes collect and run them.

    A traced step makes thousands of objects and few cycles: at Python's 700 the collector takes a twelfth of the time.
    """
    try:
        return (yield)
    finally:
        gc.set_threshold(20_000, *gc.get_threshold()[1:])
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Keep the collector from going through the libraries that are imported by now, seconds each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def toy_target() -> str:
    """The target of the demo: the toy CNN's file and class."""
    return f"{ROOT / 'notebooks' / 'model.py'}:Test"


def _python(*command: str, folder: Path) -> Python:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            timeout=300,
            check=False,
        )

    return run


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """Runs the test's Python with the given arguments in `tmp_path`, and returns what came out."""
    return _python(sys.executable, folder=tmp_path)


@pytest.fixture
def warm_python(warm: list[str], tmp_path: Path) -> Python:
    """As `python`, in a process that has torch and memsize imported: see `tests.forked`."""
    return _python(*warm, folder=tmp_path)


@pytest.fixture(scope="session")
def warm() -> Iterator[list[str]]:
    """A command that stands for `python` where a test isn't about how a process starts: see `tests.forked`."""
    if not hasattr(os, "fork"):
        yield [sys.executable]
        return
    program = str(Path(__file__).with_name("forked.py"))
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = f"{folder}/socket"
        listener.bind(address)
        listener.listen(64)
        number = listener.fileno()
        with subprocess.Popen(
            [sys.executable, program, "serve", str(number)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[number],
        ):
            listener.close()
            yield [sys.executable, "-IS", program, address]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a text file below `tmp_path`, with its folders."""

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file


@pytest.fixture(scope="session")
def cudnn() -> Library:
    """cuDNN itself, as an installed `nvidia-cudnn-cu13` brings it; a test is skipped without."""
    from tests.deep import installed_cudnn

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MEMSIZE_CUDNN")
        if CUDNN:
            patch.setenv("MEMSIZE_CUDNN", CUDNN)
        found = installed_cudnn()
    if found is None:
        pytest.skip("no cuDNN that can be asked without a GPU")
    return found
