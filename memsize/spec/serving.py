"""How a model is served: the arguments of a paged server, by vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from memsize.errors import InputError
from memsize.spec.options import check_fields, option

if TYPE_CHECKING:
    from memsize.records.serving import ServingArguments

KV_BYTES: Final = {"fp8": 1}
"""The dtypes of a paged cache other than the model's own, and their bytes."""

SERVED: Final = ("as-given", "fp8-weight", "int4-weight")
"""The usual scenarios of a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The arguments of a server, as vLLM calls them.

    A block of its cache is for `block_size` tokens. One step runs `max_num_batched_tokens` tokens of up to
    `max_num_seqs` sequences. `max_model_len` is the length that a request may have (None: the model's positions).
    `tensor_parallel_size` GPUs hold a part of each layer. `kv_cache_dtype` is a name of `KV_BYTES`, None for the
    model's own.
    """

    gpu_memory_utilization: float = option(
        0.9,
        "The part of the card's memory that the server may take.",
        metavar="PART",
        old=("utilization", "--utilization"),
    )
    block_size: int = option(16, "Tokens of a block.", least=1, old=("block", "--block"))
    max_num_batched_tokens: int = option(
        8192, "Tokens of one step at most.", least=1, old=("batched_tokens", "--max-batched-tokens")
    )
    max_num_seqs: int = option(256, "Sequences of one step at most.", least=1, old=("seqs", "--max-seqs"))
    max_model_len: int | None = option(
        None, "Tokens of a request.", shown="the model's positions", least=1, old=("context", "--context")
    )
    tensor_parallel_size: int = option(1, "Cards that share a layer.", least=1, old=("tp", "--tp"))
    kv_cache_dtype: str | None = option(
        None, "Keep the cache in this dtype.", choices=tuple(KV_BYTES), old=("kv_dtype", "--kv-dtype")
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.gpu_memory_utilization <= 1:
            part = f"{self.gpu_memory_utilization:g}"
            raise InputError(f"gpu_memory_utilization is {part}: it is a part of the card's memory, such as 0.9")

    @property
    def record(self) -> ServingArguments:
        """The arguments by the names that answers have for them."""
        return {
            "utilization": self.gpu_memory_utilization,
            "block": self.block_size,
            "batched_tokens": self.max_num_batched_tokens,
            "seqs": self.max_num_seqs,
            "context": self.max_model_len,
            "tp": self.tensor_parallel_size,
            "kv_dtype": self.kv_cache_dtype,
        }

    @property
    def rows(self) -> int:
        """The sequences of a profile run: no more than there are tokens."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)
