"""The Report as Python sees it: figures, tables, findings."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import memsize
from memsize import Finding, Fit, LayoutReport, Report
from memsize.documents import document
from memsize.documents.sections import Bars, Chart, Curve, Findings, Notes, Part, Stop, Table, Title, Verdict
from memsize.records.answer import Renderable
from memsize.render import FORMATS, render
from memsize.units import Bytes
from tests import records
from tests.gpus import timeline
from tests.pages import table_of
from tests.records import (
    COLUMNS,
    FIGURES,
    LAYER_FIELDS,
    Audit,
    Budget,
    Card,
    Column,
    FitRow,
    FlatTable,
    Label,
    LayerFormats,
    Missing,
    Run as LayoutRun,
    Totals,
    totals,
)


def test_findings_draw_their_values() -> None:
    finding = Finding(
        "code",
        "{size} in {count} {word} of {layers}: {share:.0%}, {yes}",
        {"size": Bytes(2**20), "count": 12345, "word": "parts", "layers": ("a", "b", "c"), "share": 0.5, "yes": True},
        bytes=1,
    )
    assert finding.text() == "1.00 MiB in 12,345 parts of a, b and c: 50%, True"
    assert finding.text("B").startswith("1,048,576 B in ")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ((), ""),
        (("",), "the model itself"),
        (("a",), "a"),
        (("a", "b"), "a and b"),
        (("a", "b", "c"), "a, b and c"),
        (tuple("abcdefghijklmnop"), "a, b and 14 more"),
        (("fp32, batch 8", "bf16"), "fp32, batch 8; and bf16"),
        (("fp32, batch 8", "bf16", "fp16", "fp64"), "fp32, batch 8; bf16; and 2 more"),
    ],
)
def test_names_are_joined_and_shortened(names: tuple[str, ...], text: str) -> None:
    assert Finding("code", "{names}", {"names": names}).text() == text


def test_shares_of_fp32() -> None:
    report = records.toy_report()
    by_name = {result.name: result for result in report.scenario_results}
    assert by_name["fp16"].share("parameter_bytes", report.fp32) == 0.5
    assert by_name["amp-fp16"].share("saved_bytes", report.fp32) == 31103176 / 25317952
    assert by_name["fp32"].share("buffer_bytes", report.fp32) is None  # there are none to compare with
    assert by_name["int4-weight"].share("saved_bytes", report.fp32) is None
    assert by_name["int4-weight"].figure("saved_bytes") is None


def test_the_baseline_may_be_given() -> None:
    report = records.toy_report()
    assert report.fp32 == totals(records.toy())
    assert replace(report, scenario_results=()).fp32 is None
    assert replace(report, baseline=Totals(parameters=1)).fp32 == Totals(parameters=1)


def test_the_layer_frame_adds_up() -> None:
    frame = records.structures_report().layers
    assert len(frame) == len(records.structures().layers)
    assert frame["parameters"].sum() == 128
    assert frame["output_bytes"].sum() == totals(records.structures()).output_bytes
    assert frame.set_index("path").loc["head", "marks"] == "tied to embed.weight"


def test_the_scenario_frame() -> None:
    frame = records.toy_report().scenarios
    assert frame.loc["fp16", "parameter_bytes"] == 18447802
    assert frame.loc["fp16", "parameter_bytes_of_fp32"] == 0.5
    assert frame.loc["int4-weight", list(FIGURES)].isna().all()
    assert frame.loc["int4-weight", "status"] == "unavailable"
    assert records.structures_report().scenarios.empty


def test_the_tensor_frame() -> None:
    frame = records.structures_report().tensors.set_index("name")
    assert frame["bytes"].sum() == 128 * 4 + 40 + 16
    assert frame.loc["head.weight", ["bytes", "reported_bytes", "tied_to"]].tolist() == [0, 112, "embed.weight"]
    assert frame.loc["table", "kind"] == "attribute"


def test_why_prints_and_iterates() -> None:
    why = records.toy_report().why()
    assert [finding.code for finding in why] == ["half-is-stored", "amp-keeps-fp32-parameters"]
    assert repr(why).startswith("1. fp16 does halve what is stored, 35.19 MiB → 17.59 MiB.")
    assert repr(records.structures_report().why()) == "nothing to explain"


def test_assumptions_and_notes_come_once() -> None:
    structures = records.structures()
    report = Report("m", structures, notes=("mine", *structures.notes))
    assert report.assumptions == structures.assumptions
    assert report.remarks == ("mine", *structures.notes)


def test_a_frozen_model_shows_nothing_about_backward() -> None:
    """Its forward keeps nothing, so that a training step up to backward and autocast's gain mean nothing."""
    report = memsize.report(nn.Linear(8, 8).requires_grad_(False), (8,), scenarios="fp32,amp-bf16")
    bars, text = document(report).bars(), str(report)
    assert bars is not None and bars.title == "in memory when the forward starts"
    tables = [part for part in document(report).sections() if isinstance(part, Table) and part.title == "Scenarios"]
    names = {column.name for column in tables[0].columns}
    assert names & {"saved_bytes", "training", "inference"} == {"inference"}
    assert "Autocast leaves the parameters in float32" in text and "every batch size" not in text


