"""Strategies in a few words: how they are read, which blocks are sharded, and what one of the GPUs then holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from torch import nn

import memsize
from memsize import Parallel, Trace, World
from memsize.cli import run
from memsize.documents import document
from memsize.documents.sections import Table
from memsize.errors import InputError, ScenarioError
from memsize.units import MiB, format_bytes
from tests.conftest import Python, Write
from tests.fits import FitEvidence, findings_of, likely_size
from tests.gpus import budget_of, card, cuda_context, spread_over
from tests.pages import table_of
from tests.records import FitRow
from tests.test_ranks import BLOCK, IDS, LAYERS, PARAMETERS, WIDTH, Block, Model, at_the_end, most
from tests.workloads import blocks_of, on_each, parse_parallel

ROOT = Path(__file__).parent.parent
TWO = Parallel("fsdp", shards=2)

# -- how they are read ------------------------------------------------------------------------------------------------


def test_a_strategy_is_read_and_written_alike() -> None:
    for text, size in (("fsdp=8", 8), ("ddp=6", 6), ("hsdp=4x8", 32), ("tp=8", 8), ("pp=4", 4), ("fsdp=32,tp=8", 256)):
        assert str(parse_parallel(text)) == text
        assert parse_parallel(text).world == World(size)
    assert parse_parallel("dp=4").world == World(4, one_process=True)
    assert str(parse_parallel("hsdp=2x4,tp=2")) == "hsdp=2x4,tp=2"
    for text in ("fsdp=2,pp=4", "ddp=2,pp=4", "tp=2,pp=4", "hsdp=1x2,pp=4", "fsdp=1,tp=2,pp=4"):
        assert str(parse_parallel(text)) == text and parse_parallel(text).size == 8
    assert parse_parallel("pp=4, tp=2, fsdp=2") == Parallel("fsdp", shards=2, tensor=2, stages=4)
    assert [world.rank for world in parse_parallel("fsdp=3,pp=2,rank=4").worlds()] == [1, 4]
    assert parse_parallel(" hsdp = 4x8 ") == Parallel("hsdp", replicas=4, shards=8)
    assert parse_parallel("pp=4,rank=3").world == World(4, 3)
    assert str(parse_parallel("fsdp=8,rank=3,offload")) == "fsdp=8,offload,rank=3"
    for text in ("fsdp=8,offload", "hsdp=2x4,offload", "fsdp=4,tp=2,offload"):
        assert str(parse_parallel(text)) == text and parse_parallel(text).world == World(8)
    for text in ("ddp=8,views", "ddp=2,pp=4,views", "ddp=2,views,rank=1"):
        assert str(parse_parallel(text)) == text
    assert parse_parallel("ddp=8,views") == Parallel("ddp", replicas=8, views=True)
    for text in ("fsdp=64,ep=8", "hsdp=2x8,ep=4", "tp=8,ep=8", "fsdp=4,tp=2,ep=8,offload"):
        assert str(parse_parallel(text)) == text
    assert parse_parallel("ep=8") == parse_parallel("ep=8, fsdp=8") == Parallel("fsdp", shards=8, experts=8)
    assert str(parse_parallel("ep=8,rank=3")) == "fsdp=8,ep=8,rank=3"
    assert parse_parallel("fsdp=8 , offload") == Parallel("fsdp", shards=8, offload=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp", "on how many GPUs? write it like fsdp=8"),
        ("fsdp=x", "cannot read --parallel 'fsdp=x': write it like fsdp=8"),
        ("fsdp=0", "fsdp=0 is on 0 GPUs"),
        ("ddp=9999999", "it has to be on 1 to 1,048,576"),
        ("hsdp=8", "write it like hsdp=4x8"),
        ("fdsp=8", "no strategy 'fdsp'"),
        ("ddp=32,tp=8", "no such combination, 'ddp=32,tp=8': fsdp=32,tp=8 shards and divides"),
        ("fsdp=4,ddp=2", "given apart, --parallel ddp --parallel fsdp"),
        ("fsdp=4,fsdp=2", "no such combination"),
        ("dp=2,pp=2", "no such combination, 'dp=2,pp=2'"),
        ("fsdp=4,pp=2,rank=8", "no rank 8 among 8"),
        ("pp=2,fsdp=x", "cannot read --parallel 'fsdp=x'"),
        ("tp=0", "tp=0 is on 0 GPUs"),
        ("fsdp=4,tp=x", "cannot read --parallel 'tp=x': write it like tp=8"),
        ("pp=x", "cannot read --parallel 'pp=x': write it like pp=4"),
        ("fsdp=8,rank=8", "no rank 8 among 8: they are counted from 0 to 7"),
        ("pp=4,rank=-1", "no strategy 'rank'"),
        ("fsdp=8,rank=x", "no strategy 'rank'"),
        ("ddp=4,offload", "ddp=4,offload: offload keeps the shards of fsdp and hsdp in the host's memory"),
        ("dp=4,offload", "such as fsdp=8,offload"),
        ("pp=4,offload", "such as fsdp=8,offload"),
        ("tp=4,offload", "such as fsdp=8,offload"),
        ("fsdp,offload", "on how many GPUs? write it like fsdp=8"),
        ("fsdp=8,views", "fsdp=8,views: views are those of ddp's gradients into its buckets, such as ddp=8,views"),
        ("offload,fdsp=8", "no strategy 'fdsp'"),
        ("rank=3", "no strategy 'rank'"),
        ("ep", "experts divided over how many GPUs? write it like ep=8, or fsdp=64,ep=8"),
        ("fsdp=8,ep=3", "fsdp=8,ep=3: ep has to divide the 8 GPUs that share the model"),
        ("fsdp=8,ep=0", "fsdp=8,ep=0: ep has to divide the 8 GPUs"),
        ("fsdp=4,tp=4,ep=2", "ep has to divide the 16 GPUs that share the model, and be a multiple of tp=4"),
        ("ddp=8,ep=8", "ep divides experts over the GPUs of fsdp, hsdp or tp, such as fsdp=8,ep=8"),
        ("fsdp=8,pp=2,ep=8", "ep divides experts over the GPUs of fsdp, hsdp or tp"),
        ("cp=4", "context parallelism needs the loop's own context_parallel region"),
        ("", "no strategy ''"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_parallel(text)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_numbers_of_gpus_double_or_are_listed() -> None:
    assert [str(each) for each in on_each("fsdp", "1..8")] == ["fsdp=1", "fsdp=2", "fsdp=4", "fsdp=8"]
    assert [str(each) for each in on_each("ddp", "6,12,6")] == ["ddp=6", "ddp=12"]
    assert [str(each) for each in on_each("fsdp", [3, 4])] == ["fsdp=3", "fsdp=4"]
    assert [str(each) for each in on_each("fsdp,ep=4", "4..8")] == ["fsdp=4,ep=4", "fsdp=8,ep=4"]
    assert [str(each) for each in on_each("fsdp", "3..10")] == ["fsdp=3", "fsdp=6", "fsdp=10"]
    assert [str(each) for each in on_each("hsdp=x8", "8..32")] == ["hsdp=1x8", "hsdp=2x8", "hsdp=4x8"]
    assert on_each("fsdp=8", None) == on_each("fsdp=8", "8") == (Parallel("fsdp", shards=8),)
    assert [str(each) for each in on_each("fsdp,tp=8", "8..32")] == ["fsdp=1,tp=8", "fsdp=2,tp=8", "fsdp=4,tp=8"]
    assert [str(each) for each in on_each("tp", "2,4")] == ["tp=2", "tp=4"]
    assert [str(each) for each in on_each("pp", "2..4")] == ["pp=2", "pp=4"]
    assert [str(each) for each in on_each("fsdp,pp=4", "8,16")] == ["fsdp=2,pp=4", "fsdp=4,pp=4"]
    assert [str(each) for each in on_each("pp,ddp=2", "8")] == ["ddp=2,pp=4"]
    assert [str(each) for each in on_each("fsdp,offload", "1..2")] == ["fsdp=1,offload", "fsdp=2,offload"]
    assert [str(each) for each in on_each("ddp,views", "2")] == ["ddp=2,views"]
    assert [str(each) for each in on_each("hsdp=x8,offload", "16")] == ["hsdp=2x8,offload"]
    assert [str(each) for each in on_each("fsdp,tp=4,offload", "8")] == ["fsdp=2,tp=4,offload"]
    assert on_each(None, None) == on_each((), None) == (None,)
    several = on_each(["fsdp", "ddp", "fsdp"], "2,4")
    assert [str(each) for each in several] == ["fsdp=2", "fsdp=4", "ddp=2", "ddp=4"]


@pytest.mark.parametrize(
    ("text", "gpus", "message"),
    [
        ("fsdp=8", "16", "fsdp=8 is on 8 GPUs, not on 16"),
        ("hsdp=4x8", "16", "hsdp=4x8 is on 32 GPUs, not on 16"),
        ("hsdp=x8", "12", "12 GPUs do not divide into groups of 8"),
        ("hsdp", "16", "write it like hsdp=x8"),
        ("ddp,offload", "8", "offload keeps the shards of fsdp and hsdp"),
        ("fsdp=8,offload", "16", "fsdp=8 is on 8 GPUs, not on 16"),
        ("fsdp", "8..1", "cannot read the number of GPUs '8..1'"),
        ("fsdp", "0", "cannot read the number of GPUs '0'"),
        ("fsdp", "many", "cannot read the number of GPUs 'many'"),
        ("fsdp,tp=8", "12", "12 GPUs do not divide into groups of 8, which fsdp,tp=8 needs"),
        ("fsdp,tp=2,pp=4", "12", "12 GPUs do not divide into groups of 8, which fsdp,tp=2,pp=4 needs"),
        ("fsdp,pp", "8", "write it like pp=4"),
        (None, "8", "--gpus goes with --parallel"),
    ],
)
def test_numbers_of_gpus_that_cannot_be(text: str | None, gpus: str, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        on_each(text, gpus)


# -- which blocks -----------------------------------------------------------------------------------------------------


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(4), Block(4))
        self.merge = nn.Linear(4, 4)


def test_blocks_are_the_layers_that_repeat_the_inner_ones_first() -> None:
    assert [type(each) for each in blocks_of(Model()).modules] == [Block] * LAYERS
    stages = nn.Sequential(Stage(), Stage())
    assert str(blocks_of(stages)) == "4 x Block and 2 x Stage"
    modules = blocks_of(stages).modules
    assert [type(each) for each in modules] == [Block] * 4 + [Stage] * 2


def test_layers_without_children_are_blocks_where_no_others_are() -> None:
    linears = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert str(blocks_of(linears)) == "2 x Linear"
    # one alone, different ones, and lists that nobody calls, don't repeat
    lists = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]) for _ in range(2))
    for model in (nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), lists, nn.Linear(2, 2)):
        assert not blocks_of(model).modules


def test_a_librarys_model_names_its_blocks_itself() -> None:
    class Hinted(Model):
        _no_split_modules = ("Block", "Embedding")

    found = blocks_of(Hinted())
    assert (str(found), found.source) == ("4 x Block and 1 x Embedding", "the model's own _no_split_modules")


# -- what a GPU holds -------------------------------------------------------------------------------------------------


def traced(parallel: str, scenario: str = "as-given", **options: Any) -> Trace:
    return memsize.trace(Model(), IDS, parallel=parallel, scenario=scenario, gpu="t4", **options).trace


@pytest.fixture(scope="module")
def mixed() -> Trace:
    return traced("fsdp=8", "amp-bf16")


def test_a_gpu_stores_an_eighth_of_all_in_float32(mixed: Trace) -> None:
    held = at_the_end(mixed)
    assert mixed.world == World(8)
    assert held["parameter"] == PARAMETERS * 4 // 8
    assert held["optimizer state"] == 2 * PARAMETERS * 4 // 8
    assert most(mixed, "gradient") == PARAMETERS * 4 // 8


def test_layers_are_gathered_in_the_precision_of_autocast(mixed: Trace) -> None:
    root, block = 2 * 2 * 96 * WIDTH, 2 * 2 * BLOCK
    assert most(mixed, "gathered parameter") == root + block
    gathered = {each.dtype for each in mixed.storages if each.role == "gathered parameter"}
    assert gathered == {"bfloat16"}
    # Gradients are computed in bfloat16 and reduced in float32, four bytes for each element.
    reduced = {each.bytes for each in mixed.collectives if each.kind == "reduce-scatter"}
    assert reduced == {4 * 2 * BLOCK, 4 * 2 * 96 * WIDTH}
    assert not [each for each in mixed.storages if each.role == "cast copy"]


def test_the_loss_is_computed_in_float32_as_under_autocast(mixed: Trace) -> None:
    logits = [each for each in mixed.storages if each.shape == (16, 96) and each.dtype == "float32"]
    assert logits and "the loss is cross-entropy of the output" in mixed.notes


@pytest.mark.parametrize(("scenario", "width"), [("fp32", 4), ("bf16", 2)])
def test_without_autocast_nothing_is_cast(scenario: str, width: int) -> None:
    trace = traced("fsdp=4", scenario, optimizer="sgd", steps=2)
    assert at_the_end(trace)["parameter"] == PARAMETERS * width // 4
    assert most(trace, "gathered parameter") == width * (2 * 96 * WIDTH + 2 * BLOCK)
    assert {each.bytes for each in trace.collectives} == {width * 2 * BLOCK, width * 2 * 96 * WIDTH}


def test_copies_of_the_model_hold_all_of_it_and_reduce_it_in_buckets() -> None:
    trace = traced("ddp=4", "amp-bf16")
    held = at_the_end(trace)
    assert held["parameter"] == held["communication"] == PARAMETERS * 4
    assert held["optimizer state"] == 2 * PARAMETERS * 4
    reduced = [each for each in trace.collectives if each.kind == "all-reduce"]
    assert sum(each.bytes for each in reduced) == 3 * PARAMETERS * 4
    assert {each.ranks for each in reduced} == {4}


def test_hybrid_groups_shard_and_reduce_between_them() -> None:
    trace = traced("hsdp=2x4", optimizer="sgd", steps=1)
    assert at_the_end(trace)["parameter"] == PARAMETERS * 4 // 4
    kinds = {(each.kind, each.ranks) for each in trace.collectives}
    assert kinds == {("all-gather", 4), ("reduce-scatter", 4), ("all-reduce", 2)}


def test_offloaded_shards_are_on_the_host_and_layers_are_gathered_from_there() -> None:
    trace = traced("fsdp=8,offload", "amp-bf16", optimizer="adamw:fused=True")
    on_gpu = at_the_end(trace)
    assert not {"parameter", "gradient", "optimizer state"} & {role for role, size in on_gpu.items() if size}
    assert most(trace, "gathered parameter") == 2 * 2 * 96 * WIDTH + 2 * 2 * BLOCK
    # Each of the ten weights has rows that are a multiple of 8, and shards that are powers of two or 1.5 times one.
    told = [note for note in trace.notes if "offload" in note or "host" in note]
    assert len(told) == 2 and "CPUOffloadPolicy keeps shards, their gradients and the optimizer's state" in told[0]
    shards = PARAMETERS * 4 // 8
    assert f"at most {format_bytes(2 * shards)} are in pinned memory" in told[1]  # shards and their gradients


@pytest.mark.thorough
def test_the_scale_of_offloaded_gradients_leaves_nothing_to_wait_for(write: Write, warm_python: Python) -> None:
    """PyTorch's C++ code tells of such collectives when the process ends."""
    command = ["timeline", f"{write('net.py', NET)}:build", "--input", "64", "--train", "sgd", "--steps", "1"]
    command += ["--gpu", "t4", "--parallel", "fsdp=4,offload", "--scenario", "amp-fp16"]
    done = warm_python("-m", "memsize", *command)
    assert done.returncode == 0 and "unwaited" not in done.stderr


