"""Where batches vary in size, one more step has the largest of those that follow."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

import memsize
from memsize import ProgramRun

SETUP = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    lengths = LENGTHS
    texts = [torch.zeros(n, dtype=torch.long) for n in lengths]

    def padded(batch):
        return nn.utils.rnn.pad_sequence(batch, batch_first=True)

    model = nn.Sequential(nn.Embedding(100, 256), nn.Linear(256, 100)).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    loader = DataLoader(texts, batch_size=2, collate_fn=padded)
"""
ONE_LONGER = "[64 + n % 7 if n != 200 else 900 for n in range(400)]"
"""Batch 100 of 2 texts each has the longest, 900 tokens."""
LOOP = """
    for epoch in range(3):
        for ids in loader:
            model(ids.cuda()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
"""
ACCELERATE = """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    AcceleratorState._reset_state(True)  # another test of this process may have taken the CPU
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(3):
        for ids in loader:
            accelerator.backward(model(ids).square().mean())
            optimizer.step()
            optimizer.zero_grad()
"""
TRAINER = """
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    AcceleratorState._reset_state(True)
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, ids):
            return {"loss": self.layers(ids).square().mean()}

    args = TrainingArguments("out", per_device_train_batch_size=2, report_to="none", save_strategy="no", optim="sgd")
    sampler = torch.utils.data.SequentialSampler(texts)
    data = {"train_dataset": texts, "data_collator": lambda batch: {"ids": padded(batch)}}
    trainer = Trainer(Model(), args, **data, optimizers=(optimizer, None))
    trainer._get_train_sampler = lambda *_: sampler
    trainer.train()
"""


def ran(folder: Path, text: str, lengths: str = ONE_LONGER, **options: bool) -> ProgramRun:
    script = folder / "train.py"
    setup = textwrap.dedent(SETUP).replace("LENGTHS", lengths)
    script.write_text(setup + textwrap.dedent(text), encoding="utf-8")
    run = memsize.run(script, gpu="t4", **options)
    assert isinstance(run, ProgramRun) and run.failure is None
    return run


@pytest.mark.parametrize(
    ("loop", "steps"), [(LOOP, 4), (ACCELERATE, 5), (TRAINER, 5)], ids=["loop", "accelerate", "trainer"]
)
def test_the_largest_batch_of_those_that_follow_is_trained_on(
    loop: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate holds a batch back, which comes before."""
    monkeypatch.chdir(tmp_path)
    run = ran(tmp_path, loop)
    assert run.steps == steps
    assert any("the largest of the next" in note and "int64[2,900]" in note for note in run.trace.notes)
    activation = 2 * 900 * 256 * 4  # what the embedding returns to the largest batch
    assert max(storage.bytes for storage in run.trace.storages if storage.role == "activation") == activation


@pytest.mark.parametrize(
    "lengths",
    ["[64] * 400", "[901, *range(64, 463)]", "[64, 64, 70] + [64] * 397"],
    ids=["all alike", "the first is the longest", "none longer"],
)
def test_no_further_step_is_made_without_a_larger_batch(lengths: str, tmp_path: Path) -> None:
    run = ran(tmp_path, LOOP, lengths)
    assert run.steps == 3 and not any("largest" in note for note in run.trace.notes)


def test_training_only_looks_for_no_larger_batch(tmp_path: Path) -> None:
    assert ran(tmp_path, LOOP, training_only=True).steps == 3
