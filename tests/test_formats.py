"""What holds of every kind of answer in every format, so that golden files need only show each kind once.

Text is what the golden files of a kind show. Here Markdown says what text says, a wide terminal shows what a file gets,
and JSON has the fields of the records. What a format looks like is in the golden files of the toy's report.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from memsize import load
from memsize.records.answer import Renderable
from memsize.render import render
from tests import records, test_checkpoint_report, test_fit, test_layout, test_rank_runs, test_sweep, test_timeline
from tests.gpus import timeline
from tests.pages import MARKS
from tests.test_program_document import program
from tests.test_render import REPORTS
from tests.test_verify import verification

SAVED = Path(__file__).parent / "saved"
ANSWERS: dict[str, Callable[[], Renderable]] = {
    **REPORTS,
    "checkpoint": test_checkpoint_report.made_by_hand,
    "comparison": lambda: records.compared(records.toy(), records.toy("fp16", "float16")),
    "fit": test_fit.made_by_hand,
    "layout": test_layout.made_by_hand,
    "program": program,
    "ranks": test_rank_runs.two_kinds,
    "sweep": test_sweep.made_by_hand,
    "timeline of a forward": lambda: timeline(test_timeline.TRACES["inference"]()),
    "timeline of steps": lambda: timeline(test_timeline.TRACES["steps"]()),
    "verification": verification,
    **{kind: partial(load, SAVED / f"{kind}.1.memsize") for kind in ("explanation", "generation", "serving")},
}


def words(text: str) -> Counter[str]:
    """All that is neither a space nor a sign that tables and Markdown are drawn with."""
    found = Counter(re.findall(r"[^\s|`#*,\-]+", re.sub(r"\\(.)", r"\1", text)))
    return Counter({word: count for word, count in found.items() if word not in (":", ">", "·")})


@pytest.mark.parametrize("name", ANSWERS)
def test_markdown_says_what_text_says(name: str) -> None:
    answer = ANSWERS[name]()
    markdown = render(answer, "markdown")
    text, marked = words(render(answer, "text")), words(markdown)
    assert text - marked == Counter()
    # Markdown puts headings above its tables, bars into a block of text, and may fold what is below the verdict.
    folds = r"<details><summary>Details</summary>|</details>"
    headings = "\n".join(re.findall(rf"^(?:#+ .*|```text|{folds})$", markdown, re.MULTILINE))
    assert marked - text - words(headings) == Counter()


@pytest.mark.parametrize("name", ["structures", "failing", "deep", "fit"])
def test_a_terminal_that_is_wide_enough_shows_all(name: str) -> None:
    answer = ANSWERS[name]()
    text, wide = (re.sub(f"{MARKS}+ *", "█ ", render(answer, "text", width=width)) for width in (None, 200))
    assert max(map(len, text.splitlines())) <= 200
    assert wide == text


def plain(value: Any) -> Any:
    """A record as JSON has it: a mapping, in which a tensor's dtype and shape stand beside the other fields."""
    if is_dataclass(value):
        found = {field.name: plain(getattr(value, field.name)) for field in fields(value)}
        return found | found.pop("spec", {})
    if isinstance(value, tuple):
        return plain(value._asdict()) if hasattr(value, "_asdict") else [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


STORED = {"parameters", "trainable", "parameter_bytes", "buffer_bytes", "attribute_bytes"}
"""What a layer's tensors say of it."""


@pytest.mark.parametrize("name", REPORTS)
def test_json_has_the_fields_of_the_records(name: str) -> None:
    report = REPORTS[name]()
    data = json.loads(render(report, "json"))
    trace = plain(report.trace)
    for field in ("inputs", "layers", "tensors"):
        assert len(data[field]) == len(trace[field])
        for row, record in zip(data[field], trace[field], strict=True):
            own = row.keys() - (STORED | {"marks", "stored_as"} if field == "layers" else set())
            assert {key: row[key] for key in own} == {key: record[key] for key in own}
    for row in data["layers"]:
        tensors = [tensor for tensor in report.trace.tensors if tensor.layer == row["path"]]
        parameters = [tensor for tensor in tensors if tensor.kind == "parameter"]
        assert {field: row[field] for field in STORED} == {
            "parameters": sum(tensor.elements for tensor in parameters if tensor.tied_to is None),
            "trainable": sum(tensor.elements for tensor in parameters if tensor.tied_to is None and tensor.trainable),
            "parameter_bytes": sum(tensor.bytes for tensor in parameters),
            "buffer_bytes": sum(tensor.bytes for tensor in tensors if tensor.kind == "buffer"),
            "attribute_bytes": sum(tensor.bytes for tensor in tensors if tensor.kind == "attribute"),
        }
    for field in ("model", "scenario", "training", "batch_size", "torch", "failure"):
        assert data[field] == trace[field]
    assert data["notes"] == [*report.notes, *report.trace.notes]
