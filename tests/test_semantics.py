"""What CUDA would do, switched on for one thread and gone afterwards; PyTorch's own CPU autocast as the oracle."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.conftest import Python
from tests.kernels import (
    KEY,
    Attention,
    accumulators,
    autocast_region,
    choose_backend,
    cuda_semantics,
    current,
    kernel_temporaries,
    suspended,
)
from tests.models import Ledger

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
WEIGHTS = 2 * (300 * 3 * 9 + 500 * 300 * 9 + 1000 * 500 * 9 + 3_364_000)  # copies of the weights, biases apart
OUTPUTS = 2 * (300 * 62 * 62 + 500 * 60 * 60 + 1000 * 58 * 58)
INPUT = 2 * 3 * 64 * 64


class Toy(nn.Module):
    """9,223,901 parameters: three convolutions and a linear layer."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        sizes = ((3, 300), (300, 500), (500, 1000))
        self.convs = nn.Sequential(*(nn.Conv2d(i, o, 3, device=device) for i, o in sizes))
        self.fc = nn.Linear(3_364_000, 1, device=device)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.convs(x).flatten(1))
        return y


def meta(*shape: int, dtype: torch.dtype = FP32, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def kept_for_backward(model: nn.Module, x: Tensor) -> tuple[int, Any]:
    """Bytes of the storages that autograd keeps, parameters apart; and the output, which keeps them alive."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(x)
    return sum(storage.nbytes() for storage in kept.values()), out


def state() -> tuple[Any, ...]:
    """Everything global or of this thread that the semantics touch."""
    return (
        torch._C._dispatch_tls_is_dispatch_key_included(KEY),
        torch._C._dispatch_tls_is_dispatch_key_excluded(KEY),
        torch.is_autocast_enabled,
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_cache_enabled(),
        torch.clear_autocast_cache,
        torch.set_autocast_enabled,
        torch.get_autocast_dtype,
        torch.set_autocast_dtype,
        torch.cuda.amp.common.amp_definitely_not_available,
        torch.cuda.is_bf16_supported,
        torch.autocast.__init__,
        torch.amp.is_autocast_available,
        torch.amp.autocast_mode._cast,  # type: ignore[attr-defined]
        torch.utils.checkpoint._infer_device_type,
        current(),
    )


# The toy CNN under autocast


def test_toy_keeps_what_autocast_keeps() -> None:
    copies: list[int] = []
    model = Toy()
    with cuda_semantics(autocast_observer=lambda source, copy: copies.append(copy.nbytes)), autocast_region(BF16):
        kept, out = kept_for_backward(model, meta(1, 3, 64, 64))
    assert out.dtype is BF16
    assert kept == WEIGHTS + OUTPUTS + INPUT == 31_103_176
    assert WEIGHTS == 18_444_200
    assert sum(copies) == 2 * 9_223_901


@pytest.mark.parametrize("batch", [1, 3])
def test_cpu_autocast_keeps_the_same(batch: int) -> None:
    """The same layers in small, under PyTorch's own bfloat16 autocast on the CPU."""

    def net(device: str) -> nn.Module:
        layers = (nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 7, 3), nn.Flatten(), nn.Linear(7 * 8 * 8, 3))
        return nn.Sequential(*layers).to(device)

    with torch.autocast("cpu", dtype=BF16):
        expected, _ = kept_for_backward(net("cpu"), torch.zeros(batch, 3, 12, 12))
    with cuda_semantics(), autocast_region(BF16):
        kept, _ = kept_for_backward(net("meta"), meta(batch, 3, 12, 12))
    assert kept == expected


def test_cpu_tensors_stand_for_cuda_when_told() -> None:
    model, x = nn.Linear(4, 4), torch.zeros(2, 4)
    with cuda_semantics(stands_for={"cpu"}), autocast_region(FP16):
        assert model(x).dtype is FP16
        assert F.linear(meta(2, 4), meta(4, 4)).dtype is FP32
    with cuda_semantics(stands_for={"meta", "cpu"}), autocast_region(BF16):
        assert model(x).dtype is F.linear(meta(2, 4), meta(4, 4)).dtype is BF16
    with pytest.raises(ValueError, match="xla"), cuda_semantics(stands_for={"xla"}):
        pass


# Regions


def test_regions_nest_and_switch_off() -> None:
    a, b = meta(2, 2), meta(2, 2)
    with cuda_semantics():
        assert (a @ b).dtype is FP32
        with autocast_region(FP16):
            assert (a @ b).dtype is FP16
            with torch.autocast("cuda", dtype=BF16):
                assert (a @ b).dtype is BF16
                with torch.autocast("cuda", enabled=False):
                    assert (a @ b).dtype is FP32
            with torch.amp.autocast("meta", enabled=False):  # what code writes as autocast(x.device.type)
                assert not torch.is_autocast_enabled("meta")
                assert (a @ b).dtype is FP32
            assert torch.is_autocast_enabled("meta")
            assert torch.get_autocast_dtype("meta") is FP16
            assert torch.amp.is_autocast_available("meta")
            assert (a @ b).dtype is FP16
        assert (a @ b).dtype is FP32


def test_region_needs_the_semantics() -> None:
    with pytest.raises(RuntimeError, match="cuda_semantics"):
        autocast_region(BF16)


