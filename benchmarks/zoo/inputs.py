"""Inputs of model types that are unlike any other: memsize leaves them to the user, and here is what one would give.

For each type, functions that make arguments of its forward beside those that memsize makes itself, or instead of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.case import Case
from memsize.loading import InputRequest, load
from memsize.loading.hubs import image_inputs, sequence_inputs
from memsize.loading.hubs.huggingface_inputs import config_input_maker
from memsize.loading.hubs.input_batch import Batch, Maker, ones, rows, unknown, whole, zeros

REGIONS = 36
"""Regions that a detector found in an image."""
CODES = 50
"""Steps of a sound between the halves of a codec."""
DURATION = 4
"""Frames of a token that is spoken."""


# -- text -------------------------------------------------------------------------------------------------------------


def _ids(batch: Batch, length: int | None = None, **tokens: int) -> Tensor:
    """Ids of `length` tokens, with placeholders for what `tokens` count by the config's entry."""
    request = replace(batch.request, seq_len=length or batch.request.seq_len)
    return sequence_inputs.ids(Batch(batch.model, {}, request, batch.makers, tokens or batch.tokens))


def _axial(batch: Batch) -> Tensor:
    """Reformer is trained on its whole grid of positions."""
    return _ids(batch, math.prod(batch.config.axial_pos_shape) if batch.request.training else None)


def _rows_of_codes(batch: Batch) -> Tensor:
    """Each codebook of sound is a row (batch · codebooks, tokens)."""
    return _ids(batch).repeat(batch.number("num_codebooks", default=1), 1)


def _ids_and_codes(batch: Batch) -> Tensor:
    """Codes of sound stand beside each token (batch, tokens, 1 + codebooks)."""
    return _ids(batch)[..., None].expand(-1, -1, 1 + batch.number("num_codebooks", default=0)).clone()


def _steps_of_codes(batch: Batch) -> Tensor:
    """The codes of each step side by side (batch, steps, channels)."""
    decoded = sequence_inputs.decoder_ids(batch)
    assert decoded is not None
    return decoded[..., None].repeat(1, 1, batch.config.decoder_config.num_channels)


def _latents(batch: Batch) -> int:
    """Tokens of an image, which stand before the text."""
    return batch.number("latent_query_num", default=0)


def _ids_after_image(batch: Batch) -> Tensor:
    ids = _ids(batch)
    return torch.cat((ids[:, :1].expand(-1, _latents(batch)), ids), 1)


def _image_places(batch: Batch) -> Tensor:
    mask = zeros(*batch.shape("input_ids"))
    mask[:, : _latents(batch)] = 1
    return mask


def _contexts(batch: Batch) -> Tensor:
    """Each question together with each document that was found for it (batch · documents, tokens)."""
    return ones(batch.size * batch.config.n_docs, batch.config.max_combined_length)


# -- images -----------------------------------------------------------------------------------------------------------


