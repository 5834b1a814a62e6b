"""Norms and softmax as CUDA runs them. A CUDA build of PyTorch says itself which kernel it would choose."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memsize
from tests.kernels import autocast_region, cuda_semantics, kernel_temporaries, takes_cudnn
from tests.models import Ledger, MetaDispatchMode

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
HAS_CUDNN = torch.backends.cudnn.version() is not None
needs_cudnn = pytest.mark.skipif(not HAS_CUDNN, reason="a CPU build chooses no kernel of CUDA's")


class Log(MetaDispatchMode):
    """Answers every op by shape and writes down which ones were asked for, and what they returned."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.results: dict[str, Any] = {}

    def run_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = super().run_op(func, args, kwargs)
        name = func._overloadpacket.__name__
        self.ops.append(name)
        self.results[name] = result
        return result


@contextlib.contextmanager
def tracing() -> Iterator[Log]:
    log = Log()
    with log, cuda_semantics():
        yield log


def meta(*shape: int, dtype: torch.dtype = FP32, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def kept(run: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Bytes of the storages that autograd keeps."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = run()
    return sum(storages.values()), result


# -- which batch norm -------------------------------------------------------------------------------------------------

Shape = tuple[int, ...]
CALLS: dict[str, tuple[Shape, torch.dtype, torch.dtype, bool]] = {
    **{
        f"{x}, weight {w}": ((2, 3, 4, 4), x, w, True)
        for x in (FP16, BF16, FP32, FP64)
        for w in (FP16, BF16, FP32, FP64)
    },
    "evaluation": ((2, 3, 4, 4), FP32, FP32, False),
    "bfloat16 evaluation": ((2, 3, 4, 4), BF16, FP32, False),
    "two dimensions": ((2, 3), FP32, FP32, True),
    "three dimensions": ((2, 3, 4), FP32, FP32, True),
    "volume": ((2, 3, 4, 4, 4), FP32, FP32, True),
    **{f"batch {n}, {mode}": ((n, 3, 1), FP32, FP32, mode) for n in (65_535, 65_536) for mode in (True, False)},
    **{f"batch {n}": ((n, 3, 1), FP32, FP32, True) for n in (880_801, 880_802)},
    "2^31 elements": ((1, 2, 2**15, 2**15), FP32, FP32, True),
    "2^31 - 2 elements": ((1, 2, 1, 2**30 - 1), FP32, FP32, True),
}


def arguments(device: str, case: tuple[Shape, torch.dtype, torch.dtype, bool]) -> tuple[Any, ...]:
    shape, dtype, weight_dtype, training = case
    per_channel = torch.empty(shape[1], dtype=weight_dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device), *([per_channel] * 4), training, 1e-5


@needs_cudnn
@pytest.mark.parametrize("name", CALLS)
def test_cudnn_takes_what_pytorch_gives_it(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        chosen = torch._C._select_batch_norm_backend(*arguments("cuda", CALLS[name]))
    assert takes_cudnn(*arguments("meta", CALLS[name])) is (chosen == torch._C._BatchNormBackend.Cudnn)


def test_cudnn_takes_what_the_source_says() -> None:
    """The same table in a build that cannot be asked."""
    taken = {name for name in CALLS if takes_cudnn(*arguments("meta", CALLS[name]))}
    no_bfloat16 = {name for name in CALLS if "bfloat16" not in name}
    half_with_other_weights = {f"{FP16}, weight {w}" for w in (FP16, FP64)}
    too_large = {"two dimensions", "batch 65536, False", "batch 880802", "2^31 elements"}
    assert taken == no_bfloat16 - half_with_other_weights - too_large


def test_a_batch_norm_that_lacks_something_is_not_cudnns() -> None:
    x, w = meta(2, 3, 4, 4), meta(3)
    assert takes_cudnn(x, w, w, None, None, True, 1e-5)
    assert not takes_cudnn(x, w, w, None, None, False, 1e-5)
    assert not takes_cudnn(x, w, w, w, None, True, 1e-5)
    assert not takes_cudnn(x, None, None, w, w, True, 1e-5)
    assert not takes_cudnn(x, w, None, w, w, True, 1e-5)
    with torch.backends.cudnn.flags(enabled=False):
        assert not takes_cudnn(x, w, w, w, w, True, 1e-5)


# -- what a batch norm keeps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_cudnn_keeps_statistics_in_training_only(training: bool) -> None:
    layer, x = nn.BatchNorm2d(5, device="meta").train(training), meta(2, 5, 4, 4, grad=True)
    with tracing() as log:
        bytes_kept, out = kept(lambda: layer(x))
        assert "cudnn_batch_norm" in log.ops
        out.sum().backward()
    assert ("cudnn_batch_norm_backward" in log.ops) is training
    held = 4 * 2 * 5 * 16 + 3 * 4 * 5  # the input; weight and running statistics
    assert bytes_kept == held + (2 * 4 * 5 if training else 0)
    assert layer.weight.grad is not None and layer.bias.grad is not None and x.grad is not None


def test_pytorchs_own_kernel_keeps_statistics_always() -> None:
    layer, x = nn.BatchNorm2d(5, device="meta", dtype=BF16).eval(), meta(2, 5, 4, 4, dtype=BF16, grad=True)
    with tracing() as log:
        bytes_kept, out = kept(lambda: layer(x))
        out.sum().backward()
    assert "native_batch_norm" in log.ops
    assert bytes_kept == 2 * 2 * 5 * 16 + 3 * 2 * 5 + 2 * 4 * 5  # the statistics in float32


@pytest.mark.parametrize(
    ("shape", "dtype", "trained", "own"),
    [
        ((7, 5), FP32, True, [4 * 7 * 5, 4 * 5, 4 * 5, 4 * 5, 4 * 5]),  # three gradients and two sums
        ((7, 5), BF16, True, [2 * 7 * 5, 2 * 5, 2 * 5, 4 * 5, 4 * 5]),  # which are float32
        ((7, 5), FP32, False, [4 * 5, 4 * 5]),  # no gradient of the input, no sums for it
        ((7, 5, 2), BF16, True, [2 * 7 * 5 * 2, 2 * 5, 2 * 5]),  # one kernel
    ],
)
def test_a_batch_norm_of_two_dimensions_sums_aside(
    shape: tuple[int, ...], dtype: torch.dtype, trained: bool, own: list[int]
) -> None:
    layer, x = nn.BatchNorm1d(5, device="meta", dtype=dtype), meta(*shape, dtype=dtype, grad=trained)
    ledger = Ledger()
    with ledger, cuda_semantics():
        y = layer(x)
        y.backward(torch.empty_like(y))
    made = [each.bytes for each in ledger.storages(frozenset()) if each.op == "native_batch_norm_backward"]
    ledger.close()
    assert made == own


_aten = torch.ops.aten


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        # 8,192 rows: blocks of 32 channels by 512 / 32 = 16 threads, each of which takes 16 rows, so that 32 blocks
        # share a channel. Each leaves four numbers for each of 64 channels, and two columns of blocks have a counter.
        ((8, 64, 32, 32), [4 * 64 * 32 * 4, 2 * 4]),
        # 401,408 rows would be 1,568 blocks: 128 are the most.
        ((32, 64, 112, 112), [4 * 64 * 128 * 4, 2 * 4]),
        # 1,792 rows are seven blocks, for which one is taken instead; 1,793 are eight.
        ((7, 64, 16, 16), []),
        ((1793, 64, 1, 1), [4 * 64 * 8 * 4, 2 * 4]),
        # 3 channels are two columns of 2, with 256 threads: 8 * 4,096 rows.
        ((8, 3, 64, 64), [4 * 3 * 8 * 4, 2 * 4]),
    ],
)
def test_a_reduction_over_innermost_channels_stages_parts(shape: tuple[int, ...], parts: list[int]) -> None:
    """cuda/Normalization.cuh, `flexible_launch_configs`; sums of gradients leave two numbers in place of four."""

    def taken(op: Any, *args: Any) -> list[int]:
        return [each.bytes for each in kernel_temporaries(op, args)]

    rows = meta(*shape, dtype=BF16)
    x, c = rows.contiguous(memory_format=torch.channels_last), meta(shape[1])
    assert taken(_aten.batch_norm_stats.default, x, 1e-5) == parts
    halves = [parts[0] // 2, parts[1]] if parts else []
    assert taken(_aten.batch_norm_backward_reduce.default, x, x, c, c, c, True, True, True) == halves
    for training in (True, False):
        expected = parts if training else []
        assert taken(_aten.native_batch_norm.default, x, c, c, c, c, training, 0.1, 1e-5) == expected
        assert taken(_aten._native_batch_norm_legit.default, x, c, c, c, c, training, 0.1, 1e-5) == expected
        assert taken(_aten._native_batch_norm_legit.no_stats, x, c, c, training, 0.1, 1e-5) == expected


def test_no_parts_are_staged_elsewhere() -> None:
    rows, c = meta(8, 64, 32, 32), meta(64)
    last = rows.contiguous(memory_format=torch.channels_last)
    reduce = _aten.batch_norm_backward_reduce.default
    for grad, x in ((rows, rows), (rows, last), (last, rows)):
        assert not kernel_temporaries(reduce, (grad, x, c, c, c, True, True, True))
    assert not kernel_temporaries(_aten.batch_norm_stats.default, (rows, 1e-5))
    volume = meta(8, 64, 4, 32, 32).contiguous(memory_format=torch.channels_last_3d)
    assert kernel_temporaries(_aten.batch_norm_stats.default, (volume, 1e-5))
    assert not kernel_temporaries(_aten.native_batch_norm.default, (volume, c, c, c, c, True, 0.1, 1e-5))


def test_layout_is_kept_and_strided_inputs_are_copied() -> None:
    w = meta(3)
    with tracing() as log:
        last = F.batch_norm(meta(2, 3, 4, 4).contiguous(memory_format=torch.channels_last), w, w, w, w, True)
        assert last.is_contiguous(memory_format=torch.channels_last)
        log.ops.clear()
        F.batch_norm(meta(2, 3, 4, 8)[..., ::2], w, w, w, w, True)
        assert log.ops[-2:] == ["clone", "cudnn_batch_norm"]


def test_instance_norm_goes_through_cudnn() -> None:
    layer = nn.InstanceNorm2d(3, affine=True, device="meta")
    with tracing() as log:
        layer(meta(2, 3, 4, 4, grad=True)).sum().backward()
    assert "cudnn_batch_norm" in log.ops
    assert "cudnn_batch_norm_backward" in log.ops


def test_amp_gives_half_inputs_with_float32_weights_to_cudnn() -> None:
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)).to("meta")
    for dtype, op in ((FP16, "cudnn_batch_norm"), (BF16, "native_batch_norm")):
        with tracing() as log, autocast_region(dtype):
            assert net(meta(2, 3, 6, 6)).dtype is dtype
        assert op in log.ops


