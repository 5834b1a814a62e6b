"""Servers, release by release: the defaults of vLLM and SGLang, and what each counts when it sizes its cache.

Each `Change` was read in the source of the release that it names, as PyPI has it; `source` names the files and, where
it is known, the pull request. A release between two that were read follows the earlier one, which `Rules.assumed` says.

Known limits: defaults are those of the API server (`vllm serve`); an `LLM` in Python takes steps of twice as many
tokens or more. vLLM's engine is V0 up to 0.7, and V1 from 0.8 on, but for cards that it leaves to V0 (`engine_on`); the
other engine, where a variable asked for it, is not covered, nor is SGLang's option to size the cache after it captured
CUDA graphs (SGLANG_ENABLE_POST_CAPTURE_KV_SIZING, since 0.5.16).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from memsize.errors import InputError, UnknownInputError, quoted
from memsize.records.gpu import Card
from memsize.spec.server_rules import Change, Choice, Defaults, Rules, ServedKind, Setting, StateBlocks, Version
from memsize.units import GiB, MiB

_V1: Final = (0, 8, 0)
_BEFORE_V1: Final = (0, 7, 3)
_LAST_V0: Final = (0, 10, 1)

# -- vLLM's defaults ---------------------------------------------------------------------------------------------------


_IMAGES: Final = 5120
"""The least tokens of a step with images (`_MULTIMODAL_MODEL_MAX_NUM_BATCHED_TOKENS`)."""


def _prompts(longest: int, chunk: int) -> Choice:
    """V0: a step takes a whole request, or a chunk of a text where requests are longer than `longest`."""

    def choose(_card: Card, setting: Setting) -> Defaults:
        if setting.context > longest and not setting.images:
            return Defaults(0.9, chunk, 256)
        return Defaults(0.9, max(setting.context, _IMAGES if setting.images else 2048), 256)

    return choose


def _by_name(seqs: int) -> Choice:
    """V1 at first: more tokens on H100 and H200, and there 1,024 sequences; elsewhere `seqs`."""

    def choose(card: Card, _setting: Setting) -> Defaults:
        large = any(name in card.name.lower() for name in ("h100", "h200"))
        return Defaults(0.9, *((8192, 1024) if large else (2048, seqs)))

    return choose


def _by_size(utilization: float = 0.9, *, a100: bool = False, largest: int = 8192) -> Choice:
    """V1: more on cards of 70 GiB, A100s only where `a100`; `largest` tokens on those of 160."""

    def choose(card: Card, setting: Setting) -> Defaults:
        if card.bytes >= 70 * GiB and (a100 or "a100" not in card.name.lower()):
            tokens, seqs = largest if card.bytes >= 160 * GiB else 8192, 1024
        else:
            tokens, seqs = 2048, 256
        return Defaults(utilization, min(tokens, seqs * setting.context), seqs)

    return choose


_DENSE: Final = ("Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")
_ALSO: Final = ("DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM", "GraniteMoeForCausalLM")


def _as_given(architectures: Sequence[str]) -> Callable[[ServedKind], bool]:
    return lambda kind: kind.architecture in architectures and not kind.is_quantized


def _dense(kind: ServedKind) -> bool:
    return not kind.has_states and (not kind.has_experts or kind.architecture in _ALSO)


_CHECKPOINTED: Final = 64
"""The tokens between the states that FlashInfer's kernel returns (`FLASHINFER_GDN_CHECKPOINT_ALIGNMENT`)."""


def _states_in_each_block(kind: ServedKind, _card: Card) -> StateBlocks:
    """With prefixes: Mamba's states in each block of a request, others in the last two."""
    return StateBlocks(0 if kind.states in ("Mamba", "Mamba-2") else 2)


def _states_in_last_blocks(*, mamba_2: bool = False, delta: bool = False) -> Callable[[ServedKind, Card], StateBlocks]:
    """With prefixes: states in the last two blocks of a request, and one more where the middle of a prompt is exported:
    by `mamba_2`, and by `delta` nets that FlashInfer reads (`_resolve_gdn_prefill_backend`).
    """

    def blocks(kind: ServedKind, card: Card) -> StateBlocks:
        if delta and kind.states == "delta net" and card.capability >= (9, 0):
            return StateBlocks(3, _CHECKPOINTED)
        return StateBlocks(3 if mamba_2 and kind.states == "Mamba-2" else 2)

    return blocks