def _prompted(batch: Batch) -> Tensor:
    """An image that stands above another, each of half the height."""
    height, width = image_inputs.sides(batch)
    return unknown(batch.size, image_inputs.channels(batch), height // 2, width)


def _side_of_each(batch: Batch) -> Tensor:
    return ones(batch.size) * image_inputs.sides(batch)[0]


def _question_mask(batch: Batch) -> Tensor:
    return ones(*sequence_inputs.question(batch).shape)


def _merged_patches(batch: Batch) -> Tensor:
    """Patches that are merged already as they come, with their channels last."""
    _, height, width = image_inputs.grid(batch)
    merge, side = 2, 2 * whole(batch.vision, "patch_size", default=14)
    return unknown(batch.size * (height // merge) * (width // merge), side, side, image_inputs.channels(batch))


def _merged_grid(batch: Batch) -> Tensor:
    _, height, width = image_inputs.grid(batch)
    return rows([[1, height // 2, width // 2]] * batch.size)


# -- sound ------------------------------------------------------------------------------------------------------------


def _first_width(batch: Batch) -> int:
    """What the first layer takes of each step."""
    kinds = (nn.Conv1d, nn.Linear, nn.LayerNorm)
    first = next(module for module in batch.model.modules() if isinstance(module, kinds))
    if isinstance(first, nn.LayerNorm):
        return int(first.normalized_shape[-1])
    return first.in_channels if isinstance(first, nn.Conv1d) else first.in_features


def _frames(batch: Batch) -> Tensor:
    return unknown(batch.size, sequence_inputs.FRAMES, _first_width(batch))


def _codes(batch: Batch) -> Tensor:
    return unknown(batch.size, _first_width(batch), CODES)


def _heard_and_read(hop: int) -> dict[str, Maker]:
    """A sound and its spectrogram, of a frame per `hop` samples."""
    return {
        "input_values": lambda batch: unknown(batch.size, 1, sequence_inputs.SAMPLES),
        "input_features": lambda batch: unknown(batch.size, sequence_inputs.SAMPLES // hop, 160),
        "input_features_mask": lambda batch: ones(batch.size, sequence_inputs.SAMPLES // hop),
    }


_SPOKEN: dict[str, Maker] = {
    "duration_labels": lambda batch: ones(*batch.shape("input_ids")) * DURATION if batch.request.training else None,
    "pitch_labels": lambda batch: unknown(*batch.shape("input_ids"), 1) if batch.request.training else None,
    "energy_labels": lambda batch: unknown(*batch.shape("input_ids"), 1) if batch.request.training else None,
    "spectrogram_labels": lambda batch: (
        unknown(batch.size, batch.shape("input_ids")[1] * DURATION, 80) if batch.request.training else None
    ),
}
"""How a text is spoken, which a model is told while it trains and predicts otherwise."""


# -- trajectories -----------------------------------------------------------------------------------------------------


def _steps(batch: Batch) -> int:
    """As many as there are positions for the three tokens of each."""
    return max(1, (batch.request.seq_len or sequence_inputs.length_of(batch)) // 3)


EXTRA: Mapping[str, Mapping[str, Maker]] = {
    "blip_2_qformer": {
        "query_embeds": lambda batch: unknown(batch.size, 512, batch.config.hidden_size),
        "encoder_hidden_states": lambda batch: unknown(batch.size, 512, batch.config.encoder_hidden_size),
    },
    "bros": {"bbox": lambda batch: torch.zeros(*batch.shape("input_ids"), 8)},
    "clvp_decoder": {"input_ids": lambda batch: _ids(batch, batch.config.max_text_tokens - 2)},
    "decision_transformer": {
        "states": lambda batch: unknown(batch.size, _steps(batch), batch.config.state_dim),
        "actions": lambda batch: unknown(batch.size, _steps(batch), batch.config.act_dim),
        "rewards": lambda batch: unknown(batch.size, _steps(batch), 1),
        "returns_to_go": lambda batch: unknown(batch.size, _steps(batch), 1),
        "timesteps": lambda batch: torch.arange(_steps(batch)).expand(batch.size, -1).clone(),
        "attention_mask": lambda batch: ones(batch.size, _steps(batch)),
    },
    "dia": {"decoder_input_ids": _steps_of_codes},
    # Its experts take bfloat16 only where nothing says how many tokens an image makes.
    "dots3_note": {
        "input_ids": lambda batch: _ids(batch, image_token_id=64),
        "pixel_values": image_inputs.pixels,
        "image_grid_thw": image_inputs.MAKERS["image_grid_thw"],
    },
    "fastspeech2_conformer": _SPOKEN,
    "fastspeech2_conformer_with_hifigan": _SPOKEN,
    "flava_multimodal_model": {"hidden_states": lambda batch: unknown(batch.size, 512, batch.config.hidden_size)},
    "florence_vision": {"hidden_states": image_inputs.pixels},
    "fun_asr_nano": {"input_features": lambda batch: unknown(batch.size, sequence_inputs.FRAMES, 560)},
    "fun_asr_nano_encoder": {"input_features": _frames},
    "gemma3n_audio": {
        "audio_mel": sequence_inputs.spectrogram,
        "audio_mel_mask": lambda batch: zeros(*batch.shape("audio_mel")[:2]).bool(),
    },
    "gemma4_vision": {
        "pixel_values": lambda batch: unknown(batch.size, math.prod(image_inputs.grid(batch)), 3 * 16 * 16),
        "pixel_position_ids": image_inputs.patch_positions,
    },
    "granite_speech5_ctc": {"input_features": _frames},
    "granite_speech5_encoder": {"input_features": _frames},
    "granite_speech_encoder": {"hidden_states": lambda batch: unknown(batch.size, 512, batch.config.input_dim)},
    "granite_speech_plus_encoder": {"hidden_states": lambda batch: unknown(batch.size, 512, batch.config.input_dim)},
    "inkling2": {"pixel_values": _merged_patches, "image_grid_thw": _merged_grid},
    "inkling2_vision": {"pixel_values": _merged_patches, "image_grid_thw": _merged_grid},
    "janus_vqgan": {"pixel_values": lambda batch: unknown(batch.size, 3, 512, 512)},
    "kosmos-2": {"input_ids": _ids_after_image, "image_embeds_position_mask": _image_places},
    "kosmos-2.5": {
        "input_ids": _ids_after_image,
        "image_embeds_position_mask": _image_places,
        "height": _side_of_each,
        "width": _side_of_each,
    },
    "kyutai_speech_to_text": {"input_ids": _ids_and_codes},
    "lxmert": {
        "visual_feats": lambda batch: unknown(batch.size, REGIONS, batch.config.visual_feat_dim),
        "visual_pos": lambda batch: unknown(batch.size, REGIONS, batch.config.visual_pos_dim),
    },
    "mimi_decoder": {"latents": lambda batch: unknown(batch.size, 512, CODES)},
    "molmo2_vision": {"pixel_values": lambda batch: unknown(batch.size, 27 * 27, 3 * 14 * 14)},
    "muse_glimmer_assistant": {
        "noise_embeds": lambda batch: unknown(batch.size, 512, batch.config.hidden_size),
        "context_hidden_states": lambda batch: unknown(
            batch.size, 512, batch.config.hidden_size * len(batch.config.target_layer_ids)
        ),
    },
    "muse_spark_audio": {"input_values": lambda batch: unknown(batch.size, 15 * 1024)},
    "musicgen_decoder": {"input_ids": _rows_of_codes},
    "musicgen_melody_decoder": {"input_ids": _rows_of_codes},
    "nemotron3_5_transcribe_word_timestamp": {
        "inputs_embeds": lambda batch: unknown(batch.size, 512, batch.config.hidden_size)
    },
    "neucodec": _heard_and_read(480),
    "omdet-turbo": {
        "classes_input_ids": sequence_inputs.question,
        "classes_attention_mask": _question_mask,
        "tasks_input_ids": sequence_inputs.question,
        "tasks_attention_mask": _question_mask,
        "classes_structure": lambda batch: ones(batch.size),
    },
    "paddleocr_vl_vision": {"pixel_values": lambda batch: image_inputs.pixels(batch)[None]},
    "pi0": {
        "pixel_values": lambda batch: unknown(batch.size, 1, 3, *image_inputs.sides(batch)),
        "pixel_attention_mask": lambda batch: ones(batch.size, 1).bool(),
        "state": lambda batch: unknown(batch.size, batch.config.max_state_dim),
        "actions": lambda batch: unknown(batch.size, batch.config.chunk_size, batch.config.max_action_dim),
    },
    "pocket_tts_audio_tokenizer_decoder": {"latents": lambda batch: unknown(batch.size, 32, CODES)},
    "prompt_depth_anything": {"prompt_depth": lambda batch: unknown(batch.size, 1, *image_inputs.sides(batch))},
    "qwen2_5_omni_bigvgan": {
        "mel_spectrogram": lambda batch: unknown(batch.size, batch.config.mel_dim, sequence_inputs.FRAMES)
    },
    "rag": {
        "context_input_ids": _contexts,
        "context_attention_mask": _contexts,
        "doc_scores": lambda batch: unknown(batch.size, batch.config.n_docs),
    },
    "reformer": {"input_ids": _axial},
    "seggpt": {"pixel_values": _prompted, "prompt_pixel_values": _prompted, "prompt_masks": _prompted},
    "vibevoice_acoustic_tokenizer_decoder": {"hidden_states": _codes},
    "vibevoice_acoustic_tokenizer_encoder": {
        "hidden_states": lambda batch: unknown(batch.size, 1, sequence_inputs.SAMPLES)
    },
    "video_llama_3_vision": {"merge_sizes": lambda batch: ones(batch.size)},
    # It hears a sound at each of its tokens, which are half as many as the sound has frames, by its factor.
    "voxtral_realtime": {
        "input_ids": lambda batch: _ids(batch, sequence_inputs.FRAMES // (2 * batch.config.downsample_factor))
    },
    # Each of a clip's frames is an image.
    "xclip_vision_model": {"pixel_values": lambda batch: unknown(8 * batch.size, 3, *image_inputs.sides(batch))},
    "xcodec2": _heard_and_read(320),
    "xmod": {"lang_ids": lambda batch: zeros(batch.size)},
}
"""What is given to each type, by the argument's name."""


def inputs(case: Case) -> Callable[[int, bool], Any] | None:
    """What makes the inputs of a case that memsize makes none for; None where it makes them itself."""
    if case.library != "hf" or case.name not in EXTRA:
        return None

    def make(batch_size: int, training: bool) -> Any:
        module = load(case.target, case.arguments).module
        return config_input_maker(module, {}, EXTRA[case.name]).make(InputRequest(batch_size, training=training))

    return make
