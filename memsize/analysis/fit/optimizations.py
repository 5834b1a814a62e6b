"""The one table of remedies: what each does to a case, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from memsize.analysis.fit.case import Case, Edit, NotApplicable
from memsize.analysis.fit.optimized_models import (
    Adam8bit,
    LowRank,
    chunk_the_head,
    freeze_all_but_head,
    loss_of_the_head,
    recompute_blocks,
    write_in_place,
)
from memsize.spec.scenario import SCENARIOS
from memsize.spec.training import Training, parse_optimizer

Changes = Literal["nothing", "speed", "numbers", "training"]
"""What a remedy changes beside memory: nothing that matters, the speed, the rounding, or what is learnt."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One way to need less memory.

    `apply` turns a case into the case with it; it raises `NotApplicable` with the reason where that means nothing.
    `cost` is what one pays. Of remedies that share a group only one is taken at a time.
    """

    name: str
    title: str
    cost: str
    changes: Changes
    groups: frozenset[str]
    apply: Callable[[Case], Case]


RANK: Final = 16
"""The rank of adapters."""
_FUSED: Final = ("adam", "adamw", "sgd", "sgd-momentum", "adagrad")
_ADAMS: Final = ("adam", "adamw")


def _training(case: Case) -> Training:
    if case.training is None:
        raise NotApplicable("nothing is trained")
    return case.training


def _named(case: Case) -> tuple[str, Training]:
    """The optimizer by name, and the training that it is part of."""
    training = _training(case)
    if not isinstance(training.optimizer, str):
        raise NotApplicable("the optimizer was given as a function")
    return training.optimizer, training


def _full_precision(case: Case) -> None:
    if case.scenario.name not in ("as-given", "fp32"):
        raise NotApplicable(f"the scenario is {case.scenario.name} already")


def _autocast(case: Case) -> Case:
    _full_precision(case)
    return replace(case, scenario=SCENARIOS["amp-bf16" if case.card.capability >= (8, 0) else "amp-fp16"])


def _halved(case: Case) -> Case:
    _full_precision(case)
    return replace(case, scenario=SCENARIOS["bf16"])


def _quantized(case: Case) -> Case:
    if case.training is not None:
        raise NotApplicable("quantized weights are not trained: see the adapters")
    if case.scenario.recipe == "quantized":
        raise NotApplicable("the scenario is quantized already")
    return replace(case, scenario=SCENARIOS["int8-weight"])


def _adapters(case: Case) -> Case:
    _training(case)
    return case.edited(LowRank(RANK))


def _quantized_base(case: Case) -> Case:
    _training(case)
    if case.scenario.recipe == "quantized":
        raise NotApplicable("the scenario is quantized already")
    return replace(case, scenario=SCENARIOS["nf4"]).edited(LowRank(RANK))


def _with_option(option: str, known: tuple[str, ...] | None) -> Callable[[Case], Case]:
    def apply(case: Case) -> Case:
        text, training = _named(case)
        spec = parse_optimizer(text)
        if known is not None and spec.name not in known:
            raise NotApplicable(f"{spec.cls} has no such implementation")
        if {"fused", "foreach"} & set(spec.options):
            raise NotApplicable("the optimizer's implementation is chosen already")
        joined = f"{text},{option}" if ":" in text else f"{text}:{option}"
        return replace(case, training=replace(training, optimizer=joined))

    return apply


def _stateless(case: Case) -> Case:
    training = _training(case)
    if isinstance(training.optimizer, str) and parse_optimizer(training.optimizer).cls == "SGD":
        raise NotApplicable("the optimizer is SGD already")
    return replace(case, training=replace(training, optimizer="sgd"))


def _eight_bit(case: Case) -> Case:
    text, training = _named(case)
    if parse_optimizer(text).name not in _ADAMS:
        raise NotApplicable("it is Adam's state that is stored in 8 bits")
    return replace(case, training=replace(training, optimizer=Adam8bit))


def _chunked(case: Case) -> Case:
    training = _training(case)
    if training.loss not in (None, "cross_entropy"):
        raise NotApplicable("the loss is not cross-entropy")
    return replace(case, training=replace(training, loss=loss_of_the_head)).edited(chunk_the_head)


def _dropped_gradients(case: Case) -> Case:
    training = _training(case)
    if training.set_to_none:
        raise NotApplicable("gradients are dropped before the forward already")
    return replace(case, training=replace(training, set_to_none=True))


def _trained_edit(edit: Edit) -> Callable[[Case], Case]:
    def apply(case: Case) -> Case:
        _training(case)
        return case.edited(edit)

    return apply


def _expandable(case: Case) -> Case:
    if case.config.expandable_segments:
        raise NotApplicable("segments are expandable already")
    return replace(case, config=replace(case.config, expandable_segments=True))


def split(parts: int) -> Remedy:
    """Gradient accumulation over `parts` parts of the batch."""

    def apply(case: Case) -> Case:
        _training(case)
        if case.split > 1:
            raise NotApplicable("the batch is split already")
        return replace(case, split=parts)

    title = f"{parts} backwards per step, each with a part of the batch"
    cost = "smaller kernels, so slower; batch norms see the parts' statistics"
    return Remedy(f"accumulation ×{parts}", title, cost, "speed", frozenset({"accumulation"}), apply)


def _entry(name: str, title: str, cost: str, changes: Changes, groups: str, apply: Callable[[Case], Any]) -> Remedy:
    return Remedy(name, title, cost, changes, frozenset(groups.split() or [name]), apply)


REMEDIES: Final[tuple[Remedy, ...]] = (
    _entry(
        "autocast",
        "torch.autocast around forward and loss",
        "rounding in matrix products; copies of the weights while they are used; usually faster",
        "numbers",
        "precision",
        _autocast,
    ),
    _entry(
        "bf16 parameters",
        "model.bfloat16(): weights, gradients, optimizer state and activations",
        "updates smaller than 1/256 of a weight are lost",
        "numbers",
        "precision",
        _halved,
    ),
    _entry(
        "activation checkpointing",
        "torch.utils.checkpoint around each repeated block",
        "one more forward of these blocks per step, about a third more time",
        "speed",
        "",
        _trained_edit(recompute_blocks),
    ),
    _entry(
        "fused optimizer", "fused=True", "none; usually faster", "nothing", "optimizer", _with_option("fused", _FUSED)
    ),
    _entry(
        "foreach=False",
        "the optimizer's loop over single parameters",
        "a slower optimizer step, many small kernels",
        "speed",
        "optimizer",
        _with_option("foreach=False", None),
    ),
    _entry(
        "8-bit optimizer state",
        "bitsandbytes' Adam8bit or AdamW8bit; modelled",
        "another library; state rounded in blocks of 256",
        "numbers",
        "optimizer",
        _eight_bit,
    ),
    _entry(
        "SGD",
        "plain SGD, which keeps no state",
        "another optimizer: other learning rates, often more steps",
        "training",
        "optimizer",
        _stateless,
    ),
    _entry("set_to_none", "zero_grad(set_to_none=True)", "none", "nothing", "", _dropped_gradients),
    _entry(
        "chunked cross-entropy",
        "head and loss over 1,024 tokens at a time",
        "the head's product is computed twice; no logits to look at",
        "speed",
        "",
        _chunked,
    ),
    _entry(
        "in-place activations",
        "inplace=True where the backward needs the output only",
        "wrong results where something else reads an activation's input",
        "nothing",
        "",
        lambda case: case.edited(write_in_place),
    ),
    _entry(
        "expandable segments",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "none known on Linux",
        "nothing",
        "",
        _expandable,
    ),
    _entry(
        "freezing",
        "all but the last layer frozen",
        "only the last layer learns",
        "training",
        "trained",
        _trained_edit(freeze_all_but_head),
    ),
    _entry(
        "LoRA",
        f"adapters of rank {RANK} beside the linear layers, the rest frozen",
        "only adapters learn; two more small products per layer",
        "training",
        "trained",
        _adapters,
    ),
    _entry(
        "LoRA on a 4-bit base",
        "the same beside nf4 weights (QLoRA)",
        "rounded base weights, unpacked each time they are used: slower",
        "training",
        "trained precision",
        _quantized_base,
    ),
    _entry(
        "int8 weights",
        "weight-only quantization of the linear layers",
        "rounded weights, unpacked each time they are used",
        "numbers",
        "precision",
        _quantized,
    ),
)
"""All remedies but accumulation, which has a number of parts."""
