"""What the runs of one report share, and that none sees what another did to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import memsize
from memsize import Training
from memsize.tracing.run import Setup
from tests import test_torchinfo_cases as structures
from tests.known_values import constant_of
from tests.models import (
    SCENARIOS,
    MetaCopier,
    Small,
    Tied,
    apply_scenario,
    in_mode,
    inputs_from_data,
    meta_copy,
    stored_tensors,
)
from tests.records import totals
from tests.workloads import Forward, ReportBuilder, Runner, counts_without_running, kept_for_backward, torchinfo_reading

ROW, IMAGE, IDS = torch.zeros(4, 8), torch.zeros(2, 3, 32, 32), torch.zeros(1, 6, dtype=torch.int64)


class Restless(nn.Module):
    """Remembers every forward, in each of the ways that there are, and does more the more it remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("view", self.steps[1:])
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.calls, self.seen, self.state = 0, [1], {}  # type: ignore[var-annotated]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(self.seen))
        self.state["last"] = self.calls
        self.steps += 1
        with torch.no_grad():
            self.scale.add_(1)
            self.layer.weight.mul_(2)
        self.norm.register_forward_hook(lambda *_: None)
        if self.layer.weight.requires_grad:
            self.layer.weight.register_hook(lambda gradient: gradient)
        self.norm.eps *= 2
        times = self.calls + len(self.seen) + int(self.view[0]) + int(self.scale) + int(self.norm.num_batches_tracked)
        for _ in range(times - 4):
            x = self.norm(self.layer(x))
        self.layer.weight.requires_grad_(False)
        self.extra = torch.zeros(7, device=x.device)
        return x


# -- the copies ------------------------------------------------------------------------------------------------------


def shared_views() -> nn.Module:
    """A buffer that is part of another one, met before it, and a parameter under two names."""
    model = Tied()
    whole = torch.arange(6)
    model.register_buffer("part", whole[2:4])
    model.register_buffer("whole", whole)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "restless": Restless,
    "conv": Small,
    "tied and viewed": shared_views,
    "recurrent": lambda: nn.LSTM(4, 8, 2),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d()),
    "frozen": lambda: nn.Linear(4, 4).requires_grad_(False),
    "on meta": lambda: nn.Linear(4, 4, device="meta"),
    "half": lambda: nn.Linear(4, 4).half(),
}


def things(module: nn.Module) -> set[int]:
    """The ids of everything in a copy that a run could change."""
    held: list[Any] = [*module.modules(), *module.parameters(), *module.buffers()]
    held += [value for each in module.modules() for value in vars(each).values() if isinstance(value, (dict, list))]
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if not nn.parameter.is_lazy(tensor)]
    values = map(constant_of, tensors)
    return set(map(id, held)) | {value.untyped_storage()._cdata for value in values if value is not None}


