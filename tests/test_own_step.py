"""Targets that say themselves how they are trained: a LightningModule, a Hugging Face `Trainer`."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import memsize
from memsize import Trace
from memsize.cli import run as command

LIGHTNING = """
import torch
from torch import nn

class LightningModule(nn.Module):  # what Lightning's is, as far as a step goes
    automatic_optimization = True

class Lit(LightningModule):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(512, 256)

    def forward(self, x):
        return self.fc(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return {returned}

    def configure_optimizers(self):
        return {optimizers}

    def train_dataloader(self):
        return [(torch.randn(8, 512), torch.randn(8, 256))]
"""
RETURNED = "nn.functional.mse_loss(self(x), y)"
OPTIMIZERS = '{"optimizer": torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9), "lr_scheduler": None}'


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)

    def written(returned: str = RETURNED, optimizers: str = OPTIMIZERS, more: str = "") -> str:
        text = LIGHTNING.replace("{returned}", returned).replace("{optimizers}", optimizers)
        Path("lit.py").write_text(text + textwrap.dedent(more), encoding="utf-8")
        return "lit.py:Lit"

    return written


def _made(trace: Trace) -> Counter[tuple[str, int]]:
    return Counter((trace.phases[event.phase], event.delta) for event in trace.events if event.delta > 0)


def test_a_lightning_module_trains_as_its_loop_would(write: Callable[..., str]) -> None:
    def make(model: nn.Module) -> Callable[..., None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def body(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

        return body

    own = memsize.trace(write(), optimizer="own")
    loop = memsize.trace(nn.Linear(512, 256), args=(torch.randn(8, 512), torch.randn(8, 256)), step=make)
    phases = ("backward 2", "optimizer 2", "backward 3", "optimizer 3")
    for phase in phases:
        there, here = ({k: v for k, v in _made(t.trace).items() if k[0] == phase} for t in (own, loop))
        assert there == here


@pytest.mark.parametrize(
    ("returned", "optimizers"),
    [
        ("{'loss': " + RETURNED + ", 'log': {}}", OPTIMIZERS),
        (RETURNED, "torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)"),
        (RETURNED, "[torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)], []"),
        (RETURNED, "[{'optimizer': torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)}]"),
    ],
)
def test_every_form_of_what_lightning_takes(write: Callable[..., str], returned: str, optimizers: str) -> None:
    plain = memsize.trace(write(), optimizer="own").trace
    other = memsize.trace(write(returned, optimizers), optimizer="own").trace
    assert other.events == plain.events


def test_reports_and_fits_run_the_step(write: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    """512 × 256 weights and 256 biases of 4 bytes, and as much momentum: 1.00 MiB."""
    assert command(["report", write(), "--train", "own", "--gpu", "t4"]) == 0
    said = capsys.readouterr().out
    assert "training_step with configure_optimizers" in said
    made = memsize.trace("lit.py:Lit", optimizer="own", gpu="t4").trace.storages
    assert sum(storage.bytes for storage in made if storage.role == "optimizer state") == (512 * 256 + 256) * 4
    make = "\ndef batch(batch_size):\n    return torch.randn(batch_size, 512), torch.randn(batch_size, 256)\n"
    fit = memsize.fit(write(more=make), input_data="lit.py:batch", train="own", gpu="t4", scenarios="fp32")
    assert (fit.fit_rows[0].size or 0) > 1000


@pytest.mark.parametrize(
    ("returned", "optimizers", "part"),
    [
        ("None", OPTIMIZERS, "no loss was returned"),
        (RETURNED, "None", "configure_optimizers returned no optimizer"),
    ],
)
def test_what_is_missing_is_named(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str], returned: str, optimizers: str, part: str
) -> None:
    assert command(["timeline", write(returned, optimizers), "--train", "own"]) == 2
    said = capsys.readouterr().err
    assert part in said and "Traceback" not in said


def test_a_model_without_a_step_of_its_own(capsys: pytest.CaptureFixture[str], write: Callable[..., str]) -> None:
    write(more="class Plain(nn.Linear):\n    pass\n")
    assert (
        command(["report", "lit.py:Plain", "--arg", "in_features=3", "--arg", "out_features=3", "--train", "own"]) == 2
    )
    assert "has no training step of its own" in capsys.readouterr().err


def test_a_step_that_calls_its_module_is_one_call_of_it(write: Callable[..., str]) -> None:
    """The step is not a call: `self(x)` is, which returns 8 × 256 floats."""
    (layer, fc), called = memsize.trace(write(), optimizer="own").trace.layers, 8 * 256 * 4
    assert [(each.calls, [str(output.spec) for output in each.outputs]) for each in (layer, fc)] == [
        (1, ["float32[8,256]"])
    ] * 2
    assert layer.output_bytes + fc.output_bytes == called


def test_a_step_that_calls_none_is_the_row_of_its_module(write: Callable[..., str]) -> None:
    trace = memsize.trace(write("nn.functional.mse_loss(self.fc(x), y)"), optimizer="own").trace
    assert [(layer.calls, [str(output.spec) for output in layer.outputs]) for layer in trace.layers] == [
        (1, ["float32[]"]),
        (1, ["float32[8,256]"]),
    ]


TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

config = GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=1000, n_positions=32, bos_token_id=1, eos_token_id=1)
rows = [{"input_ids": torch.arange(32), "labels": torch.arange(32)} for _ in range(64)]
arguments = TrainingArguments("out", per_device_train_batch_size=4, report_to=[], save_strategy="no", **OPTIONS)
trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=rows)
if __name__ == "__main__":
    trainer.train()
"""


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)

    def written(**options: object) -> str:
        Path("hf.py").write_text(TRAINER.replace("OPTIONS", repr(options)), encoding="utf-8")
        return "hf.py:trainer"

    return written