def test_old_spelling_and_decorator() -> None:
    @torch.autocast("cuda", dtype=BF16, enabled=False)
    def full(a: Tensor) -> Tensor:
        return a @ a

    with cuda_semantics(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with torch.cuda.amp.autocast():
            assert (meta(2, 2) @ meta(2, 2)).dtype is FP16
            assert full(meta(2, 2)).dtype is FP32


# The cache of weight copies


def test_weight_is_cast_once_per_region() -> None:
    layer, frozen, x = nn.Linear(3, 3, device="meta"), nn.Linear(3, 3, device="meta").requires_grad_(False), meta(1, 3)
    seen: list[Tensor] = []
    with cuda_semantics(autocast_observer=lambda source, copy: seen.append(source)) as semantics:
        with autocast_region(BF16):
            layer(layer(x))
            assert [id(t) for t in seen] == [id(layer.bias), id(layer.weight)]  # the last argument is cast first
            assert len(semantics.copies) == 2
            frozen(frozen(x))
            assert len(seen) == 6  # a frozen weight is cast anew in each call
            assert len(semantics.copies) == 2
            with torch.autocast("cuda", enabled=False):
                pass
            assert len(semantics.copies) == 2  # an inner region's end clears nothing
        assert not semantics.copies
        with torch.autocast("cuda", dtype=BF16, cache_enabled=False):
            layer(layer(x))
        assert len(seen) == 10


def test_copies_die_with_the_region_unless_kept_for_backward() -> None:
    layer, x = nn.Linear(3, 3, device="meta"), meta(1, 3, grad=True)
    alive: list[weakref.ref[Any]] = []
    with cuda_semantics(
        autocast_observer=lambda source, copy: alive.append(weakref.ref(copy.untyped_storage()))
    ) as semantics:
        with autocast_region(BF16):
            out = layer(x)
            assert all(ref() is not None for ref in alive)
        assert not semantics.copies
        out.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is FP32
    del out
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3  # weight, bias, and the input, a leaf that wants a gradient


def test_copies_made_without_gradients_pass_them_on() -> None:
    layer, x = nn.Linear(3, 3, device="meta"), meta(1, 3)
    with cuda_semantics() as semantics, autocast_region(BF16):
        with torch.no_grad():
            layer(x)
        assert len(semantics.copies) == 2
        layer(x).sum().backward()  # with the same copies
        assert len(semantics.copies) == 2
    assert layer.weight.grad is not None


def test_inference_mode_keeps_no_copies() -> None:
    """As in `cached_cast` (autocast_mode.cpp): an inference tensor could not serve a later forward that trains."""
    layer, x = nn.Linear(3, 3, device="meta"), meta(1, 3)
    seen: list[Tensor] = []
    with cuda_semantics(autocast_observer=lambda source, copy: seen.append(source)) as semantics, autocast_region(BF16):
        with torch.inference_mode():
            layer(layer(x))
        assert (len(seen), len(semantics.copies)) == (4, 0)


# Nothing is left behind


def test_state_is_as_before() -> None:
    before = state()
    with cuda_semantics(), autocast_region(BF16):
        assert state() != before
        with cuda_semantics(capability=(9, 0)) as inner:
            assert current() is inner
    assert state() == before
    with pytest.raises(ZeroDivisionError), cuda_semantics(), autocast_region(BF16):
        1 / 0  # noqa: B018
    assert state() == before
    with pytest.raises(RuntimeError), cuda_semantics(), autocast_region(BF16):
        meta(2, 3) @ meta(2, 3)
    assert state() == before


def test_plain_and_cpu_autocast_runs_are_untouched_afterwards() -> None:
    with cuda_semantics(), autocast_region(BF16):
        meta(2, 2) @ meta(2, 2)
    x = torch.ones(2, 2)
    assert (meta(2, 2) @ meta(2, 2)).dtype is FP32
    with torch.autocast("cpu", dtype=BF16):
        assert (x @ x).dtype is BF16
        assert torch.exp(x).dtype is FP32
    torch.manual_seed(0)
    first = F.dropout(x, 0.5)
    torch.manual_seed(0)
    with cuda_semantics():  # CPU tensors do not stand for CUDA here
        assert torch.equal(F.dropout(x, 0.5), first)
        assert torch.equal(x @ x, torch.full((2, 2), 2.0))


def test_dropout_allocates_its_mask_before_its_result() -> None:
    """Dropout.cu, `dropout_cuda`: one byte for each element, then the result, which may take a block that is free."""
    x, ledger = meta(3, 512, grad=True), Ledger()
    with cuda_semantics(), ledger:
        F.dropout(x, 0.5).sum().backward()
    made = [(event.op, event.delta) for event in ledger.events if event.delta > 0]
    assert made[:2] == [("native_dropout", 3 * 512), ("native_dropout", 4 * 3 * 512)]


def test_other_threads_are_untouched() -> None:
    results: list[Any] = []

    def other() -> None:
        results.append((meta(2, 2) @ meta(2, 2)).dtype)
        results.append(current())
        results.append(torch.cuda.amp.common.amp_definitely_not_available())

    available = torch.cuda.amp.common.amp_definitely_not_available()
    with cuda_semantics(), autocast_region(BF16):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert results == [FP32, None, available]


def test_suspended_passes_the_kernels_over() -> None:
    with cuda_semantics(), autocast_region(BF16):
        with suspended():
            assert (meta(2, 2) @ meta(2, 2)).dtype is FP32
        assert (meta(2, 2) @ meta(2, 2)).dtype is BF16


def test_registering_imports_nothing_heavy(warm_python: Python) -> None:
    code = (
        "import sys, torch\nfrom memsize.cuda.autocast import autocast_region\n"
        "from memsize.cuda.cuda_semantics import cuda_semantics\n"
        "with cuda_semantics(), autocast_region(torch.bfloat16):\n    pass\n"
        "assert not {'sympy', 'torch._dynamo'} & set(sys.modules)"
    )
    done = warm_python("-c", code)
    assert done.returncode == 0, done.stderr


# What user code does with autocast


class Doubled(torch.autograd.Function):
    seen: list[torch.dtype] = []  # noqa: RUF012

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=FP32)
    def forward(ctx: Any, x: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
        Doubled.seen += [x.dtype, pair[0].dtype, pair[1].dtype, (x @ x).dtype]
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        Doubled.seen.append((grad @ grad).dtype)
        return grad * 2, None


@pytest.mark.parametrize(("capability", "native"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_older_gpus_emulate_bfloat16(capability: tuple[int, int], native: bool) -> None:
    with cuda_semantics(capability=capability):
        assert torch.cuda.is_bf16_supported()
        assert torch.cuda.is_bf16_supported(including_emulation=False) is native
        assert torch.cuda.is_bf16_supported(False) is native


def test_custom_forward_casts_its_inputs() -> None:
    Doubled.seen = []
    with cuda_semantics(), autocast_region(BF16):
        x = meta(2, 2, dtype=BF16, grad=True)
        Doubled.apply(x, (meta(2, 2, dtype=FP16), meta(2, 2, dtype=FP64))).sum().backward()
    assert Doubled.seen == [FP32, FP32, FP64, FP32, FP32]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_recomputes_under_autocast(reentrant: bool) -> None:
    layer, dtypes = nn.Linear(4, 4, device="meta"), []

    def block(x: Tensor) -> Tensor:
        y: Tensor = layer(x)
        dtypes.append(y.dtype)
        return y.relu()

    generator = torch.get_rng_state()
    with cuda_semantics():
        with autocast_region(BF16):
            out = torch.utils.checkpoint.checkpoint(block, meta(2, 4, grad=True), use_reentrant=reentrant)
        out.float().sum().backward()
    assert dtypes == [BF16, BF16]
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is FP32
    assert torch.equal(torch.get_rng_state(), generator)


def test_grad_scaler_is_enabled() -> None:
    with cuda_semantics():
        scaler = torch.amp.GradScaler("cuda")
        assert scaler.is_enabled()
        scaled = scaler.scale(meta(1, grad=True).sum())
    assert scaled.is_meta
    assert scaled.grad_fn is not None


# Dropout


def test_dropout_keeps_a_boolean_mask() -> None:
    x = meta(10, 100, grad=True)
    with cuda_semantics():
        kept, out = kept_for_backward(nn.Dropout(0.5), x)
        assert kept == 10 * 100  # one byte for each element
        assert out.shape == x.shape
        assert F.dropout(x, 0.5, training=False) is x
        assert F.dropout(x, 0.0) is x
        out.sum().backward()
    assert x.grad is not None
    kept, _ = kept_for_backward(nn.Dropout(0.5), x)
    assert kept == 4 * 10 * 100  # the CPU's floating noise


# One-hot


def storages_made(
    function: Callable[[Tensor], Any],
    tensor: Tensor,
    capability: tuple[int, int] = (8, 0),
    release: tuple[int, int] | None = None,
) -> list[tuple[str, int]]:
    """The storages that `function` makes of `tensor` under CUDA's semantics, by operator and bytes."""
    ledger = Ledger(tensor.device.type)
    with ledger, cuda_semantics(stands_for={tensor.device.type}, capability=capability, release=release):
        ledger.enter(tensor, "input")
        function(tensor)
    made = [(each.op, each.bytes) for each in ledger.storages(frozenset())[1:] if each.bytes]
    ledger.close()
    return made


ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.Tanh, nn.Softplus, nn.SiLU, nn.Mish, nn.GELU)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_the_gradient_of_an_activation_is_one_kernel(kind: type[nn.Module]) -> None:
    """A gradient like the input, and for PReLU another for the weight; nothing else."""
    layer = kind().to("meta")
    x = meta(4, 300, grad=True)
    with cuda_semantics():
        out = layer(x)
        gradient = torch.empty_like(out)
        made = storages_made(lambda given: out.backward(given), gradient)
    own = [size for op, size in made if op.endswith("_backward")]
    assert own == [4 * 4 * 300] * (2 if kind is nn.PReLU else 1)
    assert sum(size for _, size in made) == sum(own) + 4 * (kind is nn.PReLU)


def test_the_gradient_of_mishs_gradient_is_pytorchs() -> None:
    x = meta(4, grad=True)
    with cuda_semantics():
        (first,) = torch.autograd.grad(F.mish(x).sum(), x, create_graph=True)
        first.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_hot_is_written_in_place(device: str) -> None:
    """CUDA writes ones into zeros; PyTorch's `meta` formula compares, and then widens what it found."""
    chosen = torch.tensor([[0, 2], [1, 0], [2, 1]], device=device)
    made = storages_made(lambda index: F.one_hot(index, 4), chosen)
    assert made == [("zeros", 3 * 2 * 4 * 8)]
    assert storages_made(lambda index: F.one_hot(index, 4), chosen[:0]) == []  # nothing to write
    with cuda_semantics(stands_for={device}):
        assert F.one_hot(chosen, 4).shape == (3, 2, 4) and F.one_hot(chosen[:0], 4).shape == (0, 2, 4)


def test_one_hot_without_a_number_of_classes_is_pytorchs() -> None:
    chosen = torch.tensor([[0, 2], [1, 0], [2, 1]])
    with cuda_semantics(stands_for={"cpu"}):
        assert F.one_hot(chosen, 3).argmax(-1).equal(chosen)
        assert F.one_hot(chosen).shape == (3, 2, 3)
        with pytest.raises(RuntimeError, match="Class values must be smaller"):
            F.one_hot(chosen, 0)


# Attention


def attention(
    *, heads: int = 4, shared: int | None = None, tokens: int = 16, keys: int | None = None, head: int = 64,
    dtype: torch.dtype = FP16, grad: bool = False, **options: Any,
) -> Attention:  # fmt: skip
    shape = (2, shared or heads, keys or tokens, head)
    query = meta(2, heads, tokens, head, dtype=dtype, grad=grad)
    return Attention(query, meta(*shape, dtype=dtype), meta(*shape, dtype=dtype), **options)


@pytest.mark.parametrize(
    ("call", "backend"),
    [
        (attention(), "flash"),
        (attention(dtype=BF16, causal=True), "flash"),
        (attention(dtype=BF16, capability=(7, 5)), "math"),
        (attention(dtype=FP16, capability=(7, 5)), "efficient"),
        (attention(dtype=FP32), "efficient"),
        (attention(dtype=FP64), "math"),
        (attention(mask=meta(16, 16, dtype=torch.bool)), "efficient"),
        (attention(causal=True, keys=32), "efficient"),
        (attention(head=60), "flash"),  # padded to 64
        (attention(head=60, dtype=FP32), "efficient"),  # a multiple of 4
        (attention(head=62, dtype=FP32), "math"),
        (attention(head=264), "efficient"),
        (attention(head=200, grad=True, capability=(8, 6)), "efficient"),
        (attention(head=200, capability=(8, 6)), "flash"),
        (attention(head=256, grad=True, capability=(8, 9)), "flash"),
        (attention(head=256, grad=True, capability=(8, 9), dropout=0.1), "efficient"),
        (attention(heads=8, shared=2), "math"),
        (attention(heads=8, shared=2, grouped=True), "flash"),
        (attention(heads=8, shared=2, grouped=True, dtype=FP32), "math"),
        (attention(capability=(9, 0)), "cudnn"),
        (attention(capability=(9, 0), cudnn=91002), "flash"),
        (attention(capability=(9, 0), head=192), "flash"),
        (attention(capability=(9, 0), dropout=0.1), "flash"),  # cuDNN knows multiples of 1/16
        (attention(capability=(9, 0), dropout=0.125), "cudnn"),
    ],
)
def test_choice_of_attention(call: Attention, backend: str) -> None:
    assert choose_backend(call) == backend


def pair(head: int, value: int, **options: Any) -> Attention:
    """Attention whose values have another head size than its queries and keys."""
    call = attention(head=head, **options)
    return call._replace(value=meta(2, 4, 16, value, dtype=call.query.dtype))


# The rules of sdp_utils.cpp at their boundaries (the functions named beside them are its own).
@pytest.mark.parametrize(
    ("call", "backend"),
    [
        # check_head_dim_size_flash: one size, at most 256
        (attention(head=256), "flash"),
        (attention(head=257), "math"),
        (pair(64, 72), "efficient"),
        # check_requires_grad_and_head_dim_gt192_constraints: above 192, unless above 224 without dropout
        (attention(head=192, grad=True, capability=(8, 6)), "flash"),
        (attention(head=193, grad=True, capability=(8, 6)), "math"),
        (attention(head=224, grad=True, capability=(8, 6)), "efficient"),
        (attention(head=225, grad=True, capability=(8, 6)), "flash"),
        (attention(head=200, grad=True, capability=(8, 5)), "flash"),
        (attention(head=200, grad=True, capability=(8, 9)), "efficient"),
        (attention(head=200, grad=True, capability=(9, 0), cudnn=91002), "flash"),
        (attention(head=200, grad=True, capability=(12, 0)), "efficient"),
        (attention(head=200, grad=True, capability=(12, 1)), "efficient"),
        # check_sm_version: 8.0 to 12.1 for flash, 5.0 to 12.1 for the memory-efficient kernel
        (attention(capability=(12, 1)), "flash"),
        (attention(capability=(12, 2)), "math"),
        (attention(capability=(5, 0)), "efficient"),
        (attention(capability=(4, 9)), "math"),
        (attention(dtype=BF16, capability=(7, 5), mask=meta(16, 16)), "math"),
        (attention(dtype=BF16, capability=(8, 0), mask=meta(16, 16)), "efficient"),
        # check_head_dim_size_mem_efficient: 16 bytes on tensor cores
        (attention(head=60, capability=(7, 5)), "math"),
        (attention(head=56, capability=(7, 5)), "efficient"),
        (attention(head=63, dtype=FP32, capability=(7, 5)), "efficient"),
        (attention(head=63, capability=(6, 1)), "efficient"),
        (pair(64, 60, dtype=FP32), "efficient"),
        (pair(64, 62, dtype=FP32), "math"),
        # check_nonzero_sequence_lengths_dense
        (attention(tokens=0), "math"),
        (attention(tokens=1), "flash"),
        (attention(keys=1), "flash"),
        # check_causal: square only
        (attention(causal=True), "flash"),
        (attention(tokens=32, keys=16, causal=True), "efficient"),
        # check_batch_size_and_num_heads_dense: shared evenly
        (attention(heads=8, shared=3, grouped=True), "math"),
        (attention(heads=8, shared=8, grouped=True), "flash"),
        # check_prefer_cudnn_attention: Hopper and Blackwell, after cuDNN 9.15.0
        (attention(capability=(9, 0), cudnn=91500), "flash"),
        (attention(capability=(9, 0), cudnn=91501), "cudnn"),
        (attention(capability=(10, 0)), "cudnn"),
        (attention(capability=(8, 9)), "flash"),
        (attention(capability=(12, 0)), "flash"),
        # check_cudnn_tensor_shapes: heads of up to 128 in eighths, or 192 with values of 128
        (attention(capability=(9, 0), head=128), "cudnn"),
        (attention(capability=(9, 0), head=136), "flash"),
        (attention(capability=(9, 0), head=60), "flash"),
        (pair(192, 128, capability=(9, 0)), "cudnn"),
        (pair(192, 128, capability=(10, 0)), "cudnn"),
        (pair(192, 120, capability=(9, 0)), "efficient"),
        (pair(128, 136, capability=(9, 0)), "efficient"),
        (attention(capability=(9, 0), keys=1), "flash"),
        (attention(capability=(9, 0), keys=2), "cudnn"),
        (attention(capability=(9, 0), tokens=1, keys=16), "cudnn"),
        (attention(capability=(9, 0), tokens=1, keys=16, dropout=0.125), "flash"),
        # check_for_attn_mask_cudnn: two or four dimensions, each full or 1, without a gradient
        (attention(capability=(9, 0), mask=meta(16, 16)), "cudnn"),
        (attention(capability=(9, 0), mask=meta(1, 16)), "cudnn"),
        (attention(capability=(9, 0), mask=meta(2, 1, 16, 16)), "cudnn"),
        (attention(capability=(9, 0), mask=meta(4, 16, 16)), "efficient"),
        (attention(capability=(9, 0), mask=meta(16, 16, grad=True)), "efficient"),
        # dropout in sixteenths
        (attention(capability=(9, 0), dropout=0.0625), "cudnn"),
        (attention(capability=(9, 0), dropout=0.03125), "flash"),
    ],
)  # fmt: skip
def test_choice_of_attention_at_the_boundaries_of_its_rules(call: Attention, backend: str) -> None:
    assert choose_backend(call) == backend


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        ({"cudnn": 90000}, True),
        ({"cudnn": 89999}, False),
        ({"cudnn": 91100, "dropout": 0.125}, True),
        ({"cudnn": 91101, "dropout": 0.125}, False),
        ({"cudnn": 91399, "dropout": 0.125}, False),
        ({"cudnn": 91400, "dropout": 0.125}, True),
        ({"cudnn": 91300}, True),
        ({"capability": (8, 0)}, True),
        ({"capability": (7, 5)}, False),
        ({"capability": (12, 1)}, True),
        ({"capability": (12, 2)}, False),
        ({"dtype": FP32}, False),
    ],
)
def test_where_cudnns_attention_runs_at_all(options: dict[str, Any], runs: bool) -> None:
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True):
        assert choose_backend(attention(**options)) == ("cudnn" if runs else "math")


