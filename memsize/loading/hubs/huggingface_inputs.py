"""Inputs that suit a transformers model, read off its forward's parameters and its config.

This module chooses the arguments of a forward; `sequence_inputs` and `image_inputs` make them from a config. An
argument that only one unusual class takes is not made: such a model's inputs come from the user, and the error names
them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from memsize.errors import InputError
from memsize.loading.hubs import image_inputs, sequence_inputs
from memsize.loading.hubs.input_batch import PERCEIVED, Batch, Maker, entry
from memsize.loading.weightless import SMALLEST, Weightless
from memsize.spec.inputs import InputMaker, InputRequest
from memsize.torch_internals.pytree import arguments_in

MAKERS = sequence_inputs.MAKERS | image_inputs.MAKERS
"""A function for each argument, by its name in the forward. It returns None where a model does without."""

ALWAYS = frozenset({
    "actions", "bbox", "classes_input_ids", "context_attention_mask", "context_input_ids", "doc_scores",
    "duration_labels", "inputs", "past_observed_mask", "past_time_features", "past_values", "prompt_depth",
    "returns_to_go", "rewards", "spectrogram", "states", "static_categorical_features", "static_real_features",
    "timesteps", "visual_feats", "visual_pos",
})  # fmt: skip
"""What a forward cannot do without although it has a default."""

BESIDE: dict[str, tuple[str, ...]] = {
    "input_ids": (
        "attention_mask", "decoder_input_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids",
    ),
    "inputs": ("attention_mask", "decoder_input_ids"),
    "pixel_values": (
        "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask", "decoder_input_ids", "grid_thw",
        "high_res_pixel_values", "image_attention_mask", "image_embeds_position_mask", "image_grid_hw",
        "image_grid_thw", "image_grids", "image_merge_sizes", "image_num_crops", "image_position_ids", "image_sizes",
        "image_token_pooling", "pixel_attention_mask", "spatial_shapes", "target_sizes",
    ),
    "image_pixel_values": ("image_sizes",),
    "flattened_patches": ("attention_mask", "decoder_input_ids", "height", "image_embeds_position_mask", "width"),
    "hidden_states": ("grid_thw",),
    "input_features": ("decoder_input_ids", "feature_attention_mask", "input_features_mask", "padding_mask"),
    "input_values": ("decoder_input_ids", "padding_mask", "pixel_values_videos"),
    "past_values": ("future_time_features", "future_values"),
}  # fmt: skip
"""What goes with an argument, where the forward takes it and its maker sees a need."""

UNLIKE = {
    **dict.fromkeys(("kyutai_speech_to_text", "musicgen_decoder", "musicgen_melody_decoder"), "input_ids"),
    **dict.fromkeys(("inkling2_vision", "janus_vqgan", "molmo2_vision", "paddleocr_vl_vision"), "pixel_values"),
    **dict.fromkeys(("fun_asr_nano_encoder", "granite_speech5_ctc", "granite_speech5_encoder"), "input_features"),
    **dict.fromkeys(("muse_spark_audio", "neucodec", "xcodec2"), "input_values"),
    "bros": "bbox", "dia": "decoder_input_ids", "voxtral_realtime": "input_ids", "xclip_vision_model": "pixel_values",
}  # fmt: skip
"""Model types that take an argument in a form of their own, which no maker here makes."""

_EITHER = ("pop2piano",)
"""Models whose ids and sound exclude each other."""

_SEQUENCES = frozenset(
    {"input_ids", "decoder_input_ids", "input_values", "input_features", "inputs", "audio_input_features"}
)
"""Arguments with a length that a user can choose: text, raw sound, spectrograms."""

_COUNTS = ("image_seq_length", "mm_tokens_per_image", "num_image_tokens", "num_query_tokens")
"""Entries with the number of tokens of an image, for models without a method that embeds images."""


def config_input_maker(
    model: Any, preprocessor: Mapping[str, Any], extra: Mapping[str, Maker] | None = None
) -> InputMaker:
    """Return the maker of inputs for `model`; `preprocessor` holds its processor's config, if there is one.

    `extra` makes arguments that are not known here, or are of another form than usual. Making the inputs raises
    `InputError` where memsize does not know one that the forward takes.
    """
    extra = extra or {}
    makers = {**MAKERS, **extra}
    one = Batch(model, preprocessor, InputRequest(), makers)
    tokens, why = _placeholders(one) if one.mixes else ({}, "")
    names = tuple(dict.fromkeys((*_chosen(one, tokens), *(name for name in extra if name in one.taken))))
    # A tower takes hidden states beside their grid; any other takes some of its own.
    unmade = {UNLIKE.get(one.kind)} | (set() if "grid_thw" in one.taken else {"hidden_states"})
    missing = [name for name in names if name not in extra and (name not in MAKERS or name in unmade)]

    def make(request: InputRequest) -> dict[str, Tensor]:
        if missing or not names:
            raise InputError(_no_inputs(one, names, missing))
        if request.seq_len is not None and not _SEQUENCES.intersection(names):
            raise InputError(f"{type(model).__name__} takes images: --seq-len has no effect")
        batch = Batch(model, preprocessor, request, makers, tokens)
        arguments = {name: batch.get(name) for name in names}
        return {name: value for name, value in arguments.items() if value is not None}

    return InputMaker(make, note=_left_out(one, names, why))


def _no_inputs(batch: Batch, names: tuple[str, ...], missing: list[str]) -> str:
    name = type(batch.model).__name__
    if type(batch.model).forward is nn.Module.forward:
        return f"{name} has no forward of its own, it only generates: give the class of one of its parts"
    lacks = f" ({', '.join(missing)})" if missing else ""
    return (
        f"memsize knows no inputs for {name}{lacks}: its forward takes {', '.join(names or [*batch.taken][:3])}; give "
        "each with --input name=SHAPE:DTYPE, without the batch dimension, or all of them with --inputs FUNCTION (in "
        "Python: input_data)"
    )


def _left_out(batch: Batch, names: tuple[str, ...], why: str) -> str | None:
    left = [name for name in PERCEIVED if name in batch.taken and name not in names]
    if "input_ids" not in names or not left or not batch.mixes:
        return None
    name, others = type(batch.model).__name__, " and ".join(left)
    if set(names) & set(PERCEIVED):
        return f"{', '.join(batch.beside)} is all that {name} gets besides its text: --inputs can add {others}"
    reason = f", since its other inputs fail ({why})" if why else ""
    return f"{name} gets only text{reason}: --inputs can add {others}"


# -- which arguments --------------------------------------------------------------------------------------------------


def _chosen(batch: Batch, tokens: Mapping[str, int]) -> Iterator[str]:
    """The names of the arguments to make: the leading ones, the required ones, and their companions.

    What is perceived stands beside a text only where it is known how many `tokens` it takes there.
    """
    required = [n for n, parameter in batch.taken.items() if parameter.default is parameter.empty or n in ALWAYS]
    chosen = dict.fromkeys((*_leading(batch, bool(tokens) or not batch.mixes), *required))
    beside = {name for owner in chosen for name in BESIDE.get(owner, ()) if name in batch.taken}
    yield from (*chosen, *sorted(beside - chosen.keys()))


def _leading(batch: Batch, perceives: bool) -> Iterator[str]:
    """The main input, or for a model that reads both, text and an image, clip or sound."""
    if "input_ids" in batch.taken and "inputs" not in batch.taken and batch.kind not in _EITHER:
        yield "input_ids"
        if perceives:
            yield from batch.beside
    elif batch.main in batch.makers and batch.main in batch.taken:
        yield batch.main
    elif not any(name in ALWAYS for name in batch.taken):
        companions = {name for beside in BESIDE.values() for name in beside}
        yield from [name for name in batch.taken if name in batch.makers and name not in companions][:1]


# -- how many tokens an image, a clip or a sound takes among the ids --------------------------------------------------


def _placeholders(batch: Batch) -> tuple[dict[str, int], str]:
    """The number of placeholder tokens of one sample, by the config's entry for the token, and if it is unknown, why.

    Processors work that out, each in its own way. Here the model itself is run without data: the embeddings that its
    `get_image_features` returns for one image replace those tokens.
    """
    (name,) = batch.beside
    method, entries = PERCEIVED[name]
    token = next((token for token in entries if isinstance(getattr(batch.config, token, None), int)), None)
    if token is None:
        return {}, ""
    count, why = 0, ""
    # A head only hands on what its body does.
    owner = next((it for it in (getattr(batch.model, "base_model", None), batch.model) if hasattr(it, method)), None)
    if owner is not None:
        try:
            count = _embedded(batch, name, owner, method)
        except Exception as error:  # the model's own code, in its own words
            lines = str(error).strip().splitlines()
            why = lines[0] if lines else type(error).__name__
    elif name == "pixel_values":
        stated = entry((batch.config,), *_COUNTS)
        count = stated if isinstance(stated, int) else 0
    return ({token: count} if count else {}), why


def _embedded(batch: Batch, name: str, owner: Any, method: str) -> int:
    """The embeddings that the method of `owner` makes of the sample's `name`, counted in tokens of the text's width."""
    # What the code keeps on its modules stays on a copy, whose large weights have no values: nothing is computed.
    tensors = (*batch.model.parameters(), *batch.model.buffers())
    twins: dict[int, Any] = {id(t): t.detach().to("meta") if t.numel() >= SMALLEST else t for t in tensors}
    embed = getattr(copy.deepcopy(owner, twins).eval(), method)
    taken = inspect.signature(embed).parameters
    arguments = {n: batch.get(n) for n in taken if n == name or (n in batch.makers and n in batch.taken)}
    # Real numbers, since some models look for images that are blank, and leave them out.
    dtype = next(tensor.dtype for tensor in tensors if tensor.is_floating_point())
    real = {n: torch.ones(v.shape, dtype=dtype) if v.is_meta else v for n, v in arguments.items() if v is not None}
    with torch.no_grad(), Weightless(left_out=True):
        features = embed(**real)
    pooled = getattr(features, "pooler_output", None)
    pooled = getattr(features, "last_hidden_state", None) if pooled is None else pooled
    embeddings = list(arguments_in([features if pooled is None else pooled]))
    width = batch.model.get_input_embeddings().weight.shape[-1]
    if any(tensor.shape[-1] != width for tensor in embeddings):
        raise ValueError("images or audio are embedded in another width than the text")
    return int(sum(tensor.numel() for tensor in embeddings) // width)