# -- RMS norm ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, FP64], ids=str)
def test_rms_norm_keeps_one_number_per_row(dtype: torch.dtype) -> None:
    layer, x = nn.RMSNorm(8, device="meta", dtype=dtype), meta(2, 5, 8, dtype=dtype, grad=True)
    statistics = 8 if dtype is FP64 else 4
    with tracing() as log:
        bytes_kept, out = kept(lambda: layer(x))
        assert log.ops == ["_fused_rms_norm"]
        assert out.dtype is dtype
        out.sum().backward()
    assert "_fused_rms_norm_backward" in log.ops
    assert bytes_kept == dtype.itemsize * (2 * 5 * 8 + 8) + statistics * 2 * 5
    assert x.grad is not None and x.grad.dtype is dtype
    assert layer.weight.grad is not None and layer.weight.grad.shape == (8,)


def test_rms_norm_keeps_the_steps_of_its_formula_until_pytorch_2_8() -> None:
    """The input in float32, which `pow` and `mul` keep, and the reciprocal of each row's root (layer_norm.cpp, 2.8)."""
    x = meta(2, 5, 8, dtype=BF16, grad=True)
    with cuda_semantics(release=(2, 8)):
        bytes_kept, _ = kept(lambda: F.rms_norm(x, [8]))
    assert bytes_kept == 4 * (2 * 5 * 8) + 4 * 2 * 5