def test_choice_honours_the_users_flags() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert choose_backend(attention()) == "math"
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert choose_backend(attention()) == "efficient"
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert choose_backend(attention()) == "efficient"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="attention kernel"):
        choose_backend(attention(dtype=FP32))


def grad_fn(**options: Any) -> str:
    head, dtype = options.pop("head", 64), options.pop("dtype", FP16)
    tensors = [meta(2, 4, 16, head, dtype=dtype, grad=True) for _ in range(3)]
    with cuda_semantics():
        out = F.scaled_dot_product_attention(*tensors, **options)
        assert out.shape == tensors[0].shape
        assert out.dtype is dtype
        out.sum().backward()
    assert all(t.grad is not None and t.grad.shape == t.shape for t in tensors)
    return type(out.grad_fn).__name__


def test_attention_runs_forward_and_backward() -> None:
    assert grad_fn() == "ScaledDotProductFlashAttentionBackward0"
    assert grad_fn(head=60) == "SliceBackward0"
    assert grad_fn(dtype=FP32) == "ScaledDotProductEfficientAttentionBackward0"
    assert grad_fn(attn_mask=meta(16, 16, dtype=torch.bool)) == "ScaledDotProductEfficientAttentionBackward0"
    assert grad_fn(attn_mask=meta(4, 16, 16, dtype=FP16)) == "ScaledDotProductEfficientAttentionBackward0"
    assert grad_fn(dtype=FP64, dropout_p=0.5) == "UnsafeViewBackward0"


