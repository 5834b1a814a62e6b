"""The benchmark of scripts that others wrote: its runner, on a repository made here, and its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.scripts import __main__ as command, data, on_cpu
from benchmarks.scripts.recipe import Recipe
from benchmarks.scripts.recipes import RECIPES
from benchmarks.scripts.runner import Outcome, outcome
from benchmarks.scripts.table import page, summary

SCRIPT = """
import sys, torch
words = open("words.txt").read().split()
model = torch.nn.Linear(int(sys.argv[1]), 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1)
for _ in range(9):
    loss = model(torch.ones(len(words[:4]), 512, device="cuda")).sum()
    loss.backward()
    optimizer.step()
print(loss.item())
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "sources/project/examples").mkdir(parents=True)
    (tmp_path / "sources/project/examples/train.py").write_text(SCRIPT, encoding="utf-8")
    return tmp_path / "sources"


def _recipe(arguments: str) -> Recipe:
    return Recipe("project", "owner/project", "examples", f"train.py {arguments}", (data.text("words.txt", lines=1),))


@pytest.mark.thorough
def test_a_script_is_run_in_a_copy_with_its_data(sources: Path, tmp_path: Path) -> None:
    """A weight and a bias of 513 floats: blocks of 2,560 bytes in a segment of 2 MiB, as everything else here."""
    found = outcome(_recipe("512"), sources, tmp_path / "scratch", 300)
    assert not found.failure, found.failure
    assert found.steps == 3 and found.reserved % 2**21 == 0 and found.reserved > 0
    assert [each.name for each in (sources / "project/examples").iterdir()] == ["train.py"]
    assert Outcome.read(json.loads(json.dumps(found.as_dict))) == found


def test_why_a_script_did_not_run(sources: Path, tmp_path: Path) -> None:
    failed = outcome(_recipe("many"), sources, tmp_path / "scratch", 300)
    assert failed.failure.startswith("ValueError: invalid literal for int()")
    absent = Recipe("other", "owner/other", ".", "train.py")
    assert outcome(absent, sources, tmp_path, 1).failure == "no such folder: owner/other/."
    needy = Recipe("needy", "owner/project", "examples", "train.py", needs=("no_such_module_anywhere",))
    assert outcome(needy, sources, tmp_path, 1).failure == "not installed: no_such_module_anywhere"


def test_the_page_counts_what_ran() -> None:
    ran = Outcome("a", "owner/a", "train.py --x 1", "", 3, 3 * 2**20, "backward 2 in conv", ("finite",), 12.0)
    failed = Outcome("b", "owner/b", "b.py", "KeyError: 'c'")
    assert summary([ran, failed]) == "1 of 2 scripts ran."
    text = page([ran, failed])
    assert "1 of 2 scripts ran." in text and "| 3.00 MiB" in text and "KeyError: 'c'" in text
    assert "`train.py --x 1`" in text and "finite" in text


def test_every_recipe_has_a_name_of_its_own() -> None:
    assert len({recipe.name for recipe in RECIPES}) == len(RECIPES) >= 25


def test_the_command_resumes_and_writes_the_page(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def instead(recipe: Recipe, *_: object) -> Outcome:
        return Outcome(recipe.name, recipe.repository, recipe.command, steps=3, reserved=2**21)

    monkeypatch.setattr(command, "outcome", instead)
    results, written = tmp_path / "scripts.json", tmp_path / "results.md"
    options = ["--sources", str(sources), "--results", str(results), "--page", str(written)]
    command.main(["makemore", *options])
    command.main(["nanoGPT", "--resume", *options])
    assert "2 of 2 scripts ran." in capsys.readouterr().out
    assert "makemore" in written.read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        command.main(["nothing-of-that-name", *options])


LOOP = """
import torch
model = torch.nn.Linear(512, 512).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=0.9)
for _ in range(9):
    optimizer.zero_grad()
    model(torch.ones(8, 512, device="cuda")).relu().sum().backward()
    optimizer.step()
"""


def test_a_script_allocates_on_the_cpu_what_was_predicted(tmp_path: Path) -> None:
    """Six tensors in a step. At its peak the gradients of the step before are there again, and with them the input and
    the gradient of the product: 8 × 512 × 4 bytes each.
    """
    script = tmp_path / "train.py"
    script.write_text(LOOP, encoding="utf-8")
    predicted, real = on_cpu.predicted([str(script)]), on_cpu.real([str(script)], gpus=1)
    assert on_cpu.line(on_cpu.compared("loop", predicted, real)) == [
        "loop",
        "6",
        "6",
        "6",
        "32,768 B",
        "+0 B",
        "nothing",
    ]
    relu = next(storage for storage, delta, location in real if delta > 0 and location.op == "relu")
    without = on_cpu.compared("loop", predicted, [event for event in real if event[0] != relu])
    assert dict(without.differences) == {"predicted only: relu (16,384 B)": 1}
