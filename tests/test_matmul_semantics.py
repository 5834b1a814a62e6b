"""What cuBLAS copies before it multiplies, as PyTorch decides it (cuBlasCommonArgs.h, Blas.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import ScalingType

from tests.kernels import CUBLAS, CUBLASLT, cuda_semantics, kernel_copies, takes_cublaslt
from tests.models import Ledger, Workspaces

F32, C64 = torch.float32, torch.complex64
aten = torch.ops.aten


def meta(shape: tuple[int, ...], strides: tuple[int, ...] | None = None, dtype: torch.dtype = F32) -> Tensor:
    if strides is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


# A matrix of 4 x 6: its strides, and whether cuBLAS can read it as it lies.
MATRICES: dict[str, tuple[tuple[int, int], bool]] = {
    "row-major": ((6, 1), True),
    "transposed": ((1, 4), True),
    "rows of a wider matrix": ((10, 1), True),
    "columns of a higher matrix": ((1, 9), True),
    "every other column": ((12, 2), False),
    "every other row and column, transposed": ((2, 16), False),
    "expanded from one number": ((0, 0), False),
    "one row, expanded": ((0, 1), False),
    "one column, expanded": ((1, 0), False),
    "overlapping rows, as unfold makes them": ((2, 1), False),
}


@pytest.mark.parametrize("name", MATRICES)
def test_which_matrices_are_copied(name: str) -> None:
    strides, is_read = MATRICES[name]
    matrix, other = meta((4, 6), strides), meta((6, 5))
    copied = [] if is_read else [matrix]
    assert copies(aten.mm.default, matrix, other) == copied
    assert copies(aten.mm.default, meta((5, 4)), matrix) == copied
    assert copies(aten.addmm.default, meta((5,)), matrix, other) == copied
    assert copies(aten.addmm_.default, meta((4, 5)), matrix, other) == copied


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("batch", [0, 24, 7])
def test_which_batches_are_copied(name: str, batch: int) -> None:
    """How far the matrices of a batch are apart doesn't matter: one that was expanded is read as it lies."""
    strides, is_read = MATRICES[name]
    matrices = meta((3, 4, 6), (batch, *strides))
    copied = [] if is_read else [matrices]
    assert copies(aten.bmm.default, matrices, meta((3, 6, 5))) == copied
    assert copies(aten.bmm.default, meta((3, 5, 4)), matrices) == copied
    assert copies(aten.baddbmm.default, meta((3, 4, 5)), matrices, meta((3, 6, 5))) == copied


def test_single_rows_and_columns_have_any_stride() -> None:
    for matrix in (meta((1, 6), (0, 1)), meta((1, 6), (2, 1)), meta((6, 1), (1, 0)), meta((6, 1), (1, 3))):
        assert copies(aten.mm.default, matrix, meta((matrix.shape[1], 5))) == []
    column = meta((3, 6, 1), (6, 1, 0))  # row-major to PyTorch, but cuBLAS refuses a stride of 0
    assert column.is_contiguous()
    assert copies(aten.bmm.default, column, meta((3, 1, 5))) == [column]
    assert copies(aten.bmm.default, meta((3, 1, 6), (6, 0, 1)), meta((3, 6, 5))) != []


def test_both_operands_are_copied_the_second_first() -> None:
    """A row-major result is the transposed product of the transposed operands."""
    one, other = meta((4, 6), (0, 0)), meta((6, 5), (0, 0))
    assert copies(aten.mm.default, one, other) == [other, one]


def test_a_result_that_cublas_cannot_write_is_computed_aside() -> None:
    one, other, out = meta((4, 6)), meta((6, 5)), meta((4, 5), (20, 2))
    assert copies(aten.mm.out, one, other, out=out) == [out]
    assert copies(aten.mm.out, one, other, out=meta((4, 5), (20, 1))) == []
    assert copies(aten.addmm_.default, out, one, other) == [out]
    assert copies(aten.addmm.out, meta((5,)), one, other, out=out) == [out]