def test_flash_keeps_its_inputs_its_output_and_the_statistics() -> None:
    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x * 1, x * 1)

    x = meta(2, 4, 16, 64, dtype=BF16, grad=True)
    with cuda_semantics():
        kept, _ = kept_for_backward(Attend(), x)
    one = 2 * 2 * 4 * 16 * 64
    generator = kept - (4 * one + 4 * 2 * 4 * 16)  # q, k, v, output; one float32 for each row
    assert 0 <= generator <= 32  # seed and offset: two small tensors


# The layout of (batch 2, heads 4, length 16, head 64), and what attention and the copy of its result by position make:
# one is 2·4·16·64 elements. In PyTorch 2.1 the result lies by length, in 2.2 like the query.
@pytest.mark.parametrize(
    ("order", "release", "ones"),
    [
        ((0, 2, 1, 3), (2, 1), 1),  # by length: nothing is copied
        ((0, 2, 1, 3), (2, 2), 1),
        ((2, 0, 1, 3), (2, 1), 1 + 3 + 1),  # by position, as nn.MultiheadAttention has it: query, key, value, result
        ((2, 0, 1, 3), (2, 2), 1),
        ((2, 0, 1, 3), None, 1),
    ],
)
def test_the_first_flash_attention_packs_its_batch(
    order: tuple[int, ...], release: tuple[int, int] | None, ones: int
) -> None:
    shape = (2, 4, 16, 64)
    back = tuple(sorted(range(4), key=order.__getitem__))
    x = meta(*(shape[dim] for dim in order), dtype=FP16).permute(back)
    ledger = Ledger("meta")
    with ledger, cuda_semantics(release=release):
        ledger.enter(x, "input")
        F.scaled_dot_product_attention(x, x, x).permute(order).contiguous()
    made = [each.bytes for each in ledger.storages(frozenset())[1:]]
    ledger.close()
    assert made.count(2 * 2 * 4 * 16 * 64) == ones


