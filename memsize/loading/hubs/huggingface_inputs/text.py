"""Text: ids, their masks and kinds, and where each word stands on a page.

Ids are valid tokens that mean nothing special, and end with the end of a sentence, which some classifiers look for.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from memsize.loading.hubs.huggingface_inputs.makers import makes
from memsize.loading.hubs.huggingface_inputs.need import Need, ones, unknown, zeros
from memsize.loading.hubs.huggingface_inputs.reading import entry, part

if TYPE_CHECKING:
    from memsize.loading.hubs.huggingface_inputs.choice import Choice

SEQ_LEN = 512
"""Tokens of a text, where the model has room for them."""
QUERY = 16
"""Tokens of a name, a task or a question beside an image."""
_ENDLESS = 2**30

_LIMITS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length",
    "max_text_len", "max_length", "max_target_positions", "max_source_positions",
)  # fmt: skip
_STARTS = ("vision_start_token_id", "image_start_token_id", "boi_token_id", "boi_token_index")
_ENDS = ("vision_end_token_id", "image_end_token_id", "eoi_token_id", "eoi_token_index")
_CODES = {"kyutai_speech_to_text": ("num_codebooks",)}
"""The entry that says how many codes of sound stand beside each token, by model type."""
_SPOKEN = ("voxtral_realtime",)
"""Models that hear a sound at each of their tokens."""
_LATENTS = ("latent_query_num",)
_ROWS = {"musicgen_decoder": ("num_codebooks",), "musicgen_melody_decoder": ("num_codebooks",)}
"""The entry that says how many rows of codes one sample has."""
_READ = frozenset({
    "input_ids", "decoder_input_ids", "input_values", "input_features", "inputs", "audio_input_features", "states",
})  # fmt: skip


def is_read(name: str, choice: Choice) -> bool:
    """Whether the argument `name` has a length that a user can choose: text, raw sound, spectrograms."""
    return name in _READ


@makes("input_ids", "protein_input_ids")
def ids(need: Need) -> Any:
    """Ids (batch, tokens); those of something perceived stand first where the model has it among them."""
    import torch

    length = need.request.seq_len or (_heard(need) if need.kind in _SPOKEN else length_of(need))
    text = torch.full((need.batch, length), plain_token(need.config, need.text), dtype=torch.int64)
    end = _token(need.text, "eos_token_id")
    if end is not None:
        text[:, -1] = end
    beside = _CODES.get(need.kind, ())
    if beside:  # codes of sound stand beside each token
        text = text[..., None].expand(-1, -1, 1 + need.number(*beside, default=0)).clone()
    if "image_embeds_position_mask" in need.taken:
        text = torch.cat((text[:, :1].expand(-1, need.number(*_LATENTS, default=0)), text), 1)
    if need.kind in _ROWS:  # each codebook of sound is a row
        text = text.repeat(need.number(*_ROWS[need.kind], default=1), 1)
    for name, count in need.choice.tokens.items():
        first, last = (_of_config(need, names) for names in (_STARTS, _ENDS))
        stands = [*first, *[getattr(need.config, name)] * count, *last]
        text = torch.cat((torch.tensor([stands], dtype=torch.int64).expand(need.batch, -1), text), 1)
    return text


def _heard(need: Need) -> int:
    """Tokens of a sound that stands at each of them."""
    from memsize.loading.hubs.huggingface_inputs.sound import FRAMES

    return FRAMES // (2 * need.number("downsample_factor", default=1))


@makes("inputs")
def either(need: Need) -> Any:
    """What has one name for several things: sound where an encoder reads that, else the ids of a text."""
    from memsize.loading.hubs.huggingface_inputs.sound import wave

    return wave(need) if need.kind.startswith("speech") else ids(need)


@makes("attention_mask", "protein_attention_mask")
def attention_mask(need: Need) -> Any:
    """One for each token (batch, tokens), for trajectories one for each step, for patches one for each."""
    leads = ("states", "flattened_patches", "inputs", "input_ids")
    return ones(*need.get(next(name for name in leads if name in need.taken)).shape[:2])


@makes("decoder_input_ids")
def decoder_ids(need: Need) -> Any:
    """Ids of the decoder (batch, tokens), where the model has one."""
    import torch

    if need.choice.main == "input_ids" and not (need.config.is_encoder_decoder or need.text.is_encoder_decoder):
        return None
    config = part(need.config, ("decoder",))
    shape = codebooks(config)
    room = min(_room((config, need.text), ("max_target_positions", *_LIMITS)), _counted_room(need.model))
    length = min(need.request.seq_len or SEQ_LEN, room)
    return torch.full((need.batch, length, *shape), plain_token(need.config, config), dtype=torch.int64)


def codebooks(config: Any) -> tuple[int, ...]:
    """The codes that stand side by side at each step, for decoders of sound."""
    count = entry((config,), "num_channels", "num_codebooks") if config.model_type.startswith("dia") else None
    return (count,) if isinstance(count, int) else ()


@makes("lang_ids")
def languages(need: Need) -> Any:
    """The first of the model's languages, for each text; None for models of one."""
    return zeros(need.batch) if getattr(need.config, "languages", None) else None


@makes("image_embeds_position_mask")
def image_places(need: Need) -> Any:
    """One where an image stands among the ids, which is before the text."""
    mask = zeros(*need.get("input_ids").shape)
    mask[:, : need.number(*_LATENTS, default=0)] = 1
    return mask


