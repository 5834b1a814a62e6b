"""What a model is given: nests of every kind, with the dtypes, the sharing and the sizes that they have."""

from __future__ import annotations

import copy
import json
import types
import weakref
from collections import defaultdict, namedtuple
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import memsize
from memsize.errors import ForwardError, InputError
from tests.models import (
    cast_floating,
    inputs_from_data,
    inputs_from_specs,
    map_tensors,
    parse_inputs,
    tensor_bytes,
    tensors_in,
)

Pair = namedtuple("Pair", "left right")


@dataclass
class Derived:
    value: Tensor
    twice: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.twice = self.value * 2


@dataclass(slots=True)
class Slotted:
    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class Frozen:
    left: Tensor
    right: list[Tensor]


class Slots:
    __slots__ = ("left", "right")

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right


class Storage(MutableMapping[str, Tensor]):
    """The tensors of a `Graph`, which know what they belong to, as in torch_geometric."""

    def __init__(self, parent: Graph, **held: Tensor) -> None:
        self._held, self._parent = held, weakref.ref(parent)

    @property
    def parent(self) -> Graph:
        found = self._parent()
        assert found is not None
        return found

    def __getitem__(self, key: str) -> Tensor:
        return self._held[key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        self._held[key] = value

    def __delitem__(self, key: str) -> None:
        del self._held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class Graph:
    """The tensors are two levels down, and a call lists them."""

    def __init__(self, **held: Tensor) -> None:
        self._store = Storage(self, **held)

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._store[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._store.items())

    def __call__(self, *names: str) -> Iterator[Any]:
        yield from self._store.items()

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        return Graph(**copy.deepcopy(dict(self._store), memo))


class Reading(nn.Module):
    """Applies a Linear(16, 8) to the tensors that `pick` finds in its input."""

    def __init__(self, pick: Callable[[Any], list[Tensor]]) -> None:
        super().__init__()
        self.pick, self.body = pick, nn.Linear(16, 8)

    def forward(self, given: Any) -> list[Tensor]:
        return [self.body(tensor) for tensor in self.pick(given)]


def both(given: Any) -> list[Tensor]:
    return [given.left, given.right]


def items(given: Any) -> list[Tensor]:
    return [given["left"], given["right"]]


A, B = torch.randn(4, 16), torch.randn(4, 16)
NESTS: dict[str, tuple[Callable[[Any], list[Tensor]], Any]] = {
    "named tuple": (both, Pair(A, B)),
    "dataclass with a derived field": (lambda given: [given.value, given.twice], Derived(A)),
    "dataclass with slots": (both, Slotted(A, B)),
    "frozen dataclass": (lambda given: [given.left, *given.right], Frozen(A, [B])),
    "object": (both, types.SimpleNamespace(left=A, right=B)),
    "object with slots": (both, Slots(A, B)),
    "graph": (lambda given: both(given._store.parent), Graph(left=A, right=B)),
    "dictionary": (items, {"left": A, "right": B}),
    "dictionary with defaults": (
        lambda given: [given["left"], *given["none"], given["right"]],
        defaultdict(list, left=A, right=B),
    ),
    "set": (list, {A, B}),
    "list in a tuple": (lambda given: [*given[0], given[1]], ([A], B)),
}


@pytest.mark.parametrize("name", NESTS)
def test_a_nest_is_given_counted_and_cast(name: str) -> None:
    pick, data = NESTS[name]
    report = memsize.report(Reading(pick), input_data=(data,), scenarios="fp32,fp16")
    # two float32[4,16] of 256 bytes, and half of that
    assert [(result.status, result.figure("input_bytes")) for result in report.scenario_results] == [
        ("run", 512),
        ("run", 256),
    ]
    assert [tuple(output.spec.shape) for output in report.trace.layers[0].outputs] == [(4, 8)] * 2


@pytest.mark.parametrize("name", NESTS)
def test_a_nest_is_rebuilt_as_what_it_is(name: str) -> None:
    _, data = NESTS[name]
    rebuilt = cast_floating(data, torch.float64)
    assert type(rebuilt) is type(data)
    assert {tensor.dtype for tensor in tensors_in(rebuilt)} == {torch.float64}
    assert {tensor.dtype for tensor in tensors_in(data)} == {torch.float32}


def test_data_that_can_be_called_is_no_function() -> None:
    report = memsize.report(Reading(both), Graph(left=A, right=B), scenarios="fp32,fp16")
    assert [str(each.spec) for each in report.trace.inputs] == ["float32[4,16]"] * 2
    assert [result.figure("input_bytes") for result in report.scenario_results] == [512, 256]


def test_parts_refer_to_the_rebuilt_whole() -> None:
    graph = Graph(left=A)
    rebuilt = map_tensors(lambda tensor: tensor.half(), graph)
    assert rebuilt._store.parent is rebuilt
    assert graph._store.parent is graph and graph.left is A


def test_an_object_without_tensors_is_the_same_object() -> None:
    held = types.SimpleNamespace(name="left")
    assert map_tensors(lambda tensor: tensor.half(), [held])[0] is held


def test_what_holds_itself_is_rebuilt_once() -> None:
    loop: dict[str, Any] = {"left": A}
    loop["self"] = loop
    assert map_tensors(lambda tensor: tensor.half(), loop)["left"].dtype is torch.float16


def test_packed_sequences_anywhere_have_no_batch() -> None:
    packed = pack_sequence([torch.randn(5, 16), torch.randn(3, 16)])
    model = Reading(lambda given: [given[0].data])
    report = memsize.report(model, input_data=([packed],), scenarios="fp32,fp16")
    # 8 rows of 16 float32, and the 5 batch sizes, which stay int64
    assert [result.figure("input_bytes") for result in report.scenario_results] == [
        8 * 16 * 4 + 5 * 8,
        8 * 16 * 2 + 5 * 8,
    ]
    assert not inputs_from_data(([packed],)).resizable


def test_memory_that_inputs_share_counts_once() -> None:
    model = Reading(list)
    assert memsize.report(model, input_data=([A, A],), scenarios="fp32").totals.input_bytes == 256
    assert memsize.report(model, input_data=([A[:2], A[2:]],), scenarios="fp32").totals.input_bytes == 256
    assert memsize.trace(model, input_data=([A, A],), optimizer=None).peak.roles["input"] == 256


def test_an_iterator_is_left_unread() -> None:
    batches = iter([A, B])
    with pytest.raises(InputError, match="read only once"):
        memsize.report(Reading(list), input_data=(batches,))
    assert next(batches) is A


@pytest.mark.filterwarnings("ignore:.*eta state", "ignore:.*deprecated", "ignore:.*beta", "ignore:torch.quantize_per")
@pytest.mark.parametrize("name", ["sparse_coo", "sparse_csr", "quantized"])
def test_inputs_of_several_pieces_count_all_of_them(name: str) -> None:
    held = (
        torch.quantize_per_channel(A, torch.ones(4), torch.zeros(4), 0, torch.qint8)
        if name == "quantized"
        else A.relu()
    )
    held = held if name == "quantized" else held.to_sparse(layout=getattr(torch, name))
    model = Reading(lambda given: [given[0]])
    assert memsize.report(model, input_data=([A, held],), scenarios="fp32").totals.input_bytes == 256 + tensor_bytes(
        held
    )


def test_jagged_tensors_run_in_one_size() -> None:
    jagged = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=torch.jagged)
    report = memsize.report(Reading(lambda given: [given]), input_data=(jagged,), scenarios="fp32,amp-bf16")
    # 8 rows of 16 float32 and 3 offsets; 8 rows of 8 come out
    assert report.totals.input_bytes == 8 * 16 * 4 + 3 * 8
    assert report.totals.output_bytes == 8 * 8 * 4
    assert str(report.trace.inputs[0].spec) == "float32[2,*,16]"
    assert [str(out.spec) for out in report.trace.layers[1].outputs] == ["float32[2,*,8]"]
    assert json.loads(report.to_json())["inputs"][0]["shape"] == [2, None, 16]
    with pytest.raises(InputError, match="dimension 1 has no one size"):
        memsize.fit(Reading(lambda given: [given]), input_data=(jagged,), vary="0:1", budget="2GiB")
    assert [result.status for result in report.scenario_results] == ["run", "run"]


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_strided_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)])
    with pytest.raises(InputError, match="jagged"):
        memsize.report(Reading(lambda given: [given]), input_data=(nested,))