@pytest.mark.parametrize(
    ("release", "dropout", "states"), [((2, 13), 0.0, 0), ((2, 13), 0.1, 0), ((2, 14), 0.0, 2), ((2, 14), 0.1, 0)]
)
def test_the_state_of_efficient_attentions_random_numbers(
    release: tuple[int, int], dropout: float, states: int
) -> None:
    """Output 2·4·16·64, and sums for 32 rows instead of 16. A seed and an offset, which `meta` would always have there,
    are on the host, but since 2.14 without dropout.
    """

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=dropout)

    made = storages_made(attend, meta(2, 4, 16, 64, grad=True), release=release)
    name = "_scaled_dot_product_efficient_attention"
    assert made == [(name, 4 * 2 * 4 * 16 * 64), (name, 4 * 2 * 4 * 32)] + [(name, 8)] * states


@pytest.mark.parametrize("causal", [False, True])
def test_the_scores_of_mathematical_attention(causal: bool) -> None:
    """attention.cpp: a mask is added in place; the weights are cast for a caller that reads them, before the product.

    Scores of 2·4·16·16 floats, softmax, and what the safe softmax compares: a byte for each score, one for each row.
    """
    x, scores = meta(2, 4, 16, 64, dtype=BF16), 2 * 4 * 16 * 16
    with sdpa_kernel(SDPBackend.MATH):
        made = storages_made(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=causal), x)
    assert [size for _, size in made].count(4 * scores) == 2
    softmax = [size for op, size in made if op == "_safe_softmax"]
    assert softmax == [4 * scores, scores, 2 * 4 * 16, 4]
    after = made[made.index(("_safe_softmax", 4)) + 1 :]
    assert [size for _, size in after] == [2 * scores, 4 * 2 * 4 * 16 * 64, 2 * 2 * 4 * 16 * 64]


