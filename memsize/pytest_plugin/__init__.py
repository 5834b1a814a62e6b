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

_MARKER = "memsize_limit(**limits): what a model of this test may need at most, such as parameters='40 MiB'"
_OUTCOME = pytest.StashKey["Outcome"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--memsize-update``."""
    group = parser.getgroup("memsize")
    group.addoption("--memsize-update", action="store_true", help="Write the layer tables of memsize.table anew.")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
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


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Remember that not all tests were run: what they use is not obsolete."""
    if items:
        items[0].config.stash[_PARTIAL] = True


_PARTIAL = pytest.StashKey[bool]()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Look for stored tables of tests that are gone; under xdist, hand over what this worker found."""
    outcome = session.config.stash.get(_OUTCOME, None)
    if outcome is None:
        return
    named = any("::" in argument for argument in session.config.args)
    # The process that xdist's workers report to has no tests of its own.
    if session.items and not named and not session.config.stash.get(_PARTIAL, False):
        outcome.look_for_obsolete(session.items)
    if (handed := getattr(session.config, "workeroutput", None)) is not None:
        handed["memsize"] = asdict(outcome)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take over what a worker of xdist found."""
    if outcome := getattr(node, "workeroutput", {}).get("memsize"):
        _outcome(node.config).add(outcome)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was checked, which tables were written, and which are obsolete."""
    outcome = config.stash.get(_OUTCOME, None)
    if outcome is None or not (lines := outcome.lines()):
        return
    terminalreporter.section("memsize")
    for line in lines:
        terminalreporter.write_line(line)


def _outcome(config: pytest.Config) -> Outcome:
    from memsize.pytest_plugin.fixture import Outcome

    return config.stash.setdefault(_OUTCOME, Outcome())
