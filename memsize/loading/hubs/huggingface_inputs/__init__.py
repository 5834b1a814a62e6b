"""Inputs that suit a transformers model, read off its forward's parameters and its config.

`choice` says which arguments of the forward are given, `makers` which function makes each, by its name; the functions
are in a file per kind of input. `placeholders` counts the tokens that an image or a sound takes among the ids, by
asking the model itself. What one model's arguments are made from is a `Need`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memsize.loading.hubs.huggingface_inputs.choice import Choice
from memsize.spec.request import InputMaker

__all__ = ["input_maker"]


def input_maker(model: Any, preprocessor: Mapping[str, Any]) -> InputMaker:
    """What makes the inputs of `model`; `preprocessor` holds the entries of its processor's config, if there is one."""
    choice = Choice(model, preprocessor)
    return InputMaker(choice.inputs, note=choice.note)
