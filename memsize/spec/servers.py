"""Servers, release by release: the defaults of vLLM and SGLang, and what each counts when it sizes its cache.

Each `Change` was read in the source of the release that it names, as PyPI has it; `source` names the files and, where
it is known, the pull request. A release between two that were read follows the earlier one, which `Rules.assumed` says.

Known limits: defaults are those of the API server (`vllm serve`); an `LLM` in Python takes steps of twice as many
tokens or more. vLLM's engine is V0 up to 0.7, and V1 from 0.8 on; its other engine, where a variable asked for it, is
not covered. SGLang's releases after 0.5.9 size the cache after they captured CUDA graphs, which is not covered either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from memsize.errors import InputError, UnknownInputError, quoted
from memsize.records.gpu import Card
from memsize.units import GiB, MiB

Version = tuple[int, ...]
Counted = Literal["all", "growth"]
Sampler = Literal["sorts", "sorts in float32", "searches"]
Products = Literal["unpacks", "copies", "reads"]
Held = Literal["always", "but in Llama", "never"]


class Defaults(NamedTuple):
    """The arguments that a server chooses where they aren't given."""

    utilization: float
    tokens: int
    seqs: int


class Setting(NamedTuple):
    """The base of defaults: the length of a request, the GPUs that share a layer, whether it reads images."""

    context: int
    tp: int = 1
    images: bool = False


Choice = Callable[[Card, Setting], Defaults]


@dataclass(frozen=True, slots=True)
class Rules:
    """One release of a server.

    `choose` gives its defaults, `torch` is the PyTorch that it pins. It profiles its largest step, or (`profiles`
    False) leaves the rest of the memory for it. Beside weights it counts what is allocated, or (`reserved`) the
    segments; and of what lies outside PyTorch all there is on the card, or its growth since the CUDA context was there.
    The sampler sorts logits (in the model's dtype, or in float32), or searches for thresholds. Products with packed
    weights unpack them, copy their input, or do neither (`products`). An MLP has the result of its first product
    (`gate`) until its end in each model or in those that do not share Llama's code; never where the model is compiled.
    Images are encoded in the step itself, one for each sequence, or before it (`encodes_first`), as many as the tokens
    of a step may stand for.

    Layers with a window have blocks of their own where `windows`; layers of two kinds are padded to equally many where
    one has less than `padding` times as many as the other. `in_flight` are the steps whose tokens a window waits for.
    The cache's size in tokens is that of as many whole requests as it holds where `by_requests`. An estimate of the
    memory of CUDA graphs is taken off where `graphs`. Blocks are for `block` tokens by default.
    """

    server: str
    version: Version
    choose: Choice
    torch: str
    block: int = 16
    profiles: bool = True
    reserved: bool = False
    outside: Counted = "growth"
    sampler: Sampler = "sorts in float32"
    products: Products = "reads"
    gate: Held = "never"
    encodes_first: bool = False
    windows: bool = False
    padding: float = 1
    in_flight: int = 1
    by_requests: bool = False
    graphs: bool = False
    unread: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        """``vLLM 0.9.2``."""
        return f"{self.server} {'.'.join(map(str, self.version))}"

    def holds_gate(self, model_type: str) -> bool:
        """Whether an MLP of such a model has the result of its first product until its end."""
        return self.gate == "always" or (self.gate == "but in Llama" and model_type not in ("llama", "mistral"))

    @property
    def assumed(self) -> Iterator[str]:
        """Assumptions for the report."""
        if self.unread:
            earlier, later = self.unread
            yield (
                f"{self.name} was not read: it follows {self.server} {earlier}, and what changed up to {later} may "
                "be in it already"
            )
        if self.graphs:
            yield (
                f"{self.name} takes its estimate of the CUDA graphs' memory off the cache: of 0.26 to 4.38 GiB in "
                "public logs (vllm-project/vllm#30515, #37296); nothing with --enforce-eager"
            )
        else:
            yield f"CUDA graphs come on top of what {self.name} may take"
        if not self.profiles:
            yield f"{self.name} measures no step: it leaves the rest of the memory for steps and CUDA graphs"
        if self.by_requests:
            yield f"{self.name} gives the cache's size as the tokens of as many whole requests as it holds"


GRAPHS: Final = (round(0.26 * GiB), round(4.38 * GiB))
"""The least and the most that vLLM's logs call the estimated memory of CUDA graphs (vllm-project/vllm#30515, 0.26 GiB;
0.36 in gpustack/runner#251; 1.10; 4.38 in vllm-project/vllm#37296).
"""


