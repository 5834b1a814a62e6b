"""Code that waits for a later step runs at once after the steps, and never code that would not run at all."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

import memsize
from memsize import ProgramRun

SETUP = """
    import argparse, torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    args = argparse.Namespace(evaluate_every=500, eval_steps=250, evaluate=False, epochs=3)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2000)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    train = DataLoader(TensorDataset(torch.randn(32 * 4000, 64)), batch_size=32)
    step, best, other, loss = 0, 0, 5, torch.ones(1000, 1000, device='cuda').mean()

    def batch(size):
        return torch.randn(size, 64, device="cuda")

    def update(x):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def evaluate():
        outputs = []
        with torch.no_grad():
            for _ in range(3):
                outputs.append(model(batch(1024)))
        return outputs
"""
OUTPUTS = 3 * 1024 * 2000 * 4
"""Bytes of the outputs that the evaluation gathers."""
OF_LOADER = "for step, (x,) in enumerate(train):\n    update(x.cuda())\n    if {}:\n        evaluate()\n"
COUNTED = "for step in range(10_000):\n    if {}:\n        evaluate()\n    update(batch(32))\n"
WHILE = "while step < 10_000:\n    update(batch(32))\n    step += 1\n    if {}:\n        evaluate()\n"
TOP = "for x, in train:\n    if {}:\n        evaluate()\n    update(x.cuda())\n    step = step + 1\n"
OTHERWISE = """
for step in range(10_000):
    update(batch(32))
    if other == 6:
        pass
    elif {}:
        evaluate()
"""
OBJECT = """
class Trainer:
    step = 0
    def train(self):
        for _ in range(args.epochs):
            for x, in train:
                update(x.cuda())
                self.step += 1
                self.after_step()
    def after_step(self):
        if {}:
            self.evaluate()
    def evaluate(self):
        return evaluate()
Trainer().train()
"""


def ran(folder: Path, loop: str, **options: bool) -> ProgramRun:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SETUP) + loop, encoding="utf-8")
    run = memsize.run(script, gpu="t4", **options)
    assert isinstance(run, ProgramRun) and run.failure is None and run.steps == 3
    return run


@pytest.mark.parametrize(
    ("loop", "condition", "counter"),
    [
        (OF_LOADER, "step and step % 500 == 0", "step = 500"),
        (OF_LOADER, "(step + 1) % args.evaluate_every == 0", "step = 499"),
        (OF_LOADER, "step > 3 and step % args.eval_steps == 0", "step = 250"),
        (COUNTED, "step % args.evaluate_every == 0 and step > 700", "step = 1000"),
        (WHILE, "step % args.evaluate_every == 0", "step = 500"),
        (WHILE, "step in (200, 900)", "step = 200"),
        (TOP, "step % 500 == 499", "step = 499"),
        (OTHERWISE, "step == 9_999", "step = 9999"),
        (OBJECT, "self.step % args.evaluate_every == 0", "self.step = 500"),
    ],
)
def test_an_evaluation_that_waits_for_a_later_step_runs_after_the_third(
    loop: str, condition: str, counter: str, tmp_path: Path
) -> None:
    run = ran(tmp_path, loop.format(condition))
    assert run.after is not None and run.after.evaluation is not None
    straight = ran(tmp_path, "for _ in range(3):\n    update(batch(32))\nevaluate()\n")
    assert straight.after is not None and run.after.evaluation == straight.after.evaluation > OUTPUTS
    assert any(f"waits for {counter}: here it runs after step 3" in note for note in run.trace.notes)


@pytest.mark.parametrize(
    ("loop", "condition"),
    [
        (OF_LOADER, "args.evaluate and step % 500 == 0"),
        (OF_LOADER, "step % 1_000_000_000 == 999_999_999"),
        (OF_LOADER, "step == 4_000"),  # the loader has 4,000 batches: the last is number 3,999
        (COUNTED, "step == 10_000"),
        (WHILE, "step % 20_000 == 0"),
        (COUNTED, "model(batch(1)).sum() > 2 and step % 500 == 499"),  # nobody may run this once more
        (COUNTED, "loss < 2 and step % 500 == 499"),  # nor compare what is on the GPU
        (COUNTED, "best > 2"),
        (COUNTED, "missing % 500 == step"),
    ],
)
def test_code_that_no_later_step_reaches_does_not_run(loop: str, condition: str, tmp_path: Path) -> None:
    if "missing" in condition:
        condition = f"step > 10 and {condition}"
    run = ran(tmp_path, loop.format(condition))
    assert (run.after is None or run.after.evaluation is None) and not any("waits" in note for note in run.trace.notes)


def test_an_evaluation_and_a_checkpoint_that_wait_both_run_and_leave_no_file(tmp_path: Path) -> None:
    loop = (
        OF_LOADER.format("step % 500 == 499")
        + "    if step % 700 == 0:\n        torch.save(model.state_dict(), 'a.pt')\n"
    )
    run = ran(tmp_path, loop)
    assert run.after is not None and run.after.checkpoint is not None and run.after.evaluation is not None
    assert len([note for note in run.trace.notes if "waits" in note]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_training_only_leaves_out_code_that_waits(tmp_path: Path) -> None:
    run = ran(tmp_path, COUNTED.format("step % 500 == 499"), training_only=True)
    assert run.after is None and not any("waits" in note for note in run.trace.notes)


def test_a_count_of_batches_that_ends_an_evaluation_bounds_what_it_gathers(tmp_path: Path) -> None:
    loop = OF_LOADER.replace("evaluate()", "outputs = []\n        {}").format("step % 500 == 499", GATHERING)
    run = ran(tmp_path, loop)
    assert run.after is not None and (run.after.batches, run.after.of) == (8, 21)


GATHERING = """
        for number, (x,) in enumerate(DataLoader(train.dataset, 64)):
            with torch.no_grad():
                outputs.append(model(x.cuda()))
            if number == 20:
                break
"""
