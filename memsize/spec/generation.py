"""What a generation is: how many tokens come in and out, and how the KV cache is held. Parsed and checked once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from memsize.errors import InputError, UnknownInputError
from memsize.spec.vary import Vary

CACHES: Final = ("dynamic", "static", "quantized", "offloaded", "offloaded_static")
"""The caches of transformers' `generate`, by its argument `cache_implementation`. A sliding window is the model's own:
its layers are held so in all but the quantized ones."""

GENERATED: Final = ("as-given", "int8-weight", "int4-weight")
"""The usual scenarios of a generation."""


PROMPT: Final = 512
"""Tokens of a prompt where nothing is said of it."""


DRAFTED: Final = 20
"""Tokens that transformers proposes before each step unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What proposes `tokens` tokens before each step of a model, which checks them all at once: the model named
    `assistant`; None where they are looked up in the prompt.
    """

    assistant: str | None = None
    tokens: int = DRAFTED

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InputError(f"a number of proposed tokens of {self.tokens}: it must be at least 1")

    @classmethod
    def of(cls, assistant: object, lookup: int | None) -> Draft | None:
        """What an `assistant`, or a `lookup` of so many tokens, proposes; None where there is neither."""
        if assistant is None:
            return None if lookup is None else cls(tokens=lookup)
        if lookup is not None:
            raise InputError("an assistant proposes tokens or they are looked up in the prompt, not both")
        return cls(assistant if isinstance(assistant, str) else type(assistant).__name__)


@dataclass(frozen=True, slots=True)
class Generation:
    """`new` tokens after a prompt of `prompt` tokens, for each of the sequences of a batch.

    `cache` is a name of `CACHES`, None the model's own choice; `kv_dtype` is ``"fp8"``, ``"int4"`` or ``"int2"`` for a
    quantized cache. `beams` is the width of a beam search, 1 for none. `begun` counts the tokens that the decoder of an
    encoder-decoder starts with, of which all but the first are given; 0 for a model that continues its prompt. The
    prompt is read `chunk` tokens at a time, all at once with None. Where prompts are `uneven`, the shorter ones are
    padded, so that attention gets a mask. With a `draft`, tokens are proposed before each step, of which none turns out
    to be right: whichever are, no step needs more than those that are taken then.
    """

    prompt: int
    new: int = 128
    cache: str | None = None
    kv_dtype: str | None = None
    beams: int = 1
    begun: int = 0
    chunk: int | None = None
    uneven: bool = False
    draft: Draft | None = None

    def __post_init__(self) -> None:
        for what, count in (
            ("prompt", self.prompt),
            ("number of new tokens", self.new),
            ("number of beams", self.beams),
            ("chunk", 1 if self.chunk is None else self.chunk),
        ):
            if count < 1:
                raise InputError(f"a {what} of {count}: it must be at least 1")
        if self.cache is not None and self.cache not in CACHES:
            raise UnknownInputError("cache", self.cache, CACHES)
        if self.kv_dtype is not None and self.kv_dtype not in KV_DTYPES:
            raise UnknownInputError("dtype of a KV cache", self.kv_dtype, KV_DTYPES)
        if self.kv_dtype is not None and self.cache not in (None, "quantized"):
            raise InputError(f"a {self.cache} cache keeps the dtype of the model: a KV dtype is for a quantized one")
        if self.draft is not None:
            self._check_drafted()

    def _check_drafted(self) -> None:
        """Raise `InputError` for what transformers does not do where tokens are proposed."""
        if self.beams > 1:
            raise InputError("assisted generation is for one beam: leave out --beams")
        if self.chunk is not None:
            raise InputError("assisted generation reads the prompt at once: leave out --chunk")
        if self.cache not in (None, "dynamic", "offloaded") or self.kv_dtype is not None:
            kept = self.cache or "quantized"
            raise InputError(f"assisted generation takes tokens back, which a {kept} cache cannot: use --cache dynamic")

    @property
    def start(self) -> int:
        """The tokens that the decoder reads first."""
        return self.begun or self.prompt

    @property
    def prefills(self) -> int:
        """How many forwards read what the decoder reads first."""
        return 1 if self.chunk is None else -(-self.start // self.chunk)

    @property
    def steps(self) -> int:
        """The decode steps that count. Where tokens are proposed, those at the end are left out, before which fewer
        are: they read no further.
        """
        return max(self.new - 1 - self.draft.tokens, min(self.new - 1, 1)) if self.draft else self.new - 1

    @property
    def last(self) -> int:
        """The tokens that the decoder has read at the end: the last new one never is."""
        return self.start + self.steps

    @property
    def is_periodic(self) -> bool:
        """Whether a step now and then differs from the others: group-wise quantization waits for a group of tokens."""
        return self.kv_dtype in ("int4", "int2") or (self.cache == "quantized" and self.kv_dtype is None)

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values are rounded."""
        return self.cache == "quantized" or self.kv_dtype is not None

    @property
    def is_offloaded(self) -> bool:
        """Whether the cache is on the host, but for the layers that are next."""
        return self.cache in ("offloaded", "offloaded_static")

    def after(self, tokens: int) -> Generation:
        """The generation that ends where this one does, of which the decoder reads `tokens` tokens first."""
        new = self.start + self.new - tokens
        return replace(self, begun=tokens, new=new) if self.begun else replace(self, prompt=tokens, new=new)

    @property
    def arguments(self) -> dict[str, object]:
        """The arguments of `generate` that ask for it, beside the inputs."""
        cache = self.cache or ("quantized" if self.kv_dtype else None)
        # One token more, so that no step that counts is the last, in which `generate` frees everything.
        asked: dict[str, object] = {"max_new_tokens": self.new + 1, "do_sample": False, "num_beams": self.beams}
        if cache not in (None, "dynamic"):
            asked["cache_implementation"] = cache
        if self.chunk is not None:
            asked["prefill_chunk_size"] = self.chunk
        if cache == "quantized":
            asked["cache_config"] = KV_DTYPES[self.kv_dtype or "int4"]
        if self.draft and self.draft.assistant is None:
            asked["prompt_lookup_num_tokens"] = self.draft.tokens
        return asked


def asked_generation(vary: Vary, *, prompt: int | None, new: int | None, **held: Any) -> Generation | None:
    """The generation that a search is about: where something is said of one, or a context varies; else None.

    `held` are the other fields of `Generation`, each None, or False, for its default. Raises `InputError` for what has
    no meaning.
    """
    given = {"prompt": prompt, "new": new, **held}
    said = {name: value for name, value in given.items() if value is not None and value is not False}
    if not (said or vary.context):
        return None
    if not (vary.batch or vary.context):
        raise InputError(f"cannot vary {vary.text} of a generation: vary context or batch")
    if vary.context and prompt is not None:
        raise InputError("a context that varies makes its own prompt: all of it but the new tokens")
    return Generation(**{"prompt": PROMPT, **said})


KV_DTYPES: Final[dict[str, dict[str, object]]] = {
    "fp8": {"backend": "fp8"},
    "int4": {"backend": "quanto", "nbits": 4},
    "int2": {"backend": "quanto", "nbits": 2},
}
"""The dtypes of a quantized cache, and the `cache_config` that asks transformers for them."""
