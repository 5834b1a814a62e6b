"""The memo of `meta` kernels: what it remembers is what the kernel says, and it remembers nothing but new tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels import MetaMemo

Tensor = torch.Tensor
aten = torch.ops.aten


FIRST = """
import gc, sys, weakref
import torch
from memsize.torch_internals.meta import MetaMemo
ids = torch.empty(2, 8, dtype=torch.int64, device="meta")
alive = weakref.ref(ids)
gc.disable()
imported = ["torch._dynamo" in sys.modules]
MetaMemo().run(torch.ops.aten.cumsum.default, (ids, -1), {})
del ids
print(imported[0], "torch._dynamo" in sys.modules, alive())
"""


class Seen(TorchDispatchMode):
    """Lists the ops that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def described(value: Any) -> Any:
    """Everything that tells one result from another, with all strides and the storage's size."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.untyped_storage().nbytes()
    return type(value), [described(each) for each in value] if isinstance(value, (tuple, list)) else value


def remembered(memo: MetaMemo, func: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a second call is answered without running the op."""
    memo.run(func, args, kwargs)
    with Seen() as seen:
        memo.run(func, args, kwargs)
    return func not in seen.ops


IMAGE, ROWS = meta(2, 4, 8, 6), meta(3, 5, 8)
WHOLE = meta(2, 9, 8, dtype=torch.int64)

REMEMBERED: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.gather.default, (ROWS, 1, WHOLE), {}),
    (aten.cumsum.default, (ROWS, 1), {"dtype": torch.float64}),
    (aten.var_mean.correction, (ROWS, [1]), {"correction": 1}),
    (aten.sort.default, (IMAGE, 1), {}),
    (aten.index.Tensor, (ROWS, [None, WHOLE[0, 0]]), {}),
    (aten.repeat.default, (ROWS, [2, 1, 3]), {}),
    (aten._adaptive_avg_pool2d.default, (IMAGE, [3, 2]), {}),
    (aten.native_layer_norm_backward.default, (ROWS, ROWS, [8], ROWS, ROWS, None, None, [True, False, False]), {}),
    (aten.split_copy.Tensor, (ROWS, 2), {}),
    (aten.full_like.default, (IMAGE, 1.0), {"memory_format": torch.channels_last}),
]


@pytest.mark.parametrize(
    ("func", "args", "kwargs"), REMEMBERED, ids=lambda value: str(value) if callable(value) else ""
)
def test_what_is_remembered_is_what_the_kernel_says(func: Any, args: Any, kwargs: Any) -> None:
    memo = MetaMemo()
    expected = described(func(*args, **kwargs))
    assert described(memo.run(func, args, kwargs)) == expected
    with Seen() as seen:
        assert described(memo.run(func, args, kwargs)) == expected
    assert set(seen.ops) == {aten.empty_strided.default}
    assert len(memo) == 1


def test_each_answer_has_memory_of_its_own() -> None:
    memo = MetaMemo()
    answers = [memo.run(aten.sort.default, (ROWS,), {}) for _ in range(3)]
    assert len({tensor.untyped_storage()._cdata for pair in answers for tensor in pair}) == 6


def real(*shape: int) -> Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.relu_.default, (meta(3),)),
        (aten.scatter_.value, (meta(3, 5, 8), 1, WHOLE[:, :5], 1.0)),
        (aten.view.default, (ROWS, [15, 8])),
        (aten.t.default, (meta(3, 4),)),
        (aten.split.Tensor, (ROWS, 2)),
        (aten.add.Tensor, (real(3), real(3))),
        (aten.mul.Tensor, (ROWS, real())),
        (aten.arange.default, (3,)),
        (aten.as_strided_copy.default, (ROWS, [2], [1], 0)),
        (aten.add.out, (ROWS, ROWS)),
        (aten._scaled_dot_product_flash_attention.default, (IMAGE, IMAGE, IMAGE)),
        (aten.exp.default, (meta(3, dtype=torch.complex64).conj(),)),
        (aten.clone.default, (torch.nn.Parameter(meta(3)).as_subclass(torch.nn.parameter.Buffer),)),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_nothing_else_is_remembered(func: Any, args: Any) -> None:
    memo = MetaMemo()
    options = {"out": meta(3, 5, 8)} if func is aten.add.out else {}
    assert not remembered(memo, func, *args, **options)
    assert len(memo) == 0


def test_a_result_that_shares_memory_against_its_schema_is_not_remembered() -> None:
    """`_unsafe_view` says that it makes a new tensor, and returns a view."""
    memo = MetaMemo()
    assert all(argument.alias_info is None for argument in aten._unsafe_view.default._schema.arguments)
    result = memo.run(aten._unsafe_view.default, (ROWS, [15, 8]), {})
    assert result.untyped_storage()._cdata == ROWS.untyped_storage()._cdata
    assert len(memo) == 0
    assert memo._key(aten._unsafe_view.default, (ROWS, [15, 8]), {}) is None  # there is no use in asking again


