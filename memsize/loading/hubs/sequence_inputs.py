"""Sequences as arguments of transformers models: text, sound (raw samples or spectrograms), and time series.

Ids are valid tokens that mean nothing special. They end with the end of a sentence, which some classifiers look for; a
prompt goes on instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memsize.loading.hubs.input_batch import Batch, Maker, entry, ones, part, rows, unknown, zeros

SEQ_LEN = 512
"""Tokens of a text, where the model has room for them."""
QUESTION = 16
"""Tokens of a question that is asked beside an image."""

_ENDLESS = 2**30
_LIMITS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length",
    "max_text_len", "max_length", "max_target_positions", "max_source_positions",
)  # fmt: skip
_STARTS = ("vision_start_token_id", "image_start_token_id", "boi_token_id", "boi_token_index")
_ENDS = ("vision_end_token_id", "image_end_token_id", "eoi_token_id", "eoi_token_index")

SAMPLES = 16_000
"""Samples of raw sound: one second."""
FRAMES = 512
"""Frames of a spectrogram, where the model does not fix their number."""
BINS = 80
"""Bins of a spectrogram, where neither config nor model says."""

_STATED = ("feature_projection_input_dim", "input_feat_per_channel")
_TOWERS = ("audio_tower", "semantic_encoder", "semantic_model", "audio_encoder", "audio_model", "speech_encoder")
"""Names of the part of a model for sound, the surest first."""

# What configs do not say and only the models' code shows:
_CODECS = (
    "dac", "pe_audio", "pe_audio_encoder", "pe_audio_video", "pe_audio_video_encoder", "xcodec",
)  # fmt: skip
"""Models whose sound has a dimension for its only channel."""
_BINS = {"gemma4": 128, "gemma3n": 128}
"""Bins of the spectrograms that models' processors make."""
_IN_TIME = ("qwen3_asr", "qwen3_asr_encoder")
"""Models that take (bins, frames) although their first convolution is over both."""


# -- text -------------------------------------------------------------------------------------------------------------


def ids(batch: Batch) -> Tensor:
    """Ids (batch, tokens). Placeholders of images and sound come first, between their start and end tokens."""
    text = _plain(batch, batch.request.seq_len or length_of(batch))
    end = _valid(batch.text, getattr(batch.text, "eos_token_id", None))
    if end is not None and not batch.request.goes_on:
        text[:, -1] = end
    stands = [getattr(batch.config, name) for name, count in batch.tokens.items() for _ in range(count)]
    if stands:
        first, last = (_valid(batch.text, entry((batch.config,), *names)) for names in (_STARTS, _ENDS))
        stands = [token for token in (first, *stands, last) if token is not None]
    return torch.cat((rows([stands] * batch.size), text), 1) if stands else text


def attention_mask(batch: Batch) -> Tensor:
    """One for each token (batch, tokens), or for each patch."""
    leads = ("flattened_patches", "inputs", "input_ids")
    return ones(*batch.shape(next(name for name in leads if name in batch.taken))[:2])


def decoder_ids(batch: Batch) -> Tensor | None:
    """Ids of the decoder (batch, tokens), where the model has one."""
    if batch.main == "input_ids" and not (batch.config.is_encoder_decoder or batch.text.is_encoder_decoder):
        return None
    config = part(batch.config, ("decoder",))
    room = min(_room((config, batch.text), ("max_target_positions", *_LIMITS)), _room_behind_padding(batch.model))
    return _plain(batch, min(batch.request.seq_len or SEQ_LEN, room), config)


def token_types(batch: Batch) -> Tensor | None:
    """One for each token of an image, 2 of a clip, 0 of text; None for models of text alone, which assume it."""
    if not batch.mixes or not (batch.tokens or batch.request.training):
        return None
    tokens = ids(batch)
    kinds = zeros(*tokens.shape)
    for name in batch.tokens:
        kinds[tokens == getattr(batch.config, name)] = 2 if name.startswith("video") else 1
    return kinds


def question(batch: Batch) -> Tensor:
    """A short text (batch, tokens)."""
    return _plain(batch, batch.number("task_seq_len", default=min(QUESTION, _room((batch.text,), _LIMITS))))


# -- lengths and tokens -----------------------------------------------------------------------------------------------


def length_of(batch: Batch) -> int:
    """Tokens of a text: `SEQ_LEN`, or the positions left beside images and sound."""
    taken = sum(batch.tokens.values())
    room = min(_room((batch.text, batch.config), _LIMITS), _room_behind_padding(batch.model))
    # Beside the placeholders stand their start and their end.
    return max(1, min(SEQ_LEN, room - (taken + 2 if taken and room > taken + 2 else 0)))


def _room(configs: tuple[Any, ...], names: tuple[str, ...]) -> int:
    """The number of positions: the least in `configs`, each by the first of `names` that it has."""

    def stated(config: Any) -> int:
        limits = (getattr(config, name, None) for name in names)
        fits = (limit for limit in limits if isinstance(limit, int) and not isinstance(limit, bool) and limit > 1)
        return next(fits, _ENDLESS)

    return min(map(stated, configs))


def _room_behind_padding(model: Any) -> int:
    """The positions of models that count them from behind the padding token, as RoBERTa and its kin do."""
    holders = [module for module in model.modules() if isinstance(getattr(module, "padding_idx", None), int)]
    tables = [(holder.padding_idx, getattr(holder, "position_embeddings", None)) for holder in holders]
    tables += [(table.padding_idx, table) for table in holders if type(table).__name__.endswith("PositionalEmbeddings")]
    sizes = [(pad, getattr(table, "weight", None)) for pad, table in tables]
    rooms = [len(weight) - pad - 1 for pad, weight in sizes if weight is not None]
    ahead = 1 if getattr(model.config, "ngram", None) else 0  # ProphetNet looks at one position more than it is given
    return min([room - ahead for room in rooms if room > ahead], default=_ENDLESS)


