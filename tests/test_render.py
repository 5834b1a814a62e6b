"""Each format of a hand-built report: as data first, as text against golden files second.

`MEMSIZE_GOLDEN=write pytest tests/test_render.py` writes the golden files anew; read the difference before keeping it.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, strategies as st

from memsize import Report
from memsize.documents import Document
from memsize.documents.sections import Section
from memsize.errors import OutputError
from memsize.records.trace import TensorSpec
from memsize.render import FORMATS, format_of, pieces, render
from tests import records
from tests.pages import check_golden as check, check_page, content
from tests.records import LAYER_FIELDS, FlatTable, draw_json, draw_specs, role_fields, shorten_path, totals

REPORTS: dict[str, Callable[[], Report]] = {
    "toy": records.toy_report,
    "structures": records.structures_report,
    "failing": records.failing_report,
    "deep": records.deep_report,
}


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("format", FORMATS)
def test_golden(name: str, format: str) -> None:
    """Every format of the toy's report; tests/test_formats.py has what Markdown and JSON of the others hold."""
    if name == "toy" or format not in ("markdown", "json"):
        check(f"{name}{FORMATS[format][0]}", render(REPORTS[name](), format))


@pytest.mark.parametrize(("name", "width"), [*((name, 80) for name in REPORTS), ("toy", 200)])
def test_golden_at_a_terminals_width(name: str, width: int) -> None:
    text = render(REPORTS[name](), "text", width=width)
    assert max(map(len, text.splitlines())) <= width
    check(f"{name}.{width}.txt", text)


@pytest.mark.parametrize("width", [60, 100, 120])
def test_text_fits_other_widths(width: int) -> None:
    for report in REPORTS.values():
        assert max(map(len, render(report(), "text", width=width).splitlines())) <= width


def test_text_without_a_width_is_complete() -> None:
    text = render(records.deep_report(), "text")
    assert "model.language_model.layers.3.self_attention.query_key_value_projection" in text
    assert "…" not in text


def test_the_roles_that_hold_least_are_left_out_first() -> None:
    columns = role_fields([{"workspace": 16, "parameter": 1}, {"parameter": 2, "gradient": 1}])
    assert [column.key for column in columns] == ["parameter", "workspace", "gradient"]
    by_weight = sorted(columns, key=lambda column: column.weight)
    assert [column.key for column in by_weight] == ["gradient", "parameter", "workspace"]


def test_chosen_columns_are_shortened_but_never_left_out() -> None:
    chosen = ("layer", "type", "output", "cast", "notes")
    text = render(records.deep_report(), "text", columns=chosen, width=90)
    assert "Left out" not in text
    assert "384.00" in text  # 4 × 4096·12288·2 bytes
    assert "…" in text


def test_the_layer_column_always_comes_first() -> None:
    lines = render(records.toy_report(), "csv", columns=("stored", "layer", "stored")).splitlines()
    assert lines[0] == "path,parameter_bytes"
    assert lines[1] == "conv.0,33600"  # 8,400 × 4


def test_the_unit_says_something_of_tiny_models() -> None:
    """The 128 parameters are 512 bytes, and the forward makes 948 bytes of new outputs: half of a KiB and 0.93 KiB."""
    tiny = records.structures_report()
    assert _last_line(render(tiny, "text", unit="KiB")) == "total 128 0.50 0.04 0.02 0.93 0.68"
    assert _last_line(render(tiny, "text", unit="MiB")) == "total 128 0.00 0.00 0.00 0.00 0.00"
    assert '<body data-unit="auto"' in render(tiny, "html")
    assert render(tiny, "json") == render(tiny, "json", unit="MiB")


def _last_line(text: str) -> str:
    return next(" ".join(line.split()) for line in text.splitlines() if line.startswith("total"))


