"""How a model is served: what a paged server is started with. Parsed and checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from memsize.errors import InputError, UnknownInputError

KV_BYTES: Final = {"fp8": 1}
"""The dtypes of a paged cache other than the model's own, and their bytes."""

SERVED: Final = ("as-given", "fp8-weight", "int4-weight")
"""The usual scenarios of a server."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The arguments of a server, as vLLM calls them.

    It may take `utilization` of the card. A block of its cache is for `block` tokens. One step runs `batched_tokens`
    tokens of up to `seqs` sequences. `context` is the length that a request may have (None: the model's positions).
    `tp` cards hold a part of each layer. `kv_dtype` is a name of `KV_BYTES`, None for the model's own.
    """

    utilization: float = 0.9
    block: int = 16
    batched_tokens: int = 8192
    seqs: int = 256
    context: int | None = None
    tp: int = 1
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise InputError(f"a utilization of {self.utilization:g}: it is a part of the card's memory, such as 0.9")
        for what, count in (
            ("block", self.block),
            ("number of batched tokens", self.batched_tokens),
            ("number of sequences", self.seqs),
            ("context", 1 if self.context is None else self.context),
            ("tensor-parallel size", self.tp),
        ):
            if count < 1:
                raise InputError(f"a {what} of {count}: it must be at least 1")
        if self.kv_dtype is not None and self.kv_dtype not in KV_BYTES:
            raise UnknownInputError("dtype of a paged KV cache", self.kv_dtype, KV_BYTES)

    @property
    def rows(self) -> int:
        """The sequences of a profile run: no more than there are tokens."""
        return min(self.seqs, self.batched_tokens)