def test_a_hugging_face_trainer_is_its_model_and_its_step(trainer: Callable[..., str]) -> None:
    own = memsize.trace(trainer(), optimizer="own").trace
    assert [(each.name, each.spec.shape) for each in own.inputs] == [("input_ids", (4, 32)), ("labels", (4, 32))]
    weights = sum(tensor.bytes for tensor in own.tensors if tensor.kind == "parameter" and tensor.tied_to is None)
    state = sum(storage.bytes for storage in own.storages if storage.role == "optimizer state")
    assert 2 * weights <= state < 2.01 * weights


def test_a_function_may_return_the_trainer(trainer: Callable[..., str]) -> None:
    """Wanting bfloat16 on a GPU, it fails on this machine, and is built on the other."""
    target = trainer(bf16=True)
    given = memsize.trace(target, optimizer="own").trace
    head, arguments = Path("hf.py").read_text(encoding="utf-8").partition("if __name__")[0].split("arguments =")
    body = f"arguments ={arguments}return trainer".replace("\n", "\n    ")
    Path("hf.py").write_text(f"{head}def make():\n    {body}\n", encoding="utf-8")
    assert memsize.trace("hf.py:make", optimizer="own").trace.events == given.events


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True, "gradient_accumulation_steps": 2},
        {"fp16": True, "max_grad_norm": 0},
        {"activation_checkpointing": True},
    ],
)
def test_a_trainers_step_is_that_of_its_own_loop(trainer: Callable[..., str], options: dict[str, object]) -> None:
    """The second step, by the size and the op of what forward, backward, clipping and optimizer make; only the loop
    copies batches to the GPU, 4 × 32 numbers of 8 bytes.
    """
    own = memsize.trace(trainer(**options), optimizer="own").trace
    run = memsize.run("hf.py", []).trace
    phases = ("forward 2", "backward 2", "clip 2", "optimizer 2", "step 2")
    of_step, of_loop = (
        Counter(
            (event.op, event.delta)
            for event in trace.events
            if event.delta > 1024 and trace.phases[event.phase] in phases
        )
        for trace in (own, run)
    )
    assert of_step == of_loop


def test_another_scenario_takes_the_place_of_the_trainers_precision(trainer: Callable[..., str]) -> None:
    target = trainer(bf16=True)
    given, float32, autocast = (
        memsize.trace(target, optimizer="own", scenario=name).trace for name in ("as-given", "fp32", "amp-bf16")
    )
    assert given.events == autocast.events != float32.events
    assert not any(storage.dtype == "bfloat16" for storage in float32.storages)
    report = memsize.report(target, train="own", scenarios=["as-given", "fp32"])
    assert [row.name for row in report.scenario_results] == ["as-given", "fp32"]
    taken = "compute_loss with create_optimizer, under autocast to bfloat16, gradients clipped to a norm of 1"
    assert any(note.endswith(taken) for note in report.notes)
