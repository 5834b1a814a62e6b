"""Snapshots explained: what was alive at which moment, what it was for, and whether fragmentation is to blame."""

from __future__ import annotations

import json
import os
import pickle
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import memsize
from memsize import Explanation, Trace
from memsize.cli import run
from memsize.documents import document
from memsize.documents.sections import Chart
from memsize.render import FORMATS, render
from tests.gpus import pickled
from tests.pages import check_golden
from tests.records import live_bytes
from tests.snapshots import (
    BACKWARD,
    DATA,
    FORWARD,
    MODEL,
    OTHER,
    STATE,
    TORCH,
    UPDATE,
    WORKSPACE,
    MiB,
    Recorder,
    frames,
    written,
)
from tests.test_timeline import traces


def bytes_of(found: Explanation) -> dict[str, int]:
    return {each.category: each.bytes for each in found.alive}


def codes(found: Explanation) -> list[str]:
    return [finding.code for finding in found.findings]


def step(gpu: Recorder, weights: tuple[int, ...], state: bool) -> tuple[list[int], list[int]]:
    """A training step: the gradients and the optimizer's states that it leaves."""
    kept = [gpu.alloc(10 * MiB, FORWARD) for _ in weights]
    gpu.free(gpu.alloc(3 * MiB, FORWARD))
    gradients = []
    for size, saved in zip(weights, reversed(kept), strict=True):
        gpu.free(gpu.alloc(5 * MiB, BACKWARD))
        gradients.append(gpu.alloc(size, BACKWARD))
        gpu.free(saved)
    states = [gpu.alloc(size, STATE) for size in weights for _ in range(2)] if state else []
    gpu.free(gpu.alloc(max(weights), UPDATE))
    return gradients, states


def trained(steps: int, *, recorded: bool = True, leak: int = 0) -> Recorder:
    gpu = Recorder()
    weights = (4 * MiB, 2 * MiB)
    for size in weights:
        gpu.alloc(size, MODEL, recorded=recorded)
    gradients: list[int] = []
    for number in range(steps):
        if leak:
            gpu.alloc(leak, OTHER)
        batch = gpu.alloc(MiB, DATA)
        for each in gradients:
            gpu.free(each)
        gradients, _ = step(gpu, weights, state=number == 0)
        gpu.free(batch)
    return gpu


# 4 + 2 of parameters, as many of gradients, twice that of states; the peak is the temporary of the update.
AT_THE_PEAK = {"parameter": 6 * MiB, "optimizer state": 12 * MiB, "gradient": 6 * MiB}


def test_a_step_at_its_peak(tmp_path: Path) -> None:
    gpu = trained(2)
    found = memsize.explain(written(tmp_path / "s.pickle", gpu))
    # The second step's forward: 6 of parameters, 12 of states, 1 of input, and the activations 20 + 3 on the way.
    assert found.moment == "peak"
    assert bytes_of(found) == {
        "parameter": 6 * MiB,
        "optimizer state": 12 * MiB,
        "input": MiB,
        "activation": 20 * MiB,
        "temporary": 5 * MiB,
    }
    assert found.requested == sum(bytes_of(found).values()) == sum(place.bytes for place in found.places)
    assert codes(found)[:2] == ["snapshot-peak", "snapshot-mostly"]
    most = found.places[0]
    assert (most.category, most.line, most.function, most.called_from) == ("activation", "net.py:12", "forward", None)
    assert (most.blocks, most.largest) == (2, 10 * MiB)
    assert most.calls[0] == f"{TORCH}/nn/modules/linear.py:125 forward"


def test_what_compiled_code_made(tmp_path: Path) -> None:
    """`_record_memory_history(compile_context=True)` writes the region of Dynamo's that runs into each entry."""
    gpu = Recorder()
    gpu.alloc(8 * MiB, MODEL, compile_context="N/A")
    for number, size in enumerate((3, 2, 2)):
        gpu.alloc(size * MiB, FORWARD, compile_context=f"Torch-Compiled Region: {number % 2}/0")
    compiled = memsize.explain(written(tmp_path / "s.pickle", gpu))
    assert [(stack.region, stack.bytes) for stack in compiled.places] == [
        (None, 8 * MiB),
        ("0/0", 5 * MiB),
        ("1/0", 2 * MiB),
    ]
    (told,) = (finding for finding in compiled.findings if finding.code == "snapshot-compiled")
    assert told.text("MiB") == (
        "Code compiled by torch.compile made 7.00 MiB (47%) of what was alive, 5.00 MiB in region 0/0."
    )
    assert compiled.requested == sum(stack.bytes for stack in compiled.places)
    assert [*compiled.tables()["places"].frame()["region"]][1:] == ["0/0", "1/0"]
    assert "compiled" in render(compiled, "text")
    assert "compiled" not in render(memsize.explain(written(tmp_path / "t.pickle", trained(1))), "text")


