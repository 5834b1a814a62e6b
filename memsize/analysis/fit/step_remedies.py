"""The table of remedies for training steps and inference, on one GPU or spread over several.

`remedies.csv` says what each is, what it changes and what it costs.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch import Tensor

from memsize.analysis.fit.offloaded_parts import offload_layers, offload_models
from memsize.analysis.fit.optimized_models import (
    SELECTIVE,
    Adam8bit,
    HeadLoss,
    LowRank,
    MemoryBudget,
    OffloadActivations,
    Recompute,
    StepInBackward,
    by_cut_cross_entropy,
    by_liger,
    check_cut_cross_entropy,
    freeze_all_but_head,
    in_chunks,
    loss_of_the_head,
    switch_autoencoder,
    write_in_place,
)
from memsize.analysis.fit.run_cache import RunVariant
from memsize.analysis.model_setups import ModelEdit
from memsize.analysis.remedies import Changes, NotApplicable, Remedy
from memsize.analysis.runner import Edit
from memsize.spec.parallel import Parallel
from memsize.spec.scenario import COMPILED, SCENARIOS, compiled_from, quantized_from
from memsize.spec.training import RANK, Training, parse_optimizer

_FUSED: Final = ("adam", "adamw", "sgd", "sgd-momentum", "adagrad")
_ADAMS: Final = ("adam", "adamw")
CHUNK: Final = 1024
"""Tokens of the prompt that are read at a time."""
_MOST_PARTS: Final = 64
_MOST_GPUS: Final = 1024

VariantRemedy = Remedy[RunVariant]
Apply = Callable[[RunVariant], RunVariant]


class Facts(NamedTuple):
    """The changes and the cost of a remedy, and its groups, parted by `|`: one of its own where none is named."""

    changes: Changes
    groups: str
    title: str
    cost: str


with Path(__file__).with_name("remedies.csv").open(newline="", encoding="utf-8") as _file:
    _FACTS: Final[dict[str, Facts]] = {name: Facts(*facts) for name, *facts in csv.reader(_file)}  # type: ignore[arg-type]


def remedy(name: str, apply: Apply, facts: Facts | None = None) -> VariantRemedy:
    """The remedy of this name, by default with the facts of `remedies.csv`. Its variants list `name` as applied."""
    changes, groups, title, cost = facts or _FACTS[name]

    def apply_by_name(variant: RunVariant) -> RunVariant:
        return replace(apply(variant), applied=(*variant.applied, name))

    return Remedy(name, title, cost, changes, apply_by_name, frozenset(groups.split("|") if groups else [name]))


def _in_lower_precision(variant: RunVariant, name: str) -> RunVariant:
    if variant.scenario.name.removesuffix(COMPILED) not in ("as-given", "fp32"):
        raise NotApplicable(f"the scenario is {variant.scenario.name} already")
    other = SCENARIOS[name]
    return replace(variant, scenario=compiled_from(other) if variant.scenario.compile else other)


def _autocast(variant: RunVariant) -> RunVariant:
    return _in_lower_precision(variant, "amp-bf16" if variant.card.capability >= (8, 0) else "amp-fp16")


def quantized(variant: RunVariant, name: str) -> RunVariant:
    """Store the weights as the scenario `name` does."""
    if variant.scenario.recipe == "quantized":
        raise NotApplicable("the scenario is quantized already")
    return replace(variant, scenario=quantized_from(variant.scenario, name))


def _int8_weights(variant: RunVariant) -> RunVariant:
    if variant.training is not None:
        raise NotApplicable("quantized weights are not trained: see the adapters")
    return quantized(variant, "int8-weight")


def _training(variant: RunVariant) -> Training:
    if variant.training is None:
        raise NotApplicable("nothing is trained")
    return variant.training


def _optimizer_text(training: Training) -> str:
    if not isinstance(training.optimizer, str) or training.is_own:
        raise NotApplicable("the optimizer is the target's own, or was given as a function")
    return training.optimizer


def _with_option(variant: RunVariant, option: str, optimizers: tuple[str, ...] | None = None) -> RunVariant:
    """Give the optimizer an option that only `optimizers` have (None: all have it)."""
    training = _training(variant)
    text = _optimizer_text(training)
    spec = parse_optimizer(text)
    if optimizers is not None and spec.name not in optimizers:
        raise NotApplicable(f"{spec.cls} has no such implementation")
    if {"fused", "foreach"} & set(spec.options):
        raise NotApplicable("the optimizer's implementation is chosen already")
    joined = f"{text},{option}" if ":" in text else f"{text}:{option}"
    return replace(variant, training=replace(training, optimizer=joined))


def _eight_bit_state(variant: RunVariant) -> RunVariant:
    training = _training(variant)
    if variant.parallel and (variant.parallel.shards_parameters or variant.parallel.tensor > 1):
        raise NotApplicable("bitsandbytes' optimizers cannot update DTensors (bitsandbytes#1633)")
    if parse_optimizer(_optimizer_text(training)).name not in _ADAMS:
        raise NotApplicable("it is Adam's state that is stored in 8 bits")
    return replace(variant, training=replace(training, optimizer=Adam8bit))


def _sgd(variant: RunVariant) -> RunVariant:
    training = _training(variant)
    if isinstance(training.optimizer, str) and not training.is_own and parse_optimizer(training.optimizer).cls == "SGD":
        raise NotApplicable("the optimizer is SGD already")
    return replace(variant, training=replace(training, optimizer="sgd"))


def switched(part: str, option: str, already: str, value: object = True) -> Apply:
    """Switch on an option of the variant's `part`, such as its training; `already` says that it is on."""

    def apply(variant: RunVariant) -> RunVariant:
        settings = _training(variant) if part == "training" else getattr(variant, part)
        if getattr(settings, option):
            raise NotApplicable(already)
        changed: Any = {part: replace(settings, **{option: value})}
        return replace(variant, **changed)

    return apply