def test_numbers_that_are_equal_are_told_apart_by_their_type() -> None:
    memo, whole = MetaMemo(), meta(3, dtype=torch.int64)
    truth = meta(3, dtype=torch.bool)
    assert memo.run(aten.mul.Tensor, (whole, 1), {}).dtype is torch.int64
    assert memo.run(aten.mul.Tensor, (whole, 1.0), {}).dtype is torch.float32
    assert memo.run(aten.mul.Tensor, (truth, 1), {}).dtype is torch.int64
    assert memo.run(aten.mul.Tensor, (truth, True), {}).dtype is torch.bool
    assert len(memo) == 4


def test_arguments_are_told_apart_by_name() -> None:
    memo = MetaMemo()
    wide = memo.run(aten.sum.dim_IntList, (ROWS, [1]), {"dtype": torch.float64})
    assert wide.dtype is torch.float64
    assert memo.run(aten.sum.dim_IntList, (ROWS, [1]), {}).dtype is torch.float32


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_the_default_dtype_decides_too() -> None:
    memo, whole = MetaMemo(), meta(3, dtype=torch.int64)
    assert memo.run(aten.exp.default, (whole,), {}).dtype is torch.float32
    with default_dtype(torch.float64):
        assert memo.run(aten.exp.default, (whole,), {}).dtype is torch.float64


def test_where_determinism_is_asked_for_every_kernel_runs() -> None:
    """It may have to say that it is not deterministic."""
    memo = MetaMemo()
    assert remembered(memo, aten.cumsum.default, ROWS, 1)
    torch.use_deterministic_algorithms(True)
    try:
        assert not remembered(memo, aten.cumsum.default, ROWS, 1)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_failure_is_raised_each_time() -> None:
    memo = MetaMemo()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="reduction dim"):
            memo.run(aten.mm.default, (meta(3, 4), meta(3, 4)), {})
    assert len(memo) == 0


def test_the_oldest_is_forgotten_first() -> None:
    memo = MetaMemo(limit=2)
    for size in (1, 2, 3):
        memo.run(aten.exp.default, (meta(size),), {})
    assert len(memo) == 2
    assert remembered(memo, aten.exp.default, meta(3))
    assert len(memo) == 2
    with Seen() as seen:
        memo.run(aten.exp.default, (meta(1),), {})
    assert aten.exp.default in seen.ops


# -- the law ----------------------------------------------------------------------------------------------------------


@st.composite
def laid_out(draw: st.DrawFn) -> Tensor:
    """A tensor of up to four dimensions, permuted, with gaps or expanded."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    gap = draw(st.integers(1, 2))
    dtype = draw(st.sampled_from((torch.float32, torch.float16, torch.int64)))
    base = meta(*(shape[dim] * gap for dim in order), dtype=dtype)[tuple(slice(None, None, gap) for _ in order)]
    tensor = base.permute(*(order.index(dim) for dim in range(len(shape))))
    return tensor.unsqueeze(0).expand(2, *shape) if draw(st.booleans()) else tensor


LAW = [
    (aten.clone.default, ()), (aten.mul.Tensor, (2,)), (aten.mul.Tensor, (2.0,)), (aten.gt.Scalar, (0,)),
    (aten.sum.dim_IntList, ([0],)), (aten.amax.default, ([-1], True)), (aten.sort.default, (0,)),
    (aten.flip.default, ([0],)), (aten.zeros_like.default, ()), (aten.argmax.default, ()), (aten.cumsum.default, (0,)),
]  # fmt: skip


@pytest.mark.thorough
@given(st.lists(st.tuples(laid_out(), st.sampled_from(LAW)), max_size=8))
def test_answers_are_the_kernels_whatever_was_asked_before(calls: list[tuple[Tensor, Any]]) -> None:
    memo = MetaMemo(limit=4)
    for tensor, (func, more) in calls * 2:
        assert described(memo.run(func, (tensor, *more), {})) == described(func(tensor, *more))
        assert len(memo) <= 4


@pytest.mark.thorough
def test_a_kernel_that_imports_the_compiler_does_not_keep_its_arguments(python: Any) -> None:
    done = python("-c", FIRST)
    assert done.stdout.split() == ["False", "True", "None"], done.stderr


def test_nor_does_one_that_writes_in_place(python: Any, tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import gc, sys, torch\n"
        "gc.disable()\n"
        "weight = torch.empty(64, 64, dtype=torch.bfloat16, device='cuda')\n"
        "weight @ weight  # cuBLAS takes its workspace\n"
        "def scratch():\n"
        "    other = torch.empty(1 << 20, device='cuda')\n"
        "    torch.addmm(weight, weight, weight, out=weight)\n"
        "before = torch.cuda.memory_allocated(), 'torch._dynamo' in sys.modules\n"
        "scratch()\n"
        "print(before[1], 'torch._dynamo' in sys.modules, torch.cuda.memory_allocated() - before[0])\n"
    )
    done = python("-m", "memsize", "run", "--gpu", "a100", str(script))
    assert done.stdout.splitlines()[0].split() == ["False", "True", "0"], done.stderr
