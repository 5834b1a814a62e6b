"""The largest size that fits: against brute force over every size, and what is said of it.

`MEMSIZE_GOLDEN=write pytest tests/test_fit.py` writes the golden files anew; read the difference before keeping it.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

import memsize
from memsize import AllocatorConfig, Finding, Fit, Gpu, ModelRequest, Trace, Training
from memsize.cli import run
from memsize.errors import ForwardError, InputError
from memsize.records.trace import Event, InputTensor, Storage, TensorSpec
from memsize.render import render
from tests import models
from tests.conftest import Python
from tests.fits import (
    LIMIT,
    MOST_RUNS,
    Dimension,
    FitEvidence,
    FitRequest,
    Footprint,
    Forecast,
    GenerationRunCache,
    RunCache,
    RunVariant,
    Search,
    Vary,
    findings_of,
    limit_of,
    parse_vary,
    replay_with_capacity,
)
from tests.gpus import budgets, card, cuda_context, larger_budgets
from tests.models import SCENARIOS, inputs_from_data, inputs_from_specs, parse_input
from tests.pages import check_golden as check
from tests.records import Bind, FitRow, Remedied, RemedyRow

MiB = 1 << 20
GiB = 1 << 30
CONTEXT = cuda_context().high
"""What the CUDA context may take of the usual card."""


# The search, on records made by hand


def footprint(size: int, fixed: int, varying: list[int]) -> Footprint:
    """A run that allocates `fixed` bytes, then each of `varying`, and frees these in turn."""
    sizes = [fixed, *varying]
    storages = tuple(
        Storage(count, "activation" if i else "parameter", -1, "op", "uint8", (size if i else count,), -1)
        for i, count in enumerate(sizes)
    )
    born = [Event(i, count, 0, -1, "op") for i, count in enumerate(sizes)]
    gone = [Event(i, -count, 0, -1, "op") for i, count in enumerate(sizes) if i]
    trace = Trace("m", "fp32", True, size, "2.13.0", (), (), (), storages=storages, events=tuple(born + gone))
    return Footprint(size, trace, AllocatorConfig())


def test_streams_have_pools_of_their_own() -> None:
    # Two tensors of 12 MiB, the second on another stream: once the first is freed its 12 MiB segment could serve the
    # second, but a stream only takes what it has freed itself. So 24 MiB are reserved where 12 MiB would do.
    size = 12 * MiB
    storages = tuple(Storage(size, "temporary", -1, "op", "uint8", (size,), -1) for _ in range(2))
    events = tuple(Event(storage, delta, 0, -1, "op") for storage in range(2) for delta in (size, -size))
    one = Trace("m", "fp32", True, 1, "2.13.0", (), (), (), storages=storages, events=events)
    two = replace(one, storages=(storages[0], storages[1]._replace(stream=1)))
    assert Footprint(1, one, AllocatorConfig()).unbounded.reserved.bytes == 12 * MiB
    apart = Footprint(1, two, AllocatorConfig())
    assert apart.unbounded.reserved.bytes == 24 * MiB
    # With less the cached segment of the first stream is given back before the second's is made.
    assert apart.fits(12 * MiB) and not apart.fits(10 * MiB)


def largest(measure: Callable[[int], Footprint], capacity: int, **options: Any) -> Search:
    """The search for the largest size that fits."""
    known, refused = ({**options.pop(name, {})} for name in ("known", "refused"))
    start, most_runs = options.pop("start", None), options.pop("runs", MOST_RUNS)
    search = Search(measure, capacity, known, refused, **{"most": LIMIT} | options)
    search.run(start, most_runs)
    return search


def refusing(divisor: int = 1, floor: int = 1, ceiling: int = 10**9) -> Callable[[int], int]:
    """The identity on sizes that a model runs with."""

    def size(n: int) -> int:
        if n % divisor:
            raise ForwardError(f"shape '[{n // divisor}, {divisor}]' is invalid")
        if n < floor:
            raise ForwardError("Expected more than 1 value per channel when training")
        if n > ceiling:
            raise ForwardError(f"The size of tensor a ({n}) must match the size of tensor b ({ceiling})")
        return n

    return size


SHAPES: dict[str, Callable[[int], int]] = {
    "line": lambda n: n,
    "parabola": lambda n: n + n * n // 4,
    "steps of 8": lambda n: -(-n // 8) * 8,
    "falls after 32": lambda n: n if n <= 32 else n // 3,
    "multiples of 2": refusing(divisor=2),
    "multiples of 3": refusing(divisor=3),
    "multiples of 7": refusing(divisor=7),
    "multiples of 8": refusing(divisor=8),
    "from 2": refusing(floor=2),
    "up to 40": refusing(ceiling=40),
}
MOST = 64


@pytest.mark.parametrize("fits", [250, 1111, 1790])
def test_a_loop_over_the_size_is_halved(fits: int) -> None:
    """No two runs make the same events, so that none can be followed: 4 runs enclose the answer, 11 find it."""

    def measure(size: int) -> Footprint:
        return footprint(size, MiB, [32 * MiB] * size)

    answer = largest(measure, MiB + 32 * MiB * fits + 20 * MiB, start=128, runs=GenerationRunCache.most_runs)
    assert (answer.size, answer.next_size) == (fits, fits + 1)
    assert len(answer.measured) <= 4 + 11


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(SHAPES)),
    st.integers(1, 200 * MiB),
    st.lists(st.integers(MiB, 8 * MiB), min_size=1, max_size=5),
    st.floats(0, 1),
)
def test_the_search_against_every_size(shape: str, fixed: int, per: list[int], place: float) -> None:
    looked: list[int] = []

    def measure(size: int) -> Footprint:
        looked.append(size)
        return footprint(size, fixed, [p * SHAPES[shape](size) for p in per])

    every: dict[int, Footprint] = {}
    for size in range(1, 3 * MOST):
        try:
            every[size] = footprint(size, fixed, [p * SHAPES[shape](size) for p in per])
        except ForwardError:
            continue
    peaks = [run.unbounded.reserved.bytes for size, run in every.items() if size <= MOST]
    capacity = int(min(peaks) / 2 + place * (max(peaks) - min(peaks) / 2))
    fitting = [size for size, run in every.items() if run.fits(capacity)]

    answer = largest(measure, capacity)
    assert tuple(looked) == answer.measured and len(set(looked)) == len(looked) <= MOST_RUNS
    assert answer.size == 0 or answer.size in fitting
    if shape == "falls after 32":
        # The answer is an edge: it fits, and the next does not. There may be another one farther on.
        assert answer.next_size == answer.size + 1 and not every[answer.next_size].fits(capacity)
    elif answer.closed:
        assert answer.size == max(fitting, default=0)
    else:
        # Memory that grows in steps may need more runs than there are. Then the answer says between what it lies.
        assert shape == "steps of 8"
        assert answer.next_size is not None and answer.size <= max(fitting) < answer.next_size


@pytest.mark.parametrize("shape", ["line", "parabola", "from 2", "up to 40"])
def test_plain_shapes_take_few_runs(shape: str) -> None:
    answer = largest(lambda size: footprint(size, MiB, [5 * MiB * SHAPES[shape](size)]), 1000 * MiB)
    # 1 + 5·n MiB in segments: at most 199; n + n²/4 ≤ 199 up to 26.
    assert answer.size == {"line": 199, "parabola": 26, "from 2": 199, "up to 40": 40}[shape]
    assert len(answer.measured) <= 6


def test_refused_sizes_are_told_with_their_reasons() -> None:
    answer = largest(lambda size: footprint(size, MiB, [MiB * refusing(divisor=4)(size)]), 100 * MiB)
    # 13 is refused, 8 runs; 99 MiB of which a multiple of 4 is 96; segments are even numbers of MiB.
    assert (answer.size, answer.step) == (96, 4)
    assert "invalid" in answer.refused[13]
    ceiling = largest(lambda size: footprint(size, MiB, [refusing(ceiling=1024)(size)]), 100 * MiB)
    assert (ceiling.size, ceiling.next_size, ceiling.next_run) == (1024, 1025, None)
    assert ceiling.ceiling is not None and "1024" in ceiling.ceiling


def test_what_was_refused_before_is_not_run_again() -> None:
    looked: list[int] = []

    def measure(size: int) -> Footprint:
        looked.append(size)
        return footprint(size, MiB, [refusing(ceiling=37)(size)])

    first = largest(measure, 100 * MiB)
    # 13 runs; 4,108 = 316 · 13 is as far as one run is believed; its refusal names 37, which runs, and so 38 is asked.
    assert first.measured == (13, 4108, 37, 38) and first.size == 37
    assert first.ceiling is not None and "37" in first.ceiling
    looked.clear()
    again = largest(measure, 100 * MiB, known=first.runs, refused=first.refused)
    assert (again.size, again.next_size, looked) == (37, 38, [])
    with pytest.raises(ForwardError, match="not at all"):
        largest(nothing_runs, MiB, refused=dict.fromkeys((13, 8, 60, 840, 1, 2), "not at all"))


def nothing_runs(size: int) -> Footprint:
    raise ForwardError("not at all")


def test_a_model_that_runs_with_no_size_raises_its_own_error() -> None:
    with pytest.raises(ForwardError, match="not at all"):
        largest(nothing_runs, MiB)


def test_nothing_fits_and_everything_fits() -> None:
    none = largest(lambda size: footprint(size, 50 * MiB, [MiB * size]), 40 * MiB)
    assert (none.size, none.largest_run, none.next_size) == (0, None, 1)
    endless = largest(lambda size: footprint(size, 50 * MiB, [MiB]), 60 * MiB)
    assert endless.endless and endless.size == 2**20


@given(st.integers(1, 50 * MiB), st.lists(st.integers(1, 30 * MiB), min_size=1, max_size=6))
def test_what_is_needed_is_the_least_that_fits(fixed: int, varying: list[int]) -> None:
    run = footprint(1, fixed, varying)
    # Every multiple of 2 MiB from the blocks' peak to the segments'.
    steps = range(run.unbounded.allocated.bytes // (2 * MiB) * 2 * MiB, run.unbounded.reserved.bytes + 1, 2 * MiB)
    assert run.needs() == next(step for step in steps if run.fits(step))
    for capacity in (steps[0], steps[len(steps) // 2] + 1000, steps[-1]):
        assert run.needs(capacity) == run.needs()


@given(st.integers(1, 50 * MiB), st.lists(st.integers(1, 30 * MiB), min_size=1, max_size=6))
def test_a_replay_that_is_known_is_that_of_the_capacity(fixed: int, varying: list[int]) -> None:
    run, fresh = footprint(1, fixed, varying), footprint(1, fixed, varying)
    run.needs()
    for capacity in range(run.requested, run.unbounded.reserved.bytes + 4 * MiB, MiB):
        assert run.bounded(capacity) == replay_with_capacity(fresh.flow, fresh.config, capacity)


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 40), st.integers(1, 1000))
def test_a_forecast_from_two_runs_is_exact_on_a_line(a: int, b: int, first: int, more: int, size: int) -> None:
    runs = [footprint(n, 1000, [a * n + b]) for n in (first, first + more)]
    forecast = Forecast(runs)
    assert tuple(forecast.flow(size)) == tuple(footprint(size, 1000, [a * size + b]).flow)
    assert forecast.requested(size) == 1000 + a * size + b


@given(st.integers(1, 1000), st.integers(0, 1000), st.integers(1, 500))
def test_a_forecast_from_three_runs_is_exact_on_a_parabola(a: int, b: int, size: int) -> None:
    runs = [footprint(n, 1000, [a * n * n + b * n]) for n in (10, 20, 50)]
    assert Forecast(runs).requested(size) == 1000 + a * size * size + b * size


def test_a_forecast_replays_twice_as_far_as_memory_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two tensors of 2 and 3 times the size, then 500 of 1,000 B, which share one segment: it is the last, at event 2.
    runs = [footprint(size, 2 * size, [3 * size, *[1000] * 500]) for size in (20 * MiB, 40 * MiB)]
    for one in runs:
        assert len(one.flow) > 500 and one.fits(300 * MiB) and one.last_change == 2
    replayed = []

    def counted(flow: Any, *arguments: Any) -> Any:
        replayed.append(len(flow))
        return replay_with_capacity(flow, *arguments)

    monkeypatch.setattr("memsize.analysis.fit.footprint.replay_with_capacity", counted)
    assert Forecast(runs).fits(59 * MiB, 301 * MiB) and not Forecast(runs).fits(60 * MiB, 301 * MiB)
    assert replayed == [5, 5]


class Eighths(Forecast):
    """What fits up to 4,000, and beyond that up to 9,000 at multiples of 8."""

    looked = 0

    def fits(self, size: int, capacity: int) -> bool:
        self.looked += 1
        return size <= 4000 or (size <= 9000 and size % 8 == 0)


@pytest.mark.parametrize(("events", "most"), [(10, 60), (12_000, 45)])
def test_sizes_as_far_apart_as_two_that_fit_are_looked_at_together(events: int, most: int) -> None:
    # Tensors alone would fit up to 12,000 = 40 · 300. The forecast takes few replays, fewer where one takes long.
    forecast = Eighths([footprint(size, 1, [size] * 40 + [1] * (events // 2)) for size in (100, 200)])
    assert forecast.largest(40 * 12_000 + 1 + events // 2, 2**20) == 9000
    assert forecast.looked <= most


def test_no_size_below_the_least_is_run() -> None:
    search = Search(lambda size: footprint(size, 50 * MiB, [MiB * size]), 200 * MiB, {}, {}, least=513)
    search.run(433)
    assert (search.measured, search.size, search.next_size, search.closed) == ((513,), 0, 513, True)


def test_what_binds() -> None:
    # 8 MiB of parameters, then 12 and 20: the second does not fit into 30.
    found = limit_of(footprint(1, 8 * MiB, [12 * MiB, 20 * MiB]), 30 * MiB)
    assert (found.role, found.request, found.op) == ("activation", 20 * MiB, "op")
    assert found.roles == {"activation": 32 * MiB, "parameter": 8 * MiB}


# What varies, and how much there is


def test_vary() -> None:
    ids, image = (
        InputTensor("input_ids", TensorSpec("int64", (2, 16)), 256),
        InputTensor("0", TensorSpec("float32", (2, 3, 8, 8)), 1536),
    )
    assert parse_vary("batch") == Vary()
    assert parse_vary("seq_len").dimensions([ids]) == (Dimension("input_ids", 1),)
    assert parse_vary("image").dimensions([image]) == (Dimension("0", 2), Dimension("0", 3))
    assert parse_vary("input_ids:1").size([ids]) == 16
    for text, problem in [
        ("0", "cannot read"),
        ("x:y", "cannot read"),
        ("0:0", "is the batch"),
    ]:
        with pytest.raises(InputError, match=problem):
            parse_vary(text)
    for text, problem in [("labels:1", "no input"), ("0:4", "no dimension 4"), ("0:1,0:2", "not of one size")]:
        with pytest.raises(InputError, match=problem):
            parse_vary(text).dimensions([image])
    with pytest.raises(InputError, match="no such dimension"):
        parse_vary("image").dimensions([ids])


def test_a_server_beside_takes_its_share() -> None:
    (t4,) = budgets("t4", margin="1GiB", beside="serve:0.3")
    device = round(14.56 * 2**30)
    assert t4.beside == int(0.3 * device)
    assert t4.allocator == device - int(0.3 * device) - cuda_context(card("t4")).high - 2**30
    larger = {budget.name: budget for budget in larger_budgets(t4)}
    assert larger["L4"].beside == int(0.3 * larger["L4"].device)
    with pytest.raises(InputError, match=r"13\.1 GiB for the server beside it"):
        budgets("t4", beside="serve:0.9", margin="2GiB")


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("0.4", "serve:0.4"),
        ("serve:30%", "serve:0.3"),
        ("vllm", "serve:0.3"),
        ("serve:40", "serve:0.4"),
        ("serve:1.2", "serve:0.3"),
    ],
)
def test_what_is_beside_is_a_server_and_its_share(text: str, nearest: str) -> None:
    with pytest.raises(InputError, match=rf"'{text}' is not a server and its share .* such as {nearest}"):
        budgets("t4", beside=text)


def test_budgets() -> None:
    (t4,) = budgets("t4", margin="5%")
    # 14.56 GiB, less the context and a twentieth.
    device, context = round(14.56 * 2**30), cuda_context(card("t4")).high
    assert (t4.name, t4.device, t4.allocator) == ("Tesla T4", device, device - context - round(device / 20))
    assert [budget.name for budget in budgets("t4, a100")] == ["Tesla T4", "A100 40GB"]
    (some,) = budgets(budget="15109MiB", margin=100)
    assert some.allocator == 15109 * MiB - CONTEXT - 100
    for options, problem in [
        ({"gpu": "t5"}, "no GPU 't5'"),
        ({"budget": "600MiB"}, "nothing is left"),
        ({"gpu": "t4,a100", "budget": "20GB"}, "one GPU"),
        ({"budget": "much"}, "cannot read"),
    ]:
        with pytest.raises(InputError, match=problem):
            budgets(**options)  # type: ignore[arg-type]


def test_a_mac_has_no_context() -> None:
    (mac,) = budgets("M2 Max 64GB")
    # Three quarters of 64 GiB are what Metal recommends.
    assert mac.device == mac.allocator == 48 << 30
    assert mac.notes and "MPS" in mac.notes[0]
    with pytest.raises(InputError, match=r"nothing is left after a margin of 50\.0 GiB"):
        budgets("M2 Max 64GB", margin="50GiB")


def local(monkeypatch: pytest.MonkeyPatch, *, cuda: bool = True, mps: bool = False, hip: str | None = None) -> None:
    """A machine whose GPU is made up: 20,000 of 24,000 MiB are free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20_000 * MiB, 24_000 * MiB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12_000 * MiB)