# (batch 2, heads 4, length 40, head 72): float32 sums of rows, and what the gradients are accumulated in
INSIDE: dict[str, tuple[torch.dtype, list[int]]] = {
    # whole blocks of 128 rows, heads of a multiple of 32: 96
    "flash": (BF16, [4 * 2 * 4 * 128, 4 * 2 * 128 * 4 * 96]),
    # the sums, and two blocks of 128 queries by 64 numbers of a head, with a lock of 4 numbers each
    "efficient": (FP32, [4 * 2 * 4 * 40, 4 * 2 * 4 * 2 * (128 * 64 + 4)]),
}


@pytest.mark.parametrize("backend", INSIDE)
@pytest.mark.parametrize("dense", [True, False])
def test_attentions_backward_takes_memory_for_itself(backend: str, dense: bool) -> None:
    dtype, inside = INSIDE[backend]
    x = meta(2, 40, 4, 72, dtype=dtype, grad=True)
    with cuda_semantics():
        out = F.scaled_dot_product_attention(*([x.transpose(1, 2)] * 3))
        assert backend in type(out.grad_fn).__name__.lower()
    grad = meta(2, 40, 4, 72, dtype=dtype).transpose(1, 2) if dense else meta(2, 4, 40, 72, dtype=dtype)
    made = storages_made(lambda given: out.backward(given), grad)
    backward = [size for op, size in made if op == f"_scaled_dot_product_{backend}_attention_backward"]
    gradients = [dtype.itemsize * 2 * 40 * 4 * 72] * 3
    assert backward == [*gradients, *([] if dense else gradients[:1]), *inside]


def test_the_products_are_gone_when_the_accumulators_are_made() -> None:
    """64 queries with heads of 64: the products, and the sums before they are brought into another order, are more."""
    x = meta(2, 64, 4, 64).transpose(1, 2)
    given = (x, x, x, x, None, x, meta(2, 4, 64), None, None, 0.0, [True, True, True, False])
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    taken = [temporary.bytes for temporary in kernel_temporaries(backward, given)]
    assert taken == [4 * 2 * 4 * 64, 4 * 2 * 64 * 4 * 64, 4 * 2 * 64 * 4]
    assert sum(taken[1:]) > 4 * 2 * 4 * (64 * 64 + 4)