@makes("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
def token_types(need: Need) -> Any:
    """One for each token that stands for an image, 2 for a clip, 0 for text; None for models of text alone, which take
    that for granted.
    """
    if not need.choice.mixes or not (need.choice.tokens or need.request.training):
        return None
    found = need.get("input_ids")
    kinds = zeros(*found.shape)
    for name in need.choice.tokens:
        kinds[found == getattr(need.config, name)] = 2 if name.startswith("video") else 1
    return kinds


@makes("qformer_input_ids", "tasks_input_ids", "task_inputs", "classes_input_ids")
def query(need: Need) -> Any:
    """A short text (batch, tokens)."""
    import torch

    length = need.number("task_seq_len", default=min(QUERY, _room((need.text,), _LIMITS)))
    return torch.full((need.batch, length), plain_token(need.config, need.text), dtype=torch.int64)


@makes("qformer_attention_mask", "tasks_attention_mask", "classes_attention_mask")
def query_mask(need: Need) -> Any:
    return ones(*query(need).shape)


@makes("classes_structure")
def classes(need: Need) -> Any:
    """How many names of classes each image is asked for: one."""
    return ones(need.batch)


@makes("bbox")
def boxes(need: Need) -> Any:
    """Where each token stands on the page (batch, tokens, 4), from 0 to 1000; with all 4 corners where it wants 8."""
    found = need.get("input_ids")
    corners = 8 if need.kind == "bros" else 4
    return zeros(*found.shape, corners) if corners == 4 else zeros(*found.shape, corners, dtype="float32")


# -- lengths and tokens -----------------------------------------------------------------------------------------------


def length_of(need: Need) -> int:
    """Tokens of a text: `SEQ_LEN`, or as many as have a position beside what is perceived."""
    axial = getattr(need.config, "axial_pos_shape", None)
    if axial and need.request.training:
        return math.prod(axial)  # a grid of positions, which is trained as a whole
    taken = sum(need.choice.tokens.values())
    framed = _room((part(need.config, ("decoder",)),), ("max_text_tokens",)) - 2  # CLVP adds a beginning and an end
    room = min(_room((need.text, need.config), _LIMITS), framed, _counted_room(need.model))
    return max(1, min(SEQ_LEN, room - (taken + 2 if taken and room > taken + 2 else 0)))


def _room(configs: tuple[Any, ...], names: tuple[str, ...]) -> int:
    """How many tokens have a position. RoBERTa's kin begin to count behind the token that pads."""
    return min(_stated_room(config, names) for config in configs)


def _stated_room(config: Any, names: tuple[str, ...]) -> int:
    for name in names:
        limit = getattr(config, name, None)
        if isinstance(limit, int) and not isinstance(limit, bool) and limit > 1:
            return limit
    return _ENDLESS


def _counted_room(model: Any) -> int:
    """Tokens that have a position where these are counted from behind the one that pads, as RoBERTa's kin do."""
    holders = [module for module in model.modules() if isinstance(getattr(module, "padding_idx", None), int)]
    tables = [(holder.padding_idx, getattr(holder, "position_embeddings", None)) for holder in holders]
    tables += [(table.padding_idx, table) for table in holders if type(table).__name__.endswith("PositionalEmbeddings")]
    sizes = [(pad, getattr(table, "weight", None)) for pad, table in tables]
    rooms = [len(weight) - pad - 1 for pad, weight in sizes if weight is not None]
    ahead = 1 if getattr(model.config, "ngram", None) else 0  # ProphetNet looks at one position more than it is given
    return min([room - ahead for room in rooms if room > ahead], default=_ENDLESS)


def _token(config: Any, name: str) -> int | None:
    token: Any = getattr(config, name, None)
    token = token[0] if isinstance(token, (list, tuple)) and token else token
    vocabulary = getattr(config, "vocab_size", None)
    fits = isinstance(token, int) and token >= 0 and (not isinstance(vocabulary, int) or token < vocabulary)
    return token if fits else None


def _of_config(need: Need, names: tuple[str, ...]) -> list[int]:
    found, size = entry((need.config,), *names), getattr(need.text, "vocab_size", None)
    return [found] if isinstance(found, int) and isinstance(size, int) and 0 <= found < size else []


def plain_token(*configs: Any) -> int:
    """The smallest id that no config names as a special token."""
    entries = [item for config in configs for item in vars(config).items()]
    special = {v for name, v in entries if name.endswith(("token_id", "token_index")) and isinstance(v, int)}
    return next(token for token in range(1, len(special) + 2) if token not in special)


@makes("text_inputs")
def described(need: Need) -> Any:
    """What OneFormer compares its queries with while it trains (batch, texts, tokens); None where it is not to."""
    if not getattr(need.config, "is_training", False):
        return None
    import torch

    texts = need.number("num_queries", default=1) - need.number("text_encoder_n_ctx", default=0)
    shape = (need.batch, texts, need.number("text_encoder_context_length", default=QUERY))
    return torch.full(shape, plain_token(need.config), dtype=torch.int64)


# -- what a retriever found -------------------------------------------------------------------------------------------


@makes("context_input_ids")
def contexts(need: Need) -> Any:
    """Each question together with each document that was found for it (batch · documents, tokens)."""
    import torch

    length = need.number("max_combined_length", default=SEQ_LEN)
    shape = (need.batch * need.number("n_docs", default=1), length)
    return torch.full(shape, plain_token(need.config, need.text), dtype=torch.int64)


@makes("context_attention_mask")
def context_mask(need: Need) -> Any:
    return ones(*need.get("context_input_ids").shape)


@makes("doc_scores")
def scores(need: Need) -> Any:
    """How well each document fits its question (batch, documents)."""
    return unknown(need.batch, need.number("n_docs", default=1))
