"""A model on the stages of a pipeline without code: where it is cut, what each rank holds, and what cannot be cut."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import memsize
from memsize import ModelRequest, Trace, Training, World
from memsize.errors import InputError
from memsize.tracing.run import Setup
from tests.gloo import events
from tests.gpus import card
from tests.models import scenario_named
from tests.ranks import BLOCK, PARAMETERS, WIDTH, Block, Model, Spread, copied_stage, pipeline, sharded_stage
from tests.test_ranks import at_the_end, most, most_of_shape
from tests.workloads import Runner, Workload, blocks_in_line, opened, parse_parallel, spread_setup, stage_traces

distributed = pytest.importorskip("torch.distributed")
if not distributed.is_available():
    pytest.skip("torch.distributed is not in this PyTorch", allow_module_level=True)

IDS = torch.zeros(1, 8, dtype=torch.long)


class _Each(Workload):
    """Keeps the trace of each rank."""

    def __init__(self, training: Training, parallel: str) -> None:
        self.training = training
        self.parallel = parse_parallel(parallel)
        self.traces: list[Trace] = []

    def run(self, setup: Setup) -> Trace:
        setup = spread_setup(setup, self.parallel)
        self.traces = [*stage_traces(setup, self.training, self.parallel, card("t4"))]
        return self.traces[0]


def ranks(
    parallel: str,
    model: nn.Module | None = None,
    scenario: str = "as-given",
    given: torch.Tensor = IDS,
    **training: Any,
) -> list[Trace]:
    """What one rank of each stage holds."""
    each = _Each(Training(**training), parallel)
    with opened(ModelRequest.of(model or Model(), input_data=given), gpu="t4", own=False) as found:
        Runner(*found.run, gpu=card("t4")).run(each, scenario_named(scenario))
    return each.traces


@pytest.fixture(scope="module")
def four() -> list[Trace]:
    return ranks("pp=4", steps=2)


def test_each_stage_has_its_own_block_the_first_the_embedding_and_the_last_the_head(four: list[Trace]) -> None:
    ends, blocks = 96 * WIDTH, 2 * BLOCK
    held = [at_the_end(trace)["parameter"] // 4 for trace in four]
    assert held == [ends + blocks, blocks, blocks, blocks + ends] and sum(held) == PARAMETERS
    assert [at_the_end(trace)["optimizer state"] for trace in four] == [2 * 4 * each for each in held]
    assert [sum(tensor.elements for tensor in trace.tensors) for trace in four] == held
    assert [trace.world for trace in four] == [World(4, rank) for rank in range(4)]


def test_a_stage_keeps_as_many_microbatches_as_there_are_stages_from_it_on(four: list[Trace]) -> None:
    hidden = (1, 8, 4 * WIDTH)
    assert [most_of_shape(trace, hidden) for trace in four] == [4, 3, 2, 1]
    # eight microbatches, of which no stage has more: two blocks on each of two stages
    assert [most_of_shape(trace, hidden) for trace in ranks("pp=2", steps=1, gradient_accumulation_steps=8)] == [
        2 * 2,
        2 * 1,
    ]


def test_inputs_are_on_the_first_stage_and_targets_on_the_last(four: list[Trace]) -> None:
    inputs = [sum(each.bytes for each in trace.storages if each.role == "input") for trace in four]
    assert inputs == [4 * 8 * 8, 0, 0, 4 * 8 * 8]  # four microbatches of eight int64
    assert all(trace.inputs == four[0].inputs for trace in four)


def test_it_is_what_stages_of_ones_own_do() -> None:
    """Event by event, beside a model that was cut by hand: tests/ranks.py."""
    for rank, trace in enumerate(
        ranks("pp=2", loss="sum", optimizer="adamw:foreach=True", gradient_accumulation_steps=4, steps=2)
    ):
        ids = torch.zeros(2, 8, dtype=torch.long)
        own = memsize.trace(Model(), ids, world=World(2, rank), step=pipeline("Schedule1F1B"), steps=2, gpu="t4").trace
        assert by_size(trace) == by_size(own)
        assert at_the_end(trace)["parameter"] == at_the_end(own)["parameter"]


@pytest.mark.parametrize(
    ("parallel", "scenario"),
    [("pp=2", "fp32"), ("pp=2", "amp-bf16"), ("pp=2", "bf16"), ("fsdp=2,pp=2", "amp-bf16"), ("ddp=2,pp=2", "amp-fp16")],
)
def test_each_stage_returns_what_it_says(parallel: str, scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one what the model returns, in its precision: PyTorch 2.11 compares that too."""
    from torch.distributed import pipelining

    returned: list[int] = []

    class Compared(pipelining.PipelineStage):
        def __init__(self, *args: Any, output_args: tuple[torch.Tensor, ...], **options: Any) -> None:
            super().__init__(*args, output_args=output_args, **options)
            self.said = [(each.shape, each.dtype) for each in output_args]

        def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
            result = super().forward_one_chunk(*args, **options)
            assert [(each.shape, each.dtype) for each in result] == self.said
            returned.append(self.stage_index)
            return result

    monkeypatch.setattr(pipelining, "PipelineStage", Compared)
    ranks(parallel, scenario=scenario, steps=1)
    assert set(returned) == {0, 1}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("parallel", "scenario", "spread"),
    [
        ("fsdp=2,pp=2", "fp32", sharded_stage()),
        ("fsdp=2,pp=2", "amp-bf16", sharded_stage(torch.bfloat16)),
        ("ddp=2,pp=2", "fp32", copied_stage),
    ],
)
def test_stages_are_spread_as_ones_own_are(parallel: str, scenario: str, spread: Spread) -> None:
    dtype = torch.bfloat16 if scenario == "amp-bf16" else torch.float32
    own_step = pipeline("Schedule1F1B", data=2, spread=spread, dtype=dtype)
    options = {"loss": "sum", "optimizer": "adamw:foreach=True", "gradient_accumulation_steps": 4, "steps": 2}
    for stage, trace in enumerate(ranks(parallel, scenario=scenario, **options)):
        ids = torch.zeros(2, 8, dtype=torch.long)
        own = memsize.trace(Model(), ids, world=World(4, 2 * stage), step=own_step, steps=2, gpu="t4").trace
        assert trace.world == own.world == World(4, 2 * stage)
        assert by_size(trace) == by_size(own)
        assert sent(trace) == sent(own)
        assert at_the_end(trace)["parameter"] == at_the_end(own)["parameter"]


