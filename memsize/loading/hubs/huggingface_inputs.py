"""Inputs that suit a transformers model, read off its forward's parameters and its config.

Text is ids with an attention mask, images, clips and sound are tensors of the sizes that the config states. Ids are
valid tokens that mean nothing special, and end with the end of a sentence, which some classifiers look for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from memsize.errors import InputError
from memsize.loading.defaults import InputMaker, Request

SEQ_LEN = 512
"""Tokens of a text, where the model has room for them."""
SAMPLES = 16_000
"""Samples of raw sound: one second."""
FRAMES = 512
"""Frames of a spectrogram, where the model does not fix their number."""
SIDE = 224
"""Pixels of an image's side, where neither model nor processor has one."""

_LIMITS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length",
    "max_target_positions", "max_source_positions",
)  # fmt: skip
_IMAGE_TOKENS = ("image_token_id", "image_token_index", "image_patch_id", "audio_token_id", "audio_token_index")
_VIDEO = ("num_frames", "frames_per_clip")


def input_maker(model: Any, preprocessor: Mapping[str, Any]) -> InputMaker:
    """What makes the inputs of `model`; `preprocessor` holds the entries of its processor's config, if there is one."""
    wants = _Wants(model, preprocessor)
    return InputMaker(wants.inputs, note=wants.note)


