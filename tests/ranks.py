"""A small model, and loops that shard it in PyTorch's own ways: for one rank alone, and for real processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as distributed
from torch import nn

LAYERS, WIDTH = 4, 64
BLOCK = WIDTH * 4 * WIDTH
"""Elements of each of a block's two weights."""
Step = Callable[[nn.Module], Callable[[torch.Tensor], None]]


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """An embedding of 96 tokens, four blocks and a head."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 96, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PARAMETERS = 2 * 96 * WIDTH + 2 * LAYERS * BLOCK


def loop(model: nn.Module, optimizer: Any) -> Callable[[torch.Tensor], None]:
    def body(ids: torch.Tensor) -> None:
        model(ids).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return body


def fsdp(**options: Any) -> Step:
    def step(model: Any) -> Callable[[torch.Tensor], None]:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options.setdefault("mp_policy", MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        return loop(model, torch.optim.AdamW(model.parameters(), foreach=True))

    return step


def flat(**options: Any) -> Step:
    """The first FSDP, whose parameters are parts of flat ones."""

    def step(model: nn.Module) -> Callable[[torch.Tensor], None]:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        device = next(model.parameters()).device
        sharded = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device, **options
        )
        return loop(sharded, torch.optim.AdamW(sharded.parameters(), foreach=True))

    return step


def ddp(zero: bool = False, **options: Any) -> Step:
    def step(model: nn.Module) -> Callable[[torch.Tensor], None]:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        wrapped = nn.parallel.DistributedDataParallel(model, **options)
        sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, foreach=True) if zero else None
        return loop(wrapped, sharded or torch.optim.AdamW(model.parameters(), foreach=True))

    return step


def tensor_parallel(model: Any) -> Callable[[torch.Tensor], None]:
    mesh = mesh_of(model, tp=distributed.get_world_size())
    for block in model.blocks:
        divided(block, mesh)
    return loop(model, torch.optim.AdamW(model.parameters(), foreach=False))


def loss_parallel(model: Any) -> Callable[[torch.Tensor], None]:
    """The head and its loss divided over all processes: none has all of the logits."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

    mesh = mesh_of(model, tp=distributed.get_world_size())
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model.head, mesh, head)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def body(ids: torch.Tensor) -> None:
        with loss_parallel():
            nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return body


def mesh_of(model: nn.Module, **sizes: int) -> Any:
    """A mesh of all processes by the names of its axes, where the model is to be."""
    from torch.distributed.device_mesh import init_device_mesh

    device = next(model.parameters()).device.type
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def hsdp(model: nn.Module) -> Callable[[torch.Tensor], None]:
    """Two groups that are copies of each other, each sharded over half of the processes."""
    mesh = mesh_of(model, replicate=2, shard=distributed.get_world_size() // 2)
    return fsdp(mesh=mesh)(model)


def sharded_tensor_parallel(model: Any) -> Callable[[torch.Tensor], None]:
    """Each layer divided over two processes, and each part sharded over half of all."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(model, shard=distributed.get_world_size() // 2, tp=2)
    for block in model.blocks:
        divided(block, mesh["tp"])
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return loop(model, torch.optim.AdamW(model.parameters(), foreach=False))


def divided(block: Any, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


class Experts(nn.Module):
    """Four experts, which get equally many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.empty(4, 2 * WIDTH, WIDTH))
        self.down = nn.Parameter(torch.empty(4, WIDTH, 2 * WIDTH))

    def forward(self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = torch.argsort(ids.reshape(-1))
        rows = tokens[order].view(self.num_experts, -1, WIDTH)
        rows = torch.bmm(torch.relu(torch.bmm(rows, self.up.transpose(1, 2))), self.down.transpose(1, 2))
        return torch.empty_like(tokens).index_copy(0, order, rows.flatten(0, 1)) * weights


class Mixture(Block):
    """Each token goes to two of four experts, one after the other."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.gate = nn.Linear(width, 2, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = super().forward(x).flatten(0, 1)
        ids = torch.arange(2 * len(tokens), device=x.device).view(-1, 2) % 4
        return self.experts(tokens, ids, self.gate(tokens).softmax(-1)).view_as(x)


def mixture() -> Model:
    model = Model(layers=2)
    model.blocks = nn.ModuleList(Mixture() for _ in range(2))
    return model


def expert_parallel(model: Any) -> Callable[[torch.Tensor], None]:
    """By transformers' dispatch."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    mesh = mesh_of(model, ep=distributed.get_world_size(), tp=1)
    styles = {"experts.up": "grouped_gemm", "experts.down": "grouped_gemm", "experts": "ep_dispatch_experts"}
    plan = {f"blocks.{index}.{name}": style for index in range(2) for name, style in styles.items()}
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan)
    return loop(model, torch.optim.AdamW(model.parameters(), foreach=False))


