"""What a script does after its steps: evaluation and checkpoint follow at once, and are no part of what may fail."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path
from typing import Any

import pytest

import memsize
from memsize import ProgramRun

TRAINING = """
    import sys, torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    train_batches, test_batches = map(int, sys.argv[1:])
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2000)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    train = DataLoader(TensorDataset(torch.randn(32 * train_batches, 64)), batch_size=32)
    test = DataLoader(TensorDataset(torch.randn(128 * test_batches, 64)), batch_size=128)
    for epoch in range(9):
        for x, in train:
            optimizer.zero_grad()
            model(x.cuda()).square().mean().backward()
            optimizer.step()
"""
EVALUATION = """
        model.eval()
        answers = []
        with torch.no_grad():
            for x, in test:
                answers.append(model(x.cuda()))
        model.train()
        torch.save(model.state_dict(), "model.pt")
"""
ANSWER = 128 * 2000 * 4
"""Bytes of what the model says to a batch of the evaluation."""


def ran(folder: Path, text: str, *arguments: str, **options: Any) -> ProgramRun:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(text), encoding="utf-8")
    run = memsize.run(script, arguments, gpu=options.pop("gpu", "t4"), **options)
    assert isinstance(run, ProgramRun)
    return run


def sentence(run: ProgramRun, code: str) -> str:
    return next((finding.text() for finding in run.findings if finding.code == code), "")


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_an_epoch_cut_short_is_followed_by_what_follows_a_short_one(tmp_path: Path) -> None:
    """The oracle is the same script with so few batches that nothing is cut, run through its first epoch."""
    cut = ran(tmp_path, TRAINING + EVALUATION, "1000", "8")
    whole = ran(tmp_path, f"{TRAINING}{EVALUATION}\n        break", "3", "8", steps=0)
    assert cut.steps == whole.steps == 3 and cut.stopped and not whole.stopped
    events = [[event[:2] for event in run.trace.events] for run in (cut, whole)]
    assert all(one == other for one, other in zip(*events, strict=False)) and len(events[0]) >= len(events[1])
    assert cut.peak.peak_phase == whole.peak.peak_phase == "evaluation" and cut.peak.requested == whole.peak.requested
    assert cut.after is not None and cut.after.evaluation == cut.peak.requested > cut.after.training
    assert cut.after.checkpoint is not None and cut.after.checkpoint < cut.after.evaluation


def test_what_an_evaluation_gathers_counts_for_all_of_its_batches(tmp_path: Path) -> None:
    run = ran(tmp_path, TRAINING + EVALUATION, "1000", "50")
    after = run.after
    assert after is not None and (after.batches, after.of, after.per_batch) == (8, 50, ANSWER)
    assert after.evaluation is not None and after.whole_evaluation == after.evaluation + 42 * ANSWER
    assert after.line == "train.py:21"
    assert "made at train.py:21" in sentence(run, "run-evaluation-grows")
    assert not any("not in evaluation" in finding.in_brief() for finding in run.findings)


@pytest.mark.thorough
def test_an_evaluation_whose_batches_together_are_too_many_is_in_the_verdict(tmp_path: Path) -> None:
    run = ran(tmp_path, TRAINING + EVALUATION, "1000", "20000")
    brief = next(finding.brief for finding in run.findings if finding.code == "run-evaluation-grows")
    assert run.failure is None and brief.startswith("Training fits, evaluation does not")


def test_an_evaluation_that_keeps_nothing_does_not_grow(tmp_path: Path) -> None:
    run = ran(tmp_path, TRAINING + EVALUATION.replace("answers.append(model(x.cuda()))", "model(x.cuda())"), "9", "50")
    assert run.after is not None and run.after.per_batch == 0 and not sentence(run, "run-evaluation-grows")


@pytest.mark.parametrize("mode", ["torch.no_grad()", "torch.inference_mode()", "torch.enable_grad()"])
def test_an_evaluation_with_gradients_keeps_a_graph_for_nothing(mode: str, tmp_path: Path) -> None:
    """The second layer saves what the ReLU returns to 64 × 128 samples: 256 numbers for each."""
    forward = "model(x.cuda().repeat(64, 1))"
    evaluation = EVALUATION.replace("torch.no_grad()", mode).replace("answers.append(model(x.cuda()))", forward)
    run = ran(tmp_path, TRAINING + evaluation, "1000", "8")
    kept = mode == "torch.enable_grad()"
    assert run.after is not None and run.after.evaluation is not None
    assert (run.after.graph_bytes, run.after.graph_line) == ((64 * 128 * 256 * 4, "train.py:21") if kept else (0, None))
    text = sentence(run, "run-evaluation-with-gradients")
    assert bool(text) == kept and (not kept or "are activations for a backward that never runs, made at" in text)


def test_a_model_that_trains_in_eval_mode_is_not_evaluated_by_its_next_step(tmp_path: Path) -> None:
    """As from_pretrained leaves it, in a loop that never calls train()."""
    script = TRAINING.replace("optimizer = torch", "model.eval()\n    optimizer = torch")
    run = ran(tmp_path, script, "1000", "8")
    assert run.after is None or run.after.evaluation is None


def test_memory_that_runs_out_in_an_evaluation_says_that_training_fits(tmp_path: Path) -> None:
    huge = EVALUATION.replace("model(x.cuda())", "model(x.cuda().repeat(20_000, 1))")
    run = ran(tmp_path, TRAINING + huge, "1000", "50")
    assert run.ran_out and run.refused[0].phase.startswith("evaluation")
    assert any(finding.brief.startswith("Training fits, the code after it does not") for finding in run.findings)


def test_what_fails_after_the_steps_is_no_failure_of_the_script(tmp_path: Path) -> None:
    run = ran(tmp_path, f"{TRAINING}\n        raise ValueError('no metric')", "1000", "8")
    assert run.failure is None and run.steps == 3 and "no metric" in sentence(run, "run-after-steps-failed")
    assert run.after is not None and run.after.failed_at == "train.py:17"


def test_a_loop_that_counts_its_batches_is_over_with_them(tmp_path: Path) -> None:
    counting = TRAINING.replace(
        "for x, in train:", "batches = iter(train)\n        for _ in range(1000):\n            x, = next(batches)"
    )
    run = ran(tmp_path, counting, "1000", "8")
    assert run.failure is None and run.steps == 3 and run.after is None


@pytest.mark.parametrize("training_only", [True, False])
def test_training_only_stops_after_the_steps(tmp_path: Path, training_only: bool) -> None:
    run = ran(tmp_path, TRAINING + EVALUATION, "1000", "8", training_only=training_only)
    assert (run.after is None) == training_only
    assert any(phase.startswith("evaluation") for phase in run.trace.phases) != training_only


def test_files_that_follow_the_steps_are_removed(tmp_path: Path) -> None:
    writing = (
        "\n        from pathlib import Path; Path('checkpoint-3').mkdir(); Path('checkpoint-3/state').write_text('3')"
    )
    ran(tmp_path, f"{TRAINING}{EVALUATION}{writing}", "1000", "8")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    ran(tmp_path, f"{TRAINING}{EVALUATION}{writing}", "1000", "8", allow_writes=True)
    assert (tmp_path / "checkpoint-3" / "state").read_text() == "3"


def test_nothing_is_uploaded_after_the_steps(tmp_path: Path) -> None:
    """192.0.2.1 is an address for documentation (RFC 5737)."""
    uploading = "\n        import socket; socket.create_connection(('192.0.2.1', 443), timeout=1)"
    run = ran(tmp_path, f"{TRAINING}{uploading}", "1000", "8")
    assert run.failure is None
    assert "a program after its steps connects to no other machine" in sentence(run, "run-after-steps-failed")
    pytest.importorskip("huggingface_hub")
    uploading = """
        import huggingface_hub
        assert huggingface_hub.constants.HF_HUB_OFFLINE is True
        raise ValueError("offline")
    """
    last = textwrap.indent(textwrap.dedent(uploading), "    ")
    run = ran(tmp_path, f"import huggingface_hub.constants\n{textwrap.dedent(TRAINING)}{last}", "1000", "8")
    assert "ValueError: offline" in sentence(run, "run-after-steps-failed")


def test_what_grows_in_training_has_its_variable_after_an_evaluation(tmp_path: Path) -> None:
    growing = TRAINING.replace("for epoch", "seen = []\n    for epoch").replace(
        "            optimizer.step()", "            optimizer.step()\n            seen.append(model(x.cuda()))"
    )
    run = ran(tmp_path, growing + EVALUATION, "1000", "8")
    assert run.growth is not None and run.growth.holder is not None and run.growth.holder.name == "seen"


@pytest.mark.thorough
def test_a_full_state_gathered_for_a_checkpoint_is_its_peak(tmp_path: Path) -> None:
    """Each rank holds its quarter of 4,096 x 4,096 float32 weights, all gathered in a full state."""
    text = """
        import torch
        from torch import nn
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
        from torch.distributed.fsdp import fully_shard
        from torch.utils.data import DataLoader, TensorDataset

        torch.distributed.init_process_group("nccl")
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4))).cuda()
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, in DataLoader(TensorDataset(torch.randn(4000, 4096)), batch_size=4):
            model(x.cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    """
    run, weight = ran(tmp_path, text, gpus=4), 4096 * 4096 * 4
    assert run.after is not None and run.after.checkpoint is not None
    assert run.after.checkpoint >= 4 * weight // 4 + 4 * weight


@pytest.mark.thorough
def test_the_trainer_of_transformers_evaluates_and_saves_at_once(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text = """
        import torch
        from torch import nn
        from transformers import Trainer, TrainingArguments

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(64, 2000)

            def forward(self, x, labels):
                logits = self.linear(x)
                return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

        data = [{"x": torch.zeros(64), "labels": torch.tensor(1)} for _ in range(4000)]
        arguments = TrainingArguments(
            "out", per_device_train_batch_size=4, per_device_eval_batch_size=128, eval_strategy="steps", eval_steps=500,
            report_to="none", disable_tqdm=True,
        )
        metric = lambda prediction: {}
        Trainer(Net(), arguments, train_dataset=data, eval_dataset=data, compute_metrics=metric).train()
    """
    run = ran(tmp_path, text)
    assert run.failure is None and run.steps == 3
    after = run.after
    assert after is not None and after.checkpoint is not None
    assert (after.batches, after.of) == (8, 32)
    assert ANSWER <= after.per_batch < 1.01 * ANSWER  # and the loss and the labels
    assert "eval_accumulation_steps" in sentence(run, "run-evaluation-grows")
    assert not list(tmp_path.glob("out/checkpoint-*"))


BLOCKS = """
    import torch
    from torch import nn
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    class Block(nn.Module):
        gradient_checkpointing = False

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            if self.gradient_checkpointing and self.training:
                return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False)
            return self.linear(x)

    model = nn.Sequential(Block(), Block()).cuda()
    {}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(9):
        model(torch.randn(8, 64, device="cuda", requires_grad=True)).sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("switch", "named"),
    [
        ("", None),
        ("model[0].gradient_checkpointing = True", None),
        ("model[0].gradient_checkpointing = True; model.eval()", "0.gradient_checkpointing"),
        ("apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, Block))", None),
        ("apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, nn.Conv2d))", "train.py:19"),
    ],
)
def test_checkpointing_that_is_on_and_recomputes_nothing_is_named(
    tmp_path: Path, switch: str, named: str | None
) -> None:
    for steps in (9, 2):  # stopped by memsize, and ended by itself
        run = ran(tmp_path, BLOCKS.format(switch).replace("range(9)", f"range({steps})"))
        assert run.unused_checkpointing == named
        assert (named or "on (") in (sentence(run, "run-checkpoints-nothing") or "on (")