def test_the_local_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    local(monkeypatch)
    (here,) = budgets("local")
    assert (here.name, here.device, here.allocator) == (
        "Some GPU (local)",
        24_000 * MiB,
        24_000 * MiB - cuda_context(here.card).high,
    )
    assert here.card.capability == (8, 6) and here.card.platform == "CUDA"
    # What others have taken is told, not taken off: they may be gone when the model runs.
    assert here.notes == ("3.91 GiB of Some GPU (local) are in use right now: --margin leaves room for them",)
    assert [budget.name for budget in budgets("t4,local")] == ["Tesla T4", "Some GPU (local)"]
    fit = fit_of(Narrow(), "4000,64", gpu="local")
    assert row_of(fit).gpu == "Some GPU (local)" and row_of(fit).status == "found"
    assert any("in use right now" in note for note in fit.notes)


def test_a_local_gpu_that_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    local(monkeypatch)
    # This process's own context is not what others have taken.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (23_500 * MiB, 24_000 * MiB))
    assert budgets("local")[0].notes == ()


def test_a_local_gpu_of_another_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    local(monkeypatch, hip="6.2")
    (here,) = budgets("local")
    assert (here.card.platform, here.card.capability, here.device) == ("ROCm", (8, 0), 24_000 * MiB)
    local(monkeypatch, cuda=False, mps=True)
    (mac,) = budgets("local")
    assert (mac.card.platform, mac.allocator) == ("MPS", 12_000 * MiB)


