"""The page of the Hub's models, `make tables`: its data from a sweep, and all that can be touched, offline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import memsize
from benchmarks import tables
from tests.browser import Opened, browser, wait_until
from tests.models import grid_of
from tests.records import Interval, SweepRow

GiB = 2**30


def row(model: str, batch: int, high: int, gpu: str = "Tesla T4", **settings: Any) -> SweepRow:
    shared = {"target": model, "train": "adamw", "scenario": "bf16", "seq_len": 512, "batch_size": batch, "gpu": gpu}
    device = Interval(high - GiB, high)
    return SweepRow(shared | settings, "fits", device=device, gpu_bytes=(15 if gpu == "Tesla T4" else 40) * GiB)


ROWS = [
    row("org/small", 4, 8 * GiB),
    row("org/small", 1, 5 * GiB),
    row("org/small", 1, 6 * GiB, "A100 40GB"),
    row("org/large", 1, 14 * GiB),
    row("org/large", 2, 17 * GiB),
    row("org/small", 1, 3 * GiB, lora="r=16", base="nf4"),
    row("org/small", 1, 4 * GiB, scenario="bf16+compile"),
    SweepRow({"target": "org/broken", "gpu": "Tesla T4"}, "failed", "why"),
]


def test_the_grid_is_that_of_the_issue_and_can_be_meant() -> None:
    """25 presets × 3 ways × 2 scenarios × 6 lengths × 3 batches × 10 cards, of which the first and the last."""
    grid = tables.grid(quick=False)
    assert [len(grid[key]) for key in ("scenario", "seq_len", "batch_size", "gpu")] == [2, 6, 3, 10]
    ends = {key: grid[key][:: len(grid[key]) - 1] for key in ("seq_len", "batch_size", "gpu")}
    cells = grid_of(grid | ends).cells(lambda text: (text,), str)
    assert len(cells) == 25 * 3 * 2 * 2**3
    assert {cell.subject.model for cell in cells} == set(tables.MODELS)


def test_the_data_has_the_batches_of_each_run_in_order() -> None:
    data = tables.page_data(ROWS, "2026-11-28")
    assert data["cards"] == {"Tesla T4": 15 * GiB, "A100 40GB": 40 * GiB}
    small, large, adapters, compiled = data["runs"]
    assert small["cards"] == {"Tesla T4": [[1, 5 * GiB], [4, 8 * GiB]], "A100 40GB": [[1, 6 * GiB]]}
    assert (large["model"], adapters["way"], compiled["scenario"]) == ("org/large", "QLoRA", "bf16+compile")
    assert adapters["command"] == "memsize report org/small --seq-len 512 --train adamw -s bf16 --lora r=16 --base nf4"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as launched:
        yield launched


def cells(page: Any) -> list[list[str]]:
    rows: list[list[str]] = page.evaluate(
        "[...document.querySelectorAll('tbody tr')].map(row => [...row.cells].map(cell => cell.textContent.trim()))"
    )
    return rows


def slide(page: Any, name: str, value: int) -> None:
    page.locator(f"#{name}").fill(str(value))


def test_all_that_can_be_touched(chromium: Any, tmp_path: Path) -> None:
    path = tmp_path / "will_it_fit.html"
    path.write_text(tables.page(tables.page_data(ROWS, "2026-11-28")))
    with Opened(chromium, path) as page:
        assert page.locator("#date").text_content() == "2026-11-28"
        assert cells(page) == [["org/small", "5.0", "6.0"], ["org/large", "14.0", ""]]
        # Between 5 GiB at batch 1 and 8 at 4 a line has 6 at batch 2; on from there 12 at batch 8, 20 at 16.
        slide(page, "batch", 1)
        assert cells(page) == [["org/small", "≈ 6.0", ""], ["org/large", "17.0", ""]]
        slide(page, "batch", 4)
        assert cells(page)[0] == ["org/small", "≈ 20.0", ""]
        assert page.locator("td.no").count() == 2
        page.locator("#search").fill("LARGE org")
        assert [row[0] for row in cells(page)] == ["org/large"]
        page.locator("#search").fill("")
        slide(page, "batch", 0)
        page.locator("#way").select_option("QLoRA")
        assert cells(page) == [["org/small", "3.0", ""]]
        page.locator("td a").click()
        wait_until(page, "document.querySelector('.chosen') !== null")
        command = page.evaluate("document.getElementById('command').value")
        assert command.endswith('--lora r=16 --base nf4 -b 1 --gpu "Tesla T4"')
        # The address has it all: from elsewhere, it leads back here.
        address = page.evaluate("location.hash")
        page.evaluate("location.hash = '#way=full&batch=4'")
        wait_until(page, "document.querySelector('.chosen') === null")
        assert cells(page)[0] == ["org/small", "8.0", ""]
        page.evaluate(f"location.hash = {address!r}")
        wait_until(page, "document.querySelector('.chosen') !== null")
        assert cells(page) == [["org/small", "3.0", ""]]
        assert page.evaluate("document.getElementById('command').value") == command


def test_a_saved_fit_is_drawn_from_its_points(chromium: Any, tmp_path: Path) -> None:
    fit = memsize.fit(nn.Linear(4096, 4096), (4096,), train="sgd", gpu="t4", scenarios="fp32")
    fit.save(tmp_path / "run.memsize")
    (tmp_path / "other.memsize").write_bytes(b"not one")
    found = fit.fit_rows[0]
    outside = fit.budgets[0].device - found.budget
    path = tmp_path / "will_it_fit.html"
    path.write_text(tables.page(tables.page_data(ROWS, "2026-11-28")))
    with Opened(chromium, path) as page:
        page.locator("#file").set_input_files(tmp_path / "run.memsize")
        wait_until(page, "document.querySelectorAll('tbody tr').length === 3")
        page.locator("#search").fill("nothing like it")
        (first, y0), (second, y1), *_ = found.points
        slide(page, "batch", 10)
        expected = outside + y0 + (y1 - y0) * (1024 - first) / (second - first) if first < 1024 < second else None
        ((name, figure, _),) = cells(page)
        assert name == "Linear, fp32"
        if expected is not None:
            assert figure == f"≈ {expected / GiB:.1f}"
        page.locator("#file").set_input_files(tmp_path / "other.memsize")
        wait_until(page, "document.getElementById('message').textContent.startsWith('This file cannot be read')")
        assert len(cells(page)) == 1


def published() -> dict[str, Any]:
    """The data of the page of the site, which is otherwise the template."""
    shell, _, rest = tables.TEMPLATE.read_text("utf-8").partition("{{ data }}")
    page = tables.PAGE.read_text("utf-8")
    assert page.startswith(shell) and page.endswith(rest)
    data: dict[str, Any] = json.loads(page.removeprefix(shell).removesuffix(rest))
    return data


def test_the_page_of_the_site_has_every_eager_cell() -> None:
    """25 presets × 3 ways × 6 lengths; two GPT-2 have no positions for 4 of these, and no layers for nf4 to store."""
    runs = published()["runs"]
    assert {run["model"] for run in runs} == set(tables.MODELS)
    assert len({run["command"] for run in runs}) == len(runs) == 25 * 3 * 6 - 2 * (2 * 4 + 6)
    for run in runs:
        assert len(run["cards"]) == 10 and all([batch for batch, _ in of] == [1, 2, 4] for of in run["cards"].values())


@pytest.mark.thorough
def test_the_page_of_the_site_has_what_a_sweep_answers() -> None:
    """Nothing on it was written by hand: the runs of the smallest preset are made again."""
    cells = tables.grid(eager=True) | {"seq_len": 512, "gpu": ["t4", "b200"]}
    cells["target"] = [way | {"target": tables.MODELS[0]} for way in cells["target"]]
    expected = tables.page_data(memsize.sweep(cells).sweep_rows, "")["runs"]
    runs = {run["command"]: run for run in published()["runs"]}
    for run in expected:
        assert {card: runs[run["command"]]["cards"][card] for card in run["cards"]} == run["cards"]
    assert len(expected) == 3