def test_a_conjugated_matrix_is_copied_unless_cublas_transposes_it() -> None:
    """cuBLAS has an option for the conjugate of a transposed matrix, and none for that of one as it lies."""
    plain, conjugated = meta((4, 4), dtype=C64), meta((4, 4), dtype=C64).conj()
    assert copies(aten.mm.default, conjugated, plain) == [conjugated]
    assert copies(aten.mm.default, conjugated.t(), plain) == []
    assert copies(aten.mm.out, conjugated, plain, out=meta((4, 4), (1, 4), C64)) == []
    batch = meta((3, 4, 4), dtype=C64).conj()
    assert copies(aten.bmm.default, batch, meta((3, 4, 2), dtype=C64)) == [batch]
    assert copies(aten.bmm.default, batch, meta((3, 4, 1), dtype=C64)) == []  # the result counts as columns


def test_what_a_product_with_a_vector_copies() -> None:
    vector, expanded, matrix = meta((6,)), meta((6,), (0,)), meta((4, 6), (12, 2))
    assert copies(aten.mv.default, meta((4, 6)), vector) == []
    assert copies(aten.mv.default, meta((4, 6)), meta((6,), (3,))) == []
    assert copies(aten.mv.default, matrix, expanded) == [expanded, matrix]
    assert copies(aten.addmv.default, meta((4,)), matrix, vector) == [matrix]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_matrices_are_not_cublas_business() -> None:
    places = torch.tensor([0, 1, 1, 2, 2], device="meta"), torch.tensor([0, 2], device="meta")
    sparse = torch.sparse_csr_tensor(*places, meta((2,)), (4, 6), check_invariants=False)
    assert copies(aten.mm.default, sparse, meta((6, 5))) == []
    assert copies(aten.mv.default, sparse, meta((6,))) == []


def test_a_sum_of_products_copies_one_matrix_at_a_time() -> None:
    (copied,) = copies(aten.addbmm.default, meta((4, 5)), meta((3, 4, 6), (0, 0, 0)), meta((3, 6, 5)))
    assert tuple(copied.shape) == (4, 6)


def test_the_gradient_of_a_sum_is_copied_for_each_product() -> None:
    """A head of 8 → 100 for 2 x 5 tokens: the gradient of ``sum()`` is one number, expanded to 10 x 100. Backward
    multiplies it twice, and each time copies it beside the result: 10·8 for the input, 100·8 for the weight.
    """
    head = nn.Linear(8, 100, device="meta")

    def step() -> None:
        head(torch.empty(2, 5, 8, device="meta", requires_grad=True)).sum().backward()

    assert made_by("mm", step) == [4 * 10 * 8, 4 * 10 * 100, 4 * 8 * 100, 4 * 10 * 100]


def test_a_dense_gradient_is_not_copied() -> None:
    head = nn.Linear(8, 100, device="meta")

    def step() -> None:
        (head(torch.empty(2, 5, 8, device="meta", requires_grad=True)) ** 2).sum().backward()

    assert made_by("mm", step) == [4 * 10 * 8, 4 * 8 * 100]


# The bias, the second matrix, beta; and whether cuBLASLt adds it
BIASES: dict[str, tuple[Tensor, Tensor, float, bool]] = {
    "one for each column": (meta((5,)), meta((6, 5)), 1, True),
    "one for all columns": (meta((1,)), meta((6, 5)), 1, False),
    "a matrix": (meta((4, 5)), meta((6, 5)), 1, False),
    "a single column": (meta((1,)), meta((6, 1)), 1, False),
    "scaled": (meta((5,)), meta((6, 5)), 0.5, False),
    "every other one of ten": (meta((5,), (2,)), meta((6, 5)), 1, False),
    "complex": (meta((5,), dtype=C64), meta((6, 5), dtype=C64), 1, False),
}


@pytest.mark.parametrize("name", BIASES)
def test_which_products_take_cublaslts_workspace(name: str) -> None:
    bias, other, beta, takes = BIASES[name]
    args = (bias, meta((4, 6), dtype=bias.dtype), other)
    assert takes_cublaslt(args, {"beta": beta}) is takes
    assert aten.addmm.default in CUBLASLT and aten.mm.default not in CUBLASLT
    ledger = Ledger(workspaces=Workspaces(blas=1024, lt=64))
    with ledger:
        torch.addmm(*args, beta=beta)
    assert [event.delta for event in ledger.events if abs(event.delta) == 64] == [64, -64] * takes