def test_no_local_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], toy_target: str) -> None:
    local(monkeypatch, cuda=False)
    with pytest.raises(InputError, match="no GPU that PyTorch can use"):
        budgets("local")
    assert run(["fit", toy_target, "--input", "3,64,64", "--gpu", "local"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: this machine has no GPU") and err.count("\n") == 1


def test_a_local_gpu_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    local(monkeypatch)

    def broken() -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors might be")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    with pytest.raises(
        InputError, match=r"does not answer: CUDA error: all CUDA-capable devices are busy or unavailable$"
    ):
        budgets("local")


# The search, on models that are run


class Narrow(nn.Module):
    """A linear stack whose activations dwarf its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.ReLU())))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class Padded(Narrow):
    """Pads its batch to a multiple of 8: memory grows in steps."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(pad(x, (0, 0, 0, 0, 0, -len(x) % 8)))


class Sparing(Narrow):
    """Checkpoints from a batch of 33 on: memory falls there."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) <= 32:
            return super().forward(x)
        return self.head(checkpoint(self.layers, x, use_reentrant=False))


class Normed(nn.Module):
    """A batch norm, which wants two samples at least."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.head = nn.Linear(256, 2048), nn.BatchNorm1d(2048), nn.Linear(2048, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.wide(x)).relu())


class Grouped(Narrow):
    """Takes its batch in groups of 4."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(len(x) // 4, 4 * x.shape[1], 64))


ZOO: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "narrow": (Narrow, "4000,64"),
    "padded": (Padded, "4000,64"),
    "sparing": (Sparing, "4000,64"),
    "grouped": (Grouped, "1000,64"),
    "normed": (Normed, "256"),
    "convolutional": (models.Small, "3,32,32"),
    "attention": (models.Attention, "256,64"),
    "recurrent": (models.Recurrent, "50,16"),
}
VARIANT = RunVariant(SCENARIOS["fp32"], card("a100"), Training("adamw"))


@cache
def trials(name: str) -> RunCache:
    build, size = ZOO[name]
    feed = inputs_from_specs((parse_input(size),), 1)
    return RunCache(name, build(), feed, True, Vary(), lambda _: None)


@cache
def brute_force(name: str) -> dict[int, Footprint]:
    """The run of every batch up to `MOST` that the model runs with."""
    found = {}
    for size in range(1, MOST + 1):
        try:
            found[size] = trials(name).run(VARIANT, size)
        except ForwardError:
            continue
    return found


@pytest.mark.slow
@settings(max_examples=80)
@given(st.sampled_from(sorted(ZOO)), st.floats(0, 1))
def test_models_against_every_batch(name: str, place: float) -> None:
    check_against_brute_force(name, place)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["narrow", "sparing", "padded"])
@pytest.mark.parametrize("place", [0.2, 0.7])
def test_some_models_against_every_batch(name: str, place: float) -> None:
    check_against_brute_force(name, place)


def check_against_brute_force(name: str, place: float) -> None:
    every = brute_force(name)
    needs = [run.needs() for run in every.values()]
    capacity = int(min(needs) - 2 * MiB + place * (max(needs) - min(needs) + 2 * MiB))
    fitting = [size for size, run in every.items() if run.fits(capacity)]
    looked: list[int] = []

    def measure(size: int) -> Footprint:
        looked.append(size)
        return trials(name).run(VARIANT, size)

    answer = largest(measure, capacity, most=MOST)
    assert len(looked) <= MOST_RUNS
    assert answer.size == 0 or answer.size in fitting
    if not answer.closed:
        assert answer.next_size is not None and not every[answer.next_size].fits(capacity)
    elif answer.next_size is not None:
        assert answer.next_size not in fitting
    if name != "sparing" and answer.closed:
        assert answer.size == max(fitting, default=0)


def test_runs_are_made_once() -> None:
    own = RunCache("m", Narrow(), inputs_from_specs((parse_input("10,64"),), 1), True, Vary(), lambda _: None)
    for _ in range(2):
        own.run(VARIANT, 8)
        own.run(replace(VARIANT, card=card("a100-80gb"), config=AllocatorConfig(expandable_segments=True)), 8)
    assert own.count == 1
    own.run(replace(VARIANT, card=card("h100")), 8)
    assert own.count == 2


def test_runs_of_the_same_events_share_their_replays() -> None:
    own = RunCache("m", Narrow(), inputs_from_specs((parse_input("10,64"),), 1), True, Vary(), lambda _: None)
    half, brain, full = (own.run(replace(VARIANT, scenario=SCENARIOS[name]), 8) for name in ("fp16", "bf16", "fp32"))
    assert half.replays is brain.replays and half.replays is not full.replays
    assert half.trace.scenario == "fp16" and brain.trace.scenario == "bf16"
    expandable = own.run(replace(VARIANT, config=AllocatorConfig(expandable_segments=True)), 8)
    assert expandable.replays is not full.replays and own.count == 3


def test_a_search_begins_where_one_like_it_ended() -> None:
    fit = fit_of(
        Narrow(), "4000,64", budget=CONTEXT + 200 * MiB, scenarios="fp32,fp16,bf16,amp-fp16,amp-bf16,int8-weight"
    )
    first, like_it = row_of(fit, "fp16"), row_of(fit, "bf16")
    assert first.looked[0] == 13 and like_it.looked == (first.size, first.next_size)
    assert row_of(fit, "amp-bf16").looked[0] == row_of(fit, "amp-fp16").size
    assert row_of(fit, "int8-weight").looked[0] == row_of(fit).looked[0] == 13  # unlike each other: side by side
    alone = fit_of(Narrow(), "4000,64", budget=CONTEXT + 200 * MiB, scenarios="bf16")
    assert (row_of(alone, "bf16").size, row_of(alone, "bf16").peak) == (like_it.size, like_it.peak)


def test_a_run_is_the_trace_of_that_batch() -> None:
    run = trials("narrow").run(VARIANT, 12)
    step = memsize.trace(Narrow(), (4000, 64), batch_size=12, steps=2)
    assert run.requested == step.peak.requested
    assert run.unbounded.reserved.bytes == step.peak.reserved


# What is reported


def fit_of(model: nn.Module, size: str, **options: object) -> Fit:
    return memsize.fit(model, size, **({"scenarios": "fp32", "train": "adamw"} | options))  # type: ignore[arg-type]


def row_of(fit: Fit, scenario: str = "fp32") -> FitRow:
    return next(row for row in fit.fit_rows if row.scenario == scenario)


def test_the_largest_batch_of_a_stack() -> None:
    fit = fit_of(Narrow(), "4000,64", budget=str(CONTEXT + 200 * MiB))
    row = row_of(fit)
    assert row.status == "found"
    assert row.size is not None and row.next_size == row.size + 1
    # Each sample is 4000·64 float32. Kept for backward: the input and each layer's output, of which the in-place-less
    # ReLUs keep theirs and the linear layers' are freed: 1 + 4 of them, and the logits with their log-softmax.
    sample, logits = 4000 * 64 * 4, 4000 * 10 * 4
    assert row.per_step is not None and 5 * sample + logits <= row.per_step <= 9 * sample + 3 * logits
    assert row.peak is not None and row.next_peak is not None
    assert row.peak <= 200 * MiB < row.next_peak
    assert row.headroom == 200 * MiB - row.peak
    assert row.bind is not None and row.bind.role == "activation"
    assert len(row.looked) <= MOST_RUNS
    assert {run.size for run in fit.traces} == set(row.looked)
    # The allocator has what the context leaves at its largest.
    peak = fit.peak
    assert peak is not None and peak.requested <= peak.allocated <= peak.reserved <= 200 * MiB
    step = memsize.trace(Narrow(), (4000, 64), batch_size=row.size, steps=2, optimizer="adamw")
    assert peak.requested == step.peak.requested
    assert f"batch {row.size}: tensors " in str(fit)
    assert fit_of(Narrow(), "4000,64", budget=CONTEXT + MiB).peak is None


class TwoRegimes(nn.Module):
    """16 MiB of weights and 1 MiB of activations for each sample: the peak leaves the optimizer as the batch grows."""

    def __init__(self) -> None:
        super().__init__()
        self.heavy = nn.Linear(2048, 2048, bias=False)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.heavy(x)).sum()


WEIGHTS, SAMPLE = 2048 * 2048 * 4, 64 * 2048 * 4
WORKSPACES = 2 * 8_519_680


def test_where_the_optimizer_is_the_peak_a_sample_adds_its_input_and_all_that_training_holds_is_fixed() -> None:
    # The least batch does not fit. Parameter, gradient, two states and the step's temporary are 5 · 16 MiB; of a batch
    # nothing but its input is alive then, and the loss.
    row = row_of(fit_of(TwoRegimes(), "64,2048", budget=CONTEXT + 60 * MiB))
    assert row.status == "none" and row.bind is not None and row.bind.phase == row.grows_in == "optimizer"
    assert row.per_step == SAMPLE
    assert row.fixed is not None and 0 <= row.fixed - 5 * WEIGHTS - WORKSPACES <= 1024
    assert row.fixed >= sum(row.standing.values())


def test_of_one_batch_that_peaks_in_the_optimizer_its_temporary_is_fixed_too() -> None:
    row = row_of(fit_of(TwoRegimes(), "64,2048", batch_size=1, budget=CONTEXT + 60 * MiB, remedies=False))
    assert row.status == "exceeds" and row.bind is not None and row.bind.phase == "optimizer" and row.per_step is None
    assert sum(row.standing.values()) == 4 * WEIGHTS + WORKSPACES
    assert row.fixed is not None and 0 <= row.fixed - 5 * WEIGHTS - WORKSPACES <= 1024


def test_where_forward_or_backward_is_the_peak_a_sample_adds_its_activations() -> None:
    # In backward the input, the ReLU's output and gradients of two of such size are alive; the parameter, its states
    # and the workspaces are fixed.
    row = row_of(fit_of(TwoRegimes(), "64,2048", budget=CONTEXT + 400 * MiB))
    assert row.status == "found" and row.grows_in == "backward"
    assert row.per_step is not None and row.per_step % SAMPLE == 0 and 3 <= row.per_step // SAMPLE <= 5
    assert row.fixed is not None and 0 <= row.fixed - 3 * WEIGHTS - WORKSPACES <= WEIGHTS + 1024


class Single(TwoRegimes):
    """Makes other events of a batch of one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0 if len(x) == 1 else x)


