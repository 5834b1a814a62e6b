"""What a GPU would show of a trace made by hand: peaks, what is alive there, how far workspaces may be off."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import memsize
from memsize import AllocatorConfig, Stack, Trace
from memsize.records.trace import Event, Role, Storage
from tests.gpus import OMITTED, Interval, card, estimate_gpu, is_estimated, requests, timeline, variants
from tests.records import Card, LiveStorage, Platform, Shortage, layer

KiB, MiB = 1 << 10, 1 << 20
CONTEXT = "memsize.device.gpu_estimate.cuda_context"


@pytest.fixture(autouse=True)
def a_context_of_300_to_650_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metal's is none: how large one is on a card has tests of its own."""
    ends = {"MPS": Interval(0, 0)}
    usual = Interval(300 * MiB, 650 * MiB)
    monkeypatch.setattr(CONTEXT, lambda where, *_: ends.get(where.platform, usual) if where else usual)


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
    assert found.device == (394 * MiB, 744 * MiB)


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


def test_the_context_is_that_of_the_stack_and_its_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(CONTEXT, lambda *of: asked.append(of) or Interval(0, 0))
    estimate_gpu(replace(STEP, stack="cuda=11.6,loading=eager"))
    assert set(asked) == {(None, Stack(cuda="11.6", loading="eager"), frozenset(event.op for event in EVENTS))}


# --- near the limit of a card


def card_of(size: int, platform: Platform = "CUDA") -> Card:
    """A card whose memory is `size` MiB for the allocator and 650 more, the most that the CUDA context may take."""
    return Card("a card", (8, 0), (size + 650) * MiB, "made up", platform=platform)


def test_cached_segments_are_given_back_before_memory_runs_out() -> None:
    # Without a bound 94 MiB: 30 + 12 + 12 and 40, one of 12 free. With 93 the free one makes room for the 40.
    assert estimate_gpu(STEP, card_of(94)).reserved == estimate_gpu(STEP).reserved == 94 * MiB
    for size in (93, 82):
        # That is so beside the largest context; the smallest one leaves 350 MiB more.
        found = estimate_gpu(STEP, card_of(size))
        assert (found.requested, found.allocated, found.reserved) == (82 * MiB, 82 * MiB, 94 * MiB)
        assert found.shortage is None
        assert found.device == (382 * MiB, (size + 650) * MiB)
        short = estimate_gpu(STEP, card_of(size - 350))
        assert short.shortage is not None and not short.shortage.certain
        assert (short.requested, short.allocated, short.reserved) == (82 * MiB, 82 * MiB, 82 * MiB)
        assert short.fragmentation == 0


def test_a_run_that_may_not_fit_says_how_it_would_end() -> None:
    # 81 MiB are short of 82, but the context may take 350 MiB less.
    found = estimate_gpu(STEP, card_of(81))
    assert found.shortage == Shortage(
        request=40 * MiB,
        tried=40 * MiB,
        total=731 * MiB,
        free=39 * MiB,  # 731 less 650, of which 30 + 12 are held: the free 12 were given back
        allocated=42 * MiB,
        reserved=42 * MiB,
        phase="optimizer",
        step=2,
        layer="",
        op="aten.sqrt",
        certain=False,
        event=4,
    )
    assert found.reserved == 94 * MiB  # as with the smallest context
    assert found.device == (394 * MiB, 731 * MiB)  # 94 + 300; no more than the card has


def test_a_run_that_does_not_fit_is_told_with_enough_memory() -> None:
    short = card_of(81 - 350)  # a context of 300 MiB leaves 81
    found = estimate_gpu(STEP, short)
    assert found.shortage is not None and found.shortage.certain
    assert found.shortage.total == 381 * MiB
    assert replace(found, shortage=None) == estimate_gpu(STEP)
    assert estimate_gpu(STEP, card_of(82 - 350)).shortage.certain is False  # type: ignore[union-attr]


def test_what_pytorch_tries_to_allocate_is_a_segment() -> None:
    events = (Event(0, 30 * MiB, 0, -1, "start"), Event(1, 12 * MiB - 512, 1, 1, "aten.relu"))
    shortage = estimate_gpu(replace(STEP, events=events), card_of(31)).shortage
    assert shortage is not None
    assert (shortage.request, shortage.tried, shortage.free) == (12 * MiB - 512, 12 * MiB, 1 * MiB)
    assert (shortage.phase, shortage.step, shortage.layer, shortage.op) == ("forward", 2, "a", "aten.relu")


def test_metal_has_no_context() -> None:
    mac = card_of(82 - 650, "MPS")
    assert estimate_gpu(STEP, mac).shortage is None
    assert estimate_gpu(STEP, mac).device == (82 * MiB, 82 * MiB)
    short = estimate_gpu(STEP, card_of(81 - 650, "MPS")).shortage
    assert short is not None and short.certain


