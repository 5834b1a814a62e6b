"""Text: ids, their masks and types, and where each word is on a page.

Ids are valid tokens that mean nothing special, and end with the end of a sentence, which some classifiers look for;
a prompt goes on instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memsize.loading.hubs.huggingface_inputs.model_config import Batch, Maker, entry, ones, part, rows, zeros

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


def ids(batch: Batch) -> Tensor:
    """Ids (batch, tokens); the placeholders of what is perceived come first, between their start and end tokens."""
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
    """One for each token that stands for an image, 2 for a clip, 0 for text; None for models of text alone, which take
    that for granted.
    """
    if not batch.mixes or not (batch.tokens or batch.request.training):
        return None
    found = ids(batch)
    kinds = zeros(*found.shape)
    for name in batch.tokens:
        kinds[found == getattr(batch.config, name)] = 2 if name.startswith("video") else 1
    return kinds


def question(batch: Batch) -> Tensor:
    """A short text (batch, tokens)."""
    return _plain(batch, batch.number("task_seq_len", default=min(QUESTION, _room((batch.text,), _LIMITS))))


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
}


# -- lengths and tokens -----------------------------------------------------------------------------------------------


def length_of(batch: Batch) -> int:
    """Tokens of a text: `SEQ_LEN`, or as many as have a position beside what is perceived."""
    taken = sum(batch.tokens.values())
    room = min(_room((batch.text, batch.config), _LIMITS), _room_behind_padding(batch.model))
    # Beside the placeholders stand their start and their end.
    return max(1, min(SEQ_LEN, room - (taken + 2 if taken and room > taken + 2 else 0)))


def _room(configs: tuple[Any, ...], names: tuple[str, ...]) -> int:
    """How many tokens have a position: the least of what `configs` say, each by the first of `names` that it has."""

    def stated(config: Any) -> int:
        limits = (getattr(config, name, None) for name in names)
        fits = (limit for limit in limits if isinstance(limit, int) and not isinstance(limit, bool) and limit > 1)
        return next(fits, _ENDLESS)

    return min(map(stated, configs))


def _room_behind_padding(model: Any) -> int:
    """Tokens that have a position where these are counted from behind the one that pads, as RoBERTa's kin do."""
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