def test_what_is_left_at_the_end(tmp_path: Path) -> None:
    gpu = trained(1)
    del gpu.entries[:]  # recorded with "state": no history, but the blocks have their stacks
    found = memsize.explain(written(tmp_path / "s.pickle", gpu))
    assert found.moment == "end"
    assert bytes_of(found) == AT_THE_PEAK
    assert codes(found)[0] == "snapshot-end"
    assert any("no history was recorded" in note for note in found.notes)


def test_without_any_history_nothing_is_older_than_it(tmp_path: Path) -> None:
    gpu = Recorder()
    gpu.alloc(40 * MiB, [], recorded=False)
    found = memsize.explain(written(tmp_path / "s.pickle", gpu))
    assert bytes_of(found) == {"elsewhere": 40 * MiB}
    assert codes(found) == ["snapshot-end"]
    assert any("no history was recorded" in note for note in found.notes)


def test_parameters_older_than_the_history_have_the_sizes_of_gradients(tmp_path: Path) -> None:
    gpu = trained(1, recorded=False)
    gpu.alloc(40 * MiB, [], recorded=False)
    found = memsize.explain(written(tmp_path / "s.pickle", gpu))
    known = {each.category: (each.bytes, each.how) for each in found.alive}
    assert known["parameter"] == (6 * MiB, "size")
    assert known["earlier"] == (40 * MiB, "unknown")
    assert "snapshot-untold" in codes(found)


def test_out_of_memory_in_forward(tmp_path: Path) -> None:
    gpu = Recorder()
    gpu.alloc(100 * MiB, MODEL)
    gpu.alloc(8 * MiB, WORKSPACE)
    saved = [gpu.alloc(50 * MiB, FORWARD) for _ in range(3)]
    gpu.oom(60 * MiB, 20 * MiB, FORWARD)
    for each in saved:  # the exception lets go of them before the snapshot is taken
        gpu.free(each)
    found = memsize.explain(written(tmp_path / "s.pickle", gpu))
    assert found.moment == "out of memory"
    assert bytes_of(found) == {"parameter": 100 * MiB, "workspace": 8 * MiB, "activation": 150 * MiB}
    assert found.failed is not None
    assert (found.failed.bytes, found.failed.free, found.failed.line) == (60 * MiB, 20 * MiB, "net.py:12")
    assert found.reserved.cached == 150 * MiB and found.reserved_then == 258 * MiB
    assert codes(found)[0] == "snapshot-out-of-memory"
    assert found.findings[0].text() == (
        "Out of memory at net.py:12: PyTorch requested 60.00 MiB and 20.00 MiB were free on the GPU. Tensors held "
        "258.00 MiB of the 258.00 MiB that PyTorch had reserved."
    )


def test_out_of_memory_in_backward_leaves_gradients_and_temporaries_apart_untold(tmp_path: Path) -> None:
    gpu = Recorder()
    gpu.alloc(10 * MiB, MODEL)
    gpu.alloc(30 * MiB, FORWARD)
    gpu.free(gpu.alloc(MiB, BACKWARD))
    gpu.alloc(10 * MiB, BACKWARD)
    gpu.oom(20 * MiB, MiB, BACKWARD)
    found = memsize.explain(written(tmp_path / "s.pickle", gpu))
    assert bytes_of(found) == {"parameter": 10 * MiB, "activation": 30 * MiB, "backward": 10 * MiB}
    assert found.failed is not None and found.failed.stage == "backward"
    assert found.failed.line is None and found.failed.function == "MmBackward0"


