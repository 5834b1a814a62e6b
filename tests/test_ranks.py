"""One rank of many: PyTorch's own sharding on its fake process group, what each rank holds, and what is refused."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memsize
from memsize import ProgramRun, Trace, World
from memsize.cli import run
from memsize.errors import ForwardError, InputError, MemsizeError
from memsize.render import render
from memsize.units import MiB, format_bytes
from tests.gpus import card, cuda_context, timeline
from tests.known_values import EXCHANGED_ARE_ALIKE, ITEM_IS_ONE, REDUCED_IS_ONE
from tests.process import can_fork
from tests.programs import HostMemory, LonelyStore, run_script
from tests.ranks import (
    BLOCK,
    LAYERS,
    PARAMETERS,
    WIDTH,
    Block,
    Model,
    Step,
    ddp,
    flat,
    fsdp,
    loop,
    loss_parallel,
    pipeline,
    tensor_parallel,
)
from tests.records import Traffic, alive, from_data
from tests.rules import out_of_memory
from tests.workloads import _chunked

distributed = pytest.importorskip("torch.distributed")
if not distributed.is_available():
    pytest.skip("torch.distributed is not in this PyTorch", allow_module_level=True)

IDS = torch.zeros(2, 8, dtype=torch.long)


def traced(step: Step, world: World, model: nn.Module | None = None, **options: Any) -> memsize.StepTrace:
    return memsize.trace(model or Model(), IDS, world=world, step=step, gpu="t4", **options)


def most(trace: Trace, role: str) -> int:
    """The most bytes of `role` that are alive at one time."""
    live = found = 0
    for event in trace.events:
        if trace.storages[event.storage].role == role:
            live += event.delta
            found = max(found, live)
    return found


def at_the_end(trace: Trace) -> Counter[str]:
    held: Counter[str] = Counter()
    for storage, size in alive(trace, len(trace.events) - 1).items():
        held[trace.storages[storage].role] += size
    return held


# -- FSDP2 ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded() -> Trace:
    return traced(fsdp(), World(8, rank=3)).trace


def test_a_rank_stores_its_shards_and_the_optimizer_state_of_them(sharded: Trace) -> None:
    assert sharded.world == World(8, 3)
    held = at_the_end(sharded)
    assert held["parameter"] == PARAMETERS * 4 // 8
    # two moments of each shard, and a counter of 4 bytes for each of the 10 parameters, which AdamW keeps on the CPU
    assert held["optimizer state"] == 2 * PARAMETERS * 4 // 8
    assert sum(tensor.bytes for tensor in sharded.tensors) == PARAMETERS * 4 // 8


def test_shards_of_a_model_without_memory_are_there_once_it_has_some(tmp_path: Path) -> None:
    """As most large models are made: on `meta`, sharded there, given memory, and then filled."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom tests.ranks import Model, fsdp\n"
        "torch.distributed.init_process_group()\n"
        "with torch.device('meta'):\n    model = Model()\n"
        "body = fsdp()(model)\n"
        "model.to_empty(device='cuda')\n"
        "for each in model.parameters():\n    torch.nn.init.trunc_normal_(each)\n    torch.nn.init.normal_(each)\n"
        "for _ in range(2):\n    body(torch.zeros(2, 8, dtype=torch.long, device='cuda'))\n"
    )
    run = memsize.run(script, gpu="t4", gpus=8, rank=3)
    assert isinstance(run, ProgramRun) and run.steps == 2
    held = at_the_end(run.trace)
    assert held["parameter"] == PARAMETERS * 4 // 8
    assert held["optimizer state"] == 2 * PARAMETERS * 4 // 8
    assert all(each.op != "_foreach_copy_" for each in run.trace.storages)  # what gathers them reads no others


def test_at_most_two_layers_are_whole_beside_the_root(sharded: Trace) -> None:
    # The root's own, the embedding and the head, stay gathered from its forward to its backward.
    root, block = 2 * 2 * 96 * WIDTH, 2 * 2 * BLOCK
    assert most(sharded, "gathered parameter") == root + block
    # The next layer's are in the buffer of its all-gather, which is there beside the last layer's.
    buffers = [each.role == "communication" and each.dtype == "bfloat16" for each in sharded.storages]
    live = [alive(sharded, place) for place in range(len(sharded.events))]
    sizes = [sum(size for storage, size in held.items() if buffers[storage]) for held in live]
    assert max(sizes) == 2 * block


def test_a_gradient_is_whole_until_it_is_reduced(sharded: Trace) -> None:
    assert most(sharded, "gradient") == PARAMETERS * 4 // 8
    # bfloat16, as its layer computed it: those of one block, or of the root's embedding and head
    assert most(sharded, "unsharded gradient") >= 2 * 2 * BLOCK


@pytest.mark.parametrize("options", [{}, {"use_orig_params": True}])
def test_flat_parameters_are_whole_while_a_layer_runs(options: dict[str, Any]) -> None:
    trace = traced(flat(**options), World(2), steps=2).trace
    # The root's, the embedding and the head, and those of two blocks: the next one's are gathered before this ends
    assert most(trace, "gathered parameter") == 4 * (2 * 96 * WIDTH + 2 * 2 * BLOCK)
    assert most(trace, "unsharded gradient") == 4 * 2 * BLOCK
    assert most(trace, "gradient") == 4 * PARAMETERS // 2


def test_flat_parameters_are_gathered_on_a_stream_of_their_own() -> None:
    """They are made once, emptied, and filled on the stream that gathers: at most two blocks and the root."""
    step = traced(flat(), World(2), steps=2)
    assert [each.name for each in step.peak.streams] == ["default", "all-gather", "reduce-scatter"]
    gathering = step.peak.streams[1]
    assert (gathering.requested, gathering.role) == (4 * (2 * 96 * WIDTH + 2 * 2 * BLOCK), "gathered parameter")
    assert sum(each.reserved for each in step.peak.streams) == step.peak.reserved