def test_a_tensor_on_another_ranks_gpu_is_a_finding(tmp_path: Path) -> None:
    with pytest.raises(memsize.ForwardError, match=r"Rank 3 puts a tensor on cuda:0, the GPU of another rank"):
        ran(tmp_path, "import torch\ntorch.zeros(9, device='cuda:0')", gpus=8, rank=3)


UNCHOSEN = """
import os, torch
{}
torch.distributed.init_process_group("nccl")
{}
weight = torch.ones(256, 256).cuda().requires_grad_()
(weight @ torch.ones(256, 256, device="cuda")).sum().backward()
torch.optim.SGD([weight], 0.1).step()
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torch.cuda.set_device(int(os.environ['LOCAL_RANK']))", ""),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = os.environ['LOCAL_RANK']", ""),
        ("", "torch.accelerator.set_device_index(torch.distributed.get_rank())"),
        ("", "torch.distributed.device_mesh.init_device_mesh('cuda', (4,))"),  # which chooses by LOCAL_RANK
    ],
)
def test_a_rank_that_chooses_its_gpu_is_on_it(tmp_path: Path, before: str, after: str) -> None:
    for rank in (0, 3):
        run = ran(tmp_path, UNCHOSEN.format(before, after), gpus=4, rank=rank)
        assert run.steps == 1 and not sentence(run, "run-shares-gpu")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = '0,1,2,3'", ""),
        # A mesh respects a context that is there already, whichever GPU it is on.
        ("torch.ones(1).cuda()", "torch.distributed.device_mesh.init_device_mesh('cuda', (4,))"),
    ],
)
def test_ranks_that_choose_no_gpu_share_the_first(tmp_path: Path, before: str, after: str) -> None:
    run = ran(tmp_path, UNCHOSEN.format(before, after), gpus=4)
    (shared,) = (finding for finding in run.findings if finding.code == "run-shares-gpu")
    assert shared.bytes == 4 * run.peak.device.high and "all 4 ranks put their tensors on cuda:0" in shared.text()
    with pytest.raises(memsize.ForwardError, match="Rank 3 puts a tensor on cuda:0, the GPU of another rank"):
        ran(tmp_path, UNCHOSEN.format(before, after), gpus=4, rank=3)


BY_HAND = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.cache = nn.Linear(256, 4096), None

    def forward(self, x):
        y = self.body(x)
        if {caches} and not self.training:
            self.cache = y if self.cache is None else torch.cat((self.cache, y))
        return y

model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for number in range(3):
    model(torch.randn(64, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
results = []
with torch.no_grad():
    for number in range(12):
        y = model(torch.randn(64, 256, device="cuda"))
        {after}
"""