def test_what_was_sharded_is_said(mixed: Trace) -> None:
    first, second, *_ = mixed.notes
    assert first == "fsdp: fully_shard on 4 x Block, the layers that repeat in a list or a sequence; this is rank 0"
    assert second.startswith("amp-bf16 is FSDP's mixed precision here, not autocast")


def test_a_weight_of_fewer_rows_than_gpus_is_gathered_with_a_row_of_each() -> None:
    """Of 3 rows of 4,096 numbers each of 8 GPUs holds one, or none, as if there were 8."""
    model = nn.Sequential(nn.Linear(16, 4096, bias=False), nn.Linear(4096, 3, bias=False))
    options: dict[str, Any] = {"optimizer": "sgd", "gpu": "t4", "steps": 1}
    few, many = (memsize.trace(model, "16", parallel=f"fsdp={gpus}", **options).trace for gpus in (2, 8))
    gathered = [{each.bytes for each in trace.storages if each.role == "gathered parameter"} for trace in (few, many)]
    row = 4 * 4096
    assert gathered == [{16 * row, 2 * 2 * row}, {16 * row, 8 * row}]  # two rows of each of two GPUs
    told = "1.weight has 3 rows, which FSDP divides: each GPU holds at least one, and 16.00 KiB are gathered for each"
    assert [any(note.startswith(told) for note in trace.notes) for trace in (few, many)] == [False, True]
    assert not any("which FSDP divides" in note for note in traced("fsdp=8").notes)


