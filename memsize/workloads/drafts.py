"""Tokens that are proposed before each step of a generation: by an assistant of the model, or found in its prompt."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from weakref import ref

import torch
from torch import nn

from memsize.errors import InputError
from memsize.known_values.values import set_filled
from memsize.spec.generation import Draft
from memsize.workloads.caches import CachedLayer

_ASSISTANT: Final = "assistant"
"""The name of the module that a model has as its assistant."""
OF_ASSISTANT: Final = " of the assistant"
_NO_TOKEN: Final = -1
"""A token that no model picks."""


@contextmanager
def assisted(model: nn.Module, assistant: nn.Module) -> Iterator[None]:
    """While open, the model has the assistant as a module of its own: what is done to its layers is done to both.

    Raises `InputError` where transformers would ask for the tokenizers of both.
    """
    theirs, own = _vocabulary(assistant), _vocabulary(model)
    if theirs != own:
        raise InputError(
            f"the assistant has a vocabulary of {theirs} tokens, the model one of {own}: transformers would translate "
            "between their tokenizers, which is not followed"
        )
    if hasattr(model, _ASSISTANT):
        raise InputError(f"the model has an attribute {_ASSISTANT} of its own: there is no place for another")
    model.add_module(_ASSISTANT, assistant)
    try:
        yield
    finally:
        delattr(model, _ASSISTANT)


def refuse_own_generation(model: nn.Module) -> None:
    """Raise `InputError` where no generation of transformers checks tokens that are proposed."""
    if not hasattr(model, "_get_candidate_generator"):
        raise InputError(f"{type(model).__name__} generates in its own way: only models of transformers are assisted")


def assistant_of(model: nn.Module) -> Any:
    """The model's assistant, None where it has none."""
    return model._modules.get(_ASSISTANT)


def is_assistants(layer: str) -> bool:
    """Whether a layer of a record is one of the assistant's."""
    return layer.partition(".")[0] == _ASSISTANT


def assistants(layers: Iterable[CachedLayer]) -> Iterator[CachedLayer]:
    """The layers of an assistant's cache, told from those of the model."""
    return (layer._replace(kind=f"{layer.kind}{OF_ASSISTANT}") for layer in layers)


def proposed(assistant: Any) -> int | None:
    """How many tokens the assistant's own settings let it propose; None where they don't say."""
    count = getattr(getattr(assistant, "generation_config", None), "num_assistant_tokens", None)
    return count if isinstance(count, int) else None


def assisting(model: nn.Module) -> dict[str, object]:
    """The argument of `generate` for the model's assistant, which always proposes as many tokens; none where it has
    none.
    """
    assistant = assistant_of(model)
    if assistant is None:
        return {}
    assistant.generation_config = endless(assistant.generation_config)
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    return {"assistant_model": assistant}


def endless(config: Any) -> Any:
    """The settings of a generation in which no sequence ends early: the token that ends one is a value."""
    config = copy.deepcopy(config)
    config.eos_token_id, config.max_length = None, None
    for token in ("pad_token_id", "bos_token_id", "decoder_start_token_id"):
        if not isinstance(getattr(config, token, None), int):  # which one it is makes no difference
            setattr(config, token, 0)
    return config


def never_right(draft: Draft | None, begins: Callable[[], None], candidates: Any) -> Any:
    """Patch the candidate generator of a `draft` to propose tokens that the model never picks, and to call `begins`
    before. A prompt in which tokens are looked up is made to repeat itself, so that there are some.
    """
    itself, propose = ref(candidates), type(candidates).get_candidates  # no circle, which would keep its tensors

    def get_candidates(tokens: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        begins()
        if draft and draft.assistant is None:
            set_filled(tokens, 0)
        proposed, logits = propose(itself(), tokens, **kwargs)
        if proposed is not tokens:
            set_filled(proposed, _NO_TOKEN)
        return proposed, logits

    if draft is not None:  # and not a loop of one's own
        candidates.get_candidates = get_candidates
    return candidates


def _vocabulary(model: nn.Module) -> int | None:
    """The size of a model's vocabulary, as transformers reads it."""
    config: Any = getattr(model, "config", None)
    return getattr(config.get_text_config(), "vocab_size", None) if config is not None else None
