"""Pages in a real browser: what they show is what JSON holds, and all that can be touched works, offline."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memsize
from memsize import Finding, Report
from memsize.documents.sections import Bars, Curve, Limit, Line, Part
from memsize.records.answer import Renderable
from memsize.render import render
from memsize.units import format_bytes, unit_for
from tests import records
from tests.browser import Opened, browser, wait_until
from tests.conftest import ROOT
from tests.gpus import timeline
from tests.pages import LIBRARIES, SCRIPTS, _bars as drawn_bars, html, script
from tests.records import Label, Moment
from tests.snapshots import FORWARD, MODEL, MiB, Recorder, written
from tests.test_program_document import program
from tests.test_timeline import two_steps

PAGES: dict[str, Callable[[], Renderable]] = {
    "toy": records.toy_report,
    "structures": records.structures_report,
    "failing": records.failing_report,
    "deep": records.deep_report,
    "timeline": lambda: timeline(two_steps()),
    "program": program,
}


SAVED = Path(__file__).parent / "saved"
FIGURES = "all => all.map(cell => `${cell.dataset.value} ${cell.textContent}`)"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as launched:
        yield launched


@pytest.fixture(scope="module")
def blank(chromium: Any) -> Any:
    """A page of nothing, which may evaluate text."""
    return chromium.new_page()


def opened(chromium: Any, folder: Path, answer: Renderable, unit: str = "MiB", **how: Any) -> Opened:
    """The page of `answer`, opened from disk."""
    path = folder / "page.html"
    path.write_text(render(answer, "html", unit=unit), encoding="utf-8")
    return Opened(chromium, path, **how)


def wide_report(count: int, name: str = "block.{}.linear") -> Report:
    """A model of so many layers, of 1 KiB, 2 KiB, … of parameters."""
    names = [name.format(place) for place in range(count)]
    tensors = tuple(records.stored(f"{path}.weight", "float32", 256 * (place + 1)) for place, path in enumerate(names))
    layers = tuple(records.layer(path, "Linear", saved_bytes=1024) for path in names)
    trace = records.toy()
    return Report(
        model="wide",
        trace=type(trace)(
            model="wide",
            scenario="as-given",
            training=True,
            batch_size=1,
            torch="2.13.0",
            inputs=(),
            layers=(records.layer("", "Net", leaf=False), *layers),
            tensors=tensors,
        ),
    )


def test_the_libraries_are_the_versions_that_are_said() -> None:
    folder = files("memsize.render").joinpath("page", "vendor")
    said = json.loads(folder.joinpath("package.json").read_text())["dependencies"]
    assert set(said) == {f"d3-{name}" for name in LIBRARIES}
    for name, version in said.items():
        banner = folder.joinpath(f"{name}.min.js").read_text().splitlines()[0]
        assert f"{name}/ v{version} Copyright" in banner
        assert f"{name}:" in folder.joinpath("LICENSE").read_text()


def test_every_script_is_on_the_page() -> None:
    own = {path.name for path in files("memsize.render").joinpath("page").iterdir() if path.name.endswith(".js")}
    assert own == {f"{name}.js" for name in SCRIPTS}
    assert "</" not in script()


def test_the_page_of_every_other_answer_opens(chromium: Any, tmp_path: Path) -> None:
    others = [
        path for path in SAVED.glob("*.1.memsize") if path.name.split(".")[0] not in ("report", "program", "step")
    ]
    assert len(others) >= 10
    for path in others:
        with opened(chromium, tmp_path, memsize.load(path)) as page:
            assert page.locator("h1").count() == 1
            assert "" not in page.locator("th[scope=col]").evaluate_all("all => all.map(each => each.textContent)")


AXE = ROOT / "build" / "axe-core" / "node_modules" / "axe-core" / "axe.min.js"


@pytest.mark.thorough
@pytest.mark.skipif(not AXE.is_file(), reason="npm install --prefix build/axe-core axe-core")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_has_nothing_to_say(scheme: str, chromium: Any, tmp_path: Path) -> None:
    """A context of its own ignores the policy of pages, which lets no other script run."""
    answers = {name: make() for name, make in PAGES.items()}
    answers |= {path.name: memsize.load(path) for path in SAVED.glob("*.memsize") if path.stem != "step.1"}
    context = chromium.new_context(bypass_csp=True, color_scheme=scheme, reduced_motion="reduce")
    page = context.new_page()
    for name, answer in answers.items():
        (tmp_path / "page.html").write_text(render(answer, "html"), encoding="utf-8")
        page.goto((tmp_path / "page.html").as_uri())
        wait_until(page, "document.documentElement.dataset.ready === 'yes'")
        page.evaluate(AXE.read_text("utf-8"))
        found = page.evaluate(
            "axe.run().then(({ violations }) => violations.map(({ id, nodes }) => [id, nodes[0].html]))"
        )
        assert found == [], name
    context.close()


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_cut_off_and_without_scripts_the_page_says_the_same(
    name: str, chromium: Any, tmp_path: Path
) -> None:
    with opened(chromium, tmp_path, PAGES[name](), scripts=False) as page:
        still = page.locator("section.table td[data-value]").evaluate_all(FIGURES)
        assert page.locator("button").count() == 0
        assert page.locator("section.table tbody tr").evaluate_all("all => all.every(row => row.offsetHeight > 0)")
    with opened(chromium, tmp_path, PAGES[name]()) as page:
        assert page.locator("h1").count() == 1
        for width in (400, 1800, 1000):
            page.set_viewport_size({"width": width, "height": 900})
            # Whatever is wider than the window scrolls inside a box of its own.
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        for button in page.get_by_role("button", name="Unfold all").all():
            button.click()
        assert sorted(page.locator("section.table td[data-value]").evaluate_all(FIGURES)) == sorted(still)


def test_the_figures_are_those_of_json(chromium: Any, tmp_path: Path) -> None:
    report = records.structures_report()
    data = json.loads(render(report, "json"))
    with opened(chromium, tmp_path, report) as page:
        page.get_by_role("button", name="Unfold all").click()
        rows = page.evaluate(
            """() => [...document.querySelectorAll("#layers tbody tr:not(.group)")].map((row) => Object.fromEntries(
              [...row.cells].map((cell, place) => [row.closest("table").tHead.rows[0].cells[place].dataset.key,
                cell.dataset.value ?? cell.dataset.path])))"""
        )
        total = page.locator("#layers tfoot td[data-value]").evaluate_all("cells => cells.map(c => +c.dataset.value)")
    names = {"stored": "parameter_bytes", "buffers": "buffer_bytes", "new": "output_bytes", "saved": "saved_bytes"}
    for column, field in names.items():
        shown = sum(int(row[column]) for row in rows)
        assert shown == sum(layer[field] for layer in data["layers"]) == data["totals"][field]
        assert data["totals"][field] in total


def test_the_page_follows_a_scenario(chromium: Any, tmp_path: Path) -> None:
    report = records.toy_report()
    data = {scenario["name"]: scenario for scenario in json.loads(render(report, "json"))["scenarios"]}
    figures = {"stored": "parameter_bytes", "new": "output_bytes", "saved": "saved_bytes", "cast": "cast_bytes"}
    with opened(chromium, tmp_path, report) as page:
        for name in ("fp16", "amp-fp16", "fp32"):
            page.locator(f"section.scenes > .tools [data-scene={name}]").click()
            page.wait_for_selector(f"div.scene[data-name={name}][data-touched]")
            for column, field in figures.items():
                place = page.locator(f"#layers th[data-key={column}]")
                if place.count():
                    index = place.evaluate("head => head.cellIndex + 1")
                    sizes = page.locator(f"#layers tbody tr:not(.group) td:nth-child({index})")
                    shown = sizes.evaluate_all("all => all.map(cell => +cell.dataset.value)")
                    assert sum(shown) == data[name][field]
        # Wherever the page names a scenario, that leads to it.
        page.locator("#scenarios td[data-label='amp-fp16'] button").click()
        page.wait_for_selector("div.scene[data-name=amp-fp16]")
        assert page.locator("section.scenes [data-scene=amp-fp16]").get_attribute("aria-pressed") == "true"


def test_the_address_has_what_is_shown(chromium: Any, tmp_path: Path) -> None:
    report = records.toy_report()
    trained = replace(report, findings=(Finding("x", "It peaks.", moment=Moment("fp32", 2)),))
    with opened(chromium, tmp_path, trained) as page:
        assert page.evaluate("location.hash") == ""
        page.get_by_role("link", name="show the moment").click()
        wait_until(page, "location.hash.includes('event=2')")
        address = page.evaluate("location.hash")
    (tmp_path / "again").mkdir()
    with opened(chromium, tmp_path / "again", trained, fragment=address) as page:
        assert page.locator("svg.chart").first.get_attribute("aria-valuenow") == "2"
    (tmp_path / "other").mkdir()
    with opened(chromium, tmp_path / "other", report, fragment="#scenario=amp-fp16&event=99999") as page:
        assert page.locator("section.scenes [data-scene=amp-fp16]").get_attribute("aria-pressed") == "true"
        page.locator("section.scenes > .tools [data-scene=fp16]").click()
        wait_until(page, "location.hash.startsWith('#scenario=fp16')")


def test_findings_lead_to_their_rows(chromium: Any, tmp_path: Path) -> None:
    with opened(chromium, tmp_path, records.toy_report()) as page:
        link = page.locator("a.layer").first
        link.click()
        row = page.locator("#layers tr.found td").first
        assert row.get_attribute("data-path") == link.get_attribute("data-path")


def test_findings_lead_to_their_moments(chromium: Any, tmp_path: Path) -> None:
    report = records.toy_report()
    found = Finding("training-peak", "It peaks.", bytes=1, moment=Moment("fp32", 2))
    trace = records.toy("fp32")
    fp32 = next(result for result in report.scenario_results if result.name == "fp32")
    others = tuple(result for result in report.scenario_results if result.name != "fp32")
    with opened(chromium, tmp_path, replace(report, findings=(found,), scenario_results=(*others, fp32))) as page:
        page.locator("section.scenes button[data-scene=amp-fp16]").click()
        page.get_by_role("link", name="show the moment").click()
        wait_until(page, "document.querySelector('svg.chart')?.getAttribute('aria-valuenow') === '2'")
        assert page.locator("section.scenes [data-scene=fp32]").get_attribute("aria-pressed") == "true"
        assert format_bytes(timeline(trace).total[2]) in page.locator(".moment .facts").first.inner_text()


def test_rows_lead_to_their_areas(chromium: Any, tmp_path: Path) -> None:
    with opened(chromium, tmp_path, records.toy_report()) as page:
        lit = page.locator("#layers .treemap g.lit")
        page.locator("#layers td[data-path=fc]").hover()
        assert lit.get_attribute("data-path") == "fc"
        page.locator("#layers td[data-path='conv.2']").click()
        assert "conv 22.35 MiB" in page.locator("#layers .trail").inner_text().replace("\n", " ")
        assert lit.get_attribute("data-path") == "conv.2"
        # The same by keys: from the first row down to the last, whose area is beside those of other modules.
        page.locator("#layers tbody button.fold").first.focus()
        for _ in range(page.locator("#layers tbody tr").count() - 1):
            page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        assert page.locator("#layers .trail").inner_text().startswith("(model)")
        assert lit.get_attribute("data-path") == "fc"


def test_bars_are_held_against_the_memory_of_the_gpu(tmp_path: Path) -> None:
    bars = Bars.of("peak", (Part("kept", "kept", "activation"),), [(Label("fp32"), {"kept": 3 * 2**30})])
    near = drawn_bars(replace(bars, limit=Limit("T4", 4 * 2**30)), "MiB")
    assert (near.limit_at, near.bars[0].pieces[0].width) == (100, 75)
    over = drawn_bars(replace(bars, limit=Limit("T4", 2**30)), "MiB")
    assert (over.limit_at, over.bars[0].pieces[0].width) == (33.33, 100)
    far = drawn_bars(replace(bars, limit=Limit("A100", 30 * 2**30)), "MiB")
    assert (far.limit_at, far.bars[0].pieces[0].width) == (None, 100)
    assert far.limit_taken == ", of which the longest bar is 10.0%"


def test_a_page_names_what_its_figures_were_made_with() -> None:
    page = render(replace(records.toy_report(), gpu="T4"), "html")
    assert f"page by memsize {memsize.__version__}, Python {platform.python_version()}" in page
    assert f"PyTorch {records.toy().torch}" in page
    assert "Tesla T4: 14.6 GiB of memory (" in page and "compute capability 7.5" in page


@pytest.mark.parametrize("unit", ["auto", "B", "KiB", "MiB", "GiB", "MB"])
def test_sums_that_scripts_draw_read_like_all_others(unit: str, chromium: Any, blank: Any, tmp_path: Path) -> None:
    sizes = [0, 1, 5242, 5243, 2**17, 3 * 2**17, 5 * 2**17, 7 * 2**17, 2**20 + 1, 1_005_000, 1_015_000, 123_456_789_012]
    report = wide_report(20)
    with opened(chromium, tmp_path, report, unit=unit) as page:
        group, total = page.locator("tr.group td.bytes").first, page.locator("#layers tfoot td.bytes").first
        assert int(group.get_attribute("data-sum")) == 210 * 1024 == int(total.get_attribute("data-value"))
        assert group.inner_text() == total.inner_text() == unit_for(210 * 1024, unit).amount(210 * 1024)
    source = files("memsize.render").joinpath("page", "size.js").read_text()
    blank.set_content(f"<body data-unit='{unit}'></body>")
    drawn = blank.evaluate(f"sizes => {{ {source}; return sizes.map(size); }}", sizes)
    assert drawn == [format_bytes(size, unit) if size else f"0 {unit_for(0, unit).name}" for size in sizes]


def column(page: Any, place: int, rows: str = "#layers tbody tr") -> list[str]:
    """The texts of a column, as they are shown now."""
    found: list[str] = page.locator(f"{rows} td:nth-child({place} of :not([hidden]))").all_inner_texts()
    return found


def test_rows_sort_both_ways_and_back(chromium: Any, tmp_path: Path) -> None:
    with opened(chromium, tmp_path, wide_report(20, "layer{}")) as page:
        title = page.get_by_role("button", name="parameters")
        before = column(page, 1)
        title.click()
        assert column(page, 4) == [f"{256 * place:,}" for place in range(20, 0, -1)]
        assert page.locator("#layers th[data-key=parameters]").get_attribute("aria-sort") == "descending"
        title.press("Enter")
        assert column(page, 4) == [f"{256 * place:,}" for place in range(1, 21)]
        title.press("Space")
        assert column(page, 1) == before


def test_a_search_shows_what_it_finds_and_its_sum(chromium: Any, tmp_path: Path) -> None:
    with opened(chromium, tmp_path, wide_report(20)) as page:
        page.get_by_role("searchbox").fill("block.1")
        wait_until(page, "document.querySelectorAll('#layers tbody tr:not(.group)').length === 11")
        # block.1 and block.10 to block.19: 2 KiB and 11 KiB to 20 KiB.
        assert "11 of 20 rows" in page.locator("#layers output").inner_text()
        assert f"stored {(2 + sum(range(11, 21))) / 1024:.2f} MiB" in page.locator("#layers output").inner_text()
        page.get_by_role("searchbox").fill("")
        wait_until(page, "document.querySelectorAll('#layers tbody tr:not(.group)').length === 20")


def test_modules_fold_and_add_up(chromium: Any, tmp_path: Path) -> None:
    with opened(chromium, tmp_path, records.structures_report()) as page:
        page.get_by_role("button", name="Unfold all").click()
        whole = page.locator("#layers tbody tr:not(.group)").count()
        page.get_by_role("button", name="Fold all", exact=True).click()
        toggles = page.locator("#layers button.fold")
        assert page.locator("#layers tbody tr:not(.group)").count() < whole
        assert toggles.first.get_attribute("aria-expanded") == "false"
        toggles.first.press("ArrowRight")
        assert toggles.first.get_attribute("aria-expanded") == "true"
        page.get_by_role("button", name="List").click()
        assert page.locator("#layers tbody tr.group").count() == 0
        assert page.locator("#layers tbody tr").count() == whole


def test_sums_of_changes_say_which_way_they_went(chromium: Any, tmp_path: Path) -> None:
    before, after = (nn.Sequential(nn.Sequential(nn.Linear(256, n), nn.Linear(n, 256))) for n in (256, 128))
    with opened(chromium, tmp_path, memsize.diff(before, after)) as page:
        place = page.locator("#layers th[data-key=change]").evaluate("head => head.cellIndex + 1")
        # Two layers of 256 × 256 weights lose half of them, and one half of its 256 biases, at 4 bytes each.
        shown = page.locator(f"#layers tr.group td:nth-child({place})")
        assert shown.get_attribute("data-sum") == str(-4 * (2 * 128 * 256 + 128))
        assert shown.inner_text() == "−0.25"


def test_shares_of_a_module_add_up_to_percent(chromium: Any, tmp_path: Path) -> None:
    file = tmp_path / "two.pt"
    torch.save({"body.up.weight": torch.zeros(512, 768), "body.down.weight": torch.zeros(512, 256)}, file)
    with opened(chromium, tmp_path, memsize.checkpoint(file)) as page:
        place = page.locator("#modules th[data-key=share]").evaluate("head => head.cellIndex + 1")
        # 1.5 and 0.5 MiB of floats; names and zip records take some 2 KB beside them, a thousandth.
        assert [cell.strip() for cell in page.locator(f"#modules tbody td:nth-child({place})").all_inner_texts()] == [
            "100%",
            "75%",
            "25%",
        ]


def test_columns_can_be_left_out_and_added(chromium: Any, tmp_path: Path) -> None:
    with opened(chromium, tmp_path, records.toy_report()) as page:
        menu = page.locator("#layers details.menu")
        menu.locator("summary").click()
        menu.get_by_label("output", exact=True).uncheck()
        assert not page.locator("#layers th[data-key=output]").is_visible()
        assert page.locator("#layers td.specs:visible").count() == 0
        assert not menu.get_by_label("trainable").is_checked()
        menu.get_by_label("trainable").check()
        assert page.locator("#layers th[data-key=trainable]").is_visible()
        assert column(page, 4, "#layers tbody tr:not(.group)") == ["8,400", "1,350,500", "4,501,000", "3,364,001"]


def test_the_treemap_zooms_and_leads_to_the_rows(chromium: Any, tmp_path: Path) -> None:
    with opened(chromium, tmp_path, records.toy_report()) as page:
        view = page.locator("#layers .treemap")
        view.locator("g.leaf").first.wait_for(state="attached")
        leaves = view.locator("g.leaf").evaluate_all("all => all.map(each => [each.dataset.path, +each.dataset.value])")
        # 8,400, 1,350,500, 4,501,000 and 3,364,001 parameters of 4 bytes; the first is too small to be seen.
        assert dict(leaves).items() <= {
            "conv.0": 33600, "conv.1": 5402000, "conv.2": 18004000, "fc": 13456004
        }.items()  # fmt: skip
        assert {"conv.1", "conv.2", "fc"} <= {path for path, _ in leaves}
        view.locator("g.module[data-path=conv]").press("Enter")
        assert "conv 22.35 MiB" in view.locator(".trail").inner_text().replace("\n", " ")
        assert {"fc"}.isdisjoint(view.locator("g.leaf").evaluate_all("all => all.map(each => each.dataset.path)"))
        view.get_by_role("button", name="Icicle").click()
        view.locator("g.leaf[data-path='conv.2']").press("Enter")
        assert page.locator("#layers tr.found td").first.inner_text() == "2"
        view.get_by_role("button", name="(model)").click()
        view.get_by_role("button", name="kept for backward").click()
        whole = sum(view.locator("g.leaf").evaluate_all("all => all.map(each => +each.dataset.value)"))
        assert whole <= 25_317_952


def test_layers_that_hold_the_same_are_one_area(chromium: Any, tmp_path: Path) -> None:
    """Four layers with a buffer of 16 KiB each; their weights have two dtypes in turn, so that no three are alike."""
    with opened(chromium, tmp_path, records.deep_report()) as page:
        view = page.locator("#layers .treemap")
        view.locator("g.leaf").first.wait_for(state="attached")
        view.get_by_role("button", name="buffers").click()
        areas = view.locator("g.leaf").evaluate_all("all => all.map(e => [e.textContent, +e.dataset.value])")
        assert [size for _, size in areas] == [4 * 4096 * 4]
        assert areas[0][0].startswith("4 × 0–3.self_attention")
        view.get_by_role("button", name="stored").click()
        sizes = view.locator("g.leaf").evaluate_all("all => all.map(e => +e.dataset.value)")
        assert sorted(sizes) == [2 * 12288 * 4096] * 2 + [4 * 12288 * 4096] * 2


def test_a_slider_tells_the_need_of_each_size(chromium: Any, tmp_path: Path) -> None:
    """Two runs of 1 and 3 GiB: one of 2 GiB lies between them, and fits a card of 2.5 GiB."""
    curve = Curve(
        "Memory by batch",
        "batch",
        (Line(("fp32",), ((1, 1024 * MiB), (3, 3072 * MiB)), (1, 1024 * MiB)),),
        (Limit("T4", 2560 * MiB),),
    )
    report = records.toy_report()
    drawn = html._template().render(html._shared("auto", True) | {"parts": html._typed([curve]), "is_scene": True})
    path = tmp_path / "page.html"
    path.write_text(render(report, "html").replace("<footer>", f"{drawn}<footer>"), encoding="utf-8")
    with Opened(chromium, path) as page:
        slider, text = page.locator("input[type=range]"), page.locator("output.remark")
        assert text.inner_text() == "batch 1 · fp32: 1.00 GiB, fits on T4"
        slider.press("ArrowRight")
        assert text.inner_text() == "batch 2 · fp32: about 2.00 GiB, fits on T4"
        slider.press("ArrowRight")
        assert text.inner_text() == "batch 3 · fp32: 3.00 GiB, does not fit on T4"


def test_a_timeline_can_be_pointed_into(chromium: Any, tmp_path: Path) -> None:
    found = timeline(two_steps())
    with opened(chromium, tmp_path, found) as page:
        chart = page.get_by_role("slider")
        assert int(chart.get_attribute("aria-valuenow")) == found.peak.event
        for event in (0, 8, len(found) - 1):
            chart.press("Home")
            for _ in range(event):
                chart.press("ArrowRight")
            shown = page.locator(".moment .roles li").evaluate_all(
                "all => all.map(e => [e.dataset.role, +e.dataset.value])"
            )
            assert dict(shown) == dict(found.moment(event).roles)
            bytes_alive = page.locator(".moment .living td.bytes").evaluate_all("all => all.map(e => +e.dataset.value)")
            assert sum(bytes_alive) == found.total[event]
            reserved = page.locator(".moment .blocks .facts").text_content()
            assert reserved.startswith(format_bytes(found.reserved[event]))
        chart.press("p")
        assert int(chart.get_attribute("aria-valuenow")) == found.peak.event
        chart.press("PageDown")
        assert f"event {found.phases[3].start}," in chart.get_attribute("aria-valuetext")


def test_a_snapshot_shows_its_moment_and_the_calls_behind_it(chromium: Any, tmp_path: Path) -> None:
    gpu = Recorder()
    weight = gpu.alloc(6 * MiB, MODEL)
    gpu.alloc(10 * MiB, FORWARD)
    gpu.free(gpu.alloc(30 * MiB, FORWARD))
    gpu.oom(99 * MiB, 0, FORWARD)
    gpu.free(weight)
    with opened(chromium, tmp_path, memsize.explain(written(tmp_path / "s.pickle", gpu))) as page:
        assert page.get_by_role("slider").get_attribute("aria-valuenow") == "3"  # the event before the failure
        page.get_by_role("button", name="Lines and calls").click()
        leaves = page.locator(".moment .areas:visible g.leaf")
        leaves.first.wait_for(state="attached")  # areas are drawn once their width is known
        areas = leaves.evaluate_all("all => all.map(e => [e.dataset.path, +e.dataset.value])")
        assert dict(areas) == {"train.py:9 main \u203a net.py:12 forward": 10 * MiB, "train.py:5 main": 6 * MiB}


def test_a_timeline_zooms_and_pans(chromium: Any, tmp_path: Path) -> None:
    with opened(chromium, tmp_path, timeline(two_steps())) as page:
        wait_until(page, "document.querySelectorAll('svg.chart g title').length > 0")
        whole = page.locator("svg.chart g title").count()
        page.get_by_role("button", name="Zoom in").click()
        wait_until(page, f"document.querySelectorAll('svg.chart g title').length < {whole}")
        lit = "e => e.lastChild.getBBox().width / e.firstChild.getBBox().width"
        assert page.locator("svg.overview").evaluate(lit) == pytest.approx(0.5, abs=0.01)
        page.get_by_role("button", name="Whole run").click()
        wait_until(page, f"document.querySelectorAll('svg.chart g title').length === {whole}")
        assert page.locator("svg.overview").is_hidden()
        box = page.locator("svg.chart").bounding_box()
        page.mouse.move(box["x"] + 200, box["y"] + 200)
        assert "live" in page.locator(".hint").inner_text()
        page.mouse.click(box["x"] + 90, box["y"] + 200)
        assert page.locator("svg.chart").get_attribute("aria-valuenow") in ("0", "1")


def test_a_stretch_that_the_mouse_is_dragged_over_is_shown_alone(chromium: Any, tmp_path: Path) -> None:
    """The second and third fifth of the plot, whose edges are 76 pixels from the left and 12 from the right."""
    lit = "e => [e.lastChild, e.firstChild].map(part => part.getBBox()).flatMap(box => [box.x, box.width])"
    with opened(chromium, tmp_path, timeline(two_steps())) as page:
        box = page.locator("svg.chart").bounding_box()
        fifth = (box["width"] - 76 - 12) / 5
        page.mouse.move(box["x"] + 76 + fifth + 2, box["y"] + 200)
        page.mouse.down()
        page.mouse.move(box["x"] + 76 + 3 * fifth - 2, box["y"] + 220, steps=3)
        wait_until(page, "document.querySelector('svg.chart .selection')")
        page.mouse.up()
        wait_until(page, "!document.querySelector('svg.overview').hasAttribute('hidden')")
        x, width, left, whole = page.locator("svg.overview").evaluate(lit)
        event = whole / len(timeline(two_steps()))
        assert x - left == pytest.approx(whole / 5, abs=event) and width == pytest.approx(2 * whole / 5, abs=2 * event)


def test_the_run_before_a_change_is_a_line_over_the_run_after_it(chromium: Any, tmp_path: Path) -> None:
    sizes = (64, 16)
    models = [nn.Sequential(nn.Linear(64, size), nn.Linear(size, 64)) for size in sizes]
    before, after = (memsize.report(model, input_size=(64,), batch_size=256, train="sgd") for model in models)
    with opened(chromium, tmp_path, memsize.diff(before, after)) as page:
        assert page.locator("svg.chart path.other").count() == 1
        assert "before: at most" in page.locator(".keys:has(i.other)").inner_text()


def test_the_theme_can_be_chosen(chromium: Any, tmp_path: Path) -> None:
    paper = "getComputedStyle(document.querySelector('main')).backgroundColor"
    with opened(chromium, tmp_path, records.toy_report()) as page:
        light = page.evaluate(paper)
        page.get_by_role("button", name="Light or dark").click()
        dark = page.evaluate(paper)
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(20, 24, 29)")
    with opened(chromium, tmp_path, records.toy_report(), dark=True) as page:
        assert page.evaluate(paper) == dark
        page.get_by_role("button", name="Light or dark").click()
        assert page.evaluate(paper) == light


def test_a_page_prints_in_light_without_its_buttons(chromium: Any, tmp_path: Path) -> None:
    with opened(chromium, tmp_path, records.toy_report(), dark=True) as page:
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.querySelector('main')).backgroundColor") == "rgb(255, 255, 255)"
        assert not page.get_by_role("button", name="Copy as markdown").is_visible()
        assert page.pdf().startswith(b"%PDF")


def test_a_wide_table_is_printed_on_a_page_turned_on_its_side(chromium: Any, tmp_path: Path) -> None:
    with opened(chromium, tmp_path, records.toy_report()) as page:
        assert page.locator("#scenarios th:not([hidden])").count() >= 13
        figures = page.locator("#scenarios td.bytes")
        page.emulate_media(media="print")
        assert set(figures.evaluate_all("all => all.map(cell => getComputedStyle(cell).whiteSpace)")) == {"nowrap"}
        boxes = re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", page.pdf())
        assert {float(width) > float(height) for width, height in boxes} == {True, False}


def test_the_page_is_copied_as_markdown(chromium: Any, tmp_path: Path) -> None:
    report = records.toy_report()
    with opened(chromium, tmp_path, report) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.get_by_role("button", name="Copy as markdown").click()
        page.get_by_role("button", name="Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == render(report, "markdown", unit="MiB")
        page.locator("#layers").get_by_role("button", name="Copy table").click()
        page.locator("#layers").get_by_role("button", name="Copied").wait_for()
        table = page.evaluate("navigator.clipboard.readText()")
    assert "| conv.0 | Conv2d | float32\\[1,300,62,62\\] | 8,400 | 0.03 | 4.40 | 0.05 |" in table


@pytest.mark.thorough
def test_names_cannot_leave_their_place(chromium: Any, tmp_path: Path) -> None:
    bad = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
    report = wide_report(3, f"a.{bad.replace('.', '_')}" + ".{}\x1b[2J")
    with opened(chromium, tmp_path, report) as page:
        assert page.title() == "memsize: wide"
        page.locator("#layers .treemap g.leaf").first.hover()
        assert page.locator("img").count() == 0
        assert "</script>" in page.locator("#layers tbody").inner_text()


@pytest.mark.slow
def test_two_thousand_layers_stay_small_and_quick(chromium: Any, tmp_path: Path) -> None:
    report = wide_report(2000, "model.layers.{}.self_attention.query_key_value_projection")
    assert len(render(report, "html").encode()) < 8 * 2**20
    with opened(chromium, tmp_path, report) as page:
        assert page.locator("#layers tbody tr").count() <= 60
        assert page.locator("#layers tbody tr").first.is_visible()
        page.get_by_role("button", name="Unfold all").click()
        assert page.locator("#layers tbody tr:not(.group)").count() == 2000
        assert re.match(r"\d", page.locator("#layers tfoot td.bytes").first.inner_text())