@pytest.mark.parametrize(("wanted", "code"), [(30, "snapshot-fragmented"), (90, "snapshot-not-fragmented")])
def test_fragmentation(tmp_path: Path, wanted: int, code: str) -> None:
    gpu = Recorder()
    gpu.segment(100 * MiB)
    blocks = [gpu.alloc(20 * MiB, FORWARD) for _ in range(5)]
    for each in blocks[1::2]:
        gpu.free(each)  # two holes of 20 MiB
    gpu.oom(wanted * MiB, 0, FORWARD)
    found = memsize.explain(written(tmp_path / "s.pickle", gpu))
    assert (found.reserved.pieces, found.reserved.largest) == (40 * MiB, 20 * MiB)
    assert code in codes(found)


def test_blocks_that_another_stream_uses_are_waiting(tmp_path: Path) -> None:
    gpu = Recorder()
    gpu.alloc(4 * MiB, FORWARD)
    gpu.free(gpu.alloc(2 * MiB - 100, FORWARD))
    gpu.segments[-1]["blocks"][0] |= {"state": "active_awaiting_free"}
    found = memsize.explain(written(tmp_path / "s.pickle", gpu))
    assert (found.reserved.requested, found.reserved.rounding, found.reserved.waiting) == (4 * MiB, 0, 2 * MiB)


def test_the_fullest_gpu_or_the_one_that_ran_out(tmp_path: Path) -> None:
    first, second = Recorder(0), Recorder(1)
    first.alloc(MiB, OTHER)
    second.alloc(3 * MiB, OTHER)
    path = written(tmp_path / "s.pickle", first, second)
    assert memsize.explain(path).device == 1
    assert memsize.explain(path, device=0).requested == MiB
    assert "the snapshot also has GPU 0" in memsize.explain(path).notes[0]
    with pytest.raises(memsize.InputError, match="has nothing on GPU 7"):
        memsize.explain(path, device=7)
    first.oom(9 * MiB, 0, OTHER)
    assert memsize.explain(written(path, first, second)).device == 0


def test_stacks_of_python_alone_have_none_in_backward(tmp_path: Path) -> None:
    gpu = Recorder()
    gpu.alloc(2 * MiB, MODEL)
    saved = gpu.alloc(10 * MiB, FORWARD)
    gpu.alloc(2 * MiB, [])
    gpu.free(saved)
    gpu.alloc(4 * MiB, STATE)
    found = memsize.explain(written(tmp_path / "s.pickle", gpu), against=None)
    assert bytes_of(found) == {"parameter": 2 * MiB, "activation": 10 * MiB, "gradient": 2 * MiB}


@pytest.mark.parametrize(
    ("calls", "stage"),
    [
        ((f"{TORCH}/utils/checkpoint.py:1:recompute_fn",), "other"),
        (
            (f"{TORCH}/nn/modules/module.py:1:_call_impl", f"{TORCH}/utils/checkpoint.py:1:recompute_fn"),
            "recomputation",
        ),
        ((f"{TORCH}/nn/modules/linear.py:1:__init__", "/home/me/net.py:3:__init__"), "model"),
        ((f"{TORCH}/nn/functional.py:1:cross_entropy", "/home/me/train.py:3:main"), "forward"),
        (("C:\\venv\\Lib\\site-packages\\torch\\optim\\sgd.py:9:step",), "optimizer"),
        (("torch::autograd::AccumulateGrad::apply", "torch::autograd::Engine::thread_main"), "backward"),
        (("torch::autograd::VariableType::mm", "/home/me/train.py:3:main"), "other"),
        (("c10d::Reducer::initialize_buckets", f"{TORCH}/nn/parallel/distributed.py:9:__init__"), "buckets"),
        ((), "unrecorded"),
    ],
)
def test_stages(calls: tuple[str, ...], stage: str, tmp_path: Path) -> None:
    gpu = Recorder()
    gpu.alloc(MiB, frames("torch::autograd::VariableType::mm"))  # a stack without one is not of backward
    gpu.oom(MiB, 0, frames(*calls))
    failed = memsize.explain(written(tmp_path / "s.pickle", gpu)).failed
    assert failed is not None and failed.stage == stage


def test_the_line_is_that_above_pytorch_and_the_programs_own(tmp_path: Path) -> None:
    gpu = Recorder()
    library = "/venv/lib/python3.12/site-packages/transformers/models/llama/modeling_llama.py:216:forward"
    gpu.alloc(MiB, frames(f"{TORCH}/nn/functional.py:1:linear", library, "/home/me/train.py:9:main"))
    [place] = memsize.explain(written(tmp_path / "s.pickle", gpu)).places
    assert (place.line, place.function, place.called_from) == ("modeling_llama.py:216", "forward", "train.py:9")