# kernel_backward.h, `workspace_size`; cutlassB.h, in the order in which kernels are tried
@pytest.mark.parametrize(
    ("dtype", "capability", "head", "length", "dropout", "numbers"),
    [
        (FP32, (8, 0), 16, 128, 0.0, 2 * (64 * 64 + 4)),  # blocks are 64 wide, also for a head of 16
        (FP32, (7, 5), 64, 100, 0.0, 2 * (64 * 64 + 4)),
        (FP32, (8, 0), 128, 256, 0.0, 2 * 2 * (128 * 64 + 4)),
        (FP32, (8, 9), 128, 256, 0.0, 4 * 2 * (64 * 64 + 4)),  # 100 KB of shared memory hold no 128 queries
        (FP32, (6, 1), 64, 128, 0.0, 0),  # no kernel splits the keys there
        (FP16, (6, 1), 64, 128, 0.0, 2 * (64 * 64 + 4)),
        (FP16, (7, 5), 64, 128, 0.0, 2 * (64 * 64 + 4)),
        (BF16, (8, 0), 128, 256, 0.0, 2 * (128 * 128 + 4)),
        (BF16, (8, 6), 80, 256, 0.0, 2 * 2 * (128 * 64 + 4)),  # a kernel for heads up to 96
        # Heads that don't fit into registers: the gradients of keys and values too, in four parts of 64
        (BF16, (8, 6), 80, 256, 0.1, 4 * 2 * (64 * 64 + 4) + 4 * 64 * (128 + 128)),
        (FP16, (7, 5), 128, 256, 0.0, 4 * 2 * (64 * 64 + 4) + 4 * 64 * (128 + 128)),
        (BF16, (9, 0), 256, 256, 0.0, 2 * 4 * (128 * 64 + 4) + 4 * 64 * (256 + 256)),
        # No more than 200 / 8 parts in all
        (FP16, (7, 5), 128, 4096, 0.0, 64 * 2 * (64 * 64 + 4) + 25 * 64 * (128 + 128)),
    ],
)
def test_what_memory_efficient_attention_adds_up_the_gradients_in(
    dtype: torch.dtype, capability: tuple[int, int], head: int, length: int, dropout: float, numbers: int
) -> None:
    x = meta(2, length, 4, head, dtype=dtype).transpose(1, 2)
    given = (x, x, x, x, None, x, meta(2, 4, length), None, None, dropout, [True, True, True, False])
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    with cuda_semantics(capability=capability):
        taken = [temporary.bytes for temporary in kernel_temporaries(backward, given)]
    products = [4 * 2 * length * 4 * head, 4 * 2 * length * 4] if dtype is FP32 else []
    assert taken == [4 * 2 * 4 * length, *([4 * 2 * 4 * numbers] if 4 * 2 * 4 * numbers > sum(products) else products)]


def test_few_keys_of_many_heads_are_not_split() -> None:
    """attention_backward.cu: from 256 heads on, up to two blocks of keys."""
    settings = {"half": True, "capability": (7, 5), "dropout": False}
    tiles, part = 2 * 2 * (64 * 64 + 4), 64 * (128 + 128)
    assert accumulators(64, 4, 128, 128, 128, 128, **settings) == 4 * 256 * (tiles + part)
    assert accumulators(25, 4, 128, 128, 128, 128, **settings) == 4 * 100 * (tiles + 2 * part)
    assert accumulators(64, 4, 128, 192, 128, 128, **settings) == 4 * 256 * (tiles + part)  # 200 / 256 parts: one


# mha_bwd: `head_size_rounded = head_size <= 192 ? round_multiple(head_size, 32) : 256`
@pytest.mark.parametrize(("head", "width"), [(64, 64), (72, 96), (191, 192), (192, 192), (193, 256), (256, 256)])
def test_flash_accumulates_in_heads_of_a_multiple_of_32_and_from_193_on_of_256(head: int, width: int) -> None:
    """DeepSeek's heads are 192 wide, the last that are not widened to 256."""
    query = meta(2, 40, 4, head, dtype=BF16).transpose(1, 2)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    rows_and_query = [temporary.bytes for temporary in kernel_temporaries(backward, (query, query, query, query))]
    assert rows_and_query == [4 * 2 * 4 * 128, 4 * 2 * 128 * 4 * width]


def test_heads_that_share_keys_have_gradients_of_their_own_inside() -> None:
    query, shared = meta(2, 8, 40, 64, dtype=BF16), meta(2, 2, 24, 64, dtype=BF16)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    taken = [
        each.bytes
        for each in kernel_temporaries(
            backward, (query.transpose(1, 2).contiguous().transpose(1, 2), query, shared, shared)
        )
    ]
    assert taken[-2:] == [2 * 2 * 24 * 8 * 64] * 2 and len(taken) == 4


# cuda/Indexing.cu, `index_put_with_sort_kernel`: places, their order, and both sorted; CUB's sort has another copy of
# both where the places have more than 8 bits and more than 256 × 9 pairs are sorted.
@pytest.mark.parametrize(
    ("shape", "indices", "values", "taken"),
    [
        pytest.param((8192, 64), [(2305,)], (2305, 64), [8 * 2305] * 4 + [16 * 2305], id="13 bits"),
        pytest.param((256, 64), [(2305,)], (2305, 64), [8 * 2305] * 4, id="8 bits"),
        pytest.param((8192, 64), [(2304,)], (2304, 64), [8 * 2304] * 4, id="one block sorts them"),
        pytest.param((8, 300, 4), [None, (50, 50)], (8, 50, 50, 4), [8 * 2500] * 4 + [16 * 2500], id="9 bits of 300"),
        pytest.param((64, 64), [(5, 1), (7,)], (5, 7), [8 * 35] * 4, id="two together"),
        pytest.param((8, 9, 7), [(5,), None, (5,)], (5, 9), [4 * 504, *[8 * 5] * 4], id="apart: the tensor is copied"),
        pytest.param((64, 9), [(5,)], (1, 9), [4 * 45, *[8 * 5] * 4], id="values that are expanded"),
        pytest.param((64, 9), [None, None], (1, 9), [], id="nothing indexed"),
    ],
)
def test_adding_by_index_sorts_the_indices(
    shape: tuple[int, ...], indices: list[tuple[int, ...] | None], values: tuple[int, ...], taken: list[int]
) -> None:
    places = [None if index is None else meta(*index, dtype=torch.int64) for index in indices]
    put, arguments = torch.ops.aten.index_put_.default, (meta(*shape), places, meta(*values))
    assert [each.bytes for each in kernel_temporaries(put, (*arguments, True))] == taken
    assert not kernel_temporaries(put, arguments)


def test_adding_under_a_mask_sorts_as_many_places_as_there_are_values() -> None:
    put, mask = torch.ops.aten.index_put_.default, meta(8, 16, dtype=torch.bool)
    for values, pairs in (((5, 32), 5), ((0, 32), 0)):
        taken = kernel_temporaries(put, (meta(8, 16, 32), [mask], meta(*values), True))
        assert [each.bytes for each in taken] == [8 * 5] * 4 * (pairs > 0)


