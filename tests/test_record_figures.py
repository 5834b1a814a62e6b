"""What records derive from their own fields: sums, differences, orders, and which moment counts. All by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest

from memsize import Comparison, Fit, LayoutReport, Timeline, Verification
from memsize.documents.sections import Table
from memsize.records.trace import Event, StoredPart, StoredTensor
from memsize.units import Bytes
from tests import records
from tests.measurements import (
    AllocationLog,
    LogEntry,
    MeasuredWorkload,
    Measurement,
    OpLocation,
    Peaks,
    SoftwareStack,
    allocations,
)
from tests.models import LAYOUTS, SCENARIOS, apply_scenario, part
from tests.records import (
    FIXED,
    PER_PARAMETER,
    Alignment,
    AllocationDifference,
    Audit,
    Budget,
    Card,
    Cell,
    Change,
    Column,
    ColumnKind,
    Copy,
    FigureComparison,
    FitRow,
    Interval,
    LayerFormats,
    Loss,
    PeakMoment,
    Phase,
    Prediction,
    Remedied,
    RemedyRow,
    Row,
    Run,
    Share,
    Specs,
    Totals,
    VerifiedRun,
    Words,
    alive,
    courses,
    draw,
    figures,
    in_order,
    layer,
    noun,
    output,
    own_rows,
    peak,
    spec,
    split_phase,
    stored,
    stored_dtypes,
    totals,
    visible,
)

# --- what a trace adds up to


def test_each_kind_of_tensor_has_a_total_of_its_own() -> None:
    tensors = (
        stored("a.weight", "float32", 10),
        stored("a.frozen", "float16", 10, trainable=False),
        stored("b.weight", "int8", 100, kind="packed", trainable=False),
        stored("c.weight", "float32", 10, tied_to="a.weight"),
        stored("a.mean", "float32", 3, kind="buffer"),
        stored("a.table", "float32", 5, kind="attribute"),
        stored("a.weight (master)", "float32", 7, kind="master"),
    )
    found = totals(replace(records.toy(), tensors=tensors, layers=(), storages=(), inputs=()))
    assert found == Totals(
        parameters=10 + 10 + 100,
        trainable=10,
        parameter_bytes=40 + 20 + 100,
        buffer_bytes=12,
        attribute_bytes=20,
        master_bytes=28,
    )
    assert (found.stored, found.inference, found.training) == (192, 192, 220)


def test_training_counts_what_is_kept_once() -> None:
    parts = Totals(
        parameter_bytes=1,
        buffer_bytes=2,
        attribute_bytes=4,
        master_bytes=8,
        input_bytes=16,
        cast_bytes=32,
        output_bytes=64,
        saved_bytes=128,
        saved_cast_bytes=20,
        saved_input_bytes=10,
    )
    assert parts.inference == 7 + 16 + 32 + 64
    assert parts.training == 7 + 8 + 16 + 32 + (128 - 20 - 10)
    assert figures(parts)["inference_bytes"] == 119 and figures(parts)["training_bytes"] == 161
    assert set(figures(None).values()) == {None}


@pytest.mark.parametrize("name", ["parameters", "parameter_bytes", "buffer_bytes", "attribute_bytes", "output_bytes"])
def test_a_row_with_any_figure_is_not_hollow(name: str) -> None:
    assert Row("", "", 0, ()).hollow
    assert not replace(Row("", "", 0, ()), **{name: 1}).hollow


def test_dtypes_come_with_the_most_bytes_first_and_a_wrappers_are_its_parts() -> None:
    wrapped = stored(
        "q", "float32", 10, parts=(StoredPart("d", spec("int8", 50), 50), StoredPart("s", spec("float16"), 2))
    )
    assert stored_dtypes([stored("a", "float16", 10), stored("b", "float32", 6)]) == ("float32", "float16")
    assert stored_dtypes([stored("a", "float16", 10), stored("b", "float32", 4), stored("c", "float16", 1)]) == (
        "float16",
        "float32",
    )
    assert stored_dtypes([wrapped, stored("a", "float16", 5)]) == ("int8", "float16")


def marks(*tensors: StoredTensor, calls: int = 1, outputs: Sequence[str] = ()) -> tuple[str, ...]:
    made = tuple(output("float32", 1, memory=memory) for memory in outputs)
    trace = replace(records.toy(), layers=(layer("m", "Linear", calls=calls, outputs=made),), tensors=tensors)
    return own_rows(trace)[0].marks


def test_marks_at_their_boundaries() -> None:
    unread = [stored(f"m.p{n}", "float32", 1, used=False) for n in range(3)]
    assert marks(*unread[:1]) == ("never used: p0",)
    assert marks(*unread[:2]) == ("never used: p0, p1",)
    assert marks(*unread) == ("never used: 3 parameters",)
    assert marks(calls=2) == ("×2",)
    assert marks(calls=0) == ("never called",)
    assert marks(outputs=("view", "new", "in place", "view", "passed")) == ("view", "in place", "returns its input")
    ties = [stored(f"m.t{n}", "float32", 1, tied_to=owner) for n, owner in enumerate(("a", "b", "a", "c"))]
    assert marks(*ties[:1]) == ("tied to a",)
    assert marks(*ties) == ("tied to a and 2 more",)
    assert marks(stored("m.w", "float32", 1, trainable=False)) == ("frozen",)
    assert marks(stored("m.w", "float32", 1, trainable=False), stored("m.b", "float32", 1)) == ()
    assert marks(stored("m.w", "float32", 1, differentiable=False)) == ("no gradient",)
    assert marks(stored("m.w", "float32", 1, differentiable=False, used=False)) == ("never used: w",)
    assert marks(stored("m.w", "float32", 1, differentiable=None)) == ()
    assert marks(stored("m.w", "int8", 1, wrapper="Int8Tensor"), stored("m.v", "int8", 1, wrapper="Int8Tensor")) == (
        "Int8Tensor",
    )


def test_rows_stop_at_the_depth_asked_for() -> None:
    paths = ("", "a", "a.b", "a.b.c")
    layers = tuple(layer(path, "Box", leaf=path == "a.b.c", output_bytes=4) for path in paths)
    trace = replace(records.toy(), layers=layers, tensors=(stored("a.b.t", "float32", 1, kind="attribute"),))
    assert [(row.path, row.output_bytes) for row in visible(trace, 0)] == [("", 16)]
    assert [(row.path, row.output_bytes) for row in visible(trace, 1)] == [("", 4), ("a", 12)]
    assert [(row.path, row.output_bytes, row.attribute_bytes) for row in visible(trace, 2)] == [
        ("", 4, 0),
        ("a", 4, 0),
        ("a.b", 8, 4),
    ]
    assert [row.path for row in visible(trace, 3)] == ["", "a", "a.b", "a.b.t", "a.b.c"]


def test_a_tensor_that_is_not_registered_has_a_row_even_in_a_leaf() -> None:
    held = (stored("a.table", "float32", 2, kind="attribute"), stored("a.mean", "float32", 3, kind="buffer"))
    trace = replace(records.toy(), layers=(layer("", "Net", leaf=False), layer("a", "Linear")), tensors=held)
    assert [(row.path, row.attribute_bytes, row.buffer_bytes) for row in visible(trace)] == [
        ("a", 0, 12),
        ("a.table", 8, 0),
    ]
    assert [row.path for row in visible(trace, 1)] == ["a"]  # below the cut it is part of its module
    assert not any(asdict(Totals()).values())


@pytest.mark.parametrize(
    ("text", "phase"),
    [
        ("backward 2", ("backward", 2)),
        ("forward", ("forward", 0)),
        ("my own phase 12", ("my own phase", 12)),
        ("zero grad", ("zero grad", 0)),
        (" 3", (" 3", 0)),
        ("3", ("3", 0)),
    ],
)
def test_a_phase_is_a_name_and_a_step(text: str, phase: tuple[str, int]) -> None:
    assert split_phase(text) == phase


def test_the_first_of_equal_peaks_counts() -> None:
    events = tuple(Event(0, delta, 0, -1, "") for delta in (5, -2, 2, -5))
    trace = replace(records.toy(), events=events)
    assert (peak(trace).index, peak(trace).bytes) == (0, 5)
    assert alive(trace, 1) == {0: 3} and alive(trace, 3) == {}
    assert peak(replace(trace, events=(Event(0, -5, 0, -1, ""),))) == peak(replace(trace, events=()))


# --- roles


def test_roles_are_told_in_the_order_in_which_they_stay() -> None:
    expected = [
        "parameter", "buffer", "master weight", "optimizer state", "workspace", "gradient", "gathered parameter",
        "unsharded gradient", "input", "activation", "cast copy", "communication", "output", "temporary",
    ]  # fmt: skip
    assert in_order(reversed(expected)) == expected  # type: ignore[arg-type]
    assert in_order(["output", "input", "output"]) == ["input", "output"]
    assert [noun(role) for role in in_order(expected)] == [  # type: ignore[arg-type]
        "parameters", "buffers", "master weights", "optimizer state", "workspaces", "gradients",
        "gathered parameters", "unsharded gradients", "inputs", "activations", "cast copies", "communication buffers",
        "outputs", "temporaries",
    ]  # fmt: skip


# --- tables for Python


def test_the_tables_of_a_report_have_every_figure_by_its_name() -> None:
    report = records.structures_report()
    layers = report.layers.set_index("path")
    assert list(layers.columns) == [
        "type", "depth", "kernel", "input", "output", "calls", "parameters", "trainable", "stored_as",
        "parameter_bytes", "buffer_bytes", "attribute_bytes", "cast_bytes", "output_bytes", "saved_bytes",
        "multiply_adds", "marks",
    ]  # fmt: skip
    # the token and the position and the table of the model itself: 4 · 4 B, 5 · 8 B and 4 · 4 B
    assert layers.loc[""].tolist()[:14] == ["Tiny", 0, "", "", "float32[1,5,4]", 1, 4, 4, "float32", 16, 40, 16, 0, 80]
    assert layers.loc["norm"].tolist() == [
        "LayerNorm", 1, "", "", "float32[1,5,4]", 1, 4, 0, "float32", 16, 0, 0, 0, 80, 120, None, "frozen",
    ]  # fmt: skip
    tensors = report.tensors.set_index("name")
    assert list(tensors.columns) == [
        "kind", "layer", "dtype", "stored_as", "shape", "elements", "bytes", "reported_bytes", "trainable", "tied_to",
        "wrapper", "used", "differentiable",
    ]  # fmt: skip
    assert tensors.loc["head.weight"].tolist() == [
        "parameter", "head", "float32", "float32", (7, 4), 28, 0, 112, True, "embed.weight", None, True, True,
    ]  # fmt: skip
    shares = records.toy_report().scenarios
    assert shares.loc["fp16", ["parameter_bytes", "parameter_bytes_of_fp32"]].tolist() == [18_447_802, 0.5]
    assert shares.loc["int4-weight", "status"] == "unavailable"
    assert str(shares["saved_bytes"].dtype) == "Int64"


def test_the_tables_of_a_fit_keep_counts_that_are_missing() -> None:
    row = FitRow("fp32", "title", "X", 63, "none", looked=(1,))
    remedies = (
        RemedyRow("fused", "a fused optimizer", "none", "nothing", "fits", 50, 20),
        RemedyRow("ema", "no average", "less accurate", "training", "not here", reason="there is none"),
    )
    fit = Fit("m", (), "batch", (), (row,), remedied=Remedied("fp32", "X", 8, 63, 70, remedies))
    assert {str(fit.rows[name].dtype) for name in ("size", "budget", "peak", "headroom", "per_step", "fixed")} == {
        "Int64"
    }
    assert fit.rows.iloc[0][["budget", "status"]].tolist() == [63, "none"]
    table = fit.remedies
    assert list(table.columns) == ["name", "title", "cost", "outcome", "peak", "saved", "recomputed", "reason"]
    assert table.iloc[0].tolist()[:6] == ["fused", "a fused optimizer", "none", "fits", 50, 20]
    assert [str(table[name].dtype) for name in ("peak", "saved")] == ["Int64", "Int64"]
    assert len(replace(fit, remedied=None).remedies) == 0


# --- two models


def test_changes_between_two_models() -> None:
    old, new = stored("a", "float32", 10), stored("a", "float16", 10)
    assert (Change("a", old, new).bytes, Change("a", None, new).bytes, Change("a", old, None).bytes) == (-20, 20, -40)
    assert Change("a", old, replace(old, used=False)).same
    for other in (new, replace(old, bytes=1), replace(old, tied_to="b"), None):
        assert not Change("a", old, other).same
    assert not Change("a", None, None).same
    wrapped = replace(new, wrapper="Int8Tensor", parts=(StoredPart("d", spec("int8", 10), 10),))
    first = replace(records.toy(), tensors=(old,))
    table = Comparison(
        first, first, (Change("a", old, wrapped), Change("b", old, None), Change("c", old, old)), ()
    ).changes
    assert table.fillna("").to_dict("list") == {
        "name": ["a", "b", "c"],
        "layer": ["", "", ""],
        "renamed_from": ["", "a", "a"],
        "before": ["float32", "float32", "float32"],
        "before_shape": [(10,), (10,), (10,)],
        "after_shape": [(10,), "", (10,)],
        "after": ["Int8Tensor (int8)", "", "float32"],
        "before_bytes": [40, 40, 40],
        "after_bytes": [20, 0, 40],
        "changed": [True, True, False],
    }


# --- fits, budgets and formats


def test_what_is_left_of_a_budget() -> None:
    card = Card("X", (8, 0), 100, "made up")
    assert Budget("X", card, device=100, context=30, margin=7).allocator == 63
    row = FitRow("fp32", "", "X", 63, "found", peak=70, looked=(8, 2, 4, 8), refused={4: "odd"})
    assert row.headroom == -7 and row.ran == (2, 8)
    assert replace(row, peak=None).headroom is None


def copy(where: str, size: int) -> Copy:
    return Copy(where, "clone", spec("float32", 1), "row-major", "channels last", size, False)


def test_the_copies_of_a_layouts_layers_add_up_to_the_total() -> None:
    last = Run(
        (
            LayerFormats(
                "a", "Conv2d", 1, True, 2, ("channels last", "row-major", "channels last"), specs=(spec("int8", 2),)
            ),
        ),
        (copy("a", 5), copy("a.b", 7), copy("a", 11)),
        (Loss("a", "view", spec("int8", 2), "row-major"), Loss("b", "cat", spec("int8", 2), "row-major")) * 2,
    )
    audit = Audit("m", (), "fp32", True, Run((), (copy("a", 3),)), last)
    assert last.copied == 23
    assert LayoutReport(audit).layers.loc[0, "parameters"] == "channels last, row-major"
    assert LayoutReport(audit).copies.iloc[0].to_dict() == {
        "layer": "a",
        "op": "clone",
        "tensor": "float32[1]",
        "before": "row-major",
        "after": "channels last",
        "bytes": 5,
        "hidden": False,
        "place": "",
    }
    assert LayoutReport(audit).layers.to_dict("records") == [
        {
            "path": "a",
            "type": "Conv2d",
            "depth": 1,
            "calls": 2,
            "output": "int8[2]",
            "parameters": "channels last, row-major",
            "inputs": "",
            "outputs": "",
            "lost_at": "view",
            "copied_bytes": 23,  # with those of a.b, which has no row of its own
            "row_major_copied_bytes": 3,
        }
    ]


# --- measurements and predictions


def test_the_ends_of_allocations_and_the_first_summit() -> None:
    places = (OpLocation("forward", None, "x"),)
    entries = [(7, -5), (0, 4), (0, 2), (1, 3), (0, -6), (2, 6), (2, -6)]
    found = allocations(AllocationLog(places, tuple(LogEntry(storage, delta, 0) for storage, delta in entries)))
    # Alive, less what was there before: -5, -1, 1, 4, -2, 4, -2: the first 4 is the summit
    assert [(each.bytes, each.freed, each.at_peak) for each in found] == [
        (4, 3, True),
        (2, 3, True),
        (3, None, True),
        (6, 4, False),
    ]
    only_frees = allocations(AllocationLog(places, (LogEntry(-1, -5, 0), LogEntry(0, 5, 0))))
    assert [each.at_peak for each in only_frees] == [False]


def test_the_least_and_the_most_of_several_peaks() -> None:
    several = [Peaks(1, 20, 300), Peaks(2, 10, 400)]
    assert Peaks.least(several) == Peaks(1, 10, 300)
    assert Peaks.most(several) == Peaks(2, 20, 400)


def checked(**more: object) -> VerifiedRun:
    work, gpu = MeasuredWorkload("m", (), 1, "fp32", benchmark=True), SoftwareStack("X", (8, 0), 1000, "2.13.0", "3.11")
    seen = Measurement(work, gpu, Peaks(100, 200, 300), tracked=90)
    said = Prediction(Peaks(90, 200, 310), Peaks(95, 210, 320), Interval(400, 500), 0, AllocationLog((), ()))
    return VerifiedRun(replace(seen, **more), said)  # type: ignore[arg-type]


def test_a_prediction_is_compared_from_the_nearer_end_of_its_interval() -> None:
    found = checked().comparisons
    assert [(each.figure, each.predicted, each.measured, each.difference) for each in found] == [
        ("requested", (90, 95), 100, -5),
        ("allocated", (200, 210), 200, 0),
        ("reserved", (310, 320), 300, 10),
        ("device", (400, 500), None, None),
    ]
    assert [each.share for each in found] == [-0.05, 0.0, 10 / 300, None]
    assert all(each.benchmark for each in found)
    assert [each.measured for each in checked(error="out of memory").comparisons] == [None] * 4
    assert FigureComparison("x", False, Interval(1, 1), 0).share is None


def test_what_mem_tracker_says_is_beside_what_was_allocated() -> None:
    found = checked().tracked
    assert found is not None and (found.difference, found.measured) == (90 - 200, 200)
    assert checked(tracked=None).tracked is None and checked(peaks=None).tracked is None


@pytest.mark.parametrize(
    ("kind", "predicted", "real", "more"),
    [
        ("predicted only", 5, None, -5),
        ("real only", None, 7, 7),
        ("other size", 5, 7, 2),
        ("freed later", 5, 7, 7),
        ("freed earlier", 5, 7, -7),
        ("freed later", 5, None, 0),
    ],
)
def test_how_much_more_the_real_step_has(kind: str, predicted: int | None, real: int | None, more: int) -> None:
    assert AllocationDifference(kind, OpLocation("", None, ""), predicted, real, False).bytes == more  # type: ignore[arg-type]


def test_a_verification_lists_every_run_and_every_difference() -> None:
    one = AllocationDifference("real only", OpLocation("forward", "a", "mm"), None, 7, True)
    found = Verification((checked(), checked()), alignment=Alignment(1, 2, 1, (one,)))
    assert len(found.comparisons) == 8 and len(found.figures) == 8
    assert found.differences.iloc[0].tolist()[:4] == ["real only", "forward", "a", "mm"]
    assert list(found.differences.columns) == ["difference", "phase", "layer", "op", "predicted", "measured", "at_peak"]
    assert found.differences.iloc[0].tolist()[5:] == [7, True]
    assert {str(found.differences[name].dtype) for name in ("predicted", "measured")} == {"Int64"}
    assert list(found.figures.columns) == [
        "figure", "benchmark", "predicted", "predicted_most", "measured", "difference", "share",
    ]  # fmt: skip
    assert found.figures.iloc[0].tolist() == ["requested", True, 90, 95, 100, -5, -0.05]
    assert {str(found.figures[name].dtype) for name in ("measured", "difference")} == {"Int64"}
    assert len(Verification((checked(),)).differences) == 0


# --- a timeline


def line(*delta: int, **more: object) -> Timeline:
    plain: dict[str, object] = {
        "layers": ("", "a", "a.b", "c"),
        "phases": (Phase("forward", 0, 0, len(delta)),),
        "op": tuple(f"op{n}" for n in range(len(delta))),
        "layer": (-1,) * len(delta),
        "live": {},
        "allocated": tuple(range(len(delta))),
        "reserved": tuple(range(100, 100 + len(delta))),
    }
    return Timeline("m", "fp32", delta=delta, **(plain | more))  # type: ignore[arg-type]


def test_the_summit_of_a_stretch_counts_what_was_there_before_it() -> None:
    found = line(5, 3, -4, 2, 1)  # 5, 8, 4, 6, 7
    assert (found.peak.event, found.peak.bytes, found.peak.op) == (1, 8, "op1")
    assert found.summit(2, 5).event == 1  # the 8 bytes before event 2
    assert found.summit(3, 5).event == 4
    assert found.summit(3, 3).event == 2 and found.summit(0, 0) == PeakMoment(-1, 0, None, "", {})
    assert line(5, -5, 5).peak.event == 0
    assert [found.before(event) for event in range(3)] == [0, 5, 8]


def test_columns_stand_for_equal_stretches_by_their_highest_event() -> None:
    found = line(5, 3, -4, 2, 1)
    assert found.columns(5) == found.columns(9) == [0, 1, 2, 3, 4]
    assert found.columns(2) == [1, 4]  # events 0 and 1, and 2 to 4
    assert found.columns(1) == [1]


def test_phases_and_steps_of_a_timeline() -> None:
    phases = (Phase("setup", 0, 0, 1), Phase("forward", 1, 1, 2), Phase("backward", 1, 2, 4), Phase("forward", 2, 4, 5))
    found = line(1, 1, 1, 1, 1, phases=phases)
    assert [str(phase) for phase in phases] == ["setup", "forward 1", "backward 1", "forward 2"]
    assert found.steps == (Phase("step", 1, 1, 4), Phase("step", 2, 4, 5))
    assert [found.phase_at(event).start for event in range(5)] == [0, 1, 2, 2, 4]
    assert [course.before for course in courses(found)] == [0, 1, 2, 4]


def test_a_moment_has_its_layer_and_the_roles_that_are_alive() -> None:
    found = line(1, 1, layer=(1, -1), live={"input": (1, 0), "output": (0, 2)})
    assert found.moment(0) == PeakMoment(0, 1, "a", "op0", {"input": 1})
    assert line(1, layer=(0,)).moment(0).layer == ""
    assert found.moment(1) == PeakMoment(1, 2, None, "op1", {"output": 2})


def test_a_release_of_a_parent_ends_its_childs_stretch() -> None:
    # a.b allocates, a (around it) frees and then allocates; outside the model nothing is around anything
    found = line(4, -1, 2, -1, layer=(2, 1, 1, -1))
    assert [(s.layer, s.start, s.stop) for s in found.stretches(10)] == [("a.b", 0, 2), ("a", 2, 3), (None, 3, 4)]
    assert [(s.layer, s.start, s.stop) for s in found.stretches(2)] == [("a", 0, 3), (None, 3, 4)]
    assert len(line(4, 0, layer=(2, 1)).stretches(10)) == 2  # only a release belongs to what is inside
    assert [s.layer for s in line(4, 1, layer=(2, 3)).stretches(2)] == ["a.b", "c"]
    assert [s.layer for s in line(4, 1, 1, layer=(2, 3, 0)).stretches(2)] == [""]
    assert [s.layer for s in line(1, 1, 1, layer=(2, -1, 2)).stretches(1)] == ["", None, ""]  # no coarser than that
    beside = line(4, -1, layer=(3, 1))
    assert len(beside.stretches(10)) == 2


# --- precision


def test_what_a_weight_of_128_by_256_becomes() -> None:
    def sizes(name: str, shape: tuple[int, ...] = (128, 256), dtype: str = "bfloat16") -> list[int]:
        return [each.bytes for each in LAYOUTS[name].weight(shape, dtype)]

    assert sizes("int8-dynamic") == [32_768]
    assert sizes("int8-weight") == [32_768, 128 * 4, 128]
    assert sizes("fp8-weight") == [32_768, 128 * 4]
    # two values a byte; of 256 / 128 = 2 groups in each row a scale and a zero point of two bytes
    assert sizes("int4-weight") == [16_384, 2 * 128 * 2, 2 * 128 * 2]
    # a float32 for each 64 of 32,768 elements, and 16 codes
    assert sizes("nf4") == [16_384, 512 * 4, 16 * 4]
    assert sizes("nf4", (1, 65)) == [33, 2 * 4, 64]
    # an absmax of a byte; of them 512 / 256 float32, an offset and 256 codes
    assert sizes("nf4-double") == [16_384, 512, 16 * 4, 4, 2 * 4, 256 * 4]
    assert sizes("int8") == [32_768, 128 * 4]
    # a byte for each 32 elements, one for each 16 and a float32 for all
    assert sizes("mxfp4") == [16_384, 32_768 // 32]
    assert sizes("nvfp4") == [16_384, 32_768 // 16, 4]
    assert [LAYOUTS["int4-weight"].skips((4, n)) is None for n in (127, 128, 129, 256)] == [False, True, False, True]
    widths = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int64": 8, "int8": 1}
    for dtype, width in (widths | {"uint8": 1, "qint8": 1}).items():
        assert part("x", dtype, (3, 5)).bytes == 15 * width


def test_what_quantized_layers_keep_of_their_copies() -> None:
    assert {
        name: (layout.kernel, layout.packed, layout.claims, layout.subclasses) for name, layout in LAYOUTS.items()
    } == {
        "int8-dynamic": ("no gradient", True, "qint8", False),
        "int8-weight": ("copy kept", False, None, True),
        "fp8-weight": ("copy kept", False, None, True),
        "int4-weight": ("quantized", False, None, True),
        "nf4": ("copy freed", False, "uint8", True),
        "nf4-double": ("copy freed", False, "uint8", True),
        "fp4": ("copy freed", False, "uint8", True),
        "int8": ("int8 product", False, "int8", True),
        "mxfp4": ("copy freed", False, "uint8", True),
        "nvfp4": ("copy freed", False, "uint8", True),
    }


def test_masters_are_kept_of_trainable_float16_parameters_only() -> None:
    import torch

    recipe = apply_scenario(torch.nn.Linear(2, 2), SCENARIOS["apex-O2"])
    half = stored("a.w", "float16", 3, 5)
    others = (
        replace(half, name="a.f", trainable=False),
        replace(half, name="a.b", kind="buffer"),
        replace(half, name="a.t", tied_to="b.w"),
        stored("a.n", "float32", 3),
    )
    *same, master = recipe.precision.rewrite((half, *others))
    assert tuple(same) == (half, *others)
    assert (master.name, master.kind, master.layer, master.bytes, master.reported_bytes, master.trainable) == (
        "a.w (master)", "master", "a", 60, 60, False,
    )  # fmt: skip
    assert str(master.spec) == "float32[3,5]" and master.elements == 15


# --- columns as text


class Page:
    """A document of one table."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def sections(self) -> tuple[Table, ...]:
        return (self.table,)


