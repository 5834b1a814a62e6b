"""`memsize/schema.json` describes every field of every answer's JSON, and no more than they promise."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import memsize
from memsize import documents
from memsize.render import render
from tests.conftest import ROOT
from tests.test_render import REPORTS

SCHEMA = json.loads((Path(memsize.__file__).parent / "schema.json").read_text("utf-8"))
GOLDEN = sorted((ROOT / "tests" / "golden").glob("*.json"))
SAVED = sorted(
    path
    for path in (ROOT / "tests" / "saved").glob("*.memsize")
    if path.name != "step.1.memsize"  # which has no document of its own
)


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """The schemas of objects with named fields, at any depth."""
    if isinstance(schema, dict):
        if "properties" in schema:
            yield schema
        for value in schema.values():
            yield from objects(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from objects(value)


def strict() -> dict[str, Any]:
    """The schema with every field refused that it does not describe."""
    copy: dict[str, Any] = json.loads(json.dumps(SCHEMA))
    for schema in objects(copy["$defs"]):
        schema["additionalProperties"] = False
    return copy


def answers() -> Iterator[Any]:
    yield from (pytest.param(path.read_text("utf-8"), id=path.name) for path in GOLDEN)
    yield from (pytest.param(path, id=path.name) for path in SAVED)
    yield from (pytest.param(make, id=name) for name, make in REPORTS.items())


@pytest.mark.parametrize("answer", [*answers()])
def test_every_field_is_described(answer: Any) -> None:
    if isinstance(answer, Path):
        answer = render(memsize.load(answer), "json")
    text = answer if isinstance(answer, str) else render(answer(), "json")
    jsonschema.Draft202012Validator(strict()).validate(json.loads(text))


def test_a_field_of_another_type_is_refused() -> None:
    report = json.loads((ROOT / "tests" / "golden" / "toy.json").read_text("utf-8"))
    report["layers"][0]["saved_bytes"] = "a lot"
    with pytest.raises(jsonschema.ValidationError, match="a lot"):
        jsonschema.validate(report, SCHEMA)


def test_it_has_the_schema_of_every_document() -> None:
    modules = [importlib.import_module(f"memsize.documents.{m.name}") for m in pkgutil.iter_modules(documents.__path__)]
    own = {value for module in modules for name, value in vars(module).items() if name.endswith("SCHEMA")}
    known = SCHEMA["properties"]["schema"]["enum"]
    assert own <= set(known) and len(known) == len(set(known))
    kinds = [entry["then"]["$ref"].rpartition("/")[2] for entry in SCHEMA["allOf"]]
    assert [SCHEMA["$defs"][kind]["properties"]["schema"]["const"] for kind in kinds] == known


def test_every_field_of_an_answer_has_a_description() -> None:
    for name, schema in SCHEMA["$defs"].items():
        missing = [
            key for key, field in schema["properties"].items() if "description" not in field and "const" not in field
        ]
        assert not missing, name
