"""Tensors that went from the virtual GPU to the host: stand-ins there too, from 1 MiB on."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import memsize
from memsize import Trace
from memsize.units import format_bytes
from tests.programs import is_stand_in, pages_read, program
from tests.ranks import PARAMETERS, Model, fsdp
from tests.records import HostRow, HostUse

MiB = 2**20
SIDE = 512
"""A square of float32 of this side takes 1 MiB."""


def test_a_large_copy_says_that_it_is_on_the_cpu() -> None:
    run = program()
    with run.open():
        there = torch.ones(SIDE, SIDE, device="cuda")
        for copy in (there.cpu(), there.to("cpu"), there.to(device=torch.device("cpu"), dtype=torch.float32)):
            assert copy.device == torch.device("cpu") and copy.is_cpu and not copy.is_cuda and not copy.is_meta
            assert copy.get_device() == -1 and copy.type() == "torch.FloatTensor"
            assert copy.cpu() is copy and copy.to("cpu") is copy
            assert (copy * 2 + torch.ones(SIDE)).device == torch.device("cpu")
            assert copy.numpy().shape == (SIDE, SIDE) and len(copy[0].tolist()) == SIDE
        assert torch.cuda.memory_allocated() == MiB
        back = copy.cuda()
        assert back.is_cuda and back.device == there.device and torch.cuda.memory_allocated() == 2 * MiB
        with pytest.raises(RuntimeError, match="same device, but found at least two devices, cuda:0 and cpu"):
            there + copy
        there.copy_(copy, non_blocking=True)
        copy.copy_(there)
        assert torch.cuda.memory_allocated() == 2 * MiB


@pytest.mark.parametrize("side", [SIDE, SIDE // 2])
def test_what_is_made_on_the_cpu_like_a_tensor_of_the_gpu_can_be_pinned(side: int) -> None:
    """Buffers of a program that offloads by itself, from 1 MiB on stand-ins, as copies are. One is there while the next
    is made.
    """
    run = program()
    with run.open():
        there = torch.ones(side, side, device="cuda")
        for like in (there, there.cpu()):
            buffer = torch.empty_like(like, device="cpu", pin_memory=True)
            buffer.copy_(there, non_blocking=True)
            assert buffer.is_cpu and buffer.is_pinned() and is_stand_in(buffer) == (side == SIDE)
            for moment in (torch.zeros_like(buffer, device="cpu"), buffer.new_zeros(buffer.shape, device="cpu")):
                assert moment.is_cpu and not moment.is_pinned()
                buffer.grad = moment
        assert torch.cuda.memory_allocated() == side * side * 4
    assert f"at most {format_bytes(2 * side * side * 4)} are in pinned memory" in next(run.ledger.host_memory.notes())


def test_a_gradient_is_a_stand_in_where_its_tensor_is_one() -> None:
    """Either may have come from the GPU; who holds the other sees the same tensor."""
    with program().open():
        copy, made = torch.ones(SIDE, SIDE, device="cuda").cpu(), torch.zeros(SIDE, SIDE)
        copy.grad = made
        assert copy.grad is made and is_stand_in(made) and made.is_cpu and made.shape == (SIDE, SIDE)
        own = torch.zeros(SIDE, SIDE, requires_grad=True)
        own.grad = torch.ones(SIDE, SIDE, device="cuda").cpu()
        assert own.is_leaf and own.requires_grad and own.is_cpu and is_stand_in(own)
        torch.optim.AdamW([own]).step()
        small = torch.zeros(3, requires_grad=True)
        small.grad = torch.full((3,), 2.0, device="cuda").cpu()
        assert small.grad.tolist() == [2.0, 2.0, 2.0]
        with pytest.raises(RuntimeError, match="Please ensure that the gradient and the tensor are on the same device"):
            small.grad = torch.ones(3, device="cuda")
        small.grad = None
        assert small.grad is None


def test_small_copies_have_values() -> None:
    with program().open():
        small = torch.full((3,), 2.0, device="cuda").cpu()
        assert small.tolist() == [2.0, 2.0, 2.0] and small.untyped_storage().device == torch.device("cpu")


@pytest.mark.parametrize("pinned", [False, True])
def test_what_autograd_saves_on_the_cpu_has_no_values_there(pinned: bool) -> None:
    """Copies that are only brought back are stand-ins whatever their size. Each takes 256 KiB."""
    run = program()
    with run.open():
        ones = torch.ones(SIDE // 2, SIDE // 2, device="cuda", requires_grad=True)
        with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
            # The sine saves its argument, the exponential its result, and a product of the two both.
            loss = (ones.sin() * ones.exp()).sum()
        loss.backward()
        assert ones.grad.is_cuda and ones.grad.shape == ones.shape and torch.cuda.memory_allocated() > MiB // 2
    use = run.ledger.host_memory.use
    assert (use.pinned if pinned else use.tensors) == 4 * MiB // 4
    assert not run.ledger.evaluator.assumptions


def test_what_a_copy_to_the_host_takes_on_the_gpu() -> None:
    """CUDA copies elements that lie in a row in both places; otherwise it makes such a copy on the GPU before."""
    with memsize.virtual_gpu("a100"):
        weight = torch.empty(512, 256, device="cuda")  # 0.5 MiB of float32
        pinned = torch.empty(256, 512, pin_memory=True)

        def taken(copy: Callable[[], object]) -> int:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            copy()
            return torch.cuda.max_memory_allocated() - before

        assert taken(lambda: pinned.copy_(weight.t(), non_blocking=True)) == MiB // 2
        assert taken(lambda: pinned.t().copy_(weight)) == 0  # the host's side is made on the host
        assert taken(weight.cpu) == taken(weight.t().cpu) == 0  # which has the same strides there
        assert taken(weight[:, :100].cpu) == 512 * 100 * 4
        assert taken(lambda: weight.to("cpu", torch.float64)) == 0  # the host casts what it waits for
        assert taken(lambda: weight.to("cpu", torch.float64, non_blocking=True)) == MiB


def test_autograd_saves_a_transposed_weight_row_by_row() -> None:
    """A linear layer saves the transpose of its weight: 2 MiB are copied on the GPU before they are on the host."""
    with memsize.virtual_gpu("a100"):
        layer = torch.nn.Linear(512, 1024, bias=False, device="cuda")
        x = torch.ones(1, 512, device="cuda", requires_grad=True)
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            layer(x)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            layer(x)  # whose result is made when the copy is gone
        assert torch.cuda.max_memory_allocated() - before == 2 * MiB


@pytest.mark.parametrize("move", [lambda model: model.cuda(), lambda model: model.to("cuda")])
def test_a_model_is_on_the_host_until_it_is_moved(move: Callable[[nn.Module], nn.Module]) -> None:
    """All of its weights, a tied one once. They are as they were allocated: nobody writes 1.25 GiB here."""

    class Tied(nn.Module):
        def __init__(self, numbers: int) -> None:
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.empty(numbers)) for _ in range(2))
            self.third = self.first

    run = program()
    with run.open():
        move(Tied(160 * MiB))  # twice 640 MiB
        assert run.ledger.host_memory.use.needs == 2 * 4 * 160 * MiB
        move(Tied(160 * MiB))  # when the first is gone from there
        small = Tied(MiB)
        move(small)
    assert run.ledger.host_memory.use.tensors == run.ledger.host_memory.use.needs == 2 * 4 * 160 * MiB


def test_the_host_holds_what_lives_there_at_one_time() -> None:
    run = program()
    with run.open():
        first = torch.zeros(SIDE, SIDE, device="cuda").cpu()
        second = first + 1
        del first
        second.pin_memory()
        assert second.is_pinned()
        third = second.cuda().to("cpu", non_blocking=True)
        assert third.is_pinned()
    pinned, copies = run.ledger.host_memory.notes()
    assert f"at most {format_bytes(2 * MiB)} are in pinned memory" in pinned
    assert f"the host holds at most {format_bytes(2 * MiB)} of copies" in copies


def test_pinned_memory_is_rounded_and_kept_and_counts_once() -> None:
    run = program()
    with run.open():
        copy = torch.zeros(SIDE, SIDE, device="cuda").cpu()
        first = torch.empty(3 * MiB, dtype=torch.uint8, pin_memory=True)
        assert first.is_pinned()
        del first
        copy.pin_memory()  # in place: a stand-in holds nothing that could be copied
    use = run.ledger.host_memory.use
    # three MiB take four, which are kept; the copy is pageable at first, then pinned in a MiB of its own
    assert (use.tensors, use.pinned, use.blocks) == (MiB, 3 * MiB, 5 * MiB)
    assert use.needs == 5 * MiB
    assert [(row.requested, row.reserved) for row in use.rows] == [(MiB, MiB), (3 * MiB, 5 * MiB), (None, 5 * MiB)]


def test_workers_of_a_loader_make_batches_ahead() -> None:
    run = program()
    with run.open():
        data = torch.utils.data.TensorDataset(torch.zeros(16, 1000))
        for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, prefetch_factor=3):
            batch.cuda()
    assert run.ledger.host_memory.use.batches == 3 * 4 * 1000 * 4


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process has for itself")
def test_workers_of_a_loader_are_measured() -> None:
    """Each makes 64 MiB of its own; the 256 MiB of the dataset's tensor are shared, and only read."""
    own = 64 * MiB

    def begin(_: int) -> None:
        global _MADE_BY_WORKER
        _MADE_BY_WORKER = torch.ones(own, dtype=torch.uint8)

    run = program()
    with run.open():
        data = torch.utils.data.TensorDataset(torch.ones(64, 4 * MiB, dtype=torch.uint8))
        for (batch,) in torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, worker_init_fn=begin):
            batch.cuda()
        run.ledger.host_memory.measure()
    use = run.ledger.host_memory.use
    assert 2 * own <= use.workers < 2 * (own + 128 * MiB)
    assert use.process > 256 * MiB
    assert (
        0 < use.shared <= 2 * 64 * 1024
    )  # two workers read a few objects: the dataset, its dict, a tuple and a tensor
    assert use.memory == use.needs + use.process + use.workers
    assert "workers of data loaders" in [row.kind for row in use.rows]