def test_the_strip_is_of_the_scenario_that_the_verdict_is_about() -> None:
    # Ten layers of 4,096 x 4,096: 640 MiB in float32, half of that in float16.
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(10)))

    def title(scenarios: str) -> str:
        fit = memsize.fit(model, (4096,), scenarios=scenarios, batch_size=1, budget=CONTEXT + 500 * MiB, remedies=False)
        assert fit.largest == fit.fit_rows[-1].size and fit.fit_rows[-1].scenario == "fp16"
        assert "→" not in repr(fit) and len(repr(fit).splitlines()) == 1
        return render(fit, "text", width=200).partition("\n\n")[0]

    assert "→ allocated" in title("fp16")
    assert "→ allocated" not in title("fp32,fp16") and "does batch 1 fit?" in title("fp32,fp16")


def test_where_no_other_run_made_the_same_events_the_same_phase_is_compared() -> None:
    fit = fit_of(Single(), "64,2048", budget=CONTEXT + 90 * MiB)
    row = row_of(fit)
    assert (row.status, row.next_size, row.grows_in) == ("none", 1, "optimizer")
    assert row.per_step == SAMPLE
    # With the step's temporary more is fixed than there is, although what stands would fit.
    assert row.fixed is not None and 0 <= row.fixed - 5 * WEIGHTS - WORKSPACES <= 1024
    assert sum(row.standing.values()) == 4 * WEIGHTS + WORKSPACES < row.budget
    cost = next(finding for finding in fit.findings if finding.code == "fit-fixed-cost")
    assert cost.bytes == row.fixed
    assert cost.text() == (
        "No batch can fit: optimizer state, workspaces and 2 more alone take 80.25 MiB (96.25 MiB with the "
        "temporaries of the optimizer phase), 6.25 MiB more than PyTorch can use."
    )