class Change(NamedTuple):
    """A release that changed some entries of `Rules`."""

    since: Version
    source: str
    rules: dict[str, Any]


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


_ENDLESS: Final = 10**12
_VLLM: Final = (
    Change(
        (0, 4, 1),
        "worker/worker.py, worker/model_runner.py, model_executor/layers/sampler.py, config.py",
        {"choose": _prompts(_ENDLESS, 0), "torch": "2.2", "reserved": True, "sampler": "sorts"}
        | {"products": "unpacks", "gate": "always"},
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
        {"reserved": False, "outside": "all", "gate": "but in Llama", "torch": "2.5"},
    ),
    Change((0, 6, 6), "worker/worker.py, utils.py `memory_profiling` (pull request 10511)", {"outside": "growth"}),
    Change((0, 7, 0), "config.py: chunks of 2,048 tokens", {"choose": _prompts(32_768, 2048)}),
    Change(
        (0, 8, 0),
        "envs.py: V1, whose models are compiled; v1/worker/gpu_worker.py; engine/arg_utils.py; requirements",
        {"outside": "all", "gate": "never", "encodes_first": True, "choose": _by_name(1024), "torch": "2.6"},
    ),
    Change((0, 8, 4), "engine/arg_utils.py: 256 sequences but on H100 and H200", {"choose": _by_name(256)}),
    Change(
        (0, 8, 5),
        "engine/arg_utils.py: cards of 70 GiB; csrc/quantization/gptq_marlin/gptq_marlin.cu",
        {"choose": _by_size(a100=True), "products": "reads"},
    ),
    Change((0, 9, 0), "engine/arg_utils.py: no A100 (pull request 17885)", {"choose": _by_size(), "torch": "2.7"}),
    Change(
        (0, 9, 1),
        "v1/worker/gpu_worker.py (pull request 19312); v1/core/kv_cache_utils.py: groups of layers",
        {"outside": "growth", "windows": True},
    ),
    Change((0, 10, 2), "requirements", {"torch": "2.8"}),
    Change((0, 12, 0), "v1/core/kv_cache_utils.py: 1.25 times; requirements", {"padding": 1.25, "torch": "2.9"}),
    Change((0, 17, 0), "v1/sample/ops/topk_topp_triton.py; requirements", {"sampler": "searches", "torch": "2.10"}),
    Change((0, 18, 0), "v1/core/kv_cache_utils.py: 1.5 times", {"padding": 1.5}),
    Change(
        (0, 20, 0),
        "envs.py: VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS; config/cache.py: 0.92; requirements",
        {"graphs": True, "choose": _by_size(0.92), "torch": "2.11"},
    ),
    Change((0, 21, 0), "v1/core/kv_cache_utils.py: concurrency times length (issue 43308)", {"by_requests": True}),
    Change(
        (0, 26, 0),
        "config/vllm.py `max_in_flight_tokens`, v1/kv_cache_interface.py (issue 49878): two steps are in flight",
        {"in_flight": 2},
    ),
    Change((0, 27, 0), "utils/mem_utils.py `total_consumed`; requirements", {"torch": "2.13"}),
    Change((0, 28, 0), "engine/arg_utils.py: cards of 160 GiB", {"choose": _by_size(0.92, largest=16_384)}),
    Change((0, 33, 0), "requirements", {"torch": "2.14"}),
)
_VLLM_READ: Final = (
    "0.4.1 0.4.3 0.5.0 0.5.5 0.6.0 0.6.4 0.6.6 0.7.0 0.7.3 0.8.0 0.8.4 0.8.5 0.9.0 0.9.1 0.9.2 0.10.0 0.10.1 0.10.2 "
    "0.11.0 0.12.0 0.13.0 0.14.0 0.16.0 0.17.0 0.18.0 0.19.0 0.20.0 0.21.0 0.22.0 0.23.0 0.24.0 0.25.1 0.26.0 0.27.0 "
    "0.28.0 0.29.0 0.30.0 0.31.0 0.32.0 0.33.0"
)
_VLLM_UNREAD: Final = (
    "0.4.2 0.5.1 0.5.2 0.5.3 0.5.4 0.6.1 0.6.2 0.6.3 0.6.5 0.7.1 0.7.2 0.8.1 0.8.2 0.8.3 0.11.1 0.11.2 0.14.1 "
    "0.15.0 0.15.1 0.17.1 0.18.1 0.19.1 0.20.1 0.20.2 0.22.1 0.25.0 0.27.1"
)

