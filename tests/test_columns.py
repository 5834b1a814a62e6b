"""Records in columns: the same rows as one by one, by index, slice and field."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from memsize.records.trace import Event, Storage, Trace
from tests.gpus import flow_of
from tests.records import Columns, alive, coder, in_columns, numbers, places, toy

OPS = ("cat", "mm", "add")
EVENTS = st.lists(
    st.builds(Event, st.integers(0, 5), st.integers(-64, 64), st.just(0), st.integers(-1, 2), st.sampled_from(OPS))
)
STORAGES = st.lists(
    st.builds(
        Storage,
        bytes=st.integers(0, 2**50),
        role=st.sampled_from(("parameter", "KV cache", "workspace")),
        layer=st.integers(-1, 3),
        op=st.sampled_from(OPS),
        dtype=st.sampled_from(("float32", "int8")),
        shape=st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
        saved_by=st.integers(-1, 1),
        stream=st.integers(0, 2),
        line=st.integers(-1, 9),
        saved_at=st.just(-1),
        doubt=st.integers(-(2**63), 2**63 - 1),
    )
)


@given(STORAGES, st.slices(8))
def test_rows_are_those_that_went_in(storages: list[Storage], some: slice) -> None:
    columns = in_columns(tuple(storages))
    assert isinstance(columns, Columns) or not storages
    assert list(columns) == storages and len(columns) == len(storages)
    assert columns == tuple(storages) and tuple(storages) == columns and hash(columns) == hash(tuple(storages))
    assert [columns[n] for n in range(len(storages))] == storages
    assert [columns[~n] for n in range(len(storages))] == storages[::-1]
    assert list(columns[some]) == storages[some]
    assert all(type(value) in (int, str, tuple) for storage in columns for value in storage)
    with pytest.raises(IndexError):
        columns[len(storages)]


@given(STORAGES)
def test_fields_are_the_same_from_columns_and_from_rows(storages: list[Storage]) -> None:
    columns = in_columns(tuple(storages))
    assert numbers(columns, "bytes").tolist() == numbers(storages, "bytes").tolist() == [s.bytes for s in storages]
    among = [n for n, storage in enumerate(storages) if storage.op in ("cat", "mm")]
    assert places(columns, "op", ("cat", "mm")) == places(storages, "op", ("cat", "mm")) == among


def test_columns_are_apart_from_others() -> None:
    some = in_columns([Event(0, 8, 0, -1, "cat"), Event(0, -8, 0, -1, "cat")])
    assert some != some[:1] and some != (some[0], some[0]) and some != 3
    assert some == some[:] == [*some]


@given(EVENTS, STORAGES, st.integers(-1, 20))
def test_the_allocator_is_given_the_same_events(events: list[Event], storages: list[Storage], event: int) -> None:
    plain = replace(toy(), storages=tuple(storages), events=tuple(events))
    columns = replace(plain, storages=in_columns(tuple(storages)), events=in_columns(tuple(events)))
    assert columns == plain
    given_, same = flow_of(columns), flow_of(plain)
    assert list(given_) == list(same) == [event[:2] for event in events] and len(same) == len(events)
    assert given_.streams == same.streams == plain.streams and given_.digest == same.digest
    # What is alive after an event, by adding up one event after another
    assert given_.alive(event) == same.alive(event) == alive(plain, event)
    for storage in {each.storage for each in events if each.delta > 0}:
        assert given_.born(storage) == max(n for n, e in enumerate(events) if e.storage == storage and e.delta > 0)


@given(EVENTS, STORAGES)
def test_a_file_has_rows(events: list[Event], storages: list[Storage]) -> None:
    """A file's events and storages are of layers, lines and storages that it has."""
    trace = toy()
    layers = len(trace.layers)
    storages = [row._replace(layer=min(row.layer, layers - 1), saved_by=-1, line=-1) for row in storages]
    events = [event._replace(layer=min(event.layer, layers - 1)) for event in events if event.storage < len(storages)]
    trace = replace(trace, storages=in_columns(tuple(storages)), events=in_columns(tuple(events)))
    read = coder(Trace).read(coder(Trace).write(trace))
    assert read == trace and type(read.storages) is type(read.events) is tuple
