"""What is predicted for a rank against what it does: two or four real processes with gloo, under the same ledger."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import memsize
from memsize import World
from memsize.units import KiB
from tests.gloo import STEPS, events
from tests.ranks import LOOPS

ROOT = Path(__file__).parent.parent
SMALL = 64
"""Bytes of AdamW's counters, which lie on the CPU in both runs, and of the order that DDP's reducer sends: it is copied
to a GPU, and made anew on the CPU."""
ONLY_HERE = {"split", "_wrap_tensor_autograd"}
"""On the CPU, `_chunk_cat` fills a reduce-scatter's buffer by way of a padded copy. The storage of an
`AsyncCollectiveTensor` is nobody's memory."""
OF_OBJECTS = {"empty", "set_"}
"""An object is sent as a tensor of its bytes, which is there for a moment."""
Events = list[tuple[str, str, int]]


FEW = ("fsdp", "ddp, views", "tp", "1f1b")
ONLY_OF_FOUR = {"fsdp, tp", "fsdp, 1f1b", "ddp, 1f1b"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("size", "kinds"),
    [
        pytest.param(2, FEW, id="few"),
        pytest.param(2, tuple(LOOPS.keys() - {*FEW, *ONLY_OF_FOUR}), marks=pytest.mark.slow, id="others"),
        pytest.param(4, tuple(LOOPS), marks=pytest.mark.slow, id="four processes"),
    ],
)
def test_each_event_that_is_predicted_happens(tmp_path: Path, size: int, kinds: tuple[str, ...]) -> None:
    for rank, found in enumerate(real(tmp_path, size, kinds)):
        for kind in kinds:
            compare(predicted(kind, World(size, rank)), found[kind], at_least=400 // size)


def test_ranks_of_a_mesh_are_traced_one_after_the_other() -> None:
    """DTensor takes the meshes of all ranks for the same, and theirs are other subgroups."""
    first, third = (predicted("fsdp, tp", World(4, rank)) for rank in (0, 2))
    assert first == third


def real(folder: Path, size: int, kinds: tuple[str, ...]) -> list[dict[str, Events]]:
    """The events of each loop, rank by rank."""
    outs = [folder / f"{rank}.json" for rank in range(size)]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gloo", str(rank), str(size), str(folder / "store"), str(out), *kinds],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, out in enumerate(outs)
    ]
    for process in started:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    return [
        {kind: [tuple(event) for event in each] for kind, each in json.loads(out.read_text(encoding="utf-8")).items()}
        for out in outs
    ]


def predicted(kind: str, world: World) -> Events:
    make, model = LOOPS[kind]
    ids = torch.zeros(2, 8, dtype=torch.long)
    return events(memsize.trace(model(), ids, world=world, step=make, steps=STEPS, gpu="t4").trace)


def compare(predicted: Events, happened: Events, at_least: int) -> None:
    assert len(predicted) > at_least
    missing, extra = differences(predicted, happened)
    assert missing == []
    assert {op for _, op, size in extra if not (op in OF_OBJECTS and size < 2 * KiB)} <= ONLY_HERE
    # gloo's threads let go of buffers when they are done with them: the same is freed, but not at the same moment.
    freed, really_freed = (Counter(size for _, _, size in each if -size > SMALL) for each in (predicted, happened))
    assert not freed - really_freed


def differences(predicted: Events, happened: Events) -> tuple[Events, Events]:
    """The predicted allocations that didn't happen in that order, and those that did besides."""
    waiting = [event for event in reversed(predicted) if event[2] > SMALL]
    extra: Events = []
    for event in happened:
        if waiting and event == waiting[-1]:
            waiting.pop()
        elif event[2] > SMALL:
            extra.append(event)
    return waiting[::-1], extra