def test_bytes_follow_the_unit() -> None:
    report = records.toy_report()
    assert "36,895,604 B in float32" in render(report, "text", unit="B")
    assert "36.90 MB in float32" in render(report, "text", unit="MB")
    assert "36,895,604 B → 18,447,802 B" in render(report, "markdown", unit="B")
    assert json.loads(render(report, "json", unit="B"))["findings"][0]["text"].count("36,895,604 B") == 2


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        ("", ""),
        ("a", "a[]"),
        ("aaa", "a[] ×3"),
        ("abb", "a[], b[] ×2"),
        ("abbabb", "(a[], b[] ×2) ×2"),
        ("abcbcb", "a[], b[], c[], b[], c[], b[]"),
        ("abbcbbcbbc", "a[], b[] ×6, c[] ×3"),
        ("aba", "a[], b[], a[]"),
    ],
)
def test_repeated_outputs_are_drawn_once(specs: str, text: str) -> None:
    assert draw_specs([TensorSpec(dtype, ()) for dtype in specs]) == text


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (40, "model.layers.11.self_attn.q_proj"),
        (31, "m.layers.11.self_attn.q_proj"),
        (25, "m.l.11.self_attn.q_proj"),
        (16, "m.l.11.s.q_proj"),
        (14, "m.l.11.s.q…roj"),
        (8, "….q_proj"),
    ],
)
def test_paths_keep_what_tells_them_apart(width: int, text: str) -> None:
    assert shorten_path("model.layers.11.self_attn.q_proj", width) == text
    assert len(text) <= width


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("timm:vit_base_patch16_224.augreg2_in21k_ft_in1k", "timm:…1k_ft_in1k"),
        ("timm:resnet50.a1", "timm:resnet50.a1"),
        ("/home/me/project/nets/model.py:Net", "/home…del.py:Net"),
    ],
)
def test_targets_keep_both_of_their_ends(target: str, text: str) -> None:
    assert shorten_path(target, 16) == text


def test_csv_is_the_layer_table_in_exact_bytes() -> None:
    rows = list(csv.DictReader(io.StringIO(render(records.structures_report(), "csv"))))
    whole = totals(records.structures())
    for name in ("parameter_bytes", "buffer_bytes", "attribute_bytes", "cast_bytes", "output_bytes", "saved_bytes"):
        assert sum(int(row[name]) for row in rows) == getattr(whole, name)
    assert list(rows[0]) == [column.name for column in LAYER_FIELDS.columns]
    lstm = next(row for row in rows if row["path"] == "blocks.0.lstm")
    assert lstm["marks"] == "×3; never used: bias_ih_l0"


@pytest.mark.parametrize("name", REPORTS)
def test_html_is_whole_and_fetches_nothing(name: str) -> None:
    check_page(render(REPORTS[name](), "html"), REPORTS[name]()._repr_html_())


def test_the_notebook_fragment_is_not_a_page() -> None:
    fragment = records.toy_report()._repr_html_()
    assert "<html" not in fragment
    assert "<body" not in fragment
    # Every rule is for our own part of the page only.
    style = fragment[fragment.index("<style>") + len("<style>") : fragment.index("</style>")]
    selectors = re.findall(r"([^{}]+)\{", re.sub(r"@media[^{]*\{", "", style))
    assert selectors
    assert all(".memsize" in part for selector in selectors for part in selector.split(","))


def test_text_is_escaped_where_it_must_be() -> None:
    bad = "<script>|`*_x"
    report = Report(model=bad, trace=records.toy(), notes=(bad,))
    # Of scripts there are the page's own, the markdown that it carries, and its run.
    assert content(render(report, "html")).count("<script") == 3
    assert "&lt;script&gt;" in render(report, "html")
    assert r"\<script\>\|\`\*\_x" in render(report, "markdown")
    assert bad in render(report, "text")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"format": "jsno"}, "no format 'jsno': did you mean json?"),
        ({"format": "text", "unit": "Mib"}, "no unit 'Mib': did you mean MiB"),
        ({"format": "text", "columns": ("layers",)}, "no column 'layers': did you mean layer"),
        ({"format": "text", "depth": -1}, "depth -1"),
    ],
)
def test_what_cannot_be_written_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OutputError) as caught:
        render(records.toy_report(), **options)
    assert says in str(caught.value)


