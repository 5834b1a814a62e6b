"""What parts of larger models take: patches or embeddings that another part would have made."""

from __future__ import annotations

from typing import Any

from memsize.loading.hubs.huggingface_inputs.images import patches, pixels
from memsize.loading.hubs.huggingface_inputs.makers import makes
from memsize.loading.hubs.huggingface_inputs.need import Need, unknown
from memsize.loading.hubs.huggingface_inputs.reading import whole
from memsize.loading.hubs.huggingface_inputs.sound import SAMPLES
from memsize.loading.hubs.huggingface_inputs.text import length_of

CODES = 50
"""Steps of a sound between a codec's halves."""


def _channels_in_time(model: Any) -> int:
    """What the first layer takes where that is a convolution in time, else 0."""
    from torch import nn

    kinds = (nn.Conv1d, nn.Conv2d, nn.Linear, nn.LayerNorm, nn.Embedding)
    first = next((module for module in model.modules() if isinstance(module, kinds)), None)
    return first.in_channels if isinstance(first, nn.Conv1d) else 0


@makes("latents")
def latents(need: Need) -> Any:
    """What a codec's encoder would have made (batch, width, steps)."""
    width = need.number("latent_dim", "hidden_size", default=512)
    return unknown(need.batch, _channels_in_time(need.model) or width, CODES)


@makes("hidden_states")
def hidden_states(need: Need) -> Any:
    """Patches beside a grid, else embeddings (batch, tokens, width)."""
    if need.choice.main == "pixel_values":
        return pixels(need)
    channels = _channels_in_time(need.model)
    if channels:  # a codec's half: the sound itself, or what the other half made of it
        return unknown(need.batch, channels, SAMPLES if channels == 1 else CODES)
    cut = patches(need)
    width = need.number("input_dim", default=0)  # of sound
    if cut is None and width:
        return unknown(*embeddings(need).shape[:2], width)
    return embeddings(need) if cut is None else cut


@makes("inputs_embeds", "query_embeds", "noise_embeds")
def embeddings(need: Need) -> Any:
    """Embeddings (batch, tokens, width)."""
    return unknown(need.batch, need.request.seq_len or length_of(need), need.number("hidden_size", default=768))


@makes("encoder_hidden_states")
def encoded(need: Need) -> Any:
    """What an encoder would have made, in its width (batch, tokens, width)."""
    width = whole((need.config,), "encoder_hidden_size", "hidden_size", default=768)
    return unknown(need.batch, need.request.seq_len or length_of(need), width)


@makes("context_hidden_states")
def context(need: Need) -> Any:
    """The states of several layers of another model, side by side (batch, tokens, layers · width)."""
    found, layers = embeddings(need), getattr(need.config, "target_layer_ids", None) or [0]
    return unknown(*found.shape[:2], found.shape[2] * len(layers))