_ENDLESS: Final = 10**12
_VLLM: Final = (
    Change(
        (0, 4, 1),
        "worker/worker.py, worker/model_runner.py, model_executor/layers/sampler.py, config.py",
        {"choose": _prompts(_ENDLESS, 0), "torch": "2.2", "reserved": True, "sampler": "sorts", "sums_beside": False}
        | {"products": "unpacks", "gate": "always", "experts": "of each product"},
    ),
    Change((0, 4, 3), "layers/quantization/gptq_marlin.py; requirements", {"products": "copies", "torch": "2.3"}),
    Change(
        (0, 5, 5),
        "layers/sampler.py: logits in float32; engine/arg_utils.py, `use_long_context`; requirements",
        {"sampler": "sorts in float32", "choose": _prompts(32_768, 512), "torch": "2.4"},
    ),
    Change(
        (0, 6, 4),
        "worker/worker.py: peaks as allocated, and the whole card's use beside them; models/llama.py; requirements",
        {"reserved": False, "outside": "all", "slack": True, "gate": "but in Llama", "torch": "2.5"},
    ),
    Change(
        (0, 6, 5),
        "worker/worker.py, utils.py `memory_profiling` (pull request 10511); distributed/parallel_state.py",
        {"outside": "growth", "sums_beside": True},
    ),
    Change(
        (0, 7, 0),
        "config.py: chunks of 2,048 tokens; utils.py: less `memory_reserved` (pull request 12126)",
        {"choose": _prompts(32_768, 2048), "slack": False},
    ),
    Change((0, 7, 1), "attention/backends/mla/utils.py", {"absorbs": True}),
    Change(
        (0, 8, 0),
        "envs.py: V1, whose models are compiled; v1/worker/gpu_worker.py; engine/arg_utils.py; requirements; "
        "layers/fused_moe/fused_moe.py: `cache13`",
        {
            "outside": "all",
            "slack": True,
            "gate": "never",
            "absorbs": False,
            "encodes_first": True,
            "holds_images": True,
        }
        | {"choose": _by_name(1024), "torch": "2.6", "experts": "of both"},
    ),
    Change((0, 8, 4), "engine/arg_utils.py: 256 sequences but on H100 and H200", {"choose": _by_name(256)}),
    Change(
        (0, 8, 5),
        "engine/arg_utils.py: cards of 70 GiB; csrc/quantization/gptq_marlin/gptq_marlin.cu",
        {"choose": _by_size(a100=True), "products": "reads"},
    ),
    Change(
        (0, 9, 0),
        "engine/arg_utils.py: no A100 (pull request 17885); `c_tmp` in csrc/quantization/marlin/marlin.cu; "
        "v1/worker/gpu_model_runner.py `_dummy_sampler_run`",
        {"choose": _by_size(), "torch": "2.7", "products": "tiles", "randomizes": True},
    ),
    Change(
        (0, 9, 1),
        "v1/worker/gpu_worker.py (pull request 19312); v1/core/kv_cache_utils.py: groups of layers",
        {"outside": "growth", "slack": False, "windows": True},
    ),
    Change((0, 10, 2), "requirements", {"torch": "2.8"}),
    Change(
        (0, 11, 1),
        "config/compilation.py `benchmark_combo_kernel`; lora/layers/fused_moe.py; requirements",
        {"torch": "2.9", "benchmarks": True, "adapts_experts": True},
    ),
    Change((0, 12, 0), "v1/core/kv_cache_utils.py: 1.25 times", {"padding": 1.25}),
    Change(
        (0, 14, 0),
        "layers/fused_moe/unquantized_fused_moe_method.py: modular kernels, with v1/worker/workspace.py",
        {"experts": "of the server"},
    ),
    Change(
        (0, 17, 0),
        "v1/sample/ops/topk_topp_triton.py; requirements",
        {"sampler": "searches in tiles", "torch": "2.10"},
    ),
    Change(
        (0, 18, 0),
        "v1/core/kv_cache_utils.py: 1.5 times; v1/worker/gpu_worker.py `profile_cudagraph_memory`",
        {"padding": 1.5, "graphs": "ignored"},
    ),
    Change(
        (0, 20, 0),
        "envs.py: VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS; config/cache.py: 0.92; requirements",
        {"graphs": "extrapolated", "choose": _by_size(0.92), "torch": "2.11"},
    ),
    Change(
        (0, 21, 0),
        "v1/core/kv_cache_utils.py: concurrency times length (issue 43308); envs.py: FlashInfer samples",
        {"by_requests": True, "sampler": "searches"},
    ),
    Change(
        (0, 22, 0),
        "config/vllm.py `_is_default_v2_model_runner_model`; v1/worker/gpu_worker.py `_scoped_allocator_max_split`",
        {"second": _as_given(_DENSE[:1]), "unsplit": True},
    ),
    Change((0, 23, 0), "the same: Llama and Mistral", {"second": _as_given(_DENSE)}),
    Change((0, 24, 0), "the same", {"second": lambda kind: kind.architecture in (*_DENSE, *_ALSO)}),
    Change((0, 25, 1), "the same: each dense model", {"second": _dense}),
    Change(
        (0, 26, 0),
        "config/vllm.py `max_in_flight_tokens`, v1/kv_cache_interface.py (issue 49878): two steps are in flight; "
        "config/model.py `is_prefix_caching_supported`, models/config.py `MambaModelConfig`: prefixes of hybrids",
        {"in_flight": 2, "states": _states_in_each_block},
    ),
    Change(
        (0, 27, 0),
        "utils/mem_utils.py `total_consumed`: all that is in use; v1/worker/gpu/sample/penalties.py; requirements",
        {"slack": True, "counts": True, "torch": "2.13"},
    ),
    Change(
        (0, 28, 0),
        "engine/arg_utils.py: cards of 160 GiB; models/config.py `MambaModelConfig`: no states in each block",
        {"choose": _by_size(0.92, largest=16_384), "states": _states_in_last_blocks()},
    ),
    Change((0, 29, 0), "config/vllm.py `use_v2_model_runner`: each model", {"second": lambda _: True}),
    Change(
        (0, 32, 0),
        "layers/mamba/mamba_mixer2.py `num_prefill_checkpoint_blocks`",
        {"states": _states_in_last_blocks(mamba_2=True)},
    ),
    Change(
        (0, 33, 0),
        "requirements; layers/mamba/gdn/qwen_gdn_linear_attn.py `_exports_checkpoints`",
        {"torch": "2.14", "states": _states_in_last_blocks(mamba_2=True, delta=True)},
    ),
)
_VLLM_READ: Final = (
    "0.4.1 0.4.3 0.5.0 0.5.5 0.6.0 0.6.4 0.6.5 0.6.6 0.7.0 0.7.1 0.7.3 0.8.0 0.8.4 0.8.5 0.9.0 0.9.1 0.9.2 0.10.0 "
    "0.10.1 0.10.2 0.11.0 0.11.1 0.12.0 0.13.0 0.14.0 0.16.0 0.17.0 0.18.0 0.19.0 0.20.0 0.21.0 0.22.0 0.23.0 0.24.0 "
    "0.25.1 0.26.0 0.27.0 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0 0.33.0"
)
_VLLM_UNREAD: Final = (
    "0.4.2 0.5.1 0.5.2 0.5.3 0.5.4 0.6.1 0.6.2 0.6.3 0.7.2 0.8.1 0.8.2 0.8.3 0.11.2 0.14.1 "
    "0.15.0 0.15.1 0.17.1 0.18.1 0.19.1 0.20.1 0.20.2 0.22.1 0.25.0 0.27.1"
)

