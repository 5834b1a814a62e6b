"""Totals, visible rows and what is alive when: on hand-built traces, and as laws on any tree."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from memsize import Trace
from memsize.records.trace import Event, Layer, Storage, StoredTensor, TensorSpec
from tests import records
from tests.records import Totals, alive, live_bytes, own_rows, peak, totals, visible

ROW_FIGURES = (
    "parameters",
    "trainable",
    "parameter_bytes",
    "buffer_bytes",
    "attribute_bytes",
    "output_bytes",
    "saved_bytes",
    "cast_bytes",
)


def column_sums(rows: object) -> dict[str, int]:
    return {name: sum(getattr(row, name) for row in rows) for name in ROW_FIGURES}  # type: ignore[attr-defined]


def test_totals_of_the_toy() -> None:
    assert totals(records.toy()) == Totals(
        parameters=9223901,
        trainable=9223901,
        parameter_bytes=36895604,  # 9,223,901 × 4
        input_bytes=49152,  # 3·64·64 × 4
        output_bytes=25268804,  # 6,317,201 × 4
        saved_bytes=25317952,  # the input and the three convolutions' outputs: 49,152 + 6,317,200 × 4
        saved_input_bytes=49152,
    )


def test_each_byte_of_training_counts_once() -> None:
    fp32 = totals(records.toy())
    assert fp32.inference == 36895604 + 49152 + 25268804
    assert fp32.training == 36895604 + 25317952  # the input is among what is kept
    amp = totals(records.toy("amp-fp16", "float32", "float16"))
    assert amp.saved_bytes == 31103176
    assert amp.saved_cast_bytes == 18444200  # (8,100 + 1,350,000 + 4,500,000 + 3,364,000) × 2
    assert amp.cast_bytes == 18447802  # and the biases' copies: 9,223,901 × 2
    assert amp.training == 36895604 + 49152 + 18447802 + (31103176 - 18444200)


def test_totals_of_the_structures() -> None:
    found = totals(records.structures())
    assert found.parameters == 4 + 28 + 64 + 16 + 4 + 12  # the tied head counts nothing
    assert found.trainable == found.parameters - 4  # the norm is frozen
    assert found.parameter_bytes == found.parameters * 4
    assert (found.buffer_bytes, found.attribute_bytes) == (5 * 8, 4 * 4)
    assert found.stored == 128 * 4 + 40 + 16


def marks_of(path: str, depth: int | None = None, trace: Trace | None = None) -> tuple[str, ...]:
    rows = visible(trace or records.structures(), depth)
    return next(row.marks for row in rows if row.path == path)


@pytest.mark.parametrize(
    ("path", "marks"),
    [
        ("token", ()),
        ("embed", ()),
        ("blocks.0", ("×3",)),
        ("blocks.0.lstm", ("×3", "never used: bias_ih_l0")),
        ("blocks.0.act", ("×3", "in place")),
        ("norm", ("frozen",)),
        ("flat", ("view",)),
        ("spare", ("never called",)),
        ("head", ("tied to embed.weight",)),
    ],
)
def test_marks(path: str, marks: tuple[str, ...]) -> None:
    assert marks_of(path) == marks


def test_tensors_beside_visible_children_stand_alone() -> None:
    rows = {row.path: row for row in visible(records.structures())}
    assert [(rows[path].type, rows[path].depth) for path in ("token", "position", "table")] == [
        ("Parameter", 1),
        ("Buffer", 1),
        ("Tensor (not registered)", 1),
    ]
    assert rows["token"].parameters == 4
    assert rows["position"].buffer_bytes == 40
    assert rows["table"].attribute_bytes == 16


def test_modules_that_only_hold_others_have_no_row() -> None:
    assert [row.path for row in visible(records.toy())] == ["conv.0", "conv.1", "conv.2", "fc"]


def test_a_cut_folds_what_is_below_it() -> None:
    (only,) = visible(records.structures(), 0)
    assert only.layers == tuple(layer.path for layer in records.structures().layers)
    assert only.marks == ("1 of 7 never called", "never used: bias_ih_l0", "tied to embed.weight")
    assert [row.path for row in visible(records.toy(), 1)] == ["conv", "fc"]
    assert visible(records.toy(), 1)[0].parameter_bytes == (8400 + 1350500 + 4501000) * 4


def test_weights_that_are_read_without_a_call() -> None:
    structures = records.structures()
    read = tuple(
        replace(t, used=True, differentiable=True) if t.name == "spare.weight" else t for t in structures.tensors
    )
    assert marks_of("spare", trace=replace(structures, tensors=read)) == ("used, not called",)


def test_a_weight_that_no_gradient_reaches() -> None:
    structures = records.structures()
    cut = tuple(replace(t, differentiable=False) if t.name == "embed.weight" else t for t in structures.tensors)
    assert marks_of("embed", trace=replace(structures, tensors=cut)) == ("no gradient",)


def test_a_stopped_run_says_where_and_what_it_did_not_reach() -> None:
    failing = records.failing()
    assert marks_of("fc", trace=failing) == ("failed here",)
    after = replace(failing, layers=(*failing.layers, records.layer("last", "Linear", calls=0)))
    assert marks_of("last", trace=after) == ("not reached",)


def test_a_trace_without_layers_has_no_rows() -> None:
    assert visible(replace(records.toy(), layers=())) == ()


BYTES = st.integers(0, 2**40)
NAMES = st.sampled_from(("a", "b", "c"))


@st.composite
def trees(draw: st.DrawFn) -> Trace:
    """Any tree of modules with tensors of every kind anywhere in it."""
    paths = {""}
    for parts in draw(st.lists(st.lists(NAMES, min_size=1, max_size=4), max_size=8)):
        paths |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    inner = {path.rpartition(".")[0] for path in paths if path}
    ordered = sorted(paths, key=lambda path: path.split(".") if path else [])
    layers = tuple(
        replace(
            records.layer(path, "M", leaf=path not in inner, calls=draw(st.integers(0, 2))),
            output_bytes=draw(BYTES),
            saved_bytes=draw(BYTES),
            cast_bytes=draw(BYTES),
        )
        for path in ordered
    )
    return replace(records.toy(), layers=layers, tensors=tuple(draw(st.lists(tensors(ordered), max_size=8))))


@st.composite
def tensors(draw: st.DrawFn, paths: list[str]) -> StoredTensor:
    layer = draw(st.sampled_from(paths))
    return StoredTensor(
        name=f"{layer}.t" if layer else "t",
        kind=draw(st.sampled_from(("parameter", "buffer", "attribute", "packed"))),
        layer=layer,
        spec=TensorSpec("float32", (1,)),
        elements=draw(BYTES),
        bytes=draw(BYTES),
        reported_bytes=draw(BYTES),
        trainable=draw(st.booleans()),
        tied_to=draw(st.none() | st.just("other.t")),
        used=draw(st.none() | st.booleans()),
    )


@given(trees())
def test_visible_rows_add_up_to_the_totals_at_every_depth(trace: Trace) -> None:
    whole = {name: getattr(totals(trace), name) for name in ROW_FIGURES}
    for depth in (0, 1, 2, 3, 4, 5, None):
        assert column_sums(visible(trace, depth)) == whole
    assert column_sums(own_rows(trace)) == whole


def root(name: str, trace: Trace) -> Trace:
    """The trace of one model as that of a root called `name`."""

    def named(path: str) -> str:
        return f"{name}.{path}" if path else name

    layers = tuple(replace(layer, path=named(layer.path)) for layer in trace.layers)
    held = tuple(replace(tensor, name=named(tensor.name), layer=named(tensor.layer)) for tensor in trace.tensors)
    return replace(trace, layers=layers, tensors=held)


@given(trees(), trees(), st.none() | st.integers(0, 4))
def test_the_rows_of_several_roots_add_up_to_those_of_each(one: Trace, other: Trace, depth: int | None) -> None:
    first, second = root("generator", one), root("critic", other)
    layers = (*first.layers, *(replace(layer, root=1) for layer in second.layers))
    both = replace(first, layers=layers, tensors=first.tensors + second.tensors, roots=("generator", "critic"))
    assert visible(both, depth) == visible(first, depth) + visible(second, depth)
    assert own_rows(both) == own_rows(first) + own_rows(second)


@given(trees(), st.none() | st.integers(0, 4))
def test_every_module_is_in_at_most_one_row(trace: Trace, depth: int | None) -> None:
    seen = [path for row in visible(trace, depth) for path in row.layers]
    assert len(seen) == len(set(seen))
    assert all(row.depth <= depth for row in visible(trace, depth) if depth is not None)


def steps(*sizes: tuple[int, int]) -> tuple[Event, ...]:
    return tuple(Event(storage, delta, 0, 0, "op") for storage, delta in sizes)


def block(role: str) -> Storage:
    return Storage(0, role, 0, "op", "float32", (), -1)  # type: ignore[arg-type]


def test_the_peak_and_its_roles() -> None:
    trace = replace(
        records.toy(),
        storages=(block("parameter"), block("temporary"), block("activation")),
        # A storage of no bytes, a temporary that is resized, an activation, then all of it goes.
        events=steps((0, 100), (1, 0), (1, 30), (1, 20), (2, 7), (1, -50), (2, 13), (2, -20), (0, -100)),
    )
    assert live_bytes(trace.events) == (100, 100, 130, 150, 157, 107, 120, 100, 0)
    found = peak(trace)
    assert (found.index, found.bytes) == (4, 157)
    assert found.roles == {"parameter": 100, "temporary": 50, "activation": 7}
    assert alive(trace, 6) == {0: 100, 2: 20}


def test_nothing_alive_has_no_peak() -> None:
    assert peak(replace(records.toy(), events=())).index == -1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1000)), max_size=30))
def test_roles_at_the_peak_add_up_to_it(sizes: list[tuple[int, int]]) -> None:
    """Each pair sets one of four storages to a new size."""
    current = [0, 0, 0, 0]
    events = []
    for storage, size in sizes:
        events.append(Event(storage, size - current[storage], 0, 0, "op"))
        current[storage] = size
    roles = ("parameter", "temporary", "temporary", "gradient")
    trace = replace(records.toy(), storages=tuple(map(block, roles)), events=tuple(events))
    found = peak(trace)
    assert sum(found.roles.values()) == found.bytes == max((0, *live_bytes(events)))


def test_depth_of_hand_built_layers() -> None:
    layers: tuple[Layer, ...] = records.structures().layers
    assert {layer.path: layer.depth for layer in layers if "." in layer.path or not layer.path} == {
        "": 0,
        "blocks.0": 2,
        "blocks.0.lstm": 3,
        "blocks.0.act": 3,
    }