# dtypes


class Sampling(nn.Module):
    """Half-precision weights beside a time in float32, as in diffusion models."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 8).half()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.body(x) * time.cos().half()


def test_inputs_keep_their_dtype_where_the_model_runs_on_them() -> None:
    data = (torch.randn(4, 16).half(), torch.rand(4, 1))
    report = memsize.report(Sampling(), input_data=data, scenarios="as-given")
    assert [str(tensor.spec) for tensor in report.trace.inputs] == ["float16[4,16]", "float32[4,1]"]
    assert not report.remarks
    specs = parse_inputs(["x=16", "time=1:float32"])
    report = memsize.report(Sampling(), input_size=specs, batch_size=4, scenarios="as-given")
    assert [str(tensor.spec) for tensor in report.trace.inputs] == ["float16[4,16]", "float32[4,1]"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_inputs_are_cast_where_the_model_needs_it_and_that_is_said(dtype: torch.dtype) -> None:
    report = memsize.report(nn.Linear(16, 8), input_data=A.to(dtype), scenarios="as-given")
    assert [str(tensor.spec) for tensor in report.trace.inputs] == ["float32[4,16]"]
    assert "cast to float32" in report.remarks[0]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2])
def test_quantized_floats_are_not_cast(dtype: torch.dtype) -> None:
    model = Reading(lambda given: [given[0]])
    held = torch.empty(4, 16, dtype=dtype)
    report = memsize.report(model, input_data=([A, held],), scenarios="fp32,fp16")
    assert [result.figure("input_bytes") for result in report.scenario_results] == [256 + 64, 128 + 64]


@pytest.mark.parametrize("bits", range(1, 8))
def test_integers_of_less_than_a_byte(bits: int) -> None:
    """PyTorch has these dtypes without any kernel, not even to copy them."""
    model = Reading(lambda given: [given[0]])
    for name in (f"int{bits}", f"uint{bits}"):
        held = torch.empty(4, 16, dtype=getattr(torch, name))
        assert memsize.report(model, input_data=([A, held],), scenarios="fp32").totals.input_bytes == 256 + 64
        _, kwargs = inputs_from_specs(parse_inputs([f"codes=16:{name}"]), 2).call()
        assert (kwargs["codes"].dtype, tensor_bytes(kwargs["codes"])) == (getattr(torch, name), 32)


class Texts(nn.Module):
    """A model of texts, as transformers' are: `main_input_name` names its first input."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        return self.embedding(input_ids)


