"""How many tokens an image, a clip or a sound takes among the ids.

Processors work that out, each in its own way. Here the model itself is asked: what its `get_image_features` returns for
one image, run without data on a twin, is what it puts in the place of those tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memsize.loading.hubs.huggingface_inputs.makers import MAKERS
from memsize.loading.hubs.huggingface_inputs.reading import entry

if TYPE_CHECKING:
    from memsize.loading.hubs.huggingface_inputs.choice import Choice

_IMAGE = ("image_token_id", "image_token_index", "image_patch_id")
_VIDEO = ("video_token_id", "video_token_index")
_AUDIO = ("audio_token_id", "audio_token_index")
TOKENS = (*_IMAGE, *_VIDEO, *_AUDIO)
"""Entries of a config that name the token which stands for a part of something perceived."""

METHODS = {
    "pixel_values": ("get_image_features", _IMAGE),
    "image_pixel_values": ("get_image_features", _IMAGE),
    "flattened_patches": ("get_image_features", _IMAGE),
    "pixel_values_videos": ("get_video_features", _VIDEO),
    "input_features": ("get_audio_features", _AUDIO),
    "audio_input_features": ("get_audio_features", _AUDIO),
    "input_values": ("get_audio_features", _AUDIO),
}
"""For each argument the method that makes embeddings of it, and the entries of a config that name their token."""

_COUNTS = ("image_seq_length", "mm_tokens_per_image", "num_image_tokens", "num_query_tokens")
"""Entries that say how many tokens an image takes, for models without such a method."""


def has_placeholders(config: Any) -> bool:
    """Whether the config names a token for images, clips or sound."""
    return any(isinstance(getattr(config, name, None), int) for name in TOKENS)


def placeholders(choice: Choice) -> tuple[dict[str, int], str]:
    """Per entry of the config that names such a token: how many of it one sample has; and why there is none of what the
    model could perceive.
    """
    found, why = {}, ""
    for name in choice.beside:
        method, entries = METHODS[name]
        token = next((token for token in entries if isinstance(getattr(choice.config, token, None), int)), None)
        count, why = _count(choice, name, method) if token else (0, "")
        if token and count:
            found[token] = count
    return found, why


def _count(choice: Choice, name: str, method: str) -> tuple[int, str]:
    if hasattr(_owner(choice.model, method), method):
        try:
            return _embedded(choice, name, method), ""
        except Exception as error:  # the model's own code, in its own words
            lines = str(error).strip().splitlines()
            return 0, lines[0] if lines else type(error).__name__
    stated = entry((choice.config,), *_COUNTS)
    return (stated if isinstance(stated, int) and name == "pixel_values" else 0), ""


def _owner(model: Any, method: str) -> Any:
    """The module that has `method`: the body where it has one, since a head only hands it on."""
    body = getattr(model, "base_model", model)
    return body if hasattr(body, method) else model


def _embedded(choice: Choice, name: str, method: str) -> int:
    """The embeddings that the model makes of one sample's `name`."""
    import torch

    from memsize.internals.isolation import undisturbed
    from memsize.model.meta_copy import in_mode, meta_copy, shadow
    from memsize.tracing.dispatch import MetaDispatchMode

    twin: Any = in_mode(shadow(choice.model), False)
    embed = getattr(_owner(twin, method), method)
    need, taken = choice.sample(), inspect.signature(embed).parameters
    given = {other: need.get(other) for other in taken if other == name or (other in MAKERS and other in choice.taken)}
    arguments = {other: value for other, value in given.items() if value is not None}
    with undisturbed(), torch.no_grad(), MetaDispatchMode():
        features = embed(**meta_copy(arguments))
    width = twin.get_input_embeddings().weight.shape[-1]
    made = list(_tensors(features))
    if any(tensor.shape[-1] != width for tensor in made):
        raise ValueError("what is perceived is embedded in another width than the text")
    return int(sum(tensor.numel() for tensor in made) // width)


def _tensors(features: Any) -> Iterator[Any]:
    """What stands in the place of the tokens: the pooled output where there is one."""
    from memsize.internals.pytree import tensors_in

    pooled = getattr(features, "pooler_output", None)
    if pooled is None:
        pooled = getattr(features, "last_hidden_state", None)
    yield from tensors_in(features if pooled is None else pooled)
