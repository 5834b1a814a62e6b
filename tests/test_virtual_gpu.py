"""Programs on a GPU that isn't there: what PyTorch answers, what is recorded, and that nothing stays behind."""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
import re
import runpy
import sys
import textwrap
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import accumulate, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import memsize
from memsize import AllocatorConfig, ProgramRun, Trace, World
from memsize.cli import run as command
from memsize.documents import document
from memsize.documents.sections import Table
from memsize.errors import ForwardError, InputError
from memsize.records.trace import Event
from memsize.render import render
from memsize.units import format_bytes
from tests.conftest import Python
from tests.gpus import card, cuda_context, replay
from tests.known_values import ALL_DISTINCT
from tests.models import Ledger, Small
from tests.programs import gpu, program as program_on, record_of, run_module, run_script as ran
from tests.records import Holder, Interval, KeptGradients, WentOn, split_phase

MiB = 2**20


# -- what PyTorch answers ---------------------------------------------------------------------------------------------


def test_the_machine_has_one_gpu_of_that_name() -> None:
    with gpu("t4"):
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
        assert torch.cuda.get_device_name() == "Tesla T4"
        assert torch.cuda.get_device_capability() == (7, 5)
        assert torch.cuda.get_device_properties(0).total_memory == card("t4").bytes
        assert torch.accelerator.is_available() and torch.accelerator.current_accelerator() == torch.device("cuda")
        assert torch.backends.cudnn.is_available() and torch.version.cuda
    assert not torch.accelerator.is_available()


def test_replaced_functions_have_the_parameters_of_the_originals() -> None:
    """Accelerate passes ``set_to_none`` on only to optimizers whose `zero_grad` has it."""
    functions = (torch.optim.Optimizer.zero_grad, torch.save, nn.Module.register_buffer, nn.Module.to)
    before = [inspect.signature(function) for function in functions]
    with gpu():
        functions = (torch.optim.Optimizer.zero_grad, torch.save, nn.Module.register_buffer, nn.Module.to)
        assert [inspect.signature(function) for function in functions] == before


def test_tensors_on_the_gpu_say_so_and_those_on_the_cpu_keep_their_values() -> None:
    with gpu():
        there, here = torch.ones(2, 3, device="cuda"), torch.tensor([1.0, 2.0])
        assert there.device == torch.device("cuda", 0) and there.is_cuda and there.get_device() == 0
        assert there.type() == "torch.cuda.FloatTensor"
        assert (here * 2).tolist() == [2.0, 4.0] and not here.is_cuda
        assert here.cuda().device == here.to("cuda:0", non_blocking=True).device == torch.device("cuda", 0)
        assert here.type(torch.cuda.FloatTensor).is_cuda
        assert here.cuda().cpu().device == torch.device("cpu")
        assert "cuda:0" in repr(there) and "size=(2, 3)" in repr(there)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.bfloat16])
def test_a_number_leaves_the_dtype_of_a_single_element_on_the_cpu(dtype: torch.dtype) -> None:
    number = 2 if dtype is torch.int32 else 2.0
    with gpu():
        here = torch.tensor(3, dtype=dtype)
        results = [here * number, here + number, torch.where(torch.tensor(True), here, number)]
    assert {result.dtype for result in results} == {dtype}


def test_only_what_the_program_puts_on_meta_says_that_it_is_there() -> None:
    with gpu():
        model = nn.Linear(4, 4, device="meta")
        assert model.weight.is_meta and not torch.ones(2, device="cuda").is_meta and not torch.ones(2).is_meta
        model.to_empty(device="cuda")
        assert not model.weight.is_meta
        with torch.device("cuda"):  # a mode, which is asked for attributes too
            assert not torch.ones(2).is_meta and torch.ones(2).to("cuda").is_cuda
        nn.init.trunc_normal_(model.weight)  # draws until all are in range
        nn.init.orthogonal_(model.weight)
    assert model.weight.is_meta


def test_a_tensor_on_meta_is_there_right_after_a_backward() -> None:
    with gpu():
        nn.Linear(8, 8).cuda()(torch.ones(4, 8, device="cuda")).sum().backward()
        assert torch.zeros(3, device="meta").is_meta


MEBIBYTE = 1024**2


class _Keeping(torch.autograd.Function):
    """The identity, whose gradient is a new tensor that stays alive."""

    kept: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        _Keeping.kept.append(gradients[0] * 1)
        return _Keeping.kept[-1]


def test_replaced_data_has_the_new_values() -> None:
    """As DINOv3 fills its model with NaN before the periods of its rotary embedding replace a buffer's data."""
    with memsize.virtual_gpu("t4"):
        periods = torch.full((8,), float("nan"), device="cuda")
        assert bool(periods.isnan().any())
        periods.data = torch.arange(8.0, device="cuda")
        assert not bool(periods.isnan().any())
        periods.data = torch.full((8,), float("inf"), device="cuda")
        assert bool(periods.isinf().all())


class _Tagging(torch.autograd.Function):
    """A product that marks the weight which it saved, as Megatron's layers do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, None)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        weight.is_tagged = isinstance(weight, nn.Parameter)
        return gradients[0] @ weight.t(), x.t() @ gradients[0]


def test_a_parameter_that_a_function_saved_is_the_same_object_in_its_backward() -> None:
    with memsize.virtual_gpu("t4"):
        weight = nn.Parameter(torch.empty(8, 8, device="cuda"))
        _Tagging.apply(torch.empty(2, 8, device="cuda", requires_grad=True) * 2, weight).sum().backward()
        assert weight.is_tagged
        assert weight.grad is not None
    assert "saved_tensors" not in vars(torch.autograd.function.BackwardCFunction)


class _Named(torch.autograd.Function):
    """The identity, which remembers a name under the attribute that nodes have for their own, as lingua's probes do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.name = "probe"
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] - gradients[0].mean()


def test_a_function_may_have_a_name_of_its_own() -> None:
    with memsize.virtual_gpu("t4"):
        x = torch.empty(8, device="cuda", requires_grad=True)
        _Named.apply(x).sum().backward()
        assert x.grad is not None


# input_buffer.cpp `accumulate`: the sum so far and one more gradient; where somebody keeps the first, the sum is new.
@pytest.mark.parametrize(("use", "alive"), [(lambda x: x * 3.0, 2), (_Keeping.apply, 6)])
def test_gradients_that_meet_are_summed_in_place_if_nobody_keeps_them(use: Callable[[Any], Any], alive: int) -> None:
    """Four gradients of 1 MiB: those that are kept are alive at the end, with their sum and what is made of it."""
    with memsize.virtual_gpu("t4"):
        hidden = torch.empty(512, 512, device="cuda", requires_grad=True) * 2
        loss = sum(use(hidden).sum() for _ in range(4))
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        rounded = (torch.cuda.max_memory_allocated() - before) / MEBIBYTE
        _Keeping.kept.clear()
    assert alive <= rounded < alive + 0.01


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_copies_the_expanded_gradient_of_a_sum(norm: Callable[[int], nn.Module]) -> None:
    """The copy and the gradient of the input, 8 MiB each (cuda/layer_norm_kernel.cu: ``dY.contiguous()``)."""
    with memsize.virtual_gpu("t4"):
        layer = norm(1024).to("cuda", torch.bfloat16)
        loss = layer(torch.empty(4096, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)).sum()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        taken = torch.cuda.max_memory_allocated() - before
    assert 16 <= taken / MEBIBYTE < 17


def test_a_model_that_the_block_drops_leaves_the_gpu() -> None:
    with memsize.virtual_gpu("t4"):
        for _ in range(2):
            model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256)).cuda()
            del model
            assert torch.cuda.memory_allocated() == 0


def test_the_gpu_of_a_block_has_the_stack_that_it_names() -> None:
    """cuBLAS takes 32 MiB on Blackwell from PyTorch 2.12 on, before that as much as on other cards (Context.cpp)."""
    taken = []
    for stack in ("torch=2.11", "torch=2.12"):
        with memsize.virtual_gpu("b200", stack=stack):
            product = torch.ones(128, 128, device="cuda") @ torch.ones(128, 128, device="cuda")
            del product
            taken.append(torch.cuda.memory_allocated())
    assert taken == [8_519_680, 32 * 1024**2]


def test_a_model_that_goes_to_meta_leaves_the_gpu() -> None:
    with gpu():
        model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256)).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        model(torch.ones(2, 256, device="cuda")).sum().backward()
        held, weight = torch.cuda.memory_allocated(), model[0].weight
        model.to("meta", torch.float16)
        # Weights of 256 x 256 numbers, and with them biases and the norm's four of 256; the gradients of five of these,
        # and a counter of 8 bytes in a block of 512
        assert held - torch.cuda.memory_allocated() == 4 * (2 * 256 * 256 + (4 + 1) * 256 + 3 * 256) + 512
        assert all(each.is_meta for each in model.state_dict().values())
        assert model[0].weight.dtype is torch.float16 and model[1].num_batches_tracked.dtype is torch.int64
        assert model[0].weight is weight is optimizer.param_groups[0]["params"][0] and weight.requires_grad
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            model.cuda()
        assert not model.to_empty(device="cuda")[0].weight.is_meta
        with torch.device("cuda"):
            assert nn.Linear(2, 2).to("meta").weight.is_meta and nn.Linear(2, 2).cpu().cuda().weight.is_cuda


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, device="cuda"),
        lambda: torch.tensor([1, 2, 3], device="cuda:0"),
        lambda: torch.arange(3).cuda(),
        lambda: torch.empty_strided((3,), (1,), device=torch.device("cuda")),
        lambda: torch.randn(3, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1)),
    ],
)
def test_every_way_to_make_a_tensor_on_the_gpu(make: Callable[[], torch.Tensor]) -> None:
    with gpu():
        assert make().device == torch.device("cuda", 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3).to("cuda:1"),
        lambda: torch.ones(3).to(device="cuda:1"),
        lambda: torch.ones(3).to(torch.device("cuda", 1)),
        lambda: torch.ones(3).to(1),
        lambda: torch.ones(3).cuda(1),
        lambda: torch.ones(3, device="cuda").to("cuda:1"),
        lambda: torch.ones(3, device="cuda:1"),
        lambda: torch.ones(3, device=1),
        lambda: torch.tensor([1, 2], device="cuda:1"),
        lambda: nn.Linear(3, 3).to("cuda:1"),
        lambda: nn.Linear(3, 3).to(1),
        lambda: nn.Linear(3, 3).cuda(1),
        lambda: nn.Linear(3, 3, device="cuda:1"),
        lambda: torch.Generator("cuda:1"),
        lambda: torch.cuda.set_device(1),
        lambda: torch.cuda.mem_get_info(1),
        lambda: torch.cuda.mem_get_info("cuda:1"),
    ],
)
def test_there_is_no_second_gpu(make: Callable[[], object]) -> None:
    with gpu():
        with pytest.raises(torch.AcceleratorError, match="CUDA error: invalid device ordinal"):
            make()
        with pytest.raises(torch.AcceleratorError, match="CUDA error: invalid device ordinal"), torch.device("cuda:1"):
            torch.ones(3)
        assert torch.ones(3, device="cuda:0").is_cuda


@pytest.mark.parametrize(
    "ask",
    [
        torch.cuda.memory_allocated,
        torch.cuda.max_memory_reserved,
        torch.cuda.memory_summary,
        torch.cuda.reset_peak_memory_stats,
        torch.cuda.reset_accumulated_memory_stats,
        torch.cuda.get_per_process_memory_fraction,
    ],
)
def test_what_is_held_on_a_gpu_is_asked_by_its_number(ask: Callable[[Any], Any]) -> None:
    """With one GPU there is no second; with two, this process has nothing on that of the other."""
    with gpu():
        ask(0)
        with pytest.raises(RuntimeError, match=r"^Invalid device argument 1: did you call init\?$"):
            ask("cuda:1")
    with gpu(world=memsize.World(2, rank=1)):
        torch.cuda.set_device(1)
        kept = torch.ones(1024, device="cuda")
        ask(0)
        torch.cuda.reset_peak_memory_stats(0)
        held = [torch.cuda.max_memory_allocated(device) for device in (None, 1, 0)]
        assert held == [kept.nbytes, kept.nbytes, 0]