def _valid(config: Any, token: Any) -> int | None:
    """`token`, of a list the first, where it is one of the vocabulary's."""
    token = token[0] if isinstance(token, (list, tuple)) and token else token
    vocabulary = getattr(config, "vocab_size", None)
    fits = isinstance(token, int) and token >= 0 and (not isinstance(vocabulary, int) or token < vocabulary)
    return token if fits else None


def _plain(batch: Batch, length: int, config: Any = None) -> Tensor:
    """Ids (batch, `length`) of the smallest token that neither config names as a special one."""
    entries = [item for named in (batch.config, config or batch.text) for item in vars(named).items()]
    special = {v for name, v in entries if name.endswith(("token_id", "token_index")) and isinstance(v, int)}
    plain = next(token for token in range(1, len(special) + 2) if token not in special)
    return torch.full((batch.size, length), plain, dtype=torch.int64)


# -- sound ------------------------------------------------------------------------------------------------------------


def wave(batch: Batch) -> Tensor:
    """Raw sound (batch, samples); with its channels for codecs; frames of a spectrogram for models that read those."""
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
    layer = _first_layer(batch)
    in_time = batch.kind in _IN_TIME or (isinstance(layer, nn.Conv1d) and layer.in_channels == bins)
    return unknown(batch.size, bins, length) if in_time and not in_rows else unknown(batch.size, length, bins)


def _bins(batch: Batch) -> int:
    stated = entry(batch.audio, *_STATED, "input_feat_size")
    stated = stated or entry(batch.audio, "num_mel_bins", "feature_size", "n_mels", "mel_bins")
    if isinstance(stated, int):
        return stated
    first = _first_layer(batch)
    widths = getattr(first, "normalized_shape", None) or (getattr(first, "in_features", BINS),)
    return _BINS.get(batch.kind.partition("_")[0], int(widths[-1]))


def _first_layer(batch: Batch) -> nn.Module | None:
    """The first layer for sound: of the part with a name of `_TOWERS`, or else of the whole model."""
    named = {name.split(".")[-1]: module for name, module in reversed(list(batch.model.named_modules()))}
    towers = (*_TOWERS, *(("encoder",) if batch.mixes else ()))
    tower = next((named[name] for name in towers if name in named), batch.model)
    kinds = (nn.Conv1d, nn.Conv2d, nn.Linear, nn.LayerNorm)
    return next((module for module in tower.modules() if isinstance(module, kinds)), None)


def feature_mask(batch: Batch) -> Tensor:
    """One for each frame (batch, frames)."""
    *_, first, last = batch.shape("input_features")
    return ones(batch.size, last if first == _bins(batch) else first)


# -- time series ------------------------------------------------------------------------------------------------------


def _future(batch: Batch, *features: int) -> Tensor | None:
    """Something of each step to predict (batch, steps[, features])."""
    steps = getattr(batch.config, "prediction_length", None)
    return unknown(batch.size, steps, *features) if isinstance(steps, int) else None


def _statics(batch: Batch, entry: str, make: Callable[..., Tensor]) -> Tensor | None:
    count = batch.number(entry, default=0)
    return make(batch.size, count) if count else None


def _past(batch: Batch) -> int:
    """Steps of the past: the context, and before it the longest lag."""
    lags = getattr(batch.config, "lags_sequence", None)
    return batch.number("context_length", "max_position_embeddings", default=512) + (max(lags) if lags else 0)


def _series(batch: Batch) -> tuple[int, ...]:
    several = getattr(batch.config, "num_input_channels", None)
    if isinstance(several, int):
        return (several,)
    count = getattr(batch.config, "input_size", 1)
    return (count,) if isinstance(count, int) and count > 1 else ()


def _time_features(batch: Batch) -> int:
    return batch.number("num_time_features", default=0)


MAKERS: dict[str, Maker] = {
    "input_ids": ids,
    "attention_mask": attention_mask,
    "decoder_input_ids": decoder_ids,
    "token_type_ids": token_types,
    "mm_token_type_ids": token_types,
    "moe_mm_token_type_ids": token_types,
    "task_inputs": question,
    "qformer_input_ids": question,
    "qformer_attention_mask": lambda batch: ones(*question(batch).shape),
    # The box of each token on its page, from 0 to 1000.
    "bbox": lambda batch: zeros(*batch.shape("input_ids"), 4),
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
    # One argument has both meanings: sound for encoders that read it, else the ids of a text.
    "inputs": lambda batch: wave(batch) if batch.kind.startswith("speech") else ids(batch),
    "past_values": lambda batch: unknown(batch.size, _past(batch), *_series(batch)),
    "past_observed_mask": lambda batch: ones(*batch.shape("past_values"), dtype=torch.float32),  # none is missing
    "past_values_padding": lambda batch: zeros(*batch.shape("past_values"), dtype=torch.float32),  # and none is padding
    "past_time_features": lambda batch: unknown(batch.size, _past(batch), _time_features(batch)),
    # Values are known while a model trains, and are the decoder's input; features ahead, such as a step's weekday.
    "future_values": lambda batch: _future(batch, *_series(batch)),
    "future_time_features": lambda batch: _future(batch, _time_features(batch)),
    "static_categorical_features": lambda batch: _statics(batch, "num_static_categorical_features", zeros),
    "static_real_features": lambda batch: _statics(batch, "num_static_real_features", unknown),
    "freq": lambda batch: zeros(batch.size, 1),
}
