"""The pytest plugin: limits on what a test's models need, layer tables compared with stored files, and a summary.

    @pytest.mark.memsize_limit(parameters="40 MiB", training_peak="8 GiB")
    def test_memory(memsize):
        memsize.report(Net(), (3, 64, 64), train="adamw")
        memsize.table(Net(), (3, 64, 64))

It is an entry point of the package, so every pytest that runs beside memsize loads this module: nothing of it is
imported before a test asks for the fixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from memsize.pytest_plugin.fixture import Memory, Outcome

_MARKER = "memsize_limit(**limits): limits of the models in this test, such as parameters='40 MiB'"
_OUTCOME = pytest.StashKey["Outcome"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--memsize-update``."""
    group = parser.getgroup("memsize")
    group.addoption("--memsize-update", action="store_true", help="Rewrite the layer tables of memsize.table.")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def memsize(request: pytest.FixtureRequest) -> Iterator[Memory]:
    """Asks memsize about models under the limits of the test's `memsize_limit` markers, and compares layer tables."""
    from memsize.pytest_plugin.fixture import Memory

    memory = Memory(request.node, _outcome(request.config), update=request.config.getoption("memsize_update"))
    yield memory
    memory.close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test that has a limit of its own and nothing that would check it."""
    limited = any(mark.name == "memsize_limit" for mark in item.own_markers)
    if limited and "memsize" not in getattr(item, "fixturenames", ()):
        why = "memsize_limit is checked by the fixture memsize, which the test doesn't use: name it among its arguments"
        pytest.fail(why, pytrace=False)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Under xdist, hand over what this worker found."""
    outcome, handed = session.config.stash.get(_OUTCOME, None), getattr(session.config, "workeroutput", None)
    if outcome is not None and handed is not None:
        handed["memsize"] = asdict(outcome)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take over what a worker of xdist found."""
    if outcome := getattr(node, "workeroutput", {}).get("memsize"):
        _outcome(node.config).add(outcome)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was checked, and which tables were written."""
    outcome = config.stash.get(_OUTCOME, None)
    if outcome is None or not (lines := outcome.lines()):
        return
    terminalreporter.section("memsize")
    for line in lines:
        terminalreporter.write_line(line)


def _outcome(config: pytest.Config) -> Outcome:
    from memsize.pytest_plugin.fixture import Outcome

    return config.stash.setdefault(_OUTCOME, Outcome())
