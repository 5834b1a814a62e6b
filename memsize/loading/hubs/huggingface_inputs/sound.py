"""Sound: raw samples and spectrograms."""

from __future__ import annotations

import math
from typing import Any

from memsize.loading.hubs.huggingface_inputs.makers import makes
from memsize.loading.hubs.huggingface_inputs.need import Need, ones, unknown, zeros
from memsize.loading.hubs.huggingface_inputs.reading import entry

SAMPLES = 16_000
"""Samples of raw sound: one second."""
DURATION = 4
"""Frames of a token that is spoken."""
FRAMES = 512
"""Frames of a spectrogram, where the model does not fix their number."""
_CODECS = (
    "dac", "neucodec", "pe_audio", "pe_audio_encoder", "pe_audio_video", "pe_audio_video_encoder", "xcodec", "xcodec2",
)  # fmt: skip
"""Models whose sound has a dimension for its only channel, without an entry that says so."""
HOP = 320
"""Samples of a frame, where the model hears both and does not say."""
BINS = 80
"""Bins of a spectrogram, where neither config nor model says."""

_BINS = {"gemma4": 128, "gemma3n": 128}
"""Bins of feature extractors whose models' configs do not name them."""
_STACKED = ("fun_asr_nano", "granite_speech5")
"""Models whose extractor puts several frames into one."""
_STATED = ("feature_projection_input_dim", "input_feat_per_channel")
_IN_TIME = ("qwen3_asr", "qwen3_asr_encoder")
"""Models that take (bins, frames) although their first convolution is in both."""
_TOWERS = (
    "audio_tower",
    "semantic_encoder",
    "semantic_model",
    "audio_encoder",
    "audio_model",
    "speech_encoder",
)


@makes("input_values")
def wave(need: Need) -> Any:
    """Raw sound (batch, samples); with its channels for codecs; frames of a spectrogram for what reads those."""
    config, batch = need.config, need.batch
    if isinstance(getattr(config, "num_mel_bins", None), int) and hasattr(config, "max_length"):
        return unknown(batch, config.max_length, config.num_mel_bins)
    step = need.number("samples_per_token", default=0) or math.prod(entry((config,), "patch_sizes") or [1])
    samples = need.request.seq_len or SAMPLES - SAMPLES % step
    channels = getattr(config, "audio_channels", None)
    codec = config.model_type in _CODECS or config.model_type.startswith("vibevoice")
    return unknown(batch, *((channels or 1,) if channels or codec else ()), samples)


@makes("input_features", "audio_input_features")
def spectrogram(need: Need) -> Any:
    """Frames (batch, frames, bins); (batch, bins, frames) where the first thing over them is a convolution in time."""
    batch, length = need.batch, need.request.seq_len or FRAMES
    window = entry(need.audio, "n_window")
    step = 2 * window if isinstance(window, int) else 1
    length = max(length - length % step, step)
    if "input_values" in need.taken:  # beside the sound itself: as many as it has
        length = SAMPLES // need.number("hop_length", default=HOP)
    bins = bins_of(need)
    side = entry(need.audio, "spec_size")
    if isinstance(side, int):
        return unknown(batch, 1, side * side // bins, bins)
    fixed = entry(need.audio, "max_source_positions")
    if isinstance(fixed, int) and not isinstance(entry(need.audio, *_STATED), int):
        return unknown(batch, bins, 2 * fixed - 2 * fixed % step)
    return unknown(batch, bins, length) if _in_time(need, bins) else unknown(batch, length, bins)


def bins_of(need: Need) -> int:
    """Values of one frame: what the config says, else what the first layer over them takes."""
    stated, first = entry(need.audio, *_STATED, "input_feat_size"), _first_width(need)
    if need.kind.startswith(_STACKED) and first:
        return first
    found = stated or entry(need.audio, "num_mel_bins", "feature_size", "n_mels", "mel_bins")
    return found if isinstance(found, int) else _BINS.get(need.kind.partition("_")[0], first or BINS)


def _first_width(need: Need) -> int | None:
    from torch import nn

    first = _first_layer(need)
    if isinstance(first, nn.LayerNorm):
        return int(first.normalized_shape[-1])
    return first.in_features if isinstance(first, nn.Linear) else None


def _in_time(need: Need, bins: int) -> bool:
    from torch import nn

    if isinstance(entry(need.audio, *_STATED), int):
        return False
    first = _first_layer(need)
    return need.kind in _IN_TIME or (isinstance(first, nn.Conv1d) and first.in_channels == bins)


def _first_layer(need: Need) -> Any:
    """The first layer of what hears."""
    from torch import nn

    kinds = (nn.Conv1d, nn.Conv2d, nn.Linear, nn.LayerNorm)
    return next((module for module in _tower(need).modules() if isinstance(module, kinds)), None)


def _tower(need: Need) -> Any:
    """What hears: the part that is named so, else the whole model."""
    named = {name.split(".")[-1]: module for name, module in reversed(list(need.model.named_modules()))}
    towers = (*_TOWERS, *(("encoder",) if need.choice.mixes else ()))
    return next((named[name] for name in towers if name in named), need.model)


@makes("input_features_mask", "feature_attention_mask")
def feature_mask(need: Need) -> Any:
    """One for each frame (batch, frames)."""
    found = need.get("input_features")
    frames = found.shape[-1] if found.shape[-2] == bins_of(need) else found.shape[-2]
    return ones(need.batch, frames)


@makes("audio_mel")
def mel(need: Need) -> Any:
    return spectrogram(need)


@makes("spectrogram", "mel_spectrogram")
def voiced(need: Need) -> Any:
    """What a vocoder makes sound of: frames (batch, frames, bins), for BigVGAN (batch, bins, frames)."""
    length = need.request.seq_len or FRAMES
    if "mel_spectrogram" in need.taken:
        return unknown(need.batch, need.number("mel_dim", default=BINS), length)
    return unknown(need.batch, length, need.number("model_in_dim", default=BINS))


@makes("audio_mel_mask")
def mel_mask(need: Need) -> Any:
    """True for each frame (batch, frames) that only fills up: none."""
    return zeros(*need.get("audio_mel").shape[:2], dtype="bool")


@makes("padding_mask")
def padding_mask(need: Need) -> Any:
    """One for each sample of sound (batch, samples), where it stands among the ids."""
    if not need.choice.mixes:
        return None
    return ones(need.batch, need.request.seq_len or SAMPLES)


# -- how a text is spoken, which a model wants to know while it trains -------------------------------------------------


@makes("duration_labels")
def durations(need: Need) -> Any:
    """Frames of each token (batch, tokens); None where nobody trains, since then the model predicts them."""
    return ones(*need.get("input_ids").shape) * DURATION if need.request.training else None


@makes("pitch_labels", "energy_labels")
def curves(need: Need) -> Any:
    """Pitch or energy of each token (batch, tokens, 1)."""
    return unknown(*need.get("input_ids").shape, 1) if need.request.training else None


@makes("spectrogram_labels")
def spoken(need: Need) -> Any:
    """The frames that are to be heard (batch, frames, bins)."""
    batch, tokens = need.get("input_ids").shape
    bins = need.number("num_mel_bins", default=BINS)
    return unknown(batch, tokens * DURATION, bins) if need.request.training else None
