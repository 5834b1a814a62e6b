"""What was measured on a GPU, against what `memsize.fit` says of it: a batch that ran fits, one that ran out does not.

Measurements are the files that `memsize verify --save` writes, in `tests/truth`. Their models are targets relative to
the repository.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import memsize
from memsize import InputSpec, Training
from tests.gpus import cuda_context
from tests.models import parse_input
from tests.records import FitRow

MiB = 1 << 20
CONTEXT = cuda_context().high
ROOT = Path(__file__).parent.parent
TRUTH = sorted((ROOT / "tests" / "truth").glob("*.json"))
_INPUT = re.compile(r"(?P<name>[^=]+)=(?P<dtype>\w+)\[(?P<shape>[\d,]*)\]")


def measurements(paths: list[Path]) -> Iterator[Mapping[str, Any]]:
    """Those that ended well or out of memory, for models whose code is here."""
    for path in paths:
        data = json.loads(path.read_text(encoding="utf-8"))
        for measured in data["measurements"] if data.get("schema") == "memsize.measurement/1" else ():
            here = (ROOT / measured["workload"]["model"].partition(":")[0]).exists()
            if here and (measured["error"] is None or ran_out(measured)):
                yield measured


def ran_out(measured: Mapping[str, Any]) -> bool:
    return "out of memory" in (measured["error"] or "")


def spec(text: str) -> InputSpec:
    """``ids=int64[4,512]``, with its batch, as an input of one sample."""
    found = _INPUT.fullmatch(text)
    assert found is not None, text
    shape = found["shape"].partition(",")[2]
    name = "" if found["name"].isdecimal() else f"{found['name']}="
    return parse_input(f"{name}{shape}:{found['dtype']}")


def said(measured: Mapping[str, Any]) -> FitRow:
    """What memsize says of the measured batch, on a device of the measured size."""
    work, stack = measured["workload"], measured["stack"]
    training = None
    if work["optimizer"] is not None:
        training = Training(
            work["optimizer"], loss=work["loss"], gradient_accumulation_steps=work["accumulate"], ema=work["ema"]
        )
    fit = memsize.fit(
        str(ROOT / work["model"]),
        [spec(text) for text in work["inputs"]],
        batch_size=work["batch_size"],
        scenarios=work["scenario"],
        train=training,
        mode="train" if work["training"] else "eval",
        gpu=stack["gpu"],
        budget=stack["total"],
        allocator=stack["allocator"] or None,
        remedies=False,
    )
    return fit.fit_rows[0]


def agrees(measured: Mapping[str, Any]) -> bool:
    return said(measured).status == ("exceeds" if ran_out(measured) else "fits")


@pytest.mark.skipif(not TRUTH, reason="no measurement is committed")
@pytest.mark.parametrize("path", TRUTH, ids=lambda path: path.stem)
def test_a_batch_that_ran_is_said_to_fit_and_one_that_ran_out_is_not(path: Path) -> None:
    wrong = [measured["workload"] for measured in measurements([path]) if not agrees(measured)]
    assert not wrong


def made_up(total: int, error: str | None) -> dict[str, Any]:
    """A measurement of a small network, with as much of a GPU as is asked for."""
    return {
        "workload": {
            "model": "tests/models.py:Small",
            "inputs": ["0=float32[64,3,32,32]"],
            "batch_size": 64,
            "scenario": "fp32",
            "optimizer": "adamw",
            "loss": None,
            "training": True,
            "accumulate": 1,
            "ema": False,
        },
        "stack": {"gpu": "NVIDIA A100-SXM4-40GB", "total": total, "allocator": ""},
        "error": error,
    }


def test_the_comparison_itself(tmp_path: Path) -> None:
    row = said(made_up(10_000 * MiB, None))
    assert row.status == "fits" and row.peak is not None
    enough, short = CONTEXT + row.peak, CONTEXT + row.peak - 2 * MiB
    full = "CUDA out of memory. Tried to allocate 20.00 MiB."
    cases = [made_up(enough, None), made_up(short, full), made_up(enough, full), made_up(short, None)]
    file = tmp_path / "some.json"
    broken = made_up(enough, "CUDA error: an illegal memory access was encountered")
    file.write_text(json.dumps({"schema": "memsize.measurement/1", "measurements": [*cases, broken]}))
    # The one that failed for another reason says nothing of memory.
    assert list(measurements([file])) == cases
    assert [agrees(measured) for measured in cases] == [True, True, False, False]
