"""The pytest plugin: limits on what a test's models need.

    @pytest.mark.memsize_limit(parameters="40 MiB", training_peak="8 GiB")
    def test_memory(memsize):
        memsize.report(Net(), (3, 64, 64), train="adamw")

It is an entry point of the package, so every pytest that runs beside memsize loads this module: nothing of it is
imported before a test asks for the fixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from memsize.pytest_plugin.fixture import Memory

_MARKER = "memsize_limit(**limits): limits of the models in this test, such as parameters='40 MiB'"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def memsize(request: pytest.FixtureRequest) -> Iterator[Memory]:
    """Asks memsize about models under the limits of the test's `memsize_limit` markers."""
    from memsize.pytest_plugin.fixture import Memory

    memory = Memory(request.node)
    yield memory
    memory.close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test that has a limit of its own and nothing that would check it."""
    limited = any(mark.name == "memsize_limit" for mark in item.own_markers)
    if limited and "memsize" not in getattr(item, "fixturenames", ()):
        why = "memsize_limit is checked by the fixture memsize, which the test doesn't use: name it among its arguments"
        pytest.fail(why, pytrace=False)
