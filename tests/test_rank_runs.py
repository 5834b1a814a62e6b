"""Several ranks of a program: which are run, which are the same, and what is said of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import memsize
from memsize import ProgramRun, RankRuns, World
from memsize.cli import run as command
from memsize.documents import document
from memsize.render import render
from tests.conftest import Python
from tests.known_values import UNCOMPILED
from tests.pages import check_golden as check
from tests.process import can_fork
from tests.programs import run_ranks
from tests.records import Collective, Interval, RankGroup, Refused, WentOn, spans, traffic
from tests.rules import RANK_RULES
from tests.test_program_document import program

MiB = 2**20


def of_size(size: int, *collectives: Collective) -> ProgramRun:
    """A run whose first storage has `size` MiB."""
    run = program()
    first = run.trace.storages[0]._replace(bytes=size * MiB)
    trace = replace(run.trace, storages=(first, *run.trace.storages[1:]), collectives=collectives)
    peak = replace(
        run.peak,
        collectives=traffic(trace),
        requested=(11 + size) * MiB,
        device=Interval((337 + size) * MiB, (687 + size) * MiB),
    )
    return replace(run, trace=trace, peak=replace(peak, roles={**run.peak.roles, "parameter": size * MiB}))


class Runner:
    """Answers what rank number r holds, and remembers which ranks were asked about."""

    def __init__(self, sizes: Sequence[int], *collectives: Collective) -> None:
        self.sizes, self.collectives = sizes, collectives
        self.asked: list[int] = []

    def __call__(self, world: World) -> ProgramRun:
        self.asked.append(world.rank)
        run = of_size(self.sizes[world.rank], *self.collectives)
        return replace(run, trace=replace(run.trace, world=world))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are run in this process."""
    monkeypatch.setattr("memsize.analysis.ranks.can_fork", lambda: False)


def asked(sizes: Sequence[int], *collectives: Collective) -> tuple[list[int], RankRuns]:
    runner = Runner(sizes, *collectives)
    found = run_ranks(runner, World(len(sizes)), "distinct", 1, lambda _: None)
    return sorted(runner.asked), found


# -- which ranks are run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "run", "groups"),
    [
        ([3] * 64, [0, 63], [range(64)]),
        ([3], [0], [range(1)]),
        ([3, 2], [0, 1], [range(1), range(1, 2)]),
        # Ten rows on four ranks: 3, 3, 3 and 1.
        ([3, 3, 3, 1], [0, 1, 2, 3], [range(3), range(3, 4)]),
        # Whether just rank 0 is another; then the middle of 1 to 15, of 1 to 8, and of 5 to 8.
        ([3] * 8 + [2] * 8, [0, 1, 5, 7, 8, 15], [range(8), range(8, 16)]),
        # The last alone is another: halves of 1 to 63 towards it.
        ([3] * 63 + [2], [0, 1, 32, 48, 56, 60, 62, 63], [range(63), range(63, 64)]),
        ([4] + [3] * 15, [0, 1, 15], [range(1), range(1, 16)]),
    ],
)
def test_ranks_between_two_that_are_the_same_are_not_run(
    here: None, sizes: list[int], run: list[int], groups: list[range]
) -> None:
    ran, found = asked(sizes)
    assert ran == run
    assert [group.ranks for group in found.groups] == [tuple(each) for each in groups]
    assert [group.run.peak.roles["parameter"] for group in found.groups] == [sizes[each[0]] * MiB for each in groups]


@pytest.mark.parametrize("rows", [1, 7, 10, 16, 33, 100])
@pytest.mark.parametrize("size", [2, 8, 12, 31])
def test_chunks_of_a_tensor_are_told_apart_without_running_all(here: None, rows: int, size: int) -> None:
    """PyTorch's own chunks of `rows` rows: each rank is in the group of its chunk's size."""
    chunks = [len(each) for each in torch.arange(rows).chunk(size)]
    chunks += [0] * (size - len(chunks))
    _, found = asked(chunks)
    for group in found.groups:
        assert {chunks[rank] * MiB for rank in group.ranks} == {group.run.peak.roles["parameter"]}
    assert sorted(rank for group in found.groups for rank in group.ranks) == list(range(size))