def test_to_json_writes_what_it_returns(tmp_path: Path) -> None:
    text = records.toy_report().to_json(tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text(encoding="utf-8") == text
    assert json.loads(text)["parameters"]["count"] == 9223901


def test_json_has_the_layers_of_every_scenario() -> None:
    report = records.toy_report()
    data = json.loads(render(report, "json"))
    (fp32, *others) = (each for each in data["scenarios"] if each["layers"] is not None)
    assert fp32["name"] == "fp32" and fp32["layers"] == {}
    for scenario in others:
        columns = scenario["layers"]
        table = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        rows = [layer | own for layer, own in zip(data["layers"], table, strict=True)]
        for figure in ("parameters", "parameter_bytes", "output_bytes", "saved_bytes", "cast_bytes"):
            assert sum(row[figure] for row in rows) == scenario[figure]


def test_a_report_prints_itself() -> None:
    report = records.toy_report()
    assert repr(report).startswith("<memsize.Report ") and "\n" not in repr(report)
    assert "9,223,901 parameters" in str(report)
    assert report._repr_html_().lstrip().startswith("<style>")


def test_sections_in_reading_order() -> None:
    toy = [Title, Verdict, Bars, Table, Table, Findings]
    assert [type(part) for part in document(records.toy_report()).sections()] == toy
    assert [type(part) for part in document(records.structures_report()).sections()] == [Title, Table, Notes, Notes]
    assert [type(part) for part in document(records.failing_report()).sections()] == [Title, Stop, Table]


def test_the_verdict_is_the_findings_in_brief() -> None:
    report = records.toy_report()
    plain = Finding("plain", "Not in brief.")
    found = document(replace(report, findings=(plain, *report.findings)))
    assert [finding.code for finding in found.verdict()] == ["half-is-stored", "amp-keeps-fp32-parameters"]
    assert found.verdict()[0].in_brief("KiB") == "fp16 halves what is stored, 36,030.86 KiB → 18,015.43 KiB."
    assert found.data("B")["verdict"][0]["text"].endswith("36,895,604 B → 18,447,802 B.")
    assert len(found.reasons()[0].findings) == 3  # type: ignore[union-attr]


def test_a_peak_is_told_before_what_is_stored() -> None:
    peak = Finding("training-peak", "It peaks.", brief="It peaks.")
    report = records.toy_report()
    told = document(replace(report, findings=(*report.findings, peak))).verdict()
    assert [finding.code for finding in told] == ["training-peak", "half-is-stored", "amp-keeps-fp32-parameters"]


def test_what_the_verdict_has_told_in_full_is_not_repeated() -> None:
    comparison = records.compared(records.toy(), records.toy("fp16", "float16"))
    assert len(comparison.findings) <= 4 and document(comparison).reasons() == ()
    many = replace(comparison, findings=tuple(Finding(f"f{n}", "So.") for n in range(5)))
    assert len(document(many).verdict()) == 4 and len(document(many).reasons()) == 1


def test_scenarios_with_equal_figures_share_a_bar() -> None:
    found = document(records.toy_report()).bars()
    assert found is not None and [part.key for part in found.parts] == ["parameter", "cast copy", "kept", "input"]
    assert [([label.text for label in bar.labels], bar.sizes) for bar in found.bars] == [
        # the input of 3·64·64 float32 is kept by the first convolution, and counted there; in fp16 half of it is
        (["fp32"], (36895604, 0, 25317952, 0)),
        (["fp16"], (18447802, 0, 12658976, 24576)),
        # autocast keeps the input's own copy in float16, 3·64·64·2 bytes of it, and the biases' copies are not kept
        (["amp-fp16"], (36895604, 18447802, 12658976, 49152)),
        (["int8-weight"], (26803605, 0, 25317952, 0)),
    ]
    for bar, result in zip(found.bars, records.toy_report().scenario_results, strict=False):
        assert result.totals is not None and bar.total == result.totals.training


def test_bars_differ_by_a_thousandth_of_the_longest() -> None:
    parts = [Part("a", "a", "parameter"), Part("b", "b", "buffer"), Part("none", "none", "input")]
    rows = [("x", 900, 100), ("y", 901, 100), ("z", 898, 100)]
    found = Bars.of("t", parts, [(Label(name), {"a": a, "b": b}) for name, a, b in rows])
    assert [([label.text for label in bar.labels], bar.sizes) for bar in found.bars] == [
        (["x", "y"], (900, 100)),
        (["z"], (898, 100)),
    ]


def test_small_parts_of_a_whole_share_a_bar() -> None:
    sizes = {"small": 3, "large": 600, "tiny": 2, "half": 300}
    found = Bars.of_whole("t", [(Part(name, name, "input"), size) for name, size in sizes.items()])
    assert [(bar.labels[0].text, bar.total) for bar in found.bars] == [("large", 600), ("half", 300), ("other", 5)]
    alone = Bars.of_whole("t", [(Part("large", "large", "input"), 600), (Part("tiny", "tiny", "input"), 2)])
    assert [bar.labels[0].text for bar in alone.bars] == ["large", "tiny"]


def answers() -> dict[str, Renderable]:
    """An answer of each kind that can be made without torch."""
    report = records.toy_report()
    comparison = records.compared(records.toy(), records.toy("fp16", "float16"))
    forward = LayoutRun((LayerFormats("", "Net", 0, True, 1),))
    layout = LayoutReport(Audit("net", (), "fp32", True, forward, forward))
    return {
        "report": report,
        "why": report.why(),
        "comparison": comparison,
        "layout": layout,
        "timeline": timeline(records.toy()),
    }


@pytest.mark.parametrize("kind", answers())
@pytest.mark.parametrize("format", [*FORMATS, "notebook"])
def test_every_answer_is_drawn_in_every_format(kind: str, format: str) -> None:
    answer = answers()[kind]
    assert answer.kind == kind
    text = render(answer, format)
    assert text.strip()
    if format == "json":
        assert json.loads(text)["schema"].startswith(f"memsize.{kind}/")
    if format == "csv":
        first = next(iter(document(answer).tables().values()))
        assert text.splitlines()[0] == ",".join(first.columns)
        assert len(list(csv.reader(io.StringIO(text)))) == 1 + len(list(first.rows))


def test_a_view_is_for_answers_that_have_it() -> None:
    with pytest.raises(TypeError, match="depth"):
        render(records.toy_report().why(), "text", depth=1)


def test_flat_tables_become_records_and_frames() -> None:
    rows = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    values = [tuple(row.values()) for row in rows]
    assert FlatTable(("a", "b"), iter(values)).records() == rows
    assert FlatTable(("a", "b"), values).frame().to_dict("records") == rows
    assert list(FlatTable(("a",), ()).frame().columns) == ["a"]


def test_tables_lose_columns_and_keep_their_total() -> None:
    columns = tuple(Column(key, key, "bytes", 1) for key in "abc")
    rows = ((Bytes(1), Bytes(0), Missing("why")), (Bytes(2), None, Missing("why")))
    whole = Table("t", "", columns, rows, (Bytes(3), Bytes(0), None))
    assert whole.picked("ca").rows == ((Missing("why"), 1), (Missing("why"), 2))
    assert whole.without("a").total == (0, None)
    assert whole.without_empty("b", "c").keys == ("a",)
    assert whole.without_empty("a", "b").keys == ("a", "c")


def keys(table: Table) -> list[str]:
    return [column.key for column in table.columns]


def test_columns_with_nothing_in_them_are_left_out() -> None:
    assert keys(table_of(records.toy_report(), "layers").usual()) == [
        "layer",
        "type",
        "output",
        "parameters",
        "stored",
        "new",
        "saved",
    ]
    optional = {"kernel", "input", "calls", "trainable", "share", "mult_adds", "mult_adds_share"}
    assert set(keys(table_of(records.structures_report(), "layers"))) == {*COLUMNS} - {"dtype", "cast"}
    assert (
        set(keys(table_of(records.structures_report(), "layers").usual())) == {*COLUMNS} - {"dtype", "cast"} - optional
    )
    assert keys(table_of(records.toy_report(), "layers", columns=("layer", "cast"))) == ["layer", "cast"]


def test_cells_keep_their_type() -> None:
    layers = table_of(records.toy_report(), "layers").usual()
    assert isinstance(layers.rows[0][4], Bytes)
    assert layers.total is not None
    assert layers.total[3:] == (9223901, 36895604, 25268804, 25317952)
    missing = table_of(records.toy_report(), "scenarios").rows[-1][1]
    assert isinstance(missing, Missing)
    assert "torchao converts Linear" in missing.reason


def test_table_columns_add_up_to_the_total_row() -> None:
    for report in (records.toy_report(), records.structures_report(), records.deep_report()):
        for depth in (0, 1, 2, None):
            found = table_of(report, "layers", depth=depth, columns=COLUMNS)
            for place, column in enumerate(found.columns):
                if column.kind == "bytes" or column.key == "parameters":
                    assert found.total is not None
                    assert sum(row[place] for row in found.rows) == found.total[place]  # type: ignore[misc]


def test_the_model_is_added_up_once_however_many_rows_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[object] = []
    report = records.deep_report()
    monkeypatch.setattr("memsize.records.report.totals", lambda trace: (counted.append(trace), totals(trace))[1])
    for depth in (0, None):  # once for this table, and once for another
        table_of(report, "layers", depth=depth)
        assert sum(trace is report.trace for trace in counted) == 2
        counted.clear()


def test_without_a_baseline_there_are_no_percentages() -> None:
    report = records.toy_report()
    alone = replace(report, scenario_results=report.scenario_results[1:])
    assert not any(column.kind == "share" for column in table_of(alone, "scenarios").columns)


def test_nothing_heavy_is_imported_with_the_report() -> None:
    code = (
        "import sys, memsize.records.report, memsize.documents, memsize.render, memsize.records.codec\n"
        "import memsize.records.aggregates\n"
        "print([name for name in ('torch', 'pandas', 'jinja2', 'tabulate', 'click') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_rows_of_which_only_some_have_a_batch_stand_in_the_same_columns() -> None:
    rows = (FitRow("fp32", "", "T4", 100, "found", size=3), FitRow("fp16", "", "T4", 200, "found", size=5, batch=8))
    budget = Budget("T4", Card("T4", (7, 5), 200, "a test"), 200, 0)
    fit = Fit("LM", (), "context", (budget,), rows)
    first, second = fit.tables()["rows"].records()
    assert (first["batch"], first["budget"], first["size"]) == (None, 100, 3)
    assert (second["batch"], second["budget"], second["size"]) == (8, 200, 5)


def test_the_page_lists_the_columns_of_the_layer_table() -> None:
    """Their titles, in order, and the names that --columns takes."""
    page = (Path(__file__).resolve().parent.parent / "docs" / "report.md").read_text(encoding="utf-8")
    table = page.partition("| column | `--columns` | meaning |")[2].partition("\n\n")[0]
    listed = [tuple(cell.strip(" `") for cell in line.split("|")[1:3]) for line in table.splitlines()[2:]]
    assert listed == [(column.title, column.key) for column in LAYER_FIELDS.columns]


def test_scenarios_that_need_the_same_share_a_line() -> None:
    fit = memsize.fit(nn.Linear(4096, 4096), (4096,), scenarios="fp32,fp16,bf16", budget="1400MiB")
    (view,) = document(fit).scenes()
    curve, table = view.sections()
    assert isinstance(curve, Curve) and isinstance(table, Table) and table.name == "fit"
    assert [line.names for line in curve.lines] == [("fp32",), ("fp16", "bf16")]
    for line, row in zip(curve.lines, fit.fit_rows, strict=False):
        assert line.answer == (row.size, row.peak) and line.answer in line.points
        assert (row.next_size, row.next_peak) in line.points
        assert all((need <= row.budget) == (size <= (row.size or 0)) for size, need in line.points)
    assert [limit.size for limit in curve.limits] == [fit.budgets[0].allocator]
    page = render(fit, "html")
    assert f"largest batch {fit.fit_rows[0].size:,}" in page and f"batch {fit.fit_rows[0].next_size:,} needs" in page


def test_a_verification_draws_the_measured_step_over_the_predicted_one() -> None:
    """Both peaks are known, and what the steps add: the rest is from before them.

    The log of the prediction adds 4 MiB, 4 MiB, 512 B and 512 B, and frees 4 MiB; its peak is 90 MiB. The measured one
    adds 4 MiB and 1 MiB, frees both, adds 4 MiB and 1 KiB; its peak is 102 MiB.
    """
    saved = Path(__file__).parent / "saved" / "verification.1.memsize"
    (view,) = document(memsize.load(saved)).scenes()
    chart, table = view.sections()
    assert isinstance(chart, Chart) and chart.other is not None and isinstance(table, Table) and table.name == "figures"
    mib, run = 2**20, chart.timeline
    before, real = 90 * mib - (8 * mib + 1024), 102 * mib - 5 * mib
    added = (0, 4 * mib, 8 * mib, 8 * mib + 512, 8 * mib + 1024, 4 * mib + 1024)
    assert run.total == tuple(before + size for size in added)
    assert run.live == {"earlier": (before,) * 6, "elsewhere": added}
    assert [(str(phase), phase.start, phase.stop) for phase in run.phases] == [
        ("before", 0, 1),
        ("forward", 1, 4),
        ("step", 4, 5),
        ("backward", 5, 6),
    ]
    # The 1 MiB that the prediction lacks comes between the convolution and the norm.
    assert chart.other.levels == (real, real + 5 * mib, real + 4 * mib, *(real + 4 * mib + 1024,) * 3)
    assert run.card is not None and run.card.bytes == 80 * 2**30 and set(run.reserved) == {140 * mib}
