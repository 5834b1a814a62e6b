"""What every question about a model has in common: its arguments, as `help` and notebooks show them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from memsize.spec.model_request import ModelRequest
from memsize.spec.training import Training

Question = TypeVar("Question", bound=Callable[..., Any])


def asks_about_a_model(question: Question) -> Question:
    """Spell out the arguments of `InputOptions` in the signature that `help` and notebooks show."""
    signature = inspect.signature(question)
    subject, size, *own = (p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD)
    shared = list(inspect.signature(ModelRequest.of).parameters.values())[2:]
    question.__signature__ = signature.replace(parameters=[subject, size, *shared, *own])  # type: ignore[attr-defined]
    return question


def training_of(train: Training | str | None) -> Training | None:
    """The training that `train` asks for, None for inference."""
    return Training(train) if isinstance(train, str) else train