def test_flat_gradients_that_are_set_to_none_are_not_kept(tmp_path: Path) -> None:
    """FSDP1 lets go of them as the next forward begins."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom tests.ranks import Model, flat\n"
        "torch.distributed.init_process_group()\n"
        "body = flat(use_orig_params=True)(Model().cuda())\n"
        "for _ in range(3):\n    body(torch.zeros(2, 8, dtype=torch.long, device='cuda'))\n"
    )
    run = memsize.run(script, gpu="t4", gpus=2)
    assert isinstance(run, ProgramRun) and run.steps == 3 and run.kept_gradients is None


def test_collectives_are_counted_with_their_bytes(sharded: Trace) -> None:
    step = Counter(
        (each.kind, each.bytes, each.ranks) for each in sharded.collectives if sharded.phases[each.phase][-1] == "3"
    )
    root, block = 2 * 96 * WIDTH, 2 * BLOCK
    assert step == {
        ("all-gather", 2 * root, 8): 1,  # in the forward; the backward finds it gathered
        ("all-gather", 2 * block, 8): 2 * LAYERS,
        ("reduce-scatter", 4 * root, 8): 1,
        ("reduce-scatter", 4 * block, 8): LAYERS,
    }


def test_a_rank_shows_itself_with_what_it_sends() -> None:
    step = traced(fsdp(), World(8, rank=3), steps=2)
    last = step.collectives[step.collectives.step == 2]
    assert dict(zip(last.kind + " " + last.bytes.astype(str), last["count"], strict=True)) == {
        f"all-gather {2 * 2 * 96 * WIDTH}": 1,
        f"all-gather {2 * 2 * BLOCK}": 2 * LAYERS,
        f"reduce-scatter {4 * 2 * 96 * WIDTH}": 1,
        f"reduce-scatter {4 * 2 * BLOCK}": LAYERS,
    }
    assert "Model on Tesla T4, rank 3 of 8" in str(step)
    root, block = 2 * 96 * WIDTH, 2 * BLOCK
    assert step.peak.collectives == (
        Traffic("reduce-scatter", 8, 1 + LAYERS, 4 * (root + LAYERS * block), 4 * block),
        Traffic("all-gather", 8, 1 + 2 * LAYERS, 2 * (root + 2 * LAYERS * block), 2 * block),
    )
    # one of 24,576 bytes and eight of 65,536: 548,864
    assert "9 × all-gather of 0.52 MiB" in str(step)


def test_collectives_work_on_streams_of_their_own(sharded: Trace) -> None:
    assert len(set(sharded.streams.values())) == 2
    assert "communication" in {sharded.storages[index].role for index in sharded.streams}
    # What is copied out of the buffers is on the stream that works with it.
    assert not any(each.stream for each in sharded.storages if each.role == "gathered parameter")


def test_what_each_stream_takes_adds_up_and_is_named_by_what_it_is_for() -> None:
    step = traced(fsdp(), World(8, rank=3), steps=2)
    computing, gathering, reducing = step.peak.streams
    assert [each.name for each in step.peak.streams] == ["default", "all-gather", "reduce-scatter"]
    assert computing.reserved + gathering.reserved + reducing.reserved == step.peak.reserved
    # In bfloat16 the buffers of two blocks, this one's and the next one's, and the shard that fills the second of them
    block = 2 * 2 * BLOCK
    assert (gathering.requested, gathering.role) == (2 * block + block // 8, "communication")
    # What reduce-scatters return are the gradients
    assert (reducing.requested, reducing.role) == (4 * PARAMETERS // 8, "gradient")
    assert "streams    default 22.00 MiB, all-gather 2.00 MiB, reduce-scatter 2.00 MiB reserved" in str(step)
    found = timeline(step.trace, step.config, card("t4"))
    assert found.streams == step.peak.streams == from_data(json.loads(render(found, "json"))).streams
    assert "all-gather" in str(found) and not traced(ddp(), World(8), steps=1).peak.streams


def test_without_resharding_every_layer_stays_gathered() -> None:
    trace = traced(fsdp(reshard_after_forward=False), World(8)).trace
    assert most(trace, "gathered parameter") == 2 * PARAMETERS


def test_what_a_program_gathers_before_the_first_forward_is_no_parameter() -> None:
    """64 x 96 weights: a quarter of them in float32, and all of them in the bfloat16 that `unshard` gathers."""
    with memsize.virtual_gpu("t4", world=World(4)) as gpu:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        distributed.init_process_group("nccl")
        model = nn.Linear(64, 96, bias=False, device="cuda")
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        _ = torch.optim.SGD(model.parameters())
        model.unshard()
        model(torch.ones(1, 64, device="cuda"))
    held = at_the_end(gpu.trace)
    assert (held["parameter"], held["gathered parameter"]) == (4 * 64 * 96 // 4, 2 * 64 * 96)


def test_uneven_shards_are_padded_to_the_largest() -> None:
    # 96 rows over 5 ranks: 20 each, the last 16; 256 over 5: 52, the last 48; 64 over 5: 13, the last 12
    padded = 4 * WIDTH * (2 * 20 + LAYERS * (52 + 4 * 13))
    first, last = (traced(fsdp(), World(5, rank)).trace for rank in (0, 4))
    assert at_the_end(first)["parameter"] == padded
    assert at_the_end(last)["parameter"] == padded


@pytest.mark.parametrize(("rows", "ranks"), [(6, 4), (6, 7), (6, 6), (5, 1), (1, 3)])
def test_parts_of_a_parameter_are_those_that_pytorch_makes(rows: int, ranks: int) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

    whole = torch.arange(3.0 * rows).reshape(rows, 3)
    parts, expected = _chunked(nullcontext, None, whole, ranks, dim=0), _chunk_with_empty(whole, ranks, dim=0)
    assert len(parts) == len(expected) == ranks
    assert all(part.equal(other) and part.shape == other.shape for part, other in zip(parts, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_over_all_ranks_gather_their_statistics(dtype: torch.dtype) -> None:
    """Means, inverse deviations and a count of 8 channels, of 4 bytes each, from 4 ranks; two sums are reduced."""
    norm = nn.SyncBatchNorm(8)

    def step(model: nn.Module) -> Callable[[torch.Tensor], None]:
        wrapped = nn.parallel.DistributedDataParallel(model)

        def body(images: torch.Tensor) -> None:
            with torch.autocast("cuda", dtype, enabled=dtype is torch.float16):
                wrapped(images.to(dtype)).float().sum().backward()

        return body

    trace = memsize.trace(norm, torch.zeros(16, 8, 32, requires_grad=True), world=World(4), step=step, gpu="t4").trace
    moved = {(each.kind, each.bytes) for each in trace.collectives}
    assert {("all-gather", 4 * (2 * 8 + 1) * 4), ("all-reduce", 2 * 8 * 4)} <= moved
    made = {(each.op, each.dtype, each.shape) for each in trace.storages}
    name = str(dtype).removeprefix("torch.")
    assert ("batch_norm_elemt", name, (16, 8, 32)) in made and ("batch_norm_backward_elemt", name, (16, 8, 32)) in made
    assert ("batch_norm_stats", "float32", (8,)) in made


def hybrid(model: nn.Module) -> Callable[[torch.Tensor], None]:
    from torch.distributed.device_mesh import init_device_mesh

    return fsdp(mesh=init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard")))(model)


def test_hybrid_sharding_shards_within_a_node_and_reduces_between_them() -> None:
    trace = traced(hybrid, World(8, rank=5, nodes=2)).trace
    assert at_the_end(trace)["parameter"] == PARAMETERS * 4 // 4
    assert {(each.kind, each.ranks) for each in trace.collectives} == {
        ("all-gather", 4), ("reduce-scatter", 4), ("all-reduce", 2),
    }  # fmt: skip
    assert {(each.group, each.ranks) for each in trace.collectives} == {(0, 4), (1, 2)}


def test_nccl_takes_memory_of_the_gpu_for_each_group() -> None:
    """Each of the two groups of hybrid sharding 0 to 2,048 MiB, beside the context."""
    step = traced(hybrid, World(8, rank=5, nodes=2))
    peak = step.peak
    assert peak.nccl == (0, 2 * 2_048 * MiB)
    low, high = cuda_context(card("t4"), ops={event.op for event in step.trace.events} - {""})
    assert peak.device == (peak.reserved + low, peak.reserved + high + 2 * 2_048 * MiB)
    (note,) = (note for note in step.trace.notes if "NCCL" in note)
    assert "up to 4.00 GiB" in note and "2 groups" in note and "NVIDIA/nccl#864" in note


def test_nccl_takes_more_of_the_gpu_where_a_group_exchanges_all_to_all() -> None:
    def step(model: nn.Module) -> Callable[[torch.Tensor], None]:
        def body(tokens: torch.Tensor) -> None:
            given = torch.zeros(8, device="cuda")
            torch.distributed.all_to_all_single(torch.empty_like(given), given)

        return body

    assert traced(step, World(8)).peak.nccl == (0, (2_048 + 3_360) * MiB)
    assert traced(step, World(1)).peak.nccl == (0, 512 * MiB)


def test_nccl_takes_a_buffer_for_a_group_of_one_process() -> None:
    """Groups of four and of two processes, and one of this process alone: 2 x 2,048 + 512 MiB at most."""

    def step(model: nn.Module) -> Callable[[torch.Tensor], None]:
        world, half, alone = (torch.distributed.new_group(ranks) for ranks in ([0, 1, 2, 3], [0, 1], [0]))

        def body(tokens: torch.Tensor) -> None:
            for group in (world, half, alone):
                torch.distributed.all_reduce(torch.zeros(8, device="cuda"), group=group)

        return body

    made = traced(step, World(4))
    assert made.peak.nccl == (0, (2 * 2_048 + 512) * MiB)
    (note,) = (note for note in made.trace.notes if "NCCL" in note)
    assert "up to 4.50 GiB of the GPU outside PyTorch for 2 groups of processes and 1 group of one process" in note
    assert "(NVIDIA/nccl#864 and #2363)" in note


def test_a_run_may_not_fit_for_what_nccl_takes() -> None:
    """14,909.44 MiB of a T4, less a context of at most 200 MiB, hold 14,500 MiB, but not beside NCCL's 512 or 2,048."""

    def step(model: nn.Module) -> Callable[[torch.Tensor], None]:
        def body(tokens: torch.Tensor) -> None:
            torch.distributed.all_reduce(torch.zeros(14_500 * MiB, dtype=torch.uint8, device="cuda"))

        return body

    def silent(model: nn.Module) -> Callable[[torch.Tensor], None]:
        return lambda tokens: torch.zeros(14_500 * MiB, dtype=torch.uint8, device="cuda").zero_()

    run = traced(step, World(2))
    short, context = run.peak.shortage, cuda_context(card("t4"), ops={event.op for event in run.trace.events} - {""})
    assert short is not None and not short.certain and short.nccl == 2_048 * MiB
    said = out_of_memory(short, "the run", "Tesla T4").text()
    taken = format_bytes(context.high + 2_048 * MiB)
    assert said.startswith(f"The run may not fit on Tesla T4: if the CUDA context and NCCL's buffers take {taken}, ")
    alone = traced(step, World(1)).peak.shortage
    assert alone is not None and not alone.certain and alone.nccl == 512 * MiB
    assert traced(silent, World(2)).peak.shortage is None