@pytest.mark.parametrize(
    ("text", "dtype"), [("8", "int64"), ("input_ids=8", "int64"), ("8:int32", "int32"), ("8,4:float32", "float32")]
)
def test_token_ids_are_integers(text: str, dtype: str) -> None:
    model = Texts()
    model.embedding = nn.Embedding(10, 4) if "int" in dtype else nn.Identity()
    assert memsize.report(model, text).trace.inputs[0].spec.dtype == dtype


def test_token_ids_with_their_batch_are_refused() -> None:
    """torchinfo's sizes have the batch: (1, 2048) would be one sample of 1 × 2,048 numbers here."""
    with pytest.raises(InputError) as caught:
        memsize.report(Texts(), "1,2048")
    assert str(caught.value) == (
        "input_ids is given without the batch: input_size=2048 and batch_size=1, or 1,2048:int64 for 1 × 2048 "
        "token ids per sample"
    )


def test_an_embedding_of_floats_names_the_option() -> None:
    with pytest.raises(ForwardError, match='an embedding looks up integers: input_size="2048:int64" batch_size=1'):
        memsize.report(nn.Sequential(nn.Embedding(10, 4)), "1,2048")


class Tagged(nn.Module):
    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.words, self.tags, self.dense = nn.Embedding(10, 4), nn.Embedding(3, 4), nn.Linear(6, 4)
        self.mixes = mixes

    def forward(self, words: torch.Tensor, tags: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        looked_up = self.words(words) + nn.functional.embedding(tags, self.tags.weight)
        return looked_up.sum(1) + self.dense(words if self.mixes else dense)


def test_an_embedding_looks_up_integers() -> None:
    """2 texts of 8 words and 8 tags are 2 × 2 × 8 × 8 bytes, 2 × 6 features 48."""
    report = memsize.report(Tagged(), ("words=8", "tags=8", "dense=6"), batch_size=2, train="sgd")
    assert [input.spec.dtype for input in report.trace.inputs] == ["int64", "int64", "float32"]
    assert report.totals.input_bytes == 2 * 2 * 8 * 8 + 2 * 6 * 4
    assert "words, tags: int64, as nn.Embedding needs" in report.trace.notes


@pytest.mark.parametrize("sizes", [("words=6", "tags=6", "dense=6"), ("words=6:float32", "tags=6", "dense=6")])
def test_an_input_that_is_also_multiplied_is_refused_as_it_was(sizes: tuple[str, ...]) -> None:
    with pytest.raises(ForwardError, match="failed in words"):
        memsize.report(Tagged(mixes=True), sizes)