def test_a_fraction_of_the_card_is_a_limit_too() -> None:
    config = AllocatorConfig(memory_fraction=0.1)
    assert estimate_gpu(STEP, card_of(820 - 650), config=config).reserved == 82 * MiB
    short = estimate_gpu(STEP, card_of(819 - 650), config=config)
    assert short.shortage is not None and short.shortage.certain
    assert short.reserved == 94 * MiB


class Wide(nn.Module):
    """Two gigabytes of weights, of which training with SGD holds two copies."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1 << 15, 1 << 14, bias=False, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def test_every_answer_says_that_a_run_does_not_fit() -> None:
    # 2,048 MiB of weights fit on a card of 3,902 MiB, and as much of gradients beside them do not.
    found = memsize.report(Wide(), (1 << 15,), gpu="3050 laptop", train="sgd", scenarios="fp32,fp16")
    fp32, fp16 = found.scenario_results
    assert fp32.training is not None and fp32.inference is not None and fp16.training is not None
    assert fp32.inference.shortage is None and fp16.training.shortage is None
    short = fp32.training.shortage
    assert short is not None and short.certain
    assert (short.request, short.tried, short.total) == (2048 * MiB, 2048 * MiB, 3902 * MiB)
    assert (short.phase, short.step, short.layer, short.op) == ("backward", 1, "fc", "mm")
    assert fp32.training.reserved >= 4096 * MiB
    assert "fp32: training: does not fit: it runs out of memory in backward of fc;" in str(found)
    (finding,) = (each for each in found.why() if each.code == "out-of-memory")
    assert "Training under fp32 does not fit on GeForce RTX 3050 Laptop 4GB" in finding.text()
    whole = json.loads(found.to_json())
    assert whole["bars"]["limit"] == {"title": "GeForce RTX 3050 Laptop 4GB", "size": 3902 * MiB}
    assert "\npeak of a training step, GiB, and in % of GeForce RTX 3050 Laptop 4GB (3.81 GiB)\n" in str(found)
    data = whole["scenarios"][0]
    assert data["inference"]["shortage"] is None and data["training"]["shortage"]["tried"] == 2048 * MiB
    step = memsize.trace(Wide(), (1 << 15,), gpu="3050 laptop", optimizer="sgd")
    assert step.peak.shortage == short
    said = str(step).splitlines()[-1]
    assert said.startswith("The run does not fit on GeForce RTX 3050 Laptop 4GB: it runs out of memory in the backward")
    assert timeline(step.trace, step.config, card(step.gpu)).notes[-1] == said
    assert timeline(step.trace, step.config, card("a100")).notes == step.trace.notes


def test_a_fit_agrees_with_the_estimate() -> None:
    row, *_ = memsize.fit(Wide(), (1 << 15,), gpu="3050 laptop", train="sgd", scenarios="fp32", batch_size=1).fit_rows
    assert row.status == "exceeds"


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
    assert list(requests(CONVOLVED)) == plain
    assert list(requests(CONVOLVED, 0)) == [OMITTED if pair[0] in (1, 2) else pair for pair in plain]
    scaled = {0: 30, 1: 36, 2: 42, 3: 16, 4: 18}
    assert list(requests(CONVOLVED, 3)) == [(s, (1 if size > 0 else -1) * scaled[s] * MiB) for s, size in plain]


def test_a_convolution_does_without_a_workspace_that_has_no_room() -> None:
    tight = replace(CONVOLVED, events=(*CONVOLVED.events[:5], *CONVOLVED.events[7:]))  # without addmm's
    assert tight.events[1].storage == 1 and {event.storage for event in tight.events} == {0, 1, 2, 4}
    tight = replace(tight, events=tight.events[:5])
    # Beside 30 MiB, workspaces of 12 and of 14 MiB have room if the context is small, and none if it is large.
    roomy = estimate_gpu(tight, card_of(31))
    assert roomy.shortage is None and roomy.reserved == (30 + 12 + 14) * MiB
    assert roomy.device == (330 * MiB, 681 * MiB)
    # Here a small context leaves 31 MiB.
    found = estimate_gpu(tight, card_of(31 - 350))
    assert found.shortage is not None and not found.shortage.certain and found.reserved == 30 * MiB
    assert found.device == (330 * MiB, 331 * MiB)
    assert found.requested == sum(found.roles.values()) == 30 * MiB
    drawn = timeline(tight, where=card_of(31 - 350))
    assert drawn.delta == (30 * MiB, 0, 0, 0, 0)
    assert drawn.total == drawn.allocated == drawn.reserved == (30 * MiB,) * 5


def test_estimated_workspaces_may_be_absent_or_twice_as_large() -> None:
    assert is_estimated(CONVOLVED)
    expected = [list(requests(CONVOLVED, factor)) for factor in (1, 0, 2)]
    assert list(map(list, variants(CONVOLVED))) == expected
    asked = replace(CONVOLVED, cudnn="9.15.1")
    assert not is_estimated(asked) and list(map(list, variants(asked))) == [list(requests(asked))]
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
