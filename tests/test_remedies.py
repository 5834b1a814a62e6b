"""Remedies: each run again by other means, what it saves against arithmetic, and the sets of them that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import memsize
from memsize import AllocatorConfig, Fit, Trace, Training
from memsize.records.trace import Event, Storage
from memsize.tracing.run import Setup
from tests.deep import TrainingSteps, assert_same
from tests.fits import (
    RANK,
    SEGMENT,
    STEP_REMEDIES,
    Adam8bit,
    Footprint,
    Need,
    NotApplicable,
    RemedySearch,
    RunCache,
    RunVariant,
    StepInBackward,
    Vary,
    accumulation,
    fewer_checkpoints,
    fit as fit_rules,
    least_recomputation,
    memory_budgets,
    remedies_of,
    repeated_blocks,
    try_remedies,
)
from tests.gpus import card, cuda_context
from tests.models import SCENARIOS, inputs_from_specs, parse_input
from tests.records import Remedied, RemedyRow

MiB = 1 << 20
CONTEXT = cuda_context().high
BATCH = 16
WIDTH = 256
WORDS = 20_000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Stack(nn.Module):
    """Four residual blocks and a head."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recomputed(Stack):
    """The same with its own checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Selective(Stack):
    """The same, with the results of all products kept."""

    def forward(self, x: Tensor) -> Tensor:
        products = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=products)
        return self.head(x)


class HalfRecomputed(Stack):
    """The same with checkpoints around the first half."""

    recomputed = 2

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.recomputed]:
            x = checkpoint(block, x, use_reentrant=False)
        for block in self.blocks[self.recomputed :]:
            x = block(x)
        return self.head(x)


class SomeSelective(Stack):
    """The same with checkpoints around the first `whole` blocks, and selective ones around the rest of `some`."""

    whole, some = 0, 3

    def forward(self, x: Tensor) -> Tensor:
        products = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        for block in self.blocks[: self.whole]:
            x = checkpoint(block, x, use_reentrant=False)
        for block in self.blocks[self.whole : self.some]:
            x = checkpoint(block, x, use_reentrant=False, context_fn=products)
        for block in self.blocks[self.some :]:
            x = block(x)
        return self.head(x)


class OneWholeOthersSelective(SomeSelective):
    """The same with a checkpoint around the first, selective ones around the others."""

    whole, some = 1, 4


class OneRecomputed(HalfRecomputed):
    """The same with a checkpoint around the first."""

    recomputed = 1


class Words(Stack):
    """The same with a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)


class InPlace(Stack):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.act = nn.ReLU(inplace=True)


