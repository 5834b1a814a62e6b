"""The timeline of a run: as data against arithmetic first, as text against golden files second, then laws.

`MEMSIZE_GOLDEN=write pytest tests/test_timeline.py` writes the golden files anew; read the difference before keeping
it.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from memsize import AllocatorConfig, StepTrace, Timeline, Trace, trace as trace_step
from memsize.cli import run
from memsize.records.trace import Event, Storage
from memsize.render import FORMATS, render
from tests import records
from tests.gpus import card, replay, timeline
from tests.pages import Tags, check_golden as check, check_page, plot
from tests.records import (
    ROLES,
    TITLES,
    Phase,
    Role,
    Stretch,
    alive,
    courses,
    from_data,
    in_order,
    live_bytes,
    peak as peak_of,
    to_data,
)

MiB = 2**20


class Script:
    """Writes a trace by hand: storages by name, phases as they come."""

    def __init__(self) -> None:
        self.layers = (
            records.layer("", "Net", leaf=False),
            records.layer("body", "Sequential", leaf=False),
            records.layer("body.0", "Linear"),
            records.layer("body.1", "ReLU"),
            records.layer("head", "Linear"),
        )
        self.paths = [layer.path for layer in self.layers]
        self.phases = ["setup"]
        self.phase = 0
        self.storages: list[Storage] = []
        self.names: dict[str, int] = {}
        self.events: list[Event] = []

    def during(self, phase: str) -> None:
        if phase not in self.phases:
            self.phases.append(phase)
        self.phase = self.phases.index(phase)

    def new(self, name: str, size: int, role: Role, layer: str | None = None, op: str = "") -> None:
        place = -1 if layer is None else self.paths.index(layer)
        self.names[name] = len(self.storages)
        self.storages.append(Storage(size, role, place, op, "float32", (size // 4,), -1))
        self.events.append(Event(self.names[name], size, self.phase, place, op))

    def change(self, name: str, delta: int, op: str, layer: str | None = None) -> None:
        place = -1 if layer is None else self.paths.index(layer)
        self.events.append(Event(self.names[name], delta, self.phase, place, op))

    def free(self, name: str, op: str, layer: str | None = None) -> None:
        held = sum(event.delta for event in self.events if event.storage == self.names[name])
        self.change(name, -held, op, layer)

    def trace(self) -> Trace:
        return Trace(
            model="model.py:Net",
            scenario="fp32",
            training=True,
            batch_size=1,
            torch="2.13.0",
            inputs=(),
            layers=self.layers,
            tensors=(),
            phases=tuple(self.phases),
            storages=tuple(self.storages),
            events=tuple(self.events),
            assumptions=("no gradient is infinite",),
            notes=("the loss is the mean of the floating outputs",),
        )


def test_a_timeline_shows_itself_in_a_line() -> None:
    run = timeline(two_steps())
    assert (
        repr(run) == f"<memsize.Timeline {run.model}: {len(run)} events, peak 16.00 MiB>"
    )  # 4 + 2 + 1 + 3 + 2 + 4, the seed of 4 B aside


def two_steps() -> Trace:
    """Two alike steps of a small net, and what comes before them.

    Live MiB: setup 4, 6, 7; then in each step: activations 3 + 1, backward's seed 4 B, gradients 4 and 2, all freed.
    """
    script = Script()
    script.new("w0", 4 * MiB, "parameter", "body.0")
    script.new("w1", 2 * MiB, "parameter", "head")
    script.new("x", 1 * MiB, "input")
    for step in (1, 2):
        script.during(f"forward {step}")
        script.new("a0", 3 * MiB, "activation", "body.0", "addmm")
        script.new("a1", 1 * MiB, "activation", "body.1", "relu")
        script.during("setup")
        script.new("seed", 4, "temporary", None, "ones_like")
        script.during(f"backward {step}")
        script.new("g1", 2 * MiB, "gradient", "head", "mm")
        script.free("a1", "mm", "head")
        script.new("g0", 4 * MiB, "gradient", "body.0", "mm")
        script.free("a0", "mm", "body.0")
        script.free("seed", "mm", "body.0")
        script.during(f"zero_grad {step}")
        script.free("g0", "")
        script.free("g1", "")
    return script.trace()


def inference() -> Trace:
    script = Script()
    script.new("w0", 4 * MiB, "parameter", "body.0")
    script.during("forward")
    script.new("y", 3 * MiB, "temporary", "body.0", "addmm")
    script.change("y", 2 * MiB, "resize_", "body.1")
    return script.trace()


def empty() -> Trace:
    return Script().trace()


TRACES: dict[str, Callable[[], Trace]] = {"steps": two_steps, "inference": inference, "empty": empty}


def test_the_peak_of_a_step() -> None:
    found = timeline(two_steps())
    peak = found.peak
    # 7 of setup + 4 of activations + 2 of g1 - 1 of a1 + 4 of g0, and the seed.
    assert peak.bytes == 16 * MiB + 4
    assert (peak.layer, peak.op) == ("body.0", "mm")
    assert str(found.phase_at(peak.event)) == "backward 1"
    assert peak.roles == {
        "parameter": 6 * MiB,
        "input": MiB,
        "gradient": 6 * MiB,
        "activation": 3 * MiB,
        "temporary": 4,
    }
    assert peak.bytes == peak_of(two_steps()).bytes


def test_what_happens_between_phases_belongs_to_the_later_one() -> None:
    found = timeline(two_steps())
    assert found.phases == (
        Phase("setup", 0, 0, 3),
        Phase("forward", 1, 3, 5),
        Phase("backward", 1, 5, 11),  # its seed and five more
        Phase("zero_grad", 1, 11, 13),
        Phase("forward", 2, 13, 15),
        Phase("backward", 2, 15, 21),
        Phase("zero_grad", 2, 21, 23),
    )
    assert found.steps == (Phase("step", 1, 3, 13), Phase("step", 2, 13, 23))


def test_many_events_between_phases_are_a_phase_of_their_own() -> None:
    script = Script()
    for phase, count in (("forward 1", 1), ("step 1", 4), ("backward 1", 1), ("step 1", 5), ("optimizer 1", 1)):
        script.during(phase)
        for _ in range(count):
            script.new("x", 8, "temporary", None, "mul")
    assert timeline(script.trace()).phases == (
        Phase("forward", 1, 0, 1),
        Phase("backward", 1, 1, 6),
        Phase("step", 1, 6, 11),
        Phase("optimizer", 1, 11, 12),
    )


def test_a_run_may_end_outside_every_phase() -> None:
    script = Script()
    script.during("forward")
    script.new("y", 8, "output", "head", "mm")
    script.during("setup")
    script.free("y", "mm")
    assert timeline(script.trace()).phases == (Phase("forward", 0, 0, 1), Phase("setup", 0, 1, 2))


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("expandable", [False, True])
def test_live_blocks_lie_apart_in_what_is_reserved(name: str, expandable: bool) -> None:
    trace = TRACES[name]()
    found = timeline(trace, AllocatorConfig(expandable_segments=expandable))
    assert found.storages == trace.storages
    live: dict[int, tuple[int, int]] = {}
    for event, (storage, change) in enumerate(zip(found.storage, found.delta, strict=True)):
        live[storage] = (found.address[event], live.get(storage, (0, 0))[1] + change)
        live = {index: held for index, held in live.items() if held[1]}
        assert sum(size for _, size in live.values()) == found.total[event]
        blocks = sorted((start, start + size) for start, size in live.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(blocks))
        assert sum(segment.bytes for segment in found.segments if segment.event <= event) == found.reserved[event]


def test_a_timeline_says_what_it_is_of() -> None:
    """PyTorch's release and the card come back from its data."""
    trace = replace(two_steps(), torch="2.13.0")
    found = timeline(trace, where=card("t4"))
    data = json.loads(json.dumps(to_data(found)))
    assert from_data(data) == found
    assert "on Tesla T4" in render(found, "text").splitlines()[0]
    assert all(text in render(found, "html") for text in ("PyTorch 2.13.0", "compute capability 7.5"))


