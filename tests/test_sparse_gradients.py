"""Gradients of tables that are sparse: what they, the optimizers that take them and CUDA's kernels hold.

The oracle is the same loop with real tensors on the CPU, of which every allocation is compared. What CUDA's kernels
take inside, which the CPU's do not, is worked out beside the expected figures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, SparseAdam

import memsize
from memsize.errors import MemsizeError
from tests.kernels import TEMPORARIES, in_coordinates, kernel_temporaries, rules, zeros_in_coordinates
from tests.known_values import ALL_DISTINCT, ALL_SELECTED
from tests.models import Ledger, MetaDispatchMode

aten = torch.ops.aten
ROWS, WIDTH = 1000, 64
BAGS, PER_BAG = 8, 20
COUNT = BAGS * PER_BAG
TABLE, VALUES, INDICES = ROWS * WIDTH * 4, COUNT * WIDTH * 4, COUNT * 8
assert (TABLE, VALUES, INDICES) == (256_000, 40_960, 1_280)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # Adagrad's updates, with real tensors too


def gradient(count: int = COUNT, width: int = WIDTH, rows: int = ROWS, device: str = "meta", first: int = 0) -> Tensor:
    indices = torch.arange(first, first + count, device=device)[None]
    return in_coordinates(indices, torch.zeros(count, width, device=device), torch.Size((rows, width)))


# -- the same loop for real -------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[..., nn.Module]] = {
    "embedding": lambda **more: nn.Embedding(ROWS, WIDTH, sparse=True, **more),
    "padded": lambda **more: nn.Embedding(ROWS, WIDTH, sparse=True, padding_idx=ROWS - 1, **more),
    "sum": lambda **more: nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum", **more),
    "mean": lambda **more: nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="mean", **more),
    "padded bags": lambda **more: nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum", padding_idx=0, **more),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SparseAdam": SparseAdam,
    "SparseAdam, maximizing": lambda given: SparseAdam(given, maximize=True),
    "SGD": lambda given: SGD(given, 0.1),
    "SGD with lists": lambda given: SGD(given, 0.1, foreach=True),
    "momentum": lambda given: SGD(given, 0.1, momentum=0.9),
    "momentum with lists": lambda given: SGD(given, 0.1, momentum=0.9, foreach=True),
    "Adagrad": lambda given: Adagrad(given, 0.1),
}
_KERNELS = (aten._coalesce.default, aten.sparse_mask.default, aten._embedding_bag_backward.default)


def steps(device: str, table: str, optimizer: str, backwards: int) -> list[tuple[int, str]]:
    """Two steps: the bytes of each event and the op of it. Ids never come twice: a CPU would merge equal ones where
    CUDA does not."""
    with Ledger(device) as ledger:
        model = TABLES[table](device=device)
        update = OPTIMIZERS[optimizer](model.parameters())
        first = 1
        for _ in range(2):
            for _ in range(backwards):
                ids = torch.arange(first, first + COUNT, device=device).view(BAGS, PER_BAG)
                model(ids).square().sum().backward()
                first += COUNT
            update.step()
            update.zero_grad()
    ledger.close()
    # The CPU keeps other bookkeeping of bags than CUDA, and makes Adagrad's counter where CUDA has it on the host.
    aside = ("_embedding_bag", "_embedding_bag_backward", "lift_fresh")
    stored = ledger.storages(frozenset())
    told = [(event, stored[event.storage]) for event in ledger.events]
    return [(event.delta, event.op) for event, each in told if each.op not in aside or each.shape == (COUNT, WIDTH)]


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("table", TABLES)
def test_steps_take_what_they_take_for_real(
    table: str, optimizer: str, backwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules()  # fills the table
    for op in _KERNELS:
        monkeypatch.delitem(TEMPORARIES, op)
    real, told = steps("cpu", table, optimizer, backwards), steps("meta", table, optimizer, backwards)
    assert told == real
    assert sum(delta == VALUES for delta, _ in told) >= 2 * backwards


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["embedding", "sum", "mean"])
def test_a_first_gradient_is_kept_as_it_is(table: str) -> None:
    """Without a mode that looks on, PyTorch does not copy it: its indices are the ids, and an embedding's values the
    gradient of its output."""
    ids = torch.arange(COUNT).view(BAGS, PER_BAG)
    plain = TABLES[table]()
    plain(ids).square().sum().backward()
    kept: Any = plain.weight.grad
    assert kept._indices().data_ptr() == ids.data_ptr()
    for device in ("cpu", "meta"):
        with Ledger(device) as ledger:
            model = TABLES[table](device=device)
            ids = torch.arange(COUNT, device=device).view(BAGS, PER_BAG)
            output = model(ids)
            ledger.enter(upstream := torch.ones_like(output), "temporary")
            output.backward(upstream)
            found: Any = model.weight.grad
        assert ledger.index_of(found._indices()) == ledger.index_of(ids) >= 0
        assert found._nnz() == COUNT
        shares = ledger.index_of(found._values()) == ledger.index_of(upstream)
        assert shares == (table == "embedding")


def test_a_gradient_that_does_not_lie_row_by_row_is_copied() -> None:
    """That of a plain sum is one number, expanded; so does PyTorch where nothing looks on."""
    plain = TABLES["embedding"]()
    ids = torch.arange(COUNT).view(BAGS, PER_BAG)
    plain(ids).sum().backward()
    kept: Any = plain.weight.grad
    assert kept._indices().data_ptr() != ids.data_ptr()
    with Ledger() as ledger:
        model = TABLES["embedding"](device="meta")
        ids = torch.arange(COUNT, device="meta").view(BAGS, PER_BAG)
        model(ids).sum().backward()
        found: Any = model.weight.grad
    assert ledger.index_of(found._indices()) != ledger.index_of(ids)
    assert found._values().untyped_storage().nbytes() == VALUES


def test_a_copy_that_the_program_makes_is_one() -> None:
    with Ledger() as ledger:
        model = TABLES["embedding"](device="meta")
        copies: list[Tensor] = []
        model.weight.register_post_accumulate_grad_hook(lambda weight: copies.append(weight.grad.clone()))
        model(torch.arange(COUNT, device="meta")).square().sum().backward()
        found: Any = model.weight.grad
    assert ledger.index_of(copies[0]._values()) != ledger.index_of(found._values())


@pytest.mark.parametrize(("ids", "elements"), [(None, COUNT), (7, COUNT), (0, 0)])
def test_the_padding_of_bags_gets_no_gradient(ids: int | None, elements: int) -> None:
    """Ids that are data are taken to be none of it."""
    with Ledger() as ledger:
        model = TABLES["padded bags"](device="meta")
        shape = (BAGS, PER_BAG)
        given = torch.empty(1 << 20, dtype=torch.int64, device="meta")[:COUNT].view(shape)
        model(given if ids is None else torch.full(shape, ids, device="meta")).square().sum().backward()
    assert model.weight.grad._nnz() == elements  # type: ignore[union-attr, operator]
    assert list(ledger.evaluator.assumptions) == ([ALL_SELECTED] if ids is None else [])
    assert not ledger.evaluator.notes


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_scaled_by_frequency_are_refused_by_pytorch(kind: Any) -> None:
    with Ledger():
        model = kind(ROWS, WIDTH, sparse=True, scale_grad_by_freq=True, padding_idx=0, device="meta")
        loss = model(torch.ones(BAGS, PER_BAG, dtype=torch.int64, device="meta")).square().sum()
        with pytest.raises(RuntimeError, match="scale_grad_by_freq not supported with sparse gradients"):
            loss.backward()


def test_gradients_set_to_zero_hold_nothing() -> None:
    with Ledger() as ledger:
        model = TABLES["embedding"](device="meta")
        update = SGD(model.parameters(), 0.1)
        model(torch.arange(COUNT, device="meta")).square().sum().backward()
        update.zero_grad(set_to_none=False)
        held = model.weight.grad
    assert held is not None and held._nnz() == 0 and held.is_coalesced()  # type: ignore[operator]
    assert ledger.index_of(held._values()) < 0 or not held._values().untyped_storage().nbytes()  # type: ignore[operator]


# -- what CUDA takes inside -------------------------------------------------------------------------------------------


def inside(op: Any, *args: Any) -> list[int]:
    return [each.bytes for each in kernel_temporaries(op, args)]


def test_equal_indices_are_added_up_in_order() -> None:
    # Where each index was, and where each value begins; what sorting takes is less than the values that follow it.
    assert inside(aten._coalesce.default, gradient()) == [INDICES, INDICES]
    # Sorting needs room for its 8 + 8 bytes an element; the values of a table one wide take 4 of them.
    assert inside(aten._coalesce.default, gradient(width=1)) == [INDICES, INDICES, COUNT * (16 - 4)]
    assert inside(aten._coalesce.default, gradient(1)) == []
    places = in_coordinates(
        torch.empty(2, COUNT, dtype=torch.int64, device="meta"),
        torch.empty(COUNT, WIDTH, device="meta"),
        torch.Size((10, ROWS, WIDTH)),
    )
    assert inside(aten._coalesce.default, places) == [INDICES] * 3
    expanded = in_coordinates(
        gradient()._indices(), torch.empty(1, device="meta").expand(COUNT, WIDTH), gradient().shape
    )
    assert inside(aten._coalesce.default, expanded) == [INDICES, INDICES, VALUES]


@pytest.mark.parametrize("order", [2, 1, float("inf")])
def test_a_norm_adds_up_equal_indices_first(order: float) -> None:
    with MetaDispatchMode() as mode:
        found = gradient().norm(order)
        ordered = gradient().coalesce()
    assert (found.shape, found.dtype) == ((), torch.float32)
    assert list(mode.evaluator.assumptions) == [ALL_DISTINCT] and not mode.evaluator.notes
    op = aten.norm.ScalarOpt_dim
    assert inside(op, gradient(), order, []) == [INDICES, VALUES, INDICES, INDICES]
    assert inside(op, ordered, order, []) == inside(op, torch.empty(3, device="meta"), order, []) == []
    with MetaDispatchMode(), pytest.raises(RuntimeError, match="only supports full reductions"):
        gradient().norm(order, dim=0)


def test_a_selection_of_rows_is_made_before_the_result() -> None:
    table = torch.empty(ROWS, WIDTH, device="meta")
    assert inside(aten.sparse_mask.default, table, gradient()) == [VALUES, 4]
    assert inside(aten.sparse_mask.default, table, gradient(0)) == []


@pytest.mark.parametrize(
    ("mode", "padding", "taken"),
    [
        (0, -1, []),
        (1, -1, [BAGS * 4, BAGS * 4, COUNT * 4]),  # sizes, what they divide by, and that for each row
        (0, 0, [VALUES, COUNT, COUNT * 8]),  # all rows, a mask, and where it is true
    ],
)
def test_bags_are_spread_to_their_rows(mode: int, padding: int, taken: list[int]) -> None:
    whole = lambda *shape: torch.empty(shape, dtype=torch.int64, device="meta")  # noqa: E731
    given = (torch.empty(BAGS, WIDTH, device="meta"), whole(COUNT), whole(BAGS), whole(COUNT), whole(BAGS), whole(0))
    assert inside(aten._embedding_bag_backward.default, *given, ROWS, False, mode, True, None, padding) == taken
    assert inside(aten._embedding_bag_backward.default, *given, ROWS, False, mode, False, None, padding) == []


@pytest.mark.parametrize("rows", [ROWS, 100])
def test_at_most_every_row_is_left(rows: int) -> None:
    with MetaDispatchMode() as mode:
        found = gradient(rows=rows).coalesce()
        again = found.coalesce()
    left = min(COUNT, rows)
    assert (found._nnz(), found.is_coalesced(), again is found) == (left, True, True)
    assert found._values().untyped_storage().nbytes() == left * WIDTH * 4
    assert found._indices().untyped_storage().nbytes() == INDICES  # sorted as a whole, then shortened
    assert list(mode.evaluator.assumptions) == [ALL_DISTINCT]
    with MetaDispatchMode() as mode:
        assert gradient(1).coalesce()._nnz() == 1
    assert not mode.evaluator.assumptions


# -- answers ----------------------------------------------------------------------------------------------------------


class Table(nn.Module):
    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True, **more)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).square()


@pytest.mark.parametrize(
    ("optimizer", "state", "temporaries"),
    [
        # The coalesced gradient, both old averages, both new ones and the update; indices of the first alone.
        (SparseAdam, 2 * TABLE, 6 * VALUES + INDICES),
        # The coalesced gradient, and the selected sums: their rows, and each times the one number beside them.
        (lambda given: Adagrad(given, 0.1), TABLE, 3 * VALUES + 2 * INDICES + 4),
    ],
)
def test_the_peak_of_a_training_step(optimizer: Any, state: int, temporaries: int) -> None:
    ids = f"{PER_BAG}:int64:0..{ROWS - 1}"
    found = memsize.trace(Table(), ids, batch_size=BAGS, optimizer=optimizer, loss=lambda output: output.sum())
    peak = found.peak
    roles = {"parameter": TABLE, "gradient": VALUES, "optimizer state": state, "temporary": temporaries}
    assert {role: peak.roles.get(role, 0) for role in roles} == roles
    assert ALL_DISTINCT in found.assumptions


def test_gradients_of_several_batches_are_joined() -> None:
    """The first is kept as it is; the second and what holds both come beside it."""
    ids = f"{PER_BAG}:int64:0..{ROWS - 1}"
    found = memsize.trace(
        Table(), ids, batch_size=BAGS, optimizer="sgd", gradient_accumulation_steps=2, loss=lambda output: output.sum()
    )
    joined = [each for each in found.trace.storages if each.role == "gradient" and each.op == "add_"]
    assert [each.bytes for each in joined] == 3 * [2 * INDICES, 2 * VALUES]
    live = most = 0
    for event in found.trace.events:
        of_gradients = found.trace.storages[event.storage].op in ("add_", "mul") and abs(event.delta) >= VALUES
        live += event.delta * of_gradients
        most = max(most, live)
    assert most == 2 * VALUES + VALUES + VALUES


@pytest.mark.skipif(
    torch._C._dispatch_has_kernel_for_dispatch_key("aten::linalg_vector_norm", "SparseCPU"),
    reason="from 2.14 on, PyTorch has that norm, on CUDA too",
)
def test_clipping_is_refused_as_on_a_gpu() -> None:
    """By PyTorch, which has no kernel for the norm of a sparse tensor's elements."""
    real: Any = TABLES["embedding"]()
    real(torch.arange(COUNT)).square().sum().backward()
    with pytest.raises(NotImplementedError, match=r"Could not run 'aten::linalg_vector_norm'"):
        nn.utils.clip_grad_norm_(real.parameters(), 1.0, foreach=True)

    def step(model: nn.Module) -> Callable[[Tensor], None]:
        def body(ids: Tensor) -> None:
            model(ids).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        return body

    said = (
        r"Could not run 'aten::linalg_vector_norm' with arguments from the 'Sparse\w+' backend\n.*sparse gradients out"
    )
    with pytest.raises(MemsizeError, match=said):
        memsize.trace(Table(), f"{PER_BAG}:int64", batch_size=BAGS, step=step)