def test_offloaded_shards_are_in_pinned_memory_of_the_host() -> None:
    """Parameters and gradients of 573,440 bytes, an eighth each. What is gathered is on the GPU, and nothing stays."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    trace = traced(fsdp(offload_policy=CPUOffloadPolicy()), World(8, rank=3), steps=2).trace
    assert not {"parameter", "gradient", "optimizer state"} & set(at_the_end(trace))
    assert most(trace, "gathered parameter") == 2 * 2 * 96 * WIDTH + 2 * 2 * BLOCK
    shards = PARAMETERS * 4 // 8
    (note,) = (note for note in trace.notes if "pinned" in note)
    assert f"at most {format_bytes(2 * shards)} are in pinned memory" in note


def test_pinned_memory_is_kept_in_powers_of_two() -> None:
    pinned = HostMemory()
    first, second = (pinned.pin(torch.empty(3072, dtype=torch.uint8)) for _ in range(2))
    assert (pinned.peak, pinned.pinned_bytes) == (2 * 3072, 2 * 4096)
    assert pinned.holds(first) and pinned.holds(second[3:]) and pinned.pin(first) is first
    del first
    third = pinned.pin(torch.empty(4096, dtype=torch.uint8))  # takes the place of the first
    assert (pinned.peak, pinned.pinned_bytes) == (3072 + 4096, 2 * 4096)
    assert pinned.holds(third) and not pinned.holds(torch.empty(3))


# -- DDP and ZeRO-1 ---------------------------------------------------------------------------------------------------


def test_ddp_has_buckets_beside_the_gradients_or_gradients_in_them() -> None:
    beside, within = (traced(ddp(gradient_as_bucket_view=views), World(4)).trace for views in (False, True))
    assert at_the_end(beside)["parameter"] == at_the_end(within)["parameter"] == PARAMETERS * 4
    assert most(beside, "gradient") == PARAMETERS * 4
    ends = [(at_the_end(each)["gradient"], at_the_end(each)["communication"]) for each in (beside, within)]
    assert ends == [(0, PARAMETERS * 4), (PARAMETERS * 4, 0)]
    reduced = [each for each in beside.collectives if each.kind == "all-reduce"]
    assert sum(each.bytes for each in reduced) == 3 * PARAMETERS * 4


def test_buckets_are_those_of_communication_where_a_hook_sends_something_else() -> None:
    """bfloat16 copies are sent of what the buckets hold in float32."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    def step(model: nn.Module) -> Any:
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped.register_comm_hook(None, bf16_compress_hook)
        return loop(wrapped, torch.optim.SGD(model.parameters()))

    trace = traced(step, World(4)).trace
    assert at_the_end(trace)["communication"] == PARAMETERS * 4
    reduced = [each for each in trace.collectives if each.kind == "all-reduce"]
    assert sum(each.bytes for each in reduced) == 3 * PARAMETERS * 2


