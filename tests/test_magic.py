"""``%%memsize``: a cell of a notebook on a virtual GPU."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memsize
from memsize import ProgramRun

pytest.importorskip("IPython", reason="IPython is not installed")
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(256, 256)
        self.norm = torch.nn.BatchNorm1d(256)
    def forward(self, x):
        return self.norm(self.fc(x))
model = Net()
"""
TRAIN = """
model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
done = 0
while True:
    model(torch.ones(64, 256, device="cuda")).sum().backward()
    optimizer.step()
    done += 1
"""


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    InteractiveShell.clear_instance()
    made = InteractiveShell.instance()
    made.run_line_magic("load_ext", "memsize")
    yield made
    InteractiveShell.clear_instance()


def run(shell: InteractiveShell, cell: str) -> Any:
    return shell.run_cell(cell, store_history=True)


def test_a_cell_is_answered_with_its_run_and_the_lines_of_its_cells(shell: InteractiveShell) -> None:
    run(shell, NET)
    before = {name: value.clone() for name, value in shell.user_ns["model"].state_dict().items()}
    found = run(shell, f"%%memsize --gpu t4 --steps 2{TRAIN}").result
    assert isinstance(found, ProgramRun) and found.card.name == "Tesla T4" and found.steps == 2
    assert shell.user_ns["done"] == 2
    lines = {tensor.line for tensor in found.tensors if tensor.line}
    assert "In [1]:8" in lines and lines <= {"In [1]:8", "In [2]:2", "In [2]:6"}
    assert "In [2]" in found._repr_html_() and str(found).startswith("In [2]   2 steps   on Tesla T4")
    # The model is the user's own: it is where it was, with its values.
    after = shell.user_ns["model"].state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not torch.cuda.is_available()


def test_a_line_is_a_command(shell: InteractiveShell) -> None:
    with capture_output() as captured:
        shell.user_ns["pattern"] = "4090"
        shell.run_cell("%memsize gpus {pattern}")
    assert captured.stdout.splitlines()[2].startswith("GeForce RTX 4090")


def test_the_error_of_a_cell_is_its_own(shell: InteractiveShell) -> None:
    found = run(shell, "%%memsize\n\nraise KeyError('mine')")
    assert isinstance(found.error_in_exec, KeyError)
    trace = found.error_in_exec.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    assert trace is not None and (trace.tb_frame.f_code.co_filename, trace.tb_lineno) == ("In [1]", 3)


def test_a_cell_that_runs_out_of_memory_says_where(shell: InteractiveShell) -> None:
    """The report is shown above the error, whose traceback is without memsize's own calls."""
    with capture_output() as captured:
        found = run(
            shell, "%%memsize --gpu t4\nimport torch\nx = torch.ones(2**20, device='cuda')\nx[:, None] @ x[None]"
        )
    error = found.error_in_exec
    assert isinstance(error, torch.OutOfMemoryError)
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    assert files[-1] == "In [1]" and not any("/memsize/virtual/" in file for file in files)
    (shown,) = captured.outputs
    assert "Out of memory on Tesla T4 at In [1]:4" in shown.data["text/html"]


@pytest.mark.parametrize(("line", "text"), [("--gpu t5", "t5"), ("--epochs 3", "--epochs"), ("--gpu 't4", "quotation")])
def test_a_wrong_option_is_said_in_one_line(shell: InteractiveShell, line: str, text: str) -> None:
    error = run(shell, f"%%memsize {line}\npass").error_in_exec
    assert isinstance(error, UsageError) and text in str(error)


def _fail_after_a_backward(model: torch.nn.Module) -> None:
    model.cuda()(torch.ones(2, 4, device="cuda")).sum().backward()
    raise ValueError("in virtual_gpu")


def test_a_block_gives_back_what_it_moved() -> None:
    model = torch.nn.BatchNorm1d(4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="virtual_gpu"), memsize.virtual_gpu("t4"):
        _fail_after_a_backward(model)
    assert {name: value.device.type for name, value in model.state_dict().items()} == dict.fromkeys(before, "cpu")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_an_unclosed_quotation_is_one_line(shell: InteractiveShell) -> None:
    for line in ('%memsize report "net.py', '%%memsize --gpu "t4\n1'):
        error = run(shell, line).error_in_exec
        assert isinstance(error, UsageError) and str(error) == "No closing quotation"