# cuda/EmbeddingBackwardKernel.cu: `max_partial_segment = numel / NROWS_PER_THREAD + max_segments`
@pytest.mark.parametrize(
    ("tokens", "table", "sums"), [(3072, 1000, 0), (4096, 1000, 409 + 1000), (4096, 50_000, 409 + 4096)]
)
def test_the_gradient_of_an_embedding_sums_rows_of_one_index_in_float32(tokens: int, table: int, sums: int) -> None:
    backward = torch.ops.aten.embedding_dense_backward.default
    grad, indices = meta(tokens, 64, dtype=BF16), meta(tokens, dtype=torch.int64)
    taken = [each.bytes for each in kernel_temporaries(backward, (grad, indices, table, -1, False))]
    distinct = min(tokens, table)
    assert taken == [
        *[8 * n for n in (tokens, tokens, tokens, distinct, distinct, sums) if sums],
        *[4 * sums * 64][:sums],
    ]


CUDNN_FORWARD = torch.ops.aten._scaled_dot_product_cudnn_attention.default
CUDNN_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default

SUMS, ACCUMULATED = 4 * 2 * 8 * 200, 4 * 2 * 8 * 200 * 64
"""Of (batch 2, heads 8, length 200, head 64), in float32."""


@pytest.mark.parametrize(
    ("capability", "heads", "dropout", "forward", "backward"),
    [
        ((9, 0), 8, 0.0, [256], SUMS + ACCUMULATED + 256),
        ((9, 0), 8, 0.1, [256], SUMS + ACCUMULATED + 256),
        # two gradients of half precision for each of 8 heads and 300 keys
        ((9, 0), 2, 0.0, [256], SUMS + ACCUMULATED + 256 + 2 * 2 * 2 * 8 * 300 * 64),
        ((10, 0), 8, 0.0, [], SUMS + ACCUMULATED),
        # a bit for each of 256 × 384 scores
        ((10, 0), 8, 0.1, [2 * 8 * 256 * 384 // 8 + 128], SUMS + ACCUMULATED + 2 * 8 * 256 * 384 // 8 + 128),
    ],
)
def test_cudnn_attention_takes_one_workspace(
    capability: tuple[int, int], heads: int, dropout: float, forward: list[int], backward: int
) -> None:
    query, keys, out = meta(2, 8, 200, 64, dtype=BF16), meta(2, heads, 300, 64, dtype=BF16), meta(2, 8, 200, 64)
    other = meta(2, 200, 8, 64, dtype=BF16).transpose(1, 2)
    given = (query, keys, keys, out, None, None, None, None, None, None, 200, 300, dropout, False)
    with cuda_semantics(capability=capability):
        there = kernel_temporaries(CUDNN_FORWARD, (query, keys, keys, None, True, dropout))
        assert [each.bytes for each in there] == forward
        assert [each.bytes for each in kernel_temporaries(CUDNN_BACKWARD, (query, *given))] == [backward]
        # a gradient in another order than the output's is brought into that first
        taken = [each.bytes for each in kernel_temporaries(CUDNN_BACKWARD, (other, *given))]
        assert taken == [2 * 2 * 8 * 200 * 64, backward]


def test_a_step_on_hopper_counts_cudnns_workspace() -> None:
    def attend(x: Tensor) -> None:
        F.scaled_dot_product_attention(x, x, x).backward(x)

    x = meta(2, 4, 40, 64, dtype=BF16, grad=True)
    made = storages_made(attend, x, capability=(9, 0))
    inside = [size for op, size in made if op == "_scaled_dot_product_cudnn_attention_backward"]
    assert inside[-1] == 4 * 2 * 4 * 40 * 65 + 256


def test_attention_is_cast_by_autocast() -> None:
    with cuda_semantics(), autocast_region(BF16):
        out = F.scaled_dot_product_attention(*(meta(2, 4, 16, 64, grad=True) for _ in range(3)))
    assert (out.dtype, type(out.grad_fn).__name__) == (BF16, "ScaledDotProductFlashAttentionBackward0")


def test_math_attention_uses_the_fused_dropout() -> None:
    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    x = meta(2, 4, 16, 64, dtype=FP64, grad=True)
    with cuda_semantics():
        fused, _ = kept_for_backward(Attend(), x)
    plain, _ = kept_for_backward(Attend(), x)
    assert plain - fused == (8 - 1) * 2 * 4 * 16 * 16  # the mask: one byte for each score instead of a double


def test_math_attention_on_the_cpu_uses_the_fused_dropout_too() -> None:
    """A real step that stands for CUDA's draws the same mask, so that it can be compared with a prediction."""

    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    real, planned = torch.randn(2, 4, 16, 64, requires_grad=True), meta(2, 4, 16, 64, grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        with cuda_semantics(stands_for={"cpu"}):
            fused, out = kept_for_backward(Attend(), real)
            out.sum().backward()
        with cuda_semantics():
            assert kept_for_backward(Attend(), planned)[0] == fused
        assert kept_for_backward(Attend(), real)[0] - fused == (4 - 1) * 2 * 4 * 16 * 16


def test_malformed_attention_fails_as_in_pytorch() -> None:
    q = meta(2, 4, 16, 64)
    with cuda_semantics():
        with pytest.raises(RuntimeError, match="dtype"):
            F.scaled_dot_product_attention(q, q.half(), q)
        with pytest.raises(RuntimeError, match="is_causal"):
            F.scaled_dot_product_attention(q, q, q, attn_mask=meta(16, 16), is_causal=True)