@pytest.mark.parametrize(
    ("data", "pages"),
    [
        ([float(n) for n in range(1000)], 64 + 1000 * 32),  # 24 bytes each, in blocks of 32; 40 + 16 of the list alone
        ([f"{n:09}" for n in range(50)], 464 + 50 * 64),  # 49 + 9 and a zero: 64; 56 + 50 × 8: 464 with its table
        (torch.zeros(1000, 1000), 512 + 4096),  # its object and one page of its numbers
        (torch.utils.data.TensorDataset, 0),
    ],
)
def test_pages_that_a_worker_copies(data: object, pages: int) -> None:
    if isinstance(data, list):
        data = list(data)  # whose table has no room for more
    assert pages_read(data, set()) == pages


def test_a_worker_copies_no_array() -> None:
    numpy = pytest.importorskip("numpy")
    assert pages_read(numpy.zeros(1 << 20), set()) == 4096
    assert pages_read(numpy.array([f"{n:09}" for n in range(1000)], dtype=object), set()) == 4096 + 1000 * 64


def test_files_of_weights_are_mapped(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "weights.safetensors"
    safetensors.save_file({"w": torch.zeros(SIDE, SIDE)}, path)
    run = program()
    with run.open():
        with safetensors.safe_open(path, "pt", device="cuda") as file:
            assert file.get_tensor("w").is_cuda
        assert run.files.mapped == {str(path): path.stat().st_size}
    assert HostUse(mapped=5, process=3).rows == (
        HostRow("Python, libraries and data", None, 3),
        HostRow("page cache of weights", None, 5),
    )


def test_gradients_go_back_to_where_the_values_came_from() -> None:
    with program().open():
        weight = torch.ones(SIDE, SIDE, device="cuda", requires_grad=True)
        (weight.cpu() * 3).sum().backward()
        assert weight.grad is not None and weight.grad.is_cuda
        onward = torch.ones(SIDE, SIDE, device="cuda").cpu().requires_grad_()
        (onward.to("cuda") * 3).sum().backward()
        assert onward.grad is not None and not onward.grad.is_cuda


def test_a_model_on_the_host_takes_nothing_of_the_gpu_and_is_a_parameter_again_when_it_is_back(tmp_path: Path) -> None:
    run = program()
    with run.open():
        model = nn.Linear(SIDE, SIDE, bias=False).cuda()
        model.to("cpu")
        assert model.weight.device.type == "cpu" and torch.cuda.memory_allocated() == 0
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        model.cuda()
        assert model.weight.is_cuda and torch.cuda.memory_allocated() == MiB


def offloaded(small: int) -> Trace:
    """The trace of two steps under CPU offload, where copies from `small` bytes on are stand-ins."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    patch = pytest.MonkeyPatch()
    with patch.context() as replaced:
        replaced.setattr("memsize.virtual.device_assignment._LARGE", small)
        step = fsdp(offload_policy=CPUOffloadPolicy())
        ids = torch.zeros(2, 8, dtype=torch.long)
        return memsize.trace(Model(), ids, world=memsize.World(8, 3), step=step, gpu="t4", steps=3).trace


FSDP1 = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffload, FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("nccl")
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)))
model = FSDP(model, device_id=0, cpu_offload=CPUOffload({offload}))
optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
for number in range(2):
    optimizer.zero_grad()
    model(torch.ones(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
held = torch.cuda.memory_allocated()
print("held", held)
whole = FullStateDictConfig({offload_state}, True), FullOptimStateDictConfig({offload_state}, True)
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *whole):
    states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
assert {{tuple(each.shape) for each in states[0].values()}} == {{(1024, 1024)}}
assert all(each.is_cpu for each in states[0].values()) == {offload_state}
del states
assert torch.cuda.memory_allocated() == held, (torch.cuda.memory_allocated(), held)
optimizer.step()
"""


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:FSDP.state_dict_type", "ignore:`_get_pg_default_device`")
@pytest.mark.parametrize("offload_state", [False, True])
def test_fsdp1_trains_and_gives_its_whole_state(
    tmp_path: Path, offload_state: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 MiB of parameters: rank 0 of 4 has 4 MiB of them, as much of gradients and momentum, here or on the host."""
    for offload in (False, True):
        (tmp_path / "train.py").write_text(FSDP1.format(offload=offload, offload_state=offload_state), encoding="utf-8")
        found = memsize.run(tmp_path / "train.py", gpus=4, gpu="t4", steps=0)
        assert found.failure is None and found.steps == 3
    here, there = map(int, re.findall(r"held (\d+)", capsys.readouterr().out))
    assert here - there == 3 * 4 * MiB


@pytest.mark.thorough
def test_offloaded_shards_are_on_the_gpu_as_they_are_where_the_host_really_holds_them() -> None:
    """Every event, and what is pinned. On the host are shards, gradients and AdamW's two moments, and in its update of
    lists the roots of one of them: five times the shards.
    """
    really, standing = offloaded(2**40), offloaded(0)
    assert standing.events == really.events and standing.storages == really.storages
    (pinned,) = (note for note in really.notes if "pinned memory" in note)
    assert pinned in standing.notes
    (held,) = (note for note in standing.notes if "the host holds" in note)
    shards = PARAMETERS * 4 // 8
    assert f"at most {format_bytes(5 * shards)} of" in held
