"""The twin is the model in everything but its memory, and nothing that it does reaches the model."""

from __future__ import annotations

import functools
import threading
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import memsize
from tests.known_values import constant_of, diagonals_of, filled
from tests.models import MetaDispatchMode, meta_copy, resized, stored_tensors


class Box:
    """Something that cannot be copied as a whole."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.seen: list[Any] = []
        self.weight = torch.randn(3)


class Held(nn.Module):
    """A layer, and whatever a test hangs on it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


# -- functions that hold on to the model ------------------------------------------------------------------------------


def with_replaced_forward() -> nn.Module:
    layer = nn.BatchNorm1d(4)
    original = layer.forward
    layer.forward = lambda x: original(x) * 2
    return nn.Sequential(layer)


def with_a_bound_function() -> nn.Module:
    layer = nn.Linear(4, 3)
    layer.forward = types.MethodType(lambda self, x: F.linear(x, self.weight) * 2, layer)
    return nn.Sequential(layer)


def with_a_partial() -> nn.Module:
    model = Held()
    model.forward = functools.partial(Held.forward, model)
    return model


def with_functions_in_a_table() -> nn.Module:
    model = Held()
    model.table = {"first": lambda x: model.layer(x)}
    model.forward = lambda x: model.table["first"](x)
    return model


def with_a_default() -> nn.Module:
    model = Held()

    def forward(x: Tensor, layer: nn.Module = model.layer, *, again: nn.Module = model.layer) -> Tensor:
        return layer(x) + again(x)

    model.forward = forward
    return model


def with_a_hook() -> nn.Module:
    model = Held(seen=[])
    seen = model.seen
    model.layer.register_forward_hook(lambda module, args, output: seen.append(output))
    return model


def compiled_by_torch() -> nn.Module:
    model = Held()
    model.forward = torch.compile(model.forward)
    return model


def with_an_unregistered_layer() -> nn.Module:
    model, inner = Held(), nn.Linear(4, 3)
    model.forward = lambda x: inner(x)
    return model


HOLDING: dict[str, Callable[[], nn.Module]] = {
    "replaced forward": with_replaced_forward,
    "bound function": with_a_bound_function,
    "partial": with_a_partial,
    "functions in a table": with_functions_in_a_table,
    "defaults": with_a_default,
    "hook": with_a_hook,
    "compiled": compiled_by_torch,
    "unregistered layer": with_an_unregistered_layer,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("name", HOLDING)
def test_functions_of_the_twin_use_the_twin(name: str) -> None:
    model = HOLDING[name]()
    called: list[str] = []
    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, path=path: called.append(path))
    twin = meta_copy(model)
    for module in twin.modules():
        module._forward_pre_hooks.clear()
    result = twin(torch.empty(2, 4, device="meta"))
    assert result.is_meta
    assert called == []
    assert not getattr(model, "seen", [])


def test_functions_keep_sharing_what_they_assign() -> None:
    count = 0

    def add() -> None:
        nonlocal count
        count += 1

    def read() -> int:
        return count

    twin: Any = meta_copy(Held(add=add, read=read))
    twin.add()
    assert (twin.read(), read(), count) == (1, 0, 0)


def test_a_function_that_holds_itself_is_copied_once() -> None:
    def again(x: Tensor, depth: int = 2) -> Tensor:
        return again(x, depth - 1) if depth else layer(x)

    model = Held(again=again)
    layer = model.layer
    twin: Any = meta_copy(model)
    assert twin.again(torch.empty(1, 4, device="meta")).is_meta


def test_plain_functions_are_shared() -> None:
    twin: Any = meta_copy(Held(activation=F.relu, name=str.upper))
    assert twin.activation is F.relu
    assert twin.name is str.upper


# -- objects ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_copied_is_shared_and_nothing_around_it() -> None:
    box = Box()
    model = Held(box=box, again=box, table=defaultdict(list, {"boxes": [box]}))
    twin: Any = meta_copy(model)
    assert twin.box is twin.again is twin.table["boxes"][0]
    assert twin.box is not box
    assert twin.box.lock is box.lock
    assert twin.box.weight.is_meta
    twin.box.seen.append(1)
    twin.table["more"].append(2)
    assert not box.seen
    assert "more" not in model.table


def test_random_generators_are_the_twins_own() -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    twin: Any = meta_copy(Held(generator=generator))
    torch.rand(3, generator=twin.generator)
    assert torch.equal(generator.get_state(), before)


def test_inputs_of_every_kind() -> None:
    packed = pack_sequence([torch.randn(3, 5), torch.randn(1, 5)])
    copied = meta_copy({"packed": packed, "boxes": [{"labels": torch.tensor([1, 2])}], "size": (3, 4)})
    assert isinstance(copied["packed"], PackedSequence)
    assert copied["packed"].data.is_meta
    assert copied["packed"].batch_sizes.tolist() == [2, 1, 1]
    labels = constant_of(copied["boxes"][0]["labels"])
    assert labels is not None and labels.tolist() == [1, 2]
    again = constant_of(meta_copy(copied)["boxes"][0]["labels"])
    assert again is not None and again.tolist() == [1, 2]


# -- tensors ----------------------------------------------------------------------------------------------------------


def sparse(layout: torch.layout) -> Tensor:
    eye = torch.eye(4)
    return eye.to_sparse_bsr((2, 2)) if layout is torch.sparse_bsr else eye.to_sparse(layout=layout)