def edited(edit: Edit, *, trained: bool = False) -> Apply:
    """Turn an edit of the meta copy into a change of variants; `trained`: of those with a training alone."""

    def apply(variant: RunVariant) -> RunVariant:
        if trained:
            _training(variant)
        return variant.edited(edit)

    return apply


def _without_logits(variant: RunVariant, loss: Callable[..., Tensor]) -> RunVariant:
    training = _training(variant)
    if training.loss not in (None, "cross_entropy"):
        raise NotApplicable("the loss is not cross-entropy")
    _check_undivided(variant)
    return replace(variant, training=replace(training, loss=loss_of_the_head)).edited(HeadLoss(loss))


def _cut_cross_entropy(variant: RunVariant) -> RunVariant:
    check = partial(check_cut_cross_entropy, is_cast=bool(variant.scenario.autocast))
    return _without_logits(variant.edited(check), by_cut_cross_entropy)


def _offload_activations(variant: RunVariant) -> RunVariant:
    _training(variant)
    return variant.edited(OffloadActivations(variant.card))


def _step_in_backward(variant: RunVariant) -> RunVariant:
    training = _training(variant)
    if training.is_own:
        raise NotApplicable("the optimizer is the target's own")
    if training.gradient_accumulation_steps > 1 or variant.split > 1:
        raise NotApplicable("gradients are accumulated over several backwards")
    if variant.parallel and not variant.parallel.shards_parameters:
        raise NotApplicable("gradients are complete only when those of all processes are reduced")
    scenario = variant.scenario
    if scenario.master_weights or (scenario.autocast == "float16" if training.scaler is None else training.scaler):
        raise NotApplicable("the step needs all gradients: a GradScaler or master weights are used")
    return replace(variant, training=replace(training, optimizer=StepInBackward(training.optimizer)))


def _lora(variant: RunVariant) -> RunVariant:
    _training(variant)
    _check_undivided(variant)
    return variant.edited(ModelEdit(LowRank(RANK)))