# -- SGLang's ----------------------------------------------------------------------------------------------------------


_Tiers = tuple[tuple[int, int], ...]
_Reserve = Callable[[float, int, Setting], float]
_SHARES: Final = ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87), (1, 0.88))


def _left_by(reserved: _Reserve, chunks: _Tiers) -> Choice:
    """`mem_fraction_static` of a card's MiB, with what `reserved` leaves of them for steps and CUDA graphs; `chunks`
    are the tokens of a step on cards smaller than as many GiB. An encoder of images takes 5 % and more.
    """

    def choose(card: Card, setting: Setting) -> Defaults:
        size = card.bytes / MiB
        tokens = next((count for most, count in chunks if size < most * 1024), 16_384)
        share = round((size - reserved(size, tokens, setting)) / size, 3)
        if setting.images:
            share *= 0.95 * max(0.8, min(1.05, 1 - 0.1 * (setting.images - 1)))
        return Defaults(share, tokens, 1)

    return choose


def _by_gpus(of_images: float, large: bool = False) -> Choice:
    """A share by the number of GPUs; of cards above 80 GiB all but 13, where `large`; `of_images` times it for models
    that read images.
    """

    def choose(card: Card, setting: Setting) -> Defaults:
        size = card.bytes / MiB
        share = next(share for gpus, share in _SHARES if setting.tp >= gpus)
        if large and size > 81_920:
            share = (size - 13 * 1024) / size
        return Defaults(share * (of_images if setting.images else 1), 2048 if size < 25_000 else 8192, 1)

    return choose