def test_between_two_regimes_no_line_is_drawn_through_both() -> None:
    # With this budget the answer peaks in the optimizer and the next size in backward, or the other way round at most:
    # fixed memory never falls below what training holds there, and a sample never adds what no moment adds.
    for budget in range(100, 140, 4):
        row = row_of(fit_of(TwoRegimes(), "64,2048", budget=CONTEXT + budget * MiB))
        assert row.fixed is not None and row.fixed >= sum(row.standing.values())
        assert row.per_step is not None and row.per_step % SAMPLE == 0
        assert (row.grows_in == "optimizer") == (row.per_step == SAMPLE)


def test_more_scenarios_and_gpus() -> None:
    fit = fit_of(Narrow(), "4000,64", scenarios=None, gpu=["t4", "a100-80gb", "a100"])
    assert [row.scenario for row in fit.fit_rows[::3]] == [
        "fp32",
        "fp16",
        "bf16",
        "amp-fp16",
        "amp-bf16",
        "int8-weight",
    ]
    table = fit.rows.pivot(index="scenario", columns="gpu", values="size")
    assert (table["Tesla T4"] < table["A100 40GB"]).all() and (table["A100 40GB"] < table["A100 80GB"]).all()
    # Two cards of one capability share their runs.
    assert fit.runs < sum(len(row.looked) for row in fit.fit_rows) + 1
    assert "fp16 allows the largest batch" in repr(fit.why()) or "bf16 allows the largest batch" in repr(fit.why())
    # Figures name the card that they are of.
    first, others, *_ = (finding.text() for finding in fit.why())
    assert first.startswith(f"Under fp32 on Tesla T4, the largest batch is {table['Tesla T4']['fp32']:,}: it needs")
    more = " and ".join(f"{table[card]['fp32']:,} on {card}" for card in ("A100 80GB", "A100 40GB"))
    assert others == f"The largest batch that fits is {more}."


def test_cards_on_which_everything_fits_have_no_largest_batch() -> None:
    row = FitRow("fp32", "fp32", "Tesla T4", 600, "found", size=8, peak=590, next_size=9, next_peak=610)
    rows = (row, replace(row, gpu="A100", status="endless"), replace(row, gpu="H100", status="endless"))
    evidence = FitEvidence(rows, (), "batch")
    told = [finding.text() for finding in findings_of(evidence, "fit-cards")]
    assert told == ["Any batch fits on A100 and H100."]


def test_a_fraction_of_the_card_is_what_the_allocator_gets() -> None:
    # A quarter of 1,600 MiB is 400; the context leaves more of them, and less than three quarters.
    quarter = fit_of(TwoRegimes(), "64,2048", budget=1600 * MiB, allocator="per_process_memory_fraction:0.25")
    plain = fit_of(TwoRegimes(), "64,2048", budget=CONTEXT + 400 * MiB)
    assert quarter.budgets[0].allocator == plain.budgets[0].allocator == 400 * MiB
    assert [row.size for row in quarter.fit_rows] == [row.size for row in plain.fit_rows]
    assert row_of(quarter).peak == row_of(plain).peak
    told = next(finding for finding in quarter.findings if finding.code == "budget").text()
    assert told.endswith(f"the CUDA context may take {CONTEXT / GiB:.2f} GiB and the allocator may take 0.39 GiB.")
    ample = budgets(budget=1600 * MiB, fraction=0.75)
    assert ample[0].allocator == 1600 * MiB - CONTEXT
    with pytest.raises(InputError, match="for the CUDA context and the 100% that the allocator may not take"):
        budgets("t4", fraction=0.0)