def test_zero_gives_whole_parameters_to_the_rank_that_has_least() -> None:
    states = [at_the_end(traced(ddp(zero=True), World(4, rank), steps=2).trace)["optimizer state"] for rank in range(4)]
    # Eight weights of 16,384 elements, two for each rank; then the two of 6,144 for the first two ranks
    assert states == [8 * (2 * BLOCK + 96 * WIDTH)] * 2 + [8 * 2 * BLOCK] * 2


# -- tensor parallelism -----------------------------------------------------------------------------------------------


def test_tensor_parallel_weights_are_split_and_their_sums_reduced() -> None:
    trace = traced(tensor_parallel, World(4, rank=1)).trace
    assert at_the_end(trace)["parameter"] == 4 * (2 * 96 * WIDTH + 2 * LAYERS * BLOCK // 4)
    kinds = Counter(each.kind for each in trace.collectives if trace.phases[each.phase] == "forward 2")
    assert kinds == {"all-reduce": LAYERS}
    # 2 x 8 positions of 64 numbers
    assert {each.bytes for each in trace.collectives if each.kind == "all-reduce"} == {2 * 8 * WIDTH * 4}


def test_no_rank_has_all_of_the_logits_where_the_loss_is_divided() -> None:
    trace = traced(loss_parallel, World(4, rank=1)).trace
    # 2 x 8 positions of 96 / 4 tokens, whose largest, sums and picked ones are reduced
    assert {each.bytes for each in trace.collectives if each.bytes < 2 * 8 * WIDTH * 4} == {2 * 8 * 4}
    assert not any(each.shape[-1:] == (96,) for each in trace.storages if each.role == "activation")


# -- pipelines ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stages() -> list[Trace]:
    return [traced(pipeline("Schedule1F1B"), World(2, rank), steps=2).trace for rank in range(2)]


def test_a_stage_has_its_own_layers_alone(stages: list[Trace]) -> None:
    for trace in stages:  # the first has the embedding, the last the head, which is as large
        assert at_the_end(trace)["parameter"] == PARAMETERS * 4 // 2
        assert at_the_end(trace)["optimizer state"] == PARAMETERS * 4


def test_stages_send_what_is_between_them(stages: list[Trace]) -> None:
    """Of four microbatches of one sample, the activations one way and their gradients the other."""
    for trace in stages:
        in_step = [each for each in trace.collectives if trace.phases[each.phase].endswith("2")]
        sent = Counter((each.kind, each.bytes) for each in in_step)
        assert sent == {("send", 8 * WIDTH * 4): 4, ("receive", 8 * WIDTH * 4): 4}


def test_the_first_of_two_stages_keeps_two_microbatches_and_the_last_one(stages: list[Trace]) -> None:
    """What ReLU returns in each of two blocks; under GPipe all four microbatches are kept on both stages."""
    hidden = (1, 8, 4 * WIDTH)
    assert [most_of_shape(trace, hidden) for trace in stages] == [2 * 2, 2 * 1]
    all_first = traced(pipeline("ScheduleGPipe"), World(2, 1), steps=2).trace
    assert most_of_shape(all_first, hidden) == 2 * 4


def most_of_shape(trace: Trace, shape: tuple[int, ...]) -> int:
    """The most results of ReLU of `shape`, kept for backward, that are alive at one time."""
    live = found = 0
    for event in trace.events:
        storage = trace.storages[event.storage]
        if storage.shape == shape and storage.role == "activation":
            live += 1 if event.delta > 0 else -1
            found = max(found, live)
    return found


def test_stages_that_would_ask_others_for_shapes_are_refused_where_none_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memsize.processes.rank_processes.can_fork", lambda: False)
    with pytest.raises(InputError, match=r"stage 1 of the pipeline would ask its neighbours .* input_args") as error:
        traced(pipeline("Schedule1F1B", known=False), World(2, 1))
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not can_fork(), reason="this platform does not fork")
def test_stages_that_ask_for_shapes_hold_what_those_do_that_were_told(stages: list[Trace]) -> None:
    """The other stage runs in a process of its own, as far as the shapes that it sends."""
    called: list[int] = []

    def asking(model: nn.Module) -> Any:
        called.append(distributed.get_rank())
        return pipeline("Schedule1F1B", known=False)(model)

    for told in stages:
        asked = traced(asking, told.world, steps=2).trace
        assert in_second_step(asked) == in_second_step(told)
        assert not asked.assumptions
    assert called == [0, 1]


