"""A trace goes to JSON and comes back as it was; anything else is refused in one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from memsize import StepTrace, Trace
from memsize.errors import InputError
from memsize.records.trace import StoredPart, StoredTensor, TensorSpec, World
from tests import records
from tests.records import SCHEMA, decode, encode

KEPT = Path(__file__).parent / "traces"
ALL = pytest.mark.parametrize("trace", [records.toy(), records.structures(), records.failing()])


@ALL
def test_decode_inverts_encode(trace: Trace) -> None:
    assert decode(encode(trace)) == trace
    assert decode(json.loads(json.dumps(encode(trace)))) == trace


@pytest.mark.thorough
@settings(max_examples=40)
@given(st.from_type(Trace))
def test_decode_inverts_encode_for_any_trace(trace: Trace) -> None:
    assert decode(json.loads(json.dumps(encode(trace)))) == trace


def test_types_come_back_too() -> None:
    part = StoredPart("qdata", TensorSpec("int8", (4, 4)), 16)
    tensor = StoredTensor("w", "packed", "", TensorSpec("float32", (4, 4)), 16, 16, 64, False, parts=(part,))
    trace = Trace("m", "as-given", True, None, "2.13.0", (), (), (tensor,))
    back = decode(encode(trace))
    assert type(back.tensors[0].parts[0].spec.shape) is tuple
    assert type(decode(encode(records.toy())).storages[0]) is type(records.toy().storages[0])


def test_a_field_that_a_file_lacks_takes_its_default() -> None:
    data = encode(records.toy())
    del data["notes"]
    assert decode(data) == records.toy()


def as_written_before() -> dict[str, Any]:
    """The toy's trace as schema 1 had it: no stream, no roots, no world."""
    data = json.loads(json.dumps(encode(records.toy())))
    del data["roots"], data["world"]
    for layer in data["layers"]:
        del layer["root"]
    storages = [storage[:7] for storage in data["storages"]]
    return data | {"schema": "memsize.trace/1", "storages": storages}


def test_traces_of_the_first_schema_are_of_one_root_stream_and_process() -> None:
    back = decode(as_written_before())
    assert back == records.toy()
    assert (back.roots, back.world, {s.stream for s in back.storages}) == (("",), World(size=1, rank=0), {0})


def test_a_file_of_the_first_schema_still_loads() -> None:
    """One step of SGD over Linear(8, 4) and ReLU, a sample a batch, as memsize wrote it before schema 2."""
    step = StepTrace.from_json((KEPT / "schema-1.json").read_text(encoding="utf-8"))
    # 8·4 + 4 weights and their gradients in float32; the 8 inputs and the target, one int64; two workspaces of cuBLAS
    roles = {name: step.peak.roles[name] for name in ("parameter", "gradient", "input", "workspace")}
    assert roles == {"parameter": 144, "gradient": 144, "input": 32 + 8, "workspace": 2 * 8_519_680}
    assert StepTrace.from_json(step.to_json()) == step


def test_streams_roots_and_world_come_back() -> None:
    toy = records.toy()
    storages = tuple(storage._replace(stream=7) for storage in toy.storages)
    layers = tuple(replace(layer, root=1) for layer in toy.layers)
    trace = replace(toy, storages=storages, layers=layers, roots=("generator", "critic"), world=World(8, 3))
    assert decode(json.loads(json.dumps(encode(trace)))) == trace
    assert trace.streams == {0: 7, 1: 7, 2: 7}


def changed(**fields: Any) -> dict[str, Any]:
    return encode(records.toy()) | fields


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "found 'list'"),
        ({}, "found None"),
        ({"schema": "memsize.trace/0"}, "memsize.trace/0"),
        ({"schema": "memsize.trace/3"}, "memsize.trace/3"),
        ({"schema": SCHEMA}, "missing"),
        (changed(batch_size="1"), "expected int, found '1'"),
        (changed(batch_size=True), "expected int, found True"),
        (changed(layers=3), "expected a list, found 3"),
        (changed(extra=1), "expected the fields of Trace"),
        (changed(storages=[[1, 2]]), "expected 11 values of Storage, found [1, 2]"),
        (changed(storages=[[1, "input", 0, "", "float32", [], -1, 0, 0, 0, 0, 0]]), "expected 11 values of Storage"),
        (changed(storages=[[1, "cake", 0, "", "float32", [], -1]]), "found 'cake'"),
    ],
)
def test_what_is_not_a_trace_is_refused(data: object, says: str) -> None:
    with pytest.raises(InputError, match="not a memsize trace") as caught:
        decode(data)
    assert says in str(caught.value)
