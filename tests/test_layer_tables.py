"""Layers of known models, compared with stored tables.

`MEMSIZE_GOLDEN=write pytest tests/test_layer_tables.py` writes the tables; review the difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tabulate import tabulate
from torch import Tensor, nn

import memsize
from tests.models import Recurrent, Toy
from tests.pages import check_golden
from tests.test_torchinfo_cases import CASES

Table = Callable[..., Any]


@pytest.fixture
def table(request: pytest.FixtureRequest) -> Table:
    """Reports on a model, and compares its layers with the table of the test."""

    def compare(model: Any, size: Any = None, **options: Any) -> Any:
        report = memsize.report(model, size, scenarios="as-given", **options)
        name = re.sub(r"[^\w.\[\]=,-]+", "-", request.node.name).rstrip(".-")
        check_golden(f"layers/{name}.txt", layers_of(report))
        return report

    return compare


def layers_of(report: Any) -> str:
    """One line for each layer with its own figures: elements of its parameters, and bytes."""
    rows = [("layer", "type", "output", "parameters", "stored", "new output", "kept")]
    for row in report.tables()["layers"].records():
        stored = row["parameter_bytes"] + row["buffer_bytes"] + row["attribute_bytes"]
        sizes = (row["parameters"], stored, row["output_bytes"], row["saved_bytes"])
        rows.append((row["path"] or "(model)", row["type"], row["output"], *(f"{size:,}" for size in sizes)))
    whole = report.totals
    sizes = (whole.parameters, whole.stored, whole.output_bytes, whole.saved_bytes)
    rows.append(("total", "", "", *(f"{size:,}" for size in sizes)))
    sides = ("left",) * 3 + ("right",) * 4
    return f"{tabulate(rows, tablefmt='plain', colalign=sides, disable_numparse=True)}\n"


def test_the_toy(table: Table) -> None:
    report = table(Toy(), (3, 64, 64))
    assert report.totals.parameters == 9_223_901


def test_an_lstm(table: Table) -> None:
    report = table(Recurrent(), (20, 16), batch_size=4)
    # 4·32·(16 + 32 + 2) + 4·32·(32 + 32 + 2) + 32·3 + 3
    assert report.totals.parameters == 14_947


# Parameters as the models' own papers and libraries count them.
NAMED = {
    "timm:vgg16": 138_357_544,
    "timm:resnet18": 11_689_512,
    "timm:resnet50": 25_557_032,
    "timm:vit_base_patch16_224": 86_567_656,
}


@pytest.mark.parametrize("target", NAMED)
def test_images(table: Table, target: str) -> None:
    pytest.importorskip("timm")
    assert table(target, (3, 224, 224)).totals.parameters == NAMED[target]


TEXTS: dict[str, tuple[str, str, int]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", 124_439_808),
    "bert-base": ("BertConfig", "BertModel", 109_482_240),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts(table: Table, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config, kind, parameters = TEXTS[name]
    with torch.device("meta"):
        model = getattr(transformers, kind)(getattr(transformers, config)())
    assert table(model, "input_ids=128:int64").totals.parameters == parameters


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*is not supported in Python 3.14", "ignore:.*enable_nested")
@pytest.mark.parametrize("case", CASES)
def test_structures(table: Table, case: str) -> None:
    """The structures that torchinfo's users report."""
    build: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    build, inputs = CASES[case]
    table(build(), input_data=inputs)
