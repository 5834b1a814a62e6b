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

@pytest.mark.parametrize("width", [8, 9])
def test_table(memsize, width):
    memsize.table(net(width), (16,))
    memsize.table(net(width), (16,), name="again")
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(pytester.path)]))
    pytester.makepyfile(net=MODEL, test_net=TESTS)
    return pytester


def run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return project.runpytest_subprocess("-p", "memsize.pytest_plugin", "--strict-markers", *arguments)


def tables(project: pytest.Pytester) -> dict[str, str]:
    folder = project.path / "memsize_tables" / "test_net"
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*"))}


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)], ids=["alone", "xdist"])
def test_limits_and_tables(project: pytest.Pytester, workers: tuple[str, ...]) -> None:
    result = run(project, *workers, "--memsize-update")
    # test_holds, test_fits and both tables pass; two limits are broken, one fails of itself; three are errors.
    result.assert_outcomes(passed=5, failed=3, errors=3)
    result.stdout.fnmatch_lines_random(
        [
            "parameters: 0.67 KiB, 0.17 KiB over the limit of 0.50 KiB, mostly in 0 (0.53 KiB) and 2 (0.14 KiB).",
            "parameters: 172, 1 over the limit of 171, mostly in 0 (136) and 2 (36).",
            'memsize_limit(training_peak): no call of the test checks it; train="adamw" asks for training steps',
            "no limit 'paramters': did you mean parameters?",
            "memsize_limit is checked by the fixture memsize, which the test doesn't use: name it among its arguments",
            "*= memsize =*",
            "test_net.py::test_holds: parameters 0.67 KiB of 1.00 KiB (67%)",
            "test_net.py::test_holds: trainable 172 of 172 (100%)",
            "test_net.py::test_one_too_many: parameters 172 of 171 (101%): over",
            "test_net.py::test_fits: fits_batch 16 fits",
            "4 layer tables written",
        ]
    )
    result.stdout.no_fnmatch_line("*compared with what is stored*")
    stored = tables(project)
    assert list(stored) == [
        "test_table[8]--again.txt",
        "test_table[8].txt",
        "test_table[9]--again.txt",
        "test_table[9].txt",
    ]
    # kept for backward: the input 16, what ReLU and the second linear layer read of it, 8; four bytes each
    assert stored["test_table[8].txt"] == (
        "layer    type        output        parameters  stored  new output  kept\n"
        "(model)  Sequential  float32[1,4]           0       0           0     0\n"
        "0        Linear      float32[1,8]         136     544          32    64\n"
        "1        ReLU        float32[1,8]           0       0          32    32\n"
        "2        Linear      float32[1,4]          36     144          16     0\n"
        "total                                     172     688          80    96\n"
    )

    change_the_net(project)
    check_changed_tables(run(project, *workers))


def change_the_net(project: pytest.Pytester) -> None:
    """One layer more outputs, one table less in each test, and another parameter of one test."""
    project.makepyfile(net=MODEL.replace("nn.Linear(width, 4)", "nn.Linear(width, 5)"))
    again = '    memsize.table(net(width), (16,), name="again")\n'
    project.makepyfile(test_net=TESTS.replace("[8, 9]", "[8, 7]").replace(again, ""))


def check_changed_tables(result: pytest.RunResult) -> None:
    result.stdout.fnmatch_lines_random(
        [
            "the layers changed (pytest --memsize-update accepts it):",
            "-2  Linear  float32[[]1,4]  36  144  16  0",
            "+2  Linear  float32[[]1,5]  45  180  20  0",
            "no layer table is stored: pytest --memsize-update writes memsize_tables?test_net?test_table[[]7].txt",
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
