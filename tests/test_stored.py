"""Stored bytes of every kind of tensor, against arithmetic and against what PyTorch's own storages say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn.utils import parametrizations, prune

from memsize.records.trace import StoredTensor
from tests.models import storage_key, stored_tensors, tensor_bytes, wrapper_name

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated"),
    pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
]


def by_name(model: nn.Module) -> dict[str, StoredTensor]:
    rows = stored_tensors(model)
    named = {row.name: row for row in rows}
    assert len(named) == len(rows), "names are unique"
    return named


def total(model: nn.Module) -> int:
    return sum(row.bytes for row in stored_tensors(model))


def elements(model: nn.Module) -> int:
    return sum(row.elements for row in stored_tensors(model) if row.kind == "parameter" and row.tied_to is None)


def holding(**attributes: Any) -> nn.Module:
    model = nn.Module()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


class TestTensorBytes:
    @pytest.mark.parametrize(
        ("tensor", "expected"),
        [
            (torch.zeros(3, 5), 60),
            (torch.zeros(3, 5, dtype=torch.bfloat16), 30),
            (torch.zeros(3, dtype=torch.complex64), 24),
            (torch.zeros(3, dtype=torch.complex64).conj(), 24),
            (torch.zeros(6, dtype=torch.uint4), 6),
            (torch.empty(7, dtype=torch.float64, device="meta"), 56),
            (torch.ones(5).expand(300, 5), 20),
            (torch.ones(100)[:2], 400),
            (torch.zeros(0), 0),
        ],
    )
    def test_dense(self, tensor: torch.Tensor, expected: int) -> None:
        assert tensor_bytes(tensor) == expected

    def test_quantized(self) -> None:
        values = torch.ones(4, 6)
        assert tensor_bytes(torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)) == 24
        channels = torch.quantize_per_channel(values, torch.ones(4), torch.zeros(4, dtype=torch.int64), 0, torch.qint8)
        assert tensor_bytes(channels) == 24 + 4 * 8 + 4 * 8  # int8, scales float64, zero points int64

    # torch 2.11 gives this advice even where the checks are asked for.
    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")
    def test_sparse(self) -> None:
        assert tensor_bytes(torch.eye(4).to_sparse()) == 2 * 4 * 8 + 4 * 4  # indices int64[2,4], values float32[4]
        compressed, plain, values = torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2)
        blocks = torch.ones(2, 3, 3)
        for tensor in (
            torch.sparse_csr_tensor(compressed, plain, values, (2, 2), check_invariants=True),
            torch.sparse_csc_tensor(compressed, plain, values, (2, 2), check_invariants=True),
        ):
            assert tensor_bytes(tensor) == 3 * 8 + 2 * 8 + 2 * 4
        for tensor in (
            torch.sparse_bsr_tensor(compressed, plain, blocks, (6, 6), check_invariants=True),
            torch.sparse_bsc_tensor(compressed, plain, blocks, (6, 6), check_invariants=True),
        ):
            assert tensor_bytes(tensor) == 3 * 8 + 2 * 8 + 2 * 9 * 4

    def test_nested(self) -> None:
        strided = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        assert tensor_bytes(strided) == 5 * 4
        assert tensor_bytes(jagged) >= 5 * 4 + 3 * 8  # values and offsets, and whatever extents it caches

    def test_opaque(self) -> None:
        assert tensor_bytes(torch.ones(3, 3).to_mkldnn()) == 36

    def test_wrapper_counts_inner_tensors(self) -> None:
        wrapped = _Halves(torch.zeros(4, dtype=torch.int8), torch.zeros(4))
        assert wrapped.nbytes == 16
        assert tensor_bytes(wrapped) == 4 + 16
        assert tensor_bytes(nn.Parameter(wrapped, requires_grad=False)) == 4 + 16
        assert wrapper_name(torch.zeros(1)) is None
        assert (wrapper_name(wrapped) or "").endswith(" _Halves")

    def test_inner_tensor_held_twice_counts_once(self) -> None:
        inner = torch.zeros(4)
        assert tensor_bytes(_Halves(inner, inner)) == 16

    def test_storage_key(self) -> None:
        for device in ("cpu", "meta"):
            base = torch.zeros(4, device=device)
            assert storage_key(base) == storage_key(base[1:]) == base.untyped_storage()._cdata
            assert storage_key(base) != storage_key(torch.zeros(4, device=device))
        sparse = torch.eye(2).to_sparse()
        assert storage_key(sparse) == storage_key(sparse.detach())


class TestRegistered:
    def test_layer(self) -> None:
        rows = stored_tensors(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).half()))
        assert [(row.name, row.kind, row.layer, str(row.spec), row.bytes, row.trainable) for row in rows] == [
            ("0.weight", "parameter", "0", "float32[4,3]", 48, True),
            ("0.bias", "parameter", "0", "float32[4]", 16, True),
            ("1.weight", "parameter", "1", "float16[4]", 8, True),
            ("1.bias", "parameter", "1", "float16[4]", 8, True),
            ("1.running_mean", "buffer", "1", "float16[4]", 8, False),
            ("1.running_var", "buffer", "1", "float16[4]", 8, False),
            ("1.num_batches_tracked", "buffer", "1", "int64[]", 8, False),
        ]
        assert all(row.reported_bytes == row.bytes and row.parts == () and row.tied_to is None for row in rows)

    def test_tied_embedding_and_head(self) -> None:
        model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64), nn.Linear(64, 1000, bias=False))
        model[2].weight = model[0].weight
        rows = by_name(model)
        # 64,000 embedding + 64×64 + 64 linear = 68,160
        assert elements(model) == 68_160
        assert total(model) == 272_640
        assert (rows["2.weight"].tied_to, rows["2.weight"].bytes) == ("0.weight", 0)
        assert rows["2.weight"].reported_bytes == 256_000

    def test_parameters_that_no_forward_reads_count(self) -> None:
        model = nn.Sequential(nn.Linear(1000, 10), nn.Linear(10, 10), nn.Linear(1000, 1000))
        # 10,010 + 110 + 1,001,000
        assert (elements(model), total(model)) == (1_011_120, 4_044_480)

    def test_attention_has_parameters_on_a_module_that_is_no_leaf(self) -> None:
        model = nn.Sequential(nn.MultiheadAttention(64, 4), nn.Linear(64, 5))
        # in 192×64+192, out 64×64+64, linear 64×5+5
        assert (elements(model), total(model)) == (16_965, 67_860)

    def test_one_module_under_two_names_counts_once(self) -> None:
        convolution = nn.Conv2d(16, 16, 3)
        assert elements(nn.Sequential(convolution, convolution, convolution)) == 16 * 16 * 9 + 16 == 2320

    def test_parameter_and_buffer_of_the_model_itself(self) -> None:
        model = holding(scale=nn.Parameter(torch.zeros(158_986)))
        model.register_buffer("table", torch.zeros(2**18))
        rows = by_name(model)
        assert rows["scale"].layer == ""
        assert (rows["scale"].bytes, rows["table"].bytes) == (635_944, 2**20)

    def test_lazy_parameters_hold_nothing_yet(self) -> None:
        weight = by_name(nn.LazyLinear(3))["weight"]
        assert (weight.spec.shape, weight.elements, weight.bytes, weight.reported_bytes) == ((), 0, 0, 0)
        assert weight.trainable

    def test_meta_model_stores_what_the_real_one_would(self) -> None:
        model = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)
        expected = [(row.name, row.bytes) for row in stored_tensors(model)]
        assert [(row.name, row.bytes) for row in stored_tensors(model.to("meta"))] == expected

    def test_expanded_sparse_and_complex_buffers(self) -> None:
        model = nn.Module()
        model.register_buffer("expanded", torch.ones(5).expand(300, 5))
        model.register_buffer("sparse", torch.eye(4).to_sparse())
        model.register_buffer("complex", torch.zeros(4, dtype=torch.complex64))
        rows = by_name(model)
        assert [(row.bytes, row.reported_bytes, row.elements) for row in rows.values()] == [
            (20, 6000, 1500),
            (80, 64, 16),
            (32, 32, 4),
        ]
        assert [(part.name, str(part.spec), part.bytes) for part in rows["sparse"].parts] == [
            ("indices", "int64[2,4]", 64),
            ("values", "float32[4]", 16),
        ]

    def test_views_of_one_block_get_their_own_extents(self) -> None:
        flat = torch.zeros(100)
        model = holding(
            first=nn.Parameter(flat[10:20]), second=nn.Parameter(flat[15:40]), third=nn.Parameter(flat[12:14])
        )
        rows = by_name(model)
        # first: 10 elements and the 70 that nothing covers; second: 20..40; third lies inside the first
        assert [row.bytes for row in rows.values()] == [320, 80, 0]
        assert [row.tied_to for row in rows.values()] == [None, None, "first"]

    def test_an_expanded_slice_does_not_cover_the_rest(self) -> None:
        flat = torch.zeros(4)
        model = nn.Module()
        model.register_buffer("first", flat[:2].expand(2, 2))  # 4 elements, as the block has, but the first 2 twice
        model.register_buffer("second", flat[2:])
        assert [row.bytes for row in stored_tensors(model)] == [8, 8]

    def test_scripted_modules(self) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        scripted = torch.jit.script(model)
        assert [(r.name, r.bytes) for r in stored_tensors(scripted)] == [
            (r.name, r.bytes) for r in stored_tensors(model)
        ]


class TestAttributes:
    def test_python_list_of_modules(self) -> None:
        model = nn.Sequential(nn.Linear(100, 10))
        model.layers = [nn.Linear(100, 100) for _ in range(4)]
        rows = stored_tensors(model)
        assert elements(model) == 1010
        assert sum(row.elements for row in rows) == 1010 + 4 * 10_100 == 41_410
        assert rows[0].name == "layers[0].weight"
        assert {(row.kind, row.layer, row.trainable) for row in rows[:8]} == {("attribute", "", False)}

    def test_tensors_in_containers(self) -> None:
        tensor = torch.zeros(4)
        model = nn.Sequential(holding(pe=torch.zeros(2, 3), cache={"k": [tensor], 0: (tensor,)}, name="x"))
        rows = stored_tensors(model)
        assert [(row.name, row.layer, row.bytes) for row in rows] == [("0.pe", "0", 24), ("0.cache['k'][0]", "0", 16)]

    def test_cycles_end(self) -> None:
        inner = nn.Linear(2, 2)
        model = holding(things=[])
        model.things += [model, inner, model.things]
        inner.parents = [model]
        assert [row.name for row in stored_tensors(model)] == ["things[1].weight", "things[1].bias"]

    def test_a_list_of_registered_modules_adds_nothing(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        model.order = [model[0]]
        assert [row.name for row in stored_tensors(model)] == ["0.weight", "0.bias"]
        assert next(row.name for row in stored_tensors(nn.LSTM(2, 2))) == "weight_ih_l0"
        assert len(stored_tensors(nn.LSTM(2, 2))) == 4, "_flat_weights are the parameters themselves"

    def test_other_name_for_the_same_memory_is_tied(self) -> None:
        model = nn.Linear(3, 3)
        model.alias = model.weight.data
        row = by_name(model)["alias"]
        assert (row.kind, row.bytes, row.tied_to) == ("attribute", 0, "weight")

    def test_a_tie_may_point_to_a_later_row(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3))
        model.alias = model[0].weight.data
        assert next((row.name, row.tied_to) for row in stored_tensors(model)) == ("alias", "0.weight")

    def test_no_user_code_runs(self) -> None:
        class Touchy(nn.Module):
            @property
            def weight(self) -> torch.Tensor:
                raise AssertionError("a property was read")

        assert stored_tensors(Touchy()) == ()


class TestReparametrised:
    def test_pruning_stores_weight_mask_and_product(self) -> None:
        model = prune.l1_unstructured(nn.Linear(10, 10, bias=False), "weight", 0.5)
        rows = by_name(model)
        assert {name: (row.kind, row.bytes) for name, row in rows.items()} == {
            "weight_orig": ("parameter", 400),
            "weight_mask": ("buffer", 400),
            "weight": ("attribute", 400),
        }

    def test_old_weight_norm(self) -> None:
        rows = by_name(nn.utils.weight_norm(nn.Linear(10, 10, bias=False)))
        assert {name: row.bytes for name, row in rows.items()} == {"weight_g": 40, "weight_v": 400, "weight": 400}

    def test_old_spectral_norm_computes_on_its_first_forward(self) -> None:
        model = nn.utils.spectral_norm(nn.Linear(10, 10, bias=False))
        assert by_name(model)["weight"].tied_to == "weight_orig"
        model(torch.zeros(1, 10))
        assert by_name(model)["weight"].bytes == 400

    def test_parametrizations_keep_only_the_originals(self) -> None:
        rows = by_name(parametrizations.weight_norm(nn.Linear(10, 10, bias=False)))
        assert {name: row.bytes for name, row in rows.items()} == {
            "parametrizations.weight.original0": 40,
            "parametrizations.weight.original1": 400,
        }


class TestPacked:
    def dynamic(self, *modules: nn.Module, **options: Any) -> nn.Module:
        from torch.ao.quantization import quantize_dynamic

        return quantize_dynamic(nn.Sequential(*modules), **options)

    def test_dynamic_linear(self) -> None:
        rows = by_name(self.dynamic(nn.Linear(8, 5)))
        assert {name: (row.kind, row.layer, str(row.spec), row.bytes) for name, row in rows.items()} == {
            "0.weight": ("packed", "0", "qint8[5,8]", 40),
            "0.bias": ("packed", "0", "float32[5]", 20),
        }
        assert rows["0.weight"].wrapper == "torch.ao LinearPackedParams"
        assert not any(row.trainable for row in rows.values())

    def test_dynamic_lstm_counts_each_bias_once(self) -> None:
        model = self.dynamic(nn.LSTM(8, 6, 2, bidirectional=True))
        # per direction: 24 gates × (8 or 12 in + 6 hidden) int8 + 2 × 24 float32
        assert total(model) == 2 * (24 * (8 + 6) + 192) + 2 * (24 * (12 + 6) + 192)
        assert "0.0.weight_ih" in by_name(model)

    def test_dynamic_cells_keep_an_unused_bias(self) -> None:
        assert total(self.dynamic(nn.GRUCell(8, 6))) == 18 * (8 + 6) + 2 * (2 * 18 * 4)

    def test_dynamic_float16_keeps_two_bytes(self) -> None:
        assert total(self.dynamic(nn.Linear(8, 5), dtype=torch.float16)) == 40 * 2 + 20

    def test_embedding(self) -> None:
        model = torch.ao.nn.quantized.Embedding(10, 12)
        # 120 quint8, 10 scales and 10 zero points of float32
        assert total(model) == 120 + 40 + 40
        assert by_name(model)["weight"].elements == 120

    def test_four_bit_embedding_bag(self) -> None:
        from torch.ao.quantization import convert, float_qparams_weight_only_qconfig_4bit, prepare

        model = nn.Sequential(nn.EmbeddingBag(10, 12))
        model.qconfig = float_qparams_weight_only_qconfig_4bit
        row = by_name(convert(prepare(model)))["0.weight"]
        assert (row.elements, row.bytes) == (120, 120 // 2 + 40 + 40)

    def test_static_model_is_not_zero(self) -> None:
        from torch.ao.quantization import DeQuantStub, QuantStub, convert, get_default_qconfig, prepare

        model = nn.Sequential(QuantStub(), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5), DeQuantStub()).eval()
        model.qconfig = get_default_qconfig("fbgemm")
        prepared = prepare(model)
        prepared(torch.randn(2, 3, 4, 4))
        rows = by_name(convert(prepared))
        # int8, then a float64 scale and an int64 zero point a channel; float32 biases
        assert rows["1.weight"].bytes == 4 * 3 * 9 + 4 * 8 + 4 * 8
        assert rows["3.weight"].bytes == 5 * 16 + 5 * 8 + 5 * 8
        assert (rows["1.bias"].bytes, rows["3.bias"].bytes) == (16, 20)
        assert sum(row.elements for row in rows.values() if row.kind == "packed") == 112 + 85

    def test_scripted_quantized_module(self) -> None:
        scripted = torch.jit.script(self.dynamic(nn.Linear(8, 5)))
        assert total(scripted) == 40 + 20


class TestBitsandbytesByShape:
    """The attributes that bitsandbytes hangs on a parameter, on stand-ins: reading them needs no library."""

    def test_four_bit(self) -> None:
        class State:
            absmax, code, offset, state2 = torch.zeros(2), torch.zeros(16), None, None
            shape = torch.Size((16, 8))

        class Params4bit(nn.Parameter):
            pass

        weight = Params4bit(torch.zeros(64, 1, dtype=torch.uint8), requires_grad=False)
        weight.quant_state = State()
        row = by_name(holding(weight=weight))["weight"]
        assert (row.elements, row.bytes, row.reported_bytes) == (128, 64 + 8 + 64, 64)
        assert [part.name for part in row.parts] == ["data", "quant_state.absmax", "quant_state.code"]

    def test_eight_bit(self) -> None:
        class Int8Params(nn.Parameter):
            pass

        weight = Int8Params(torch.zeros(4, 8, dtype=torch.int8), requires_grad=False)
        weight.CB, weight.SCB = weight.data, torch.zeros(4)
        row = by_name(holding(weight=weight))["weight"]
        assert (row.bytes, row.reported_bytes) == (32 + 16, 32)
        assert [part.name for part in row.parts] == ["data", "SCB"], "CB is the data"

    def test_eight_bit_after_its_first_forward(self) -> None:
        class MatmulLtState:
            pass

        state = MatmulLtState()
        weight = nn.Parameter(torch.zeros(4, 8, dtype=torch.int8), requires_grad=False)
        state.CB, state.SCB = weight.data, torch.zeros(4)
        rows = by_name(holding(weight=weight, state=state))
        assert {name: row.bytes for name, row in rows.items()} == {"weight": 32, "state.CB": 0, "state.SCB": 16}


class TestLaws:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=8))
    def test_views_of_a_block_add_up_to_the_block(self, ranges: list[tuple[int, int]]) -> None:
        block = torch.zeros(40, dtype=torch.int16)
        model = nn.Module()
        for index, (start, end) in enumerate(ranges):
            model.register_buffer(f"b{index}", block[min(start, end) : max(start, end)])
        assert total(model) == 80

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.sampled_from(["linear", "tied", "batchnorm", "sparse", "loose"]), max_size=6))
    def test_total_is_the_unique_storages(self, kinds: list[str]) -> None:
        model = nn.Sequential()
        linear = nn.Linear(4, 4)
        for index, kind in enumerate(kinds):
            if kind == "sparse":
                model.register_buffer(f"s{index}", torch.eye(3).to_sparse())
            elif kind == "loose":
                setattr(model, f"loose{index}", [nn.Linear(2, 2)])
            elif kind == "batchnorm":
                model.append(nn.BatchNorm1d(4))
            else:
                model.append(nn.Linear(4, 4))
                if kind == "tied":
                    model[-1].weight = linear.weight
        sizes = {"linear": 80, "batchnorm": 72, "sparse": 60, "loose": 24, "tied": 16}
        expected = sum(sizes[kind] for kind in kinds) + (64 if "tied" in kinds else 0)
        assert total(model) == expected
        assert all(sum(p.bytes for p in row.parts) == row.bytes for row in stored_tensors(model) if row.parts)


class _Halves(torch.Tensor):
    """A wrapper that claims float32 and keeps two other tensors."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> _Halves:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.qdata, self.scale, self.mesh = data, scale, "not a tensor, as in DTensor"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["qdata", "scale", "mesh"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].qdata, args[0].scale)
        raise NotImplementedError(func)
