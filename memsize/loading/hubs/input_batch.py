"""One batch of inputs of a transformers model, and the entries of its config, whatever the config calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from memsize.spec.inputs import InputRequest

VISION = ("vision", "image", "visual", "video", "vit", "backbone", "encoder", "thinker")
AUDIO = ("audio", "speech", "encoder", "thinker")
TEXT = ("text", "language", "llm", "thinker", "encoder", "decoder")
"""Names of a config's parts for images, sound and text, the surest first."""

_IMAGE = ("image_token_id", "image_token_index", "image_patch_id")
_VIDEO = ("video_token_id", "video_token_index")
_AUDIO = ("audio_token_id", "audio_token_index")
PLACEHOLDERS = (*_IMAGE, *_VIDEO, *_AUDIO)
"""Entries that name the token which stands among the ids for a part of an image, a clip or a sound."""

PERCEIVED = {
    "pixel_values": ("get_image_features", _IMAGE),
    "image_pixel_values": ("get_image_features", _IMAGE),
    "flattened_patches": ("get_image_features", _IMAGE),
    "pixel_values_videos": ("get_video_features", _VIDEO),
    "input_features": ("get_audio_features", _AUDIO),
    "input_values": ("get_audio_features", _AUDIO),
    "audio_input_features": ("get_audio_features", _AUDIO),
}
"""Arguments for images, clips and sound, the first of which goes beside a text; for each the method that makes
embeddings of it, and the entries that name the token for one.
"""

_ACROSS = ("cross_attention_mask", "image_encoder_embeddings")
"""Arguments of models whose text attends to images across, although their configs name a token for images."""

Maker = Callable[["Batch"], Tensor | None]


class Batch:
    """One batch of inputs for `model`, made argument by argument: a maker may ask for others that it must agree with.

    `tokens` says how many placeholder tokens one sample has, by the config's entry for the token.
    """

    def __init__(
        self, model: Any, preprocessor: Mapping[str, Any], request: InputRequest, makers: Mapping[str, Maker],
        tokens: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.preprocessor = preprocessor
        self.request = request
        self.size = request.batch_size
        self.makers = makers
        self.tokens = tokens or {}
        # ColPali and its kin wrap another model, whose config says what they take.
        wraps = str(model.config.model_type).startswith("col")
        self.config = getattr(model.config, "vlm_config", model.config) if wraps else model.config
        self.kind = str(self.config.model_type)
        parameters = inspect.signature(model.forward).parameters.values()
        self.taken = {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        self._arguments: dict[str, Tensor | None] = {}

    def get(self, name: str) -> Tensor | None:
        """The argument `name`, made now if it was not yet; None where the model does without."""
        if name not in self._arguments:
            self._arguments[name] = self.makers[name](self)
        return self._arguments[name]

    def shape(self, name: str) -> torch.Size:
        """The shape of the argument `name`, which the model does not do without."""
        tensor = self.get(name)
        assert tensor is not None
        return tensor.shape

    @property
    def main(self) -> str:
        """The argument that the model itself calls its main input."""
        name = getattr(self.model, "main_input_name", "input_ids")
        return name if isinstance(name, str) else str(name[0])

    @property
    def beside(self) -> tuple[str, ...]:
        """The arguments for things perceived beside a text: an image, else a clip, else a sound."""
        return tuple(name for name in PERCEIVED if name in self.taken)[:1]

    @cached_property
    def mixes(self) -> bool:
        """Whether images or sound stand among the ids as placeholder tokens."""
        named = any(isinstance(getattr(self.config, name, None), int) for name in PLACEHOLDERS)
        return named and bool(self.beside) and not any(name in self.taken for name in _ACROSS)

    @cached_property
    def text(self) -> Any:
        """The part of the config that is about text: an encoder's where there are two."""
        return part(self.config, TEXT)

    @cached_property
    def vision(self) -> tuple[Any, ...]:
        """The configs that may tell about images, in that order."""
        own = part(self.config, VISION)
        deeper = tuple(config for _, config in _parts(own))
        return (self.config, *deeper) if own is self.config else (own, *deeper, self.config)

    @cached_property
    def audio(self) -> tuple[Any, ...]:
        """The configs that may tell about sound, in that order."""
        own = part(self.config, AUDIO)
        return (self.config,) if own is self.config else (own, self.config)

    def number(self, *names: str, default: int) -> int:
        """The first of the config's entries `names` that is a whole number."""
        return whole((self.config,), *names, default=default)


# -- reading configs --------------------------------------------------------------------------------------------------


def part(config: Any, kinds: tuple[str, ...]) -> Any:
    """The part of `config` that is of the first of `kinds`, parts of parts included; `config` where there is none."""
    own = list(_parts(config))
    for kind in kinds:
        for name, inner in own:
            if kind in name:
                return part(inner, (kind,)) if kind not in ("encoder", "decoder") else inner
    for _, inner in own:
        deeper = part(inner, kinds[:-2])
        if deeper is not inner:
            return deeper
    return config


def _parts(config: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield name.removesuffix("_config"), value


def entry(configs: tuple[Any, ...], *names: str) -> Any:
    """The first of the entries `names` that is not None, in the first of `configs` that has one; else None."""
    values = (getattr(config, name, None) for config in configs for name in names)
    return next((value for value in values if value is not None), None)


def whole(configs: tuple[Any, ...], *names: str, default: int) -> int:
    """The first of the entries `names` that is a whole number; of a list the last."""
    for value in (getattr(config, name, None) for config in configs for name in names):
        last = value[-1] if isinstance(value, (list, tuple)) and value else value
        if isinstance(last, int) and not isinstance(last, bool):
            return last
    return default


def both(size: Any) -> tuple[int, int] | None:
    """Height and width of a size in a config: 224, [224, 224], {"height": 224, …}, {"shortest_edge": 800}."""
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge")
        height, width = size.get("height", edge), size.get("width", edge)
    else:
        height, width = size[-2:] if isinstance(size, (list, tuple)) and len(size) > 1 else (size, size)
        height, width = (side[0] if isinstance(side, (list, tuple)) and side else side for side in (height, width))
    fits = isinstance(height, int) and isinstance(width, int) and not isinstance(height, bool)
    return (height, width) if fits else None


# -- tensors ----------------------------------------------------------------------------------------------------------

ones = partial(torch.ones, dtype=torch.int64)
zeros = partial(torch.zeros, dtype=torch.int64)
rows = partial(torch.tensor, dtype=torch.int64)


def unknown(*shape: int) -> Tensor:
    """A floating tensor without values."""
    return torch.empty(shape, device="meta")