@pytest.mark.skipif(not can_fork(), reason="this platform does not fork")
def test_a_stage_that_fails_before_it_is_asked_is_named() -> None:
    def step(model: nn.Module) -> Any:
        if distributed.get_rank() == 0:
            raise ValueError("on purpose")
        return pipeline("Schedule1F1B", known=False)(model)

    with pytest.raises(InputError, match="rank 0 ended before it sent what rank 1 waits for") as error:
        traced(step, World(2, 1), steps=1)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not can_fork(), reason="this platform does not fork")
def test_objects_that_another_rank_broadcasts_arrive() -> None:
    def step(model: nn.Module) -> Any:
        objects = [distributed.get_rank() + 5]
        distributed.broadcast_object_list(objects, src=0)
        there = torch.zeros(objects[0], device="cuda")
        return lambda ids: there.clone()

    trace = traced(step, World(3, rank=2), steps=1).trace
    assert [each.shape for each in trace.storages if each.op == "zeros"] == [(5,)]
    assert not trace.assumptions


def in_second_step(trace: Trace) -> list[tuple[str, str, int]]:
    events = [(trace.phases[event.phase], event.op, event.delta) for event in trace.events]
    return [event for event in events if event[0].endswith("2")]


# -- context parallelism ----------------------------------------------------------------------------------------------


