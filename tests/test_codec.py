"""A trace goes to JSON and comes back as it was; anything else is refused in one sentence."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from memsize import Trace
from memsize.records.trace import StoredPart, StoredTensor, TensorSpec, World
from tests import records

encode, decode = records.coder(Trace).write, records.coder(Trace).read
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
        ([], "expected the fields of Trace, found []"),
        ({}, "missing"),
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
    with pytest.raises((TypeError, ValueError), match=re.escape(says)):
        decode(data)