@pytest.mark.filterwarnings(
    "ignore:Sparse", "ignore:.*beta state", "ignore:torch.quantize_per", "ignore:.*deprecated", "ignore:.*nested"
)
@pytest.mark.parametrize("name", ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "quantized", "nested"])
def test_the_twin_stores_the_same(name: str) -> None:
    model = Held()
    if name == "quantized":
        held = torch.quantize_per_channel(torch.randn(4, 4), torch.ones(4), torch.zeros(4), 0, torch.qint8)
    elif name == "nested":
        held = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    else:
        held = sparse(getattr(torch, name))
    model.register_buffer("held", held)
    ours = [(row.name, row.bytes, row.parts) for row in stored_tensors(meta_copy(model))]
    assert ours == [(row.name, row.bytes, row.parts) for row in stored_tensors(model)]


def test_numbers_that_models_look_at_stay_known() -> None:
    model = Held(scale=nn.Parameter(torch.tensor(2.5)), norm=nn.BatchNorm1d(3))
    model.register_buffer("anchors", torch.tensor([1.5, 2.5]))
    model.register_buffer("steps", torch.arange(6))
    model.register_buffer("later", model.steps[2:])
    twin: Any = meta_copy(model)
    assert [constant_of(tensor).tolist() for tensor in (twin.scale, twin.anchors, twin.later)] == [
        2.5,
        [1.5, 2.5],
        [2, 3, 4, 5],
    ]
    assert constant_of(twin.layer.weight) is constant_of(twin.norm.running_mean) is None
    assert constant_of(twin.half().scale).dtype is torch.float16
    constant_of(twin.steps)[3] = 9
    assert constant_of(twin.later)[1] == 9
    assert model.steps.tolist() == list(range(6))


def test_a_mask_of_any_size_stays_known() -> None:
    """By its diagonals: a causal mask and its copies, but no other matrix, and not after a write."""
    causal = nn.Transformer.generate_square_subsequent_mask(64)
    model = Held(mask=causal, again=[causal], noise=torch.randn(64, 64), wide=torch.zeros(40, 64))
    twin: Any = meta_copy(model)
    other: Any = meta_copy(twin)
    for mask in (twin.mask, twin.again[0], other.mask):
        diagonals = diagonals_of(mask)
        assert diagonals is not None and torch.equal(filled(diagonals, mask.shape), causal)
    assert twin.mask is twin.again[0]
    assert diagonals_of(twin.noise) is diagonals_of(twin.wide) is None
    with MetaDispatchMode():
        twin.mask[0] = 1
    assert diagonals_of(twin.mask) is None and diagonals_of(other.mask) is not None


@pytest.mark.parametrize("scenario", ["fp32", "fp16", "amp-bf16"])
def test_an_encoder_can_look_at_its_large_mask(scenario: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(64))

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.encoder(x, mask=self.mask if mask is None else mask)

    x = torch.zeros(2, 64, 8)
    for given in ({}, {"mask": nn.Transformer.generate_square_subsequent_mask(64)}):
        traced = memsize.trace(Net(), args=(x,), kwargs=given, scenario=scenario, optimizer=None)
        assert not traced.assumptions


class Marked(nn.Parameter):
    """A library's own kind of parameter."""


def test_parameters_keep_their_class_and_what_hangs_on_them() -> None:
    model = Held()
    model.layer.weight = Marked(torch.randn(3, 4))
    model.layer.weight.state = {"absmax": torch.randn(2)}
    twin: Any = meta_copy(model)
    assert type(twin.layer.weight) is Marked
    assert twin.layer.weight.state["absmax"].is_meta
    assert model.layer.weight.state["absmax"].device.type == "cpu"


# -- wrappers ---------------------------------------------------------------------------------------------------------


def test_data_parallel_hands_everything_to_the_one_module() -> None:
    model = nn.DataParallel(Held())
    model.device_ids = [0, 1]
    twin: Any = meta_copy(model)
    assert twin(torch.empty(2, 4, device="meta")).is_meta
    assert model.device_ids == [0, 1]


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*deprecated")
def test_scripted_modules_lose_their_memory_too() -> None:
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))), nn.ReLU())
    twin = meta_copy(model)
    assert all(tensor.is_meta for tensor in (*twin.parameters(), *twin.buffers()))
    assert twin(torch.empty(2, 4, device="meta")).shape == (2, 3)
    report = memsize.report(model, (4,), batch_size=2, scenarios="fp32,amp-bf16")
    assert [result.status for result in report.scenario_results] == ["run", "run"]
    # Linear 4·3 + 3 = 15 and BatchNorm 3 + 3 = 6 parameters
    assert report.trace.layers[0].calls == 1
    assert sum(layer.parameters for layer in report.trace.layers) == 21


def test_a_large_mask_that_hides_nothing_is_known_at_any_size() -> None:
    mask = torch.ones(8, 40_000, dtype=torch.int64)
    copied, view = meta_copy((mask, mask[:, :4]))
    for known in (copied, meta_copy(copied), resized(copied, [1], 50_000)):
        value = constant_of(known)
        assert value is not None
        assert value.shape == known.shape
        assert value.untyped_storage().nbytes() == 8
        assert torch.equal(value, torch.ones(known.shape, dtype=torch.int64))
    mask[0, 0] = 0
    assert constant_of(meta_copy(mask)) is None
    with MetaDispatchMode():
        kept = copied[:, torch.arange(39_999, device="meta")]
        assert (kept.bool().sum() == 8 * 39_999).item()
        view.zero_()
        assert constant_of(copied) is None
