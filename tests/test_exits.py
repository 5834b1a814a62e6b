"""The user's code that ends the program, or raises what is no `Exception`: an error that names the line, status 2."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from torch import Tensor, nn

import memsize
from memsize.cli import run
from tests.conftest import Write


class OwnError(BaseException):
    pass


RAISED: dict[str, BaseException] = {
    "SystemExit: 0": SystemExit(0),
    "SystemExit: usage: train.py": SystemExit("usage: train.py"),
    "GeneratorExit": GeneratorExit(),
    "OwnError: stop": OwnError("stop"),
}


class Leaving(nn.Module):
    """Raises in its forward, in the hook of a module inside, in `train`, or where autograd runs backward."""

    def __init__(self, error: BaseException, where: str = "forward") -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.error, self.where = [error], where
        if where == "hook":
            self.body.register_forward_hook(lambda *_: self.leave("hook"))

    def leave(self, where: str) -> None:
        if self.where == where:
            raise self.error[0]

    def train(self, mode: bool = True) -> Leaving:
        if hasattr(self, "where"):
            self.leave("train")
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        self.leave("forward")
        y: Tensor = self.body(x)
        if self.where == "backward":
            y.register_hook(lambda _: self.leave("backward"))
        return y


QUESTIONS: dict[str, Callable[[nn.Module], object]] = {
    "report": lambda model: memsize.report(model, (8,)),
    "trace": lambda model: memsize.trace(model, (8,)),
    "fit": lambda model: memsize.fit(model, (8,), gpu="t4"),
    "audit_layout": lambda model: memsize.layout(model, (8,)),
    "report, computed": lambda model: memsize.report(model, (8,), execute=True),
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("text", RAISED)
def test_a_forward_that_leaves_is_an_error(question: str, text: str) -> None:
    with pytest.raises(memsize.ForwardError) as caught:
        QUESTIONS[question](Leaving(RAISED[text]))
    assert text in str(caught.value)
    assert "at test_exits.py:" in str(caught.value)


@pytest.mark.parametrize("where", ["hook", "train", "backward"])
def test_every_place_of_a_model(where: str) -> None:
    with pytest.raises(memsize.MemsizeError, match="SystemExit: 0") as caught:
        memsize.trace(Leaving(SystemExit(0), where), (8,))
    assert "at test_exits.py:" in str(caught.value)


def leave(*_: object) -> None:
    sys.exit(0)


def leave_later(model: nn.Module) -> Callable[..., None]:
    def body(x: Tensor) -> None:
        model(x).sum().backward()
        sys.exit(0)

    return body


@pytest.mark.parametrize(
    "options", [{"loss": leave}, {"step": leave}, {"step": leave_later}, {"optimizer": leave}, {"progress": leave}]
)
def test_the_users_own_functions(options: dict[str, Callable[..., None]]) -> None:
    ask = memsize.report if "progress" in options else memsize.trace
    with pytest.raises(memsize.MemsizeError, match="SystemExit: 0") as caught:
        ask(nn.Linear(8, 8), (8,), **options)  # type: ignore[arg-type]
    assert "at test_exits.py:" in str(caught.value)


def test_ctrl_c_is_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt):
        memsize.report(Leaving(KeyboardInterrupt()), (8,))


TARGET = """import sys
from torch import nn
class Forward(nn.Module):
    def forward(self, x):
        sys.exit(0)
class Constructor(nn.Module):
    def __init__(self):
        sys.exit(0)
def inputs():
    raise GeneratorExit
"""


@pytest.mark.parametrize("command", ["report", "timeline", "layout", "fit"])
@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("Forward", ["--input", "8"], 5),
        ("Constructor", ["--input", "8"], 8),
        ("Forward", ["--inputs", "model.py:inputs"], 10),
    ],
)
def test_the_command_says_so_and_ends_with_2(
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    name: str,
    options: list[str],
    line: int,
) -> None:
    monkeypatch.chdir(write("model.py", TARGET).parent)
    assert run([command, f"model.py:{name}", *options]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and "Traceback" not in err
    assert f"at model.py:{line}" in out + err


@pytest.mark.parametrize("text", ["import sys\nsys.exit(0)\n", "\nraise GeneratorExit\n"])
def test_an_import_that_leaves(write: Write, text: str) -> None:
    with pytest.raises(memsize.TargetError, match=r"at model\.py:2: "):
        memsize.report(f"{write('model.py', text)}:Net", (8,))