@given(st.integers(1, 1 << 40), st.floats(0.01, 1))
def test_a_card_of_which_a_fraction_is_allowed(allowed: int, fraction: float) -> None:
    config = AllocatorConfig(memory_fraction=fraction)
    card = config.card_of(allowed)
    assert allowed <= (config.allowed(card) or card) <= allowed + 2


def test_a_card_is_a_byte_larger_since_fractions_are_rounded() -> None:
    """63 bytes are 70 % of 90, but PyTorch's product in floating point is 62.99…, which it cuts off."""
    config = AllocatorConfig(memory_fraction=0.7)
    assert config.allowed(90) == 62
    assert (config.card_of(63), config.allowed(config.card_of(63))) == (91, 63)


def test_one_batch_is_one_run() -> None:
    fit = fit_of(Narrow(), "4000,64", batch_size=4, gpu="t4")
    row = row_of(fit)
    assert (row.status, row.size, fit.runs, fit.remedied) == ("fits", 4, 1, None)
    short = fit_of(Narrow(), "4000,64", batch_size=64, budget=CONTEXT + 100 * MiB, remedies=False)
    row = row_of(short)
    assert (row.status, short.runs) == ("exceeds", 1)
    assert row.headroom is not None and row.headroom < 0
    assert "does not fit" in short.why()[0].text()


class Fixed(nn.Module):
    """Does nothing with its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000, 1000))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight @ self.weight).sum()


def test_nothing_varies_with_the_batch() -> None:
    fit = fit_of(Fixed(), "8", gpu="t4")
    row = row_of(fit)
    assert row.status == "constant" and row.size == 2**20
    assert fit.why()[0].text().startswith("Under fp32, only the input grows with batch")
    assert "any" in str(fit) and "only the input grows with the batch" in str(fit)
    # Under a budget that it does not fit, the same model says what is too much.
    short = fit_of(Fixed(), "8", budget=CONTEXT + 10 * MiB)
    assert row_of(short).status == "none"
    cost = next(finding for finding in short.findings if finding.code == "fit-fixed-cost")
    # Parameter, gradient and two states, 4,000,000 B each, and cuBLAS's workspaces.
    assert cost.bytes is not None and cost.bytes >= 4 * 4_000_000


class Picky(nn.Module):
    """Runs with batches up to 37 only, and says no number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 37:
            raise ValueError("too many for me")
        return self.linear(x)


def test_the_failure_and_the_range_that_works() -> None:
    fit = fit_of(Picky(), "64", gpu=["t4", "a100"])
    first, second = fit.fit_rows
    assert first.size is not None and first.next_size is not None
    assert first.status in ("open", "refused") and first.size <= 37 < first.next_size
    refused = next(finding for finding in fit.findings if finding.code == "fit-refused")
    assert f"Sizes from {min(first.ran)} to {max(first.ran)} ran." in refused.text()
    assert "too many for me" in refused.text()
    if first.status == "open":
        assert "the model refuses " in fit.why()[0].text()
    # The other card takes over what was refused: for its shapes, not for the card.
    assert not set(first.refused) & set(second.looked)


def test_what_binds_a_language_model_are_its_logits() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(5000, 16), nn.Linear(16, 5000)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.words(ids))

    row = row_of(fit := fit_of(Words(), "ids=128:int64", gpu="t4"))
    assert row.bind is not None and row.bind.largest is not None and row.bind.largest.logits
    assert row.next_size is not None and row.bind.largest.spec.shape[-1] == 5000
    assert row.bind.largest.bytes == row.bind.largest.tensors * row.next_size * 128 * 5000 * 4
    binds = next(finding for finding in fit.findings if finding.code == "fit-binds")
    assert "as wide as the logits" in binds.text()
    # Beside all modules, in the loss, the op says where.
    assert row.bind.layer or row.bind.op in str(fit)
    plain = row_of(fit_of(Narrow(), "4000,64", gpu="t4"))
    assert plain.bind is not None and plain.bind.largest is not None and not plain.bind.largest.logits


def test_a_wide_image_is_no_logits() -> None:
    class Painter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Upsample(size=(1024, 1024))
            self.paint = nn.Conv2d(4, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            image: Tensor = self.paint(self.up(x))
            return image

    fit = memsize.fit(Painter(), (4, 8, 8), batch_size=1000, budget="4GiB", scenarios="fp32", remedies=False)
    (row,) = fit.fit_rows
    assert row.bind is not None and row.bind.largest is not None and row.bind.largest.spec.shape[-1] == 1024
    assert not row.bind.largest.logits


@pytest.mark.parametrize(("alive", "in_pieces"), [(8_500, True), (9_950, False), (10_100, False), (12_000, False)])
def test_free_memory_that_a_request_does_not_fit_into_is_told(alive: int, in_pieces: bool) -> None:
    """Of 10,000 MiB so many are alive, the 500 that are asked for included: what others leave is free in pieces where
    those would fit into all of it together, and it is worth a word.
    """
    held = Bind("backward", "head", "mm", "activation", 500 * MiB, {"activation": alive * MiB})
    row = FitRow("fp32", "fp32", "T4", 10_000 * MiB, "found", size=1, next_size=2, next_peak=99_000 * MiB, bind=held)
    (finding,) = findings_of(FitEvidence((row,), budgets("t4"), "batch"), "fit-binds")
    # 500 MiB are 0.488 GiB.
    free = f"{(10_500 - alive) / 1024:.2f} GiB"
    text = f" {free} are free, but in pieces smaller than the 0.49 GiB requested; expandable segments"
    assert (text in finding.text()) == in_pieces
    assert ("in pieces" in finding.text()) == in_pieces


@pytest.mark.thorough
def test_a_larger_batch_may_fit_where_a_smaller_one_leaves_memory_in_pieces() -> None:
    """Batches that fit on eight and sixteen L4s: expandable segments have no such pieces."""
    options: dict[str, Any] = {"train": "adamw", "gpu": "l4", "gpus": [8, 16], "parallel": "fsdp", "margin": "216MiB"}
    asked = partial(memsize.fit, "notebooks/model.py:Test", "3,64,64", scenarios="amp-fp16", **options)
    plain, expandable = asked(), asked(allocator=AllocatorConfig(expandable_segments=True))
    sizes = [[row.size for row in fit.fit_rows] for fit in (plain, expandable)]
    assert sizes == [[872, 1_166], [1_172, 1_168]]
    told = "memory does not always grow with the size under amp-fp16 on 16 x L4: a smaller size"
    assert [any(note.startswith(told) for note in fit.notes) for fit in (plain, expandable)] == [True, False]


def test_inference_keeps_nothing() -> None:
    trained, inferred = fit_of(Narrow(), "4000,64", gpu="t4"), fit_of(Narrow(), "4000,64", gpu="t4", train=None)
    assert (row_of(trained).size or 0) < (row_of(inferred).size or 0)
    assert inferred.optimizer == ""


def test_what_does_not_depend_on_the_batch_is_too_much() -> None:
    fit = fit_of(Normed(), "256", budget=CONTEXT + 4 * MiB)
    row = row_of(fit)
    # 256·2048 + 2048 + 4096 + 20490 parameters, with gradients and two states: 4·4 bytes each.
    parameters = 256 * 2048 + 2048 + 2 * 2048 + 2048 * 10 + 10
    assert row.status == "none" and row.size is None and row.next_size == 2
    assert row.standing["parameter"] == row.standing["gradient"] == 4 * parameters
    assert row.standing["optimizer state"] == 2 * 4 * parameters
    codes = [finding.code for finding in fit.findings]
    assert codes[0] == "fit-none" and "fit-fixed-cost" in codes and "fit-refused" in codes
    cost = next(finding for finding in fit.findings if finding.code == "fit-fixed-cost")
    assert cost.bytes is not None and cost.bytes >= 4 * 4 * parameters
    assert "more than PyTorch can use" in cost.text()
    refused = next(finding for finding in fit.findings if finding.code == "fit-refused")
    assert "batch 1" in refused.text() and "more than 1 value per channel" in refused.text()
    # The remedies are those of the smallest size that runs.
    assert fit.remedied is not None and fit.remedied.size == 2 and fit.remedied.smaller is None
    assert {"remedy-none", "remedy-enough", "remedy-combination"} & {*codes}


def test_an_endless_fit_has_no_column_for_where_it_ends() -> None:
    fit = fit_of(nn.ReLU(), "4", train=None, scenarios="fp32,int8-weight")
    shown = render(fit, "text", width=100)
    assert "any batch fits" in shown and "mostly" not in shown and "  at" not in shown


def test_a_sequence_has_an_end() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(100, 32), nn.Parameter(torch.zeros(256, 32))
            self.head = nn.Linear(32, 100)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.words(ids) + self.places[: ids.shape[1]])

    fit = fit_of(Positions(), "ids=64:int64", vary="seq_len", batch_size=2, gpu="t4")
    row = row_of(fit)
    assert (row.status, row.size, row.next_size) == ("refused", 256, 257)
    assert row.reason is not None and "256" in row.reason
    assert fit.inputs[0].spec.shape == (2, 64)


