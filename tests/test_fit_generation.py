"""What fits while tokens are generated: answers against generations of which every step was traced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import memsize
from memsize.analysis.fit.footprint import Footprint
from memsize.cli import run
from memsize.device.config import AllocatorConfig
from memsize.errors import InputError
from memsize.records.fit import Fit, FitRow
from memsize.spec.generation import Generation
from tests.test_generation import SMALL, generated

MiB = 1 << 20
BUDGET = "698MiB"
"""48 MiB beside what the CUDA context may take; cuBLAS keeps 32 of them."""
ONE_LAYER = SMALL | {"num_hidden_layers": 1, "max_position_embeddings": 100_000}
NEW = 20


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(ONE_LAYER))
    return f"hf:{path}"


def fit(target: str, **options: Any) -> Fit:
    return memsize.fit(target, new=NEW, budget=BUDGET, scenarios="as-given", **options)


def fits(target: str, row: FitRow, generation: Generation, batch: int) -> bool:
    """Whether a generation fits the budget of `row`, by a run of which every step was traced."""
    trace = generated(target, generation, batch, every=True).trace
    return Footprint(batch, trace, AllocatorConfig()).fits(row.budget)


def test_the_longest_context_fits_and_the_next_does_not(target: str) -> None:
    found = fit(target, vary="context", batch_size=3)
    (row,) = found.fit_rows
    assert row.budget == 48 * MiB
    assert row.status == "found" and row.size and row.next_size == row.size + 1
    assert fits(target, row, Generation(row.size - NEW, NEW), 3)
    assert not fits(target, row, Generation(row.next_size - NEW, NEW), 3)
    assert found.generation["new"] == NEW
    assert "put together from traced steps" in found.notes[-1]
    assert "largest context that fits   generating 20 tokens" in str(found)


def test_the_largest_batch_fits_and_the_next_does_not(target: str) -> None:
    (row,) = fit(target, prompt=300).fit_rows
    assert row.status == "found" and row.size and row.next_size == row.size + 1
    assert fits(target, row, Generation(300, NEW), row.size)
    assert not fits(target, row, Generation(300, NEW), row.next_size)


def test_a_context_ends_with_the_positions_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(ONE_LAYER | {"max_position_embeddings": 600}))
    found = fit(f"hf:{path}", vary="context")
    (row,) = found.fit_rows
    assert (row.status, row.size, row.next_size) == ("endless", 600, None)
    assert "the model has positions for 600 tokens: no more are looked at" in found.notes


def test_the_frontier_is_the_longest_context_of_each_batch(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(ONE_LAYER | {"max_position_embeddings": 100}))
    found = fit(f"hf:{path}", vary="context,batch", batch_size=256)
    batches = [row.batch for row in found.fit_rows]
    assert batches == [256 * 2**n for n in range(len(batches))] and batches[-1] <= 1024
    sizes = [row.size or 0 for row in found.fit_rows]
    assert sizes[0] == 100 and sizes == sorted(sizes, reverse=True)
    (row,) = (row for row in found.fit_rows if row.batch == 512)
    assert row.size and row.next_size == row.size + 1
    assert fits(f"hf:{path}", row, Generation(row.size - NEW, NEW), 512)
    assert not fits(f"hf:{path}", row, Generation(row.next_size - NEW, NEW), 512)
    assert found.tables()["rows"].records()[0]["batch"] == 256
    text = str(found)
    assert "all 100" in text and f"With {batches[-1]:,} sequences, {sizes[-1]:,} tokens of each fit" in text


def test_what_would_make_a_batch_fit(target: str) -> None:
    found = fit(target, prompt=300, batch_size=200)
    assert found.remedied is not None
    rows = {row.name: row for row in found.remedied.rows}
    assert set(rows) == {
        "bf16 parameters",
        "expandable segments",
        "int8 weights",
        "int4 weights",
        "fp8 KV cache",
        "static cache",
    }
    (static,) = fit(target, prompt=300, batch_size=200, cache="static", remedies=False).fit_rows
    assert rows["static cache"].peak == static.peak


def test_the_command_line(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["fit", target, "--prompt", "8", "--new", "4", "-b", "2", "--budget", BUDGET, "-s", "as-given"]
    assert run([*asked, "-f", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in data["rows"]] == ["fits"]
    assert data["generation"] == {
        "prompt": 8,
        "new": 4,
        "cache": None,
        "kv_dtype": None,
        "beams": 1,
        "begun": 0,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vary": "seq_len"}, "cannot vary seq_len of a generation: vary context or batch"),
        ({"vary": "context", "prompt": 8}, "a context that varies makes its own prompt"),
        ({"train": "adamw"}, "train is about a step of the model's own"),
        ({"crossovers": True}, "crossovers is about a step of the model's own"),
    ],
)
def test_what_cannot_be_asked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        memsize.fit("hf:llama", new=NEW, **options)