def test_of_stages_all_are_run(here: None) -> None:
    ran, _ = asked([3, 9, 9, 3], Collective("send", 4, 2, 1, 0, 0))
    assert ran == [0, 1, 2, 3]


def test_all_are_all(here: None) -> None:
    runner = Runner([3, 3, 3])
    found = run_ranks(runner, World(3), "all", 1, lambda _: None)
    assert sorted(runner.asked) == [0, 1, 2] and [group.ran for group in found.groups] == [(0, 1, 2)]


@pytest.mark.parametrize(
    ("ranks", "text"), [((0,), "0"), ((0, 1), "0 and 1"), (range(8), "0–7"), ((0, 2, 5, 6, 7), "0, 2 and 5–7")]
)
def test_ranks_in_words(ranks: Sequence[int], text: str) -> None:
    assert spans(ranks) == text


# -- what is said of them ---------------------------------------------------------------------------------------------


def two_kinds() -> RankRuns:
    """Ranks 0 to 5 hold 3 MiB of parameters, 6 and 7 hold 1 MiB."""
    reduced = [Collective("all-reduce", size * MiB, 8, 3, 1, 2) for size in (2, 3)]
    gathered = Collective("all-gather", 24 * MiB, 2, 2, 1, 2)
    first, last = of_size(3, *reduced, gathered), of_size(1, *reduced)
    runs = RankRuns(8, 2, (RankGroup((0, 3, 4, 5), first, (1, 2)), RankGroup((6, 7), last)))
    return replace(runs, findings=RANK_RULES.findings(runs))


def told(runs: RankRuns) -> list[str]:
    return [finding.in_brief() for finding in RANK_RULES.findings(runs)]


def test_the_worst_rank_is_named() -> None:
    assert told(two_kinds()) == [
        "All 8 ranks fit on Tesla T4: ranks 0–5 need the most, 0.33 to 0.67 GiB of 14.6 GiB at the peak, in "
        "backward 1 of body.",
        "Ranks 6 and 7 hold 2.00 MiB less in tensors at the peak, 2.00 MiB of it parameters.",
        "6 of 8 ranks were run: 0 and 3–7.",
    ]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((3, 3), "each takes 0.33"),
        ((3, 3, 1), "ranks 0 and 1 need the most, 0.33"),
        ((3, 1), "rank 0 needs the most, 0.33"),
    ],
)
def test_ranks_of_two_kinds_that_need_as_much_are_said_together(sizes: Sequence[int], said: str) -> None:
    kinds = tuple(RankGroup((rank,), of_size(size)) for rank, size in enumerate(sizes))
    every = "Both" if len(sizes) == 2 else f"All {len(sizes)}"
    assert f"{every} ranks fit on Tesla T4: {said} to 0.67 GiB" in told(RankRuns(len(sizes), 1, kinds))[0]


def test_a_rank_that_does_not_fit_is_the_worst() -> None:
    refused = Refused(20 * MiB, 5 * MiB, 100 * MiB, "relu", "body", "forward 2", "net.py:12")
    runs = two_kinds()
    small = replace(runs.groups[1], run=replace(runs.groups[1].run, refused=(refused,)))
    runs = replace(runs, groups=(runs.groups[0], small))
    assert runs.worst is small
    assert told(runs)[0] == (
        "Out of memory on Tesla T4 for ranks 6 and 7 of 8 at net.py:12, in forward 2 of body: relu needs 20.00 MiB, "
        "5.00 MiB is left."
    )
    eager = replace(small, run=replace(small.run, trace=replace(small.run.trace, notes=(UNCOMPILED,))))
    runs = replace(runs, groups=(runs.groups[0], eager))
    assert told(runs)[0].startswith("Out of memory on Tesla T4 without torch.compile for ranks 6 and 7 of 8 at")
    handled = replace(small, run=replace(small.run, went_on=WentOn(3, None)))
    assert told(replace(runs, groups=(runs.groups[0], handled)))[0].endswith("is left; the script goes on.")


