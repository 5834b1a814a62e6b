"""Another PyTorch and CUDA than the installed ones: what is read, what is refused, and which rules follow from it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import memsize
from memsize import AllocatorConfig, Stack, Trace
from memsize.cli import run
from memsize.errors import InputError
from tests.gpus import budgets, cublas_workspace, cublaslt_workspace, keeps_cublaslt_workspace
from tests.test_ranks import most

MiB = 1 << 20
CUBLAS = 8_519_680
RELEASES = [f"2.{minor}" for minor in range(15)]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def workspaces(trace: Trace) -> list[int]:
    """The bytes of each workspace that is alive at the end of a run."""
    ended = {event.storage for event in trace.events if event.delta < 0}
    return [s.bytes for index, s in enumerate(trace.storages) if s.role == "workspace" and index not in ended]


# -- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stack"),
    [
        ("", Stack()),
        ("torch=2.6,cuda=12.4", Stack("2.6", "12.4")),
        (" cuda = 11.6 ", Stack(cuda="11.6")),
        ("cuda=12.8,torch=2.9.1", Stack("2.9.1", "12.8")),
        ("cudnn=9.8", Stack(cudnn="9.8")),
    ],
)
def test_a_stack_is_read(text, stack):
    assert Stack.parse(text) == Stack.of(text) == Stack.of(stack) == stack
    assert Stack.of(None) == Stack()


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("", None),
        ("torch=2.0", "8.5.0"),
        ("torch=2.6.0", "9.1.0"),
        ("torch=2.9", "9.10.2"),
        ("torch=2.9,cudnn=9.8", "9.8"),
    ],
)
def test_a_stack_names_its_cudnn(text, release):
    """The pins of PyTorch's wheels on PyPI: nvidia-cudnn-cu11==8.5.0.96 for 2.0, -cu12==9.1.0.70 for 2.6, …"""
    assert Stack.parse(text).cudnn_release == release
    assert all(Stack(torch).cudnn_release for torch in RELEASES)


