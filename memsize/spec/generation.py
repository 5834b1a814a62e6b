"""A generation: how many tokens come in and out, and how the KV cache is stored; and how a paged server serves many.
Parsed and checked once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from memsize.errors import InputError
from memsize.records.gpu import Card
from memsize.spec.options import check_fields, option
from memsize.spec.server_rules import PLAIN, GraphSizes, Rules, ServedKind, Setting
from memsize.spec.servers import engine_on, rules_of
from memsize.spec.speculation import Speculation
from memsize.spec.vary import Vary
from memsize.units import parse_bytes

if TYPE_CHECKING:
    from memsize.records.serving import ServingArguments


CACHES: Final = ("dynamic", "static", "quantized", "offloaded", "offloaded_static")
"""The caches of transformers' `generate`, by its argument `cache_implementation`. A sliding window is the model's own:
its layers are held so in all but the quantized ones."""

GENERATED: Final = ("as-given", "int8-weight", "int4-weight")
"""The usual scenarios of a generation."""


KV_DTYPES: Final[dict[str, dict[str, object]]] = {
    "fp8": {"backend": "fp8"},
    "int4": {"backend": "quanto", "nbits": 4},
    "int2": {"backend": "quanto", "nbits": 2},
}
"""The dtypes of a quantized cache, and the `cache_config` that asks transformers for them."""

PROMPT: Final = 512
"""Tokens of a prompt where nothing is said of it."""

DRAFTED: Final = 20
"""Tokens that transformers proposes before each step unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposes `tokens` before each step, which checks them: a model named `assistant`, or looked up in the prompt."""

    assistant: str | None = None
    tokens: int = DRAFTED

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InputError(f"a number of proposed tokens of {self.tokens}: it must be at least 1")

    @classmethod
    def of(cls, assistant: object, lookup: int | None) -> Draft | None:
        """Return the draft of an `assistant`, or of a `lookup` of that many tokens; None where there is neither."""
        if assistant is None:
            return None if lookup is None else cls(tokens=lookup)
        if lookup is not None:
            raise InputError("an assistant proposes tokens or they are looked up in the prompt, not both")
        return cls(assistant if isinstance(assistant, str) else type(assistant).__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """`max_new_tokens` tokens after a prompt of `prompt` tokens, for each of the sequences of a batch.

    `cache_implementation` is a name of `CACHES`, None the model's own choice; `kv_cache_dtype` is ``"fp8"``, ``"int4"``
    or ``"int2"`` for a quantized cache. `num_beams` is the width of a beam search, 1 for none. `begun` counts the
    tokens that the decoder of an encoder-decoder starts with, of which all but the first are given; 0 for a model that
    continues its prompt. The prompt is read `prefill_chunk_size` tokens at a time, all at once with None. Where prompts
    are `uneven`, the shorter ones are padded, so that attention gets a mask. With a `draft`, tokens are proposed before
    each step. None of them is accepted: no step needs more than the rejected one.
    """

    prompt: int = PROMPT
    max_new_tokens: int = option(128, "Tokens to generate.", least=1)
    cache_implementation: str | None = option(
        None, "The cache that generate uses.", shown="the model's own choice", choices=CACHES
    )
    kv_cache_dtype: str | None = option(None, "Keep the cache quantized.", choices=tuple(KV_DTYPES))
    num_beams: int = option(1, "Beams of a beam search.", least=1)
    begun: int = 0
    prefill_chunk_size: int | None = option(None, "Read the prompt N tokens at a time.", least=1)
    uneven: bool = option(False, "Prompts are of unequal lengths, padded to the longest.")
    draft: Draft | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.prompt < 1:
            raise InputError(f"prompt is {self.prompt}: it must be at least 1")
        if self.kv_cache_dtype is not None and self.cache_implementation not in (None, "quantized"):
            kind = self.cache_implementation
            raise InputError(f"a {kind} cache keeps the dtype of the model: a KV dtype is for a quantized one")
        if self.draft is None:
            return
        if self.num_beams > 1:
            raise InputError("assisted generation is for one beam: leave out --num-beams")
        if self.prefill_chunk_size is not None:
            raise InputError("assisted generation reads the prompt at once: leave out --prefill-chunk-size")
        if self.cache_implementation not in (None, "dynamic", "offloaded") or self.kv_cache_dtype is not None:
            kind = self.cache_implementation or "quantized"
            raise InputError(
                f"assisted generation takes tokens back, which a {kind} cache cannot: "
                "use --cache-implementation dynamic"
            )

    @property
    def record(self) -> dict[str, object]:
        """The generation by the names that answers have for its fields."""
        return {
            "prompt": self.prompt,
            "new": self.max_new_tokens,
            "cache": self.cache_implementation,
            "kv_dtype": self.kv_cache_dtype,
            "beams": self.num_beams,
            "begun": self.begun,
            "chunk": self.prefill_chunk_size,
            "uneven": self.uneven,
            "draft": asdict(self.draft) if self.draft else None,
        }

    @property
    def start(self) -> int:
        """The tokens that the decoder reads first."""
        return self.begun or self.prompt

    @property
    def prefills(self) -> int:
        """How many forwards read what the decoder reads first."""
        return 1 if self.prefill_chunk_size is None else -(-self.start // self.prefill_chunk_size)

    @property
    def steps(self) -> int:
        """The decode steps that count: not those at the end, before which fewer tokens are proposed."""
        steps = self.max_new_tokens - 1
        return max(steps - self.draft.tokens, min(steps, 1)) if self.draft else steps

    @property
    def last(self) -> int:
        """The tokens that the decoder has read at the end: the last new one never is."""
        return self.start + self.steps

    @property
    def is_periodic(self) -> bool:
        """Whether a step now and then differs from the others: group-wise quantization waits for a group of tokens."""
        return self.kv_cache_dtype in ("int4", "int2") or (
            self.cache_implementation == "quantized" and self.kv_cache_dtype is None
        )

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values are rounded."""
        return self.cache_implementation == "quantized" or self.kv_cache_dtype is not None

    @property
    def is_offloaded(self) -> bool:
        """Whether the cache is on the host, but for the layers that are next."""
        return self.cache_implementation in ("offloaded", "offloaded_static")

    def after(self, tokens: int) -> Generation:
        """The generation that ends where this one does, of which the decoder reads `tokens` tokens first."""
        new = self.start + self.max_new_tokens - tokens
        if self.begun:
            return replace(self, begun=tokens, max_new_tokens=new)
        return replace(self, prompt=tokens, max_new_tokens=new)

    @property
    def arguments(self) -> dict[str, object]:
        """The arguments of `generate` that ask for it, beside the inputs."""
        cache = self.cache_implementation or ("quantized" if self.kv_cache_dtype else None)
        # One token more, so that no step that counts is the last, in which `generate` frees everything.
        keywords: dict[str, object] = {
            "max_new_tokens": self.max_new_tokens + 1,
            "do_sample": False,
            "num_beams": self.num_beams,
        }
        if cache not in (None, "dynamic"):
            keywords["cache_implementation"] = cache
        if self.prefill_chunk_size is not None:
            keywords["prefill_chunk_size"] = self.prefill_chunk_size
        if cache == "quantized":
            keywords["cache_config"] = KV_DTYPES[self.kv_cache_dtype or "int4"]
        if self.draft and self.draft.assistant is None:
            keywords["prompt_lookup_num_tokens"] = self.draft.tokens
        return keywords