def test_a_rank_that_fails_is_named() -> None:
    runs = two_kinds()
    failed = replace(runs.groups[1], run=replace(runs.groups[1].run, failure="KeyError: 'x'"))
    assert (
        told(replace(runs, groups=(runs.groups[0], failed)))[0]
        == "Ranks 6 and 7 failed: KeyError: 'x'. --rank 6 shows where."
    )


@pytest.mark.parametrize(("format", "suffix"), [("text", "txt"), ("json", "json"), ("csv", "csv")])
def test_golden(format: str, suffix: str) -> None:
    check(f"run.ranks.{suffix}", render(two_kinds(), format))


def test_the_page_and_the_tables_hold_each_rank() -> None:
    runs = two_kinds()
    assert "0–5" in render(runs, "html") and document(runs).scenes()
    rows = runs.tables()["ranks"].records()
    assert [row["rank"] for row in rows] == list(range(8)) and [row["node"] for row in rows] == [0] * 4 + [1] * 4
    assert [row["parameter"] for row in rows] == [3 * MiB] * 6 + [MiB] * 2
    assert [row["ran"] for row in rows] == [True, False, False, True, True, True, True, True]


def test_ranks_are_saved(tmp_path: Path) -> None:
    two_kinds().save(tmp_path / "ranks.memsize")
    assert memsize.load(tmp_path / "ranks.memsize") == two_kinds()


# -- scripts ----------------------------------------------------------------------------------------------------------