class Adapter(nn.Module):
    """A linear layer with an adapter, written by hand."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.a = nn.Parameter(torch.zeros(RANK, linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + functional.linear(functional.linear(x, self.a), self.b) / RANK**0.5


class Adapted(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.up, block.down = Adapter(block.up), Adapter(block.down)
        self.head = Adapter(self.head)


class HeadOnly(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)


@cache
def trials(build: Callable[[], nn.Module], size: str) -> RunCache:
    return RunCache("m", build(), inputs_from_specs((parse_input(size),), 1), True, Vary(), lambda _: None)


BASE = RunVariant(SCENARIOS["fp32"], card("a100"), Training("adamw"))
SIZE = "128,256"


def remedied(name: str, build: Callable[[], nn.Module] = Stack, base: RunVariant = BASE, size: str = SIZE) -> Footprint:
    """The run with one remedy."""
    remedy = next(remedy for remedy in STEP_REMEDIES if remedy.name == name)
    return trials(build, size).run(remedy.apply(base), BATCH)


def by_itself(
    build: Callable[[], nn.Module] = Stack, size: str = SIZE, batch: int = BATCH, **options: Any
) -> Footprint:
    """The run of a model that has the remedy in it, by `memsize.trace`."""
    steps = {} if options.get("optimizer", "adamw") is None else {"steps": 2}
    step = memsize.trace(build(), size, batch_size=batch, **steps, **options)
    return Footprint(batch, step.trace, AllocatorConfig())


def same(one: Footprint, other: Footprint) -> bool:
    return one.requested == other.requested and one.needs() == other.needs()


# Each remedy, and the same by other means


def test_checkpointing_is_what_the_model_could_do_itself() -> None:
    assert same(remedied("activation checkpointing"), by_itself(Recomputed))
    assert remedied("activation checkpointing").requested < by_itself().requested


def test_selective_checkpointing_keeps_products() -> None:
    assert same(remedied("selective checkpointing"), by_itself(Selective))
    assert remedied("activation checkpointing").requested < remedied("selective checkpointing").requested


def test_the_fewest_checkpoints() -> None:
    _, half, _, _ = fewer_checkpoints(4)
    assert half.name == "checkpointing 2 of 4 blocks"
    assert same(trials(Stack, SIZE).run(half.apply(BASE), BATCH), by_itself(HalfRecomputed))


def test_the_fewest_checkpoints_that_fit_are_shown() -> None:
    none, one, all_four = by_itself(), by_itself(OneRecomputed), by_itself(Recomputed)
    fit = fit_of(Stack(), budget=CONTEXT + one.needs())
    assert all_four.needs() <= one.needs() < none.needs()
    row = named(fit, "checkpointing")
    assert (row.name, row.outcome, row.peak) == ("checkpointing 1 of 4 blocks", "fits", one.needs(one.needs()))
    # of the multiply-adds of four blocks, two products each, and of the head's ten classes
    of_a_block = 2 * WIDTH * 4 * WIDTH
    assert row.recomputed == of_a_block / (4 * of_a_block + 10 * WIDTH)
    # Where all blocks have to be recomputed, there are no fewer, and where none has to, no row.
    assert not any(r.name.startswith("checkpointing") for r in without_help(all_four.needs() - MiB))


def test_the_least_recomputation() -> None:
    """More and more blocks selectively, then more and more of them whole."""
    _, _, three, every, one_whole, *_, whole = least_recomputation(4)
    assert (every.name, whole.name) == ("selective checkpointing", "activation checkpointing")
    assert same(trials(Stack, SIZE).run(three.apply(BASE), BATCH), by_itself(SomeSelective))
    assert same(trials(Stack, SIZE).run(one_whole.apply(BASE), BATCH), by_itself(OneWholeOthersSelective))
    assert by_itself(OneWholeOthersSelective).requested < by_itself(Selective).requested


def test_the_least_recomputation_that_fits_is_named() -> None:
    """Where all blocks keep their products and it does not fit, the first is recomputed whole."""
    selective, one_whole = by_itself(Selective), by_itself(OneWholeOthersSelective)
    assert one_whole.needs() < selective.needs()
    found = fit_of(Stack(), budget=CONTEXT + one_whole.needs())
    assert named(found, "checkpointing 1 of 4, others").outcome == "fits"
    (finding,) = (finding for finding in found.findings if finding.code == "least-recomputation")
    # As many products as with the others selectively, and nothing of the others: a quarter, but for the head.
    assert "checkpointing 1 of 4 blocks: it computes 25 % of the forward's products again" in finding.text()
    rows = [
        RemedyRow(name, "", "", "speed", "fits", 50, saved, recomputed=share)
        for name, saved, share in (("all blocks", 50, 0.9), ("all selectively", 30, 0.0), ("3 selectively", 20, 0.0))
    ]
    *_, finding = fit_rules.what_is_enough(Remedied("fp32", "T4", 8, 80, 100, tuple(rows), (), None), "batch")
    assert finding.text() == (
        "The least recomputation that fits is 3 selectively: no matrix product is computed again."
    )


def test_a_memory_budget_is_the_compilers_and_ends_with_the_forward() -> None:
    from torch._functorch import config

    assert [one.name for one in memory_budgets()] == ["memory budget 0.75", "memory budget 0.5", "memory budget 0.25"]
    setup = Setup("m", "fp32", Stack(), ((), {}), training=True)
    before = config.activation_memory_budget
    for remedy, budget in zip(memory_budgets(), (0.75, 0.5, 0.25), strict=True):
        (edit,) = remedy.apply(BASE).edits
        with edit(setup).precision.forward():
            assert config.activation_memory_budget == budget
        assert config.activation_memory_budget == before


def without_help(capacity: int) -> tuple[RemedyRow, ...]:
    found = fit_of(Stack(), budget=CONTEXT + capacity).remedied
    assert found is not None
    return tuple(row for row in found.rows if row.outcome == "fits")


def test_offloaded_activations() -> None:
    run, plain = remedied("activation offload"), by_itself()
    # Of each of 4 blocks 16·128 rows: what its first layer and its second take, 256 and 4·256 float32. The head takes
    # the last block's output. A layer's weight is saved too if its input needs a gradient: all but the first one.
    rows = 4 * BATCH * 128
    inputs = 4 * (rows * WIDTH + rows * 4 * WIDTH) + rows * WIDTH
    weights = 7 * 4 * 4 * WIDTH * WIDTH + 4 * 10 * WIDTH
    # The result of ReLU is the same tensor as the next input, and is saved twice.
    relu = 4 * rows * 4 * WIDTH
    assert run.trace.host.pinned <= inputs + weights + relu
    assert run.trace.host.pinned >= inputs + relu + weights - 4 * 10 * WIDTH - 4 * 4 * WIDTH * WIDTH
    assert run.trace.host.needs >= run.trace.host.blocks >= run.trace.host.pinned > 0
    assert run.requested < plain.requested


class DeepWords(Words):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(20))


@cache
def runs_of_deep_words(whole: bool) -> RunCache:
    """The runs that all remedies share: the one without any is made once."""
    runs = RunCache("m", DeepWords(), inputs_from_specs((parse_input(SIZE),), 1), True, Vary(), print, whole=whole)
    runs.run(DEEP, BATCH)
    return runs


DEEP = replace(BASE, scenario=SCENARIOS["bf16"])


@pytest.mark.parametrize(
    "names",
    [
        "activation offload",
        "optimizer in backward",
        "8-bit optimizer state",
        "cut cross-entropy",
        pytest.param("chunked cross-entropy", marks=pytest.mark.thorough),
        pytest.param("Liger's fused loss", marks=pytest.mark.thorough),
        pytest.param("8-bit optimizer state, activation offload, Liger's fused loss", marks=pytest.mark.thorough),
        pytest.param("optimizer in backward, activation checkpointing, freezing", marks=pytest.mark.thorough),
    ],
)
def test_remedies_of_a_deep_model_follow_from_short_ones(names: str) -> None:
    variant = DEEP
    for name in names.split(", "):
        variant = next(remedy for remedy in STEP_REMEDIES if remedy.name == name).apply(variant)
    extended, whole = (runs_of_deep_words(whole).run(variant, BATCH).trace for whole in (False, True))
    assert_same(extended, whole)
    assert extended.extended_from


def test_an_optimizer_of_ones_own_may_tell_blocks_apart() -> None:
    steps = (StepInBackward("adamw"), StepInBackward(Adam8bit), StepInBackward(torch.optim.AdamW))
    assert [TrainingSteps(Training(step)).proof is None for step in steps] == [False, False, True]


def test_an_optimizer_in_backward_keeps_one_gradient() -> None:
    small = "1,256"
    run, plain = trials(Stack, small).run(_with("optimizer in backward"), 1), by_itself(size=small, batch=1)
    gradients = [storage for storage in run.trace.storages if storage.role == "gradient"]
    assert len(gradients) == 2 * 18  # two steps of 9 layers with weights and biases
    live, most = 0, 0
    for event in run.trace.events:
        if run.trace.storages[event.storage].role == "gradient":
            live += event.delta
            most = max(most, live)
    largest = 4 * 4 * WIDTH * WIDTH
    assert largest <= most <= largest + 4 * 5 * WIDTH and live == 0
    assert run.requested <= plain.requested - 7 * largest
    roles = {storage.role for storage in run.trace.storages}
    assert "optimizer state" in roles


@pytest.mark.parametrize("name", ["Liger's fused loss", "cut cross-entropy"])
def test_losses_without_logits(name: str) -> None:
    base = replace(BASE, scenario=SCENARIOS["bf16"])
    run, chunked = (remedied(one, Words, base) for one in (name, "chunked cross-entropy"))
    assert run.requested < chunked.requested
    # No tensor has as many elements as the logits of a chunk of 1,024 tokens.
    assert max(storage.bytes for storage in run.trace.storages) < 2 * 1024 * WORDS
    under_autocast = remedied(name, Words, replace(BASE, scenario=SCENARIOS["amp-bf16"]))
    assert under_autocast.requested < remedied("chunked cross-entropy", Words).requested


def test_checkpointing_under_autocast() -> None:
    base = replace(BASE, scenario=SCENARIOS["amp-bf16"])
    assert same(remedied("activation checkpointing", base=base), by_itself(Recomputed, scenario="amp-bf16"))


def test_precision() -> None:
    assert same(remedied("bf16 parameters"), by_itself(scenario="bf16"))
    assert same(remedied("autocast"), by_itself(scenario="amp-bf16"))
    older = replace(BASE, card=card("t4"))
    assert same(remedied("autocast", base=older), by_itself(scenario="amp-fp16", gpu="t4"))


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("fused optimizer", "adamw:fused"), ("foreach=False", "adamw:foreach=False"), ("SGD", "sgd")],
)
def test_optimizers(name: str, optimizer: str) -> None:
    assert same(remedied(name), by_itself(optimizer=optimizer))


def test_optimizer_options_are_kept() -> None:
    base = replace(BASE, training=Training("adamw:amsgrad=True"))
    assert same(remedied("fused optimizer", base=base), by_itself(optimizer="adamw:amsgrad=True,fused"))


def test_eight_bits_of_state() -> None:
    model = nn.Sequential(nn.Linear(100, 50), nn.Linear(50, 10, bias=False))
    step = memsize.trace(model, (100,), optimizer=Adam8bit, steps=2)
    state = [storage.bytes for storage in step.trace.storages if storage.role == "optimizer state"]
    # 5,000 weights: two bytes each and two float32 for each block of 256; two tables of 256 float32 for all of them.
    # The bias of 50 and the weight of 500 elements are below 4,096: two float32 each.
    blocks = -(-5000 // 256)
    assert sorted(state) == sorted([5000, 5000, 4 * blocks, 4 * blocks, 1024, 1024, 200, 200, 2000, 2000])


def test_eight_bits_saves_three_quarters_of_the_state() -> None:
    small = "1,256"
    saved = (
        by_itself(size=small, batch=1).requested - trials(Stack, small).run(_with("8-bit optimizer state"), 1).requested
    )
    weights = 4 * 2 * 4 * WIDTH * WIDTH
    # 8 bytes of state a weight become 2 and 8/256; AdamW's foreach step also keeps a temporary of 4 bytes.
    assert weights * (8 - 2 - 8 / 256) * 0.99 <= saved <= weights * (8 - 2 - 8 / 256 + 4) * 1.01


def _with(name: str) -> RunVariant:
    return next(remedy for remedy in STEP_REMEDIES if remedy.name == name).apply(BASE)


def test_in_place_activations() -> None:
    assert same(remedied("in-place activations"), by_itself(InPlace))


def test_adapters() -> None:
    found, written = remedied("LoRA"), by_itself(Adapted)
    assert found.requested == written.requested


def test_adapters_on_a_four_bit_base() -> None:
    found, written = remedied("LoRA on a 4-bit base"), by_itself(Adapted, scenario="nf4")
    # An adapter as a module of its own lets go of one unpacked bias, 4·256 bytes, at another moment.
    assert abs(found.requested - written.requested) <= 4 * WIDTH
    # Frozen weights of 4 bits and their scales in place of 32, though each is unpacked when it is used.
    assert found.requested < remedied("LoRA").requested


def test_freezing() -> None:
    assert same(remedied("freezing"), by_itself(HeadOnly))


def test_accumulation() -> None:
    parts = trials(Stack, SIZE).run(accumulation(4).apply(BASE), BATCH)
    assert same(parts, by_itself(batch=BATCH // 4, gradient_accumulation_steps=4))
    # A batch that cannot be divided is split so that its largest part is run: 16 = 6 + 6 + 4.
    assert trials(Stack, SIZE).run(accumulation(3).apply(BASE), BATCH).trace.inputs[0].spec.shape[0] == 6


def test_expandable_segments() -> None:
    run = remedied("expandable segments")
    plain = trials(Stack, SIZE).run(BASE, BATCH)
    assert run.trace is plain.trace
    assert run.needs() == Footprint(BATCH, plain.trace, AllocatorConfig(expandable_segments=True)).needs()


def test_gradients_that_are_kept_during_the_forward() -> None:
    base = replace(BASE, training=Training("adamw", set_to_none=False))
    assert same(remedied("set_to_none", base=base), by_itself())


def test_quantized_weights_of_an_inference() -> None:
    inference = replace(BASE, training=None)
    assert same(remedied("int8 weights", base=inference), by_itself(scenario="int8-weight", optimizer=None))


def test_quantized_weights_of_a_model_that_is_cast() -> None:
    """They are those of the cast model, which goes on computing in its dtype."""
    inference = replace(BASE, training=None, scenario=SCENARIOS["bf16"])
    cast = by_itself(lambda: Stack().bfloat16(), scenario="int8-weight", optimizer=None)
    assert same(remedied("int8 weights", base=inference), cast)


def test_a_chunked_loss_makes_no_logits() -> None:
    words = 20_000

    class Hidden(Stack):
        """Returns what goes into the head."""

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = Hidden(words)

    def step(twin: Any) -> Callable[[Tensor], None]:
        optimizer = torch.optim.AdamW(twin.parameters())

        def part(hidden: Tensor, target: Tensor) -> Tensor:
            return functional.cross_entropy(twin.head(hidden), target, reduction="sum")

        def body(x: Tensor) -> None:
            optimizer.zero_grad()
            hidden = twin(x).flatten(0, 1)
            target = torch.zeros(len(hidden), dtype=torch.int64, device=x.device)
            losses = [
                checkpoint(part, h, t, use_reentrant=False)
                for h, t in zip(hidden.split(1024), target.split(1024), strict=True)
            ]
            (torch.stack(losses).sum() / len(hidden)).backward()
            optimizer.step()

        return body

    written = memsize.trace(model, SIZE, batch_size=BATCH, step=step, steps=2)
    found = remedied("chunked cross-entropy", lambda: Stack(words))
    assert abs(found.requested - written.peak.requested) <= 4 * MiB
    # 16·128 tokens: their logits are 16·128·20,000 float32, and log-softmax and gradient as many again.
    plain = trials(lambda: Stack(words), SIZE).run(BASE, BATCH)
    assert plain.requested - found.requested > 16 * 128 * words * 4


@pytest.mark.parametrize(
    ("name", "base", "reason"),
    [
        ("autocast", replace(BASE, scenario=SCENARIOS["bf16"]), "bf16 already"),
        ("bf16 parameters", replace(BASE, scenario=SCENARIOS["amp-bf16"]), "amp-bf16 already"),
        ("SGD", replace(BASE, training=Training("sgd-momentum")), "SGD already"),
        ("8-bit optimizer state", replace(BASE, training=Training("sgd")), "Adam's state"),
        ("fused optimizer", replace(BASE, training=Training("rmsprop")), "no such implementation"),
        ("fused optimizer", replace(BASE, training=Training("adamw:fused")), "chosen already"),
        ("fused optimizer", replace(BASE, training=Training(torch.optim.AdamW)), "as a function"),
        ("set_to_none", BASE, "dropped before"),
        ("activation checkpointing", replace(BASE, training=None), "nothing is trained"),
        ("int8 weights", BASE, "quantized weights are not trained"),
        ("chunked cross-entropy", replace(BASE, training=Training(loss="mse")), "not cross-entropy"),
        ("chunked cross-entropy", BASE, "outputs or more"),
        ("Liger's fused loss", replace(BASE, training=Training(loss="mse")), "not cross-entropy"),
        ("activation offload", replace(BASE, training=None), "nothing is trained"),
        ("optimizer in backward", replace(BASE, split=2), "accumulated"),
        ("optimizer in backward", replace(BASE, scenario=SCENARIOS["amp-fp16"]), "GradScaler"),
        ("expandable segments", replace(BASE, config=AllocatorConfig(expandable_segments=True)), "already"),
    ],
)
def test_remedies_that_mean_nothing_say_so(name: str, base: RunVariant, reason: str) -> None:
    with pytest.raises(NotApplicable, match=reason):
        remedied(name, base=base)


def test_which_blocks_are_repeated() -> None:
    model = Stack()
    assert repeated_blocks(model) == list(model.blocks)
    with pytest.raises(NotApplicable, match="repeats in a list"):
        repeated_blocks(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))


def test_sequences_in_a_list_are_blocks_where_no_class_repeats() -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3))
    assert repeated_blocks(nn.ModuleDict({"blocks": blocks, "head": nn.Linear(8, 2)})) == list(blocks)
    stages = nn.Sequential(nn.Sequential(*blocks), nn.Linear(8, 2))
    assert repeated_blocks(stages) == list(blocks)
    with pytest.raises(NotApplicable):
        repeated_blocks(nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 3)))


@pytest.mark.thorough
def test_the_model_is_left_alone() -> None:
    model = Stack()
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    fit_of(model, budget=CONTEXT + 60 * MiB)
    assert before == {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert all("forward" not in vars(module) for module in model.modules())
    assert not any(block.act.inplace for block in model.blocks)


# What is made of them


def fit_of(model: nn.Module, **options: object) -> Fit:
    plain = {"batch_size": BATCH, "train": "adamw", "scenarios": "fp32"}
    return memsize.fit(model, SIZE, **(plain | options))  # type: ignore[arg-type]


def named(fit: Fit, name: str) -> RemedyRow:
    assert fit.remedied is not None
    return next(row for row in fit.remedied.rows if row.name.startswith(name))


@cache
def without_room() -> Fit:
    return fit_of(Stack(), budget=CONTEXT + 100 * MiB)


def test_remedies_come_where_the_batch_does_not_fit() -> None:
    assert fit_of(Stack(), gpu="a100").remedied is None
    assert fit_of(Stack(), budget=CONTEXT + 100 * MiB, remedies=False).remedied is None
    assert fit_of(Stack(), gpu="a100", remedies=True).remedied is not None
    found = without_room().remedied
    assert found is not None and found.size == BATCH and found.peak > found.budget == 100 * MiB
    saved = [row.saved or 0 for row in found.rows]
    assert saved == sorted(saved, reverse=True)


def test_each_row_is_a_run() -> None:
    fit = without_room()
    capacity = 100 * MiB
    for name, options in [
        ("autocast", {"scenario": "amp-bf16"}),
        ("bf16 parameters", {"scenario": "bf16"}),
        ("SGD", {"optimizer": "sgd"}),
        ("fused optimizer", {"optimizer": "adamw:fused"}),
    ]:
        row, run = named(fit, name), by_itself(**options)
        assert row.peak == run.needs(capacity)
        assert row.saved == by_itself().needs(capacity) - run.needs(capacity)
        assert (row.outcome == "fits") == run.fits(capacity)
    assert named(fit, "chunked").outcome == "not here"
    assert named(fit, "fused").outcome == "no help"
    assert set(fit.remedies["name"]) == {row.name for row in fit.remedied.rows}  # type: ignore[union-attr]


def test_quantizing_does_not_help_where_activations_bind() -> None:
    fit = fit_of(Stack(), train=None, batch_size=64, budget=CONTEXT + 60 * MiB)
    weights, halves = named(fit, "int8"), named(fit, "bf16")
    assert (weights.saved or 0) < (halves.saved or 0)


def test_the_fewest_parts_that_fit() -> None:
    row = named(without_room(), "accumulation")
    parts = int(row.name.rpartition("×")[2])
    assert row.outcome == "fits"
    assert by_itself(batch=BATCH // parts, gradient_accumulation_steps=parts).fits(100 * MiB)
    assert not by_itself(batch=BATCH // (parts // 2), gradient_accumulation_steps=parts // 2).fits(100 * MiB)


@pytest.mark.thorough
@pytest.mark.parametrize("mebibytes", [50, 60])
def test_a_combination_where_no_remedy_is_enough(mebibytes: int) -> None:
    # Freezing alone fits into 60 MiB, but only the head would learn: what keeps the training is sought as well.
    fit = fit_of(Stack(), budget=CONTEXT + mebibytes * MiB)
    found = fit.remedied
    assert found is not None
    assert {row.name for row in found.rows if row.outcome == "fits"} <= {"freezing"}
    assert len(found.combination) > 1 and "freezing" not in found.combination
    needs = [trials(Stack, SIZE).run(case, BATCH).needs(found.budget) for case in cases(found.combination)]
    assert found.combined == needs[0] <= found.budget
    # Without any one of them it does not fit.
    assert all(need > found.budget for need in needs[1:])
    assert any(finding.code == "remedy-combination" for finding in fit.findings)


def made_up(sizes: dict[frozenset[str], int]) -> Callable[[RunVariant], Footprint]:
    """Runs whose need depends on the remedies in them."""

    def run(case: RunVariant) -> Footprint:
        need = sizes.get(frozenset(case.applied))
        if need is None:
            raise NotApplicable("not here")
        storage = Storage(need * MiB, "activation", -1, "op", "uint8", (need * MiB,), -1)
        events = (Event(0, need * MiB, 0, -1, "op"), Event(0, -need * MiB, 0, -1, "op"))
        trace = Trace("m", "fp32", True, 1, "2.13.0", (), (), (), storages=(storage,), events=events)
        return Footprint(1, trace, AllocatorConfig())

    return run


def test_two_remedies_rather_than_three() -> None:
    # Of 100 MiB, 40 fit. The first saves most alone and goes badly with the second; the second and third are enough.
    ckpt, inplace, expandable = "activation checkpointing", "in-place activations", "expandable segments"
    sizes = {(): 100, (ckpt,): 60, (inplace,): 62, (expandable,): 64}
    sizes |= {(ckpt, inplace): 56, (ckpt, expandable): 46, (inplace, expandable): 30}
    sizes |= {(ckpt, inplace, expandable): 28}
    run = made_up({frozenset(names): need for names, need in sizes.items()})
    search = RemedySearch(BASE, lambda variant: Need(run(variant).needs(40 * MiB), 40 * MiB), SEGMENT)
    found = try_remedies(search, remedies_of(BASE), scenario="fp32", gpu="a GPU", size=1)
    assert [row.name for row in found.rows if row.outcome == "saves"] == [ckpt, inplace, expandable]
    assert set(found.combination) == {inplace, expandable} and found.combined == 30 * MiB


def test_a_single_remedy_rather_than_two() -> None:
    # What keeps the training is not enough by itself; with less savings than the others together, SGD alone is.
    views, sgd = "expandable segments", "SGD"
    sizes = {(): 100, (views,): 70, (sgd,): 40}
    run = made_up({frozenset(names): need for names, need in sizes.items()})
    search = RemedySearch(BASE, lambda variant: Need(run(variant).needs(40 * MiB), 40 * MiB), SEGMENT)
    found = try_remedies(search, remedies_of(BASE), scenario="fp32", gpu="a GPU", size=1)
    assert found.combination == (sgd,) and found.combined == 40 * MiB


def test_one_way_to_recompute_is_taken() -> None:
    # Where a whole block is recomputed, nothing is left to select from: that both fit together means nothing.
    whole, selective, segments = "activation checkpointing", "selective checkpointing", "expandable segments"
    sizes = {(): 100, (whole,): 60, (selective,): 62, (segments,): 70}
    sizes |= {(whole, selective): 20, (whole, segments): 38, (selective, segments): 39}
    run = made_up({frozenset(names): need for names, need in sizes.items()})
    search = RemedySearch(BASE, lambda variant: Need(run(variant).needs(40 * MiB), 40 * MiB), SEGMENT)
    found = try_remedies(search, remedies_of(BASE), scenario="fp32", gpu="a GPU", size=1)
    assert set(found.combination) == {whole, segments} and found.combined == 38 * MiB


def test_adapters_have_the_rank_that_their_text_names() -> None:
    (lora,) = (remedy for remedy in STEP_REMEDIES if remedy.name == "LoRA")
    assert f"rank {RANK} " in lora.title


def cases(names: tuple[str, ...]) -> Iterator[RunVariant]:
    """The case with all remedies, then with all but one."""
    for left_out in (None, *names):
        case = BASE
        for name in names:
            if name != left_out:
                remedy = next((r for r in STEP_REMEDIES if r.name == name), None) or accumulation(
                    int(name.rpartition("×")[2])
                )
                case = remedy.apply(case)
        yield case


@pytest.mark.thorough
def test_nothing_helps_where_nothing_can() -> None:
    fit = fit_of(Stack(), budget=CONTEXT + 2 * MiB)
    assert fit.remedied is not None and not fit.remedied.combination
    assert any(finding.code == "remedy-none" for finding in fit.findings)


@pytest.mark.thorough
def test_a_language_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=3, n_embd=64, n_head=4, vocab_size=9000)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    fit = memsize.fit(
        model, "input_ids=128:int64", batch_size=2, train="adamw", scenarios="fp32", budget=CONTEXT + 44 * MiB
    )
    helpful = {row.name for row in fit.remedied.rows if row.outcome in ("fits", "saves")}  # type: ignore[union-attr]
    assert {"activation checkpointing", "chunked cross-entropy"} <= helpful
    assert not {row.reason for row in fit.remedied.rows if "failed" in (row.reason or "")}  # type: ignore[union-attr]
    assert len(fit.remedied.combination) > 1  # type: ignore[union-attr]
