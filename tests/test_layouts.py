"""Storage layouts, each byte for byte against the library that it describes, and what applying one to a model says."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.nn.utils import prune

import memsize
from memsize.errors import ScenarioError
from memsize.records.trace import StoredTensor
from tests.conftest import Python
from tests.models import GROUP, LAYOUTS, SCENARIOS, Quantized, apply_layout, apply_torchao, stored_tensors, stored_under

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated"),
    pytest.mark.filterwarnings("ignore:.*reduce_range will be deprecated"),
    pytest.mark.filterwarnings("ignore:must run observer before calling calculate_qparams"),
]

WEIGHT_ONLY = ("int8-weight", "fp8-weight", "int4-weight", "nf4")


def twin_of(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to("meta")


def applied(model: nn.Module, name: str) -> tuple[Quantized, dict[str, StoredTensor]]:
    quantized = apply_layout(twin_of(model), LAYOUTS[name])
    return quantized, {row.name: row for row in stored_under(stored_tensors(model), quantized)}


def modelled_bytes(model: nn.Module, name: str) -> int:
    return sum(row.bytes for row in applied(model, name)[1].values())


def stored_bytes(model: nn.Module) -> int:
    return sum(row.bytes for row in stored_tensors(model))


def part_sizes(row: StoredTensor) -> list[tuple[str, str, int]]:
    return [(part.name, str(part.spec), part.bytes) for part in row.parts]


def assert_same_weights(model: nn.Module, name: str, real: nn.Module) -> None:
    """The layout's parameters are the really quantized ones: claim, bytes and every inner tensor."""
    _, rows = applied(model, name)
    really = {row.name: row for row in stored_tensors(real)}
    assert rows.keys() == really.keys()
    for key, row in rows.items():
        told, found = row, really[key]
        assert (told.bytes, told.elements, told.reported_bytes) == (
            found.bytes,
            found.elements,
            found.reported_bytes,
        ), key
        assert (str(told.spec), told.wrapper, part_sizes(told)) == (
            str(found.spec),
            found.wrapper,
            part_sizes(found),
        ), key


class TestTable:
    def test_names_and_scenarios(self) -> None:
        assert {s.layout for s in SCENARIOS.values() if s.layout} == set(LAYOUTS)
        assert all(name == layout.name for name, layout in LAYOUTS.items())

    def test_toy_head(self) -> None:
        # Linear 3364000 → 1: int8 values, one float32 scale, one int8 zero point
        assert [p.bytes for p in LAYOUTS["int8-weight"].weight((1, 3_364_000), "float32")] == [3_364_000, 4, 1]

    @given(st.integers(1, 64), st.integers(1, 40).map(lambda n: n * GROUP), st.sampled_from(["float32", "bfloat16"]))
    def test_parts_are_their_shapes(self, rows: int, columns: int, dtype: str) -> None:
        for layout in LAYOUTS.values():
            parts = layout.weight((rows, columns), dtype)
            assert all(
                p.bytes == torch.Size(p.spec.shape).numel() * getattr(torch, p.spec.dtype).itemsize for p in parts
            )
            # the tables of 4-bit values and of double quantization: 16 and 256 float32
            assert sum(p.bytes for p in parts) < rows * columns * 2 + 26 * (rows + 1) + 64 + 1024