def stages_of(model: Any, numbers: list[int], count: int) -> list[nn.Module]:
    """The parts of `model` that the stages of these numbers have, of `count`; the rest of it is dropped."""
    each = len(model.blocks) // count
    parts = [
        nn.Sequential(
            *([model.embedding] if number == 0 else []),
            *model.blocks[number * each : (number + 1) * each],
            *([model.head] if number == count - 1 else []),
        )
        for number in numbers
    ]
    model.embedding = model.head = None
    model.blocks = nn.ModuleList(parts)
    return parts


Spread = Callable[[nn.Module, Any], nn.Module]
"""How a stage is spread over the processes of a mesh, each of which has a batch of its own."""


def sharded_stage(dtype: torch.dtype | None = None) -> Spread:
    def spread(part: Any, mesh: Any) -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(dtype, torch.float32 if dtype else None)}
        for block in part:
            if isinstance(block, Block):
                fully_shard(block, reshard_after_forward=False, **options)
        return fully_shard(part, **options)

    return spread


def copied_stage(part: nn.Module, mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(part, process_group=mesh.get_group())


def pipeline(
    schedule: str,
    known: bool = True,
    turns: int = 1,
    data: int = 1,
    spread: Spread = lambda part, _: part,
    dtype: torch.dtype = torch.float32,
    there_and_back: bool = False,
) -> Step:
    """Microbatches of one sample through the stages, of which each process has `turns`; each is `spread` over `data`
    processes, and sends and receives `dtype`. With `there_and_back`, the first process has the last stage too.
    """

    def step(model: Any) -> Callable[[torch.Tensor], None]:
        from torch.distributed import pipelining

        device = next(model.parameters()).device
        size = distributed.get_world_size() // data
        mesh = mesh_of(model, pp=size, data=data)
        rank = mesh.get_local_rank("pp")
        count = turns * size
        numbers = [rank, count - 1 - rank] if there_and_back else [rank + turn * size for turn in range(turns)]
        between = torch.empty(1, 8, WIDTH, device=device, dtype=dtype, requires_grad=True)
        ids = torch.empty(1, 8, dtype=torch.long, device=device)
        result = torch.empty(1, 8, 96, device=device, dtype=dtype, requires_grad=True)
        stages = [
            pipelining.PipelineStage(
                spread(part, mesh["data"]),
                number,
                count,
                device,
                input_args=(between if number else ids) if known else None,
                output_args=(between if number < count - 1 else result) if known else None,
                group=mesh["pp"].get_group(),
            )
            for number, part in zip(numbers, stages_of(model, numbers, count), strict=True)
        ]
        made = getattr(pipelining, schedule)
        loss = partial(torch.sum, dtype=torch.float32)
        scheduled = made(stages[0] if turns == 1 else stages, 4, loss_fn=lambda output, _: loss(output))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

        def body(ids: torch.Tensor) -> None:
            batch = ids.repeat(2, 1)
            losses: dict[str, Any] = {"target": batch, "losses": []} if count - 1 in numbers else {}
            scheduled.step(*([batch] if rank == 0 else []), **losses)
            optimizer.step()
            optimizer.zero_grad()

        return body

    return step


DEEP = partial(Model, layers=8)
"""For two stages on each of four processes."""
LOOPS: dict[str, tuple[Step, Callable[[], Model]]] = {
    "fsdp": (fsdp(), Model),
    "fsdp, uneven": (fsdp(), partial(Model, WIDTH + 1)),
    "fsdp, not resharded": (fsdp(reshard_after_forward=False), Model),
    "fsdp1": (flat(), Model),
    "hsdp": (hsdp, Model),
    "ddp": (ddp(), Model),
    "ddp, views": (ddp(gradient_as_bucket_view=True), Model),
    "zero": (ddp(zero=True), Model),
    "tp": (tensor_parallel, Model),
    "ep": (expert_parallel, mixture),
    "fsdp, tp": (sharded_tensor_parallel, Model),
    "loss parallel": (loss_parallel, Model),
    "1f1b": (pipeline("Schedule1F1B"), Model),
    "gpipe": (pipeline("ScheduleGPipe"), Model),
    "fsdp, 1f1b": (pipeline("Schedule1F1B", data=2, spread=sharded_stage()), Model),
    "ddp, 1f1b": (pipeline("Schedule1F1B", data=2, spread=copied_stage), Model),
    "interleaved": (pipeline("ScheduleInterleaved1F1B", turns=2), DEEP),
    "zero bubble": (pipeline("ScheduleInterleavedZeroBubble", turns=2), DEEP),
    "zero bubble, there and back": (pipeline("ScheduleZBVZeroBubble", turns=2, there_and_back=True), DEEP),
    "1f1b, asked": (pipeline("Schedule1F1B", known=False), Model),
    "interleaved, asked": (pipeline("ScheduleInterleaved1F1B", known=False, turns=2), DEEP),
    "zero bubble, asked": (
        pipeline("ScheduleZBVZeroBubble", known=False, turns=2, there_and_back=True),
        DEEP,
    ),
}
"""Loops that run with any even number of processes, and the model that each shards. Stages that are
"asked" infer their shapes."""