def test_resetting_accumulated_statistics_leaves_current_and_peak() -> None:
    """As in PyTorch's `Stat.reset_accumulated` (c10/core/CachingDeviceAllocator.h)."""
    mebibyte = 1 << 20
    with gpu():
        kept = torch.empty(3 * mebibyte, dtype=torch.uint8, device="cuda")
        freed = torch.empty(2 * mebibyte, dtype=torch.uint8, device="cuda")
        del freed
        before = torch.cuda.memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
        after = torch.cuda.memory_stats()
        assert kept.is_cuda
        figures = ("current", "peak", "allocated", "freed")
        assert [before[f"allocated_bytes.all.{each}"] // mebibyte for each in figures] == [3, 5, 5, 2]
        assert [after[f"allocated_bytes.all.{each}"] // mebibyte for each in figures] == [3, 5, 0, 0]
        assert (after["allocation.all.allocated"], after["segment.all.allocated"]) == (0, 0)
        assert (after["allocation.all.current"], after["allocation.all.peak"]) == (1, 2)


def test_resetting_accumulated_statistics_forgets_refused_requests() -> None:
    """As in PyTorch's `resetAccumulatedStats` (c10/cuda/CUDACachingAllocator.cpp), which zeroes both counts."""
    counts = ("num_ooms", "num_alloc_retries")
    with gpu():
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        before = torch.cuda.memory_stats()
        torch.cuda.reset_peak_memory_stats()
        assert [before[name] for name in counts] == [torch.cuda.memory_stats()[name] for name in counts] == [1, 1]
        torch.cuda.reset_accumulated_memory_stats()
        assert [torch.cuda.memory_stats()[name] for name in counts] == [0, 0]


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_old_types_make_tensors_and_know_them() -> None:
    with gpu():
        x = torch.cuda.FloatTensor(2, 3).fill_(1.0)
        assert x.is_cuda and x.shape == (2, 3) and isinstance(x, torch.cuda.FloatTensor)
        assert torch.cuda.LongTensor([1, 2, 3]).tolist() == [1, 2, 3]
        assert not isinstance(torch.ones(1), torch.cuda.FloatTensor) and not isinstance(x, torch.cuda.HalfTensor)
        torch.set_default_tensor_type(torch.cuda.HalfTensor)
        try:
            assert torch.ones(2).type() == "torch.cuda.HalfTensor"
        finally:
            torch.set_default_tensor_type(torch.FloatTensor)
        assert torch.ones(2).type() == "torch.FloatTensor"


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
@pytest.mark.parametrize(
    "choose",
    [lambda: torch.set_default_device("cuda"), lambda: torch.set_default_tensor_type(torch.cuda.HalfTensor)],
    ids=["device", "tensor type"],
)
def test_a_block_does_not_leave_its_gpu_as_the_default_device(choose: Callable[[], None]) -> None:
    try:
        with memsize.virtual_gpu("t4"):
            choose()
            assert torch.ones(2).is_cuda
        assert not torch.ones(2).is_cuda and torch.ones(2).sum() == 2
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_default_device_reaches_what_names_none() -> None:
    with gpu():
        with torch.device("cuda"):
            assert torch.ones(2).is_cuda and torch.tensor([1, 2]).is_cuda and nn.Linear(2, 2).weight.is_cuda
        torch.set_default_device("cuda")
        try:
            assert torch.ones(2).is_cuda
        finally:
            torch.set_default_device(None)
        assert not torch.ones(2).is_cuda


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # PyTorch before 2.13
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_take_their_indices_and_values_to_the_gpu(layout: torch.layout) -> None:
    """A ring of 200 nodes with loops: 400 elements."""
    nodes, features, elements = 200, 8, 400
    rows, columns = torch.arange(elements) // 2, (torch.arange(elements) // 2 + torch.arange(elements) % 2) % nodes
    adjacency = torch.sparse_coo_tensor(
        torch.stack((rows, columns)), torch.ones(elements), (nodes, nodes), check_invariants=False
    ).coalesce()
    if layout is torch.sparse_csr:
        adjacency = adjacency.to_sparse_csr()
    indices = 2 * elements * 8 if layout is torch.sparse_coo else (nodes + 1) * 8 + elements * 8
    with gpu() as program:

        def requested() -> int:
            return sum(event.delta for event in program.ledger.events)

        there = adjacency.to("cuda")
        assert requested() == indices + elements * 4
        assert (there.device.type, there.layout, there._nnz(), there.dtype) == ("cuda", layout, elements, torch.float32)
        half = there.to(torch.float16)
        assert half.dtype is torch.float16 and half.layout is layout and half._nnz() == elements
        assert requested() == 2 * indices + elements * (4 + 2)
        del half
        x = torch.ones(nodes, features, device="cuda", requires_grad=True)
        held = requested()
        products = [torch.spmm(there, x), torch.sparse.mm(there, x), there @ x]
        assert requested() >= held + 3 * nodes * features * 4
        assert {(each.shape, each.device.type, each.layout) for each in products} == {
            ((nodes, features), "cuda", torch.strided)
        }
        sum(each.sum() for each in products).backward()
        assert x.grad is not None and x.grad.shape == x.shape and x.grad.is_cuda
        assert there.cpu().layout is layout
    assert "cuda" not in str(adjacency.device)


def test_a_batch_that_goes_to_the_gpu_is_its_input_to_the_last_step(tmp_path: Path) -> None:
    """The targets, which only the loss takes, and a mask of the batch; not what the loss makes of them."""
    result, error = ran(
        tmp_path,
        """
        import torch
        from torch.nn import functional
        net = torch.nn.Linear(64, 8, device="cuda")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(5):
            x, y, weight = torch.randn(1024, 64), torch.zeros(1024, dtype=torch.long), torch.ones(1024, 1)
            x, y, weight = x.cuda(), y.to("cuda", non_blocking=True), weight.cuda()
            loss = functional.cross_entropy(net(x) * weight, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
        steps=3,
    )
    assert error is None
    copies = [storage for storage in result.trace.storages if storage.op == "_to_copy"]
    assert {(storage.role, storage.bytes) for storage in copies} == {
        ("input", 1024 * 64 * 4),
        ("input", 1024 * 8),
        ("input", 1024 * 4),
    }


def test_a_copy_from_the_host_is_what_uses_it_says(tmp_path: Path) -> None:
    """Weights are parameters, a loaded state is the optimizer's, and activations that were offloaded are no inputs."""
    result, error = ran(
        tmp_path,
        """
        import torch
        net = torch.nn.Linear(64, 64).cuda()
        weight = torch.nn.Parameter(torch.ones(64, 64).cuda())
        optimizer = torch.optim.Adam([*net.parameters(), weight])
        for _ in range(3):
            with torch.autograd.graph.save_on_cpu():
                loss = (net(torch.ones(16, 64, device="cuda")).relu() @ weight).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(optimizer.state_dict())
        """,
        steps=3,
    )
    assert error is None
    assert not any(storage.role == "input" and storage.op == "_to_copy" for storage in result.trace.storages)
    parameters = [storage.bytes for storage in result.trace.storages if storage.role == "parameter"]
    assert sorted(parameters) == [64 * 4, 64 * 64 * 4, 64 * 64 * 4]


def test_products_with_a_large_sparse_matrix_are_not_computed(tmp_path: Path) -> None:
    """A million nodes, of which two are linked: dense, that were 4 TB, and a million million multiply-adds."""
    found, error = ran(
        tmp_path,
        """
        import torch
        links = torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 1.0], (10**6, 10**6), check_invariants=True).cuda()
        layer = torch.nn.Linear(2, 2, bias=False).cuda()
        layer.forward = lambda x: torch.spmm(links, x)
        y = layer(torch.ones(10**6, 2, device="cuda"))
        """,
    )
    assert error is None
    assert [storage.bytes for storage in found.trace.storages] == [
        *(2 * 2 * 8, 2 * 4, 2 * 2 * 4, 10**6 * 2 * 4),
        *(10**6 * 2 * 4, (10**6 + 1) * 4, 2 * 4, 2 * 10**6 * 4),  # cuSPARSE's pointers, columns and transposed result
    ]
    assert found.trace.layers[0].multiply_adds == 2 * 2
    assert found.trace.notes == ()


def test_sparse_gradients_of_a_script_keep_their_elements(tmp_path: Path) -> None:
    """Two batches of 8 · 20 ids of a table of a million rows, 64 wide, of which nothing is computed on the CPU."""
    found, error = ran(
        tmp_path,
        """
        import torch
        table = torch.nn.EmbeddingBag(10**6, 64, sparse=True, mode="sum").cuda()
        optimizer = torch.optim.SparseAdam(table.parameters())
        for _ in range(2):
            ids = torch.randint(0, 10**6, (8, 20), device="cuda")
            table(ids).square().sum().backward()
        gradient = table.weight.grad
        assert gradient.is_sparse and gradient.is_cuda and gradient._nnz() == 2 * 160
        assert gradient.new(gradient._indices(), gradient._values(), gradient.size())._nnz() == 2 * 160
        optimizer.step()
        """,
        steps=0,
    )
    assert error is None
    assert found.peak.roles["gradient"] == 2 * 160 * (64 * 4 + 8)
    assert found.peak.roles["optimizer state"] == 2 * 10**6 * 64 * 4
    # The coalesced gradient with its indices, both old averages, both new ones and the update.
    assert found.peak.roles["temporary"] == 2 * 160 * (6 * 64 * 4 + 8)
    assert found.trace.notes == ()
    assert [text for text, _ in found.assumed] == [ALL_DISTINCT]


def test_a_copy_into_memory_of_the_cpu_takes_none_on_the_gpu() -> None:
    with gpu() as program:
        there, host = torch.tensor([3, 5]).to("cuda"), torch.zeros(2, dtype=torch.int64)
        before = len(program.ledger.events)
        assert host.copy_(there).tolist() == [3, 5] and host.device.type == "cpu"
        assert len(program.ledger.events) == before
        assert not program.ledger.evaluator.notes


def test_tensors_like_one_on_the_gpu_may_be_on_meta() -> None:
    """As DeepSpeed's ZeRO does to remember shapes: they take no memory."""
    with gpu() as program:
        there = torch.ones(1024, device="cuda")
        meta = torch.device("meta")
        shapes = [make(there, device="meta") for make in (torch.zeros_like, torch.empty_like, torch.randn_like)]
        shapes += [there.new_empty(1024, device=meta), there.new_zeros(1024, device="meta")]
        shapes += [torch.ones_like(nn.Parameter(there), device=meta)]
        assert {tensor.device for tensor in shapes} == {meta} and all(tensor.shape == there.shape for tensor in shapes)
        assert torch.cuda.memory_allocated() == 4096
        assert torch.zeros_like(there).is_cuda and torch.zeros_like(shapes[0], device="cuda").is_cuda
    assert [storage.bytes for storage in program.trace().storages] == [4096] * 3


def test_copies_of_tensors_and_storages_are_on_the_gpu_too() -> None:
    with gpu() as program:
        tensor, own = torch.ones(1024, device="cuda"), torch.empty(8, device="meta")
        twin = copy.deepcopy([tensor, tensor])
        assert twin[0].is_cuda and twin[0] is twin[1] and twin[0].tolist() == tensor.tolist()
        assert torch.cuda.memory_allocated() == 2 * 4096
        held = tensor.untyped_storage().clone()
        assert torch.empty(0, device="cuda").set_(held).is_cuda
        assert tensor.untyped_storage().cpu().device.type == "cpu"
        assert copy.deepcopy(own).is_meta and torch.empty(0, device="meta").set_(own.untyped_storage().clone()).is_meta
    made = [(each.bytes, each.dtype) for each in program.trace().storages]
    assert (4096, "float32") in made and (8 * 4, "float32") not in made


def test_a_slice_of_a_storage_is_the_same_memory() -> None:
    """A quarter of 1,024 numbers is in it, and keeps all of them."""
    with gpu() as program:
        whole = torch.zeros(1024, device="cuda")
        part = torch.empty(0, device="cuda").set_(whole.untyped_storage()[1024:2048])
        assert part.is_cuda and part.shape == (256,)
        part.add_(1).view(16, 16).mul_(2)
        with pytest.raises(RuntimeError, match="step of 2"):
            whole.untyped_storage()[::2]
        del whole
        assert torch.cuda.memory_allocated() == 4096
        del part
        assert torch.cuda.memory_allocated() == 0
        own = torch.empty(8, device="meta").untyped_storage()
        with pytest.raises(NotImplementedError):
            own[0:4]
    assert [(each.bytes, each.op) for each in program.trace().storages if each.bytes] == [(4096, "zeros")]


def test_parameters_stay_the_same_objects_when_their_module_moves() -> None:
    """An optimizer that was made before goes on updating them, as on CUDA."""
    with gpu():
        model = nn.Linear(4, 4)
        before, optimizer = list(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
        model.cuda()
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True)) and model.weight.is_cuda
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        assert optimizer.param_groups[0]["params"][0].grad.is_cuda


def test_gradients_move_with_their_parameters() -> None:
    """As Lightning takes its module off the GPU at the end."""
    with gpu():
        model = nn.Linear(4, 4).cuda()
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        model.cpu()
        assert model.weight.grad is not None and {model.weight.device.type, model.weight.grad.device.type} == {"cpu"}
        model.cuda()
        assert model.weight.is_cuda and model.weight.grad.is_cuda and model.weight.grad.shape == (4, 4)
        del model
        assert torch.cuda.memory_allocated() == 0


def test_the_programs_own_meta_tensors_are_on_no_gpu() -> None:
    """As libraries build models without memory, which they then move, fill or leave alone."""
    with gpu() as program:
        with torch.device("meta"):
            model = nn.Linear(512, 512)
            assert torch.tensor([]).device == torch.device("meta")
        there = torch.empty(4, device="meta")
        assert {model.weight.device, there.device, (there + 1).device} == {torch.device("meta")}
        assert not model.weight.is_cuda and not program.ledger.events
        assert torch.tensor([1, 2], device="meta").device == there.new_tensor([1]).device == torch.device("meta")
        with pytest.raises(NotImplementedError, match="no data"):
            there.to("cpu")
        for move in (
            lambda: there.to("cuda"),
            lambda: there.to(device=torch.device("cuda", 0), dtype=torch.float16),
            lambda: there.to(0),
            lambda: there.to(torch.ones(1, device="cuda")),
            lambda: there.cuda(),
            lambda: model.to("cuda"),
            lambda: model.cuda(),
        ):
            with pytest.raises(NotImplementedError, match="no data"):
                move()
        assert there.to(torch.float16).device == there.to("meta").device == torch.device("meta")
        assert torch.empty_like(there, device="cpu").device.type == "cpu"
        model.to_empty(device="cuda")
        assert model.weight.is_cuda and torch.cuda.memory_allocated() == 512 * 512 * 4 + 2048
        assert model.bias is dict(model.named_parameters())["bias"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # PyTorch's own decompositions for forward-mode autograd
def test_tangents_of_zeros_have_no_memory() -> None:
    with gpu():
        x = torch.arange(64.0, device="cuda")
        assert torch.func.hessian(lambda x: (x**3).sum())(x).shape == (64, 64)
        before = torch.cuda.memory_allocated()
        zeros = torch._efficientzerotensor((1024, 1024), device="cuda")
        assert torch.cuda.memory_allocated() == before
        assert (zeros + torch.ones(1024, device="cuda")).shape == (1024, 1024)


def test_memory_of_the_gpu_is_shared_as_it_is() -> None:
    """As Hogwild's processes share a model."""
    with gpu():
        model = nn.Linear(4, 4).cuda().share_memory()
        assert model.weight.is_cuda and model.weight.is_shared()


def test_a_tensor_that_moves_to_meta_leaves_the_gpu() -> None:
    """As PyTorch 2.11's pipelines do, which send the shapes of what a stage returns."""
    with gpu():
        there = torch.ones(4, 8, device="cuda").t()
        before = torch.cuda.memory_allocated()
        for left in (
            there.to("meta"),
            there.to("meta", torch.float16),
            there.to(device="meta", copy=True),
        ):
            assert left.device.type == "meta" and not left.is_cuda
            assert (left.shape, left.stride()) == (there.shape, there.stride())
            assert pickle.loads(pickle.dumps(left)).device.type == "meta"
        assert there.to("meta", torch.float16).dtype is torch.float16
        assert there.is_cuda and torch.cuda.memory_allocated() == before


def test_what_pytorch_makes_beside_a_tensor_on_the_gpu_is_there_too() -> None:
    with gpu():
        data = torch.ones(8, 8, device="cuda")
        data[0] = 3
        assert torch.where(data > 0, data, 0.0).is_cuda and torch.nn.functional.one_hot(data[0].long(), 4).is_cuda
        assert all(
            same is data for same in (data.to("cuda"), data.to(device="cuda"), data.cuda(), data.to(data.device))
        )
        assert torch.arange(3).to(data).is_cuda and torch.arange(3).type_as(data).is_cuda
        assert torch.ones(8).to(data.long()).dtype is torch.int64


def test_recurrent_weights_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds for CUDA would have cuDNN put them into one buffer, and ask the driver on the way."""
    monkeypatch.setattr(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
    with gpu():
        model = nn.LSTM(4, 4).to("cuda")
        model(torch.randn(8, 2, 4, device="cuda"))[0].sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert torch._use_cudnn_rnn_flatten_weight()


def test_streams_events_and_random_state() -> None:
    with gpu():
        stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event()
        with torch.cuda.stream(stream):
            start.record()
            assert torch.cuda.current_stream() == stream != torch.cuda.default_stream()
        torch.cuda.current_stream().wait_stream(stream)
        end.record()
        torch.cuda.synchronize()
        assert start.elapsed_time(end) >= 0
        torch.manual_seed(1)
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        with torch.cuda.device(0), pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
            torch.cuda.set_device(1)


def test_values_that_nobody_knows_are_stand_ins() -> None:
    with gpu() as program:
        data = torch.empty(64, 64, device="cuda")
        assert data.mean().item() == 1.0 and data.long().max().item() == 0 and bool((data > 0).any())
        assert data.cpu().shape == (64, 64)
        assert {assumed.lines[0] for assumed in program.assumed} == {f"{Path(__file__).name}:{_line_of('data.mean()')}"}


def _line_of(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


# -- the allocator ----------------------------------------------------------------------------------------------------


def test_memory_statistics_are_those_of_the_simulated_allocator() -> None:
    with gpu("t4"):
        assert torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == 0
        kept = torch.empty(1000, device="cuda")  # 4,000 B: a block of 4,096 in a segment of 2 MiB
        assert torch.cuda.memory_allocated() == 4096 and torch.cuda.memory_reserved() == 2 * MiB
        large = torch.empty(3 * MiB, dtype=torch.uint8, device="cuda")  # a segment of 20 MiB
        assert torch.cuda.memory_allocated() == 4096 + 3 * MiB and torch.cuda.memory_reserved() == 22 * MiB
        del large
        assert torch.cuda.memory_allocated() == 4096 and torch.cuda.max_memory_allocated() == 4096 + 3 * MiB
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 2 * MiB and torch.cuda.max_memory_reserved() == 22 * MiB
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 4096
        stats = torch.cuda.memory_stats()
        assert stats["allocation.all.allocated"] == 2 and stats["allocation.all.freed"] == 1
        assert stats["requested_bytes.all.current"] == 4000 and stats["segment.small_pool.current"] == 1
        assert "Allocated memory" in torch.cuda.memory_summary()
        free, total = torch.cuda.mem_get_info()
        assert total == card("t4").bytes and free < total - 2 * MiB
        del kept


MANY_SEGMENTS = "large_segment_size_mb:64"
"""A request of 3 MiB then makes a segment of 64 MiB instead of 20."""


def test_settings_of_the_environment_are_those_of_the_allocators_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "large_segment_size_mb:32")
    with memsize.virtual_gpu("t4") as region:
        assert torch.cuda.is_available()
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", MANY_SEGMENTS)  # looked up first
        held = torch.empty(3 * MiB, dtype=torch.uint8, device="cuda")
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "large_segment_size_mb:128")  # too late
        assert torch.cuda.memory_reserved() == 64 * MiB
        del held
    assert region.run.peak.reserved == 64 * MiB
    assert any(note.endswith(f"the environment has for it: {MANY_SEGMENTS}") for note in region.trace.notes)


@pytest.mark.parametrize("config", ["", AllocatorConfig(), "expandable_segments:False"])
def test_settings_that_are_given_win_over_the_environment(
    config: AllocatorConfig | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", MANY_SEGMENTS)
    with memsize.virtual_gpu("t4", allocator=config) as region:
        torch.empty(3 * MiB, dtype=torch.uint8, device="cuda")
    assert region.run.peak.reserved == 20 * MiB
    assert not any("environment" in note for note in region.trace.notes)


def test_settings_of_the_environment_that_pytorch_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    refused = pytest.raises(
        InputError, match=r"^the environment's PYTORCH_CUDA_ALLOC_CONF .* only PyTorch's native one"
    )
    with refused, memsize.virtual_gpu("t4"):
        torch.empty(1, device="cuda")


def test_settings_that_the_script_makes_and_pytorch_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'unknown:1'\ntorch.empty(1, device='cuda')\n"
    )
    with pytest.raises(ForwardError, match="no allocator setting 'unknown'"):
        memsize.run(script)
    assert command(["run", str(script)]) == 2
    said, message = capsys.readouterr().err.splitlines()
    assert said.startswith("memsize: ") and message.startswith("error: the environment's PYTORCH_CUDA_ALLOC_CONF or ")


def test_free_rests_of_split_segments_are_counted_where_pytorch_counts_them() -> None:
    """Blocks of 512 B and 3 MiB in segments of 2 and 20 MiB; between three blocks of 3 MiB the middle one is a rest."""

    def rests(place: str) -> tuple[int, int, int]:
        stats = torch.cuda.memory_stats()
        of = [stats[f"{name}.{place}.current"] for name in ("inactive_split", "inactive_split_bytes")]
        return of[0], of[1], stats[f"inactive_split_bytes.{place}.peak"]

    with gpu("t4"):
        assert rests("all") == (0, 0, 0)
        small = torch.empty(1, device="cuda")
        assert rests("small_pool") == rests("all") == (1, 2 * MiB - 512, 2 * MiB - 512)
        blocks = [torch.empty(3 * MiB, dtype=torch.uint8, device="cuda") for _ in range(3)]
        assert rests("large_pool") == (1, 11 * MiB, 17 * MiB)
        blocks[1] = torch.empty(0, device="cuda")
        assert rests("large_pool") == (2, 14 * MiB, 17 * MiB)
        blocks[1] = torch.empty(3 * MiB, dtype=torch.uint8, device="cuda")  # the rest that fits exactly, as a whole
        assert rests("large_pool") == (1, 11 * MiB, 17 * MiB)
        del blocks, small
        assert rests("all") == (0, 0, 19 * MiB - 512)  # whole segments are no rests
        stats = torch.cuda.memory_stats()
        assert stats["inactive_split_bytes.all.allocated"] == stats["inactive_split_bytes.all.freed"]


def test_what_exceeds_the_card_raises_pytorchs_error_and_takes_nothing() -> None:
    with gpu("t4") as program:
        kept = torch.empty(2**30, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.cuda.OutOfMemoryError, match=r"Tried to allocate 20\.00 GiB.* 1024\.00 MiB is alloc"):
            torch.empty(20 * 2**30, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() == kept.nbytes
        assert torch.empty(2**30, dtype=torch.uint8, device="cuda").is_cuda
        assert [(refused.bytes, refused.op) for refused in program.refused] == [(20 * 2**30, "empty")]


def test_code_that_halves_the_batch_until_it_fits_finds_the_batch() -> None:
    """4 GiB a sample: 14.56 GiB less the context hold three, so 16 → 8 → 4 → 2."""
    with gpu("t4"):
        batch = 16
        while True:
            try:
                torch.empty(batch, 2**32, dtype=torch.uint8, device="cuda")
                break
            except torch.OutOfMemoryError:
                batch //= 2
        assert batch == 2


def test_blocks_are_reused_on_their_own_stream_only() -> None:
    """A block of 1 MiB lies in a segment of 2 MiB; freed on one stream, it does not serve the other."""
    with gpu() as program:
        first = torch.empty(MiB // 2, dtype=torch.uint8, device="cuda")
        del first
        with torch.cuda.stream(torch.cuda.Stream()):
            beside = torch.empty(MiB // 2, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 4 * MiB and torch.cuda.memory_allocated() == MiB // 2
        assert torch.cuda.memory_stats()["segment.small_pool.current"] == 2
        again = torch.empty(MiB // 2, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == 4 * MiB
        del beside, again
    found = record_of(program)
    assert [storage.stream for storage in found.trace.storages] == [0, 1, 0]
    assert found.peak.reserved == 4 * MiB
    shares = [(each.name, each.requested, each.reserved) for each in found.peak.streams]
    assert shares == [("default", MiB // 2, 2 * MiB), ("stream 1", MiB // 2, 2 * MiB)]
    (table,) = (each for each in document(found).sections() if isinstance(each, Table) and each.name == "streams")
    assert len(table.rows) == 2
    assert [each["stream"] for each in document(found).figures("MiB")["peak"]["streams"]] == [0, 1]


def test_what_was_emptied_gets_memory_of_the_stream_that_fills_it() -> None:
    with gpu() as program:
        kept = torch.empty(MiB // 2, dtype=torch.uint8, device="cuda")
        kept.untyped_storage().resize_(0)
        with torch.cuda.stream(torch.cuda.Stream()):
            kept.untyped_storage().resize_(MiB // 4)
            assert torch.cuda.memory_reserved() == 4 * MiB
    assert [storage.stream for storage in record_of(program).trace.storages] == [1]


def test_a_share_of_the_card_is_a_bound() -> None:
    with gpu("t4") as program:
        torch.cuda.set_per_process_memory_fraction(0.5)
        assert torch.cuda.get_per_process_memory_fraction() == 0.5
        kept = torch.empty(7 * 2**30, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match=r"memory in use\. 7\.28 GiB allowed; Of the allocated memory"):
            torch.empty(2**30, dtype=torch.uint8, device="cuda")
        assert program.refused[0].free == card("t4").bytes // 2 - kept.nbytes


@pytest.mark.parametrize(
    ("gib", "sentence"),
    [(1, "The allocator may take {} of the GPU."), (8, "T4 (the allocator may take {} of it)")],
)
def test_the_verdict_knows_the_share_that_the_script_takes(tmp_path: Path, gib: int, sentence: str) -> None:
    half = card("t4").bytes // 2
    found, _ = ran(
        tmp_path,
        f"""
        import torch
        torch.cuda.set_per_process_memory_fraction(0.5)
        x = torch.empty({gib} * 2**30, dtype=torch.uint8, device="cuda")
        """,
    )
    assert found.capacity == half and bool(found.refused) == (gib > 7)
    assert sentence.format(format_bytes(half)) in found.findings[0].text()


def test_a_program_writes_snapshots_of_its_memory(tmp_path: Path) -> None:
    _, error = ran(
        tmp_path,
        """
        import pathlib, pickle, torch
        path = pathlib.Path(__file__).with_name("memory.pickle")
        torch.cuda.memory._record_memory_history(max_entries=1000)
        kept = torch.ones(2**20, device="cuda")
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
        (segment,) = pickle.loads(path.read_bytes())["segments"]
        assert segment["allocated_size"] == 4 * 2**20 and segment["total_size"] == 20 * 2**20, segment
        assert torch.cuda.memory_snapshot()[0]["blocks"][0]["requested_size"] == 4 * 2**20
        """,
    )
    assert error is None, error


def test_a_snapshot_of_two_models_names_modules_and_lines(tmp_path: Path) -> None:
    """Two weights and two biases are made at line 4, the batch and two outputs at line 5: 256 · 256 values of 4 B each,
    256 in a bias, whose line nobody asks for.
    """
    _, error = ran(
        tmp_path,
        """
        import pathlib, pickle, torch
        from torch.cuda import _memory_viz
        generator, critic = (torch.nn.Linear(256, 256).cuda() for _ in range(2))
        kept = critic(generator(torch.ones(256, 256, device="cuda")))
        path = pathlib.Path(__file__).with_name("memory.pickle")
        torch.cuda.memory._dump_snapshot(str(path))
        data = pickle.loads(path.read_bytes())
        assert "Active Memory Timeline" in _memory_viz.trace_plot(data)
        assert "Allocator State History" in _memory_viz.segment_plot(data)
        assert "train.py:4" in _memory_viz.memory(data, format_flamegraph=str)
        """,
    )
    assert error is None, error
    lines = Counter[str | None]()
    for place in memsize.explain(tmp_path / "memory.pickle").places:
        lines[place.line] += place.bytes * (place.category != "workspace")
    assert lines == {"train.py:4": 2 * 256 * 256 * 4, "train.py:5": 3 * 256 * 256 * 4, None: 2 * 256 * 4}


def test_a_graph_keeps_its_memory_to_itself() -> None:
    size, reserved = 16 * MiB, lambda: torch.cuda.memory_reserved() // (16 * MiB)

    def capture(pool: Any = None) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            (x + 1).add(1)  # two segments, which are free at the end of the capture
        return graph

    with gpu():
        x = torch.zeros(size // 4, device="cuda")
        assert reserved() == 1
        graph = capture()
        assert (reserved(), torch.cuda.memory_allocated()) == (3, size)
        torch.cuda.empty_cache()
        y = x + 1
        assert reserved() == 4
        capture(graph.pool())
        assert reserved() == 4
        capture()
        assert reserved() == 6
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            z = y + 1
        del z
        torch.cuda.empty_cache()
        assert reserved() == 7


def test_captures_share_a_workspace_of_their_stream() -> None:
    with memsize.virtual_gpu("t4"):
        x = torch.ones(4, 4, device="cuda")
        allocated = [torch.cuda.memory_allocated()]
        for _ in range(2):
            x @ x
            allocated.append(torch.cuda.memory_allocated())
        for _ in range(2):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                x @ x
            allocated.append(torch.cuda.memory_allocated())
    assert allocated == [512 + workspaces * 8_519_680 for workspaces in (0, 1, 1, 2, 2)]


def test_graphs_run_at_once_with_a_note() -> None:
    with gpu() as program:
        x, graph = torch.ones(4, 4, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
            y = x @ x
        graph.replay()
        layer = torch.cuda.make_graphed_callables(nn.Linear(4, 4).cuda(), (y.requires_grad_(),))
        layer(y).sum().backward()
    assert any("CUDA graphs are not captured" in note for note in program.ledger.evaluator.notes)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("lines", "is_noted"),
    [
        ("double", False),  # as libraries decorate what few programs call
        ("double(x)", True),
        ("torch.compile(torch.nn.Linear(3, 3).cuda())(x)", True),
        ("torch.compile(torch.nn.Linear(3, 3).cuda(), disable=True)(x)", False),
        ("layer = torch.nn.Linear(3, 3).cuda(); layer.compile(); layer(x)", True),
    ],
)
def test_what_would_be_compiled_is_noted_when_it_runs(tmp_path: Path, lines: str, is_noted: bool) -> None:
    text = f"""
        import torch

        @torch.compile(dynamic=True)
        def double(x):
            "Twice as much."
            return 2 * x

        assert double.__name__ == "double" and double.__doc__ == "Twice as much."
        x = torch.ones(3, device="cuda")
        {lines}
        """
    run, error = ran(tmp_path, text)
    assert error is None
    assert any("compiled by the rules of PyTorch" in note for note in run.trace.notes) == is_noted


def test_what_is_asked_of_the_runtime_and_the_driver() -> None:
    with gpu("t4"):
        kept = torch.empty(2**30, dtype=torch.uint8, device="cuda")
        runtime = torch.cuda.cudart()
        assert runtime.cudaMemGetInfo(0) == torch.cuda.mem_get_info()
        torch.cuda.check_error(runtime.cudaProfilerStart())
        assert torch.cuda.utilization() == torch.cuda.temperature() == 0
        assert kept.nbytes < torch.cuda.device_memory_used() < card("t4").bytes
        assert torch.zeros(3, pin_memory=True).tolist() == [0, 0, 0]
        assert nn.Linear(2, 2).to(0).weight.is_cuda and nn.Linear(2, 2).to(device=0).weight.is_cuda


# -- several processes ------------------------------------------------------------------------------------------------

GROUP = """
import sys, torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

def work(rank, world):
    dist.init_process_group("nccl", rank=rank, world_size=world)
    model = DistributedDataParallel(torch.nn.Linear(512, 512).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    for _ in range(9):
        loss = model(torch.ones(4, 512, device=f"cuda:{rank}")).sum()
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(loss)
        optimizer.step()

mp.spawn(work, (int(sys.argv[1]),), nprocs=int(sys.argv[1]))
"""


def test_a_group_of_one_process_is_itself(tmp_path: Path) -> None:
    """Beside the gradients there is a bucket of as many bytes, into which they are reduced."""
    found, error = ran(tmp_path, GROUP, "1")
    assert error is None and found.steps == 3
    assert not torch.distributed.is_initialized()  # although it was stopped inside
    size = (512 * 512 + 512) * 4
    assert size in {storage.bytes for storage in found.trace.storages}
    assert found.peak.requested >= 3 * size


@pytest.mark.parametrize(
    "text", [GROUP, "import torch.distributed\ntorch.distributed.init_process_group(world_size=4)"]
)
def test_several_processes_are_refused_in_one_line(tmp_path: Path, text: str) -> None:
    _, error = ran(tmp_path, text, "4")
    assert "wants 4 processes" in str(error) and "memsize run --gpus 4 …" in str(error) and "\n" not in str(error)


# -- what is recorded -------------------------------------------------------------------------------------------------


def _allocated(trace: Trace, *phases: str) -> Counter[tuple[str, int]]:
    """How often each number of bytes appears, by phase, in the last of three steps."""
    names = [split_phase(name) for name in trace.phases]
    return Counter(
        (names[event.phase][0], event.delta)
        for event in trace.events
        if event.delta > 0 and names[event.phase][0] in phases and names[event.phase][1] == 3
    )


def test_a_script_allocates_what_the_traced_loop_does(tmp_path: Path) -> None:
    found, error = ran(
        tmp_path,
        """
        import torch
        from torch.nn import functional as F
        from tests.models import Small
        model = Small().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(5):
            x, y = torch.randn(4, 3, 32, 32).cuda(), torch.randint(10, (4,)).cuda()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        """,
    )
    assert error is None and found.stopped and found.steps == 3

    def make(model: nn.Module) -> Callable[..., None]:
        optimizer = torch.optim.AdamW(model.parameters())

        def body(x: torch.Tensor) -> None:
            y = torch.zeros(4, dtype=torch.int64, device=x.device)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        return body

    traced = memsize.trace(Small(), torch.randn(4, 3, 32, 32), step=make, gpu="t4")
    phases = ("forward", "backward", "optimizer")
    assert _allocated(found.trace, *phases) == _allocated(traced.trace, *phases)
    assert [layer.path for layer in found.trace.layers][1:3] == ["conv", "norm"]
    assert found.peak.roles["parameter"] == sum(p.nbytes for p in Small().parameters())


LOOP = """
    import sys, torch
    from torch import nn
    torch.set_default_device(sys.argv[1])
    model = nn.Sequential(nn.Embedding(100, 64), nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    teacher = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1, foreach=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    average = [each.detach().clone() for each in model.parameters()]
    for step in range(3):
        words, targets = torch.randint(100, (8, 16)), torch.randint(10, (8 * 16,))
        with torch.no_grad():
            wanted = teacher(model[0](words)).softmax(-1).flatten(0, 1)
        answers = model(words).flatten(0, 1)
        loss = nn.functional.cross_entropy(answers, targets) + (answers.softmax(-1) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        scheduler.step()
        for kept, new in zip(average, model.parameters()):
            kept.mul_(0.9).add_(new.detach(), alpha=0.1)
    if sys.argv[1] == "cuda":
        print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""


CONVOLUTIONS = """
    import sys, torch
    from torch import nn
    torch.set_default_device(sys.argv[1])
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 16, 3, groups=4),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True, foreach=False)
    for step in range(3):
        images, targets = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), targets).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(torch.randn(2, 3, 32, 32)).argmax(-1)
"""


def run_twice(folder: Path, text: str, gpu: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Ledger]:
    """A script that takes its device as an argument, on the virtual GPU without library workspaces, and on the CPU."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(text), encoding="utf-8")
    program = program_on(gpu)
    assert program.run(str(script), ["cuda"]) is None
    real = Ledger("cpu")
    try:
        with real, monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [str(script), "cpu"])
            runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_default_device(None)
    return program, real


def _deltas(events: Sequence[Event]) -> tuple[list[int], list[int]]:
    """Return what events add and free, in order. After the last allocation Python frees the rest in any order."""
    deltas = [event.delta for event in events]
    last = max(number for number, delta in enumerate(deltas) if delta > 0)
    return deltas[: last + 1], sorted(deltas[last + 1 :])


@pytest.mark.parametrize("loop", [LOOP, CONVOLUTIONS], ids=["embedding, SGD", "convolutions, AdamW"])
def test_a_program_allocates_what_it_really_allocates_on_the_cpu(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same program, run twice: really, on the CPU, and on the virtual GPU, without library workspaces.

    AdamW counts the steps of each parameter on the CPU (`lift_fresh`, 4 bytes), where no virtual GPU sees them. Before
    PyTorch 2.13 it counts on the default device, which here is the GPU (`_init_group` in torch/optim/adam.py).
    """
    program, real = run_twice(tmp_path, loop, "t4", monkeypatch)
    counters = {event.storage for event in real.events if (event.op, event.delta) == ("lift_fresh", 4)}
    assert len(counters) == (11 if loop == CONVOLUTIONS else 0)
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        counters = set()
    assert _deltas(program.ledger.events) == _deltas([e for e in real.events if e.storage not in counters])


AUTOCAST = """
    import contextlib, sys, torch
    from torch import nn
    torch.set_default_device(sys.argv[1])
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 100))
    lower = torch.autocast(sys.argv[1], torch.bfloat16)
    x = torch.randn(16, 64)
    for region in (torch.inference_mode, torch.no_grad, contextlib.nullcontext):
        with region(), lower:
            model(x), model(x)
        with lower, region():
            model(x), model(x)
    with lower:
        model(x)
        with torch.inference_mode():
            model(x)
            with torch.inference_mode(False):
                model(x)
        model(x)
"""


def test_autocast_keeps_copies_of_weights_where_it_really_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In inference mode it keeps none. Autocast on the CPU casts linear layers as that on CUDA does."""
    program, real = run_twice(tmp_path, AUTOCAST, "a100", monkeypatch)
    # What dies together is not freed in one order.
    found, expected = (
        [live for event, live in zip(events, _live(events), strict=True) if event.delta > 0]
        for events in (program.ledger.events, real.events)
    )
    assert found == expected


EVALUATED = """
    import builtins, sys, torch
    from torch import nn
    torch.set_default_device(sys.argv[1])
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 100))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.randn(16, 64)), torch.randint(100, (16,)))
        loss.backward()
        return loss

    def evaluate(batch):
        answers, total = [], 0.0
        for _ in range(3):
            out = model(torch.randn(batch, 64))
            total += nn.functional.cross_entropy(out, torch.randint(100, (batch,))).item()
            answers.append(out)
        return torch.cat(answers).argmax(-1).tolist()

    for epoch, guard in enumerate((torch.no_grad, torch.inference_mode)):
        for _ in range(2):
            optimizer.step(closure)
        with guard():
            builtins.mark(evaluate, 128 * (epoch + 1))
"""


def test_evaluation_between_epochs_is_what_it_really_is_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and collected answers are evaluation too, and what an optimizer's closure does is none of the optimizer's.

    Momentum is the only thing that an optimizer makes.
    """
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(EVALUATED), encoding="utf-8")
    monkeypatch.setattr("builtins.mark", lambda call, batch: call(batch), raising=False)
    program = program_on()
    assert program.run(str(script), ["cuda"]) is None
    trace, real = program.trace(), Ledger("cpu")
    peaks: list[int] = []

    def measured(call: Callable[[int], Any], batch: int) -> None:
        start = len(real.events)
        call(batch)
        peaks.append(max(_live(real.events)[start:]))

    try:
        with real, monkeypatch.context() as patch:
            patch.setattr("builtins.mark", measured)
            patch.setattr(sys, "argv", [str(script), "cpu"])
            runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_default_device(None)
    found = dict.fromkeys(trace.phases, 0)
    for event, live in zip(trace.events, _live(trace.events), strict=True):
        found[trace.phases[event.phase]] = max(found[trace.phases[event.phase]], live)
    assert [found["evaluation 3"], found["evaluation 5"]] == peaks
    assert program.steps.done == 4 and "evaluation 4" not in found
    phases = [trace.phases[event.phase] for event in trace.events]
    made = [(phase, event.delta) for phase, event in zip(phases, trace.events, strict=True) if "optimizer" in phase]
    weights = [4 * 64 * 256, 4 * 256, 4 * 256 * 100, 4 * 100]
    assert made == [("optimizer 1", size) for size in weights]


def _live(events: Iterable[Event]) -> list[int]:
    return list(accumulate(event.delta for event in events))


def test_what_the_program_reads_is_what_the_report_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, error = ran(tmp_path, LOOP, "cuda", steps=0)
    assert error is None
    allocated, reserved = map(int, capsys.readouterr().out.split())
    assert (found.peak.allocated, found.peak.reserved) == (allocated, reserved)


def test_what_the_program_reads_with_its_cache_emptied_is_what_the_report_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2, 3 and 4 GiB one after the other: 4 GiB at most where the cache is emptied between, else 2 + 3 + 4."""
    found, error = ran(
        tmp_path,
        """
        import torch
        for gib in (2, 3, 4):
            torch.cuda.empty_cache()
            kept = torch.empty(gib, 2**30, dtype=torch.uint8, device="cuda")
            del kept
        print(torch.cuda.max_memory_reserved())
        """,
    )
    assert error is None and found.peak.reserved == 4 * 2**30 == int(capsys.readouterr().out)
    kept_cached = replay([(event.storage, event.delta) for event in found.trace.events])
    assert kept_cached.reserved.bytes == 9 * 2**30


def test_a_request_that_fails_empties_the_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """8 GiB are cached when 20 are asked for and refused; then 9 fit the card beside nothing."""
    found, error = ran(
        tmp_path,
        """
        import torch
        for gib in (8, 20, 9):
            try:
                kept = torch.empty(gib, 2**30, dtype=torch.uint8, device="cuda")
                del kept
            except torch.OutOfMemoryError:
                print(torch.cuda.memory_reserved())
        print(torch.cuda.max_memory_reserved())
        """,
    )
    assert error is None and len(found.refused) == 1
    assert capsys.readouterr().out.split() == ["0", str(9 * 2**30)]
    assert found.peak.reserved == 9 * 2**30 and found.peak.shortage is None


def test_near_the_limit_the_program_reads_what_is_told_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 14,909 MiB, 14,833 are left by the smallest CUDA context, and 14,759 by the largest: beside the former, 8,000
    MiB are reserved besides the 6,800 that are cached, beside the latter in place of these.
    """
    found, error = ran(
        tmp_path,
        """
        import torch
        for mebibytes in (6_800, 8_000):
            kept = torch.empty(mebibytes, 2**20, dtype=torch.uint8, device="cuda")
            del kept
        print(torch.cuda.max_memory_reserved())
        """,
    )
    assert error is None and found.peak.shortage is None
    assert found.peak.reserved == 14_800 * MiB == int(capsys.readouterr().out)
    assert found.peak.device == (8_000 * MiB + cuda_context(found.card).low, found.card.bytes)


def test_a_refused_request_names_the_layer_as_the_tables_do(tmp_path: Path) -> None:
    """The output of `b`'s first layer would take 64 GiB."""
    found, error = ran(
        tmp_path,
        """
        import torch
        from torch import nn
        a, b = nn.Linear(8, 8).cuda(), nn.Sequential(nn.Linear(8, 2**14)).cuda()
        x = torch.ones(2**20, 8, device="cuda")
        a(x)
        b(x)
        """,
    )
    assert isinstance(error, torch.OutOfMemoryError) and found.refused[0].layer == "b.0"
    assert "in forward 1 of b.0: addmm needs 64.00 GiB" in found.findings[0].text("GiB")


def test_state_that_is_loaded_as_memory_runs_out_is_state(tmp_path: Path) -> None:
    """Two averages of 2 GiB for each of three parameters of 2 GiB: beside those, 14.27 GiB have room for four."""
    found, error = ran(
        tmp_path,
        """
        import torch
        parameters = [torch.nn.Parameter(torch.empty(2**29, device="cuda")) for _ in range(3)]
        optimizer = torch.optim.AdamW(parameters)
        averages = {name: torch.empty(1).expand(2**29) for name in ("exp_avg", "exp_avg_sq")}
        state = {number: averages | {"step": torch.tensor(3.0)} for number in range(3)}
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
        """,
    )
    assert isinstance(error, torch.OutOfMemoryError)
    assert dict(found.peak.roles) == {"parameter": 6 * 2**30, "optimizer state": 8 * 2**30}


def test_what_follows_refused_requests_is_told_by_itself(tmp_path: Path) -> None:
    """The peak of the run, 12 GiB, is before; after it two steps are made beside 5 GiB (and 1 MiB of parameters)."""
    found, error = ran(
        tmp_path,
        """
        import torch
        weights = torch.nn.Parameter(torch.empty(2**18, device="cuda"))
        optimizer = torch.optim.SGD([weights])
        for gib in (12, 20, 5, 20, 5):
            try:
                kept = torch.empty(gib, 2**30, dtype=torch.uint8, device="cuda")
                optimizer.step()
                optimizer.step()
            except torch.OutOfMemoryError:
                pass
            kept = None
        """,
        steps=0,
    )
    context = cuda_context(found.card, ops={event.op for event in found.trace.events} - {""})
    assert error is None and len(found.refused) == 2 and found.steps == 6
    assert found.peak.device.low == 12 * 2**30 + 2 * MiB + context.low
    after = 5 * 2**30 + 2 * MiB
    assert found.went_on == WentOn(2, Interval(after + context.low, after + context.high))
    assert "the rest fits (2 steps, " in found.findings[0].in_brief()


def test_what_an_optimizer_trains_is_a_parameter_without_any_module(tmp_path: Path) -> None:
    """Two weights of 512 x 512, one of which is added later, are 2 MiB, and backward needs them; of what it keeps else,
    the input of 256 KiB is still there when both gradients are.
    """
    found, error = ran(
        tmp_path,
        """
        import torch
        first, second = (torch.nn.Parameter(torch.empty(512, 512, device="cuda")) for _ in range(2))
        optimizer = torch.optim.SGD([first], lr=0.1)
        optimizer.add_param_group({"params": [second]})
        for step in range(2):
            x = torch.empty(128, 512, device="cuda")
            ((x @ first).relu() @ second).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    assert error is None
    held, others = found.peak.roles, ("gradient", "workspace", "temporary")
    assert held["parameter"] == 2 * MiB
    assert {role: held[role] for role in held if role not in others} == {"parameter": 2 * MiB, "activation": MiB // 4}


def test_numbers_of_the_gpu_in_a_list_are_read_for_a_tensor_on_the_cpu() -> None:
    """As Megatron makes one of the norms of its gradients: what depends on the data is 1, what doesn't is known."""
    with gpu():
        norms = [[torch.nn.Linear(64, 64, device="cuda").weight.norm(), torch.ones(4, device="cuda").norm()], [2.0, 3]]
        found = torch.tensor(norms)
        assert found.is_cpu and found.tolist() == [[1.0, 2.0], [2.0, 3.0]]
        assert torch.tensor(norms, device="cuda").is_cuda


PROFILED = """
import torch
from torch.profiler import ProfilerActivity, profile, schedule

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())
activities = {activities}
with profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=1, repeat=1)) as profiler:
    for step in range(2):
        model(torch.ones(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        profiler.step()
print(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=3))
"""


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle")  # PyTorch before 2.13
@pytest.mark.parametrize(
    "activities", ["None", "[ProfilerActivity.CPU, ProfilerActivity.CUDA]", "[ProfilerActivity.CUDA]"]
)
def test_profilers_see_what_runs_on_the_cpu(tmp_path: Path, activities: str, capfd: pytest.CaptureFixture[str]) -> None:
    _, error = ran(tmp_path, PROFILED.format(activities=activities))
    assert error is None
    out, err = capfd.readouterr()
    assert "Self CPU time total" in out and "Failed to record" not in err


def test_a_profiler_takes_the_options_of_this_pytorch() -> None:
    """`use_cuda` was deprecated until 2.13, and 2.14 has none."""
    profiler = torch.autograd.profiler.profile
    accepts = "use_cuda" in inspect.signature(profiler.__init__).parameters
    with gpu(), nullcontext() if accepts else pytest.raises(TypeError, match="use_cuda"):
        assert profiler(use_cuda=True).use_device is None


HANDLED = """
import sys, torch
weights = torch.nn.Parameter(torch.empty(2**18, device="cuda"))
optimizer = torch.optim.SGD([weights])
try:
    torch.empty(2**40, device="cuda")
except torch.OutOfMemoryError:
    pass
weights.sum().backward()
optimizer.step()
"""


def test_a_program_that_fails_later_did_not_run_out_of_memory(tmp_path: Path) -> None:
    found, error = ran(tmp_path, HANDLED + "raise KeyError('mine')")
    assert isinstance(error, KeyError) and not found.ran_out
    failed, refused = found.findings[:2]
    assert failed.text().startswith(
        f"The script failed at train.py:{HANDLED.count(chr(10)) + 1}: KeyError: 'mine'. Until"
    )
    assert "and goes on: the rest fits (one step, " in refused.in_brief()
    with pytest.raises(ForwardError, match="KeyError: 'mine'"):
        memsize.run(tmp_path / "train.py", gpu="t4")
    found, error = ran(tmp_path, HANDLED.replace("pass", "raise KeyError('mine')"))
    assert isinstance(error, KeyError) and found.ran_out


@pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", 3), ("sys.exit()", 0), ("sys.exit('no')", 1), ("", 0)])
def test_the_exit_status_is_that_of_the_program(end: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(HANDLED + end, encoding="utf-8")
    assert command(["run", "--gpu", "t4", str(tmp_path / "script.py")]) == status


def test_evaluation_is_told_apart_and_every_root_has_its_name(tmp_path: Path) -> None:
    found, _ = ran(
        tmp_path,
        """
        import torch
        from torch import nn
        a, b = nn.Linear(8, 8).cuda(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()).cuda()
        optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=1)
        x = torch.ones(2, 8, device="cuda")
        with torch.no_grad():
            a(x)
        b(a(x)).sum().backward()
        optimizer.step()
        """,
    )
    assert found.trace.roots == ("a", "b")
    assert [layer.path for layer in found.trace.layers] == ["a", "b", "b.0", "b.1"]
    assert {split_phase(name)[0] for name in found.trace.phases} >= {"evaluation", "forward", "backward", "optimizer"}
    assert found.steps == 1 and not found.stopped


def test_a_list_of_losses_is_named_as_what_grows(tmp_path: Path) -> None:
    text = """
        import torch
        from torch import nn
        model = nn.Sequential(nn.Linear(512, 512), nn.ReLU()).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        losses = []
        for _ in range(9):
            x = torch.ones(256, 512, device="cuda")
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward(retain_graph=True)
            optimizer.step()
            losses.append(loss{})
        """
    leaks, _ = ran(tmp_path, text.format(""), steps=4)
    sound, _ = ran(tmp_path, text.format(".item()"), steps=4)
    assert leaks.growth is not None and sound.growth is None
    assert leaks.growth.holder == Holder("losses", "train.py:13", 4, True)


REPLAY = """
replay = collections.deque(maxlen=1000)
def collect():
    for _ in range(2):
        replay.append({})
def sample():
    return random.sample(replay, 2)
"""
OBJECTS = """
@dataclasses.dataclass
class Transition:
    state: torch.Tensor
    action: torch.Tensor
class Buffer:
    def __init__(self):
        self.transitions = []
    def add(self, transition):
        self.transitions.append(transition)
buffer = Buffer()
def collect():
    for _ in range(2):
        buffer.add(Transition(state(), state()))
def sample():
    return [(transition.state, transition.action) for transition in buffer.transitions[-2:]]
"""
SUM = """
statistics = {"train": {"loss": 0.0}}
def collect():
    statistics["train"]["loss"] = statistics["train"]["loss"] + model(state()).square().mean().cpu()
def sample():
    return ()
"""


@pytest.mark.parametrize(
    ("text", "holder"),
    [
        (REPLAY.format("(state(), state())"), Holder("replay", "train.py:9", 20, False)),
        (REPLAY.format('{"state": state(), "action": state()}'), Holder("replay", "train.py:9", 20, False)),
        (OBJECTS, Holder("buffer.transitions", "train.py:14", 20, False)),
        (SUM, Holder("statistics", "train.py:8", 1, True)),
    ],
    ids=["tuples", "dicts", "objects", "sum"],
)
def test_a_collection_holds_what_is_in_the_collections_inside_it(tmp_path: Path, text: str, holder: Holder) -> None:
    """Two transitions of two tensors in each of four steps, and before the forward at which the script is stopped; a
    batch holds two of them at most.
    """
    script = f"""
import collections, dataclasses, random, torch
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1)
def state(): return torch.ones(256, 512, device="cuda"){text}
def train():
    for _ in range(9):
        collect()
        batch = sample()
        optimizer.zero_grad()
        model(state()).sum().backward()
        optimizer.step()
train()
"""
    grows, _ = ran(tmp_path, script, steps=4)
    assert grows.growth is not None and grows.growth.holder == holder


def test_what_the_last_optimizer_step_works_with_is_not_left_behind(tmp_path: Path) -> None:
    """Two of three steps keep a tensor, at the line of the optimizer, whose last step is where the events end."""
    text = """
        import torch
        from torch import nn
        model, kept = nn.Linear(512, 512).cuda(), []
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for step in range(3):
            model(torch.ones(256, 512, device="cuda")).sum().backward()
            kept += [torch.ones(512, 512, device="cuda")] * (step < 2); optimizer.step()
            optimizer.zero_grad()
        """
    found, _ = ran(tmp_path, text)
    assert found.steps == 3 and found.growth is None


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package whose `training.fit` does everything."""
    code = """
        import torch

        def fit(size):
            net = torch.nn.Linear(size, size, device="cuda")
            optimizer = torch.optim.SGD(net.parameters())
            for _ in range(2):
                optimizer.zero_grad(set_to_none=False)
                loss = net(torch.ones(64, size, device="cuda")).sum()
                loss.backward()
                optimizer.step()
                loss.item()
    """
    home = tmp_path / "site-packages"
    (home / "training").mkdir(parents=True)
    (home / "training/__init__.py").write_text(textwrap.dedent(code).lstrip(), encoding="utf-8")
    (home / "training/__main__.py").write_text("from training import fit\nfit(512)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(home))
    monkeypatch.delitem(sys.modules, "training", raising=False)
    return home


def test_a_line_that_calls_a_package_is_named_with_the_packages(tmp_path: Path, package: Path) -> None:
    found, _ = ran(tmp_path, "import training\ntraining.fit(512)\n")
    assert {tensor.line for tensor in found.tensors if tensor.line} == {
        f"train.py:2 > __init__.py:{line}" for line in (4, 8, 9)
    }
    assert found.kept_gradients == KeptGradients(4 * 512 * 513, "kept", "train.py:2 > __init__.py:7")
    assert [each.lines for each in found.assumed] == [("train.py:2 > __init__.py:11",)]


def test_a_package_that_is_run_itself_has_its_own_lines(package: Path) -> None:
    found = run_module("training")
    assert {tensor.line for tensor in found.tensors if tensor.line} == {f"__init__.py:{line}" for line in (4, 8, 9)}


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("kept.append(model(x))", "kept"),
        ("kept.append(model(x).detach())", "kept"),
        ("holder.seen['step', i] = model(x)", "holder.seen"),
        ("total = total + model(x).sum()", "total"),
    ],
)
def test_whatever_keeps_tensors_is_named_with_the_line_that_adds_to_it(
    tmp_path: Path, statement: str, name: str
) -> None:
    found, _ = ran(
        tmp_path,
        f"""
        import torch
        from torch import nn

        class Holder:
            def __init__(self):
                self.seen = {{}}

        def main():
            model = nn.Linear(512, 512).cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=1)
            kept, holder, total = [], Holder(), 0.0
            for i in range(9):
                optimizer.zero_grad()
                x = torch.ones(256, 512, device="cuda")
                model(x).sum().backward()
                optimizer.step()
                {statement}

        main()
        """,
        steps=4,
    )
    assert found.growth is not None and found.growth.holder is not None
    assert found.growth.holder.name == name
    if not name.startswith("holder"):
        assert found.growth.holder.line == "train.py:18"


@pytest.mark.parametrize("line", ["pass", "known = locals()"])
def test_looking_at_variables_keeps_nothing_alive(tmp_path: Path, line: str) -> None:
    """Where the program itself holds what its variables were, that stays: 1 MiB, which `x` has given up."""
    found, _ = ran(
        tmp_path,
        f"""
        import torch
        def main():
            model = torch.nn.Linear(8, 8).cuda()
            x = torch.empty(2**20, dtype=torch.uint8, device="cuda")
            {line}
            model(torch.ones(2, 8, device="cuda"))
            del x
            torch.empty(2**21, dtype=torch.uint8, device="cuda")
        main()
        """,
    )
    alive = [tensor.bytes for tensor in found.tensors if tensor.op == "empty"]
    assert alive == ([2 * MiB] if line == "pass" else [2 * MiB, MiB])


def test_a_step_ends_with_the_last_of_several_optimizers(tmp_path: Path) -> None:
    """The second optimizer steps once for two of the first: three steps of it are five of the leader's."""
    found, error = ran(
        tmp_path,
        """
        import torch
        d, g = torch.nn.Linear(8, 8).cuda(), torch.nn.Linear(8, 8).cuda()
        first, second = torch.optim.SGD(d.parameters()), torch.optim.SGD(g.parameters())
        unused = torch.optim.SGD(g.parameters())
        for i in range(99):
            d(torch.ones(2, 8, device="cuda")).sum().backward()
            first.step()
            if i % 2 == 0:
                g(torch.ones(2, 8, device="cuda")).sum().backward()
                second.step()
        """,
    )
    assert error is None and found.stopped and found.steps == 6
    names = [split_phase(found.trace.phases[event.phase]) for event in found.trace.events]
    layers = [
        (name, found.trace.layers[event.layer].path) for name, event in zip(names, found.trace.events, strict=True)
    ]
    assert {step for (name, step), path in layers if (name, path) == ("backward", "g")} == {1, 3, 5}
    assert {step for (name, step), path in layers if (name, path) == ("backward", "d")} == {1, 2, 3, 4, 5, 6}


def test_steps_are_those_of_the_next_optimizer_when_the_first_is_gone(tmp_path: Path) -> None:
    """Three tries of two steps each, as code makes them that looks for a batch size: six steps."""
    found, error = ran(
        tmp_path,
        """
        import torch
        def tried(batch):
            model = torch.nn.Linear(8, 8).cuda()
            optimizer = torch.optim.SGD(model.parameters())
            for _ in range(2):
                model(torch.ones(batch, 8, device="cuda")).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        for batch in (2, 4, 8):
            tried(batch)
        """,
        steps=0,
    )
    assert error is None and found.steps == 6
    assert {"forward 6", "backward 6", "optimizer 6"} <= set(found.trace.phases)


def test_a_loop_that_waits_for_a_number_is_ended_and_named(tmp_path: Path) -> None:
    waits, error = ran(
        tmp_path,
        """
        import torch
        x = torch.empty(64, 64, device="cuda")
        while x.sum().item() > 0.5:
            x = x / 2
        print("never")
        """,
    )
    assert error is None and waits.waits == "train.py:4" and "run-waits" in [each.code for each in waits.findings]
    ends, error = ran(
        tmp_path,
        """
        import torch
        x = torch.empty(64, 64, device="cuda")
        while True:
            for _ in range(1500):
                if x.sum().item() < 0.5:
                    break
            break
        """,
    )
    assert error is None and ends.waits is None
    assert [assumed.lines for assumed in ends.assumed] == [("train.py:6",)]


def test_optimizer_state_belongs_to_the_module_of_its_parameter(tmp_path: Path) -> None:
    """Two moments of 8 × 8 and 8 floats each."""
    found, _ = ran(
        tmp_path,
        """
        import torch
        model = torch.nn.Sequential(torch.nn.Linear(8, 8)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 8, device="cuda")).sum().backward()
            optimizer.step()
        """,
    )
    states = [each for each in found.trace.storages if each.role == "optimizer state" and each.bytes > 4]
    assert {found.trace.layers[each.layer].path for each in states} == {"0"}
    assert sum(each.bytes for each in states) == 2 * (64 + 8) * 4


def test_gradients_that_stay_are_told(tmp_path: Path) -> None:
    """Two parameters of 512 × 512 and 512 floats: 1,050,624 B of gradients stay."""
    text = """
        import torch
        model = torch.nn.Linear(512, 512).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        for _ in range(9):
            optimizer.zero_grad(set_to_none={})
            model(torch.ones(4, 512, device="cuda")).sum().backward()
            optimizer.step()
        """
    kept, _ = ran(tmp_path, text.format(False))
    freed, _ = ran(tmp_path, text.format(True))
    assert kept.kept_gradients == KeptGradients((512 * 512 + 512) * 4, "kept", "train.py:6")
    assert freed.kept_gradients is None
    assert "run-gradients-kept" in [finding.code for finding in kept.findings]


GAN = """
    import os, torch
    from torch import nn
    {setup}
    made, judge = nn.Linear(256, 512).cuda(), nn.Linear(512, 128).cuda()
    {wrapped}
    of_made, of_judge = torch.optim.SGD(made.parameters()), torch.optim.SGD(judge.parameters())
    for _ in range(3):
        fake = made(torch.ones(4, 256, device="cuda"))
        of_judge.zero_grad({argument})
        judge(fake.detach()).sum().backward()
        of_judge.step()
        of_made.zero_grad({argument})
        judge(fake).sum().backward()
        of_made.step()
    """
_OF_MADE, _OF_JUDGE = 4 * (256 * 512 + 512), 4 * (512 * 128 + 128)


@pytest.mark.parametrize(("argument", "reason"), [("", "late"), ("set_to_none=False", "kept")])
def test_a_zero_grad_keeps_the_gradients_of_its_own_optimizer(tmp_path: Path, argument: str, reason: Any) -> None:
    """Line 13 is that of the larger network, whose gradients the backward at line 11 leaves alone."""
    found, error = ran(tmp_path, GAN.format(setup="", wrapped="", argument=argument))
    assert error is None and found.kept_gradients == KeptGradients(_OF_MADE, reason, "train.py:13")


@pytest.mark.parametrize("argument", ["", "set_to_none=False"])
def test_a_zero_grad_after_another_loss_has_written_gradients_is_not_late(tmp_path: Path, argument: str) -> None:
    """The first loss leaves the judge gradients that its own step must not see: line 13 drops them where it has to."""
    found, error = ran(
        tmp_path,
        """
        import torch
        from torch import nn
        made, judge = nn.Linear(256, 512).cuda(), nn.Linear(512, 128).cuda()
        of_made, of_judge = torch.optim.SGD(made.parameters()), torch.optim.SGD(judge.parameters())
        for _ in range(3):
            of_made.zero_grad()
            fake = made(torch.ones(4, 256, device="cuda"))
            judge(fake).sum().backward()
            of_made.step()
            assert judge.weight.grad is not None
            of_judge.zero_grad({argument})
            judge(fake.detach()).sum().backward()
            of_judge.step()
        """.replace("{argument}", argument),
    )
    assert error is None and found.kept_gradients is None


@pytest.mark.parametrize("argument", ["", "set_to_none=False"])
@pytest.mark.parametrize("views", ["made, judge", "judge"])
def test_no_zero_grad_frees_gradients_in_buckets(tmp_path: Path, views: str, argument: str) -> None:
    """What is a view of a bucket of DistributedDataParallel stays with it; the other network's gradients are freed."""
    ddp = "nn.parallel.DistributedDataParallel"
    wrapped = f"made = {ddp}(made, gradient_as_bucket_view={'made' in views})"
    wrapped += f"; judge = {ddp}(judge, gradient_as_bucket_view=True)"
    setup = "torch.distributed.init_process_group('nccl')"
    found, error = ran(tmp_path, GAN.format(setup=setup, wrapped=wrapped, argument=argument), world=World(2))
    own = KeptGradients(_OF_MADE, "kept" if argument else "late", "train.py:13")
    assert error is None and found.kept_gradients == (None if "made" in views else own)


def test_gradients_that_no_zero_grad_frees_are_told_without_a_line(tmp_path: Path) -> None:
    text = GAN.format(setup="", wrapped="", argument="")
    found, error = ran(tmp_path, text.replace("of_made.zero_grad()", "of_judge.zero_grad()"))
    assert error is None and found.kept_gradients == KeptGradients(_OF_MADE, "none", None)


def test_a_thread_that_copies_ahead_is_recorded(tmp_path: Path) -> None:
    """Two batches of 1 MiB wait in the queue, one is being put there, and one is in use."""
    found, error = ran(
        tmp_path,
        """
        import queue, threading, torch
        model = torch.nn.Linear(512, 512).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        ready = queue.Queue(2)

        class Ahead(threading.Thread):
            def run(self):
                stream = torch.cuda.Stream()
                for _ in range(9):
                    with torch.cuda.stream(stream):
                        batch = torch.ones(512, 512).pin_memory().to("cuda", non_blocking=True)
                    assert batch.is_cuda and torch.cuda.memory_allocated() >= batch.nbytes
                    ready.put(batch)

        ahead = Ahead(daemon=True)
        ahead.start()
        while True:
            batch = ready.get(timeout=60)
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        """,
    )
    assert error is None and found.steps == 3
    copied = [s for s in found.trace.storages if s.shape == (512, 512) and s.op == "_to_copy"]
    assert len(copied) >= 4 and all(s.layer == -1 for s in copied[1:])


def test_a_program_may_train_in_a_thread_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found, error = ran(
        tmp_path,
        """
        import threading, torch
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        def train():
            while True:
                model(torch.ones(4, 512, device="cuda")).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        thread = threading.Thread(target=train)
        thread.start()
        thread.join(60)
        print(thread.is_alive())
        """,
    )
    assert error is None and found.steps == 3 and found.stopped
    assert {split_phase(name) for name in found.trace.phases} >= {("forward", 3), ("backward", 3), ("optimizer", 3)}
    assert [layer.calls for layer in found.trace.layers] == [1, 1, 1]  # of its first forward
    written = capfd.readouterr()
    assert "False" in written.out and "StopProgram" not in written.err


def test_a_thread_that_outlives_the_region_is_left_with_pytorch_as_it_is() -> None:
    go, answers = threading.Event(), []

    def late() -> None:
        go.wait(60)
        answers.extend([torch.ones(2).tolist(), torch.empty(2, device="meta").device.type])

    with gpu() as program:
        thread = threading.Thread(target=late)
        thread.start()
    go.set()
    thread.join(60)
    assert not is_in_torch_dispatch_mode()  # a flag of the whole process
    assert answers == [[1.0, 1.0], "meta"] and not program.ledger.events


# -- how it ends ------------------------------------------------------------------------------------------------------


def test_it_stops_through_the_programs_own_finally(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, error = ran(
        tmp_path,
        """
        import sys, torch
        model = torch.nn.Linear(4, 4).to("cuda")
        optimizer = torch.optim.Adam(model.parameters())
        try:
            for step in range(100):
                model(torch.ones(1, 4, device="cuda")).sum().backward()
                optimizer.step()
        finally:
            print("last", step, sys.argv[1:])
        """,
        "--lr",
        "3",
        steps=2,
    )
    assert capsys.readouterr().out == "last 2 ['--lr', '3']\n"
    assert error is None and found.stopped and found.steps == 2


def test_an_error_of_the_program_is_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import torch\nx = torch.ones(3, device='cuda')\nraise KeyError('mine')\n", encoding="utf-8")
    assert command(["run", str(script)]) == 1
    written = capsys.readouterr()
    assert "KeyError: 'mine'" in written.err and "broken.py" in written.err and "memsize/" not in written.err
    assert "broken.py" in written.out


def test_the_traceback_of_running_out_of_memory_is_that_of_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the script's first line to PyTorch's last, without the calls of memsize between and below them."""
    script = tmp_path / "large.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(8, 2**16)).cuda()\n"
        "try:\n    model(torch.ones(2**20, 8, device='cuda'))\n"
        "except torch.OutOfMemoryError as error:\n    raise ValueError('mine') from error\n",
        encoding="utf-8",
    )
    assert command(["run", "--gpu", "t4", str(script)]) == 1
    written = capsys.readouterr().err
    files = [line.split('"')[1] for line in written.splitlines() if line.startswith('  File "')]
    assert [Path(file).name for file in files] == [
        "large.py", "module.py", "container.py", "module.py", "linear.py", "large.py",
    ]  # fmt: skip
    assert "ValueError: mine" in written and "CUDA out of memory" in written


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import torch\ntorch.ones(3)\n", "run-nothing-on-gpu"),
        ("import torch\ntorch.nn.Linear(3, 3).cuda()(torch.ones(1, 3).cuda())\n", "run-no-step"),
        ("import torch\ntorch.empty(2**40, device='cuda')\n", "run-out-of-memory"),
    ],
)
def test_programs_that_do_not_train_are_answered_too(tmp_path: Path, text: str, code: str) -> None:
    found, _ = ran(tmp_path, text)
    assert code in [finding.code for finding in found.findings]


def test_the_exit_status_of_a_program_that_refuses_its_arguments(tmp_path: Path) -> None:
    script = tmp_path / "args.py"
    script.write_text("import sys\nsys.exit(3)\n", encoding="utf-8")
    assert command(["run", str(script)]) == 3
    assert command(["run", str(tmp_path / "none.py")]) == 2


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("package.nothere", "cannot run the module package.nothere: No module named package.nothere"),
        ("package.nothere.train", "cannot run the module package.nothere.train: "),
        ("package", "'package' is a package and cannot be directly executed"),
        ("nothere", "no such module: nothere"),
    ],
)
def test_a_module_that_is_not_there_is_said_in_one_line(
    module: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("package").mkdir()
    Path("package", "__init__.py").touch()
    assert command(["run", "-m", module]) == 2
    written = capsys.readouterr()
    error = written.err.strip().splitlines()[-1]
    assert said in error and "Traceback" not in written.err and not written.out


def test_what_a_package_itself_cannot_import_is_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken").mkdir()
    Path("broken", "__init__.py").write_text("import broken.missing\n", encoding="utf-8")
    Path("broken", "train.py").touch()
    assert command(["run", "-m", "broken.train"]) == 1
    assert "import broken.missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "launched",
    [
        ["torchrun", "--nproc_per_node", "2", "train.py"],
        ["accelerate", "launch", "train.py"],
        ["-m", "torch.distributed.run", "train.py"],
        ["-m", "torch.distributed.launch", "train.py"],
        ["/usr/bin/torchrun", "train.py"],
    ],
)
def test_what_starts_processes_is_answered_in_one_line(launched: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["run", *launched]) == 2
    said = capsys.readouterr().err
    assert "give the script itself and how many, as in memsize run --gpus 8 train.py" in said
    assert "starts processes, one for each GPU" in said and len(said.splitlines()) == 1


def test_options_that_come_after_the_script_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    parse = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--steps')\nparser.parse_args()\n"
    Path("train.py").write_text(parse)
    assert command(["run", "train.py", "--steps", "3", "--gpu=t4"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        "memsize: the script got --steps, --gpu. If meant for memsize, give options before the script: "
        "memsize run --steps … train.py …"
    )
    # A script that reads no arguments does not complain, and one that has a --gpu of its own may be meant.
    Path("train.py").write_text("import torch\ntorch.ones(4).cuda()\n")
    assert command(["run", "train.py", "--gpu", "t4"]) == 0
    assert "memsize: the script got --gpu. If meant for memsize" in capsys.readouterr().err
    Path("train.py").write_text("import sys, torch\ntorch.ones(4).cuda()\nsys.argv.index('--gpu')\n")
    assert command(["run", "train.py", "--gpu", "t4"]) == 0
    assert "the script got" not in capsys.readouterr().err


def test_an_assertion_without_a_message_is_named_by_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("version = '1.0'\nassert version == '0.3.2'  # checked\n")
    assert command(["run", "train.py"]) == 1
    assert (
        "failed at train.py:2: AssertionError: assert version == '0.3.2'  # checked. Nothing" in capsys.readouterr().out
    )


# -- the user's files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["none.py"], ["-m", "nowhere.to_be_found"]], ids=["script", "module"])
def test_what_is_not_there_is_answered_in_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["run", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: no such {'module' if '-m' in arguments else 'script'}: n")


def test_files_that_were_there_are_left_alone_and_weights_are_not_written(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("mine", encoding="utf-8")
    (tmp_path / "old.pt").write_bytes(b"weights")
    found, error = ran(
        tmp_path,
        """
        import os, pathlib, torch
        here = pathlib.Path(__file__).parent
        model = torch.nn.Linear(512, 512).cuda()
        for change in (
            lambda: os.remove(here / "old.txt"),
            lambda: os.replace(here / "old.txt", here / "moved.txt"),
        ):
            try:
                change()
                raise SystemExit("it was let through")
            except PermissionError:
                pass
        (here / "new.txt").write_text("1")
        (here / "new.txt").write_text("2")
        os.replace(here / "new.txt", here / "newer.txt")
        torch.save(model.state_dict(), here / "old.pt")
        assert torch.load(here / "old.pt")["weight"].is_cuda
        (here / "out.tmp").mkdir()
        torch.save(model.state_dict(), here / "out.tmp" / "last.pt")
        os.rename(here / "out.tmp", here / "out")
        assert (here / "out" / "last.pt").is_file() and torch.load(here / "out" / "last.pt")["weight"].is_cuda
        torch.save(model.state_dict(), here / "size.pt")
        os.remove(here / "size.pt")
        """,
    )
    assert error is None, error
    assert (tmp_path / "old.txt").read_text(encoding="utf-8") == "mine"
    assert (tmp_path / "old.pt").read_bytes() == b"weights"
    assert (tmp_path / "newer.txt").read_text(encoding="utf-8") == "2"
    assert any(line.startswith("1.00 MiB to") for line in found.unwritten)
    refused = [line.partition(" ")[0] for line in found.unwritten if "it was there before" in line]
    assert refused == ["remove", "move"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == []
    (tmp_path / "old.txt").write_text("still mine to write", encoding="utf-8")


def test_a_program_makes_temporary_files(tmp_path: Path) -> None:
    """Some are opened by way of their folder, which was there before; one that was there is refused there too."""
    (tmp_path / "old.txt").write_text("mine", encoding="utf-8")
    found, error = ran(
        tmp_path,
        f"""
        import os, tempfile
        here = r"{tmp_path}"
        for make in (tempfile.NamedTemporaryFile, tempfile.TemporaryFile, tempfile.SpooledTemporaryFile):
            for folder in (None, here):
                with make(dir=folder) as file:
                    file.write(b"1")
        with tempfile.TemporaryDirectory(dir=here) as folder, open(os.path.join(folder, "a"), "w") as file:
            file.write("1")
        try:
            open(here, "w", opener=lambda *_: os.open(os.path.join(here, "old.txt"), os.O_WRONLY))
            raise SystemExit("it was let through")
        except PermissionError:
            pass
        """,
    )
    assert error is None, error
    assert found.unwritten == (f"write {tmp_path / 'old.txt'}: it was there before (--allow-writes lets the program)",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.txt", "train.py"]
    assert (tmp_path / "old.txt").read_text(encoding="utf-8") == "mine"


HELD = 64 * MiB
PEAK = Path("/proc/self/clear_refs")


def _from_safetensors(path: Path) -> Any:
    with safetensors.safe_open(path, "pt", device="cuda") as file:
        return {"w": file.get_slice("w")[...], "scale": file.get_tensor("scale")}


def test_weights_in_open_files_and_buffers_are_counted_too(tmp_path: Path) -> None:
    """What a buffer got is written later, without weights; 256 × 4 B."""
    found, error = ran(
        tmp_path,
        f"""
        import io, torch
        weights = torch.ones(256, device="cuda")
        with open(r"{tmp_path / "a.pt"}", "wb") as file:
            torch.save({{"weights": weights}}, file)
        buffer = io.BytesIO()
        torch.save(weights, buffer)
        with open(r"{tmp_path / "b.pt"}", "wb") as file:
            file.write(buffer.getvalue())
        """,
    )
    assert error is None
    assert found.unwritten == (f"1.00 KiB to {tmp_path / 'a.pt'}", "1.00 KiB to a buffer in memory")


@pytest.mark.skipif(not os.access(PEAK, os.W_OK), reason="only Linux tells the most memory since a moment")
@pytest.mark.parametrize(
    "load",
    [
        lambda path: torch.load(path, map_location="cuda"),
        lambda path: torch.load(path, map_location=lambda storage, location: storage.cuda()),
        lambda path: safetensors.torch.load_file(path.with_suffix(".safetensors"), device="cuda"),
        lambda path: _from_safetensors(path.with_suffix(".safetensors")),
    ],
)
def test_a_checkpoint_for_the_gpu_is_not_read(tmp_path: Path, load: Callable[[Path], Any]) -> None:
    weights = {"w": torch.arange(HELD, dtype=torch.uint8), "scale": torch.ones(())}
    torch.save(weights, tmp_path / "w.pt")
    safetensors.torch.save_file(weights, tmp_path / "w.safetensors")
    with gpu():
        torch.ones(3, device="cuda")
        PEAK.write_text("5", encoding="ascii")  # the peak is counted anew from here (man proc_pid_clear_refs)
        before = _most_memory()
        found = load(tmp_path / "w.pt")
        assert _most_memory() - before < HELD // 2
        assert [(str(each.device), tuple(each.shape)) for each in (found["w"], found["scale"])] == [
            ("cuda:0", (HELD,)),
            ("cuda:0", ()),
        ]
        assert torch.cuda.memory_allocated() == HELD + 512


def _most_memory() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def test_a_checkpoint_of_the_gpu_takes_no_memory_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch asks weights on a GPU for their bytes, of which there are none: 8 GiB of zeros were kept."""
    monkeypatch.chdir(tmp_path)
    text = """
    import torch
    weights, step = torch.empty(2**31, device="cuda"), torch.tensor(7)
    for name in ("a.pt", "b.pt", "a.pt"):
        torch.save({"weights": weights, "step": step, "again": weights[:2**30]}, name)
    del weights
    state = torch.load("a.pt", weights_only=True)
    assert state["step"] == 7 and state["weights"].is_cuda and torch.cuda.memory_allocated() == 2**33
    """
    PEAK.write_text("5", encoding="ascii")  # the peak is counted anew from here (man proc_pid_clear_refs)
    before = _most_memory()
    found, error = ran(tmp_path, text)
    assert error is None, error
    assert _most_memory() - before < 2**30
    assert found.unwritten == ("8.00 GiB to a.pt", "8.00 GiB to b.pt")


@pytest.mark.parametrize("location", [None, "cpu", {"cuda:0": "cpu"}])
def test_what_is_loaded_to_the_cpu_has_its_values_for_good(tmp_path: Path, location: Any) -> None:
    path = tmp_path / "w.pt"
    torch.save({"w": torch.arange(5.0)}, path)
    with gpu():
        found = torch.load(path, map_location=location)["w"]
    torch.save({"w": torch.zeros(5)}, path)
    assert found.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("form", ["old", "packed"])
def test_checkpoints_that_cannot_be_mapped_are_read(tmp_path: Path, form: str) -> None:
    path, packed = tmp_path / "w.pt", tmp_path / "packed.pt"
    torch.save({"w": torch.arange(5.0)}, path, _use_new_zipfile_serialization=form != "old")
    if form == "packed":
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
            for name in old.namelist():
                new.writestr(name, old.read(name))
        packed.replace(path)
    with gpu():
        assert torch.load(path)["w"].tolist() == [0, 1, 2, 3, 4]
        assert torch.load(path, map_location="cuda")["w"].is_cuda


def test_tensors_have_addresses_of_their_own() -> None:
    """Those who save weights look for shared ones by them."""
    with gpu():
        one, other = torch.empty(4, device="cuda"), torch.empty(4, device="cuda")
        assert 0 != one.data_ptr() != other.data_ptr() != 0
        assert one[1:].data_ptr() == one.data_ptr() + 4 and one.view(2, 2).data_ptr() == one.data_ptr()
        assert one[1:].untyped_storage().data_ptr() == one.untyped_storage().data_ptr() == one.data_ptr()


def test_trackers_are_switched_off_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with gpu():
        assert os.environ["WANDB_MODE"] == "disabled" and os.environ["NEPTUNE_MODE"] == "debug"
        folder = Path(os.environ["MLFLOW_TRACKING_URI"].removeprefix("file://"))
        assert folder.is_dir()
    assert os.environ["WANDB_MODE"] == "online" and "MLFLOW_TRACKING_URI" not in os.environ and not folder.exists()


# -- outside ----------------------------------------------------------------------------------------------------------


def _state() -> tuple[Any, ...]:
    owners: tuple[Any, ...] = (torch, torch._C, torch.cuda, torch.Tensor, nn.Module, torch.accelerator, torch.storage)
    held = [
        {name: id(value) for name, value in vars(owner).items() if name != "__warningregistry__"} for owner in owners
    ]
    return *held, list(sys.argv), list(sys.path), torch.version.cuda


@pytest.mark.thorough
def test_a_plain_script_imports_nothing_of_sharding(tmp_path: Path, warm_python: Python) -> None:
    """Which takes a second; a script that imports it gets what is replaced in it."""
    (tmp_path / "plain.py").write_text("import torch\nx = torch.ones(3).cuda()", encoding="utf-8")
    (tmp_path / "sharded.py").write_text("from torch.distributed.fsdp import fully_shard", encoding="utf-8")
    code = """
import sys
from memsize.cli import run
run(["run", "plain.py"])
heavy = {"torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"} & sys.modules.keys()
assert not heavy, heavy
with __import__("memsize").virtual_gpu():
    import sharded
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    replaced = FSDPParam.init_all_gather_outputs
assert FSDPParam.init_all_gather_outputs is not replaced
assert FSDPParam.init_all_gather_outputs is replaced.__wrapped__
"""
    done = warm_python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_patched(tmp_path: Path, fails: bool) -> None:
    ran(tmp_path, "import torch")  # PyTorch's own lazy imports
    before = _state()
    ran(tmp_path, "import torch\nx = torch.ones(3).cuda()\n" + "raise ValueError" * fails)
    assert _state() == before
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(3, device="cuda")


def test_one_region_at_a_time() -> None:
    with gpu(), pytest.raises(InputError, match="has a virtual GPU already"), gpu():
        pass
    with gpu():
        pass


def test_the_command_writes_json_and_saves_a_run_that_shows_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "infer.py"
    script.write_text("import torch\nprint('hello')\nx = torch.ones(2**20, device='cuda')\n", encoding="utf-8")
    saved = tmp_path / "run.memsize"
    assert command(["run", "--format", "json", "--save", str(saved), str(script)]) == 0
    written = capsys.readouterr()
    data = json.loads(written.out)
    assert data["peak"]["requested"] == 4 * MiB and data["tensors"][0]["line"] == "infer.py:3"
    assert "hello" in written.err
    assert command(["run", "--format", "json", str(saved)]) == 0
    assert json.loads(capsys.readouterr().out) == data


def test_the_record_of_a_region() -> None:
    with gpu() as program:
        kept = torch.empty(2**20, dtype=torch.uint8, device="cuda")
    found = record_of(program, "cell")
    assert found.peak.requested == kept.nbytes == MiB


def test_a_block_of_code_has_the_gpu_too() -> None:
    with memsize.virtual_gpu("t4", steps=2) as block:
        model = nn.Linear(512, 512).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        with pytest.raises(InputError, match="still in use"):
            _ = block.run
        while True:
            model(torch.ones(4, 512, device="cuda")).sum().backward()
            optimizer.step()
    assert block.run.steps == 2 and block.run.stopped
    assert block.trace.layers[0].parameter_bytes == (512 * 512 + 512) * 4


def test_a_script_from_python(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys, torch\nx = torch.ones(int(sys.argv[1]), device='cuda')\n", encoding="utf-8")
    assert memsize.run(script, ["1024"], gpu="t4").peak.requested == 4096
    with pytest.raises(memsize.ForwardError, match="ValueError"):
        memsize.run(script, ["many"])
    with pytest.raises(InputError, match="no such script"):
        memsize.run(tmp_path / "none.py")


def test_lazy_modules_are_moved_beside_meta_tensors_of_the_program(tmp_path: Path) -> None:
    """3 x 4 weights and 4 biases."""
    run, error = ran(
        tmp_path,
        """
        import torch
        from torch import nn
        shapes = torch.empty(2, device="meta")
        model = nn.LazyLinear(4).cuda()
        model(torch.ones(2, 3, device="cuda"))
        """,
    )
    assert error is None
    assert sum(storage.bytes for storage in run.trace.storages if storage.role == "parameter") == 4 * (12 + 4)


@pytest.mark.parametrize(
    "text",
    [
        "torch.export.export(nn.Linear(2, 2).cuda(), (torch.ones(1, 2, device='cuda'),))",
        "with FakeTensorMode(): torch.ones(2)",
    ],
    ids=["export", "mode"],
)
def test_fake_tensors_are_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    script = (
        "import torch\nfrom torch import nn\nfrom torch._subclasses.fake_tensor import FakeTensorMode\n"
        "x = torch.ones(4, device='cuda')\n"
    )
    found, error = ran(tmp_path, script + text)
    assert found.peak.requested >= 16
    assert str(error).startswith("memsize runs no fake tensors, which torch.export and FakeTensorMode make: leave")


def test_a_module_whose_attributes_fail_is_named_by_its_class(tmp_path: Path) -> None:
    """No attribute is asked for that the program does not ask for itself."""
    found, error = ran(
        tmp_path,
        """
        import torch
        from torch import nn
        class Careful(nn.Linear):
            def __getattr__(self, name):
                if name == "original_name":
                    raise RuntimeError(name)
                return super().__getattr__(name)
        Careful(4, 4).cuda()(torch.ones(2, 4, device="cuda"))
        """,
    )
    assert error is None and [layer.type for layer in found.trace.layers] == ["Careful"]


def test_a_run_with_text_that_is_no_unicode_is_saved(tmp_path: Path) -> None:
    """As the names of files that are not UTF-8 are in Python."""
    found, error = ran(tmp_path, 'import torch\nx = torch.ones(4, device="cuda")\nraise OSError("no file \\udcff")')
    assert isinstance(error, OSError)
    found.save(tmp_path / "run.memsize")
    assert memsize.load(tmp_path / "run.memsize").failure == found.failure == "OSError: no file \udcff"


def test_lazy_modules_are_moved_before_they_know_their_sizes(tmp_path: Path) -> None:
    """Linear: 10 x 3 x 4 weights and 10 biases; batch norm: weight, bias, mean and variance of 3, and a count."""
    run, error = ran(
        tmp_path,
        """
        import torch
        from torch import nn
        model = nn.Sequential(nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(10)).to("cuda")
        other = nn.LazyLinear(2).cuda()
        assert next(model.parameters()).device.type == "cuda" and next(other.parameters()).is_cuda
        model(torch.randn(2, 3, 4, device="cuda"))
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            model(torch.randn(2, 3, 4, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    assert error is None and run.steps == 2
    held = Counter[str]()
    for storage in run.trace.storages:
        held[storage.role] += storage.bytes
    assert held["parameter"] == 4 * (10 * 12 + 10 + 2 * 3)
    assert held["buffer"] == 4 * 2 * 3 + 8


def _phases_of(run: ProgramRun) -> dict[str | None, list[str]]:
    """The phases in which each line allocates, in order."""
    phases: dict[str | None, list[str]] = {}
    for event in run.trace.events:
        here = phases.setdefault(run.trace.line_of(event.storage), [])
        phase = run.trace.phases[event.phase]
        if event.delta > 0 and phase not in here:
            here.append(phase)
    return phases


def test_a_loss_and_clipping_after_a_reference_models_forward_are_training(tmp_path: Path) -> None:
    found, error = ran(
        tmp_path,
        """
        import torch
        from torch import nn
        policy, reference = nn.Linear(512, 512).cuda(), nn.Linear(512, 512).cuda()
        optimizer = torch.optim.SGD(policy.parameters())
        for step in range(2):
            x = torch.ones(512, 512, device="cuda")
            answers = policy(x)
            with torch.no_grad():
                wanted = reference(x)
                margin = wanted * 2
            loss = (answers - wanted).square()
            loss.mean().backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            scaled = policy.weight.grad * 2
            optimizer.step()
        """,
    )
    assert error is None
    phases = _phases_of(found)
    assert phases["train.py:8"] == ["forward 1", "forward 2"]
    assert phases["train.py:10"] == phases["train.py:11"] == ["evaluation 1", "evaluation 2"]
    assert phases["train.py:12"] == ["step 1", "step 2"]
    assert phases["train.py:15"] == ["step 1", "step 2"]


def test_what_touches_gradients_after_a_reference_models_forward_is_no_evaluation(tmp_path: Path) -> None:
    run, error = ran(
        tmp_path,
        """
        import torch
        from torch import nn
        policy, reference = nn.Linear(512, 512).cuda(), nn.Linear(512, 512).cuda()
        optimizer = torch.optim.SGD(policy.parameters())
        for step in range(2):
            x = torch.ones(512, 512, device="cuda")
            policy(x).square().mean().backward()
            with torch.no_grad():
                margin = reference(x) * 2
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            scaled = torch.ones(512, 512, device="cuda")
            optimizer.step()
        """,
    )
    assert error is None
    phases = _phases_of(run)
    assert phases["train.py:10"] == ["evaluation 1", "evaluation 2"]
    assert phases["train.py:12"] == ["step 1", "step 2"]
    assert set(re.findall(r"^evaluation .* (\w+)$", render(run, "text"), re.MULTILINE)) == {"mul"}


def test_what_follows_the_last_step_is_part_of_it(tmp_path: Path) -> None:
    """The peak is the batch of a fourth step, 4 MiB beside three others."""
    run, error = ran(
        tmp_path,
        """
        import torch
        net, batches = torch.nn.Linear(1024, 1, bias=False).cuda(), []
        optimizer = torch.optim.SGD(net.parameters())
        for step in range(9):
            batches.append(torch.ones(1024, 1024, device="cuda"))
            net(batches[-1]).sum().backward()
            optimizer.step()
        """,
    )
    assert error is None and run.steps == 3
    assert run.peak.peak_phase == "step" and run.peak.peak_step == 3
    assert {split_phase(run.trace.phases[event.phase])[1] for event in run.trace.events} == {0, 1, 2, 3}


@pytest.mark.parametrize("loss", ["(y - 1).square().mean()", "torch.nn.MSELoss()(y, torch.ones_like(y))"])
def test_a_program_without_modules_has_forwards_too(tmp_path: Path, loss: str) -> None:
    """Its first forward is no part of the setup; the update and the check after it are no part of a forward."""
    found, error = ran(
        tmp_path,
        f"""
        import torch
        weights = [torch.randn(512, 512, device="cuda", requires_grad=True) for _ in range(2)]
        optimizer = torch.optim.SGD(weights, lr=0.1)
        x = torch.ones(512, 512, device="cuda")
        for step in range(9):
            hidden = (x @ weights[0]).relu()
            y = hidden @ weights[1]
            {loss}.backward()
            norms = [weight.grad * 2 for weight in weights]
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    assert error is None and found.stopped and found.steps == 3
    phases, forwards = _phases_of(found), ["forward 1", "forward 2", "forward 3"]
    assert phases["train.py:3"] == phases["train.py:5"] == ["setup"]
    assert phases["train.py:7"] == phases["train.py:8"] == forwards
    assert phases["train.py:9"] == [f"{name} {step}" for step in (1, 2, 3) for name in ("forward", "backward")]
    assert phases["train.py:10"] == ["step 1", "step 2", "step 3"]


BY_HAND = """
import sys, torch
update, micro_batches = sys.argv[1], int(sys.argv[2])
model = torch.nn.Linear(512, 1024).cuda()
for step in range(20):
    for _ in range(micro_batches):
        model(torch.ones(4, 512, device="cuda")).sum().backward()
    if update == "no_grad":
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    elif update == "data":
        for p in model.parameters():
            p.data.add_(p.grad.data, alpha=-0.1)
    elif update == "foreach":
        torch._foreach_add_([p.data for p in model.parameters()], [p.grad for p in model.parameters()], alpha=-0.1)
    model.zero_grad()
print("end")
"""


@pytest.mark.parametrize(("update", "micro_batches"), [("no_grad", 1), ("data", 2), ("foreach", 1)])
def test_steps_are_counted_where_a_program_updates_its_parameters_itself(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], update: str, micro_batches: int
) -> None:
    """The three steps that were asked for are over at the next forward."""
    found, _ = ran(tmp_path, BY_HAND, update, str(micro_batches), steps=3)
    forwards = [phase for phase in found.trace.phases if phase.startswith("forward ")]
    assert found.steps == 3 and forwards == ["forward 1", "forward 2", "forward 3"]
    assert "end" not in capfd.readouterr().out


def test_gradients_alone_are_no_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What only differentiates, such as a benchmark of forward and backward, runs to its end."""
    found, _ = ran(tmp_path, BY_HAND, "none", "1", steps=3)
    assert found.steps == 0 and "end" in capfd.readouterr().out


WITHOUT_STEPS = """
import os, sys, time, torch
def wait(file):
    while not os.path.exists(file):
        time.sleep(0.001)
wait(sys.argv[1])
x = torch.ones(4, device="cuda")
wait(sys.argv[2])
"""


def test_progress_names_the_line_of_a_program_that_makes_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the clock is ten seconds after the one before: a minute is over at the sixth."""
    early, late = tmp_path / "early", tmp_path / "late"
    stages: list[str] = []

    def progress(stage: str) -> None:
        stages.append(stage)
        if "train.py:5, nothing" in stage and "Ctrl-C" in stage:
            early.mkdir(exist_ok=True)
        elif "with a report" in stage:
            late.mkdir(exist_ok=True)

    clock = count(step=10)
    monkeypatch.setattr("memsize.workloads.program.time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr("memsize.workloads.program._PROGRESS_EVERY", 0.01)
    ran(tmp_path, WITHOUT_STEPS, str(early), str(late), progress=progress)
    lines = [stage.removeprefix("train.py: ") for stage in stages if "so far" in stage]
    assert ["Ctrl-C" in line for line in lines] == sorted("Ctrl-C" in line for line in lines)
    assert "at train.py:5, nothing on the GPU so far; Ctrl-C ends it" in lines
    assert "at train.py:5, no optimizer step so far; Ctrl-C ends it with a report of what ran" in lines


def test_progress_counts_no_step_beyond_the_last(tmp_path: Path) -> None:
    stages: list[str] = []
    found, _ = ran(tmp_path, LOOP, "cuda", steps=3, progress=stages.append)
    steps = [stage.removeprefix("train.py: ") for stage in stages if "step" in stage]
    assert found.steps == 3
    assert steps == ["step 2 of 3", "step 3 of 3", "every step is made, running on to the next forward"]


def test_each_script_has_the_modules_beside_it(tmp_path: Path) -> None:
    """Those of an earlier script of the same process had their names, and a package without `__init__.py` too."""
    widths = []
    for width in (8, 16):
        folder = tmp_path / str(width)
        (folder / "parts").mkdir(parents=True)
        (folder / "sizes.py").write_text(f"WIDTH = {width}", encoding="utf-8")
        (folder / "parts" / "more.py").write_text(f"WIDTH = {width}", encoding="utf-8")
        (folder / "train.py").write_text(
            "import sizes, torch\nfrom parts import more\ntorch.ones(sizes.WIDTH * more.WIDTH, device='cuda')\n",
            encoding="utf-8",
        )
        widths.append(memsize.run(folder / "train.py").peak.requested)
    assert widths == [4 * 8 * 8, 4 * 16 * 16]
    assert not {"sizes", "parts", "parts.more"} & sys.modules.keys()