@given(trace=traces())
def test_our_own_snapshots_say_what_the_trace_says(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("own") / "s.pickle"
    path.write_bytes(pickled(trace))
    written_there = pickle.loads(path.read_bytes())
    segments = written_there["segments"]
    if not segments:
        return
    explained = memsize.explain(path)
    chart = document(explained).picture()
    assert isinstance(chart, Chart)
    history = chart.timeline
    # Blocks follow each other within an event of a trace: a resize has both for a moment.
    assert max(history.total) >= max(live_bytes(trace.events))
    alive = (block for segment in segments for block in segment["blocks"] if block["state"].startswith("active"))
    assert history.total[-1] == sum(block["requested_size"] for block in alive)
    assert history.reserved[-1] == sum(segment["total_size"] for segment in segments)
    assert sum(each.bytes for each in explained.alive) == explained.requested == max(history.total)
    assert {each.how for each in explained.alive if each.bytes} <= {"recorded"}


def test_beside_a_prediction(tmp_path: Path, toy_target: str) -> None:
    """memsize's own snapshot of a step agrees with its prediction, role by role."""
    predicted = memsize.trace(toy_target, (3, 64, 64), steps=2)
    predicted.snapshot(tmp_path / "s.pickle")
    predicted.save(tmp_path / "run.memsize")
    found = memsize.explain(tmp_path / "s.pickle", against=tmp_path / "run.memsize")
    assert found.requested == predicted.peak.requested
    assert {each.category: each.bytes for each in found.alive} == dict(predicted.peak.roles)
    assert {each.category: each.predicted for each in found.alive} == dict(predicted.peak.roles)
    assert found.predicted is not None and found.predicted.requested == predicted.peak.requested
    # Event by event, too: blocks of the snapshot follow each other within an event of the trace, as a resize has both.
    assert found.history is not None and len(found.predicted.levels) == len(found.history.events)
    assert max(found.predicted.levels) == predicted.peak.requested
    page = render(found, "html")
    assert "Live bytes over the history, with the prediction as a line" in page and "predicted: at most" in page
    found.save(tmp_path / "both.memsize")
    assert memsize.load(tmp_path / "both.memsize") == found
    [finding] = [each for each in found.findings if each.code == "snapshot-predicted"]
    assert finding.bytes == 0
    assert finding.text().endswith(", as in the snapshot.")
    text = render(found, "text", width=120)
    assert text.index("What was alive at the peak") < text.index("Where the largest of it was made")
    report = memsize.report(toy_target, (3, 64, 64), scenarios="fp32", train="adamw")
    assert memsize.explain(tmp_path / "s.pickle", against=report).predicted is not None
    with pytest.raises(memsize.InputError, match="this saved report predicts no peak"):
        memsize.explain(tmp_path / "s.pickle", against=memsize.report(toy_target))


def test_beside_another_snapshot(tmp_path: Path) -> None:
    """Each step leaks 7 MiB: at the peak, in the second step, 14 beside the 44 of `test_a_step_at_its_peak`."""
    before = written(tmp_path / "before.pickle", trained(2))
    after = written(tmp_path / "after.pickle", trained(2, leak=7 * MiB))
    found = memsize.explain(after, against=before)
    assert (found.requested, found.predicted and found.predicted.requested) == (58 * MiB, 44 * MiB)
    assert {each.category: each.predicted for each in found.alive if each.predicted} == bytes_of(
        memsize.explain(before)
    )
    assert found.predicted is not None and max(found.predicted.levels) == 44 * MiB
    assert "with before.pickle as a line" in render(found, "html")
    first, *others = found.places
    assert (first.bytes, first.before, first.growth, first.blocks) == (14 * MiB, 0, 14 * MiB, 2)
    assert [place.growth for place in others] == [0] * len(others) and all(place.before for place in others)
    text = next(finding.text() for finding in found.findings if finding.code == "snapshot-compared")
    assert text == (
        "Tensors held 58.00 MiB instead of the 44.00 MiB in before.pickle (+31.8%); the largest difference is at "
        "train.py:7: 0 MiB → 14.00 MiB."
    )
    shown = render(found, "text", width=120)
    assert "Where it differs most from before.pickle" in shown and "before" in shown and "predicted" not in shown
    assert shown.index("Where it differs most") < shown.index("What was alive") and "known by" in shown
    # The other way round the leak is gone: a place without bytes is shown, and the rows still add up.
    back = memsize.explain(before, against=after)
    assert (back.places[0].bytes, back.places[0].before, back.places[0].blocks) == (0, 14 * MiB, 0)
    assert sum(place.bytes for place in back.places) == back.requested == 44 * MiB
    back.save(tmp_path / "back.memsize")
    assert memsize.load(tmp_path / "back.memsize") == back
    # With itself nothing differs, and a saved explanation is as good as the file.
    memsize.explain(after).save(tmp_path / "after.memsize")
    same = memsize.explain(after, against=tmp_path / "after.memsize")
    assert next(each for each in same.findings if each.code == "snapshot-compared").bytes == 0
    assert {place.growth for place in same.places} == {0}


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).exp()