class TestTorchAo:
    """`torch.ao.quantization`, which comes with torch."""

    def dynamic(self, model: nn.Module) -> nn.Module:
        from torch.ao.quantization import quantize_dynamic

        return quantize_dynamic(copy.deepcopy(model))

    @pytest.mark.parametrize(
        "build",
        [
            lambda: nn.Linear(8, 5),
            lambda: nn.Linear(8, 5, bias=False),
            lambda: nn.LSTM(8, 6, 2, bidirectional=True),
            lambda: nn.GRU(8, 6),
            lambda: nn.LSTMCell(8, 6),
            lambda: nn.GRUCell(8, 6),
            lambda: nn.RNNCell(8, 6),
        ],
    )
    def test_dynamic(self, build: Callable[[], nn.Module]) -> None:
        model = nn.Sequential(build())
        assert modelled_bytes(model, "int8-dynamic") == stored_bytes(self.dynamic(model))

    def test_dynamic_leaves_the_rest(self) -> None:
        model = nn.Sequential(
            nn.Linear(4, 4),
            nn.Conv2d(3, 4, 3),
            nn.MultiheadAttention(4, 2),
            nn.RNN(4, 4),
            nn.Embedding(4, 4),
            _Derived(4, 4),
        )
        quantized, rows = applied(model, "int8-dynamic")
        assert set(quantized.replaced) == {"0.weight", "0.bias"}
        assert set(quantized.left) == {"1", "2", "2.out_proj", "3", "4", "5"}
        assert sum(row.bytes for row in rows.values()) == stored_bytes(self.dynamic(model))
        assert (rows["0.weight"].kind, str(rows["0.weight"].spec), rows["0.weight"].bytes) == (
            "packed",
            "qint8[4,4]",
            16,
        )

    @pytest.mark.parametrize("build", [lambda: nn.GRU(4, 4, bias=False), lambda: nn.LSTM(4, 4, proj_size=2)])
    def test_dynamic_refuses_what_the_library_cannot_do(self, build: Callable[[], nn.Module]) -> None:
        with pytest.raises(ScenarioError, match=r"cannot convert (GRU|LSTM) '0'"):
            applied(nn.Sequential(build()), "int8-dynamic")

    def test_tied_weights_come_apart(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(4, 4))
        model[1].weight = model[2].weight = model[0].weight
        _, rows = applied(model, "int8-dynamic")
        assert sum(row.bytes for row in rows.values()) == stored_bytes(self.dynamic(model)) == 2 * (16 + 16) + 64
        assert (rows["2.weight"].bytes, rows["2.weight"].tied_to) == (64, None)

    def test_tied_weights_come_apart_in_a_run_too(self) -> None:
        model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))
        model[1].weight = model[0].weight
        trace = memsize.trace(model, "4:int64", scenario="int8-weight")
        stored = sum(storage.bytes for storage in trace.trace.storages if storage.role == "parameter")
        # The embedding's float32; one byte for each weight of the layer; a scale and a zero point for each row.
        assert stored == 16 * 8 * 4 + (16 * 8 + 16 * 4 + 16)

    def test_tied_bias_stays_shared(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].bias = model[0].bias
        assert modelled_bytes(model, "int8-dynamic") == stored_bytes(self.dynamic(model)) == 16 + 16 + 16


@pytest.fixture(scope="module")
def torchao() -> Any:
    return pytest.importorskip("torchao.quantization")


@pytest.fixture
def plain_int4(torchao: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the GPU library whose kernel quantizes int4, by the shapes that `Int4Tensor` documents for it."""
    from torchao.quantization.quantize_.workflows.int4 import int4_tensor

    def quantize(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, columns = weight.shape
        scales = torch.ones(columns // group, rows)
        return weight.to(torch.int8), scales, torch.zeros_like(scales)

    def pack(values: torch.Tensor) -> torch.Tensor:
        return (values[:, ::2] & 0xF) | (values[:, 1::2] << 4)

    monkeypatch.setattr(int4_tensor, "int4_row_quantize_zp", quantize)
    monkeypatch.setattr(int4_tensor, "pack_int4", pack)


class TestTorchao:
    """torchao's `quantize_` with its own defaults, on CPU layers."""

    def quantize(self, torchao: Any, model: nn.Module, config: str) -> nn.Module:
        real = copy.deepcopy(model)
        torchao.quantize_(real, getattr(torchao, config)(set_inductor_config=False))
        return real

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(
        ("name", "config"), [("int8-weight", "Int8WeightOnlyConfig"), ("fp8-weight", "Float8WeightOnlyConfig")]
    )
    def test_rows(self, torchao: Any, name: str, config: str, dtype: torch.dtype) -> None:
        model = nn.Sequential(
            nn.Linear(48, 5), _Derived(7, 3, bias=False), nn.Conv2d(3, 4, 3), nn.MultiheadAttention(4, 2)
        ).to(dtype)
        assert_same_weights(model, name, self.quantize(torchao, model, config))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.usefixtures("plain_int4")
    def test_int4(self, torchao: Any, dtype: torch.dtype) -> None:
        model = nn.Sequential(nn.Linear(256, 6), nn.Linear(130, 4), nn.Embedding(3, 128)).to(dtype)
        assert_same_weights(model, "int4-weight", self.quantize(torchao, model, "Int4WeightOnlyConfig"))
        quantized, rows = applied(model, "int4-weight")
        # 256·6 / 2 bytes, a scale and a zero point for 6 rows of 2 groups
        assert rows["0.weight"].bytes == 768 + 2 * 12 * dtype.itemsize
        assert quantized.left["1"] == "130 input features are not a multiple of the group of 128"

    def test_head_tied_to_an_embedding_comes_apart(self, torchao: Any) -> None:
        for order in ((0, 1), (1, 0)):
            pair = [nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)]
            pair[1].weight = pair[0].weight
            model = nn.Sequential(*(pair[index] for index in order))
            real = self.quantize(torchao, model, "Int8WeightOnlyConfig")
            assert modelled_bytes(model, "int8-weight") == stored_bytes(real) == 16 * 8 * 4 + (16 * 8 + 16 * 4 + 16)

    def test_the_model_itself(self, torchao: Any) -> None:
        model = nn.Linear(8, 4)
        assert modelled_bytes(model, "int8-weight") == stored_bytes(
            self.quantize(torchao, model, "Int8WeightOnlyConfig")
        )

    def test_toy(self) -> None:
        with torch.device("meta"):
            toy = nn.Sequential(
                nn.Conv2d(3, 300, 3), nn.Conv2d(300, 500, 3), nn.Conv2d(500, 1000, 3), nn.Linear(3_364_000, 1)
            )
        assert stored_bytes(toy) == 36_895_604
        # 36,895,604 − 4 × 3,364,000 + 3,364,000 + 5
        assert modelled_bytes(toy, "int8-weight") == 26_803_609
        # the same but for scale and zero point, which are no tensors there
        assert modelled_bytes(toy, "int8-dynamic") == 23_439_600 + 3_364_000 + 4