def test_format_of_a_file_name() -> None:
    assert [format_of(f"out{suffixes[-1].upper()}") for suffixes in FORMATS.values()] == list(FORMATS)
    with pytest.raises(OutputError, match=r"'out\.pdf'.*\.txt, \.md"):
        format_of("out.pdf")


# The JSON schema, by hand: a type, a list of one shape, or a dict of the keys that must be there and no other.
NUMBER = (int, type(None))
SPEC = {"dtype": str, "shape": [int]}
TOTALS = dict.fromkeys(
    (
        "parameters",
        "trainable",
        "parameter_bytes",
        "buffer_bytes",
        "attribute_bytes",
        "master_bytes",
        "input_bytes",
        "cast_bytes",
        "output_bytes",
        "saved_bytes",
        "saved_cast_bytes",
        "multiply_adds",
        "saved_input_bytes",
        "inference_bytes",
        "training_bytes",
    ),
    NUMBER,
)
SHARE = (float, type(None))
GPU_ESTIMATE = {
    "requested": int,
    "allocated": int,
    "reserved": int,
    "device": [int],
    "fragmentation": float,
    "peak_phase": str,
    "peak_step": int,
    "peak_layer": str,
    "peak_op": str,
    "roles": dict,
    "storages": [dict],
    "shortage": (
        {
            **dict.fromkeys(("request", "tried", "total", "free", "allocated", "reserved", "step"), int),
            **dict.fromkeys(("phase", "layer", "op"), str),
            "certain": bool,
        },
        type(None),
    ),
}
BARS = {
    "title": str,
    "kind": str,
    "parts": [{"key": str, "title": str, "role": str}],
    "rows": [{"names": [str], "total": int, "sizes": [int]}],
    "limit": ({"title": str, "size": int}, type(None)),
}
SCHEMA = {
    "schema": str,
    "verdict": [{"code": str, "text": str}],
    "bars": (BARS, type(None)),
    "model": str,
    "scenario": str,
    "torch": str,
    "training": bool,
    "batch_size": NUMBER,
    "inputs": [{"name": str, **SPEC, "bytes": int}],
    "parameters": {"count": int, "trainable": int, "bytes": int},
    "buffers": {"bytes": int},
    "attributes": {"bytes": int},
    "totals": TOTALS,
    "layers": [
        {
            "path": str,
            "aliases": [str],
            "type": str,
            "depth": int,
            "calls": int,
            "outputs": [{**SPEC, "memory": str, "bytes": int}],
            "inputs": [SPEC],
            "kernel": [int],
            "multiply_adds": NUMBER,
            "stored_as": [str],
            "parameters": int,
            "trainable": int,
            "parameter_bytes": int,
            "buffer_bytes": int,
            "attribute_bytes": int,
            "output_bytes": int,
            "saved_bytes": int,
            "cast_bytes": int,
            "marks": [str],
        }
    ],
    "tensors": [
        {
            "name": str,
            "kind": str,
            "layer": str,
            **SPEC,
            "elements": int,
            "bytes": int,
            "reported_bytes": int,
            "trainable": bool,
            "tied_to": (str, type(None)),
            "wrapper": (str, type(None)),
            "parts": [{"name": str, **SPEC, "bytes": int}],
            "used": (bool, type(None)),
            "differentiable": (bool, type(None)),
        }
    ],
    "scenarios": [
        {
            "name": str,
            "title": str,
            "status": str,
            "reason": (str, type(None)),
            **TOTALS,
            "inference": (GPU_ESTIMATE, type(None)),
            "training": (GPU_ESTIMATE, type(None)),
            "untrained": (str, type(None)),
            "of_fp32": dict.fromkeys(("parameter", "output", "saved", "inference", "training"), SHARE),
            "layers": (dict, type(None)),
        }
    ],
    "findings": [{"code": str, "layers": [str], "bytes": NUMBER, "text": str}],
    "assumptions": [str],
    "notes": [str],
    "gpu": (str, type(None)),
    "stack": (str, type(None)),
    "optimizer": (str, type(None)),
    "failure": ({"layer": str, "type": str, "op": (str, type(None)), "inputs": [str], "reason": str}, type(None)),
    "missing": [str],
}


