"""Snapshots: PyTorch's own reader takes them, and what they say adds up to the replay at every event."""

from __future__ import annotations

import json
import pickle
import pickletools
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import memsize
from memsize import AllocatorConfig, StepTrace, Trace, trace as trace_step, virtual_gpu
from tests.gpus import pickled, replay, snapshot
from tests.test_timeline import MiB, empty, inference, traces, two_steps

CONFIGS = {
    "default": AllocatorConfig(),
    "expandable": AllocatorConfig(expandable_segments=True),
    "unsplit": AllocatorConfig(max_split_size=20 * MiB),
    "rounded": AllocatorConfig(roundup_divisions=(4,) * 16),
}

# What the viewer's own unpickler reads: torch/utils/viz/MemoryViz.js, function unpickle.
OPCODES = frozenset(
    """APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT EMPTY_LIST EMPTY_TUPLE
    FRAME LIST LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO SETITEM SETITEMS
    SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3""".split()
)


class Machine:
    """Plays a trace's entries and keeps what they leave: blocks and segments by address."""

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        self.pending: dict[int, int] = {}
        self.segments: dict[int, int] = {}

    def play(self, entry: dict[str, Any]) -> None:
        address, size = entry["addr"], entry["size"]
        match entry["action"]:
            case "segment_alloc" | "segment_map":
                assert not any(a < address + size and address < a + s for a, s in self.segments.items())
                self.segments[address] = size
            case "segment_free" | "segment_unmap":
                self._give_back(address, size)
            case "alloc":
                assert address not in self.blocks
                self.blocks[address] = size
            case "free_requested":
                self.pending[address] = self.blocks[address]
                assert size == self.pending[address]
            case "free_completed":
                assert size == self.pending.pop(address) == self.blocks.pop(address)
            case action:
                assert action == "snapshot"

    def _give_back(self, address: int, size: int) -> None:
        """What is unmapped may be several pieces, and a part of one."""
        for start, length in [*self.segments.items()]:
            low, high = max(start, address), min(start + length, address + size)
            if low < high:
                del self.segments[start]
                size -= high - low
                address = high
                self.segments |= {a: b - a for a, b in ((start, low), (high, start + length)) if a < b}
        assert size == 0


def played(made: dict[str, Any]) -> Machine:
    machine = Machine()
    for entry in made["device_traces"][0]:
        machine.play(entry)
    return machine


def check_adds_up(trace: Trace, config: AllocatorConfig) -> None:
    """Live blocks, segments and addresses after every event are those of the replay; the end is what `segments` say."""
    made = snapshot(trace, config)
    pairs = ((e.storage, e.delta) for e in trace.events)
    expected = replay(pairs, config, streams=trace.streams, emptied=trace.emptied, timeline=True)
    assert expected.timeline is not None
    machine = Machine()
    entries = made["device_traces"][0]
    place = 0
    for event in range(len(trace.events)):
        while entries[place]["time_us"] == event and entries[place]["action"] != "snapshot":
            machine.play(entries[place])
            place += 1
        assert not machine.pending
        assert sum(machine.blocks.values()) == expected.timeline.requested[event]
        assert sum(machine.segments.values()) == expected.timeline.reserved[event]
        ranges = sorted(machine.blocks.items())
        assert all(a + size <= b for (a, size), (b, _) in pairwise(ranges))
    assert entries[place:] == [entries[-1]] and entries[-1]["action"] == "snapshot"
    check_end(made, machine, expected.final.allocated)