def in_context(model: Any) -> Callable[[torch.Tensor], None]:
    """One attention over a sequence that is spread over the ranks, in halves from both of its ends."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (distributed.get_world_size(),), mesh_dim_names=("cp",))

    def body(ids: torch.Tensor) -> None:
        ids = ids.clone()
        with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]):
            heads = model.embedding(ids).half().unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
            nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()

    return body


def test_a_sequence_is_spread_and_its_keys_go_around() -> None:
    trace = memsize.trace(Model(), IDS, world=World(4, rank=1), step=in_context, steps=1, gpu="a100").trace
    whole = 2 * 8 * WIDTH * 2
    """Bytes of the keys of the whole sequence, in half precision."""
    assert {each.bytes for each in trace.storages if each.op == "embedding"} == {2 * whole // 4}
    forward = [each for each in trace.collectives if "backward" not in trace.phases[each.phase]]
    # keys and values of all four ranks
    assert [(each.kind, each.bytes, each.ranks) for each in forward] == [("all-gather", 2 * whole, 4)]
    backward = Counter(each.kind for each in trace.collectives[len(forward) :])
    # again, and their gradients go around: from each rank to the next, as often as there are others and once home
    assert backward == {"all-gather": 1, "all-to-all": 4}


# -- the process afterwards -------------------------------------------------------------------------------------------


def test_nothing_stays_behind() -> None:
    before, hook, put = dict(os.environ), sys.excepthook, torch.cuda.current_device
    traced(fsdp(), World(2), steps=1)

    def failing(model: nn.Module) -> Any:
        assert os.environ["WORLD_SIZE"] == "2" and distributed.get_world_size() == 2
        raise ValueError("on purpose")

    with pytest.raises(ForwardError, match="on purpose"):
        traced(failing, World(2), steps=1)
    assert not distributed.is_initialized()
    assert dict(os.environ) == before and sys.excepthook is hook and torch.cuda.current_device is put


def test_the_model_itself_is_left_alone() -> None:
    model = Model()
    traced(fsdp(), World(2), model, steps=1)
    assert type(model.blocks[0]) is Block and not model.head.weight.is_meta


# -- the other ranks --------------------------------------------------------------------------------------------------


def test_ranks_leave_a_join_together() -> None:
    """It would ask for ever how many are still training."""

    def step(model: nn.Module) -> Any:
        wrapped = nn.parallel.DistributedDataParallel(model)
        body = loop(wrapped, torch.optim.AdamW(model.parameters()))

        def joined(ids: torch.Tensor) -> None:
            with wrapped.join():
                body(ids)

        return joined

    trace = traced(step, World(2), steps=2)
    assert "all ranks have the same number of batches: they leave Join together" in trace.assumptions


def test_what_any_rank_may_send_is_of_the_next_one() -> None:
    found: list[int] = []

    def step(model: nn.Module) -> Any:
        there = torch.empty(3, device="cuda")
        found.append(distributed.recv(there))
        distributed.irecv(there).wait()
        operations = [distributed.P2POp(distributed.irecv, there, 2), distributed.P2POp(distributed.isend, there, 0)]
        for each in distributed.batch_isend_irecv(operations):
            each.wait()
        found.append(distributed.recv(there, src=2))
        return lambda ids: None

    assert "assumed to come from the next one" in str(traced(step, World(3, rank=1)).assumptions)
    assert found == [2, 2]


def test_a_store_has_what_this_process_puts_there() -> None:
    def step(model: nn.Module) -> Any:
        default = distributed.distributed_c10d._get_default_store()
        for store in (default, distributed.TCPStore("localhost", 29500, 4, True), distributed.FileStore("here", 4)):
            store.set("address", "here")
            assert store.get("address") == b"here" and store.num_keys() == 1
        store.wait(["address"])
        store.get("another's")
        return lambda ids: None

    with pytest.raises(InputError, match='the program waits for "another\'s", which another process would put into'):
        traced(step, World(4))
    assert distributed.TCPStore is not distributed.FileStore


def test_a_loop_that_waits_for_others_to_change_the_store_of_the_group_ends() -> None:
    def step(model: nn.Module) -> Callable[[torch.Tensor], None]:
        store = distributed.distributed_c10d._get_default_store()
        while store.add("here", 0) < 4:
            pass
        return lambda ids: None

    with pytest.raises(InputError, match="waits for another process to change 'here' in the store"):
        traced(step, World(4))


@pytest.mark.parametrize(
    "read",
    [
        lambda store: store.add("here", 0) < 4,
        lambda store: int(store.get("ready")) < 4,
        lambda store: not store.check(["gone"]),
    ],
)
def test_a_loop_that_waits_for_others_to_change_a_store_ends(read: Callable[[Any], bool]) -> None:
    store = LonelyStore("localhost", 29500, 4, True)
    store.set("ready", "1")
    store.add("here", 1)
    for step in range(3000):  # what changes meanwhile, or is read with something else, is no such loop
        assert read(store)
        store.set("step", str(step))
        assert store.get("step") == str(step).encode()
    with pytest.raises(InputError, match=r"waits for another process to change '(here|ready|gone)' in the store"):
        deque(iter(lambda: read(store), False), maxlen=0)


def test_groups_that_wait_for_all_of_their_ranks_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    with memsize.virtual_gpu("t4", world=World(4)):
        distributed.init_process_group("nccl")
        group = distributed.new_group([0, 2])
        assert (distributed.get_world_size(), distributed.get_world_size(group)) == (4, 2)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 8, "rank": 8}, "no rank 8 among 8: they are counted from 0 to 7"),
        ({"size": 8, "rank": -1}, "no rank -1 among 8"),
        ({"size": 0}, "a world of 0 processes"),
        ({"size": 8, "nodes": 3}, "8 processes cannot be spread evenly over 3 nodes"),
        ({"size": 2.0}, "the size of a world is a whole number, not 2.0"),
    ],
)
def test_a_world_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        World(**arguments)
    assert "\n" not in str(error.value)


def test_ranks_are_counted_machine_by_machine() -> None:
    world = World(32, rank=13, nodes=4)
    assert (world.local_size, world.local_rank, world.node, str(world)) == (8, 5, 1, "rank 13 of 32")


def test_a_group_that_is_there_is_refused_and_stays() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(InputError, match="in a process group already"):
            traced(fsdp(), World(2))
        assert distributed.is_initialized() and distributed.get_backend() == "gloo"
    finally:
        distributed.destroy_process_group()


def test_a_world_wants_a_step_of_ones_own() -> None:
    with pytest.raises(MemsizeError, match="runs with step="):
        memsize.trace(Model(), IDS, world=World(2))


@pytest.mark.parametrize(
    "start",
    [
        lambda model: distributed.init_process_group("nccl"),
        lambda model: distributed.device_mesh.init_device_mesh("cuda", (8,)),
        lambda model: nn.parallel.DistributedDataParallel(model),
        lambda model: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])),
    ],
)
def test_a_step_of_one_process_of_many_is_told_to_name_its_world(start: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(ForwardError, match=r"\n  it runs as one process of many: .*world=memsize.World\(8, rank=0\)"):
        memsize.trace(Model(), IDS, step=start, gpu="t4")


def test_a_mesh_larger_than_the_world_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    def step(model: nn.Module) -> Any:
        return init_device_mesh("cuda", (3, 4))

    with pytest.raises(InputError, match="a mesh of 3 x 4 has 12 processes, and the program is run with 8"):
        traced(step, World(8))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "torch.distributed.device_mesh.init_device_mesh('cuda', (2, 4))",
            "a mesh of 2 x 4 has 8 processes, and the program is run with 4 (memsize run --gpus 8 …)",
        ),
        ("torch.zeros(2, device='cuda:1')", "cuda:1 is the GPU of another process, this one has cuda:2"),
        ("torch.nn.Linear(2, 2).to('cuda:1')", "cuda:1 is the GPU of another process, this one has cuda:2"),
    ],
)
def test_what_a_script_cannot_have_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import torch\ntorch.distributed.init_process_group()\n{line}\n")
    assert run(["run", "--gpus", "4", "--rank", "2", "--gpu", "t4", str(script)]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"error: {message}")


def rpc() -> None:
    import torch.distributed.rpc as rpc

    rpc.init_rpc("worker", rank=0, world_size=2)


def shared_memory() -> None:
    import torch.distributed._symmetric_memory as shared

    shared.rendezvous(torch.ones(3, device="cuda"), distributed.group.WORLD)


def to_nobody() -> None:
    distributed.send(torch.ones(3, device="cuda"), 7)


def of_nobody() -> None:
    distributed.broadcast(torch.ones(3), src=2)


@pytest.mark.parametrize(
    ("reach", "message"),
    [
        (rpc, "torch.distributed.rpc calls functions of other processes, which are not there: switch it off"),
        (shared_memory, "memory that GPUs share .* is that of other processes, which are not there"),
        (to_nobody, "no rank 7 among 2, which c10d.send.default names: they are counted from 0 to 1"),
        (of_nobody, "no rank 2 among 2, which c10d.broadcast_.default names"),
    ],
)
def test_what_reaches_into_other_processes_is_refused(reach: Callable[[], None], message: str) -> None:
    def step(model: nn.Module) -> Any:
        reach()
        return lambda ids: None

    with pytest.raises(InputError, match=message) as error:
        traced(step, World(2))
    assert "\n" not in str(error.value)


ATTENTION = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
mesh = init_device_mesh("cuda", (4,))
layer = parallelize_module(nn.Sequential(nn.Linear(8, 384)), mesh, {{"0": ColwiseParallel()}})
layer(torch.randn(2, 16, 8, device="cuda")).view(2, 16, {heads})
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ("-1, 64", "finds no whole number of heads on this GPU"),  # 384 / 4 = 96 features, 1.5 heads of 64
        ("12, 32", "wants the heads of all GPUs, and finds the part of this one"),
        ("7, 9", None),
        ("-1, 32, 5", None),
    ],
)
def test_heads_that_cannot_be_divided(tmp_path: Path, heads: str, words: str | None) -> None:
    found, error = run_script(tmp_path, ATTENTION.format(heads=heads), world=World(4))
    assert isinstance(error, RuntimeError)
    told = [each.text() for each in found.findings if each.code == "run-divides-heads"]
    assert len(told) == (words is not None) and all(str(words) in each for each in told)
    with pytest.raises(ForwardError, match="is invalid for input of size") as raised:
        memsize.run(tmp_path / "train.py", gpu="t4", gpus=4)
    assert str(raised.value).splitlines()[1:] == told


def test_heads_that_a_step_cannot_divide() -> None:
    """64 features on four GPUs are 16 on each, which is half a head of 32."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    def step(model: nn.Module) -> Any:
        mesh = distributed.device_mesh.init_device_mesh("cuda", (4,))
        layer = parallelize_module(model.head, mesh, {"0": ColwiseParallel()})
        return lambda ids: layer(torch.ones(2, WIDTH, device="cuda")).view(2, -1, 32).sum().backward()

    model = Model()
    model.head = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ForwardError, match=r"(?s)is invalid for .*\nThe view as \[2, -1, 32\] finds no whole number"):
        traced(step, World(4), model)