def test_a_snapshot_of_ours_names_lines_and_no_functions(tmp_path: Path) -> None:
    """Of 4,096 × 8 outputs, exp keeps its own."""
    memsize.trace(Squares(), (8,), optimizer="sgd", batch_size=4096).snapshot(tmp_path / "s.pickle")
    findings = memsize.explain(tmp_path / "s.pickle").findings
    [mostly] = [finding for finding in findings if finding.code == "snapshot-mostly"]
    assert re.search(r"was allocated at test_explain\.py:\d+\.$", mostly.text())


def test_a_saved_explanation_is_the_same(tmp_path: Path) -> None:
    found = memsize.explain(written(tmp_path / "s.pickle", trained(2)))
    found.save(tmp_path / "s.memsize")
    assert memsize.load(tmp_path / "s.memsize") == found
    assert run(["explain", str(tmp_path / "s.memsize"), "-o", str(tmp_path / "s.json")]) == 0
    data = json.loads((tmp_path / "s.json").read_text())
    assert data["schema"] == "memsize.explanation/1"
    assert sum(each["bytes"] for each in data["alive"]) == data["requested"] == found.requested


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "markdown"])
def test_golden(format: str, tmp_path: Path) -> None:
    gpu = trained(1, recorded=False)
    gpu.oom(30 * MiB, 2 * MiB, FORWARD)
    found = memsize.explain(written(tmp_path / "oom.pickle", gpu))
    check_golden(f"explain{FORMATS[format][0]}", render(found, format))


def test_the_history_is_a_picture_that_begins_when_memory_ran_out(tmp_path: Path) -> None:
    gpu = trained(2)
    gpu.free(gpu.alloc(200 * MiB, OTHER))  # a higher peak than at the failure
    held = [gpu.alloc(7 * MiB, FORWARD)]
    gpu.oom(300 * MiB, MiB, FORWARD)
    gpu.free(held[0])
    found = memsize.explain(written(tmp_path / "s.pickle", gpu))
    assert found.history is not None
    assert sum(b.bytes for b in found.history.blocks if b.born <= found.history.moment < (b.died or 9999)) == (
        found.requested
    )
    chart = document(found).picture()
    assert isinstance(chart, Chart) and chart.moment == found.history.moment
    run = chart.timeline
    assert run.total[chart.moment] == found.requested
    assert {role: column[chart.moment] for role, column in run.live.items() if column[chart.moment]} == bytes_of(found)
    # Each block has a segment of its own unless a free one is large enough: nothing is returned.
    assert run.reserved[-1] == found.reserved.bytes == sum(segment.bytes for segment in run.segments)
    assert all(sum(levels) == total for *levels, total in zip(*run.live.values(), run.total, strict=True))
    assert all(a <= b <= c for a, b, c in zip(run.total, run.allocated, run.reserved, strict=True))
    assert [phase.name for phase in run.phases][:4] == ["model", "data", "forward", "backward"]
    assert chart.stacks[found.history.blocks[-1].stack] == ("train.py:9 main", "net.py:12 forward")


