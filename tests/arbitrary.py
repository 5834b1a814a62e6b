"""Records at random for Hypothesis, as far as a file can hold them; importing this registers their strategies."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from memsize.records.finding import Finding
from memsize.records.gpu import (
    Card,
    GpuEstimate,
    Interval,
    LiveStorage,
    PhasePeak,
    RecordStreamCost,
    Shortage,
    StreamShare,
)
from memsize.records.trace import (
    Collective,
    DeferredFree,
    Event,
    InputTensor,
    Layer,
    Output,
    Storage,
    StoredPart,
    StoredTensor,
    ToolReport,
    Trace,
    World,
)
from memsize.units import Bytes

INTEGERS = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.builds(Bytes, st.integers(0, 2**60)) | TEXTS,
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
PLAIN = TEXTS.map(lambda text: text.replace("{", "").replace("}", ""))
"""Sentences that name no values."""


def of_record(cls: Any, **strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Values of `cls` whose constrained integers are what a file may hold; references to other values are none."""
    hints = typing.get_type_hints(cls, include_extras=True)
    names = cls._fields if issubclass(cls, tuple) else [field.name for field in dataclasses.fields(cls) if field.init]
    return st.builds(cls, **{name: _constrained(hints[name]) for name in names} | strategies)


def _constrained(hint: Any) -> st.SearchStrategy[Any]:
    match typing.get_args(hint):
        case (inner, constraint) if inner is int and hasattr(constraint, "least"):
            return st.integers(constraint.least, 2**63 - 1)
        case (inner, constraint) if inner is int and hasattr(constraint, "optional"):
            return st.just(-1 if constraint.optional else 0)
        case (inner, *_) if typing.get_origin(hint) in (tuple, Sequence) and inner in _REFERRING:
            return st.just(())
        case (inner,) if typing.get_origin(hint) is Sequence:
            return st.lists(st.from_type(inner), max_size=3).map(tuple)
    return st.from_type(hint)


_REFERRING = (Event, DeferredFree, Collective)
"""Records that refer to others, of which there may be none."""

st.register_type_strategy(int, INTEGERS)
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
# Of any sizes and ranks few are a world.
st.register_type_strategy(World, st.builds(lambda nodes: World(6 * nodes, 6 * nodes - 1, nodes), st.integers(1, 9)))
st.register_type_strategy(
    Finding,
    st.builds(
        Finding,
        TEXTS,
        PLAIN,
        st.dictionaries(TEXTS, VALUES, max_size=3),
        bytes=st.none() | INTEGERS,
        layers=st.lists(TEXTS, max_size=2).map(tuple),
        brief=PLAIN,
    ),
)
for record in (InputTensor, Output, StoredPart, ToolReport, Storage, StoredTensor, Layer):
    st.register_type_strategy(record, of_record(record))
for record in (Card, Interval, LiveStorage, PhasePeak, RecordStreamCost, Shortage, StreamShare, GpuEstimate):
    st.register_type_strategy(record, of_record(record))
st.register_type_strategy(
    Trace, of_record(Trace, emptied=st.just(()), roots=st.lists(TEXTS, min_size=1, max_size=2).map(tuple))
)