def test_steps_that_run_alike_are_told_once() -> None:
    told = courses(timeline(two_steps()))
    # Segments: the first step makes them, so that its forward and backward see fewer reserved bytes than the second's.
    assert {(course.name, course.before, course.summit.bytes) for course in told} == {
        ("setup", 0, 7 * MiB),
        ("forward", 7 * MiB, 11 * MiB),
        ("backward", 11 * MiB, 16 * MiB + 4),
        ("zero_grad", 13 * MiB, 13 * MiB),
    }
    assert next(course.steps for course in told if course.name == "zero_grad") == (1, 2)


def test_a_phase_that_only_frees_is_highest_before_it_begins() -> None:
    freeing = next(course for course in courses(timeline(two_steps())) if course.name == "zero_grad")
    assert freeing.summit.bytes == freeing.before
    assert (freeing.summit.layer, freeing.summit.op) == (None, "")


def test_a_resize_moves_no_role() -> None:
    found = timeline(inference())
    assert found.live["temporary"] == (0, 3 * MiB, 5 * MiB)
    assert found.total == (4 * MiB, 7 * MiB, 9 * MiB)


def test_stretches_go_as_deep_as_they_may() -> None:
    found = timeline(two_steps())
    whole = found.stretches(100)
    assert whole[:5] == (
        Stretch("body.0", 0, 1),
        Stretch("head", 1, 2),
        Stretch(None, 2, 3),
        Stretch("body.0", 3, 4),
        Stretch("body.1", 4, 5),
    )
    coarse = found.stretches(len(whole) - 1)
    assert coarse[3] == Stretch("body", 3, 5)
    for stretches in (whole, coarse, found.stretches(1)):
        assert [stretch.start for stretch in stretches] == [0, *(stretch.stop for stretch in stretches[:-1])]
        assert stretches[-1].stop == len(found)


