"""What arguments are made from: a model, its config and its parts, what was asked for, and what was made so far."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from memsize.loading.hubs.huggingface_inputs.makers import MAKERS
from memsize.loading.hubs.huggingface_inputs.reading import AUDIO, TEXT, VISION, entry, part, parts, whole
from memsize.spec.request import Request

if TYPE_CHECKING:
    from memsize.loading.hubs.huggingface_inputs.choice import Choice


class Need:
    """The arguments of one call, made one by one: a maker may ask for others that it has to agree with."""

    def __init__(self, choice: Choice, request: Request) -> None:
        self.choice = choice
        self.model = choice.model
        self.config = choice.config
        self.taken = choice.taken
        self.request = request
        self.made: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        """The argument `name`, made now if it was not yet; None where the model does without."""
        if name not in self.made:
            self.made[name] = MAKERS[name](self)
        return self.made[name]

    @property
    def batch(self) -> int:
        return self.request.batch_size

    @property
    def kind(self) -> str:
        """The config's model type: what the tables of exceptions go by."""
        return str(self.config.model_type)

    @property
    def preprocessor(self) -> Mapping[str, Any]:
        return self.choice.preprocessor

    @cached_property
    def text(self) -> Any:
        """The part of the config that is about text: an encoder's where there are two."""
        return part(self.config, TEXT)

    @cached_property
    def vision(self) -> tuple[Any, ...]:
        """The configs that may tell about images, in that order."""
        own = part(self.config, VISION)
        deeper = tuple(found for _, found in parts(own))
        return (self.config, *deeper) if own is self.config else (own, *deeper, self.config)

    @cached_property
    def audio(self) -> tuple[Any, ...]:
        """The configs that may tell about sound, in that order."""
        own = part(self.config, AUDIO)
        return (self.config,) if own is self.config else (own, self.config)

    def number(self, *names: str, default: int) -> int:
        """The first of the config's entries `names` that is a whole number."""
        return whole((self.config,), *names, default=default)

    def seen(self, *names: str) -> Any:
        """The first of the entries `names` that the configs about images state."""
        return entry(self.vision, *names)


def unknown(*shape: int) -> Any:
    """A floating tensor that nobody reads the values of."""
    import torch

    return torch.empty(shape, device="meta")


def ones(*shape: int, dtype: str = "int64") -> Any:
    import torch

    return torch.ones(shape, dtype=getattr(torch, dtype))


def zeros(*shape: int, dtype: str = "int64") -> Any:
    import torch

    return torch.zeros(shape, dtype=getattr(torch, dtype))


def rows(value: list[list[int]]) -> Any:
    import torch

    return torch.tensor(value, dtype=torch.int64)