class TestBitsandbytes:
    """bitsandbytes' own 4-bit quantization, on the CPU."""

    @pytest.fixture
    def four_bit(self) -> Callable[..., Any]:
        library = pytest.importorskip("bitsandbytes")
        return lambda weight, double: library.nn.Params4bit(
            weight, requires_grad=False, quant_type="nf4", compress_statistics=double
        )._quantize(torch.device("cpu"))

    @pytest.mark.parametrize("shape", [(70, 130), (3, 3), (16, 64)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_nf4(self, four_bit: Callable[..., Any], shape: tuple[int, int], dtype: torch.dtype) -> None:
        model = nn.Linear(*reversed(shape), bias=False, dtype=dtype)
        real = copy.deepcopy(model)
        real._parameters["weight"] = four_bit(model.weight.detach(), False)
        assert_same_weights(model, "nf4", real)

    @pytest.mark.parametrize("shape", [(70, 130), (16, 64), (300, 300)])
    def test_nf4_with_double_quantization(self, four_bit: Callable[..., Any], shape: tuple[int, int]) -> None:
        model = nn.Linear(*reversed(shape), bias=False)
        real = copy.deepcopy(model)
        real._parameters["weight"] = four_bit(model.weight.detach(), True)
        assert modelled_bytes(model, "nf4-double") == stored_bytes(real)

    def test_llm_int8(self) -> None:
        library = pytest.importorskip("bitsandbytes")
        model = nn.Linear(130, 70, bias=False)
        values, absmax, _ = library.functional.int8_vectorwise_quant(model.weight.detach().half())
        assert modelled_bytes(model, "int8") == values.nbytes + absmax.nbytes

    def test_double_quantization_is_read(self, four_bit: Callable[..., Any]) -> None:
        model = nn.Module()
        model.register_parameter("weight", four_bit(torch.randn(70, 130), True))
        (row,) = stored_tensors(model)
        # 9,100 half bytes, 143 absmax bytes, 16 codes, an offset, and one float32 absmax and 256 codes of theirs
        assert row.bytes == 4550 + 143 + 64 + 4 + 4 + 1024


class TestNf4Arithmetic:
    def test_odd_sizes_round_up(self) -> None:
        # 9 elements: 5 bytes, one block, 16 codes
        assert [part.bytes for part in LAYOUTS["nf4"].weight((3, 3), "float32")] == [5, 4, 64]


class TestApply:
    def test_freezes_what_it_replaces(self) -> None:
        twin = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(1, 1, 1)).to("meta")
        apply_layout(twin, LAYOUTS["int8-weight"])
        frozen = [name for name, parameter in twin.named_parameters() if not parameter.requires_grad]
        assert frozen == ["0.weight"]

    def test_a_tied_embedding_still_learns(self) -> None:
        twin = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4)).to("meta")
        twin[1].weight = twin[0].weight
        apply_layout(twin, LAYOUTS["int8-weight"])
        assert twin[0].weight.requires_grad
        assert not twin[1].weight.requires_grad

    def test_an_lstm_still_runs(self) -> None:
        twin = nn.Sequential(nn.LSTM(4, 4)).to("meta")
        apply_layout(twin, LAYOUTS["int8-dynamic"])
        output, _ = twin(torch.zeros(2, 1, 4, device="meta"))
        assert not output.requires_grad

    @pytest.mark.parametrize("name", WEIGHT_ONLY)
    def test_nothing_to_convert(self, name: str) -> None:
        with pytest.raises(ScenarioError, match=r"converts Linear; this model has none$"):
            applied(nn.Sequential(nn.Conv2d(3, 4, 3)), name)

    def test_nothing_to_convert_dynamically(self) -> None:
        with pytest.raises(ScenarioError, match=r"converts Linear, LSTM, GRU and their cells; this model has none$"):
            applied(nn.Sequential(nn.Conv2d(3, 4, 3)), "int8-dynamic")

    def test_nothing_of_a_shape_that_suits(self) -> None:
        with pytest.raises(ScenarioError, match="10 input features are not a multiple of the group of 128"):
            applied(nn.Sequential(nn.Linear(10, 4)), "int4-weight")

    def test_a_model_that_is_a_layer(self) -> None:
        with pytest.raises(ScenarioError, match="inside a model, not the model itself"):
            applied(nn.Linear(10, 4), "int8-dynamic")

    def test_computed_weights_are_left_alone(self) -> None:
        pruned = prune.identity(nn.Linear(4, 4), "weight")
        normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        quantized = apply_layout(nn.Sequential(nn.Linear(4, 4), pruned, normed), LAYOUTS["int8-weight"])
        assert set(quantized.replaced) == {"0.weight"}
        assert quantized.left["1"] == quantized.left["2"]
        assert quantized.left["1"].startswith("its weight is computed from other tensors")

    def test_quantized_already(self) -> None:
        from torch.ao.quantization import quantize_dynamic

        model = quantize_dynamic(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        with pytest.raises(ScenarioError, match=r"converted already: 0.weight is torch.ao LinearPackedParams"):
            apply_layout(model, LAYOUTS["int8-weight"])


class TestApplyTorchao:
    def test_reads_back_what_the_library_did(self, torchao: Any) -> None:
        twin = nn.Sequential(nn.Linear(48, 5), nn.Conv2d(3, 4, 3)).to("meta")
        precision = torch.get_float32_matmul_precision()
        quantized = apply_torchao(twin, "Int8WeightOnlyConfig")
        assert {name: sum(p.bytes for p in parts) for name, parts in quantized.replaced.items()} == {
            "0.weight": 240 + 25
        }
        assert set(quantized.left) == {"1"}
        assert stored_bytes(twin) == 240 + 25 + 20 + 4 * 28 * 4
        assert torch.get_float32_matmul_precision() == precision

    def test_four_bit_values_in_bytes(self, torchao: Any) -> None:
        twin = nn.Sequential(nn.Linear(64, 4, bias=False)).to("meta")
        apply_torchao(twin, "IntxWeightOnlyConfig")
        (row,) = stored_tensors(twin)
        assert row.parts[0].bytes == 256, "a byte a value"
        assert row.wrapper == "torchao IntxUnpackedToInt8Tensor"

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("Int8WeightOnly", "did you mean Int8WeightOnlyConfig"),
            ("Int4WeightOnlyConfig", "cannot apply Int4WeightOnlyConfig to this model: .*mslk"),
            ("quantize_", "torchao has no 'quantize_'"),
        ],
    )
    def test_errors(self, torchao: Any, name: str, message: str) -> None:
        with pytest.raises(ScenarioError, match=message):
            apply_torchao(nn.Sequential(nn.Linear(128, 4)).to("meta"), name)

    def test_nothing_to_convert(self, torchao: Any) -> None:
        with pytest.raises(ScenarioError, match="changed nothing"):
            apply_torchao(nn.Sequential(nn.Conv2d(3, 4, 3)).to("meta"), "Int8WeightOnlyConfig")

    def test_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torchao.quantization", None)
        with pytest.raises(ScenarioError, match=r"pip install memsize\[quant\]"):
            apply_torchao(nn.Sequential(nn.Linear(4, 4)), "Int8WeightOnlyConfig")


def test_importing_the_layouts_loads_no_library(warm_python: Python) -> None:
    code = (
        "import sys, memsize.precision.quantized, memsize.model.tensor_storage\n"
        "heavy = {'torchao', 'bitsandbytes', 'torch._dynamo', 'sympy', 'torch.fx.experimental.symbolic_shapes'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert warm_python("-c", code).stdout.strip() == "[]"


class _Derived(nn.Linear):
    """A subclass: torch.ao looks at the exact class and leaves it alone, torchao does not."""


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