@pytest.mark.parametrize(
    ("caches", "after", "per_batch"),
    [
        (False, "results.append(y)", 64 * 4096 * 4),
        (False, "results.append(y.argmax(1).cpu())", 0),
        (True, "results.append(y.argmax(1).cpu())", 0),  # one cache, which grows, as that of a generation
    ],
)
def test_an_evaluation_by_hand_that_keeps_its_results(tmp_path: Path, caches: bool, after: str, per_batch: int) -> None:
    run = ran(tmp_path, BY_HAND.format(caches=caches, after=after))
    assert run.failure is None and run.after is not None
    assert run.after.per_batch == per_batch and run.after.of is None
    text = f"each batch leaves {64 * 4096 * 4 >> 20}.00 MiB on the GPU" if per_batch else ""
    assert text in sentence(run, "run-evaluation-grows") and bool(text) == bool(sentence(run, "run-evaluation-grows"))


@pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="Lightning is not installed")
@pytest.mark.filterwarnings("default")
@pytest.mark.thorough
def test_lightning_validates_after_the_steps(tmp_path: Path) -> None:
    """Before them it only checks that it can; it validates after a whole epoch, of a thousand batches here."""
    run = ran(tmp_path, LIGHTNING)
    assert run.steps == 3 and run.after is not None and (run.after.batches, run.after.of) == (8, 63)
    assert run.after.evaluation is not None and run.after.per_batch == 1024 * 1000 * 4


LIGHTNING = """
    import lightning, torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.outputs = nn.Linear(256, 1000), []

        def training_step(self, batch, index):
            return self.net(batch[0]).square().mean()

        def validation_step(self, batch, index):
            self.outputs.append(self.net(batch[0]))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    samples = TensorDataset(torch.randn(64_000, 256))
    trainer = lightning.Trainer(max_epochs=3, accelerator="gpu", devices=1)
    trainer.fit(Net(), DataLoader(samples, batch_size=64), DataLoader(samples, batch_size=1024))
"""