def test_a_table_of_positions_is_not_left() -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(100, 32), nn.Embedding(200, 32)

        def forward(self, ids: Tensor) -> Tensor:
            return self.words(ids) + self.places(torch.arange(ids.shape[1]))

    row = row_of(fit_of(Looked(), "ids=64:int64", vary="seq_len", gpu="t4"))
    assert (row.status, row.size, row.next_size) == ("refused", 200, 201)
    assert row.reason is not None and "index 200 is out of range: the table has 200 rows" in row.reason


def test_attention_grows_with_the_square_of_its_sequence() -> None:
    class Scores(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.mT).softmax(-1) @ x

    fit = memsize.fit(Scores(), (64, 16), vary="0:1", scenarios="fp32", budget=CONTEXT + 600 * MiB)
    row = row_of(fit)
    # The scores and their softmax, 4 bytes each, are 8·L² of 600 MiB: L is at most √(75·2^20) = 8,868.
    assert row.status == "found" and row.size is not None and 8000 < row.size <= 8868
    assert len(row.looked) <= MOST_RUNS


def test_an_image_has_two_sides() -> None:
    fit = memsize.fit(
        nn.Conv2d(3, 8, 3, padding=1),
        (3, 32, 32),
        vary="image",
        scenarios="fp32",
        batch_size=2,
        budget=CONTEXT + 374 * MiB,
    )
    row = row_of(fit)
    # Input and output, 2·(3 + 8)·S²·4 bytes of 374 MiB: S is at most √(374·2^20 / 88) = 2,111.
    assert row.status == "found" and row.size is not None and 2000 < row.size <= 2111


def test_inputs_that_disagree_on_a_batch() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.sum() + y.sum()

    fit = memsize.fit(Two(), input_data=(torch.zeros(3, 4), torch.zeros(5)), gpu="t4", scenarios="as-given")
    assert fit.fit_rows[0].status == "fits"
    assert any("no common batch dimension" in note for note in fit.notes)


def test_given_tensors_are_grown() -> None:
    own = RunCache("m", Narrow(), inputs_from_data(torch.zeros(4, 10, 64)), True, parse_vary("0:1"), lambda _: None)
    assert own.input_size == 10
    assert own.run(VARIANT, 25).trace.inputs[0].spec.shape == (4, 25, 64)


def test_a_scenario_that_cannot_be_run() -> None:
    fit = fit_of(Narrow(), "10,64", scenarios="fp32,int4-weight", gpu="t4")
    row = row_of(fit, "int4-weight")
    assert row.status == "unavailable" and row.reason
    with pytest.raises(ForwardError):
        fit_of(Narrow(), "10,63")


def trials_of(scenario: str) -> Callable[[int], Footprint]:
    variant = replace(VARIANT, scenario=SCENARIOS[scenario])
    return lambda size: trials("normed").run(variant, size)


# What it looks like


def made_by_hand() -> Fit:
    """Two scenarios on two GPUs, one of which could not be run, and remedies."""
    t4, a100 = budgets("t4,a100")
    roles = {"activation": 9000 * MiB, "parameter": 100 * MiB}
    held = Bind("backward", "encoder.layers.11.feed_forward.second", "mm", "activation", 50 * MiB, roles)  # type: ignore[arg-type]
    plain = FitRow(
        scenario="fp32",
        title="every floating tensor in float32",
        gpu=t4.name,
        budget=t4.allocator,
        status="found",
        size=167,
        peak=14_224 * MiB,
        next_size=168,
        next_peak=14_336 * MiB,
        per_step=83 * MiB,
        fixed=317 * MiB,
        bind=held,
        looked=(13, 167, 168),
    )
    rows = (
        plain,
        replace(plain, gpu=a100.name, budget=a100.allocator, status="open", size=470, next_size=480),
        replace(plain, scenario="bf16", status="none", size=None, peak=None, next_size=2, refused={1: "too few\nat x"}),
        replace(plain, scenario="bf16", gpu=a100.name, budget=a100.allocator, status="endless", size=2**20, bind=None),
        FitRow("int4-weight", "int4 weights", t4.name, t4.allocator, "unavailable", "nothing is converted"),
        FitRow("int4-weight", "int4 weights", a100.name, a100.allocator, "unavailable", "nothing is converted"),
    )
    remedies = (
        RemedyRow("autocast", "torch.autocast", "rounding", "numbers", "fits", 9000 * MiB, 5224 * MiB),
        RemedyRow("SGD", "plain SGD", "another optimizer", "training", "saves", 14_000 * MiB, 224 * MiB),
        RemedyRow("fused optimizer", "fused=True", "none", "nothing", "no help", 14_224 * MiB, 0),
        RemedyRow("LoRA", "adapters", "only adapters learn", "training", "not here", reason="no linear layer"),
    )
    return Fit(
        model="model.py:Net",
        inputs=(InputTensor("0", TensorSpec("float32", (1, 3, 224, 224)), 602_112),),
        vary="batch",
        budgets=(t4, a100),
        fit_rows=rows,
        optimizer="adamw",
        findings=(Finding("budget", "There is {a}.", {"a": 1}, bytes=1),),
        remedied=Remedied("fp32", t4.name, 168, t4.allocator, 14_336 * MiB, remedies),
        notes=("a note",),
        runs=9,
    )


