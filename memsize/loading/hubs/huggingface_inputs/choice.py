"""Which of a forward's arguments are given.

Those without a default; the model's main input, or text beside an image or a sound where it reads both; and what goes
with them, such as a mask or the grid of an image's patches.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from memsize.errors import InputError

# What registers the makers:
from memsize.loading.hubs.huggingface_inputs import images, parts, prompts, series, sound, text  # noqa: F401
from memsize.loading.hubs.huggingface_inputs.makers import MAKERS
from memsize.loading.hubs.huggingface_inputs.need import Need
from memsize.loading.hubs.huggingface_inputs.placeholders import has_placeholders, placeholders
from memsize.loading.hubs.huggingface_inputs.text import is_read
from memsize.spec.request import Request

PERCEIVED = (
    "pixel_values", "image_pixel_values", "flattened_patches", "pixel_values_videos", "input_features", "input_values",
    "audio_input_features",
)  # fmt: skip
"""Images, clips and sound, the first of which goes beside a text."""

ALWAYS = frozenset({
    "actions", "bbox", "context_attention_mask", "context_input_ids", "doc_scores", "inputs", "past_observed_mask",
    "past_time_features", "past_values", "prompt_depth", "returns_to_go", "rewards", "spectrogram", "states",
    "static_categorical_features", "static_real_features", "timesteps", "visual_feats", "visual_pos",
})  # fmt: skip
"""What a forward cannot do without although it has a default."""

WITH: dict[str, tuple[str, ...]] = {
    "aspect_ratio_ids": ("pixel_values",),
    "aspect_ratio_mask": ("pixel_values",),
    "attention_mask": ("input_ids", "inputs", "states", "flattened_patches"),
    "height": ("flattened_patches",),
    "width": ("flattened_patches",),
    "cross_attention_mask": ("pixel_values",),
    "decoder_input_ids": ("input_ids", *PERCEIVED, "inputs"),
    "duration_labels": ("input_ids",),
    "encoder_hidden_states": ("query_embeds",),
    "energy_labels": ("input_ids",),
    "feature_attention_mask": ("input_features",),
    "future_time_features": ("past_values",),
    "future_values": ("past_values",),
    "grid_thw": ("hidden_states", "pixel_values"),
    "high_res_pixel_values": ("pixel_values",),
    "image": ("bbox",),
    "image_attention_mask": ("pixel_values",),
    "image_embeds_position_mask": ("pixel_values", "flattened_patches"),
    "image_grid_hw": ("pixel_values",),
    "image_grid_thw": ("pixel_values",),
    "image_grids": ("pixel_values",),
    "image_merge_sizes": ("pixel_values",),
    "image_num_crops": ("pixel_values",),
    "image_position_ids": ("pixel_values",),
    "image_sizes": ("pixel_values", "image_pixel_values"),
    "image_token_pooling": ("pixel_values",),
    "input_features_mask": ("input_features",),
    "lang_ids": ("input_ids",),
    "mm_token_type_ids": ("input_ids",),
    "moe_mm_token_type_ids": ("input_ids",),
    "pixel_attention_mask": ("pixel_values",),
    "pixel_values_videos": ("input_values",),
    "padding_mask": ("input_values", "input_features"),
    "pitch_labels": ("input_ids",),
    "spatial_shapes": ("pixel_values",),
    "spectrogram_labels": ("input_ids",),
    "target_sizes": ("pixel_values",),
    "text_inputs": ("pixel_values",),
    "token_type_ids": ("input_ids",),
}
"""What is given beside any of others, where the forward takes it and its maker sees a need."""


_APART = ("cross_attention_mask", "image_encoder_embeddings")
"""Arguments of models whose text looks at images across, although their configs name a token for them."""


_EITHER = ("pop2piano",)
"""Models whose ids and sound exclude each other."""


class Choice:
    """The arguments that one model is given."""

    def __init__(self, model: Any, preprocessor: Mapping[str, Any]) -> None:
        self.model = model
        retrieves = str(model.config.model_type).startswith("col")  # ColPali's kin are another model with another head
        self.config = getattr(model.config, "vlm_config", model.config) if retrieves else model.config
        self.preprocessor = preprocessor
        taken = inspect.signature(model.forward).parameters.values()
        self.taken = {p.name: p for p in taken if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        main = getattr(model, "main_input_name", "input_ids")
        self.main = main if isinstance(main, str) else main[0]

    def inputs(self, request: Request) -> dict[str, Any]:
        """The arguments of one call; raises `InputError` where they are not known."""
        missing = [name for name in self.names if name not in MAKERS]
        if missing or not self.names:
            raise InputError(self._asked(missing))
        if request.seq_len is not None and not any(is_read(name, self) for name in self.names):
            raise InputError(f"{type(self.model).__name__} takes images: --seq-len means nothing to it")
        need = Need(self, request)
        made = {name: need.get(name) for name in self.names}
        return {name: value for name, value in made.items() if value is not None}

    def _asked(self, missing: list[str]) -> str:
        from torch import nn

        from memsize.loading.signature import wanted_inputs

        name = type(self.model).__name__
        if type(self.model).forward is nn.Module.forward:
            return f"{name} has no forward of its own, it only generates: give the class of one of its parts"
        lacks = f" ({', '.join(missing)})" if missing else ""
        return f"memsize knows no inputs for {name}{lacks}: {wanted_inputs(self.model)}"

    @property
    def note(self) -> str | None:
        """What the model could read and is not given."""
        left = [name for name in PERCEIVED if name in self.taken and name not in self.names]
        if "input_ids" not in self.names or not left or not self.mixes:
            return None
        name, others = type(self.model).__name__, " and ".join(left)
        if set(self.names) & set(PERCEIVED):
            return f"{', '.join(self.beside)} alone is given to {name} beside its text: --inputs can add {others}"
        why = self._counted[1]
        reason = f", since what it perceives does not pass ({why})" if why else ""
        return f"only text is given to {name}{reason}: --inputs can add {others}"

    # -- which --------------------------------------------------------------------------------------------------------

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The arguments, each before what depends on it."""
        chosen = dict.fromkeys((*self._leading(), *self._required()))
        for name, owners in WITH.items():
            if name in self.taken and any(owner in chosen for owner in owners):
                chosen[name] = None
        return tuple(chosen)

    def _required(self) -> Iterator[str]:
        for name, parameter in self.taken.items():
            if parameter.default is parameter.empty or name in ALWAYS:
                yield name

    def _leading(self) -> Iterator[str]:
        """The main input; text and what is perceived beside it where the model reads both."""
        if "input_ids" in self.taken and "inputs" not in self.taken and self.config.model_type not in _EITHER:
            yield "input_ids"
            if not self.mixes or self.tokens:
                yield from self.beside
        elif self.main in MAKERS and self.main in self.taken:
            yield self.main
        elif not any(name in ALWAYS for name in self.taken):
            yield from [name for name in self.taken if name in MAKERS and name not in WITH][:1]

    @property
    def beside(self) -> tuple[str, ...]:
        """What the model perceives beside a text: an image, else a clip, else a sound."""
        return tuple(name for name in PERCEIVED if name in self.taken)[:1]

    @cached_property
    def mixes(self) -> bool:
        """Whether images or sound stand among the ids as tokens of their own."""
        apart = any(name in self.taken for name in _APART)
        return has_placeholders(self.config) and bool(self.beside) and not apart

    @property
    def tokens(self) -> dict[str, int]:
        """How many tokens among the ids each thing perceived takes; empty where the model does not tell."""
        return self._counted[0]

    @cached_property
    def _counted(self) -> tuple[dict[str, int], str]:
        return placeholders(self) if self.mixes else ({}, "")

    def sample(self) -> Need:
        """The need of one sample without its text."""
        return Need(self, replace(Request(), batch_size=1))