@pytest.mark.parametrize(
    ("scenario", "message"),
    [("apex-O2", "apex's own wrappers are older"), ("int8-weight", "quantized weights cannot be trained")],
)
def test_scenarios_that_cannot_be_trained_so(scenario: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        traced("fsdp=2", scenario)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": None}, "distributes a training: name an optimizer"),
        ({"optimizer": "own"}, "distributes the usual training loop"),
        ({"step": lambda model: model}, "distributes the usual training loop"),
        ({"execute": True}, "it cannot really compute alone"),
    ],
)
def test_only_the_usual_loop_is_spread(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        traced("fsdp=2", **options)


NET = """
from torch import nn
from tests.test_ranks import Block

def build():
    return nn.Sequential(*(Block() for _ in range(4)))
"""


def test_the_command_shows_one_of_the_gpus(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{write('net.py', NET)}:build"
    command = ["timeline", target, "--input", "64", "--train", "sgd", "--steps", "1", "--gpu", "t4"]
    assert run([*command, "--parallel", "fsdp=4"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "gathered parameters" in shown and "fsdp: fully_shard on 4 x Block" in shown
    # Four blocks are gathered in the forward and in the backward, all but the last twice, and reduced once.
    assert f"all-gather 4 8 {8 * 4 * 2 * BLOCK / 2**20:.2f} {4 * 2 * BLOCK / 2**20:.2f}" in shown
    assert f"reduce-scatter 4 4 {4 * 4 * 2 * BLOCK / 2**20:.2f}" in shown


def test_a_report_tells_what_its_training_sends(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{write('net.py', NET)}:build"
    command = ["report", target, "--input", "64", "--train", "sgd", "--gpu", "t4", "--scenario", "fp32,int8-weight"]
    assert run([*command, "--parallel", "ddp=4", "--format", "json"]) == 0
    trained, untrained = (each["training"] for each in json.loads(capsys.readouterr().out)["scenarios"])
    size = 4 * 4 * 2 * BLOCK
    assert trained["collectives"] == [{"kind": "all-reduce", "ranks": 4, "count": 1, "bytes": size, "largest": size}]
    assert untrained is None
    report = memsize.report(target, "64", train="sgd", gpu="t4", scenarios="fp32", parallel="ddp=4")
    assert "Collectives of one GPU in a step" in str(report)
    peak = format_bytes(trained["requested"])
    assert f"it peaks at {peak} on one of 4 GPUs, in the " in str(report)


def test_only_what_autocast_trains_is_said_of_autocast(write: Write) -> None:
    """FSDP trains amp scenarios by its own mixed precision."""
    target = f"{write('net.py', NET)}:build"
    for parallel, told in (("ddp=2", True), ("fsdp=2", False)):
        report = memsize.report(target, "64", train="sgd", gpu="t4", scenarios="fp32,amp-bf16", parallel=parallel)
        assert any("Autocast leaves the parameters" in str(each) for each in report.findings) is told


def test_a_report_tells_what_each_stream_of_its_training_has(write: Write) -> None:
    target = f"{write('net.py', NET)}:build"
    report = memsize.report(target, "64", train="sgd", gpu="t4", scenarios="fp32,int8-weight", parallel="fsdp=4")
    (table,) = (each for each in document(report).sections() if isinstance(each, Table) and each.name == "streams")
    (row,) = table.rows
    assert [column.title for column in table.columns] == ["scenario", "default", "all-gather", "reduce-scatter"]
    assert sum(map(int, row[1:])) == report.scenario_results[0].training.reserved


def test_another_rank_is_shown_where_it_is_asked_for() -> None:
    """97 rows on four ranks: 25, 25, 25 and 22. The GPU of each has 25, as shards are padded to the largest."""
    model = nn.Sequential(nn.Linear(64, 97, bias=False))
    for rank in (0, 3):
        trace = memsize.trace(model, (1, 64), parallel=f"fsdp=4,rank={rank}", optimizer="sgd", gpu="t4").trace
        assert trace.world == World(4, rank) and trace.notes[0].endswith(f"this is rank {rank}")
        assert at_the_end(trace)["parameter"] == 25 * 64 * 4
        assert [each.bytes for each in trace.tensors] == [25 * 64 * 4]


def test_a_report_tells_what_the_host_holds_beside(write: Write) -> None:
    """By scenario, where it differs."""
    target = f"{write('net.py', NET)}:build"
    report = memsize.report(
        target, "64", train="sgd", gpu="t4", scenarios="fp32,bf16,amp-bf16", parallel="fsdp=4,offload"
    )
    shards = 4 * 2 * BLOCK // 4
    of = {note.partition(": ")[0]: note for note in report.notes if "pinned" in note}
    assert list(of) == ["fp32 and amp-bf16", "bf16"]
    for name, width in (("fp32 and amp-bf16", 4), ("bf16", 2)):  # shards and their gradients
        assert f"at most {format_bytes(2 * width * shards)} are in pinned memory of the host" in of[name]


def test_adapters_are_trained_on_several_gpus() -> None:
    """Four blocks of two weights, 64 x 256; A and B of rank 4 beside each. DDP has buckets for these alone."""
    model = nn.Sequential(*(Block() for _ in range(4)))
    adapters = 4 * 2 * 4 * (64 + 256) * 4
    options: dict[str, Any] = {"lora": "r=4", "optimizer": "sgd", "gpu": "t4"}
    alone = memsize.trace(model, (1, 64), base="nf4", **options)
    spread = memsize.trace(model, (1, 64), base="nf4", parallel="ddp=2", **options)
    assert at_the_end(spread.trace)["parameter"] == at_the_end(alone.trace)["parameter"] < adapters + 4 * 2 * BLOCK
    (reduced,) = {entry.bytes for entry in spread.trace.collectives if entry.kind == "all-reduce"}
    assert reduced == adapters
    sharded = memsize.trace(model, (1, 64), parallel="fsdp=2", **options)
    assert at_the_end(sharded.trace)["parameter"] == (adapters + 4 * 4 * 2 * BLOCK) / 2
    with pytest.raises(ScenarioError, match="a quantized base is trained under ddp, whole on each GPU, and not under"):
        memsize.trace(model, (1, 64), base="nf4", parallel="fsdp=2", **options)
    with pytest.raises(ScenarioError, match="adapters are trained under ddp, fsdp and hsdp: the plan of tp=2 has none"):
        memsize.trace(model, (1, 64), parallel="tp=2", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train", "adamw", "--parallel", "tp=4"], "Sequential has no plan for tensor parallelism"),
        (["--parallel", "fsdp=4"], "fsdp=4 distributes a training: name an optimizer, such as adamw"),
        (["--train", "adamw", "--parallel", "ddp=4", "--execute"], "it cannot really compute alone"),
    ],
)
def test_what_is_wrong_with_the_command(
    options: list[str], message: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"{write('net.py', NET)}:build"
    assert run(["timeline", target, "--input", "64", *options]) == 2
    assert message in capsys.readouterr().err


# -- how many GPUs ----------------------------------------------------------------------------------------------------

BUDGET = cuda_context().high + 200 * 2**20
"""200 MiB are left beside the CUDA context."""
SIZE = format_bytes(BUDGET)


@pytest.fixture(scope="module")
def fitted() -> Any:
    """Four blocks of 2 x 512 x 2,048 elements: AdamW's training takes 16 bytes for each, 256 MiB on one GPU."""
    model = nn.Sequential(*(Block(512) for _ in range(4)))
    return memsize.fit(
        model, (512,), batch_size=1, train="adamw", scenarios="fp32", parallel="fsdp", gpus="1..4", budget=BUDGET
    )


def test_the_fewest_gpus_are_found(fitted: Any) -> None:
    assert [row.status for row in fitted.fit_rows] == ["exceeds", "fits", "fits"]
    assert [row.gpu for row in fitted.fit_rows] == [f"{number} x GPU of {SIZE}" for number in (1, 2, 4)]
    (fewest,) = [finding for finding in fitted.findings if finding.code == "fit-gpus"]
    assert fewest.text() == f"Under fp32, it needs at least 2 x GPU of {SIZE}, with batch 1 on each GPU."
    assert [finding.code for finding in fitted.findings[:2]] == ["fit-gpus", "fit-fits"]
    (budget,) = [finding for finding in fitted.findings if finding.code == "budget"]
    assert budget.text().startswith(
        f"The allocator gets 200.00 MiB before NCCL's buffers (--margin leaves room for them): each GPU of {SIZE}"
    )
    assert [note for note in fitted.notes if "NCCL's buffers may take up to 2.00 GiB" in note]


SAMPLE = 16 * MiB
"""What one more sample takes in the rows below; on one GPU 960 MiB stand, of which each of N has its share."""


def row_of_gpus(gpus: int, room: int) -> FitRow:
    """The row of so many GPUs of which each has `room` beside the 64 MiB that everybody holds."""
    stands = 64 * MiB + 960 * MiB // gpus
    left = room + 64 * MiB - stands
    size = left // SAMPLE if left >= SAMPLE else None
    return FitRow(
        "fp32",
        "fp32",
        f"{gpus} x Tesla T4",
        room + 64 * MiB,
        "found" if size else "none",
        size=size,
        peak=stands + size * SAMPLE if size else None,
        per_step=SAMPLE if size else None,
        standing={"parameter": stands},
    )


def likely(rows: list[FitRow], gpus: int) -> int | None:
    budgets = spread_over([budget_of(card("t4"))], [parse_parallel(f"fsdp={each}") for each in (1, 2, 4, 8, 16)])
    return likely_size(rows, "fp32", next(each for each in budgets if each.gpus == gpus), budgets)


def test_a_search_on_more_gpus_begins_about_where_it_will_end() -> None:
    rows = [row_of_gpus(gpus, 240 * MiB) for gpus in (1, 2, 4, 8)]
    assert [row.size for row in rows] == [None, None, None, 7]
    # No size fits on 2, so that one is all there may be on 4. On 8, 64 + 120 of 304 MiB stand, and 7 x 16 MiB beside;
    # the 8 left and the 60 that fewer stand on 16 take 4 more of 16 MiB.
    assert likely(rows[:1], 2) == likely(rows[:2], 4) == 1
    assert likely(rows, 16) == 7 + (8 + 60) // 16 == row_of_gpus(16, 240 * MiB).size
    # From one row nothing says what shrinks: its size, and what room it has left.
    assert likely(rows[3:], 16) == 7 + 8 // 16
    assert likely([], 16) is None
    assert likely(rows[3:], 4) is None


@given(st.integers(1, 2000), st.sampled_from([(1, 2, 4), (2, 4, 8), (4, 8, 16), (2, 8, 16)]))
def test_where_memory_grows_by_the_line_the_guess_is_the_answer(room: int, numbers: tuple[int, int, int]) -> None:
    rows = [row_of_gpus(gpus, room * MiB) for gpus in numbers]
    guess = likely(rows[:2], numbers[2])
    assert guess == (rows[2].size if rows[1].size else 1)


def test_a_scenario_like_this_one_on_as_many_gpus_says_more() -> None:
    rows = [replace(row_of_gpus(4, 1000 * MiB), scenario="fp16"), row_of_gpus(2, 1000 * MiB)]
    assert likely(rows, 4) == rows[0].size
    assert likely([replace(rows[0], status="none", size=None)], 4) == 1


@pytest.mark.thorough
def test_each_row_is_told_as_soon_as_it_is_known() -> None:
    told: list[str] = []
    said: list[str] = []
    model = nn.Sequential(*(Block(512) for _ in range(4)))
    fit = memsize.fit(
        model,
        (512,),
        train="adamw",
        scenarios="fp32",
        parallel="fsdp",
        gpus="1..4",
        budget=BUDGET,
        progress=said.append,
        found=lambda finding: told.append(finding.text()),
    )
    assert [text.partition(",")[0] for text in told] == [
        f"Under fp32 on {number} x GPU of {SIZE}" for number in (1, 2, 4)
    ]
    assert told[0].endswith(f"{fit.fit_rows[0].next_peak / MiB:,.2f} MiB, and PyTorch can use 200.00 MiB.")
    assert [
        f", the largest batch is {row.size:,}: it" in text for row, text in zip(fit.fit_rows[1:], told[1:], strict=True)
    ] == [
        True,
        True,
    ]
    counts = [text.partition("; ")[2] for text in said if "; " in text]
    assert counts == sorted(counts) and set(counts) == {f"answer {number} of 3" for number in (1, 2, 3)}


def test_strategies_are_compared() -> None:
    """Whole, the training takes 256 MiB and the gradients' buckets: more than the 200 that are left of 850 MiB."""
    model = nn.Sequential(*(Block(512) for _ in range(4)))
    options: dict[str, Any] = {"scenarios": "fp32", "budget": BUDGET, "train": "adamw", "batch_size": 1}
    fit = memsize.fit(model, (512,), parallel=["ddp", "fsdp", "fsdp,offload"], gpus="4", **options)
    assert [(row.gpu, row.status) for row in fit.fit_rows] == [
        (f"4 x GPU of {SIZE} (ddp=4)", "exceeds"),
        (f"4 x GPU of {SIZE} (fsdp=4)", "fits"),
        (f"4 x GPU of {SIZE} (fsdp=4,offload)", "fits"),
    ]
    elements = 4 * 2 * 512 * 2048
    assert [row.standing.get("parameter", 0) for row in fit.fit_rows] == [4 * elements, elements, 0]
    first, others, *_ = (finding.text() for finding in fit.findings)
    assert first.startswith(f"Under fp32 on 4 x GPU of {SIZE} (ddp=4), batch 1 does not fit: it needs ")
    fitting = f"4 x GPU of {SIZE} (fsdp=4) and 4 x GPU of {SIZE} (fsdp=4,offload)"
    assert others == f"It fits on {fitting}."
    (budget,) = [finding.text() for finding in fit.findings if finding.code == "budget"]
    assert f"each GPU of {SIZE} has {SIZE}" in budget
    title = f"training with adamw, by ddp, fsdp and fsdp,offload   on 4 x GPU of {SIZE}"
    assert f"{title}   on 4 x GPU of {SIZE} (fsdp=4), batch 1: tensors " in str(fit).splitlines()[0]


def test_of_strategies_on_as_many_gpus_the_one_that_leaves_most_is_told() -> None:
    two = [Parallel("ddp", replicas=2), Parallel("fsdp", shards=2), Parallel("fsdp", shards=4)]
    spread = spread_over([budget_of(card("t4"))], two)
    names = [f"{each.size} x Tesla T4 ({each})" for each in two]
    assert [budget.name for budget in spread] == names
    sizes = zip(names, (3, 5, 9), strict=True)
    rows = tuple(FitRow("fp32", "fp32", name, 1, "found", size=size) for name, size in sizes)
    (told,) = findings_of(FitEvidence(rows, spread, "batch"), "fit-gpus")
    assert told.text() == "Under fp32, it needs at least 2 x Tesla T4 (fsdp=2), with batch 5 on each GPU."


def test_numbers_of_gpus_are_down_and_cards_across() -> None:
    model = nn.Sequential(*(Block(512) for _ in range(4)))
    options: dict[str, Any] = {"scenarios": "fp32", "gpu": "t4,h100", "train": "adamw", "batch_size": 1}
    fit = memsize.fit(model, (512,), parallel=["fsdp", "ddp"], gpus="1..4", **options)
    table = table_of(fit, "overview")
    assert [column.title for column in table.columns] == ["scenario", "strategy", "GPUs", "Tesla T4", "H100 80GB"]
    assert [row[1:] for row in table.rows] == [
        (strategy, number, "fits", "fits") for strategy in ("fsdp", "ddp") for number in (1, 2, 4)
    ]
    assert (
        "on 1 to 4 x Tesla T4 and 1 to 4 x H100 80GB   on 1 x Tesla T4 (fsdp=1), batch 1: tensors "
        in (str(fit).splitlines()[0])
    )
    fewest = [finding.text() for finding in fit.findings if finding.code == "fit-gpus"]
    assert fewest == [
        "Under fp32, it needs at least 1 x Tesla T4 (fsdp=1), with batch 1 on each GPU.",
        "Under fp32, it needs at least 1 x H100 80GB (fsdp=1), with batch 1 on each GPU.",
    ]


def test_cards_on_which_nothing_fits_are_told() -> None:
    budgets = spread_over([budget_of(card(name)) for name in ("t4", "h100")], [parse_parallel("fsdp=1"), TWO])
    kept = {"1 x Tesla T4": None, "2 x Tesla T4": None, "1 x H100 80GB": None, "2 x H100 80GB": 3}
    rows = tuple(FitRow("fp32", "fp32", name, 1, "found" if size else "none", size=size) for name, size in kept.items())
    assert [finding.text() for finding in findings_of(FitEvidence(rows, budgets, "batch"), "fit-gpus")] == [
        "Under fp32, nothing fits on 1 to 2 x Tesla T4.",
        "Under fp32, it needs at least 2 x H100 80GB, with batch 3 on each GPU.",
    ]


def test_rows_of_numbers_that_follow_each_other_share_a_bar(fitted: Any) -> None:
    rows = tuple(replace(row, status="found", size=size) for row, size in zip(fitted.fit_rows, (3, 7, 7), strict=True))
    bars = document(replace(fitted, fit_rows=rows, asked=None)).bars()
    assert bars is not None
    assert [[label.text for label in bar.labels] for bar in bars.bars] == [
        [f"fp32 on 1 x GPU of {SIZE}"],
        [f"fp32 on 2 to 4 x GPU of {SIZE}"],
    ]


def test_each_gpu_holds_its_share_whatever_the_number(fitted: Any) -> None:
    elements = 4 * 2 * 512 * 2048
    for row, number in zip(fitted.fit_rows, (1, 2, 4), strict=True):
        assert row.standing["parameter"] == elements * 4 // number
        assert row.standing["optimizer state"] == 2 * elements * 4 // number


def test_each_number_of_gpus_keeps_its_run(fitted: Any, tmp_path: Path) -> None:
    worlds = {run.gpu: trace.world.size for run, trace in fitted.traces.items()}
    assert worlds == {f"{number} x GPU of {SIZE}": number for number in (1, 2, 4)}
    fitted.save(tmp_path / "fit.memsize")
    assert memsize.load(tmp_path / "fit.memsize") == fitted


def test_what_is_compared_is_in_the_data(fitted: Any) -> None:
    data = json.loads(fitted.to_json())
    assert [(each["parallel"], each["gpus"]) for each in data["budgets"]] == [
        ("fsdp=1", 1),
        ("fsdp=2", 2),
        ("fsdp=4", 4),
    ]
    # Each of the blocks is gathered twice and reduced once; on one GPU nothing is sent.
    block = 4 * 2 * 512 * 2048
    sent = [
        {each["kind"]: (each["ranks"], each["count"], each["bytes"]) for each in row["collectives"]}
        for row in data["rows"]
    ]
    assert sent == [
        {},
        *({"all-gather": (n, 8, 8 * block), "reduce-scatter": (n, 4, 4 * block)} for n in (2, 4)),
    ]
    shown = " ".join(str(fitted).split())
    assert "training with adamw and fsdp" in shown and "Collectives of one GPU in a step" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": "1..8"}, "gpus goes with parallel"),
        ({"parallel": "fsdp=2"}, "distributes a training"),
        ({"parallel": "fsdp", "train": "adamw"}, "on how many GPUs"),
    ],
)
def test_what_cannot_be_compared(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        memsize.fit(Model(), IDS, **options)