def facts(module: nn.Module) -> list[Any]:
    """What a run could find out about a copy's tensors."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    named = [(name, tensor) for name, tensor in named if not nn.parameter.is_lazy(tensor)]
    values = [(name, constant_of(tensor)) for name, tensor in named]
    flags = [(n, type(t), t.dtype, t.requires_grad, t.device.type, t.is_leaf, t._is_view()) for n, t in named]
    return [stored_tensors(module), flags, [(n, None if value is None else value.tolist()) for n, value in values]]


@pytest.mark.parametrize("name", MODELS)
def test_every_copy_is_the_first(name: str) -> None:
    model = MODELS[name]()
    copier = MetaCopier(model)
    first, second, third = copier.copy(), copier.copy(), copier.copy()
    assert facts(first) == facts(second) == facts(third) == facts(meta_copy(model))
    assert not things(first) & things(second) and not things(second) & things(third)
    assert not (things(first) | things(second)) & things(model)


def test_a_copy_without_some_modules_keeps_what_others_hold_too() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    model[0][1] = model[1][1]
    copied = MetaCopier(model).copy([model[1]])
    assert [name for name, _ in copied.named_modules()] == ["", "0", "0.0", "0.1", "1", "2", "2.0", "2.1"]
    assert [type(child) for child in copied] == [nn.Sequential, nn.Module, nn.Sequential]
    assert type(copied[0][1]) is nn.ReLU and copied[0][1] is not model[0][1]
    assert sum(parameter.numel() for parameter in copied.parameters()) == 2 * (4 * 4 + 4)


def test_copies_keep_their_own_ties_and_views() -> None:
    copier = MetaCopier(shared_views())
    copier.copy()
    copied: Any = copier.copy()
    assert copied.head.weight is copied.embed.weight
    assert copied.part.untyped_storage()._cdata == copied.whole.untyped_storage()._cdata
    values = constant_of(copied.whole), constant_of(copied.part)
    assert values[0] is not None and values[1] is not None
    values[0][2] = 9
    assert values[1][0] == 9


def test_a_copy_goes_with_its_last_user_though_the_collector_is_paused() -> None:
    import gc
    import weakref

    copier = MetaCopier(Small())
    gc.disable()
    try:
        gone = [weakref.ref(copier.copy()) for _ in range(2)]
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


# -- scenarios --------------------------------------------------------------------------------------------------------


def builder(model: nn.Module, value: Any) -> ReportBuilder:
    return ReportBuilder(Runner("m", model, inputs_from_data(value), True))


@pytest.mark.parametrize(("build", "value"), [(Restless, ROW), (Small, IMAGE), (Tied, IDS)])
def test_no_scenario_sees_that_others_ran(build: Callable[[], nn.Module], value: Tensor) -> None:
    names = ("as-given", "fp16", "amp-bf16", "int8-weight", "apex-O2", "fp32")
    model = build()
    alone = {name: builder(model, value).trace(SCENARIOS[name]) for name in names}
    for order in itertools.islice(itertools.permutations(names), 0, None, 101):
        together = builder(model, value)
        assert {name: together.trace(SCENARIOS[name]) for name in order} == {name: alone[name] for name in order}
    report = memsize.report(model, input_data=value, scenarios="amp-bf16,fp16,fp32")
    shown = {result.name: replace(result.trace, model="m") for result in report.scenario_results if result.trace}
    assert shown == {name: alone[name] for name in ("amp-bf16", "fp16", "fp32")}


def test_findings_come_in_the_order_of_the_scenarios_whichever_ran_first() -> None:
    names = ("int8-dynamic", "int8-weight", "fp8-weight")
    in_order, reverse = builder(Small(), IMAGE), builder(Small(), IMAGE)
    for name in reversed(names):
        reverse.trace(SCENARIOS[name])
    scenarios = tuple(SCENARIOS[name] for name in names)
    expected = [finding.text() for finding in in_order.build(scenarios, default=False).findings]
    assert [finding.text() for finding in reverse.build(scenarios, default=False).findings] == expected


def test_a_model_that_remembers_is_left_as_it_was() -> None:
    model = Restless()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    memsize.report(model, input_data=ROW)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert (model.calls, model.seen, model.state, model.norm.eps) == (0, [1], {}, 1e-5)
    assert not hasattr(model, "extra") and not model.norm._forward_hooks and model.layer.weight.requires_grad


@pytest.mark.parametrize("scenario", ["fp32", "fp16", "amp-bf16", "int8-weight"])
@pytest.mark.parametrize(("build", "value"), [(Restless, ROW), (Small, IMAGE), (Tied, IDS)])
def test_a_run_without_tables_keeps_what_one_with_them_does(
    build: Callable[[], nn.Module], value: Tensor, scenario: str
) -> None:
    ours = builder(build(), value)
    setup = ours.runner.setup(SCENARIOS[scenario])
    assert kept_for_backward(setup) == totals(ours.trace(SCENARIOS[scenario])).saved_bytes


def test_what_a_remedy_adds_is_stored_in_its_own_runs_only() -> None:
    """The fits of one question share a runner, and edit its copies."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    plain = builder(model, ROW)
    edited = plain.runner.setup(SCENARIOS["fp32"])
    edited.model.register_parameter("added", nn.Parameter(torch.zeros(3, device="meta")))
    assert "added" in {tensor.name for tensor in Forward().run(edited).tensors}
    assert "added" not in {tensor.name for tensor in plain.trace(SCENARIOS["fp32"]).tensors}
    edited = plain.runner.setup(SCENARIOS["fp32"])
    edited.model.register_parameter("added", nn.Parameter(torch.zeros(3, device="meta")))
    assert "added" in {tensor.name for tensor in Forward().run(edited).tensors}