def sent(trace: Trace) -> list[tuple[str, int, int]]:
    """Each collective but those of one number, which the loss of the last stage makes of its own."""
    return [(each.kind, each.bytes, each.ranks) for each in trace.collectives if each.bytes > 4]


def test_a_sharded_stage_is_gathered_once_for_all_its_microbatches() -> None:
    """Of four GPUs for each of two stages, each stores a quarter of its stage, and holds all of it for its forwards and
    backwards; gradients are added up in float32 and reduced once.
    """
    stage = PARAMETERS // 2
    for trace in ranks("fsdp=4,pp=2", scenario="amp-bf16", steps=1, gradient_accumulation_steps=8):
        held = at_the_end(trace)
        assert (held["parameter"], held["optimizer state"]) == (4 * stage // 4, 2 * 4 * stage // 4)
        assert most(trace, "gathered parameter") == 2 * stage
        assert most(trace, "unsharded gradient") >= 4 * stage
        ends, block = 96 * WIDTH, 2 * BLOCK  # the embedding or the head, and each of two blocks
        assert {each: count for each, count in Counter(sent(trace)).items() if each[2] == 4} == {
            ("all-gather", 2 * ends, 4): 1,
            ("all-gather", 2 * block, 4): 2,
            ("reduce-scatter", 4 * ends, 4): 1,
            ("reduce-scatter", 4 * block, 4): 2,
        }


def test_what_other_stages_do_is_in_the_precision_of_sharded_layers() -> None:
    """Numbers go in, and each stage runs the whole forward, the work of others without memory."""
    model = nn.Sequential(nn.Linear(4, WIDTH), nn.Sequential(Block(), Block()), nn.Linear(WIDTH, 4))
    first, last = ranks("fsdp=2,pp=2", model, "amp-fp16", torch.zeros(1, 4), steps=1)
    assert {each for each in sent(first) if each[0] == "send"} == {("send", WIDTH * 2, 2)}
    assert {each for each in sent(last) if each[0] == "send"} == {("send", WIDTH * 2, 2)}


def test_the_same_place_of_each_stage_is_shown() -> None:
    shown = memsize.trace(Model(), IDS, parallel="fsdp=3,pp=2,rank=4", gpu="t4", scenario="amp-bf16").trace
    assert shown.world == World(6, 4)
    assert shown.notes[:2] == (
        "pp: 2 stages, each with 2 of 4 x Block, the layers that repeat in a list or a sequence, under PyTorch's "
        "Schedule1F1B; the batch is that of one microbatch",
        "fsdp: fully_shard on each block of a stage, gathered once for all microbatches (reshard_after_forward=False), "
        "and on the stage",
    )
    *_, last = shown.notes
    assert last.startswith("each stage at its own peak: rank 1 ") and ", rank 4 " in last
    assert last.endswith("; this is rank 4")


def test_shards_of_a_stage_may_be_offloaded() -> None:
    for trace in ranks("fsdp=2,pp=2,offload", steps=2):
        held = at_the_end(trace)
        assert held["parameter"] == held["optimizer state"] == held["gradient"] == 0
        assert most(trace, "gathered parameter") == 4 * PARAMETERS // 2


def by_size(trace: Trace) -> list[tuple[str, int]]:
    """Each allocation. The model that is cut by hand repeats its batch in each step, and its outputs are joined."""
    return [(op, size) for _, op, size in events(trace) if size > 64 and op not in ("repeat", "cat")]


def test_the_fullest_rank_is_shown_and_the_others_are_told() -> None:
    shown = memsize.trace(Model(), IDS, parallel="pp=4", gpu="t4")
    assert shown.trace.world is not None and shown.trace.world.size == 4
    first, *_, last = shown.trace.notes
    assert first == (
        "pp: 4 stages, each with 1 of 4 x Block, the layers that repeat in a list or a sequence, under PyTorch's "
        "Schedule1F1B; the batch is that of one microbatch"
    )
    assert last.startswith("each stage at its own peak: rank 0 ") and last.endswith(
        f"this is rank {shown.trace.world.rank}"
    )


def test_a_stage_is_shown_where_its_rank_is_asked_for() -> None:
    shown = memsize.trace(Model(), IDS, parallel="pp=4,rank=3", gpu="t4").trace
    assert shown.world == memsize.World(4, 3) and shown.notes[-1].endswith("this is rank 3")
    assert "head.weight" in {tensor.name for tensor in shown.tensors}


def test_a_report_and_a_fit_run_stages_too() -> None:
    report = memsize.report(Model(), input_data=IDS, train="sgd", scenarios="fp32,bf16", gpu="t4", parallel="pp=2")
    stages = [note for note in report.notes if "each stage at its own peak" in note]
    assert [note.partition(":")[0] for note in stages] == ["fp32", "bf16"]
    fitted = memsize.fit(
        Model(), input_data=IDS, batch_size=1, train="sgd", scenarios="fp32", parallel="pp", gpus="1..2", gpu="t4"
    )
    assert [run.gpu for run in fitted.traces] == ["1 x Tesla T4", "2 x Tesla T4"]
    # as many microbatches as stages: on one GPU one, and all of the model
    assert [row.standing["parameter"] for row in fitted.fit_rows] == [4 * PARAMETERS, 2 * PARAMETERS]


@pytest.mark.parametrize("scenario", ["amp-fp16", "bf16"])
def test_stages_run_in_other_precisions(scenario: str) -> None:
    sent = [
        {each.bytes for each in trace.collectives if each.bytes > 4}
        for trace in ranks("pp=2", scenario=scenario, steps=1)
    ]
    # what a block returns is the sum of its input, float32 under autocast, and a product
    width = 2 if scenario == "bf16" else 4
    assert sent == [{8 * WIDTH * width}] * 2


class Tied(Model):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


def test_a_tied_parameter_is_on_both_stages_that_read_it() -> None:
    held = [at_the_end(trace)["parameter"] // 4 for trace in ranks("pp=2", Tied(), steps=1)]
    assert held == [96 * WIDTH + 4 * BLOCK] * 2


class MaskedBlock(Block):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * mask


class Masked(nn.Module):
    """Each block takes what was made ahead of all, and is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, WIDTH)
        self.blocks = nn.ModuleList(MaskedBlock() for _ in range(2))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask, x = (ids > 0).unsqueeze(-1) * self.scale, self.embedding(ids)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, mask, use_reentrant=False)
        return x


def test_what_blocks_take_besides_is_made_on_each_stage() -> None:
    first, second = ranks("pp=2", Masked(), steps=1)
    assert at_the_end(second)["parameter"] == 4 * 2 * BLOCK
    # of two microbatches, each with a mask like a block's input
    masks = [each for each in second.storages if each.shape == (1, 8, WIDTH) and not each.op and each.layer > 0]
    assert [(each.role, each.bytes) for each in masks] == [("temporary", 8 * WIDTH * 4)] * 2
    assert at_the_end(first)["buffer"] == at_the_end(second)["buffer"] == 4 * WIDTH


# -- where it is cut --------------------------------------------------------------------------------------------------


def test_a_librarys_plan_names_the_blocks() -> None:
    class Planned(Model):
        _pp_plan = {"embedding": (), "blocks": (), "missing": ()}  # noqa: RUF012

    found = blocks_in_line(Planned())
    assert (str(found), found.source) == ("4 x Block", "the model's own pp_plan")
    # without one, blocks within blocks are cut apart
    nested = nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(2)))
    assert str(blocks_in_line(nested)) == "4 x Block"


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(Expert() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        return x + sum(weights[..., place, None] * expert(x) for place, expert in enumerate(self.experts))


class Mixture(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts(3) for _ in range(4))


def test_experts_stay_in_their_block() -> None:
    assert str(blocks_in_line(Mixture())) == "4 x Experts"
    expert = (WIDTH * 2 * WIDTH + 2 * WIDTH) + (2 * WIDTH * WIDTH + WIDTH)
    block = 3 * expert + WIDTH * 3 + 3
    model = Mixture()
    first, last = ranks("pp=2", model, optimizer="sgd")
    held = [at_the_end(trace)["parameter"] for trace in (first, last)]
    ends = [sum(4 * each.numel() for each in end.parameters()) for end in (model.embedding, model.head)]
    assert held == [2 * 4 * block + end for end in ends]


def test_a_block_keeps_its_module_list_where_another_of_its_class_has_as_many() -> None:
    """Two blocks are enough to tell experts from layers in line; one block is not."""
    two = Mixture()
    two.blocks = nn.ModuleList(Experts(3) for _ in range(2))
    assert str(blocks_in_line(two)) == "2 x Experts"

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(4))

    one = nn.Sequential(Tower())
    one._no_split_modules = ["Tower", "Block"]  # type: ignore[assignment]
    assert str(blocks_in_line(one)) == "4 x Block"


def test_layers_of_stages_are_in_line() -> None:
    """Stages of different lengths, and those that hold a Sequential."""
    uneven = nn.Sequential(*(nn.ModuleList(Block() for _ in range(count)) for count in (2, 3)))
    assert str(blocks_in_line(uneven)) == "5 x Block"
    even = nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(2)))
    assert str(blocks_in_line(even)) == "4 x Block"


class Skipping(Model):
    """The last block takes what the first one returned."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = x = self.blocks[0](self.embedding(ids))
        for block in [*self.blocks][1:-1]:
            x = block(x)
        return self.head(self.blocks[-1](x + first))


class Repeating(Model):
    """The blocks are run twice."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("model", "stages", "message"),
    [
        (Model(), 5, "4 blocks cannot be put on pp=5 stages"),
        (nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)), 2, "0 blocks cannot be put on pp=2 stages"),
        (
            Skipping(),
            2,
            "pp=2 cannot cut this model: block 3 .Block. takes what was made at block 0 .Block., on an earlier",
        ),
        (Repeating(), 2, "Block is called more than once in a forward"),
    ],
)
def test_what_cannot_be_cut(model: nn.Module, stages: int, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        memsize.trace(model, IDS, parallel=f"pp={stages}", gpu="t4")
    assert "\n" not in str(error.value)


def test_fewer_microbatches_than_stages_leave_some_without_work() -> None:
    with pytest.raises(
        InputError, match="4 stages need at least 4 microbatches, and gradient_accumulation_steps=2 are fewer"
    ):
        memsize.trace(Model(), IDS, parallel="pp=4", gradient_accumulation_steps=2, gpu="t4")


def test_a_model_may_skip_within_a_stage() -> None:
    class Late(Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.blocks[1](self.blocks[0](self.embedding(ids)))
            third = self.blocks[2](x)
            return self.head(self.blocks[3](third) + third)

    assert [at_the_end(trace)["parameter"] for trace in ranks("pp=2", Late(), steps=1)] == [2 * PARAMETERS] * 2