def searched_generation(vary: Vary, generation: Generation | None, prompt: int | None) -> Generation | None:
    """The generation that a search is about: where something is said of one, or a context varies; else None.

    Raises `InputError` for what has no meaning.
    """
    if generation is None and prompt is None and not vary.context:
        return None
    if not (vary.batch or vary.context):
        raise InputError(f"cannot vary {vary.text} of a generation: vary context or batch")
    if vary.context and prompt is not None:
        raise InputError("a context that varies makes its own prompt: all of it but the new tokens")
    return replace(generation or Generation(), prompt=PROMPT if prompt is None else prompt)


LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM takes (`MaxLoRARanks` in config/lora.py)."""
_LORAS: Final = {"vLLM": 1, "SGLang": 8}
"""Adapters in a step (`max_loras`; `max_loras_per_batch`)."""
_LORA_RANK: Final = 16
DRAFTS_SINCE: Final = dict.fromkeys(("eagle3", "eagle", "ngram"), (0, 9, 0)) | {
    "mtp": (0, 10, 0),
    "draft_model": (0, 17, 0),
}
"""The releases of vLLM's engine V1 whose drafts were read (v1/spec_decode)."""
SGLANG_DRAFTS_SINCE: Final = (0, 5, 14)
"""The first release that was read with the draft inside the server's fraction: its weights are loaded before the cache
is sized (`init_model_worker` in srt/managers/scheduler.py). 0.5.13 and before left 2 to 6 GiB beside the fraction.
"""
NGRAM_SINCE: Final = (0, 29, 0)
"""Before, its second model runner took no ngram (`_get_v2_model_runner_unsupported_features` in config/vllm.py)."""

KV_BYTES: Final = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""The dtypes of a paged cache other than the model's own, and their bytes."""