class CastsItself(nn.Module):
    """Casts a tensor that it has not registered, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.angles = torch.zeros(5, dtype=torch.float64)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.angles = fn(self.angles)
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_a_cast_that_changes_no_parameter_is_made_where_a_module_has_its_own() -> None:
    copied: Any = apply_scenario(meta_copy(nn.Sequential(CastsItself())), SCENARIOS["fp32"]).model
    assert copied[0].angles.dtype is torch.float32
    traces = builder(CastsItself(), ROW)
    sizes = {name: totals(traces.trace(SCENARIOS[name])).attribute_bytes for name in ("as-given", "fp32", "amp-bf16")}
    assert sizes == {"as-given": 40, "fp32": 20, "amp-bf16": 20}


# -- torchinfo's reading ----------------------------------------------------------------------------------------------


class Calling(nn.Module):
    """A block of two layers and a head, called as `how` does it."""

    def __init__(self, how: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
        self.head = nn.Linear(8, 8)
        self.how = how

    def forward(self, x: Tensor) -> Any:
        return self.how(self, x)


def second_time(model: Any, x: Tensor) -> Tensor:
    """The block leaves its second layer out at first."""
    layers = model.block._modules
    second = layers.pop("1")
    x = model.block(x)
    layers["1"] = second
    return model.head(model.block(x))


PLAIN: dict[str, tuple[Callable[[], nn.Module], Tensor, bool]] = {
    "each once": (lambda: Calling(lambda m, x: m.head(m.block(x))), ROW, True),
    "one twice": (lambda: Calling(lambda m, x: m.head(m.block(m.block(x)))), ROW, True),
    "in another order": (lambda: Calling(lambda m, x: m.block(m.head(x))), ROW, True),
    "one never": (lambda: Calling(lambda m, x: m.block(x)), ROW, False),
    "one from outside": (lambda: Calling(lambda m, x: m.head(m.block[0](x)) + m.block(x)), ROW, False),
    "only from outside": (lambda: Calling(lambda m, x: m.head(m.block[1](m.block[0](x)))), ROW, False),
    "one in a second call": (lambda: Calling(second_time), ROW, False),
    "a number out": (lambda: Calling(lambda m, x: m.head(m.block(x)).sum()), ROW, False),
    "a tuple out": (lambda: Calling(lambda m, x: (m.head(m.block(x)),)), ROW, False),
    "by keyword": (lambda: Calling(lambda m, x: m.head(input=m.block(x))), ROW, False),
    "registered twice": (lambda: nn.Sequential(layer := nn.Linear(8, 8), layer), ROW, False),
    "tied": (Tied, IDS, True),
    "conv": (Small, IMAGE, True),
    "pruned": (lambda: nn.Sequential(prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5)), ROW, True),
}
"""Models, their inputs, and whether torchinfo need not run them."""


def heard(model: nn.Module, value: Tensor) -> tuple[Any, Any]:
    """The calls of one forward, and its arguments."""
    found: list[Any] = []
    call = inputs_from_data(value).call()
    Forward().run(Setup("m", "as-given", meta_copy(model), call, True, listener=found.append))
    return found[0], call


@pytest.mark.parametrize("name", PLAIN)
def test_torchinfo_says_the_same_of_what_it_need_not_run(name: str) -> None:
    build, value, expected = PLAIN[name]
    model = build()
    calls, call = heard(model, value)
    assert counts_without_running(calls) is expected
    run = torchinfo_reading(in_mode(meta_copy(model), True), call)
    if expected:
        assert torchinfo_reading(calls.seen[0].module, ((), {})) == run
    report = builder(model, value).build((SCENARIOS["fp32"],), default=False)
    assert report.scenario_results
    ours = builder(model, value)
    ours.trace(SCENARIOS["as-given"])
    assert ours.readings() == (() if run is None else (run,))


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*is not supported in Python 3.14", "ignore:.*enable_nested")
@pytest.mark.parametrize("name", structures.CASES)
def test_torchinfo_says_the_same_of_every_structure(name: str) -> None:
    build, inputs = structures.CASES[name]
    model = build()
    ours = builder(model, inputs)
    ours.trace(SCENARIOS["as-given"])
    run = torchinfo_reading(in_mode(meta_copy(model), True), ours.runner.inputs.call(floating=torch.float32))
    assert ours.readings() == (() if run is None else (run,))


class Encoder(nn.Module):
    """A deep encoder, whose attention uses a layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(40))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_torchinfo_reads_a_deep_model_as_it_would() -> None:
    model, value = Encoder(), torch.zeros(2, 5, 8)
    ours = ReportBuilder(Runner("m", model, inputs_from_data(value), True), Training("adamw"))
    assert ours.trace(SCENARIOS["as-given"]).extended_from
    run = torchinfo_reading(in_mode(meta_copy(model), True), ours.runner.inputs.call())
    assert run is not None and ours.readings() == (run,)


def test_where_torchinfo_would_be_wrong_without_running() -> None:
    model = Calling(lambda m, x: m.head(m.block[0](x)) + m.block(x))
    _, call = heard(model, ROW)
    run, registered = torchinfo_reading(meta_copy(model), call), torchinfo_reading(meta_copy(model), ((), {}))
    assert run is not None and registered is not None
    # It meets a layer of 8·8 + 8 before the block that holds it, and counts it once more with the block.
    assert (run.parameters, registered.parameters) == (280, 208)