def test_an_unknown_collective_is_named() -> None:
    with torch.library._scoped_library("_c10d_functional", "FRAGMENT") as library:
        library.define("telepathy(Tensor x) -> Tensor")

        def step(model: nn.Module) -> Any:
            return torch.ops._c10d_functional.telepathy(next(model.parameters()))

        with pytest.raises(MemsizeError, match="no known collective: _c10d_functional::telepathy"):
            traced(step, World(2))


def test_what_equal_ranks_reduce_is_known() -> None:
    """A sum depends on how many they are, and a written tensor is not what it was."""
    from torch.distributed import _functional_collectives as collectives

    read: dict[str, float] = {}

    def step(model: nn.Module) -> Any:
        for kind in ("max", "avg", "sum"):
            sent = torch.full((), 3.0, device="cuda")
            read[kind] = collectives.all_reduce(sent, kind, [0, 1]).item()
        torch.ops._c10d_functional.all_reduce_(sent, "max", torch.distributed.group.WORLD.group_name)
        read["max_"] = sent.item()
        torch.ops._c10d_functional.all_reduce_(sent, "sum", torch.distributed.group.WORLD.group_name)
        read["sum_"] = sent.item()
        return lambda ids: None

    trace = traced(step, World(2))
    assert read == {"max": 3.0, "avg": 3.0, "max_": 3.0, "sum": 6.0, "sum_": 6.0}
    assert trace.assumptions == (EXCHANGED_ARE_ALIKE,)


@pytest.mark.thorough
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("operation", "ranks", "result"),
    [
        ("SUM", 3, 15),
        ("AVG", 3, 5),
        ("PRODUCT", 3, 125),
        ("MIN", 3, 5),
        ("MAX", 3, 5),
        ("BAND", 3, 5),
        ("BOR", 3, 5),
        ("BXOR", 3, 5),
        ("BXOR", 2, 0),
    ],
)
def test_each_operation_is_reckoned_with(operation: str, ranks: int, result: int, device: str) -> None:
    """What so many ranks make of 5 each; `reduce` gives it to the rank that it names."""
    read: list[int] = []

    def step(model: nn.Module) -> Any:
        op = getattr(torch.distributed.ReduceOp, operation)
        for reduce in (
            lambda number: torch.distributed.all_reduce(number, op),
            lambda number: torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp(op)),
            lambda number: torch.distributed.reduce(number, 1, op),
            lambda number: torch.distributed.reduce(number, 0, op),
        ):
            number = torch.full((1,), 5, dtype=torch.uint8, device=device)
            reduce(number)
            read.append(number.item())
        return lambda ids: None

    told = traced(step, World(ranks, 1)).assumptions
    assert read == [result, result, result, 5] and told == (EXCHANGED_ARE_ALIKE,)


def test_what_is_read_of_collectives_is_assumed_and_said() -> None:
    """Control flow may depend on it: what depends on the data is 1, other numbers are those of this rank, added up."""
    read: list[float] = []

    def step(model: nn.Module) -> Any:
        for number in (next(model.parameters()).detach().to("cuda").sum(), torch.tensor(3.0)):
            torch.distributed.all_reduce(number)
            read.append(number.item())
        parts = [torch.zeros(1) for _ in range(2)]
        torch.distributed.all_gather(parts, torch.ones(1))
        read.extend(map(float, parts))
        return lambda ids: None

    told = traced(step, World(2)).assumptions
    assert read == [1.0, 6.0, 1.0, 1.0]
    assert set(told) == {REDUCED_IS_ONE, EXCHANGED_ARE_ALIKE}


STOPS = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