def test_calls_for_speedscope(tmp_path: Path) -> None:
    written(tmp_path / "s.pickle", trained(2))
    out = tmp_path / "alive.speedscope.json"
    assert run(["explain", str(tmp_path / "s.pickle"), "-o", str(out)]) == 0
    data = json.loads(out.read_text())
    names = [frame["name"] for frame in data["shared"]["frames"]]
    [profile] = data["profiles"]
    samples = [tuple(names[frame] for frame in sample) for sample in profile["samples"]]
    weights = dict(zip(samples, profile["weights"], strict=True))
    assert weights["train.py:9 main", "net.py:12 forward", "activations"] == 20 * MiB
    assert sum(weights.values()) == profile["endValue"] == 44 * MiB  # test_a_step_at_its_peak
    assert profile["unit"] == "bytes"


def test_speedscope_needs_a_run(tmp_path: Path) -> None:
    gpu = trained(1)
    del gpu.entries[:]
    with pytest.raises(memsize.errors.OutputError, match="records no run whose calls"):
        render(memsize.explain(written(tmp_path / "s.pickle", gpu)), "speedscope")


def test_blocks_older_than_the_history_come_first(tmp_path: Path) -> None:
    found = memsize.explain(written(tmp_path / "s.pickle", trained(1, recorded=False)))
    assert found.history is not None
    assert found.history.phases[0] == ("before the history", 0, 0, 2)
    assert [block.bytes for block in found.history.blocks[:2]] == [4 * MiB, 2 * MiB]
    # Their segments were there as well.
    assert [(s.event, s.bytes) for s in found.history.segments[:2]] == [(0, 4 * MiB), (0, 2 * MiB)]


def test_segments_that_grow_and_shrink_add_up(tmp_path: Path) -> None:
    gpu = Recorder()
    first = gpu.segment(8 * MiB)["address"]
    gpu.alloc(2 * MiB, MODEL)
    # As expandable segments do it: the second half is returned, and mapped again.
    gpu.entries.append({"action": "segment_unmap", "addr": first + 4 * MiB, "size": 4 * MiB, "stream": 0, "frames": []})
    gpu.alloc(MiB, MODEL)
    gpu.entries.append({"action": "segment_map", "addr": first + 4 * MiB, "size": 4 * MiB, "stream": 0, "frames": []})
    gpu.alloc(MiB, MODEL)
    history = memsize.explain(written(tmp_path / "s.pickle", gpu)).history
    assert history is not None
    assert [tuple(segment) for segment in history.segments] == [
        (0, first, 8 * MiB),
        (1, first + 4 * MiB, -4 * MiB),
        (2, first + 4 * MiB, 4 * MiB),
    ]


# -- files that are no snapshots --------------------------------------------------------------------------------------