@given(st.sampled_from([None, *RELEASES]), st.sampled_from([None, "11.6", "12", "12.4", "13.0"]))
def test_parsing_inverts_writing(release, cuda):
    stack = Stack(release, cuda)
    assert Stack.parse(str(stack)) == stack


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torch=1.13", "PyTorch 1.13 is not known: its memory is simulated for 2.0 to 2.14"),
        ("torch=2.15", "PyTorch 2.15 is not known: its memory is simulated for 2.0 to 2.14"),
        ("torch=2", "PyTorch 2 is not known: its memory is simulated for 2.0 to 2.14"),
        ("torch=nightly", "PyTorch nightly is not known: its memory is simulated for 2.0 to 2.14"),
        ("cuda=10.2", "CUDA 10.2 is not known: PyTorch's stacks have 11.0 to 13.x"),
        ("cuda=14.0", "CUDA 14.0 is not known: PyTorch's stacks have 11.0 to 13.x"),
        ("2.6", "cannot read '2.6' in a stack: write it like torch=2.6,cuda=12.4"),
        ("torch=", "cannot read 'torch=' in a stack"),
        ("torch=2.6,torch=2.7", "cannot read 'torch=2.7' in a stack"),
        ("nccl=2", "cannot read 'nccl=2' in a stack"),
        ("cudnn=9", "cuDNN 9 cannot be read: write it like 9.10"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(InputError) as refused:
        Stack.parse(text)
    assert str(refused.value).startswith(message)


def test_the_range_of_known_releases():
    assert [Stack(each).release for each in RELEASES] == [(2, minor) for minor in range(15)]


# -- rules -----------------------------------------------------------------------------------------------------------


def large_since(capability: tuple[int, int]) -> str | None:
    """The first release that gives a card 32 MiB; every other one before it gives 8,519,680 B."""
    sizes = {each: cublas_workspace(capability, torch_version=each) for each in RELEASES}
    large = [each for each in RELEASES if sizes[each] == 32 * MiB]
    assert {sizes[each] for each in RELEASES if each not in large} <= {CUBLAS}
    assert large == RELEASES[len(RELEASES) - len(large) :]
    return large[0] if large else None


def test_cublas_by_card_and_release():
    # CublasHandlePool.cpp: sm90 from 2.0 on, major 10 and 12 from pull request 175344, major 11 from 189312.
    cards = {(7, 5): None, (8, 0): None, (8, 9): None, (9, 0): "2.0", (10, 0): "2.12", (11, 0): "2.14", (12, 0): "2.12"}
    assert {card: large_since(card) for card in cards} == cards


def test_cublaslt_by_release():
    # For each product up to 2.8, one that stays from 2.9 (156495), that of cuBLAS from 2.12 (168175, 175879).
    found = {each: (cublaslt_workspace(each), keeps_cublaslt_workspace(each)) for each in RELEASES}
    assert {found[each] for each in RELEASES[:9]} == {(MiB, False)}
    assert {found[each] for each in RELEASES[9:12]} == {(MiB, True)}
    assert {found[each] for each in RELEASES[12:]} == {(0, True)}


@pytest.mark.parametrize(
    ("key", "since"),
    [
        ("expandable_segments:True", (2, 1)),
        ("max_non_split_rounding_mb:32", (2, 6)),
        ("per_process_memory_fraction:0.5", (2, 10)),
        ("large_segment_size_mb:40", (2, 11)),
        ("max_split_size_mb:64", (2, 0)),
        ("garbage_collection_threshold:0.6", (2, 0)),
        ("roundup_power2_divisions:4", (2, 0)),
    ],
)
def test_a_setting_is_as_old_as_the_release_that_first_had_it(key, since):
    assert AllocatorConfig.parse(key, since) == AllocatorConfig.parse(key)
    if since > (2, 0):
        before = (2, since[1] - 1)
        with pytest.raises(InputError) as refused:
            AllocatorConfig.parse(key, before)
        name, release = key.partition(":")[0], f"2.{since[1]}"
        assert str(refused.value) == f"PyTorch 2.{before[1]} has no allocator setting {name}: it came with {release}"


def test_the_context_of_a_budget_follows_cuda():
    lazy, eager = (budgets("a100", stack=Stack("2.1", cuda))[0].context for cuda in ("12.4", "11.6"))
    assert eager - lazy > 500 * MiB  # before CUDA 11.7, which brought lazy loading, all code is on the card
    assert budgets("a100", stack=Stack("2.1", "12.4", "eager"))[0].context == pytest.approx(eager, rel=0.2)


# -- runs ------------------------------------------------------------------------------------------------------------


def test_the_workspaces_of_a_training_step_follow_the_release():
    # The forward's thread and autograd's own: two of cuBLAS. Only the forward multiplies with a bias, so cuBLASLt's
    # own workspace, where it stays, is there once.
    steps = {each: memsize.trace(net(), (64,), stack=f"torch={each}", gpu="b200") for each in ("2.8", "2.9", "2.12")}
    assert sorted(workspaces(steps["2.8"].trace)) == [CUBLAS, CUBLAS]
    assert sorted(workspaces(steps["2.9"].trace)) == [MiB, CUBLAS, CUBLAS]
    assert sorted(workspaces(steps["2.12"].trace)) == [32 * MiB, 32 * MiB]


def test_before_2_9_each_product_with_a_bias_takes_and_frees_cublaslts_workspace():
    trace = memsize.trace(net(), (64,), stack="torch=2.6", optimizer=None).trace
    taken = [index for index, s in enumerate(trace.storages) if s.bytes == MiB and s.role == "workspace"]
    assert len(taken) == 2  # two linear layers
    for storage in taken:
        begun = next(i for i, event in enumerate(trace.events) if event.storage == storage)
        assert trace.events[begun + 1][:2] == (storage, -MiB)


def test_the_device_follows_cuda():
    lazy, eager = (memsize.trace(net(), (64,), stack=Stack(cuda=cuda)).peak for cuda in ("12.4", "11.6"))
    assert eager.reserved == lazy.reserved
    assert eager.device.low - lazy.device.low > 500 * MiB < eager.device.high - lazy.device.high


def test_the_installed_stack_is_the_default():
    release = ".".join(torch.__version__.split(".")[:2])
    plain = memsize.trace(net(), (64,))
    named = memsize.trace(net(), (64,), stack=f"torch={release}")
    assert plain.trace.stack == "" and named.trace.stack == f"torch={release}"
    assert plain.trace.events == named.trace.events
    # The context is that of the newest release where none is named.
    assert replace(plain.peak, device=named.peak.device) == named.peak


def test_what_cannot_be_switched_is_said():
    (note,) = memsize.trace(net(), (64,), stack="torch=2.6,cuda=12.4").trace.notes[:1]
    assert note.startswith("cuBLAS's workspaces, cuDNN's release, the layout of flash attention's result")
    assert "are those of torch=2.6,cuda=12.4; the other kernels and the optimizers" in note
    assert torch.__version__ in note


def test_every_answer_says_its_stack(tmp_path):
    stack = "torch=2.6,cuda=12.4"
    found = memsize.report(net(), (64,), gpu="t4", scenarios="fp32", stack=stack)
    assert json.loads(found.to_json())["stack"] == stack
    assert f"Peaks on a Tesla T4 with {stack}" in str(found)
    fitted = memsize.fit(net(), (64,), gpu="t4", scenarios="fp32", stack=Stack("2.6", "12.4"))
    assert json.loads(fitted.to_json())["stack"] == fitted.stack == stack
    assert f"on Tesla T4 with {stack}" in str(fitted)
    step = memsize.trace(net(), (64,), gpu="t4", stack=stack)
    assert f"on Tesla T4 with {stack}: " in str(step)
    for name, answer in (("report", found), ("fit", fitted), ("step", step)):
        answer.save(tmp_path / name)
        assert memsize.load(tmp_path / name) == answer
    plain = memsize.report(net(), (64,), gpu="t4", scenarios="fp32")
    assert json.loads(plain.to_json())["stack"] is None and " with " not in str(plain)


def test_a_fit_counts_the_workspaces_of_its_stack():
    # Inference of two linear layers on a B200: one workspace of 32 MiB since 2.12, of 8,519,680 B before.
    rows = {
        each: memsize.fit(net(), (64,), batch_size=1, gpu="b200", scenarios="fp32", stack=f"torch={each}").fit_rows[0]
        for each in ("2.11", "2.12")
    }
    assert {each: row.bind.roles["workspace"] for each, row in rows.items()} == {
        "2.11": CUBLAS + MiB,
        "2.12": 32 * MiB,
    }


@pytest.mark.parametrize("command", ["report", "timeline", "fit"])
def test_the_command_line_takes_a_stack(command, tmp_path, capsys, monkeypatch):
    (tmp_path / "net.py").write_text("from torch import nn\n\ndef net():\n    return nn.Linear(64, 64)\n")
    monkeypatch.chdir(tmp_path)
    line = [command, "net.py:net", "--input", "64", "--stack", "torch=2.6,cuda=12.4", "--format", "json"]
    assert run(line) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["stack"] == "torch=2.6,cuda=12.4"
    assert any("torch=2.6,cuda=12.4" in note for note in data["notes"])
    for refused in (["--stack", "torch=3.0"], ["--stack", "torch=2.0", "--allocator", "expandable_segments:True"]):
        assert run([*line, *refused]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_stack_alone_asks_a_report_for_peaks(tmp_path, capsys, monkeypatch):
    (tmp_path / "net.py").write_text("from torch import nn\n\ndef net():\n    return nn.Linear(64, 64)\n")
    monkeypatch.chdir(tmp_path)
    assert run(["report", "net.py:net", "--input", "64", "--scenario", "fp32", "--stack", "torch=2.6"]) == 0
    assert "Peaks on an A100 40GB with torch=2.6" in capsys.readouterr().out


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self.attention(x, x, x, need_weights=False)[0]
        return attended


def test_flash_attention_lays_its_result_out_as_in_the_release() -> None:
    """Its first version packs the sequences of a batch, so that nn.MultiheadAttention keeps a copy of the result: of 2
    sequences of 8 places with 64 half-precision numbers, 2,048 B.
    """
    model, x = SelfAttention().half(), torch.randn(2, 8, 64).half()
    kept = {
        release: memsize.report(model, input_data=x, scenarios="as-given", stack=release).totals.saved_bytes
        for release in ("torch=2.1", "torch=2.2", None)
    }
    assert kept["torch=2.1"] == kept["torch=2.2"] + 2 * 8 * 64 * 2
    assert kept["torch=2.2"] == kept[None]


TRAINING = """
import torch
from torch import nn
from tests.test_stack import SelfAttention

model = SelfAttention().half().cuda()
optimizer = torch.optim.SGD(model.parameters())
model(torch.randn(2, 8, 64, device="cuda").half()).sum().backward()
optimizer.step()
"""


def test_a_script_runs_with_a_stack(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    old, new = (memsize.run(script, gpu="a100", stack=stack) for stack in ("torch=2.1,cuda=11.6", None))
    assert most(old.trace, "activation") == most(new.trace, "activation") + 2 * 8 * 64 * 2
    eager, lazy = (run.peak.device.low - run.peak.reserved for run in (old, new))
    assert eager - lazy > 500 * MiB
    assert (old.trace.stack, new.trace.stack) == ("torch=2.1,cuda=11.6", "")
    assert "on A100 40GB with torch=2.1,cuda=11.6" in str(old).splitlines()[0]
    assert run(["run", "--stack", "torch=2.6", "-f", "json", str(script)]) == 0
    assert json.loads(capsys.readouterr().out)["stack"] == "torch=2.6"
    for refused in (["--stack", "torch=3.0"], ["--stack", "torch=2.0", "--allocator", "expandable_segments:True"]):
        assert run(["run", *refused, str(script)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_rank_has_the_kernels_of_its_stack():
    model, x = SelfAttention().half(), torch.randn(2, 8, 64).half()
    saved = {
        stack: memsize.trace(
            model, input_data=x, optimizer="sgd", parallel="ddp=2", gpu="a100", stack=stack
        ).peak.roles["activation"]
        for stack in ("torch=2.1", None)
    }
    assert saved["torch=2.1"] == saved[None] + 2 * 8 * 64 * 2