def _by_card(size: float, _tokens: int, setting: Setting) -> float:
    """0.4.10's table."""
    if size < 35 * 1024:
        return (2.8 + setting.tp / 10) * 1024
    if size < 160 * 1024:
        return ((9.5 if size < 90 * 1024 else 12) + setting.tp / 2) * 1024
    return 32 * 1024


def _by_tokens(of_small: tuple[int, int], of_prompts: bool = False) -> _Reserve:
    """0.5's formula: tokens of a step, sequences of the largest CUDA graph, GPUs; and the graphs `of_prompts`, which
    models that read images do not have.
    """

    def reserved(size: float, tokens: int, setting: Setting) -> float:
        tiers = ((20, 8, 8), (35, *of_small), (60, 32, 160), (160, 256, 512))
        graphs = next((few if setting.tp < 4 else many for most, few, many in tiers if size < most * 1024), 512)
        taken = 512 + tokens * 1.5 + graphs * 2 + setting.tp / 8 * 1024
        if of_prompts and not setting.images:
            taken += 1536 if setting.latent else 8 * _prompt_graphs(tokens)
        return max(taken, 10 * 1024) if size > 60 * 1024 else taken

    return reserved


def _prompt_graphs(tokens: int) -> int:
    """The number of CUDA graphs for prompts of up to so many tokens."""
    sizes = (*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64))
    return sum(size <= tokens for size in (*sizes, *range(1280, 4097, 256), *range(4608, tokens + 1, 512)))


def _pools(architectures: Sequence[str]) -> Callable[[ServedKind], bool]:
    return lambda kind: kind.architecture in architectures


_CHUNKS: Final[_Tiers] = ((35, 2048), (60, 4096), (160, 8192))
_SGLANG_RULES: Final = {"profiles": False, "slack": True, "block": 1, "windows": False}
_SWA: Final = ("GptOssForCausalLM",)
_GEMMA: Final = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
_SGLANG: Final = (
    Change((0, 4, 2), "srt/server_args.py", {"choose": _by_gpus(0.95), "torch": "2.5", **_SGLANG_RULES}),
    Change((0, 4, 6), "the same: large cards; pyproject.toml", {"choose": _by_gpus(0.9, large=True), "torch": "2.6"}),
    Change(
        (0, 4, 10),
        "srt/server_args.py: a table of cards; srt/model_executor/model_runner.py `set_num_token_hybrid`",
        {"choose": _left_by(_by_card, ((35, 2048), (160, 8192))), "torch": "2.7", "pools": lambda _: True},
    ),
    Change(
        (0, 5, 3), "srt/server_args.py: a formula", {"choose": _left_by(_by_tokens((16, 80)), _CHUNKS), "torch": "2.8"}
    ),
    Change(
        (0, 5, 9),
        "the same: larger graphs; srt/configs/model_config.py `is_hybrid_swa_model`; `mamba_full_memory_ratio`",
        {"choose": _left_by(_by_tokens((24, 80)), _CHUNKS), "torch": "2.9", "pools": _pools(_SWA), "of_states": 0.9},
    ),
    Change((0, 5, 10), "the same: graphs of prompts", {"choose": _left_by(_by_tokens((24, 80), True), _CHUNKS)}),
    Change((0, 5, 11), "srt/configs/model_config.py", {"torch": "2.11", "pools": _pools((*_SWA, *_GEMMA))}),
    Change((0, 5, 18), "pyproject.toml", {"torch": "2.13"}),
    Change(
        (0, 5, 20),
        "srt/arg_groups/memory_hook.py: cards of 24 and 32 GiB",
        {"choose": _left_by(_by_tokens((48, 160), True), ((20, 2048), (60, 4096), (160, 8192)))},
    ),
    Change((0, 5, 22), "pyproject.toml", {"torch": "2.14"}),
)
_SGLANG_READ: Final = (
    "0.4.2 0.4.6 0.4.10 0.5.3 0.5.9 0.5.10 0.5.11 0.5.12 0.5.13 0.5.14 0.5.15 0.5.16 0.5.17 0.5.18 0.5.19 0.5.20 "
    "0.5.21 0.5.22 0.5.23"
)
_SGLANG_UNREAD: Final = "0.4.3 0.4.4 0.4.5 0.4.7 0.4.8 0.4.9 0.5.1 0.5.2 0.5.4 0.5.5 0.5.6 0.5.7 0.5.8"