# -- SGLang's ----------------------------------------------------------------------------------------------------------


_Tiers = tuple[tuple[int, int], ...]
_SHARES: Final = ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87), (1, 0.88))


def _left_by(reserved: Callable[[float, int, int], float], chunks: _Tiers) -> Choice:
    """`mem_fraction_static` of a card's MiB, with what `reserved` leaves of them for steps and CUDA graphs; `chunks`
    are the tokens of a step on cards smaller than as many GiB.
    """

    def choose(card: Card, setting: Setting) -> Defaults:
        size = card.bytes / MiB
        tokens = next((count for most, count in chunks if size < most * 1024), 16_384)
        return Defaults(round((size - reserved(size, tokens, setting.tp)) / size, 3), tokens, 1)

    return choose


def _by_gpus(large: bool = False) -> Choice:
    """A share by the number of GPUs; of cards above 80 GiB all but 13, where `large`."""

    def choose(card: Card, setting: Setting) -> Defaults:
        size = card.bytes / MiB
        share = next(share for gpus, share in _SHARES if setting.tp >= gpus)
        if large and size > 81_920:
            share = (size - 13 * 1024) / size
        return Defaults(share, 2048 if size < 25_000 else 8192, 1)

    return choose


def _by_card(size: float, _tokens: int, tp: int) -> float:
    """0.4.10's table."""
    if size < 35 * 1024:
        return (2.8 + tp / 10) * 1024
    if size < 160 * 1024:
        return ((9.5 if size < 90 * 1024 else 12) + tp / 2) * 1024
    return 32 * 1024


def _by_tokens(graphs_of_small: int) -> Callable[[float, int, int], float]:
    """0.5's formula: tokens of a step, sequences of the largest CUDA graph, GPUs."""

    def reserved(size: float, tokens: int, tp: int) -> float:
        tiers = ((20, 8, 8), (35, graphs_of_small, 80), (60, 32, 160), (160, 256, 512))
        graphs = next((few if tp < 4 else many for most, few, many in tiers if size < most * 1024), 512)
        taken = 512 + tokens * 1.5 + graphs * 2 + tp / 8 * 1024
        return max(taken, 10 * 1024) if size > 60 * 1024 else taken

    return reserved


_CHUNKS: Final[_Tiers] = ((35, 2048), (60, 4096), (160, 8192))
_SGLANG_RULES: Final = {"profiles": False, "block": 1, "windows": False}
_SGLANG: Final = (
    Change((0, 4, 2), "srt/server_args.py", {"choose": _by_gpus(), "torch": "2.5", **_SGLANG_RULES}),
    Change((0, 4, 6), "the same: large cards; pyproject.toml", {"choose": _by_gpus(large=True), "torch": "2.6"}),
    Change(
        (0, 4, 10),
        "srt/server_args.py: a table of cards",
        {"choose": _left_by(_by_card, ((35, 2048), (160, 8192))), "torch": "2.7"},
    ),
    Change((0, 5, 3), "srt/server_args.py: a formula", {"choose": _left_by(_by_tokens(16), _CHUNKS), "torch": "2.8"}),
    Change((0, 5, 9), "the same: larger graphs", {"choose": _left_by(_by_tokens(24), _CHUNKS), "torch": "2.9"}),
)
_SGLANG_READ: Final = "0.4.2 0.4.6 0.4.10 0.5.3 0.5.9"
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
        before = [other for other in releases if version and other < version][-1:]
        nearest = [*before, *[other for other in releases if not version or other > version][:1]]
        names = " and ".join(".".join(map(str, other)) for other in nearest)
        raise InputError(f"{server.title} {quoted(release.strip())} is not a known release: the nearest are {names}")
    entries: dict[str, Any] = {}
    for change in server.changes:
        if change.since <= version:
            entries |= change.rules
    if version in server.unread:
        earlier, later = max(v for v in server.read if v < version), min(v for v in server.read if v > version)
        if any(earlier < change.since <= later for change in server.changes):
            entries["unread"] = (".".join(map(str, earlier)), ".".join(map(str, later)))
    return Rules(server.title, version, **entries)


def _version(text: str) -> Version:
    """Numbers of ``v0.6.4.post1``, without what was posted after the release; () where it cannot be read."""
    match = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.\d+)?(?:\.?post\d+)?", text)
    return tuple(int(number or 0) for number in match.groups()) if match else ()