dist.init_process_group("nccl")
model = torch.nn.Linear(64, 64, device="cuda", dtype=torch.float16)
optimizer, scaler = torch.optim.SGD(model.parameters()), ShardedGradScaler()
ranks = torch.ones(1, device="cuda")
dist.all_reduce(ranks)
assert ranks.item() == 4
for number in range(3):
    scaler.scale(model(torch.ones(8, 64, dtype=torch.float16, device="cuda")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    stop = torch.zeros(1, device="cuda")
    dist.all_reduce(stop)
    if stop.item() > 0:
        break
"""


def test_no_rank_asks_to_stop_where_this_one_does_not(tmp_path: Path) -> None:
    """Nor found any an infinite gradient, for which a scaler leaves out its step."""
    (tmp_path / "train.py").write_text(STOPS, encoding="utf-8")
    assert memsize.run(tmp_path / "train.py", gpus=4, gpu="t4").steps == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("number /= 2", REDUCED_IS_ONE),
        ("number = 1 - number.float() / torch.full((1,), 2.0, device='cuda')", REDUCED_IS_ONE),
        ("number = torch.zeros(1, device='cuda').add_(number)", REDUCED_IS_ONE),
        ("number = torch.empty(1, device='cuda').copy_(number).sqrt()", REDUCED_IS_ONE),
        ("number *= data", ITEM_IS_ONE),
        ("number.copy_(data)", ITEM_IS_ONE),
    ],
)
def test_what_is_computed_of_a_reduced_number_is_named_after_it(line: str, words: str) -> None:
    def step(model: nn.Module) -> Any:
        data = next(model.parameters()).detach().flatten()[:1].to("cuda")
        found = {"number": data.clone(), "data": data, "torch": torch}
        torch.distributed.all_reduce(found["number"])
        exec(line, found)
        found["number"].item()
        return lambda ids: None

    assert traced(step, World(2)).assumptions == (words,)


def test_what_is_written_after_a_collective_is_no_result_of_it() -> None:
    def step(model: nn.Module) -> Any:
        number = torch.full((1,), 3.0, device="cuda")
        torch.distributed.all_reduce(number)
        number.copy_(next(model.parameters()).flatten()[:1].to("cuda"))
        number.item()
        return lambda ids: None

    assert traced(step, World(2)).assumptions == (ITEM_IS_ONE,)


def test_the_gpus_of_other_ranks_are_out_of_reach() -> None:
    def step(model: nn.Module) -> Any:
        assert torch.cuda.device_count() == 4 and torch.zeros(2, device="cuda").device == torch.device("cuda:3")
        return torch.zeros(2, device="cuda:1")

    with pytest.raises(InputError, match="cuda:1 is the GPU of another process, this one has cuda:3"):
        traced(step, World(4, rank=3))


def test_the_text_names_the_rank_and_lines_up_its_roles() -> None:
    first, *lines = str(traced(fsdp(), World(8, 3))).splitlines()
    assert ", rank 3 of 8: in " in first
    roles = [line.strip() for line in lines if line.startswith("    ")]
    assert len({len(re.match(r"[a-z ]+", role)[0]) for role in roles}) == 1


def test_a_report_trains_on_several_gpus() -> None:
    options: dict[str, Any] = {"input_data": IDS, "train": "adamw", "scenarios": "fp32,apex-O2", "gpu": "h100"}
    report = memsize.report(Model(), parallel="fsdp=8", **options)
    spread, refused = (result for result in report.scenario_results if result.name in ("fp32", "apex-O2"))
    alone = memsize.trace(Model(), input_data=IDS, optimizer="adamw", parallel="fsdp=8", scenario="fp32", gpu="h100")
    assert spread.training is not None and spread.training.requested == alone.peak.requested
    assert spread.training.roles["parameter"] == PARAMETERS * 4 // 8
    assert spread.totals is not None and spread.totals.parameter_bytes == PARAMETERS * 4  # layers are shown whole
    assert refused.training is None and "amp-fp16" in str(refused.untrained)
    assert any("fsdp: fully_shard on 4 x Block" in note for note in report.notes)
    assert all(finding.moment is None for finding in report.findings if finding.code == "training-peak")
    with pytest.raises(InputError, match="name an optimizer"):
        memsize.report(Model(), input_data=IDS, parallel="fsdp=8")


def exchanges(device: str) -> dict[str, list[float]]:
    """What rank 1 of 2 reads of exchanges in which each rank gives [1, 2, 3, 4]."""
    distributed: Any = torch.distributed
    given = torch.tensor([1, 2, 3, 4], device=device)
    written = {name: torch.full((4,), 9, device=device) for name in ("rows", "given rows", "uneven", "summed")}
    distributed.all_to_all_single(written["rows"], given)
    distributed.all_to_all_single(written["given rows"], given, [2, 2], [2, 2])
    distributed.all_to_all_single(written["uneven"], given, [3, 1], [1, 3])
    distributed.all_reduce(written["summed"])
    lists = {name: [torch.full((2,), 9, device=device) for _ in range(2)] for name in ("tensors", "gathered", "twice")}
    distributed.all_to_all(lists["tensors"], [given[:2], given[2:]])
    distributed.all_gather(lists["gathered"], given[:2])
    distributed.all_gather_into_tensor(written.setdefault("whole", torch.full((8,), 9, device=device)), given)
    distributed.reduce_scatter_tensor(written.setdefault("part", torch.full((2,), 9, device=device)), given)
    distributed.reduce_scatter(lists["twice"][0], [given[:2], given[2:]])
    distributed.reduce_scatter(lists["twice"][1], [given[:2], given[2:]])
    return {name: each.tolist() for name, each in written.items()} | {
        name: [part.tolist() for part in parts] for name, parts in lists.items()
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_equal_ranks_exchange_is_known(device: str) -> None:
    """Each sends rank 1 its second half, [3, 4]. Uneven parts are not known: they are 1 on the GPU."""
    read: dict[str, Any] = {}

    def step(model: nn.Module) -> Any:
        read.update(exchanges(device))
        return lambda ids: None

    told = traced(step, World(2, rank=1)).assumptions
    there = device == "cuda"
    assert read == {
        "rows": [3, 4, 3, 4],
        "given rows": [3, 4, 3, 4],
        "uneven": [1] * 4 if there else [9] * 4,
        "summed": [18] * 4,
        "tensors": [[3, 4], [3, 4]],
        "gathered": [[1, 2], [1, 2]],
        "whole": [1, 2, 3, 4, 1, 2, 3, 4],
        "part": [6, 8],
        "twice": [[6, 8], [6, 8]],
    }
    assert "other ranks are assumed to send what this rank sends" in told


def test_experts_get_as_many_tokens_as_they_send() -> None:
    """16 tokens for 4 experts on 2 ranks: each sends 8 of them to the other, and gets 8."""
    from torch.distributed import _functional_collectives as collectives

    sizes: list[list[int]] = []

    def step(model: nn.Module) -> Any:
        choices = next(model.parameters()).detach()[:16, :4].to("cuda").argmax(-1)
        counts = torch.bincount(choices, minlength=4)
        there = collectives.all_to_all_single(counts, None, None, [0, 1])
        sizes.append(there.view(2, -1).sum(1).tolist())
        sent = counts.view(2, -1).sum(1)
        given = torch.empty_like(sent)
        torch.distributed.all_to_all_single(given, sent)
        sizes.append(given.tolist())
        return lambda ids: None

    traced(step, World(2))
    assert sizes == [[8, 8], [8, 8]]


def test_a_whole_number_that_ranks_reduce_is_one() -> None:
    read: list[Any] = []

    def step(model: nn.Module) -> Any:
        tokens = next(model.parameters()).detach().to("cuda").long().sum()
        torch.distributed.all_reduce(tokens)
        read.extend((tokens.item(), tokens.cpu().item(), tokens.tolist()))
        return lambda ids: None

    assert traced(step, World(2)).assumptions == (REDUCED_IS_ONE,)
    assert read == [1, 1, 1] and all(type(each) is int for each in read)


def test_a_number_that_ranks_reduce_is_compared_as_it_is_read() -> None:
    """As one: libraries add up the lengths of all ranks' data, and ask whether there is any."""
    answers: list[bool] = []

    def step(model: nn.Module) -> Any:
        data = next(model.parameters()).detach().to("cuda").sum()
        for length in (data.long(), data):
            torch.distributed.all_reduce(length)
            answers.extend(map(bool, (length == 0, length != 0, length > 0, length >= 2, length < 1, length == 1)))
        return lambda ids: None

    assert traced(step, World(2)).assumptions == (REDUCED_IS_ONE,)
    assert answers == [False, True, True, False, False, True] * 2