class _Wants:
    """What one model's forward takes."""

    def __init__(self, model: Any, preprocessor: Mapping[str, Any]) -> None:
        self.model = model
        self.config = model.config
        self.preprocessor = preprocessor
        self.taken = inspect.signature(model.forward).parameters
        main = getattr(model, "main_input_name", "input_ids")
        self.main = main if isinstance(main, str) else main[0]
        self.mixes = any(isinstance(getattr(self.config, name, None), int) for name in _IMAGE_TOKENS)
        """Whether images or sound stand among the ids as tokens of their own."""
        self.image_tokens = self._image_tokens() if self.mixes else 0
        self.names = self._names()
        others = [name for name in ("pixel_values", "input_features") if name in self.taken and name not in self.names]
        self.note = (
            f"only text is given to {type(model).__name__}: --inputs can add {' and '.join(others)}"
            if self.mixes and others
            else None
        )

    def _names(self) -> tuple[str, ...]:
        """Which of the forward's arguments are given, in order."""
        if "input_ids" in self.taken and (self.main == "input_ids" or self._is_dual()):
            names = ["input_ids"]
            if self.mixes:
                names += ["pixel_values"] if self.image_tokens else []
            elif self._is_dual():
                names += [name for name in ("pixel_values", "input_features") if name in self.taken][:1]
        elif self.main in _MAKERS:
            names = [self.main]
        else:
            names = [name for name in _MAKERS if name in self.taken][:1]
        if "decoder_input_ids" in self.taken and (self.main != "input_ids" or self.config.is_encoder_decoder):
            names.append("decoder_input_ids")
        return tuple(names)

    def _is_dual(self) -> bool:
        """Whether the model reads text beside an image or a sound: CLIP, CLAP, BLIP, OWL-ViT."""
        kinds = getattr(self.model, "input_modalities", ())
        return not isinstance(kinds, str) and "text" in kinds and len(kinds) > 1 and hasattr(self.config, "text_config")

    def inputs(self, request: Request) -> dict[str, Any]:
        """The arguments of one call; raises `InputError` where they are not known."""
        if not self.names:
            from memsize.tracing.signature import wanted_inputs

            raise InputError(f"memsize knows no inputs for {type(self.model).__name__}: {wanted_inputs(self.model)}")
        if request.seq_len is not None and not any(_MAKERS[name] in _SEQUENCES for name in self.names):
            raise InputError(f"{type(self.model).__name__} takes images: --seq-len means nothing to it")
        made: dict[str, Any] = {}
        for name in self.names:
            made[name] = _MAKERS[name](self, request)
        if "input_ids" in made and "attention_mask" in self.taken:
            made["attention_mask"] = _ones(made["input_ids"])
        return made

    # -- text ---------------------------------------------------------------------------------------------------------

    def text(self, request: Request) -> Any:
        """Ids (batch, tokens); those of an image stand first where the model has it among them."""
        import torch

        config = _text_config(self.config)
        length = request.seq_len or _length(config)
        ids = torch.full((request.batch_size, length), _plain_token(self.config, config), dtype=torch.int64)
        end = _token(config, "eos_token_id")
        if end is not None:
            ids[:, -1] = end
        if self.image_tokens:
            token = next(v for v in (getattr(self.config, n, None) for n in _IMAGE_TOKENS) if isinstance(v, int))
            image = torch.full((request.batch_size, self.image_tokens), token, dtype=torch.int64)
            ids = torch.cat((image, ids), 1)
        return ids

    def decoder_text(self, request: Request) -> Any:
        """Ids of the decoder (batch, tokens)."""
        import torch

        config = getattr(self.config, "decoder", None) or self.config
        length = min(request.seq_len or SEQ_LEN, _room(config, ("max_target_positions", *_LIMITS)))
        return torch.full((request.batch_size, length), _plain_token(self.config, config), dtype=torch.int64)

    def _image_tokens(self) -> int:
        """How many tokens an image takes, 0 where the config does not say so."""
        if "pixel_values" not in self.taken:
            return 0
        for name in ("image_seq_length", "mm_tokens_per_image"):
            count = vars(self.config).get(name)
            if isinstance(count, int):
                return count
        return 0

    # -- images -------------------------------------------------------------------------------------------------------

    def image(self, request: Request) -> Any:
        """Pixels (batch, channels, height, width), for models of clips (batch, frames, channels, height, width)."""
        config = _part(self.config, ("vision_config", "backbone_config", "encoder"), "image_size")
        channels, sides = _channels(config), self._sides(config)
        return _unknown(request.batch_size, *self._frames(), channels, *sides)

    def clip(self, request: Request) -> Any:
        """Pixels of a clip (batch, frames, channels, height, width)."""
        frames = self._frames() or (16,)
        return _unknown(request.batch_size, *frames, _channels(self.config), *self._sides(self.config))

    def _frames(self) -> tuple[int, ...]:
        kinds = getattr(self.model, "input_modalities", ())
        kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        if "video" not in kinds or "image" in kinds or "text" in kinds:
            return ()
        return next(((n,) for n in (getattr(self.config, name, None) for name in _VIDEO) if isinstance(n, int)), ())

    def _sides(self, config: Any) -> tuple[int, int]:
        sources = (getattr(config, "image_size", None), getattr(config, "crop_size", None))
        cut = self.preprocessor.get("crop_size") if self.preprocessor.get("do_center_crop", True) else None
        for size in (*sources, cut, self.preprocessor.get("size")):
            sides = _both(size)
            if sides is not None:
                return sides
        return (SIDE, SIDE)

    # -- sound --------------------------------------------------------------------------------------------------------

    def wave(self, request: Request) -> Any:
        """Raw sound (batch, samples); with its channels for codecs; frames of a spectrogram for what reads those."""
        config, batch = self.config, request.batch_size
        if isinstance(getattr(config, "num_mel_bins", None), int) and hasattr(config, "max_length"):
            return _unknown(batch, config.max_length, config.num_mel_bins)
        samples = request.seq_len or SAMPLES
        channels = getattr(config, "audio_channels", None)
        codec = config.model_type in ("dac", "xcodec")
        return _unknown(batch, *((channels or 1,) if channels or codec else ()), samples)

    def spectrogram(self, request: Request) -> Any:
        """Frames (batch, frames, bins), for Whisper and its kin (batch, bins, frames)."""
        config, batch = _part(self.config, ("audio_config", "encoder_config"), "num_mel_bins"), request.batch_size
        for name in ("feature_projection_input_dim", "input_feat_per_channel"):
            if isinstance(getattr(config, name, None), int):
                return _unknown(batch, request.seq_len or FRAMES, getattr(config, name))
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", None) or 80
        if isinstance(getattr(config, "spec_size", None), int):
            return _unknown(batch, 1, config.spec_size * config.spec_size // bins, bins)
        if isinstance(getattr(config, "max_source_positions", None), int) and "input_ids" not in self.names:
            return _unknown(batch, bins, 2 * config.max_source_positions)
        return _unknown(batch, request.seq_len or FRAMES, bins)


_MAKERS: dict[str, Callable[[_Wants, Request], Any]] = {
    "input_ids": _Wants.text,
    "pixel_values": _Wants.image,
    "pixel_values_videos": _Wants.clip,
    "input_values": _Wants.wave,
    "input_features": _Wants.spectrogram,
    "decoder_input_ids": _Wants.decoder_text,
}
_SEQUENCES = (_Wants.text, _Wants.wave, _Wants.spectrogram, _Wants.decoder_text)


def _text_config(config: Any) -> Any:
    """The part of `config` that is about text, the encoder's where there are two."""
    found = getattr(config, "text_config", None) or getattr(config, "encoder", None)
    return config if found is None or isinstance(found, (dict, str)) else found


def _part(config: Any, places: tuple[str, ...], wanted: str) -> Any:
    """`config`, or the first of its parts in `places` that states `wanted` where it does not itself."""
    for part in (config, *(getattr(config, place, None) for place in places)):
        if getattr(part, wanted, None) is not None:
            return part
    return config


def _length(config: Any) -> int:
    return min(SEQ_LEN, _room(config, _LIMITS))


def _room(config: Any, names: tuple[str, ...]) -> int:
    """How many tokens have a position. RoBERTa's kin lose two of theirs (514) to padding."""
    limits = (getattr(config, name, None) for name in names)
    limit = next((n for n in limits if isinstance(n, int) and not isinstance(n, bool) and n > 0), SEQ_LEN)
    return limit - 2 if limit % 8 == 2 and limit > 2 else limit


def _token(config: Any, name: str) -> int | None:
    token = getattr(config, name, None)
    vocabulary = getattr(config, "vocab_size", None)
    fits = isinstance(token, int) and token >= 0 and (not isinstance(vocabulary, int) or token < vocabulary)
    return token if fits else None


def _plain_token(*configs: Any) -> int:
    """The smallest id that no config names as a special token."""
    entries = [entry for config in configs for entry in vars(config).items()]
    special = {v for name, v in entries if name.endswith(("token_id", "token_index")) and isinstance(v, int)}
    return next(token for token in range(1, len(special) + 2) if token not in special)


def _channels(config: Any) -> int:
    for name in ("num_channels", "in_channels", "in_chans", "channels"):
        count = getattr(config, name, None)
        if isinstance(count, int):
            return count
    return 3


def _both(size: Any) -> tuple[int, int] | None:
    """Height and width of what configs write as a size: 224, [224, 224], {"height": 224, …}, {"shortest_edge": 800}."""
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge")
        height, width = size.get("height", edge), size.get("width", edge)
    else:
        height, width = size if isinstance(size, (list, tuple)) and len(size) == 2 else (size, size)
    return (height, width) if isinstance(height, int) and isinstance(width, int) else None


def _unknown(*shape: int) -> Any:
    import torch

    return torch.empty(shape, device="meta")


def _ones(ids: Any) -> Any:
    import torch

    return torch.ones_like(ids)