def _qlora(variant: RunVariant) -> RunVariant:
    _training(variant)
    return quantized(variant, "nf4").edited(ModelEdit(LowRank(RANK)))


def _check_undivided(variant: RunVariant) -> None:
    if variant.parallel and variant.parallel.tensor > 1:
        raise NotApplicable("the model's own plan divides its layers as they are")


def _shards(variant: RunVariant) -> RunVariant:
    parallel = variant.parallel
    assert parallel is not None, "strategies are changed where there is one"
    if parallel.kind == "dp" or parallel.replicas == 1:
        raise NotApplicable("no processes hold copies of the same")
    shards = parallel.replicas * parallel.shards
    return replace(variant, parallel=replace(parallel, kind="fsdp", replicas=1, shards=shards, views=False))


BF16_PARAMETERS: Final = remedy("bf16 parameters", partial(_in_lower_precision, name="bf16"))
INT8_WEIGHTS: Final = remedy("int8 weights", _int8_weights)
EXPANDABLE_SEGMENTS: Final = remedy(
    "expandable segments", switched("config", "expandable_segments", "segments are expandable already")
)

STEP_REMEDIES: Final = (
    remedy("autocast", _autocast),
    BF16_PARAMETERS,
    remedy("activation checkpointing", edited(Recompute(), trained=True)),
    remedy("selective checkpointing", edited(SELECTIVE, trained=True)),
    remedy("fused optimizer", partial(_with_option, option="fused", optimizers=_FUSED)),
    remedy("foreach=False", partial(_with_option, option="foreach=False")),
    remedy("8-bit optimizer state", _eight_bit_state),
    remedy("SGD", _sgd),
    remedy("set_to_none", switched("training", "set_to_none", "gradients are dropped before the forward already")),
    remedy("chunked cross-entropy", partial(_without_logits, loss=in_chunks)),
    remedy("Liger's fused loss", partial(_without_logits, loss=by_liger)),
    remedy("cut cross-entropy", _cut_cross_entropy),
    remedy("activation offload", _offload_activations),
    remedy("optimizer in backward", _step_in_backward),
    remedy("in-place activations", edited(write_in_place)),
    EXPANDABLE_SEGMENTS,
    remedy("freezing", edited(freeze_all_but_head, trained=True)),
    remedy("LoRA", _lora),
    remedy("LoRA on a 4-bit base", _qlora),
    INT8_WEIGHTS,
)
"""Remedies for one GPU, in the order in which they are tried."""
PIPELINE_REMEDIES: Final = (
    remedy("VAE tiling", edited(partial(switch_autoencoder, method="enable_tiling"))),
    remedy("VAE slicing", edited(partial(switch_autoencoder, method="enable_slicing"))),
    remedy("model offload", edited(offload_models)),
    remedy("sequential offload", edited(offload_layers)),
)
"""Remedies for pipelines of diffusers."""

_BUCKET_VIEWS: Final = remedy(
    "bucket views", switched("parallel", "views", "gradients are views of the buckets already")
)
_FSDP: Final = remedy("fsdp", _shards)
_OFFLOAD: Final = remedy("offload", switched("parallel", "offload", "shards are in the host's memory already"))
_MIXED_PRECISION: Final = remedy("mixed precision", _autocast)


def step_remedies(parallel: Parallel | None) -> tuple[VariantRemedy, ...]:
    """Return the remedies for steps that are spread by `parallel` (None: on one GPU)."""
    if parallel is None:
        return STEP_REMEDIES
    if not parallel.shards_parameters:
        return (*([_BUCKET_VIEWS] if parallel.kind == "ddp" else []), _FSDP, *STEP_REMEDIES)
    others = (remedy for remedy in STEP_REMEDIES if remedy.name != "autocast")
    return _FSDP, _OFFLOAD, _MIXED_PRECISION, *others