SERVED: Final = ("as-given", "fp8-weight", "int4-weight")
"""The usual scenarios of a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The arguments of a server, as vLLM calls them; None for those that the server chooses.

    `server` is a release, such as ``"vllm=0.9.2"``. A block of its cache is for `block_size` tokens. One step runs
    `max_num_batched_tokens` tokens of up to `max_num_seqs` sequences. `max_model_len` is the length that a request may
    have (None: the model's positions). `tensor_parallel_size` GPUs hold a part of each layer. `kv_cache_dtype` is a
    name of `KV_BYTES`, None for the model's own. `kv_cache_memory` is the size of the cache, in place of what is left.
    `enforce_eager` compiles nothing and captures no CUDA graphs. At a `first_start` nothing is compiled yet.
    With `enable_lora` there are slots for `max_loras` adapters of up to `max_lora_rank`. `speculative_config` is vLLM's
    JSON (`Speculation.parse`).
    """

    server: str | None = option(
        None,
        "The server and its release: vllm=0.9.2, sglang=0.5.23.",
        shown="the newest known vLLM",
        metavar="RELEASE",
    )
    gpu_memory_utilization: float | None = option(
        None,
        "Fraction of GPU memory that the server may use.",
        shown="the server's",
        metavar="PART",
    )
    block_size: int | None = option(None, "Tokens per block.", shown="the server's", least=1)
    max_num_batched_tokens: int | None = option(
        None,
        "Most tokens in a step.",
        shown="the server's",
        least=1,
    )
    max_num_seqs: int | None = option(None, "Most sequences in a step.", shown="the server's", least=1)
    max_model_len: int | None = option(None, "Tokens per request.", shown="the model's positions", least=1)
    tensor_parallel_size: int = option(1, "Tensor-parallel size.", flags=("--tp", "--tensor-parallel-size"), least=1)
    kv_cache_dtype: str | None = option(None, "Dtype of the cache.", choices=tuple(KV_BYTES))
    kv_cache_memory: str | int | None = option(
        None, "Size of the cache, instead of the memory that is left: 40GiB.", metavar="SIZE"
    )
    enforce_eager: bool = option(False, "Compile nothing, and capture no CUDA graphs.")
    first_start: bool = option(False, "Compile the model while its step is measured.")
    enable_lora: bool = option(False, "Hold slots for LoRA adapters beside the weights.")
    max_loras: int | None = option(
        None,
        "Adapters in a step.",
        shown="1; SGLang: 8",
        least=1,
        flags=("--max-loras", "--max-loras-per-batch"),
    )
    max_lora_rank: int | None = option(None, "Largest rank of an adapter.", shown="vLLM: 16", least=1)
    speculative_config: str | None = option(
        None, "Draft tokens before each step, as vLLM or SGLang has it.", metavar="JSON"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            part = f"{self.gpu_memory_utilization:g}"
            raise InputError(f"gpu_memory_utilization is {part}: it is a part of the GPU's memory, such as 0.9")
        if self.first_start and (self.enforce_eager or not self.rules.compiled):
            what = "enforce_eager" if self.enforce_eager else self.rules.name
            raise InputError(f"first_start has no effect: {what} compiles nothing")
        if self._cache_bytes is not None and self._cache_bytes < 1:
            raise InputError("kv_cache_memory is the size of a cache, such as 40GiB")
        self._check_adapters()
        self._check_speculation()

    def _check_adapters(self) -> None:
        rank, is_vllm = self.max_lora_rank, self.rules.server == "vLLM"
        if not self.enable_lora:
            name = "max_loras" if self.max_loras else "max_lora_rank" if rank else None
            if name:
                raise InputError(f"{name} has no effect without enable_lora")
            return
        if rank is None and not is_vllm:
            raise InputError(f"give max_lora_rank: {self.rules.name} reads it from the adapters")
        if is_vllm and rank is not None and rank not in LORA_RANKS:
            lower = [str(size) for size in LORA_RANKS if size < rank][-1:]
            higher = [str(size) for size in LORA_RANKS if size > rank][:1]
            raise InputError(f"max_lora_rank is {rank}: the nearest that vLLM takes is {' or '.join(lower + higher)}")

    def _check_speculation(self) -> None:
        draft = self.speculation
        if draft is None:
            return
        since = DRAFTS_SINCE[draft.method] if self.rules.server == "vLLM" else SGLANG_DRAFTS_SINCE
        if self.rules.version < since:
            first = f"{self.rules.server} from {'.'.join(map(str, since))} on"
            raise InputError(f"{draft.method} is covered for {first}, not for {self.rules.name}")

    @property
    def _cache_bytes(self) -> int | None:
        size = self.kv_cache_memory
        return parse_bytes(size) if isinstance(size, str) else size

    @property
    def rules(self) -> Rules:
        return rules_of(self.server)

    @property
    def speculation(self) -> Speculation | None:
        return Speculation.parse(self.speculative_config)

    def chosen(self, card: Card, context: int, *, images: float = 0, kind: ServedKind = PLAIN) -> ServerArguments:
        """Fill in what the server chooses on `card`, for requests of `context` tokens to a model of a `kind`."""
        own, draft = self.rules, self.speculation
        if draft and draft.method == "ngram" and own.version < NGRAM_SINCE:
            own = replace(own, second=lambda _: False)
        rules = engine_on(own.serving(kind), card)
        if self.enforce_eager and rules.gate == "never":
            rules = replace(rules, gate="but in Llama")
        defaults = rules.choose(card, Setting(context, self.tensor_parallel_size, images, kind.is_latent))
        tokens = self.max_num_batched_tokens or defaults.tokens
        utilization = self.gpu_memory_utilization or defaults.utilization
        seqs = min(self.max_num_seqs or defaults.seqs, tokens)
        filled_in = (
            (self.gpu_memory_utilization, f"{utilization:.3g} of the memory"),
            (self.max_num_batched_tokens, f"{tokens:,} tokens of a step"),
            (self.max_num_seqs, f"{seqs:,} sequence{'s' * (seqs != 1)}"),
            (self.block_size, f"blocks of {rules.block}"),
        )
        return ServerArguments(
            rules=rules,
            utilization=utilization,
            block=self.block_size or rules.block,
            tokens=tokens,
            seqs=seqs,
            context=context,
            tp=self.tensor_parallel_size,
            kv_dtype=self.kv_cache_dtype,
            kv_bytes=self._cache_bytes,
            graphs=self._graphs(rules, card, tokens, seqs),
            compiles=rules.compiled and self.first_start and not self.enforce_eager,
            loras=(self.max_loras or _LORAS[rules.server]) if self.enable_lora else 0,
            lora_rank=(self.max_lora_rank or _LORA_RANK) if self.enable_lora else 0,
            speculation=draft,
            defaults=tuple(text for value, text in filled_in if value is None),
        )

    def _graphs(self, rules: Rules, card: Card, tokens: int, seqs: int) -> GraphSizes | None:
        """The CUDA graphs: of drafted tokens too, and with adapters each once more, for steps that have none
        (`cudagraph_specialize_lora` in config/compilation.py).
        """
        if not rules.graphs or self.enforce_eager:
            return None
        draft, times = self.speculation, 2 if self.enable_lora else 1
        sizes = rules.graph_sizes(card, tokens, seqs * (draft.tokens + 1 if draft else 1))
        return sizes._replace(piecewise=sizes.piecewise * times, full=sizes.full * times)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArguments:
    """The arguments of a server on one card, all of them filled in.

    `tokens` and `seqs` are those of one step, `context` is the length of a request, `kv_bytes` a size of the cache that
    is set (None: what is left). `graphs` are the CUDA graphs whose memory is taken off the cache. It `compiles` the
    model while it measures the step. It holds `loras` adapters of `lora_rank` (0: none), and drafts tokens by its
    `speculation`. `defaults` are the arguments that the server chose, in words.
    """

    rules: Rules
    utilization: float
    block: int
    tokens: int
    seqs: int
    context: int
    tp: int = 1
    kv_dtype: str | None = None
    kv_bytes: int | None = None
    graphs: GraphSizes | None = None
    compiles: bool = False
    loras: int = 0
    lora_rank: int = 0
    speculation: Speculation | None = None
    defaults: tuple[str, ...] = ()

    @property
    def assumed(self) -> tuple[str, ...]:
        """Assumptions for the report: the rules of the release, and what it chose."""
        chosen = f"{', '.join(self.defaults)}: the defaults of {self.rules.name} on this GPU"
        return (*([chosen] if self.defaults else []), *self.rules.assumed)

    @property
    def record(self) -> ServingArguments:
        """The arguments by the names that answers have for them."""
        return {
            "server": self.rules.name,
            "utilization": self.utilization,
            "block": self.block,
            "batched_tokens": self.tokens,
            "seqs": self.seqs,
            "context": self.context,
            "tp": self.tp,
            "kv_dtype": self.kv_dtype,
            "kv_bytes": self.kv_bytes,
            "loras": self.loras,
            "lora_rank": self.lora_rank,
            "speculative": self.speculation.method if self.speculation else None,
            "drafted": self.speculation.tokens if self.speculation else 0,
        }
