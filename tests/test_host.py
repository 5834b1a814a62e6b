"""Tensors that went from the virtual GPU to the host: stand-ins there too, from 1 MiB on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import memsize
from memsize.device.cards import card
from memsize.device.config import AllocatorConfig
from memsize.records.trace import Trace
from memsize.tracing.ledger import Workspaces
from memsize.units import format_bytes
from memsize.virtual import seat
from memsize.workloads.program import Program
from tests.ranks import PARAMETERS, Model, fsdp

MiB = 2**20
SIDE = 512
"""A square of float32 of this side takes 1 MiB."""


def program() -> Program:
    return Program("test", card("t4"), Workspaces(), AllocatorConfig(), 0)


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
        assert run.memory.allocated == MiB
        back = copy.cuda()
        assert back.is_cuda and back.device == there.device and run.memory.allocated == 2 * MiB
        with pytest.raises(RuntimeError, match="same device, but found at least two devices, cuda:0 and cpu"):
            there + copy
        there.copy_(copy, non_blocking=True)
        copy.copy_(there)
        assert run.memory.allocated == 2 * MiB


def test_small_copies_have_values() -> None:
    with program().open():
        small = torch.full((3,), 2.0, device="cuda").cpu()
        assert small.tolist() == [2.0, 2.0, 2.0] and small.untyped_storage().device == torch.device("cpu")


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
        assert model.weight.device.type == "cpu" and run.memory.allocated == 0
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        model.cuda()
        assert model.weight.is_cuda and run.memory.allocated == MiB


def offloaded(small: int) -> Trace:
    """The trace of two steps under CPU offload, where copies from `small` bytes on are stand-ins."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    patch = pytest.MonkeyPatch()
    with patch.context() as replaced:
        replaced.setattr(seat, "_LARGE", small)
        step = fsdp(offload_policy=CPUOffloadPolicy())
        ids = torch.zeros(2, 8, dtype=torch.long)
        return memsize.trace(Model(), ids, world=memsize.World(8, 3), step=step, gpu="t4", steps=3).trace


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
