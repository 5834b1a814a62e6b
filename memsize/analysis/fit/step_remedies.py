"""The table of remedies for training steps and inference, on one GPU or spread over several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from torch import Tensor

from memsize.analysis.fit.offloaded_parts import offload_layers, offload_models
from memsize.analysis.fit.optimized_models import (
    Adam8bit,
    HeadLoss,
    LowRank,
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


TEXTS: Final[Mapping[str, tuple[str, str]]] = {
    "bf16 parameters": (
        "model.bfloat16(): weights, gradients, optimizer state and activations",
        "small updates are lost (below 1/256 of a weight)",
    ),
    "int8 weights": (
        "weight-only quantization of the linear layers",
        "rounded weights, unpacked each time they are used",
    ),
    "expandable segments": ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "none known on Linux"),
    "bucket views": (
        "DistributedDataParallel(gradient_as_bucket_view=True): gradients are views of their buckets",
        "nothing, unless gradients are detached in place (detach_)",
    ),
    "fsdp": (
        "fully_shard instead of copies: each GPU stores only its shard",
        "layers are gathered for each forward and backward",
    ),
    "offload": (
        "CPUOffloadPolicy: shards, gradients and optimizer state in the host's memory",
        "copies to the GPU and back, and an optimizer on the CPU: slower",
    ),
    "mixed precision": (
        "MixedPrecisionPolicy: layers in a lower precision, shards in float32",
        "rounding in the layers; usually faster",
    ),
    "autocast": (
        "torch.autocast around forward and loss",
        "rounding in matrix products; copies of the weights while they are used; usually faster",
    ),
    "activation checkpointing": (
        "torch.utils.checkpoint around each repeated block",
        "about a third more time: one more forward of these blocks",
    ),
    "fused optimizer": ("fused=True", "none; usually faster"),
    "foreach=False": ("the optimizer's loop over single parameters", "a slower optimizer step, many small kernels"),
    "8-bit optimizer state": (
        "bitsandbytes' Adam8bit or AdamW8bit; modelled",
        "another library; state rounded in blocks of 256",
    ),
    "SGD": ("plain SGD, which keeps no state", "another optimizer: other learning rates, often more steps"),
    "set_to_none": ("zero_grad(set_to_none=True)", "none"),
    "chunked cross-entropy": (
        "head and loss over 1,024 tokens at a time",
        "a second product with the head; no logits to inspect",
    ),
    "Liger's fused loss": (
        "LigerFusedLinearCrossEntropyLoss, which use_liger_kernel=True of transformers' Trainer switches on too",
        "another library; gradients of the head are computed in the forward; no logits to inspect",
    ),
    "cut cross-entropy": (
        "cut_cross_entropy.linear_cross_entropy, which holds no logits",
        "another library, for 16 bits; negligible gradients are dropped; no logits to inspect",
    ),
    "selective checkpointing": (
        "create_selective_checkpoint_contexts around each repeated block: products and attention are kept",
        "a few percent more time: operations between products are recomputed",
    ),
    "activation offload": (
        "torch.autograd.graph.save_on_cpu(pin_memory=True) around the forward",
        "copies to the host and back, slower than recomputing over most buses",
    ),
    "optimizer in backward": (
        "register_post_accumulate_grad_hook: each parameter is updated as soon as its gradient is there",
        "no accumulation, no clipping by the norm of all gradients",
    ),
    "VAE tiling": ("pipeline.vae.enable_tiling()", "seams between tiles may show; a slower decoder"),
    "VAE slicing": ("pipeline.vae.enable_slicing()", "images are decoded one by one: hardly slower"),
    "model offload": (
        "pipeline.enable_model_cpu_offload(): the GPU holds the part that runs",
        "each part is copied from the host once per generation",
    ),
    "sequential offload": (
        "pipeline.enable_sequential_cpu_offload(): the GPU holds the weights of the layer that runs",
        "all weights are copied from the host in each step: many times slower",
    ),
    "in-place activations": (
        "inplace=True where the backward needs the output only",
        "wrong results if anything else reads an activation's input",
    ),
    "freezing": ("all but the last layer frozen", "only the last layer learns"),
    "LoRA": (
        f"adapters of rank {RANK} beside the linear layers, the rest frozen",
        "only adapters learn; two more small products per layer",
    ),
    "LoRA on a 4-bit base": (
        "the same beside nf4 weights (QLoRA)",
        "rounded base weights, unpacked each time they are used: slower",
    ),
    "int4 weights": (
        "weight-only quantization of the linear layers to 4 bits",
        "weights rounded to 16 values, unpacked each time they are used",
    ),
    "fp8 KV cache": (
        "a quantized cache with the backend fp8",
        "rounded keys and values, unpacked each time they are used",
    ),
    "prefill in chunks": (f"prefill_chunk_size={CHUNK}", "a slower prefill, in smaller pieces"),
    "last logits only": (
        "the head applied only to the last token of the prompt",
        "none: generate reads no other logits",
    ),
    "static cache": ('cache_implementation="static"', "room for the whole context from the first token on"),
    "offloaded cache": (
        'cache_implementation="offloaded"',
        "as much host memory, and each step copies the whole cache to the GPU and back",
    ),
    "2 cards": (
        "each layer divided between two such GPUs (tensor parallelism), as vLLM divides it",
        "a second GPU, and communication after each layer",
    ),
}
"""What each remedy is, and what it costs."""


def remedy(
    name: str, changes: Changes, apply: Apply, groups: str = "", texts: tuple[str, str] | None = None
) -> VariantRemedy:
    """Make a row of a table; its variants list `name` as applied. A remedy is a group of its own unless `groups` names
    some. `texts` are those of `TEXTS` by default.
    """
    title, cost = texts or TEXTS[name]

    def apply_by_name(variant: RunVariant) -> RunVariant:
        return replace(apply(variant), applied=(*variant.applied, name))

    return Remedy(name, title, cost, changes, apply_by_name, frozenset(groups.split() or [name]))


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


BF16_PARAMETERS: Final = remedy("bf16 parameters", "numbers", partial(_in_lower_precision, name="bf16"), "precision")
INT8_WEIGHTS: Final = remedy("int8 weights", "numbers", _int8_weights, "precision")
EXPANDABLE_SEGMENTS: Final = remedy(
    "expandable segments", "nothing", switched("config", "expandable_segments", "segments are expandable already")
)

STEP_REMEDIES: Final = (
    remedy("autocast", "numbers", _autocast, "precision"),
    BF16_PARAMETERS,
    remedy("activation checkpointing", "speed", edited(Recompute(), trained=True)),
    remedy(
        "selective checkpointing",
        "speed",
        edited(Recompute(selective=True), trained=True),
        "activation checkpointing",
    ),
    remedy("fused optimizer", "nothing", partial(_with_option, option="fused", optimizers=_FUSED), "optimizer"),
    remedy("foreach=False", "speed", partial(_with_option, option="foreach=False"), "optimizer"),
    remedy("8-bit optimizer state", "numbers", _eight_bit_state, "optimizer"),
    remedy("SGD", "training", _sgd, "optimizer"),
    remedy(
        "set_to_none",
        "nothing",
        switched("training", "set_to_none", "gradients are dropped before the forward already"),
    ),
    remedy("chunked cross-entropy", "speed", partial(_without_logits, loss=in_chunks), "head"),
    remedy("Liger's fused loss", "speed", partial(_without_logits, loss=by_liger), "head"),
    remedy("cut cross-entropy", "numbers", _cut_cross_entropy, "head"),
    remedy("activation offload", "speed", _offload_activations, "activation checkpointing"),
    remedy("optimizer in backward", "training", _step_in_backward, "accumulation"),
    remedy("in-place activations", "nothing", edited(write_in_place)),
    EXPANDABLE_SEGMENTS,
    remedy("freezing", "training", edited(freeze_all_but_head, trained=True), "trained"),
    remedy("LoRA", "training", _lora, "trained"),
    remedy("LoRA on a 4-bit base", "training", _qlora, "trained precision"),
    INT8_WEIGHTS,
)
"""Remedies for one GPU, in the order in which they are tried."""
PIPELINE_REMEDIES: Final = (
    remedy("VAE tiling", "numbers", edited(partial(switch_autoencoder, method="enable_tiling"))),
    remedy("VAE slicing", "nothing", edited(partial(switch_autoencoder, method="enable_slicing"))),
    remedy("model offload", "speed", edited(offload_models), "host"),
    remedy("sequential offload", "speed", edited(offload_layers), "host"),
)
"""Remedies for pipelines of diffusers."""

_BUCKET_VIEWS: Final = remedy(
    "bucket views", "nothing", switched("parallel", "views", "gradients are views of the buckets already"), "buckets"
)
_FSDP: Final = remedy("fsdp", "speed", _shards, "copies")
_OFFLOAD: Final = remedy("offload", "speed", switched("parallel", "offload", "shards are in the host's memory already"))
_MIXED_PRECISION: Final = remedy("mixed precision", "numbers", _autocast, "precision")


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
    return remedy(f"accumulation ×{parts}", "speed", apply, "accumulation", texts=(title, cost))


def fewer_checkpoints(blocks: int) -> Iterator[VariantRemedy]:
    """Checkpoint the first block, the first two and so on, but not all of `blocks`: each saves more than the last."""
    for count in range(1, blocks):
        title = f"torch.utils.checkpoint around the first {count} of {blocks} blocks: the fewest that are enough"
        cost = f"about {100 * count / blocks / 3:.0f} % more time: one more forward of these blocks per step"
        yield remedy(
            f"checkpointing {count} of {blocks} blocks",
            "speed",
            edited(Recompute(count), trained=True),
            "activation checkpointing",
            texts=(title, cost),
        )


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
        yield remedy(
            f"{parallel.size:,} GPUs", "hardware", partial(replace, parallel=parallel), "gpus", texts=(title, cost)
        )
