"""The pytest plugin, run as a user's project runs it: in a process of its own, with xdist and without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MODEL = """
from torch import nn

def net(width=8):
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))
"""

TESTS = """
import pytest
from net import net

# 16·8 + 8 + 8·4 + 4 = 172 parameters, 688 bytes

@pytest.mark.memsize_limit(parameters="1 KiB", trainable=172, training_peak="1 GiB")
def test_holds(memsize):
    report = memsize.report(net(), (16,), train="sgd")
    assert report.totals.parameters == 172

@pytest.mark.memsize_limit(parameters="0.5KiB")
def test_too_large(memsize):
    memsize.report(net(), (16,))

@pytest.mark.memsize_limit(parameters=171)
def test_one_too_many(memsize):
    memsize.trace(net(), (16,), optimizer="sgd", steps=1)

@pytest.mark.memsize_limit(parameters=172, training_peak="1 GiB")
def test_not_asked(memsize):
    memsize.report(net(), (16,))

@pytest.mark.memsize_limit(fits_batch=16)
def test_fits(memsize):
    assert memsize.fit(net(), (16,), gpu="t4").fit_rows[0].status == "fits"

@pytest.mark.memsize_limit(paramters=1)
def test_misspelt(memsize):
    pass

@pytest.mark.memsize_limit(parameters=1)
def test_fails_of_itself(memsize):
    assert 1 == 2

@pytest.mark.memsize_limit(parameters=1)
def test_without_the_fixture():
    pass
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(pytester.path)]))
    pytester.makepyfile(net=MODEL, test_net=TESTS)
    return pytester


def run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return project.runpytest_subprocess("-p", "memsize.pytest_plugin", "--strict-markers", *arguments)


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)], ids=["alone", "xdist"])
def test_limits(project: pytest.Pytester, workers: tuple[str, ...]) -> None:
    result = run(project, *workers)
    # test_holds and test_fits pass; two limits are broken, one fails of itself; three are errors.
    result.assert_outcomes(passed=3, failed=3, errors=3)
    result.stdout.fnmatch_lines_random(
        [
            "parameters: 0.67 KiB, 0.17 KiB over the limit of 0.50 KiB, mostly in 0 (0.53 KiB) and 2 (0.14 KiB).",
            "parameters: 172, 1 over the limit of 171, mostly in 0 (136) and 2 (36).",
            'memsize_limit(training_peak): no call of the test checks it; train="adamw" asks for training steps',
            "no limit 'paramters': did you mean parameters?",
            "memsize_limit is checked by the fixture memsize, which the test doesn't use: name it among its arguments",
        ]
    )


def test_nothing_is_imported_or_said_where_nothing_is_used(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_net="""
        import sys

        def test_nothing():
            loaded = {"torch", "memsize.api", "memsize.analysis", "memsize.pytest_plugin.fixture", "numpy", "pandas"}
            assert not loaded & set(sys.modules)
        """
    )
    # pytest's own header lists every plugin that is installed
    result = run(project, "-p", "no:hypothesispytest", "--no-header")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*memsize*")