@pytest.mark.parametrize(
    ("kind", "short", "long", "side"),
    [
        ("name", "x", "longer", "left"),
        ("text", "x", "longer", "left"),
        ("specs", Specs((spec("int8", 1),)), Specs((spec("float32", 1, 2),)), "left"),
        ("words", Words(("x",)), Words(("x", "y")), "left"),
        ("count", 1, 1_000, "right"),
        ("bytes", Bytes(1), Bytes(1_000), "right"),
        ("share", Share(0.05), Share(0.5), "right"),
    ],
)
def test_words_stand_at_the_left_of_their_column_and_numbers_at_the_right(
    kind: ColumnKind, short: Cell, long: Cell, side: str
) -> None:
    columns = (Column("a", "a", kind, 1), Column("b", "b", "count", 1))
    *_, first, second = draw(Page(Table("t", "", columns, ((long, 1), (short, 1)))), "B").splitlines()
    whole, part = (line.removesuffix("  1") for line in (first, second))
    assert len(whole) == len(part) and whole == whole.strip()
    assert part == (part.strip().ljust(len(whole)) if side == "left" else part.strip().rjust(len(whole)))


def test_what_decides_the_bytes_of_each_role() -> None:
    assert {"parameter", "gradient", "optimizer state", "master weight"} == PER_PARAMETER
    whole = {"buffer", "workspace", "gathered parameter", "unsharded gradient", "communication"}
    assert PER_PARAMETER | whole == FIXED
