"""Sound, as raw samples or as spectrograms, and time series."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memsize.loading.hubs.huggingface_inputs.model_config import Batch, Maker, entry, ones, unknown, zeros
from memsize.loading.hubs.huggingface_inputs.text_inputs import ids

SAMPLES = 16_000
"""Samples of raw sound: one second."""
FRAMES = 512
"""Frames of a spectrogram, where the model does not fix their number."""
BINS = 80
"""Bins of a spectrogram, where neither config nor model says."""

_STATED = ("feature_projection_input_dim", "input_feat_per_channel")
_TOWERS = ("audio_tower", "semantic_encoder", "semantic_model", "audio_encoder", "audio_model", "speech_encoder")
"""What models call the part that hears, the surest name first."""

# What configs do not say and only the models' code shows:
_CODECS = (
    "dac", "pe_audio", "pe_audio_encoder", "pe_audio_video", "pe_audio_video_encoder", "xcodec",
)  # fmt: skip
"""Models whose sound has a dimension for its only channel."""
_BINS = {"gemma4": 128, "gemma3n": 128}
"""Bins of the spectrograms that models' processors make."""
_IN_TIME = ("qwen3_asr", "qwen3_asr_encoder")
"""Models that take (bins, frames) although their first convolution is over both."""


def wave(batch: Batch) -> Tensor:
    """Raw sound (batch, samples); with its channels for codecs; frames of a spectrogram for what reads those."""
    config = batch.config
    if isinstance(getattr(config, "num_mel_bins", None), int) and hasattr(config, "max_length"):
        return unknown(batch.size, config.max_length, config.num_mel_bins)
    codec = batch.kind in _CODECS or batch.kind.startswith("vibevoice")
    channels = getattr(config, "audio_channels", None) or (1 if codec else None)
    return unknown(batch.size, *((channels,) if channels else ()), batch.request.seq_len or SAMPLES)


def spectrogram(batch: Batch) -> Tensor:
    """Frames (batch, frames, bins); (batch, bins, frames) where the first thing over them is a convolution in time."""
    window = entry(batch.audio, "n_window")
    step = 2 * window if isinstance(window, int) else 1
    length = batch.request.seq_len or FRAMES
    length = max(length - length % step, step)
    bins, side = _bins(batch), entry(batch.audio, "spec_size")
    if isinstance(side, int):  # CLAP folds a spectrogram into a square
        return unknown(batch.size, 1, side * side // bins, bins)
    in_rows = isinstance(entry(batch.audio, *_STATED), int)
    fixed = entry(batch.audio, "max_source_positions")
    if isinstance(fixed, int) and not in_rows:  # Whisper's kin halve their 30 seconds once
        return unknown(batch.size, bins, 2 * fixed - 2 * fixed % step)
    in_time = batch.kind in _IN_TIME or _convolves(_first_layer(batch), bins)
    return unknown(batch.size, bins, length) if in_time and not in_rows else unknown(batch.size, length, bins)


def _bins(batch: Batch) -> int:
    """Values of one frame: what the config says, else what the first layer over them takes."""
    stated = entry(batch.audio, *_STATED, "input_feat_size")
    stated = stated or entry(batch.audio, "num_mel_bins", "feature_size", "n_mels", "mel_bins")
    if isinstance(stated, int):
        return stated
    first, taken = _first_layer(batch), BINS
    if isinstance(first, (nn.LayerNorm, nn.Linear)):
        taken = first.normalized_shape[-1] if isinstance(first, nn.LayerNorm) else first.in_features
    return _BINS.get(batch.kind.partition("_")[0], taken)


def _convolves(layer: Any, bins: int) -> bool:
    return isinstance(layer, nn.Conv1d) and layer.in_channels == bins


def _first_layer(batch: Batch) -> nn.Module | None:
    """The first layer of what hears: of the part that is named so, else of the whole model."""
    named = {name.split(".")[-1]: module for name, module in reversed(list(batch.model.named_modules()))}
    towers = (*_TOWERS, *(("encoder",) if batch.mixes else ()))
    tower = next((named[name] for name in towers if name in named), batch.model)
    kinds = (nn.Conv1d, nn.Conv2d, nn.Linear, nn.LayerNorm)
    return next((module for module in tower.modules() if isinstance(module, kinds)), None)


def feature_mask(batch: Batch) -> Tensor:
    """One for each frame (batch, frames)."""
    *_, first, last = batch.shape("input_features")
    return ones(batch.size, last if first == _bins(batch) else first)


def either(batch: Batch) -> Tensor:
    """What has one name for several things: sound where an encoder reads that, else the ids of a text."""
    return wave(batch) if batch.kind.startswith("speech") else ids(batch)


# -- time series ------------------------------------------------------------------------------------------------------


def past_values(batch: Batch) -> Tensor:
    """Values (batch, steps), with several series (batch, steps, series)."""
    return unknown(batch.size, _past(batch), *_series(batch))


def future_values(batch: Batch) -> Tensor | None:
    """What is to be predicted: known while a model trains, and the decoder's input."""
    steps = getattr(batch.config, "prediction_length", None)
    return unknown(batch.size, steps, *_series(batch)) if isinstance(steps, int) else None


def future_times(batch: Batch) -> Tensor | None:
    """What is known of each step to come, such as its weekday (batch, steps, features)."""
    steps = getattr(batch.config, "prediction_length", None)
    return unknown(batch.size, steps, _time_features(batch)) if isinstance(steps, int) else None


def categories(batch: Batch) -> Tensor | None:
    count = batch.number("num_static_categorical_features", default=0)
    return zeros(batch.size, count) if count else None


def reals(batch: Batch) -> Tensor | None:
    count = batch.number("num_static_real_features", default=0)
    return unknown(batch.size, count) if count else None


def _past(batch: Batch) -> int:
    """Steps of the past: those that are looked at, and before them what the longest lag reaches back to."""
    lags = getattr(batch.config, "lags_sequence", None)
    return batch.number("context_length", "max_position_embeddings", default=512) + (max(lags) if lags else 0)


def _series(batch: Batch) -> tuple[int, ...]:
    """The series that go side by side: their dimension is left out where a model has it for several only."""
    several = getattr(batch.config, "num_input_channels", None)
    if isinstance(several, int):
        return (several,)
    count = getattr(batch.config, "input_size", 1)
    return (count,) if isinstance(count, int) and count > 1 else ()


def _time_features(batch: Batch) -> int:
    return batch.number("num_time_features", default=0)


MAKERS: dict[str, Maker] = {
    "input_values": wave,
    "input_features": spectrogram,
    "audio_input_features": spectrogram,
    "input_features_mask": feature_mask,
    "feature_attention_mask": feature_mask,
    "padding_mask": lambda batch: ones(batch.size, batch.request.seq_len or SAMPLES) if batch.mixes else None,
    # What a vocoder makes sound of (batch, frames, bins).
    "spectrogram": lambda batch: unknown(
        batch.size, batch.request.seq_len or FRAMES, batch.number("model_in_dim", default=BINS)
    ),
    "inputs": either,
    "past_values": past_values,
    "past_observed_mask": lambda batch: ones(*batch.shape("past_values"), dtype=torch.float32),  # none is missing
    "past_values_padding": lambda batch: zeros(*batch.shape("past_values"), dtype=torch.float32),  # and none is padding
    "past_time_features": lambda batch: unknown(batch.size, _past(batch), _time_features(batch)),
    "future_values": future_values,
    "future_time_features": future_times,
    "static_categorical_features": categories,
    "static_real_features": reals,
    "freq": lambda batch: zeros(batch.size, 1),
}