def numbers_of_parts(size: int) -> Iterator[int]:
    """Yield the numbers of parts that a batch of `size` is split into: powers of two."""
    parts = 2
    yield parts
    while (parts := 2 * parts) <= min(size, _MOST_PARTS):
        yield parts


def accumulation(parts: int) -> VariantRemedy:
    """Accumulate gradients over `parts` parts of the batch."""

    def apply(variant: RunVariant) -> RunVariant:
        _training(variant)
        if variant.split > 1:
            raise NotApplicable("the batch is split already")
        return replace(variant, split=parts)

    title = f"{parts} backwards per step, each with a part of the batch"
    cost = "smaller kernels, so slower; batch norms see the parts' statistics"
    return remedy(f"accumulation ×{parts}", apply, Facts("speed", "accumulation", title, cost))


def fewer_checkpoints(blocks: int) -> Iterator[VariantRemedy]:
    """Checkpoint the first block, the first two and so on, up to all `blocks`: each saves more than the last."""
    for count in range(1, blocks):
        title = f"torch.utils.checkpoint around the first {count} of {blocks} blocks: the fewest that are enough"
        cost = "one more forward of these blocks per step"
        yield _recomputation(f"checkpointing {count} of {blocks} blocks", Recompute(count), title, cost)
    yield next(remedy for remedy in STEP_REMEDIES if remedy.name == "activation checkpointing")


def least_recomputation(blocks: int) -> Iterator[VariantRemedy]:
    """Recompute more and more of `blocks`: one after the other selectively, then one after the other whole."""
    for count in range(1, blocks):
        title = f"a selective checkpoint around the first {count} of {blocks} blocks: products and attention are kept"
        cost = "operations between the products of these blocks are recomputed"
        yield _recomputation(f"selective for {count} of {blocks} blocks", Recompute(0, count), title, cost)
    yield next(remedy for remedy in STEP_REMEDIES if remedy.name == "selective checkpointing")
    for count in range(1, blocks):
        title = f"torch.utils.checkpoint around the first {count} of {blocks} blocks, selective around the others"
        cost = "one more forward of these blocks, and operations between the products of the others"
        name = f"checkpointing {count} of {blocks}, others selectively"
        yield _recomputation(name, Recompute(count, None), title, cost)
    yield next(remedy for remedy in STEP_REMEDIES if remedy.name == "activation checkpointing")


def memory_budgets() -> Iterator[VariantRemedy]:
    """Let the compiler keep less and less of the activations that it would keep.

    Below a quarter, all is recomputed at once, which takes more again.
    """
    for percent in (75, 50, 25):
        title = f"torch._functorch.config.activation_memory_budget = {percent / 100:g}"
        cost = "the compiler recomputes what costs least time"
        yield _recomputation(f"memory budget {percent / 100:g}", MemoryBudget(percent), title, cost)


def _recomputation(name: str, edit: Edit, title: str, cost: str) -> VariantRemedy:
    facts = Facts("speed", "recomputation|saved tensors", title, cost)
    return remedy(name, edited(edit, trained=True), facts)


def more_gpus(parallel: Parallel | None) -> Iterator[VariantRemedy]:
    """Yield the same strategy on twice as many GPUs, four times as many and so on, if each stores less then."""
    cost = "more GPUs; a larger global batch"
    while parallel and 2 * parallel.size <= _MOST_GPUS:
        if parallel.shards_parameters:
            parallel = replace(parallel, shards=2 * parallel.shards)
        elif parallel.is_pipeline:
            parallel = replace(parallel, stages=2 * parallel.stages)
        elif parallel.kind == "tp":
            parallel = replace(parallel, tensor=2 * parallel.tensor)
        else:  # more GPUs would hold more copies of the same
            return
        title = f"{parallel}, with the same batch on each"
        facts = Facts("hardware", "gpus", title, cost)
        yield remedy(f"{parallel.size:,} GPUs", partial(replace, parallel=parallel), facts)