SHARDED = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
model = torch.nn.Linear(64, int(sys.argv[1]), bias=False)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
names = [None] * dist.get_world_size()
dist.all_gather_object(names, f"rank {dist.get_rank()}")
dist.monitored_barrier()
for _ in range(9):
    model(torch.ones(4, 64, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    script = tmp_path / "train.py"
    script.write_text(SHARDED, encoding="utf-8")
    return script


def test_each_rank_of_a_script_is_run(sharded: Path) -> None:
    """Nine rows of 64 weights on two ranks: one has 5 rows, the other 4. SGD's momentum is as large."""
    found = memsize.run(sharded, ["9"], gpus=2, rank="distinct", gpu="t4", jobs=2)
    assert [(group.ran, group.run.peak.roles["optimizer state"]) for group in found.groups] == [
        ((0,), 5 * 64 * 4),
        ((1,), 4 * 64 * 4),
    ]
    assert all(group.run.steps == 3 for group in found.groups)
    assert [group.run.trace.world for group in found.groups] == [World(2, 0), World(2, 1)]


TOLD = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank, width = dist.get_rank(), [32]
torch.cuda.set_device(rank)
if rank > 0:
    dist.recv_object_list(width, src=rank - 1)
elif len(sys.argv) > 1:
    sys.exit(sys.argv[1])
dist.send_object_list([2 * width[0]], dst=(rank + 1) % 3)
shape = [(2, 3) if rank == 0 else None]
dist.broadcast_object_list(shape, src=0)
weight = torch.ones(width[0], *shape[0], device="cuda", requires_grad=True)
weight.sum().backward()
torch.optim.SGD([weight]).step()
"""


def all_and_one(tmp_path: Path, text: str, rank: int) -> tuple[Any, Any]:
    """The program `text` on three ranks, and on one of them."""
    script = tmp_path / "train.py"
    script.write_text(text, encoding="utf-8")
    held = memsize.run(script, gpus=3, rank="all", gpu="t4", jobs=2)
    return held, memsize.run(script, gpus=3, rank=rank, gpu="t4")


@pytest.mark.skipif(not can_fork(), reason="this platform does not fork")
def test_a_rank_is_told_what_another_sends(tmp_path: Path) -> None:
    """32 times 2 x 3 numbers on the first rank, and twice as many on each next one."""
    held, alone = all_and_one(tmp_path, TOLD, rank=2)
    parameters = [group.run.peak.roles["parameter"] for group in held.groups]
    assert parameters == [4 * 6 * 32, 4 * 6 * 64, 4 * 6 * 128] and alone.peak.roles["parameter"] == 4 * 6 * 128
    assert not alone.assumed


BROADCAST = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group()
is_first, place = dist.get_rank() == 0, sys.argv[1]
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
size = torch.tensor([[30, 4]] if is_first else [[0, 0]], device=place)
assert dist.broadcast(size, 0, async_op=True).wait()
text = torch.tensor(list(b"run 7"), dtype=torch.uint8, device=place) if is_first else torch.empty(5, dtype=torch.uint8)
text = text.to(place)
dist.broadcast(text, src=0)
assert bytes(text.tolist()) == b"run 7"
unknown = torch.rand(1, device="cuda").long() if is_first else torch.tensor([5], device="cuda")
dist.broadcast(unknown, 0)
assert unknown.item() == 0  # as where nobody knows it
weight = torch.ones(*size[0].tolist(), device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight])
bias = torch.full((9,), float(is_first), device="cuda")
dist.broadcast(bias, 0)
for step in range(9):
    weight.sum().backward()
    optimizer.step()
    stop = torch.zeros(1, device=place)
    if is_first and step == 1:
        stop += 1
    dist.broadcast(stop, group_src=0)
    if stop:
        break
"""


@pytest.mark.skipif(not can_fork(), reason="this platform does not fork")
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_rank_gets_the_numbers_that_another_broadcasts(tmp_path: Path, place: str) -> None:
    """Sizes, texts and flags: 30 x 4 numbers, and an end after the second step."""
    script = tmp_path / "train.py"
    script.write_text(BROADCAST, encoding="utf-8")
    for rank in (0, 2):
        run = memsize.run(script, [place], gpus=3, rank=rank, gpu="t4", steps=0)
        assert (run.peak.roles["parameter"], run.steps) == (4 * 30 * 4, 2)
        assert not any("another rank" in assumed.text for assumed in run.assumed)


def test_numbers_that_nobody_sends_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memsize.processes.rank_processes.can_fork", lambda: False)
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nimport torch.distributed as dist\ndist.init_process_group()\n"
        "size = torch.tensor([dist.get_rank() + 7])\ndist.broadcast(size, 0)\n"
        "assert size.item() == dist.get_rank() + 7\ntorch.ones(3).cuda(dist.get_rank())\n"
    )
    first, second = (memsize.run(script, gpus=2, rank=rank, gpu="t4", steps=0) for rank in range(2))
    told = "numbers that another rank broadcasts to this one stay as they are here"
    assert not first.assumed and [(each.text, each.lines) for each in second.assumed] == [(told, ("train.py:5",))]


@pytest.mark.skipif(not can_fork(), reason="this platform does not fork")
def test_a_rank_that_ends_before_it_sends_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(TOLD, encoding="utf-8")
    assert command(["run", "--gpus", "3", "--rank", "1", str(script), "no data"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: rank 0 ended before it sent what rank 1 waits for: run it as rank 0 to see why, in a new process where "
        "this one has used a GPU"
    )


TOLD_IN_GROUPS = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
pair = dist.new_group([1, 2])
share, width, plan = [None], [16 if rank == 2 else None], ["mine"]
dist.scatter_object_list(share, [1, 2, 4] if rank == 0 else None, src=0)
dist.broadcast_object_list(width, src=2, group=pair)
dist.broadcast_object_list([8] if rank == 2 else plan, src=2)
dist.scatter_object_list(plan, ["one", "two"] if rank == 1 else None, group=pair, group_src=0)
assert plan == [["one", "two"][rank - 1] if rank else 8], plan
weight = torch.ones((width[0] or plan[0]) * share[0], device=f"cuda:{rank}", requires_grad=True)
weight.sum().backward()
torch.optim.SGD([weight]).step()
"""


@pytest.mark.skipif(not can_fork(), reason="this platform does not fork")
def test_a_rank_is_told_what_is_sent_to_its_groups(tmp_path: Path) -> None:
    """Shares of 1, 2 and 4, of 16 numbers in the group of two, and of 8 outside of it."""
    held, alone = all_and_one(tmp_path, TOLD_IN_GROUPS, rank=1)
    assert [group.run.failure for group in held.groups] == [None] * 3
    assert [group.run.peak.roles["parameter"] for group in held.groups] == [4 * 8, 4 * 16 * 2, 4 * 16 * 4]
    assert alone.peak.roles["parameter"] == 4 * 16 * 2 and not alone.assumed


SAVES_FIRST = """
import os
import torch
import torch.distributed as dist

dist.init_process_group()
torch.cuda.set_device(dist.get_rank())
model = torch.nn.Linear(512, 512).cuda()
whole = model.weight.detach().clone()
if dist.get_rank() == 0:
    whole.cpu()
del whole
model(torch.ones(8, 512, device="cuda")).sum().backward()
"""


def test_a_rank_that_copies_to_the_host_holds_the_same_on_its_gpu(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SAVES_FIRST, encoding="utf-8")
    found = memsize.run(script, gpus=8, rank="distinct", gpu="t4", jobs=2)
    assert [(group.ran, group.between) for group in found.groups] == [((0, 7), tuple(range(1, 7)))]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "gpus", "others"),
    [
        ("", 2, "process"),
        ("", 8, "7 processes"),
        ("", 1, None),
        ("torch.distributed.init_process_group('nccl'); torch.distributed.all_reduce(x)", 2, None),
    ],
)
def test_a_script_that_sends_nothing_is_not_run_by_ranks(
    tmp_path: Path, text: str, gpus: int, others: str | None
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import torch\nx = torch.ones(1024, device='cuda')\n{text}\n", encoding="utf-8")
    run = memsize.run(script, gpus=gpus, gpu="t4")
    texts = [finding.text() for finding in run.findings if finding.code == "run-sends-nothing"]
    assert len(texts) == (others is not None)
    assert all(
        text.startswith(f"The script sends nothing to the other {others}, as if it ran alone.") for text in texts
    )


def test_the_command_runs_one_rank(sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["run", "--gpu", "t4", "--gpus", "4", "--nodes", "2", "--rank", "3", str(sharded), "10"]) == 0
    out = capsys.readouterr().out
    assert "rank 3 of 4" in out and "other ranks are assumed to send the objects" in out


def test_the_command_answers_for_ranks_in_any_format(sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--gpus", "64", "--nodes", "8", "--rank", "distinct", "-f", "json", str(sharded), "128"]
    assert command(["run", "--gpu", "t4", *arguments]) == 0
    data = json.loads(capsys.readouterr().out)
    (group,) = data["groups"]
    assert (data["size"], data["nodes"], group["ran"]) == (64, 8, [0, 63]) and group["between"] == list(range(1, 63))


def test_a_rank_that_fails_ends_with_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nif os.environ['RANK'] == '1': raise KeyError('x')", encoding="utf-8")
    assert command(["run", "--gpus", "2", "--rank", "all", str(script)]) == 1
    assert "Rank 1 failed: KeyError: 'x'. --rank 1 shows where." in capsys.readouterr().out


@pytest.mark.parametrize("failing", ["os.environ['LOCAL_RANK']", "raise ValueError('LOCAL_RANK must be set before.')"])
def test_a_script_for_torchrun_is_told_of_the_option(
    failing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import os\n{failing}", encoding="utf-8")
    assert command(["run", str(script)]) == 1
    assert "needs LOCAL_RANK, which torchrun sets: --gpus 8 runs it as one of 8 processes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "message"),
    [
        # Lightning's message, from its device parser
        (
            "raise ValueError('You requested gpu: [0, 1, 2]\\n But your machine only has: [0]')",
            "The script trains on 3 GPUs: --gpus 3 simulates them.",
        ),
        ("torch.ones(4, device='cuda:1')", "--gpus 2 --one-process simulates 2 of them in one process"),
        (
            "torch.nn.DataParallel(torch.nn.Linear(4, 4).cuda(), device_ids=[0, 1])",
            "--gpus 2 --one-process simulates 2 of them in one process",
        ),
    ],
)
def test_a_script_for_several_gpus_is_told_of_the_option(
    code: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import torch\n{code}", encoding="utf-8")
    assert command(["run", str(script)]) == 1
    assert message in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "8", "--rank", "8"], "no rank 8 among 8: they are counted from 0 to 7"),
        (["--gpus", "0"], "a world of 0 processes: it has from 1 to 1,048,576"),
        (["--gpus", "8", "--nodes", "3"], "8 processes cannot be spread evenly over 3 nodes"),
        (["--gpus", "8", "--rank", "most"], "no rank 'most': a number from 0, all or distinct"),
        (["--rank", "all"], "say how many, as in --gpus 8"),
        (["--nodes", "2"], "say how many, as in --gpus 8"),
    ],
)
def test_ranks_that_cannot_be_are_refused_in_one_line(
    sharded: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["run", *options, str(sharded), "10"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


SELECTIVE = """
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

def policy(context, op, *args, **kwargs):
    kept = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

layer = torch.nn.Sequential(torch.nn.Linear(512, 1024, bias=False), torch.nn.ReLU()).cuda()
x = torch.randn(2048, 512, device="cuda")
y = checkpoint(layer, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
y.sum().backward()
"""


def test_what_selective_checkpointing_keeps_is_an_activation(tmp_path: Path) -> None:
    """The product of 2,048 x 1,024 float32 numbers, 8 MiB, is kept; what ReLU makes of it is returned."""
    script = tmp_path / "train.py"
    script.write_text(SELECTIVE, encoding="utf-8")
    found = memsize.run(script, gpu="t4")
    assert found.failure is None
    (product,) = [each for each in found.trace.storages if each.shape == (2048, 1024) and "mm" in each.op][:1]
    assert (product.bytes, product.role) == (8 * MiB, "activation")


SAVED = """
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("cpu:gloo,cuda:nccl")
torch.cuda.set_device(dist.get_rank())
model = torch.nn.Linear(64, 9, bias=False, device="cuda")
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
for number in range(3):
    model(torch.ones(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    if number == 0:
        dcp.save(state, checkpoint_id="first")
        dcp.async_save({"model": state["model"]}, checkpoint_id="second").result()
        dcp.load(state, checkpoint_id="first")
        dcp.save({"epoch": torch.tensor(number)}, checkpoint_id="third")
        dcp.save(state, checkpoint_id="all/fifth")
print(Path("first/.metadata").is_file(), Path("all/fifth/.metadata").is_file())
try:
    dcp.load(state, checkpoint_id="fourth")
except BaseException as error:
    print(type(error).__name__)
"""


def test_sharded_checkpoints_are_counted_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 of two has 4 rows of 64 weights, and as much momentum."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SAVED, encoding="utf-8")
    found = memsize.run("train.py", gpus=2, rank=1, gpu="t4", steps=0)
    assert found.failure is None
    assert found.unwritten == (
        "2.00 KiB to first", "1.00 KiB to second", "8 B to third", "2.00 KiB to all/fifth",
    )  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert capsys.readouterr().out.splitlines()[:2] == ["True True", "CheckpointException"]


# -- backends ---------------------------------------------------------------------------------------------------------


def test_groups_have_the_backends_that_the_program_asks_for() -> None:
    """As PyTorch answers: subgroups inherit, and a program that names none has "undefined" unless it names a GPU."""
    with memsize.virtual_gpu("t4", world=World(4, 2)):
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("copies", "shards"))
        inherited, gloo = dist.new_group([2, 3]), dist.new_group([2, 3], backend="gloo")
        positional = dist.new_group([0, 2], None, "cpu:gloo,cuda:nccl")
        assert dist.get_backend() is dist.Backend.NCCL
        assert dist.get_backend(mesh["shards"].get_group()) == dist.get_backend(inherited) == "nccl"
        assert (dist.get_backend(gloo), dist.get_backend(positional)) == ("gloo", "cpu:gloo,cuda:nccl")
        with pytest.raises(ValueError, match="Invalid process group"):
            dist.get_backend(dist.new_group([0, 1]))
        for options, backend in (({}, "undefined"), ({"device_id": torch.device("cuda:0")}, "nccl")):
            dist.destroy_process_group()
            dist.init_process_group(**options)
            assert dist.get_backend() == backend


def test_groups_have_the_devices_of_their_backends() -> None:
    """By which code decides where it puts what it sends, such as FSDP the states of an optimizer."""
    with memsize.virtual_gpu("t4", world=World(4, 2)):
        dist.init_process_group("nccl")
        found = [group._device_types for group in (dist.group.WORLD, dist.new_group([2, 3], backend="gloo"))]
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert found[0] == [cuda] and set(found[1]) == {cpu, cuda}


def test_options_of_nccl_are_taken_by_builds_without_it() -> None:
    """As Megatron sets them, and as torchtitan shortens the time that a group waits."""
    options = "ProcessGroupNCCL" in vars(dist)
    with memsize.virtual_gpu("t4", world=World(4)):
        dist.init_process_group("nccl")
        given = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        given.config.cga_cluster_size = 4
        assert given.is_high_priority_stream
        group = dist.new_group([0, 1], pg_options=given)
        assert dist.get_world_size(group) == 2 and not isinstance(group, dist.ProcessGroupNCCL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is for NCCL and Gloo, and from 2.14 on that it has another name
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=100), group)
    assert ("ProcessGroupNCCL" in vars(dist)) is options


def test_a_group_is_split_and_its_work_is_over() -> None:
    """Rank 2 of 4 is the first of its half; whoever is in no part has no group."""
    with memsize.virtual_gpu("t4", world=World(4, 2)):
        dist.init_process_group("nccl", device_id=torch.device("cuda:2"))
        half: Any = dist.split_group(dist.group.WORLD, [[0, 1], [2, 3]])
        assert dist.get_process_group_ranks(half) == [2, 3] and half.rank() == 0
        assert dist.split_group(half, [[1]]) is None
        work: Any = dist.all_reduce(torch.ones(3, device="cuda:2"), group=half, async_op=True)
        assert work.wait(timedelta(seconds=3)) and work.wait()


def test_a_backend_sends_nothing_from_a_device_that_it_does_not_know() -> None:
    with memsize.virtual_gpu("t4", world=World(4, 2)):
        dist.init_process_group("nccl")
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(3), group=dist.new_group(backend="gloo"))
        dist.all_reduce(torch.ones(2**20, device="cuda:2").cpu(), group=dist.new_group(backend="cpu:gloo,cuda:nccl"))
        dist.destroy_process_group()
        dist.init_process_group()
        dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize("backend", ["nccl", None, "gloo"])
def test_nccl_adds_up_no_sparse_gradients(backend: str | None) -> None:
    with memsize.virtual_gpu("t4", world=World(2)):
        dist.init_process_group(backend)
        table = torch.nn.Embedding(100, 8, sparse=True).cuda()
        model = torch.nn.parallel.DistributedDataParallel(table)
        loss = model(torch.arange(5, device="cuda")).square().sum()
        if backend == "gloo":
            loss.backward()
            assert table.weight.grad is not None and table.weight.grad.is_sparse
        else:
            with pytest.raises(RuntimeError, match="NCCL does not support all_reduce with sparse tensors"):
                loss.backward()


ALONE = """
import torch.distributed as dist

dist.init_process_group("nccl", init_method="tcp://localhost:12355", rank=0, world_size=1)
dist.barrier()
assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "nccl")
"""


def test_a_program_of_one_gpu_joins_a_group_of_one(tmp_path: Path, warm_python: Python) -> None:
    """In a process of its own, as PyTorch registers its fake group only where something imports that."""
    (tmp_path / "train.py").write_text(ALONE, encoding="utf-8")
    found = warm_python("-m", "memsize", "run", "train.py")
    assert "AssertionError" not in found.stdout + found.stderr
    assert "It fits on A100 40GB" in found.stdout


CONTRASTIVE = """
import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather

dist.init_process_group("{backend}")
model = torch.nn.Linear(64, 32, bias=False, device="cuda")
for number in range(3):
    torch.cat(all_gather(model(torch.ones(16, 64, device="cuda")))).sum().backward()
    model.zero_grad()
"""


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional")
@pytest.mark.parametrize(("backend", "kind"), [("nccl", "reduce-scatter"), ("mpi", "all-to-all")])
def test_code_that_asks_for_the_backend_sends_what_it_would(tmp_path: Path, backend: str, kind: str) -> None:
    """The gradient of gathered features, 4 ranks x 16 rows of 32, is reduced by NCCL and exchanged by others."""
    (tmp_path / "train.py").write_text(CONTRASTIVE.format(backend=backend), encoding="utf-8")
    found = memsize.run(tmp_path / "train.py", gpus=4, gpu="t4")
    assert found.failure is None
    whole = 4 * 16 * 32 * 4
    assert [(each.kind, each.bytes) for each in found.trace.collectives] == 3 * [("all-gather", whole), (kind, whole)]


TWO_OPTIMIZERS = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
models = [torch.nn.Linear(512, size, bias=False, device="cuda") for size in (512, 1024)]
optimizers = [torch.optim.{optimizer}(model.parameters(), lr=0.1) for model in models]
while True:
    for model, optimizer in zip(models, optimizers):
        model(torch.ones(8, 512, device="cuda")).sum().backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_what_is_sent_in_a_step_is_that_of_all_optimizers(tmp_path: Path, optimizer: str) -> None:
    """Gradients of 1 and 2 MiB, also where the step of the second makes nothing new and ends the run."""
    (tmp_path / "train.py").write_text(TWO_OPTIMIZERS.format(optimizer=optimizer), encoding="utf-8")
    trace = memsize.run(tmp_path / "train.py", gpus=4, gpu="t4").trace
    assert [(each.count, each.bytes, each.largest) for each in traffic(trace)] == [(2, 3 * MiB, 2 * MiB)]
    steps = [trace.phases[each.phase].split()[1] for each in trace.collectives]
    assert steps == ["1", "1", "2", "2", "3", "3"]


# -- objects ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def objects() -> Any:
    """What rank 2 of 4 gets where ranks send each other objects."""
    found: dict[str, Any] = {}
    with memsize.virtual_gpu("t4", world=World(4, 2)) as gpu:
        dist.init_process_group("nccl")
        half = dist.new_group([2, 3])
        own: list[int] = [7]
        found["all"], found["half"] = [None] * 4, [None] * 2
        dist.all_gather_object(found["all"], own)
        dist.all_gather_object(found["half"], own, group=half)
        found["gathered"], found["elsewhere"] = [None] * 4, [None] * 4
        dist.gather_object(own, found["gathered"], dst=2)
        dist.gather_object(own, found["elsewhere"], dst=0)
        found["kept"] = ["mine"]
        dist.broadcast_object_list(found["kept"], src=0)
        found["scattered"], found["of half"], found["unknown"] = [None], [None], [None]
        dist.scatter_object_list(found["scattered"], ["a", "b", "c", "d"], src=2)
        dist.scatter_object_list(found["of half"], ["a", "b"], group=half, group_src=0)
        dist.scatter_object_list(found["unknown"], src=0)
        found["received"] = ["mine"], dist.recv_object_list(["mine"], src=1)
        own.append(8)
        dist.barrier()
    return found | {"assumed": [each.text for each in gpu.run.assumed]}


def test_objects_of_others_are_copies_of_ones_own(objects: Any) -> None:
    assert objects["all"] == [[7], [7], [7, 8], [7]] and objects["half"] == [[7, 8], [7]]
    assert objects["gathered"] == [[7], [7], [7, 8], [7]] and objects["elsewhere"] == [None] * 4


def test_objects_that_only_another_rank_has_stay_as_they_are(objects: Any) -> None:
    assert objects["kept"] == ["mine"] and objects["unknown"] == [None] and objects["received"] == (["mine"], 1)
    assert objects["scattered"] == ["c"] and objects["of half"] == ["a"]
    assert objects["assumed"] == [
        "other ranks are assumed to send the objects that this rank sends",
        "objects that another rank sends to this one stay as they are here",
    ]