def test_a_release_between_two_children_belongs_to_the_first() -> None:
    script = Script()
    script.new("a", 8, "temporary", "body.0", "addmm")
    script.new("b", 8, "temporary", "body.1", "relu")
    script.free("a", "relu", "body")
    script.new("c", 8, "temporary", "head", "addmm")
    script.free("b", "addmm", "")
    script.new("d", 8, "temporary", "", "add")
    found = timeline(script.trace()).stretches(9)
    assert found == (Stretch("body.0", 0, 1), Stretch("body.1", 1, 3), Stretch("head", 3, 5), Stretch("", 5, 6))


def test_every_role_has_a_title_and_a_colour_of_its_own() -> None:
    looks = [look for title in TITLES.values() for look in (title.noun, title.colour)]
    assert len(looks) == len(set(looks)) == 2 * len(ROLES)


# Full loss of one kind of cone: Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color
# Vision Deficiency" (2009), table 1.
SIGHTS = {
    "all three": np.eye(3),
    "no red": np.array([[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.052]]),
    "no green": np.array([[0.3673, 0.8606, -0.228], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]),
    "no blue": np.array([[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]]),
}
# Björn Ottosson, "A perceptual color space for image processing" (2020).
CONES = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.63]])
OKLAB = np.array([[0.2105, 0.7936, -0.0041], [1.978, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])


def seen(colour: str, sight: np.ndarray) -> np.ndarray:
    """`colour` in Oklab, where distances are what people see: 1 is that of black and white."""
    parts = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    light = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return OKLAB @ np.cbrt(CONES @ np.clip(sight @ light, 0, 1))


@pytest.mark.parametrize("sight", SIGHTS)
def test_no_two_roles_look_alike_to_anyone(sight: str) -> None:
    looks = {role: seen(title.colour, SIGHTS[sight]) for role, title in TITLES.items()}
    for one, other in combinations(looks, 2):
        assert np.linalg.norm(looks[one] - looks[other]) > (0.1 if sight == "all three" else 0.08), (one, other)


def test_a_role_that_is_not_in_the_table_is_never_left_out() -> None:
    assert in_order(["temporary", "parameter", "temporary"]) == ["parameter", "temporary"]
    with pytest.raises(KeyError, match="cake"):
        in_order(["parameter", "cake"])


@pytest.mark.parametrize("name", TRACES)
def test_json_comes_back_as_it_went(name: str) -> None:
    found = timeline(TRACES[name]())
    assert from_data(json.loads(render(found, "json"))) == found


def test_csv_has_a_row_per_event_in_exact_bytes() -> None:
    found = timeline(two_steps())
    rows = list(csv.DictReader(io.StringIO(render(found, "csv"))))
    roles = ("parameter", "input", "gradient", "activation", "temporary")
    assert [int(row["live"]) for row in rows] == list(live_bytes(two_steps().events))
    assert all(sum(int(row[role]) for role in roles) == int(row["live"]) for row in rows)
    assert all(int(row["live"]) <= int(row["allocated"]) <= int(row["reserved"]) for row in rows)
    assert (rows[4]["phase"], rows[4]["step"], rows[4]["layer"], rows[4]["op"]) == ("forward", "1", "body.1", "relu")
    assert (rows[2]["step"], rows[2]["layer"]) == ("", "")


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("width", [80, 200])
def test_golden_at_a_terminals_width(name: str, width: int) -> None:
    text = render(timeline(TRACES[name]()), "text", width=width)
    assert max(map(len, text.splitlines())) <= width
    check(f"timeline.{name}.{width}.txt", text)


@pytest.mark.parametrize("name", ["steps", "inference"])
@pytest.mark.parametrize("format", [name for name in FORMATS if name != "markdown"])
def test_golden(name: str, format: str) -> None:
    check(f"timeline.{name}{FORMATS[format][0]}", render(timeline(TRACES[name]()), format))


def test_golden_in_a_notebook() -> None:
    check("timeline.notebook.html", StepTrace(two_steps())._repr_html_())


@pytest.mark.parametrize("width", [60, 100, 133, None])
def test_text_fits_other_widths(width: int | None) -> None:
    for made in TRACES.values():
        lines = render(timeline(made()), "text", width=width).splitlines()
        assert max(map(len, lines)) <= (width or 1000)
        assert not any(line.endswith(" ") for line in lines)


def test_the_chart_reaches_its_height_at_the_peak_only() -> None:
    lines = render(timeline(two_steps()), "text", width=200).splitlines()
    top = next(line for line in lines if "│" in line and "16.00" in line)
    mark = next(line for line in lines if "▼" in line)
    assert top[mark.index("▼")] == "█"
    assert "16.00 MiB in backward 1 (body.0, mm)" in mark


@pytest.mark.parametrize("unit", ["B", "KiB", "GB"])
def test_sizes_follow_the_unit(unit: str) -> None:
    found = timeline(two_steps())
    shown = {"B": "16,777,220", "KiB": "16,384.00", "GB": "0.02"}[unit]  # 16 · 2^20 + 4
    assert shown in render(found, "text", unit=unit)
    assert shown in render(found, "html", unit=unit)


@pytest.mark.parametrize("name", TRACES)
def test_html_is_whole_and_fetches_nothing(name: str) -> None:
    found = timeline(TRACES[name]())
    check_page(render(found, "html"), found._repr_html_())
    check_page(render(found, "html"), StepTrace(TRACES[name]())._repr_html_())


def test_the_picture_says_what_it_shows() -> None:
    tags = Tags(render(timeline(two_steps()), "html"))
    assert "activations: at most 4.00 MiB" in tags.titles
    assert "backward 2: at most 16.00 MiB, events 15 to 20" in tags.titles
    assert any(title.startswith("head in backward 1: at most 13.00 MiB\nparameters 6.00 MiB") for title in tags.titles)
    assert {"polygon", "polyline", "svg"} <= set(tags.seen)


def test_areas_are_as_high_as_their_bytes() -> None:
    found = timeline(two_steps())
    picture = plot.picture(found, "MiB")
    frame = picture["frame"]
    heights = {role: [float(pair.split(",")[1]) for pair in points.split()] for role, points, _ in picture["areas"]}
    assert min(heights["temporary"]) == frame.y(found.peak.bytes)  # the last role ends where everything does
    assert max(heights["parameter"]) == frame.bottom
    assert min(heights["parameter"]) == frame.y(6 * MiB)


def test_the_data_frame_of_a_step() -> None:
    frame = StepTrace(two_steps()).timeline
    assert frame["live"].max() == 16 * MiB + 4
    assert list(frame.columns[:6]) == ["event", "phase", "step", "layer", "op", "delta"]
    assert (frame[["parameter", "input", "gradient", "activation", "temporary"]].sum(axis=1) == frame["live"]).all()


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(ROLES),
        st.integers(1, 40 * MiB),
        st.sampled_from(["setup", "forward 1", "backward 1", "forward 2"]),
        st.sampled_from([None, "", "body.0", "body.1", "head"]),
        st.integers(0, 3),
    ),
    max_size=40,
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any run: storages of any role appear, are resized and disappear, in any phase and layer."""
    script, alive_now = Script(), []
    for number, (role, size, phase, layer, fate) in enumerate(draw(CHANGES)):
        script.during(phase)
        script.new(str(number), size, role, layer, "op")
        alive_now.append(str(number))
        if fate == 1:
            script.free(alive_now.pop(0), "free", layer)
        if fate in (2, 3) and alive_now:
            held = sum(event.delta for event in script.events if event.storage == script.names[alive_now[-1]])
            script.change(alive_now[-1], 512 if fate == 2 else -(held // 2) or 512, "resize_", layer)
    return script.trace()


@given(traces())
def test_roles_add_up_to_what_is_live_at_every_event(trace: Trace) -> None:
    found = timeline(trace)
    levels = replay(((e.storage, e.delta) for e in trace.events), AllocatorConfig(), timeline=True).timeline
    assert levels is not None
    sums = [sum(column[event] for column in found.live.values()) for event in range(len(found))]
    assert sums == list(found.total) == levels.requested.tolist()
    assert all(t <= a <= r for t, a, r in zip(found.total, found.allocated, found.reserved, strict=True))
    for event in {0, len(found) // 2, len(found) - 1} if len(found) else ():
        by_role: dict[Role, int] = {}
        for storage, size in alive(trace, event).items():
            role = trace.storages[storage].role
            by_role[role] = by_role.get(role, 0) + size
        assert found.moment(event).roles == by_role


@given(traces(), st.integers(1, 60))
def test_phases_columns_and_stretches_cover_every_event_once(trace: Trace, count: int) -> None:
    found = timeline(trace)
    covered = [event for phase in found.phases for event in range(phase.start, phase.stop)]
    assert covered == list(range(len(found)))
    assert [e for _, start, stop in found.stretches(count) for e in range(start, stop)] == covered
    columns = found.columns(count)
    assert columns == sorted(set(columns)) and len(columns) == min(count, len(found))
    assert not columns or max(found.total[event] for event in columns) == found.peak.bytes
    assert from_data(json.loads(json.dumps(to_data(found)))) == found


@given(traces(), st.integers(50, 200))
def test_anything_can_be_drawn(trace: Trace, width: int) -> None:
    found = timeline(trace)
    assert max(map(len, render(found, "text", width=width).splitlines())) <= width
    assert "<svg" in render(found, "html") or not len(found)


@pytest.fixture(scope="module")
def toy(toy_target: str) -> Timeline:
    # a card whose convolutions take no workspace, which would be the peak
    return timeline(trace_step(toy_target, (3, 64, 64), steps=2, gpu="v100").trace)


def test_a_real_step_has_its_phases_in_order(toy: Timeline) -> None:
    order = [str(phase) for phase in toy.phases]
    assert [name for name in order if name.endswith("2")] == [
        "zero_grad 2",
        "forward 2",
        "loss 2",
        "backward 2",
        "optimizer 2",
    ]
    peak = toy.peak
    assert toy.phase_at(peak.event).name == "optimizer"
    # AdamW: parameters, two states, gradients and one foreach temporary, each 36,895,604 B.
    assert [peak.roles[role] for role in ("parameter", "gradient", "temporary")] == [36895604] * 3
    assert peak.roles["optimizer state"] == 2 * 36895604


def test_a_real_inference_has_no_steps(toy_target: str) -> None:
    found = timeline(trace_step(toy_target, (3, 64, 64), optimizer=None).trace)
    assert [str(phase) for phase in found.phases] == ["setup", "forward"]
    assert found.steps == ()


@pytest.mark.parametrize("format", FORMATS)
def test_the_command_writes_every_format(format: str, toy_target: str, tmp_path: Path) -> None:
    file = tmp_path / f"step{FORMATS[format][0]}"
    command = ["timeline", toy_target, "--input", "3,64,64", "--train", "adamw", "--steps", "1", "-o", str(file)]
    assert run(command) == 0
    assert file.stat().st_size > 1000
    assert run(command) == 2  # it is there already
    assert run([*command, "--force"]) == 0


def test_the_command_draws_a_model_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text("from torch import nn\n\n\ndef net():\n    return nn.Linear(512, 512).half()\n")
    file = tmp_path / "step.json"
    assert run(["timeline", f"{tmp_path / 'half.py'}:net", "--input", "512", "-o", str(file)]) == 0
    found = from_data(json.loads(file.read_text()))
    assert found.scenario == "as-given"
    assert found.peak.roles["parameter"] == (512 * 512 + 512) * 2


def test_the_command_draws_one_inference(toy_target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["timeline", toy_target, "--input", "3,64,64", "--scenario", "fp16"]) == 0
    out = capsys.readouterr().out
    assert "as fp16" in out and "in forward" in out


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--format", "pdf"], "no format 'pdf'"),
        (["--scenario", "fp23"], "no scenario 'fp23'"),
        (["--train", "adamv"], "no optimizer 'adamv'"),
        (["--gpu", "a1000"], "no GPU 'a1000'"),
        (["--units", "mega"], "no unit 'mega'"),
        (["-o", "step.docx"], "no format has the suffix '.docx'"),
    ],
)
def test_what_is_wrong_shows_before_anything_runs(
    wrong: list[str], says: str, toy_target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memsize.api.trace", None)
    assert run(["timeline", toy_target, "--input", "3,64,64", *wrong]) == 2
    assert says in capsys.readouterr().err