def conforms(value: Any, shape: Any, at: str = "$") -> None:
    if isinstance(shape, tuple):
        if value is None:
            assert type(None) in shape, at
            return
        shape = shape[0]
    if isinstance(shape, dict):
        assert isinstance(value, dict), at
        assert value.keys() == shape.keys(), at
        for key, inner in shape.items():
            conforms(value[key], inner, f"{at}.{key}")
    elif isinstance(shape, list):
        assert isinstance(value, list), at
        for place, item in enumerate(value):
            conforms(item, shape[0], f"{at}[{place}]")
    else:
        assert type(value) is shape, f"{at}: {value!r}"


@pytest.mark.parametrize("name", REPORTS)
def test_json_conforms_to_its_schema(name: str) -> None:
    data = json.loads(render(REPORTS[name](), "json"))
    conforms(data, SCHEMA)
    assert data["schema"] == "memsize.report/1"
    assert sum(layer["parameters"] for layer in data["layers"]) == data["parameters"]["count"]
    for figure in ("parameter_bytes", "buffer_bytes", "attribute_bytes", "output_bytes", "saved_bytes", "cast_bytes"):
        assert sum(layer[figure] for layer in data["layers"]) == data["totals"][figure]


def test_json_figures_of_the_toy() -> None:
    data = json.loads(render(records.toy_report(), "json"))
    scenarios = {scenario["name"]: scenario for scenario in data["scenarios"]}
    assert scenarios["amp-fp16"]["saved_bytes"] == 31103176
    assert scenarios["amp-fp16"]["of_fp32"]["saved"] == 31103176 / 25317952
    static = scenarios["int4-weight"]
    assert static["status"] == "unavailable"
    assert static["reason"]
    assert all(static[name] is None for name in TOTALS)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.thorough
@given(
    st.dictionaries(st.text(max_size=3), VALUES, min_size=1, max_size=3),
    st.lists(st.tuples(VALUES, VALUES), max_size=5),
)
def test_json_in_pieces_is_what_the_encoder_makes(data: dict[str, Any], rows: list[tuple[Any, Any]]) -> None:
    class Some(Document[Any]):
        def figures(self, unit: str) -> dict[str, Any]:
            return {"schema": "some"} | data | {"rows": FlatTable(("a", "b"), iter(rows))}

        def sections(self) -> tuple[Section, ...]:
            return ()

    whole = {"schema": "some", "verdict": [], "bars": None} | data | {"rows": [{"a": a, "b": b} for a, b in rows]}
    with patch("memsize.render.data._AT_ONCE", 2):
        assert "".join(draw_json(Some(None), "MiB")) == json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("format", ["json", "csv"])
def test_a_long_table_is_drawn_in_short_pieces(format: str) -> None:
    class Long(Document[Any]):
        def figures(self, unit: str) -> dict[str, Any]:
            return {"schema": "long"} | self.tables()

        def tables(self) -> dict[str, FlatTable]:
            return {"rows": FlatTable(("a", "b"), ((str(n), n) for n in range(10_000)))}

        def sections(self) -> tuple[Section, ...]:
            return ()

    with patch("memsize.render.document", lambda answer: Long(answer)):
        drawn = list(pieces(records.toy_report(), format))
        assert "".join(drawn) == render(records.toy_report(), format)
    # Of 10,000 rows a thousand at a time, each of at most 35 characters in JSON.
    assert len(drawn) >= 10
    assert max(map(len, drawn)) < 50_000