class Calls:
    def __reduce__(self) -> Any:
        return os.system, ("echo no",)


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "ends within its first bytes|it is not a pickle"),
    "text": (b"hello", "is neither a memory snapshot of torch"),
    "code": (pickle.dumps({"segments": [Calls()]}), "its pickle names .*system. Nothing was run"),
    "a class": (pickle.dumps({"segments": Path("/")}), "its pickle names pathlib"),
    "a number": (pickle.dumps(3), "it holds a int"),
    "no segments": (pickle.dumps({"device_traces": []}), "it has no segments"),
    "segments of text": (pickle.dumps({"segments": "many"}), "a str where a list should be"),
    "a segment of text": (pickle.dumps({"segments": ["one"]}), "a str where a dictionary should be"),
    "a size of text": (pickle.dumps({"segments": [{"total_size": "4"}]}), "an invalid size or address"),
    "a huge size": (pickle.dumps({"segments": [{"total_size": 1 << 70}]}), "an invalid size or address"),
    "traces of numbers": (pickle.dumps({"segments": [], "device_traces": [7]}), "a int where a list should be"),
    "nothing at all": (pickle.dumps({"segments": [], "device_traces": []}), "has nothing on GPU 0"),
    "cut off": (pickle.dumps({"segments": [{"total_size": 4}]})[:-5], "cannot be read"),
    "a checkpoint": (
        b"PK\x03\x04" + bytes(40),
        "is neither a memory snapshot of torch",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_snapshot_is_refused_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, why = BAD[name]
    path = tmp_path / "bad.pickle"
    path.write_bytes(content)
    with pytest.raises(memsize.InputError, match=why):
        memsize.explain(path)
    assert run(["explain", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "bug in memsize" not in error


@given(place=st.integers(0, 10**6), byte=st.integers(0, 255), cut=st.booleans())
def test_damage_is_an_answer_or_one_line(
    place: int, byte: int, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "s.pickle"
    data = written(path, trained(1)).read_bytes()
    place %= len(data)
    path.write_bytes(data[:place] if cut else data[:place] + bytes([byte]) + data[place + 1 :])
    with suppress(memsize.InputError):
        render(memsize.explain(path), "text")


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_stacks_are_those_that_python_reads(tmp_path: Path, protocol: int) -> None:
    """Of frames that lists share: references of one and of four bytes, and lists that are equal or the same."""
    calls = frames(*(f"/home/me/train.py:{line}:f{line}" for line in range(400)))
    stacks = [calls[start % 7 :: 11] + calls[start % 5 : start % 5 + 3] for start in range(40)]
    gpu = Recorder()
    for stack in stacks + stacks:
        gpu.alloc(MiB, stack)
    path = written(tmp_path / "s.pickle", gpu)
    path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes()), protocol))
    history = memsize.explain(path).history
    assert history is not None
    expected = [tuple(f"train.py:{f['line']} {f['name']}" for f in reversed(stack)) for stack in stacks + stacks]
    assert [history.stacks[block.stack].calls for block in history.blocks] == expected
    assert len(history.stacks) == 35  # 7 × 5 different ones


def test_entries_without_end_are_refused(tmp_path: Path) -> None:
    """One entry that the pickle repeats costs two bytes each time."""
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc"}] * 500_001]}))
    with pytest.raises(memsize.InputError, match="more entries than memsize reads"):
        memsize.explain(path)


def test_a_history_that_is_too_long_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "s.pickle", trained(2))
    monkeypatch.setattr("memsize.analysis.explain.snapshot_file.MOST_WORK", 6_000)
    found = memsize.explain(path)
    assert found.moment == "end" and found.entries == 0
    assert bytes_of(found) == AT_THE_PEAK
    assert "longer than memsize reads" in found.notes[0]
    monkeypatch.setattr("memsize.analysis.explain.snapshot_file.MOST_WORK", 100)
    with pytest.raises(memsize.InputError, match="more objects than memsize reads"):
        memsize.explain(path)


# -- snapshots of real GPUs -------------------------------------------------------------------------------------------

REAL = os.environ.get("MEMSIZE_SNAPSHOTS", "")
"""A folder with the files below, which others published: they are not ours to hand on."""

FIGURES: dict[str, tuple[int, str, int, int, dict[str, int]]] = {
    # github.com/cranberrii/ftcourse, memory_snapshot.pickle: QLoRA of a Llama, PyTorch 2.1, C++ in its stacks
    "ftcourse.pickle": (
        2_591_918,
        "peak",
        5_876_132_840,
        6_341_787_648,
        {"activation": 4_524_663_588, "temporary": 255_744_000, "earlier": 1_095_725_248, "elsewhere": 4},
    ),
    # github.com/kkaitlyn111/cs336-a2-systems, memory_files/memory_ctx512_fullstep_.pickle: a step, PyTorch 2.6.
    # Parameters, gradients and each half of the state have the same bytes.
    "cs336.pickle": (
        3_267_984,
        "peak",
        54_868_051_972,
        62_830_673_920,
        {
            "parameter": 13_627_238_400,
            "optimizer state": 27_254_476_800,
            "workspace": 67_108_864,
            "gradient": 13_627_238_400,
            "activation": 81_920_000,
            "temporary": 204_810_240,
            "earlier": 5_259_264,
            "elsewhere": 4,
        },
    ),
    # github.com/Yiyi-philosophy/LLM-inference, oom_snapshot.pickle: PyTorch 2.0, without a history
    "llm.pickle": (110_501, "end", 11_840_159_744, 11_844_714_496, {"elsewhere": 11_840_159_744}),
}
"""Each file's length, and the moment, the requested and the reserved bytes, and the categories that it shows."""


@pytest.mark.skipif(not REAL, reason="MEMSIZE_SNAPSHOTS names no folder with published snapshots")
@pytest.mark.parametrize("name", FIGURES)
def test_published_snapshots(name: str) -> None:
    length, moment, requested, reserved, expected = FIGURES[name]
    path = Path(REAL) / name
    assert path.stat().st_size == length
    found = memsize.explain(path)
    assert (found.moment, found.requested, found.reserved_then) == (moment, requested, reserved)
    assert bytes_of(found) == expected
