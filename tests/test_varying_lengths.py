"""Texts of varying lengths: how they are drawn, runs joined of steps of other lengths, and what is reserved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import memsize
from memsize import AllocatorConfig, InputError, Trace
from memsize.cli import run
from memsize.units import GiB, MiB
from tests.fits import Lengths, parse_lengths
from tests.gpus import joined, replay, rows_of, training_of

# -- how they are drawn -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("distribution", "median"), [("uniform", 2112), ("normal", 2112), ("lognormal", 724)])
def test_lengths_have_the_median_of_their_distribution(distribution: str, median: int) -> None:
    """(128 + 4,096) / 2, and the root of 128 · 4,096."""
    lengths = parse_lengths(f"128..4096:{distribution}")
    assert lengths == 4096 and isinstance(lengths, Lengths)
    drawn = sorted(lengths.batches(101, 1))
    assert drawn[50] == median and drawn[0] >= 128 and drawn[-1] <= 4096
    assert lengths.batches(101, 1) == parse_lengths(f"128..4096:{distribution}").batches(101, 1)  # type: ignore[attr-defined]


@given(st.integers(1, 5000), st.integers(0, 5000), st.sampled_from(("uniform", "normal", "lognormal")))
def test_lengths_stay_between_the_ends(shortest: int, more: int, distribution: str) -> None:
    lengths = Lengths(shortest, shortest + more, distribution)
    assert all(shortest <= length <= shortest + more for length in lengths.batches(16, 2))


def test_a_batch_is_as_long_as_its_longest_text(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("7\n3\n9\n4\n1\n", "utf-8")
    lengths = parse_lengths(str(file))
    assert isinstance(lengths, Lengths) and lengths == 9
    assert lengths.batches(3, 2) == [7, 9, 7]  # 7 3, 9 4, 1 7
    file.write_text("7\n3.5\n", "utf-8")
    with pytest.raises(InputError, match=r"lengths\.txt has '3\.5' where a length in tokens should be"):
        parse_lengths(str(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "cannot read the sequence length 'x': write a number, 128..4096, 128..4096:lognormal, or the name of a"),
        ("9..8", "lengths from 9 to 8: they have to grow from at least 1"),
        ("1..8:log", "no distribution 'log': did you mean lognormal"),
    ],
)
def test_lengths_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message.replace(".", r"\.")):
        parse_lengths(text)


# -- steps that are joined --------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.head = nn.Linear(64, 1000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(ids)))


def traced(length: int) -> Trace:
    ids = torch.zeros(8, length, dtype=torch.long)
    return memsize.trace(Net(), input_data=ids, optimizer="adamw", gpu="a100", steps=3).trace


def loop(lengths: list[int]) -> Callable[[nn.Module], Callable[..., None]]:
    """The usual loop, on texts of these lengths."""

    def step(model: nn.Module) -> Callable[..., None]:
        optimizer = torch.optim.AdamW(model.parameters())
        left = iter(lengths)
        kept: list[torch.Tensor] = []

        def body(ids: torch.Tensor) -> None:
            optimizer.zero_grad()
            output = model(ids.new_zeros(8, next(left)))
            loss = nn.functional.cross_entropy(output.flatten(0, 1), output.new_zeros(output[..., 0].numel()).long())
            kept[:] = [output]
            loss.backward()
            optimizer.step()

        return body

    return step


def test_equal_steps_make_the_run_that_was_traced() -> None:
    trace = traced(48)
    events = list(joined([training_of(trace)] * 3))
    assert [delta for _, delta in events] == [event.delta for event in trace.events]
    assert replay(events).reserved == replay([(event.storage, event.delta) for event in trace.events]).reserved


def test_joined_steps_are_those_of_a_loop_over_such_texts() -> None:
    """Against a run of that loop, step by step: what is alive at the peak, and at the end."""
    lengths = [48, 16, 80, 32]
    own = memsize.trace(
        Net(), input_data=torch.zeros(8, 1, dtype=torch.long), step=loop(lengths), steps=4, gpu="a100"
    ).trace
    events = list(joined([training_of(traced(length)) for length in lengths]))
    peaks = [replay(run).requested.bytes for run in (events, [(each.storage, each.delta) for each in own.events])]
    # The loop makes its texts and targets anew, a few KiB; the traced run has the longest texts from the start.
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)
    ends = [sum(delta for _, delta in events), sum(event.delta for event in own.events)]
    assert ends[0] == pytest.approx(ends[1], rel=0.01)


@pytest.mark.thorough
def test_growing_lengths_reserve_more_than_expandable_segments() -> None:
    of_settings = rows_of(traced, Lengths(64, 1024), 1, AllocatorConfig(), capacity=4 * GiB)
    rows = {row.setting: row for row in of_settings}
    usual, expandable, longest = rows["as it is"], rows["expandable_segments"], rows["longest first"]
    assert len({row.requested for row in (usual, expandable)}) == 1
    for row in of_settings:
        assert row.expected is not None and row.worst is not None and row.requested <= row.expected <= row.worst
    assert max(expandable.worst or 0, longest.worst or 0) < (usual.worst or 0)
    short = rows_of(traced, Lengths(64, 1024), 1, AllocatorConfig(), capacity=usual.requested - MiB)
    assert {row.worst for row in short} == {None}


def test_the_timeline_has_a_row_for_each_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 500}
    config = tmp_path / "config.json"
    text = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, "num_attention_heads": 4}
    config.write_text(json.dumps(text), "utf-8")
    assert run(["timeline", f"hf:{config}", "--seq-len", "16..64", "--train", "adamw", "--gpu", "a100"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Texts vary in length: in a random order, their batches reserve" in shown
    assert "expandable_segments" in shown and "max_split_size_mb:128" in shown and "buckets: powers of two" in shown


def test_other_commands_say_that_they_run_the_longest() -> None:
    report = memsize.report("hf:gpt2", seq_len="16..64:normal", arguments={"num_hidden_layers": 1}, scenarios="fp32")
    (note,) = (note for note in report.notes if "tokens" in note)
    assert note.startswith("of texts with 16 to 64 tokens, the longest are run; memsize timeline compares batches")
