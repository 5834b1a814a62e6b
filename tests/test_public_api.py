"""The public names: those that docs/python.md lists, documented, and cheap to import."""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import memsize
from memsize import LayoutReport
from memsize.errors import first_line, nearest, suggestion
from memsize.render import render
from tests.models import parse_input
from tests.records import Audit, Run

Python = Callable[..., subprocess.CompletedProcess[str]]
PAGE = Path(__file__).resolve().parent.parent / "docs" / "python.md"


def documented() -> set[str]:
    """The names in the page's table of what is in `memsize`."""
    table = PAGE.read_text(encoding="utf-8").partition("| name in `memsize` |")[2].partition("\n\n")[0]
    return {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1:2][0] or "")}


def test_all_names_are_those_that_the_page_lists() -> None:
    assert set(memsize.__all__) == documented()
    assert list(memsize.__all__) == sorted(memsize.__all__)


def test_each_says_what_it_is() -> None:
    for name in memsize.__all__:
        text = inspect.getdoc(getattr(memsize, name)) or ""
        first = text.splitlines()[0]
        assert first[:1].isupper() or first[:1] == "`", name
        assert not text.startswith(f"{name}(")  # what dataclasses write when nobody else does


@pytest.mark.parametrize("name", ["checkpoint", "diff", "fit", "layout", "report", "trace"])
def test_functions_say_what_they_raise(name: str) -> None:
    text = inspect.getdoc(getattr(memsize, name)) or ""
    raised = re.findall(r"`(\w+Error)`", text.partition("Raises ")[2])
    assert raised
    assert set(raised) <= set(memsize.__all__)


def test_every_error_is_a_memsize_error() -> None:
    errors = [getattr(memsize, name) for name in memsize.__all__ if name.endswith("Error")]
    assert all(issubclass(error, memsize.MemsizeError) for error in errors)
    assert set(errors) == {memsize.MemsizeError, *memsize.MemsizeError.__subclasses__()}


EMPTY = LayoutReport(Audit("m", (), "fp32", True, Run(), Run()))


@pytest.mark.parametrize(
    ("call", "error", "kind", "value", "nearest"),
    [
        (lambda: memsize.fit("m.py:Net", "3", gpu="h10"), memsize.InputError, "GPU", "h10", "H100 80GB"),
        (lambda: memsize.fit("m.py:Net", "3", scenarios="fp8"), memsize.ScenarioError, "scenario", "fp8", "fp8-weight"),
        (lambda: memsize.Training("adamm"), memsize.InputError, "optimizer", "adamm", "adam"),
        (lambda: parse_input("3,4:Int46"), memsize.InputError, "dtype", "Int46", "int64"),
        (
            lambda: render(EMPTY, "jsn"),
            memsize.OutputError,
            "format",
            "jsn",
            "json",
        ),
        (lambda: memsize.report("torch.nn:Linaer", "3"), memsize.TargetError, "name", "Linaer", "Linear"),
    ],
)
def test_an_unknown_name_is_an_error_of_its_own_and_of_what_it_names(
    call: Callable[[], object], error: type[Exception], kind: str, value: str, nearest: str
) -> None:
    with pytest.raises(memsize.UnknownValueError) as caught:
        call()
    assert isinstance(caught.value, error)
    assert (caught.value.kind, caught.value.value, caught.value.nearest[0]) == (kind, value, nearest)
    assert f"did you mean {nearest}" in str(caught.value)


def test_which_names_are_near() -> None:
    # Those that begin alike come first, the closest in length before the others; case does not matter.
    assert nearest("Res", ["alexnet", "resnet18", "resnet", "RESN"]) == ("RESN", "resnet", "resnet18")
    assert nearest("resnet18x", ["resnet", "resnet18", "vgg"], most=1) == ("resnet18",)
    # A letter begins too much; "x" is like nothing.
    assert nearest("x", ["xlnet", "xlm-large"]) == ()
    assert suggestion("x", ["xlnet", "xlm-large"]) == "known: xlnet, xlm-large"
    assert suggestion("xl", ["xlnet"]) == "did you mean xlnet?"
    assert suggestion("x", []) == "there is none"
    many = [f"name{number}" for number in range(31)]
    assert suggestion("?", many[:30]).endswith("name28, name29")
    assert suggestion("?", many) == f"known: {', '.join(many[:8])} and 23 more"


def test_the_first_line_of_an_error() -> None:
    assert first_line(ValueError("\n  it failed.\nat line 3")) == "it failed"
    assert first_line(ValueError("not valid:\n    512 is no multiple of 6.\n    see there")) == (
        "not valid: 512 is no multiple of 6"
    )
    assert first_line(ValueError("not valid:")) == "not valid"
    assert first_line(KeyError()) == "KeyError"
    assert first_line("") == ""


HEAVY = ("torch", "pandas", "numpy", "click", "jinja2", "tqdm", "tabulate", "torchinfo", "torchao")


def imported(python: Python, code: str, heavy: tuple[str, ...]) -> list[str]:
    """Which of `heavy` are loaded after `code` has run in an interpreter of its own."""
    done = python("-W", "error", "-c", f"{code}\nimport sys\nprint(*(set({heavy!r}) & set(sys.modules)))")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


def test_importing_loads_nothing_heavy(python: Python) -> None:
    assert imported(python, "import memsize", HEAVY) == []


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["report", "--help"]])
def test_help_loads_no_torch(python: Python, arguments: list[str]) -> None:
    heavy = tuple(name for name in HEAVY if name != "click")
    assert imported(python, f"from memsize.cli import run\nassert run({arguments!r}) == 0", heavy) == []


@pytest.mark.thorough
def test_a_report_does_not_load_the_compiler(warm_python: Python, toy_target: str) -> None:
    """Nor does the one that the process has made which this is forked from."""
    slow = ("torch._dynamo", "sympy", "torchao", "torch._inductor", "pandas")
    code = f"from memsize.cli import run\nassert run(['report', {toy_target!r}, '--input', '3,64,64']) == 0"
    assert imported(warm_python, code, slow) == []