def test_what_has_no_rule_runs_on_as_many_elements() -> None:
    """At different indices, on the CPU: the result keeps them."""
    with MetaDispatchMode():
        given = gradient()
        assert torch.sqrt(given)._nnz() == COUNT
        assert given.index_select(0, torch.arange(3, device="meta"))._nnz() == 3
        assert torch.cat([given, given])._nnz() == 2 * COUNT
    real = zeros_in_coordinates(gradient(rows=100))
    assert real._nnz() == COUNT and real.coalesce()._nnz() == 100


def test_lists_with_sparse_tensors_are_worked_on_one_by_one() -> None:
    with Ledger() as ledger:
        table = torch.empty(ROWS, WIDTH, device="meta")
        torch._foreach_add_([table, torch.empty(3, device="meta")], [gradient(), torch.empty(3, device="meta")])
        sums = torch._foreach_add([gradient()], [gradient(first=COUNT)])
        held = gradient()
        torch._foreach_mul_([held], 2.0)
    assert sums[0]._nnz() == 2 * COUNT  # type: ignore[operator]
    assert held._nnz() == COUNT and not ledger.evaluator.notes  # type: ignore[operator]
    made = [(storage.op, storage.bytes) for storage in ledger.storages(frozenset()) if storage.op in ("add", "mul_")]
    assert made == [("add", 2 * INDICES), ("add", 2 * VALUES), ("mul_", INDICES), ("mul_", VALUES)]