def check_end(made: dict[str, Any], machine: Machine, allocated: int) -> None:
    """The blocks tile their segments, and the live ones are those that the trace left."""
    left = {}
    for segment in made["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            address += block["size"]
            if block["state"] == "active_allocated":
                left[block["address"]] = block["requested_size"]
                assert block["requested_size"] <= block["size"]
        assert address == segment["address"] + segment["total_size"]
        assert segment["requested_size"] <= segment["allocated_size"] == segment["active_size"] <= segment["total_size"]
    assert left == machine.blocks
    assert sum(segment["allocated_size"] for segment in made["segments"]) == allocated
    assert sum(segment["total_size"] for segment in made["segments"]) == sum(machine.segments.values())


@pytest.mark.parametrize("name", CONFIGS)
@given(trace=traces())
def test_live_blocks_add_up_to_the_replay_at_every_event(name: str, trace: Trace) -> None:
    check_adds_up(trace, CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
@given(trace=traces(), streams=st.lists(st.sampled_from((0, 0, 7, 9)), min_size=40, max_size=40))
def test_storages_of_several_streams_lie_in_segments_of_their_own(name: str, trace: Trace, streams: list[int]) -> None:
    storages = tuple(s._replace(stream=stream) for s, stream in zip(trace.storages, streams, strict=False))
    trace = replace(trace, storages=storages)
    check_adds_up(trace, CONFIGS[name])
    made = snapshot(trace, CONFIGS[name])
    segments = {segment["address"]: segment for segment in made["segments"]}
    for entry in made["device_traces"][0][:-1]:
        around = max((address for address in segments if address <= entry["addr"]), default=None)
        assert around is not None and segments[around]["stream"] == entry["stream"]


@pytest.mark.parametrize("name", CONFIGS)
@given(trace=traces(), emptied=st.sets(st.integers(0, 20), min_size=1))
def test_segments_that_were_given_back(name: str, trace: Trace, emptied: set[int]) -> None:
    check_adds_up(replace(trace, emptied=tuple(sorted(n for n in emptied if n < len(trace.events)))), CONFIGS[name])


def test_the_snapshot_of_a_program_that_empties_the_cache() -> None:
    with virtual_gpu("a100"):
        a = torch.empty(32 * MiB, dtype=torch.uint8, device="cuda")
        del a
        torch.cuda.empty_cache()
        b = torch.empty(16 * MiB, dtype=torch.uint8, device="cuda")
        (segment,) = torch.cuda.memory_snapshot()
        del b
    assert (segment["total_size"], segment["allocated_size"]) == (16 * MiB, 16 * MiB)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_real_step_adds_up(name: str, toy: StepTrace) -> None:
    check_adds_up(toy.trace, CONFIGS[name])


@pytest.fixture(scope="module")
def toy(toy_target: str) -> StepTrace:
    return trace_step(toy_target, (3, 64, 64), steps=2)


def test_the_entries_of_a_resize() -> None:
    # 4 MiB of parameters; 3 MiB that become 5: the new block is there before the old one goes.
    entries = snapshot(inference())["device_traces"][0]
    assert [(entry["action"], entry["size"]) for entry in entries] == [
        ("segment_alloc", 20 * MiB),
        ("alloc", 4 * MiB),
        ("alloc", 3 * MiB),
        ("alloc", 5 * MiB),
        ("free_requested", 3 * MiB),
        ("free_completed", 3 * MiB),
        ("snapshot", 0),
    ]


def test_frames_name_the_op_the_modules_and_the_phase() -> None:
    made = snapshot(two_steps())
    relu = next(entry for entry in made["device_traces"][0] if entry["frames"][0]["name"] == "relu")
    assert [(frame["filename"], frame["name"]) for frame in relu["frames"]] == [
        ("aten", "relu"),
        ("body.1", "ReLU"),
        ("body", "Sequential"),
        ("(model)", "Net"),
        ("step 1", "forward"),
    ]
    assert relu["category"] == "activation"
    assert relu["user_metadata"] == "activation, float32[262144]"
    setup = made["device_traces"][0][1]["frames"]
    assert [(frame["filename"], frame["name"]) for frame in setup][-1] == ("run", "setup")


def with_line(line: str) -> Trace:
    """Two steps in which `line` made every storage."""
    trace = two_steps()
    return replace(trace, lines=(line,), storages=tuple(storage._replace(line=0) for storage in trace.storages))


def test_frames_name_the_line_that_allocates() -> None:
    made = snapshot(with_line("train.py:12 > trainer.py:80"))
    relu = next(e for e in made["device_traces"][0] if e["action"] == "alloc" and e["frames"][0]["name"] == "relu")
    assert [(frame["filename"], frame["line"]) for frame in relu["frames"]] == [
        ("aten", 0),
        ("site-packages/trainer.py", 80),
        ("train.py", 12),
        ("body.1", 0),
        ("body", 0),
        ("(model)", 0),
        ("step 1", 0),
    ]
    # The line that frees is not known.
    freed = [entry for entry in made["device_traces"][0] if entry["action"] == "free_completed"]
    assert freed and not any(frame["line"] for entry in freed for frame in entry["frames"])


@pytest.mark.parametrize(
    ("line", "made_at", "called_from"),
    [
        ("train.py:12", "train.py:12", None),
        ("In [3]:7", "In [3]:7", None),
        ("train.py:12 > trainer.py:80", "trainer.py:80", "train.py:12"),
        ("a > b:c.py:12", "a > b:c.py:12", None),
    ],
)
def test_explain_shows_the_line(tmp_path: Path, line: str, made_at: str, called_from: str | None) -> None:
    (tmp_path / "step.pickle").write_bytes(pickled(with_line(line)))
    explained = memsize.explain(tmp_path / "step.pickle")
    assert {(place.line, place.called_from) for place in explained.places} == {(made_at, called_from)}


def test_several_models_have_no_module_around_them() -> None:
    trace = two_steps()
    layers = (replace(trace.layers[0], path="teacher"), *trace.layers[1:])
    frames = [frame for e in snapshot(replace(trace, layers=layers))["device_traces"][0] for frame in e["frames"]]
    assert ("body", "Sequential") in {(frame["filename"], frame["name"]) for frame in frames}
    assert "(model)" not in {frame["filename"] for frame in frames}


def test_phases_are_annotations() -> None:
    notes = snapshot(two_steps())["external_annotations"]
    assert [(note["name"], note["stage"], note["time_us"]) for note in notes[:4]] == [
        ("setup", "START", 0),
        ("setup", "END", 3),
        ("forward 1", "START", 3),
        ("forward 1", "END", 5),
    ]


def test_a_snapshot_has_the_fields_of_pytorchs_own() -> None:
    # torch/csrc/cuda/memory_snapshot.cpp and the structure in torch.cuda.memory._snapshot's docstring.
    made = snapshot(two_steps())
    assert set(made) == {"segments", "device_traces", "allocator_settings", "external_annotations"}
    assert all(
        set(segment)
        == {
            "device",
            "address",
            "total_size",
            "allocated_size",
            "active_size",
            "requested_size",
            "stream",
            "segment_type",
            "segment_pool_id",
            "is_expandable",
            "frames",
            "blocks",
        }
        for segment in made["segments"]
    )
    blocks = [block for segment in made["segments"] for block in segment["blocks"]]
    assert all(set(block) == {"address", "size", "requested_size", "state", "frames"} for block in blocks)
    entry = {"action", "addr", "size", "stream", "time_us", "frames", "compile_context", "user_metadata"}
    assert all(set(found) - {"category"} == entry for found in made["device_traces"][0])


@pytest.mark.parametrize("name", CONFIGS)
def test_pytorchs_reader_takes_it(name: str, toy: StepTrace) -> None:
    from torch.cuda import _memory_viz as viz

    made = pickle.loads(pickled(toy.trace, CONFIGS[name]))
    final = replay(((e.storage, e.delta) for e in toy.trace.events), CONFIGS[name]).final
    assert sum(map(viz.calc_active, made["segments"])) == final.allocated
    # segsum checks that free, lost and allocated bytes add up to each segment.
    assert f"segments: {len(made['segments'])}\n" in viz.segsum(made)
    told = viz.trace(made)
    assert told.count("= cudaMalloc(") == sum(e["action"] == "segment_alloc" for e in made["device_traces"][0])
    assert viz.trace_plot(made).count("Active Memory Timeline") == 1
    assert viz.segment_plot(made).count("Allocator State History") == 1


def test_pytorchs_flame_graphs_fold_by_phase_and_module(toy: StepTrace) -> None:
    from torch.cuda import _memory_viz as viz

    lines = viz.memory(snapshot(toy.trace), format_flamegraph=str).splitlines()
    weights = [line for line in lines if "setup" in line and "Conv2d" in line]
    # 1000·500·9 weights of 4 B.
    assert "stream_0;active_allocated;run:0:setup;(model):0:Test;conv:0:Sequential;conv.2:0:Conv2d 18000000" in weights
    compared = viz.compare([], snapshot(toy.trace)["segments"], format_flamegraph=str)
    assert compared.count("only_after") == len(lines)


def test_freed_pairs_can_be_filtered_away(toy: StepTrace) -> None:
    from torch.cuda import _memory_viz as viz

    made = viz.filter_alloc_free_pairs(snapshot(toy.trace))
    left = sum(entry["size"] for entry in made["device_traces"][0] if entry["action"] == "alloc")
    assert left == replay((e.storage, e.delta) for e in toy.trace.events).final.requested


@pytest.mark.parametrize("trace", [two_steps(), inference(), empty()], ids=["steps", "inference", "empty"])
def test_the_viewers_unpickler_knows_every_opcode(trace: Trace) -> None:
    check_opcodes(pickled(trace))


def test_the_viewers_unpickler_reads_a_real_step(toy: StepTrace) -> None:
    data = pickled(toy.trace, CONFIGS["expandable"])
    check_opcodes(data)
    # Numbers reach the viewer as doubles, exact to 2^53.
    made = pickle.loads(data)
    assert max(entry["addr"] + entry["size"] for entry in made["device_traces"][0]) < 2**53


def check_opcodes(data: bytes) -> None:
    used = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert used <= OPCODES
    assert data[:2] == b"\x80\x04"  # the viewer refuses protocols above 4
    json.dumps(pickle.loads(data))  # plain types only


def test_the_viewers_categories_are_complete() -> None:
    # annotate_snapshot fails on a trace with categories when none of them is "unknown" (a misspelt name in it).
    entries = snapshot(two_steps())["device_traces"][0]
    assert [e["category"] for e in entries if e["action"] == "alloc"][:4] == ["parameter"] * 2 + ["input", "activation"]
    assert entries[-1]["category"] == "unknown"


@given(trace=traces(), place=st.integers(0, 10**6))
def test_the_viewer_can_go_back_to_any_entry(trace: Trace, place: int) -> None:
    # MemoryViz.js, simulate_memory: from the last state, entries are undone one by one, and each finds its block.
    made = snapshot(trace)
    entries = made["device_traces"][0]
    blocks = {b["address"] for s in made["segments"] for b in s["blocks"] if b["state"] == "active_allocated"}
    stop = place % len(entries)
    for entry in reversed(entries[stop:]):
        if entry["action"] == "alloc":
            blocks.remove(entry["addr"])
        if entry["action"] == "free_completed":
            assert entry["addr"] not in blocks
            blocks.add(entry["addr"])
    assert blocks == set(played({"device_traces": [entries[:stop]]}).blocks)


def test_a_step_writes_its_snapshot(tmp_path: Path, toy: StepTrace) -> None:
    toy.snapshot(tmp_path / "step.pickle")
    assert pickle.loads((tmp_path / "step.pickle").read_bytes()) == snapshot(toy.trace)