@pytest.mark.parametrize(("format", "suffix"), [("text", "txt"), ("csv", "csv"), ("html", "html")])
def test_golden(format: str, suffix: str) -> None:
    check(f"fit.{suffix}", render(made_by_hand(), format))


def test_golden_at_a_terminals_width() -> None:
    text = render(made_by_hand(), "text", width=80)
    assert max(map(len, text.splitlines())) <= 80
    check("fit.80.txt", text)


def test_the_same_figures_everywhere(tmp_path: Path) -> None:
    fit = fit_of(Narrow(), "4000,64", budget=CONTEXT + 200 * MiB, scenarios="fp32,bf16")
    data = json.loads(fit.to_json(tmp_path / "fit.json"))
    assert data == json.loads((tmp_path / "fit.json").read_text())
    frame, rows = fit.rows, list(csv.DictReader(io.StringIO(render(fit, "csv"))))
    for place, row in enumerate(fit.fit_rows):
        for name in ("size", "peak", "next_size", "next_peak", "per_step", "fixed"):
            value = getattr(row, name)
            assert value == data["rows"][place][name] == int(rows[place][name]) == frame[name][place]
    assert data["budgets"][0]["allocator"] == 200 * MiB
    assert fit._repr_html_().count("<thead") == 1  # the bars are a table without a head
    assert str(fit) == render(fit, "text").rstrip("\n")
    assert data["runs"] == fit.runs


def test_every_finding_reads_as_a_sentence() -> None:
    fits = [
        fit_of(Narrow(), "4000,64", budget=CONTEXT + 200 * MiB),
        fit_of(Normed(), "256", budget=CONTEXT + 4 * MiB),
        fit_of(Grouped(), "1000,64", gpu="t4", scenarios="fp32,bf16"),
    ]
    for finding in (finding for fit in fits for finding in fit.why()):
        text = finding.text()
        assert text.endswith(".") and not text.endswith("..")
        assert "{" not in text and "None" not in text


# The command


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, folder: None) -> dict[str, object]:
    """The request that the command passes to the API, which answers with a fit made by hand."""
    kept: dict[str, object] = {}

    def fake(request: FitRequest, **options: object) -> Fit:
        kept.update(vars(request))
        return made_by_hand()

    monkeypatch.setattr("memsize.api.fit", fake)
    return kept


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The working folder holds a model.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text("")


def test_the_plain_command(asked: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "model.py:Net", "--input", "3,64,64", "--gpu", "t4"]) == 0
    assert capsys.readouterr().out == render(made_by_hand(), "text")
    assert asked["model"] == ModelRequest("model.py:Net", (parse_input("3,64,64"),))
    assert (asked["gpu"], asked["vary"]) == (Gpu(name="t4"), "batch")
    assert asked["training"] is None and asked["remedies"] is None


def test_every_option_reaches_the_api(asked: dict[str, object], tmp_path: Path) -> None:
    options = "--batch-size 32 --vary 0:1 --budget 10GiB --margin 5% --train sgd --ema --loss mse"
    more = "--mode eval --no-remedies --allocator expandable_segments:True --arg width=64 -s bf16"
    more = f"{more} --gradient-accumulation-steps 2 -o fit.json"
    assert run(["fit", "model.py:Net", "-i", "3,64", *options.split(), *more.split()]) == 0
    assert asked["training"] == Training("sgd", loss="mse", gradient_accumulation_steps=2, ema=True)
    assert asked["gpu"] == Gpu(allocator="expandable_segments:True")
    assert (asked["vary"], asked["budget"], asked["margin"]) == ("0:1", "10GiB", "5%")
    assert asked["remedies"] is False
    specs = (parse_input("3,64"),)
    assert asked["model"] == ModelRequest("model.py:Net", specs, batch_size=32, arguments={"width": 64}, mode="eval")
    assert run(["fit", "model.py:Net", "--inputs", "model.py:make", "--seq-len", "64"]) == 0
    assert asked["model"] == ModelRequest("model.py:Net", source="model.py:make", seq_len=64)
    assert json.loads((tmp_path / "fit.json").read_text())["schema"] == "memsize.fit/1"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--gpu", "t5"], "no GPU 't5'"),
        (["--inputs", "model.py:make"], "not as both"),
        (["--vary", "what"], "cannot read 'what'"),
        (["--budget", "1MiB"], "nothing is left"),
        (["--train", "adamm"], "no optimizer 'adamm'"),
        (["--allocator", "x:1"], "no allocator setting"),
        (["-f", "pdf"], "no format 'pdf'"),
        (["-s", "fp31"], "no scenario 'fp31'"),
    ],
)
def test_what_is_wrong_shows_first(
    folder: None, capsys: pytest.CaptureFixture[str], options: list[str], problem: str
) -> None:
    assert run(["fit", "model.py:Net", "--input", "3,64,64", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and problem in err


def test_the_command_on_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n\ndef net(width=64):\n    return nn.Sequential(nn.Linear(64, width), nn.ReLU(),"
        " nn.Linear(width, 10))\n"
    )
    target = f"{tmp_path / 'net.py'}:net"
    sys.modules.pop("net", None)
    budget = f"{CONTEXT // MiB + 50}MiB"
    assert run(["fit", target, "--input", "64", "--train", "adamw", "--budget", budget, "-s", "fp32", "-f", "csv"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert row["status"] == "found" and int(row["size"]) > 1000
    assert int(row["peak"]) <= 50 * MiB < int(row["next_peak"])


def test_help_loads_no_torch(python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    heavy = ("torch", "pandas", "numpy", "tabulate", "jinja2")
    code = "import sys\nfrom memsize.cli import run\nassert run(['fit', '--help']) == 0\n"
    done = python("-c", f"{code}print(*({set(heavy)} & set(sys.modules)))")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "", done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("how", [[], ["--train", "adamw"], ["--train", "sgd-momentum", "--ema"]])
def test_a_search_does_not_load_the_compiler(warm_python: Python, toy_target: str, how: list[str]) -> None:
    options = ["fit", toy_target, "--input", "3,64,64", "--gpu", "t4", "-s", "fp32,amp-fp16", *how]
    code = f"import sys\nfrom memsize.cli import run\nassert run({options}) == 0\n"
    done = warm_python("-c", f"{code}print(*({{'torch._dynamo', 'sympy', 'torchao'}} & set(sys.modules)))")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "", done.stderr