@pytest.mark.parametrize(
    ("workspaces", "expected"),
    [
        (Workspaces(blas=1024, lt=64), [64, -64] * 2),  # PyTorch 2.8: taken and given back by each product
        (Workspaces(blas=1024, lt=64, keeps_lt=True), [64]),  # 2.9 to 2.11: kept
        (Workspaces(blas=1024), [1024]),  # since 2.12: that of cuBLAS, which nothing else asked for
    ],
)
def test_a_float8_product_takes_cublaslts_workspace(workspaces: Workspaces, expected: list[int]) -> None:
    one, other = (torch.empty(16, 16, dtype=torch.float8_e4m3fn, device="meta") for _ in range(2))
    scale, ledger = meta(()), Ledger(workspaces=workspaces)
    with ledger:
        for _ in range(2):
            torch._scaled_mm(one, other.t(), scale, scale, out_dtype=torch.bfloat16)
    assert [event.delta for event in ledger.events if abs(event.delta) in (64, 1024)] == expected


_ONE, _OTHER = (torch.empty(256, 256, dtype=torch.float8_e4m3fn, device="meta") for _ in range(2))
_E8M0 = torch.float8_e8m0fnu
SCALINGS: dict[str, tuple[Tensor, Tensor, ScalingType]] = {
    "one scale": (meta(()), meta(()), ScalingType.TensorWise),
    "rows": (meta((256, 1)), meta((1, 256)), ScalingType.RowWise),
    "blocks of 128": (meta((2, 256)).t(), meta((2, 256)), ScalingType.BlockWise1x128),
    # 256 / 32 = 8 scales for each row, in tiles of 128 × 4
    "blocks of 32": (meta((256 * 8,), dtype=_E8M0), meta((256 * 8,), dtype=_E8M0), ScalingType.BlockWise1x32),
}
"""The scales of both matrices, and their recipe."""


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(
    ("capability", "release", "is_cutlass"),
    [
        ((8, 9), None, True),
        ((9, 0), (2, 10), True),  # with CUDA 12.8; cuBLASLt takes such scales since 12.9
        ((9, 0), None, False),
        ((10, 0), None, True),
    ],
)
def test_only_products_scaled_by_rows_are_cutlasss_but_on_hopper(
    name: str, capability: tuple[int, int], release: tuple[int, int] | None, is_cutlass: bool
) -> None:
    scale, other_scale, recipe = SCALINGS[name]
    ledger = Ledger(workspaces=Workspaces(blas=1024, lt=64))
    with cuda_semantics(capability=capability, release=release), ledger:
        torch._scaled_mm(_ONE, _OTHER.t(), scale, other_scale, out_dtype=torch.bfloat16)
    taken = [] if name == "rows" and is_cutlass else [64, -64]
    assert [event.delta for event in ledger.events if abs(event.delta) in (64, 1024)] == taken
    args = (_ONE, _OTHER.t(), [scale], [recipe.value], [0], [other_scale], [recipe.value], [0], None)
    with cuda_semantics(capability=capability, release=release):
        assert takes_cublaslt(args, {}) is bool(taken)


def test_an_empty_scaled_product_takes_no_workspace() -> None:
    assert takes_cublaslt((_ONE, _OTHER[:0].t(), meta(()), meta(())), {}) is False
    assert aten._scaled_mm_v2.default in CUBLASLT


def test_products_in_place_make_a_handle_too() -> None:
    assert {aten.addmm_.default, aten.baddbmm_.default, aten.mm.out, aten.mv.default} <= CUBLAS


class Identical(list[Tensor]):
    """Tensors that are compared by identity."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and list(map(id, self)) == list(map(id, other))

    __hash__ = None  # type: ignore[assignment]


def copies(func: Callable[..., Tensor], *args: Tensor, **kwargs: Tensor) -> Identical:
    """What the kernel of `func` copies; it copies row by row."""
    found = list(kernel_copies(func, args, kwargs))
    assert all(wanted == "row-major" for _, wanted in found)
    return Identical(tensor for tensor, _ in found)


def made_by(op: str, step: Callable[[], None]) -> list[int]:
    """The bytes of what every `op` of a step allocates, in order."""
    ledger = Ledger()
    with cuda_semantics(), ledger:
        step()
    return [event.delta for event in ledger.events if event.op == op and ledger.size(event.storage) == event.delta]