# -- a server by its name ----------------------------------------------------------------------------------------------


class _Server(NamedTuple):
    title: str
    changes: tuple[Change, ...]
    read: tuple[Version, ...]
    unread: tuple[Version, ...]


def _versions(text: str) -> tuple[Version, ...]:
    return tuple(tuple(map(int, version.split("."))) for version in text.split())


_SERVERS: Final = {
    "vllm": _Server("vLLM", _VLLM, _versions(_VLLM_READ), _versions(_VLLM_UNREAD)),
    "sglang": _Server("SGLang", _SGLANG, _versions(_SGLANG_READ), _versions(_SGLANG_UNREAD)),
}
DEFAULT: Final = "vllm"


def rules_of(text: str | None) -> Rules:
    """The rules of ``vllm=0.9.2``, or of the newest known release of ``sglang``; None: of vLLM.

    Raises `UnknownInputError` for another server, and `InputError` for a release that is not known.
    """
    name, _, release = (text or DEFAULT).strip().lower().partition("=")
    server = _SERVERS.get(name.strip())
    if server is None:
        raise UnknownInputError("server", name, sorted(_SERVERS))
    version = _version(release.strip()) if release else server.read[-1]
    releases = sorted({*server.read, *server.unread})
    if version not in releases:
        before = [other for other in releases if not version or other < version][-1:]
        nearest = [*before, *[other for other in releases if version and other > version][:1]]
        names = [".".join(map(str, other)) for other in nearest]
        hint = f"the nearest are {' and '.join(names)}" if names[1:] else f"the nearest is {names[0]}"
        raise InputError(f"{server.title} {quoted(release.strip())} is not a known release: {hint}")
    entries: dict[str, Any] = {}
    for change in server.changes:
        if change.since <= version:
            entries |= change.rules
    if version in server.unread:
        earlier, later = max(v for v in server.read if v < version), min(v for v in server.read if v > version)
        if any(earlier < change.since <= later for change in server.changes):
            entries["unread"] = (".".join(map(str, earlier)), ".".join(map(str, later)))
    return Rules(server.title, version, **entries)


def engine_on(rules: Rules, card: Card) -> Rules:
    """The rules of vLLM on `card`: those of its engine V0 where that still runs on cards before Ampere
    (`_is_v1_supported_oracle` in engine/arg_utils.py).
    """
    if rules.server != "vLLM" or not _V1 <= rules.version <= _LAST_V0 or card.capability >= (8, 0):
        return rules
    engine = rules_of(f"vllm={'.'.join(map(str, _BEFORE_V1))}")
    return replace(engine, version=rules.version, torch=rules.torch, products=rules.products, unread=rules.unread)


def _version(text: str) -> Version:
    """Numbers of ``v0.6.4.post1``, without what was posted after the release; () where it cannot be read."""
    match = re.fullmatch(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?(?:\.\d+)?(?:\.?post\d+)?", text)
    return tuple(int(number or 0) for number in match.groups()) if match else ()
