"""Answers as figures of plotly: their numbers against the JSON's, their words, and what is said without plotly."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import memsize
from memsize import Fit, LayoutReport, StepTrace, Timeline, render
from memsize.cli import run
from memsize.errors import OutputError
from memsize.records.answer import Answer
from tests import records
from tests.browser import CHROMIUM
from tests.gpus import timeline
from tests.pages import figures
from tests.records import TITLES, Audit, Run, noun
from tests.test_fit import made_by_hand
from tests.test_program_document import program
from tests.test_timeline import empty, two_steps

pytest.importorskip("plotly", reason="needs plotly: pip install memsize[plots]")

MiB = 2**20
SAVED = Path(__file__).parent / "saved"


def asked(there: int) -> Fit:
    """A size that needs 14,000 MiB on one card, of which a process gets `there`."""
    fit = made_by_hand()
    row = replace(fit.fit_rows[0], peak=14_000 * MiB)
    budget = replace(fit.budgets[0], device=there + 650 * MiB, context=650 * MiB)
    return replace(fit, budgets=(budget,), fit_rows=(row,), asked=168)


BARS: dict[str, Callable[[], Answer]] = {
    "report": records.toy_report,
    "comparison": lambda: records.compared(records.toy(), records.toy("fp16", "float16")),
    "largest sizes": made_by_hand,
    "need": lambda: asked(13_000 * MiB),
    "checkpoint": lambda: memsize.load(SAVED / "checkpoint.1.memsize"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", BARS)
def test_bars_have_the_numbers_of_the_json(name: str) -> None:
    answer = BARS[name]()
    bars, figure = json.loads(answer.to_json())["bars"], answer.plot(unit="MiB")
    scale, unit = (MiB, ", MiB") if bars["kind"] == "bytes" else (1, "")
    for place, (part, drawn) in enumerate(zip(bars["parts"], figure.data, strict=True)):
        sizes = [row["sizes"][place] for row in bars["rows"]]
        assert [length * scale for length in drawn.x] == list(drawn.customdata) == sizes
        assert (drawn.name, drawn.marker.color) == (part["title"], TITLES[part["role"]].colour)
    assert list(figure.layout.yaxis.ticktext) == [", ".join(row["names"]) for row in bars["rows"]]
    assert figure.layout.xaxis.title.text == bars["title"] + unit


def test_a_figure_says_what_it_is_about() -> None:
    figure = records.toy_report().plot("kB")
    assert figure.layout.title.text == "model.py:Test"
    assert figure.layout.title.subtitle.text == (
        "input float32[1,3,64,64] · 9,223,901 parameters, 36,895.60 kB in float32"
    )
    # The parameters of fp32: 36,895,604 bytes.
    assert figure.data[0].x[0] == 36_895.604
    assert figure.layout.xaxis.title.text == "in memory when backward starts, kB"


def test_a_limit_is_a_line_where_it_is_near() -> None:
    figure = asked(13_000 * MiB).plot()
    (line,) = figure.layout.shapes
    assert (line.x0, line.x1) == (13_000 / 1024, 13_000 / 1024)
    assert figure.layout.annotations[0].text == "Tesla T4: 12.7 GiB"
    # More than twice what is needed would leave the bar no room.
    assert not asked(28_001 * MiB).plot().layout.shapes


def run_data(figure: Any, unit: int = MiB) -> dict[str, list[int]]:
    return {drawn.name: [round(size * unit) for size in drawn.y] for drawn in figure.data}


def test_a_run_over_time_has_the_numbers_of_its_timeline() -> None:
    found, figure = timeline(two_steps()), StepTrace(two_steps()).plot()
    levels = run_data(figure)
    for role, column in found.live.items():
        assert levels.pop(noun(role)) == list(column)
    assert {drawn.fillcolor for drawn in figure.data[: len(found.live)]} == {TITLES[role].colour for role in found.live}
    on_card = StepTrace(two_steps()).timeline
    assert levels.pop("live") == list(found.total)
    assert levels == {name: on_card[name].tolist() for name in ("allocated", "reserved")}
    # What is alive adds up.
    areas = [drawn.y for drawn in figure.data if drawn.stackgroup]
    assert [round(sum(sizes) * MiB) for sizes in zip(*areas, strict=True)] == list(found.total)


def test_a_run_over_time_names_its_phases_and_its_peak() -> None:
    figure = StepTrace(two_steps()).plot("GiB")
    axis, (peak,) = figure.layout.xaxis, figure.layout.annotations
    assert list(axis.ticktext)[:3] == ["setup", "forward 1", "backward 1"]
    assert list(axis.tickvals)[:2] == [0, 3]
    assert figure.layout.yaxis.title.text == "memory, GiB"
    assert peak.text == "16.00 MiB live in backward 1, body.0, mm"
    assert peak.y * 2**30 == 16 * MiB + 4


def test_a_long_run_shows_its_steps_and_its_highest_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    found = timeline(two_steps())
    monkeypatch.setattr(figures, "MARKS", 2)
    monkeypatch.setattr(figures, "POINTS", 7)
    figure = found.plot()
    assert list(figure.layout.xaxis.ticktext) == ["step 1", "step 2"]
    live = run_data(figure)["live"]
    assert len(live) == 7 and max(live) == found.peak.bytes
    monkeypatch.setattr(figures, "MARKS", 1)
    assert not found.plot().layout.xaxis.ticktext


def test_a_programs_run_is_drawn_over_time() -> None:
    figure = program().plot()
    assert figure.layout.title.text == "train.py --lr 1"
    # 3 MiB of weights, then 8 of activations, then 3 of gradients: 14 at the peak, 6 after it.
    assert run_data(figure)["live"] == [3 * MiB, 11 * MiB, 14 * MiB, 6 * MiB]


def test_layers_are_areas_that_add_up() -> None:
    report = records.toy_report()
    stored, kept = report.plot_layers().data
    data = json.loads(report.to_json())["layers"]
    for drawn, name in ((stored, "parameter_bytes"), (kept, "saved_bytes")):
        sizes = dict(zip(drawn.ids, drawn.values, strict=True))
        own = {layer["path"] or "(model)": layer[name] for layer in data}
        assert sizes["(model)"] == sum(own.values())
        assert sizes["conv"] == sum(size for path, size in own.items() if path.startswith("conv"))
        assert sizes["fc"] == own["fc"]
    # 8,400 + 1,350,500 + 4,501,000 parameters of four bytes in `conv`; 36,895,604 bytes in all.
    assert dict(zip(stored.ids, stored.values, strict=True))["conv"] == 23_439_600
    assert stored.labels[list(stored.ids).index("(model)")] == "stored, 35.19 MiB"
    assert dict(zip(stored.ids, stored.parents, strict=True)) == {
        "(model)": "",
        "conv": "(model)",
        "conv.0": "conv",
        "conv.1": "conv",
        "conv.2": "conv",
        "fc": "(model)",
    }
    assert {*stored.marker.colors} == {TITLES["parameter"].colour}
    assert {*kept.marker.colors} == {TITLES["activation"].colour}


def test_columns_of_the_layer_table_can_be_chosen() -> None:
    (new,) = records.toy_report().plot_layers(["new", "buffers"]).data  # there are no buffers
    assert sum(new.values[list(new.ids).index(path)] for path in ("conv", "fc")) == 4 * 6_317_201
    with pytest.raises(OutputError, match="'type' is not of bytes"):
        records.toy_report().plot_layers(["type"])
    with pytest.raises(OutputError, match="no column 'savd': did you mean saved"):
        records.toy_report().plot_layers(["savd"])
    with pytest.raises(OutputError, match="no layer has any bytes"):
        records.toy_report().plot_layers(["buffers"])


def test_where_there_is_nothing_to_plot_one_line_says_so() -> None:
    for nothing in (
        LayoutReport(Audit("m", (), "fp32", True, Run(), Run())),
        replace(records.toy_report(), scenario_results=()),
        timeline(empty()),
    ):
        with pytest.raises(OutputError, match=f"nothing to plot in this {nothing.kind}: "):
            nothing.plot()


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(OutputError, match="no unit 'MiBs'"):
        records.toy_report().plot("MiBs")


def test_names_are_no_markup() -> None:
    trace = two_steps()
    layers = tuple(replace(layer, path=layer.path.replace("body", "<b>x</b>")) for layer in trace.layers)
    found: Timeline = timeline(replace(trace, model="<i>net</i>", layers=layers))
    figure = found.plot()
    assert figure.layout.title.text == "&lt;i&gt;net&lt;/i&gt;"
    assert "<b>" not in json.dumps(figure.to_dict(), default=str)


def test_bars_of_equal_names_stay_apart() -> None:
    """plotly would stack bars of one name on each other."""
    report = records.toy_report()
    first, *others = report.scenario_results
    figure = replace(report, scenario_results=(first, *(replace(other, name=first.name) for other in others))).plot()
    assert list(figure.layout.yaxis.ticktext).count(first.name) > 1
    assert list(figure.data[0].y) == list(range(len(figure.data[0].x)))


def test_without_plotly_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    for plot in (records.toy_report().plot, records.toy_report().plot_layers, program().plot):
        with pytest.raises(OutputError) as caught:
            plot()
        assert str(caught.value) == "a figure needs plotly: pip install 'memsize[plots]'"


@pytest.mark.thorough
def test_pictures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("kaleido", reason="needs kaleido: pip install memsize[plots]")
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    saved = str(SAVED / "report.1.memsize")
    assert run(["report", saved, "-o", str(tmp_path / "report.png")]) == 0
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert run(["report", saved, "-o", str(tmp_path / "report.svg")]) == 0
    drawn = (tmp_path / "report.svg").read_text()
    assert drawn.startswith("<svg") and "fp32, amp-bf16" in drawn and "peak of a training step, MiB" in drawn


def test_without_kaleido_or_a_browser_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, saved = tmp_path / "report.png", str(SAVED / "report.1.memsize")
    monkeypatch.setattr(render, "find_spec", lambda name: None if name == "kaleido" else name)
    assert run(["report", saved, "-o", str(file)]) == 2
    assert capsys.readouterr().err == "error: a picture needs kaleido: pip install 'memsize[plots]'\n"

    def to_image(*_: object, **options: object) -> bytes:
        raise RuntimeError("no browser here")

    monkeypatch.setattr(render, "find_spec", lambda name: name)
    monkeypatch.setattr("plotly.graph_objects.Figure.to_image", to_image)
    assert run(["report", saved, "-o", str(file)]) == 2
    assert capsys.readouterr().err == (
        "error: a browser draws pictures: install Chrome or Chromium, or name it in BROWSER_PATH "
        "(RuntimeError: no browser here)\n"
    )
    assert not file.exists()


def test_nothing_but_a_figure_imports_plotly(python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    code = "import sys, memsize.render, memsize.records.report, memsize.analysis.step; print('plotly' in sys.modules)"
    assert python("-W", "error", "-c", code).stdout == "False\n"