def rms_cases() -> dict[str, tuple[torch.dtype, torch.dtype | None, list[int]]]:
    return {
        "no weight": (FP32, None, [4]),
        "half, no weight": (FP16, None, [4]),
        "half, float32 weight": (FP16, FP32, [4]),
        "float32, half weight": (FP32, FP16, [4]),
        "two dimensions": (FP32, FP32, [3, 4]),
        "double": (FP64, FP64, [4]),
    }


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", rms_cases())
def test_rms_norm_is_fused_where_it_is_on_cuda(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    dtype, weight_dtype, shape = rms_cases()[name]

    def run(device: str) -> Tensor:
        weight = None if weight_dtype is None else torch.empty(shape, dtype=weight_dtype, device=device)
        return F.rms_norm(torch.empty(2, 3, 4, dtype=dtype, device=device), shape, weight)

    with tracing() as log:
        ours = run("meta")
    assert ("_fused_rms_norm" in log.ops) is (weight_dtype in (None, dtype))
    with FakeTensorMode() as mode, torch.no_grad():
        theirs = run("cuda")
    assert mode is not None
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)


def test_gradients_of_gradients_of_rms_norm() -> None:
    x, w = meta(2, 4, grad=True), meta(4, grad=True)
    with cuda_semantics():
        first = torch.autograd.grad(F.rms_norm(x, [4], w).sum(), (x, w), create_graph=True)
        second = torch.autograd.grad(first[0].sum() + first[1].sum(), (x, w))
    assert [g.shape for g in (*first, *second)] == [x.shape, w.shape] * 2


