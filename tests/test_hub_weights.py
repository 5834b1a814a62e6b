"""`memsize run` where weights of a hub are not on this machine: what stands for them takes what they would take."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

import memsize
from memsize import ProgramRun

transformers = pytest.importorskip("transformers")

TRAINING = """
import sys, torch
from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained({source}, num_labels=5{options}).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    tokens, labels = torch.ones(2, 16, dtype=torch.long).cuda(), torch.ones(2, dtype=torch.long).cuda()
    model(input_ids=tokens, labels=labels).loss.backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config and weights, in bfloat16."""
    folder = tmp_path_factory.mktemp("model")
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256, vocab_size=1000, num_labels=5
    )
    transformers.BertForSequenceClassification(config).bfloat16().save_pretrained(folder)
    return folder


def ran(folder: Path, text: str) -> ProgramRun:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(text), encoding="utf-8")
    run = memsize.run(script, gpu="t4")
    assert isinstance(run, ProgramRun)
    return run


@pytest.mark.parametrize("options", ["", ", dtype='auto'", ", dtype=torch.float16, device_map='cuda'"])
def test_what_stands_for_weights_takes_what_they_take(
    weights: Path, tmp_path: Path, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "hub"
    snapshot = cache / "models--nobody--tiny" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (cache / "models--nobody--tiny" / "refs").mkdir()
    (cache / "models--nobody--tiny" / "refs" / "main").write_text("0123")
    (snapshot / "config.json").write_bytes((weights / "config.json").read_bytes())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    there = ran(tmp_path, TRAINING.format(source=repr(str(weights)), options=options))
    stood_in = ran(tmp_path, TRAINING.format(source=f"'nobody/tiny', cache_dir={str(cache)!r}", options=options))
    if "device_map" in options:  # several threads read weights to the GPU, in an order of their own
        sizes = [sorted(storage.bytes for storage in run.trace.storages) for run in (stood_in, there)]
        assert sizes[0] == sizes[1] and stood_in.peak.requested == there.peak.requested
    else:
        assert stood_in.trace.events == there.trace.events and stood_in.peak == there.peak
    assert stood_in.steps == there.steps == 3
    assert any("the weights of nobody/tiny are not on this machine" in note for note in stood_in.trace.notes)
    assert not any("not on this machine" in note for note in there.trace.notes)


def test_weights_that_cannot_be_downloaded_are_stood_in_for(tmp_path: Path) -> None:
    run = ran(
        tmp_path,
        """
        import torch
        model = torch.nn.Linear(512, 1024).cuda()
        state = torch.hub.load_state_dict_from_url("http://127.0.0.1:9/net-0123.pth", "cache", "cuda")
        model.load_state_dict(state)
        """,
    )
    assert run.failure is None
    assert sum(storage.bytes for storage in run.trace.storages) == 2 * 4 * (512 * 1024 + 1024)
    assert any("net-0123.pth is not there" in note for note in run.trace.notes)
    assert not (tmp_path / "cache" / "net-0123.pth").exists()


def test_a_timm_model_whose_weights_cannot_be_downloaded_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("timm")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text = """
        import timm, torch
        model = timm.create_model("resnet10t", pretrained={}).cuda()
        model(torch.ones(1, 3, 64, 64, device="cuda")).sum().backward()
        """
    pretrained, initial = (ran(tmp_path, text.format(choice)) for choice in (True, False))
    assert pretrained.failure is None and pretrained.trace.events == initial.trace.events
    assert any("the weights of ResNet could not be downloaded" in note for note in pretrained.trace.notes)
