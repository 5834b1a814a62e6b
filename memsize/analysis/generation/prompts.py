"""Prompts of any length for a model: made for it where its library says how, else the given inputs made longer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from torch import nn

from memsize.model.input_tensors import ModelInputs, input_tensors, resized_call
from memsize.spec.model_request import ModelRequest
from memsize.spec.vary import parse_vary

Prompts = Callable[[int], ModelInputs]
"""The inputs of a prompt of so many tokens."""


def positions(model: nn.Module) -> int | None:
    """How many tokens a model of transformers has positions for; None where its config does not say."""
    found = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def prompts_of(subject: ModelRequest, inputs: Callable[[ModelRequest], ModelInputs]) -> Prompts:
    """The prompts of a subject; `inputs` makes those of one like it. Raises `InputError` where they have no length."""
    if not subject.has_input:
        return cache(lambda length: inputs(replace(subject, seq_len=length)))
    given = inputs(subject)
    dimensions = parse_vary("seq_len").dimensions(input_tensors(given.call()))

    @cache
    def prompt(length: int) -> ModelInputs:
        return replace(given, make=lambda batch: resized_call(given.make(batch), dimensions, length))

    return prompt