def test_malformed_rms_norm_fails_as_in_pytorch() -> None:
    with cuda_semantics():
        with pytest.raises(RuntimeError, match="shape"):
            F.rms_norm(meta(2, 3), [4])
        with pytest.raises(RuntimeError, match="weight"):
            F.rms_norm(meta(2, 3), [3], meta(4))


def test_rms_norm_on_the_cpu_runs_as_ever() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    expected = F.rms_norm(x, [3])
    with cuda_semantics(stands_for={"cpu"}):
        assert torch.equal(F.rms_norm(x, [3]), expected)


# -- softmax ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
@pytest.mark.parametrize(("dtype", "copies"), [(FP16, 0), (BF16, 1), (FP32, 0)], ids=str)
def test_softmax_in_float32_widens_half_without_a_copy(function: Any, dtype: torch.dtype, copies: int) -> None:
    x = meta(3, 7, dtype=dtype, grad=True)
    with tracing() as log:
        bytes_kept, out = kept(lambda: function(x, dim=-1, dtype=FP32))
        assert (out.dtype, log.ops.count("_to_copy")) == (FP32, copies)
        out.sum().backward()
    assert bytes_kept == 4 * 3 * 7  # the result; its own gradient needs nothing else
    assert x.grad is not None and x.grad.dtype is dtype


@pytest.mark.parametrize(("dtype", "copies"), [(FP16, 0), (BF16, 1)], ids=str)
def test_autocast_softmax_is_the_same_one(dtype: torch.dtype, copies: int) -> None:
    with tracing() as log, autocast_region(dtype):
        assert meta(3, 7, dtype=dtype).softmax(-1).dtype is FP32
        assert meta(3, 7, dtype=dtype).log_softmax(-1).dtype is FP32
    assert log.ops.count("_to_copy") == 2 * copies


@pytest.mark.parametrize(("function", "products"), [(F.softmax, 1), (F.log_softmax, 0)])
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
def test_softmax_multiplies_its_gradient_by_its_result(function: Any, products: int, dtype: torch.dtype) -> None:
    """`Tensor tmp = grad * output` in `softmax_backward_cuda_out`, beside the gradient that the kernel writes."""
    op = (
        torch.ops.aten._softmax_backward_data.default if products else torch.ops.aten._log_softmax_backward_data.default
    )
    output = meta(3, 7, dtype=FP32)
    taken = kernel_temporaries(op, (output, output, -1, dtype))
    assert [each.bytes for each in taken] == [3 * 7 * 4] * products

    def loop(model: nn.Module) -> Callable[[Tensor], None]:
        return lambda x: function(model(x), dim=-1, dtype=FP32).backward(meta(1024, 1024))

    step = memsize.trace(
        nn.Linear(1024, 1024, bias=False, device="meta", dtype=dtype),
        torch.empty(1024, 1024, dtype=dtype, device="meta"),
        step=loop,
        steps=1,
    )
    made = [event.delta for event in step.trace.events if event.op == op._overloadpacket.__name__ and event.delta > 0]
    # the gradient in the scores' dtype, then the products in float32
    assert made == [2**20 * dtype.itemsize] + [2**20 * 4] * products


# -- layer norm -------------------------------------------------------------------------------------------------------


def test_layer_norm_refuses_two_dtypes_as_on_cuda() -> None:
    """Fake CUDA tensors refuse it too, from 2.14 on; `meta` tensors let it pass."""
    layer = nn.LayerNorm(4, device="meta")
    with tracing():
        assert layer(meta(2, 4)).dtype is FP32
        with pytest.raises(RuntimeError, match="same dtype"):
            layer(meta(2, 4, dtype=FP16))
        with autocast_region(FP16):
            assert layer(meta(2, 4, dtype=FP16)).dtype is FP32
