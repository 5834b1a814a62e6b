"""What a GPU would show of a trace made by hand: peaks, what is alive there, how far workspaces may be off."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memsize.device.config import AllocatorConfig
from memsize.device.gpu_estimate import estimate_gpu
from memsize.device.workspace_bounds import is_estimated, requests, variants
from memsize.records.gpu import LiveStorage
from memsize.records.trace import Event, Role, Storage, Trace
from tests.records import layer

KiB, MiB = 1 << 10, 1 << 20


def storage(size: int, role: Role, place: int = -1, op: str = "aten.mm") -> Storage:
    return Storage(size, role, place, op, "float32", (size // 4,), -1)


STORAGES = (
    storage(30 * MiB, "parameter", 1),
    storage(12 * MiB, "activation", 1, "aten.relu"),
    storage(12 * MiB, "gradient", 2),
    storage(40 * MiB, "temporary", -1, "aten.sqrt"),
)
EVENTS = (
    Event(0, 30 * MiB, 0, -1, "start"),
    Event(1, 12 * MiB, 1, 1, "aten.relu"),
    Event(2, 12 * MiB, 2, 2, "aten.mm"),
    Event(1, -12 * MiB, 2, 2, "aten.mm"),
    Event(3, 40 * MiB, 3, -1, "aten.sqrt"),
    Event(3, -40 * MiB, 3, -1, "aten.sqrt"),
)
STEP = Trace(
    model="nets:Net",
    scenario="fp32",
    training=True,
    batch_size=1,
    torch="2.13.0",
    inputs=(),
    layers=(layer("", "Net", leaf=False), layer("a", "Linear"), layer("b", "Linear")),
    tensors=(),
    phases=("start", "forward 2", "backward 2", "optimizer 2"),
    storages=STORAGES,
    events=EVENTS,
)


def test_the_peak_and_what_is_alive_there() -> None:
    found = estimate_gpu(STEP)
    # 30 + 12 + 12, less 12, and 40: 82 MiB in segments of 30, 12, 12 and 40, of which one of 12 is free
    assert (found.requested, found.allocated, found.reserved) == (82 * MiB, 82 * MiB, 94 * MiB)
    assert found.fragmentation == 12 / 94
    assert (found.peak_phase, found.peak_step, found.peak_layer, found.peak_op) == ("optimizer", 2, "", "aten.sqrt")
    assert list(found.roles.items()) == [("temporary", 40 * MiB), ("parameter", 30 * MiB), ("gradient", 12 * MiB)]
    # The context of a current CUDA is 300 to 650 MiB, that of one before 11.7 is 1,000 to 1,450 MiB
    assert found.device == (394 * MiB, 744 * MiB)
    assert estimate_gpu(STEP, cuda="11.6").device == (1094 * MiB, 1544 * MiB)


def test_the_peak_is_in_the_layer_and_phase_of_its_event() -> None:
    found = estimate_gpu(replace(STEP, events=EVENTS[:4]))
    assert (found.peak_phase, found.peak_step, found.peak_layer, found.peak_op) == ("backward", 2, "b", "aten.mm")
    first = estimate_gpu(replace(STEP, events=(Event(0, 5, 1, 0, "x"),), layers=(layer("m", "Net"), *STEP.layers[1:])))
    assert first.peak_layer == "m"
    in_root = replace(STEP, storages=(STORAGES[0]._replace(layer=0),), events=EVENTS[:1])
    assert estimate_gpu(in_root).storages[0].layer == ""


def test_a_run_without_events_has_no_peak() -> None:
    found = estimate_gpu(replace(STEP, events=()))
    assert (found.requested, found.peak_phase, found.peak_step, found.peak_layer, found.peak_op) == (0, "", 0, "", "")
    assert found.roles == {} and found.storages == ()


def test_the_largest_storages_come_first_and_equal_ones_in_their_order() -> None:
    found = estimate_gpu(STEP)
    assert found.storages == (
        LiveStorage(40 * MiB, "temporary", None, "aten.sqrt", "optimizer 2", "float32", (10 * MiB,)),
        LiveStorage(30 * MiB, "parameter", "a", "aten.mm", "start", "float32", (30 * MiB // 4,)),
        LiveStorage(12 * MiB, "gradient", "b", "aten.mm", "backward 2", "float32", (3 * MiB,)),
    )
    assert estimate_gpu(STEP, largest=1).storages == found.storages[:1]
    even = replace(STEP, storages=tuple(storage(512 * (1 + n % 2), "input", 0) for n in range(30)))
    even = replace(even, events=tuple(Event(n, 512 * (1 + n % 2), 0, -1, str(n)) for n in range(30)))
    told = estimate_gpu(even).storages
    assert [each.bytes for each in told] == [1024] * 15 + [512] * 5
    assert len(told) == 20
    named = replace(even, storages=tuple(s._replace(op=str(n)) for n, s in enumerate(even.storages)))
    assert [each.op for each in estimate_gpu(named).storages[:16]] == [*map(str, range(1, 30, 2)), "0"]


def test_roles_of_several_storages_add_up() -> None:
    both = replace(STEP, storages=(*STORAGES[:2], STORAGES[2]._replace(role="parameter"), STORAGES[3]))
    assert estimate_gpu(both).roles == {"parameter": 42 * MiB, "temporary": 40 * MiB}


def test_the_allocators_settings_change_what_is_reserved() -> None:
    config = AllocatorConfig(expandable_segments=True)
    # 30 + 12 + 12 map 60 MiB; 40 do not fit in the 12 and 6 that are free: 34 more are two steps of 20
    assert estimate_gpu(STEP, config=config).reserved == 100 * MiB


# --- workspaces


CONVOLVED = replace(
    STEP,
    storages=(
        storage(30 * MiB, "parameter", 1),
        storage(12 * MiB, "workspace", 1, "convolution"),
        storage(14 * MiB, "workspace", 1, "convolution_backward"),
        storage(16 * MiB, "workspace", 1, "addmm"),
        storage(18 * MiB, "output", 1, "convolution"),
    ),
    events=tuple(
        event
        for number, size in enumerate((30, 12, 14, 16, 18))
        for event in (
            Event(number, size * MiB, 0, 1, "x"),
            *([Event(number, -size * MiB, 0, 1, "x")] if number else []),
        )
    ),
)


def test_only_the_workspaces_of_convolutions_are_scaled() -> None:
    plain = [(event.storage, event.delta) for event in CONVOLVED.events]
    assert requests(CONVOLVED) == plain
    assert requests(CONVOLVED, 0) == [pair for pair in plain if pair[0] not in (1, 2)]
    scaled = {0: 30, 1: 36, 2: 42, 3: 16, 4: 18}
    assert requests(CONVOLVED, 3) == [(s, (1 if size > 0 else -1) * scaled[s] * MiB) for s, size in plain]


def test_estimated_workspaces_may_be_absent_or_twice_as_large() -> None:
    assert is_estimated(CONVOLVED)
    assert variants(CONVOLVED) == [requests(CONVOLVED), requests(CONVOLVED, 0), requests(CONVOLVED, 2)]
    asked = replace(CONVOLVED, cudnn="9.15.1")
    assert not is_estimated(asked) and variants(asked) == [requests(asked)]
    without = replace(CONVOLVED, events=tuple(e for e in CONVOLVED.events if e.storage not in (1, 2)))
    assert not is_estimated(without)


def test_the_device_interval_reaches_from_none_to_twice_the_workspaces() -> None:
    found = estimate_gpu(CONVOLVED)
    # As estimated each of 12, 14, 16 and 18 MiB needs a segment larger than those before: 30 + 60. Without: 30 + 34.
    # Twice as large: 24 and 28, which serve 16 and 18: 30 + 52
    assert found.reserved == 90 * MiB
    assert found.device == ((64 + 300) * MiB, (90 + 650) * MiB)
    # Where workspaces come in the other order, twice is the most: 28 serve all that follow
    turned = replace(CONVOLVED, events=(CONVOLVED.events[0], *CONVOLVED.events[3:5]))
    assert estimate_gpu(turned).device == ((30 + 300) * MiB, (30 + 28 + 650) * MiB)


@pytest.mark.parametrize("op", ["convolution", "convolution_backward"])
def test_both_directions_of_a_convolution_have_a_workspace(op: str) -> None:
    single = replace(CONVOLVED, storages=(storage(512, "workspace", 0, op),), events=(Event(0, 512, 0, 0, op),))
    assert is_estimated(single)
    output = replace(single, storages=(storage(512, "output", 0, op),))
    assert not is_estimated(output)
