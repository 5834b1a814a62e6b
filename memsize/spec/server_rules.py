"""The memory that a release of a server counts when it sizes its cache, and how its defaults are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

from memsize.records.gpu import Card

Version = tuple[int, ...]
Counted = Literal["all", "growth"]
Sampler = Literal["sorts", "sorts in float32", "searches in tiles", "searches", "copies"]
Products = Literal["unpacks", "copies", "reads", "tiles"]
Held = Literal["always", "but in Llama", "never"]
StateKind = Literal["", "delta net", "Mamba", "Mamba-2"]
Buffers = Literal["of each product", "of both", "of the server"]
GraphEstimate = Literal["ignored", "extrapolated", "measured"]


class Defaults(NamedTuple):
    """The arguments that a server chooses where they aren't given."""

    utilization: float
    tokens: int
    seqs: int


class Setting(NamedTuple):
    """The base of defaults: the length of a request, the GPUs that share a layer, the size of an encoder of `images`
    (layers × width², in units of ViT-L's; 0: none), and whether attention is `latent`.
    """

    context: int
    tp: int = 1
    images: float = 0
    latent: bool = False


class ServedKind(NamedTuple):
    """Facts by which vLLM chooses the model runner that serves a model, and SGLang its pools; `has_states` of layers
    such as Mamba's, of a kind of `states` (empty: another).
    """

    architecture: str = ""
    has_experts: bool = False
    has_states: bool = False
    is_quantized: bool = False
    is_latent: bool = False
    states: StateKind = ""


class StateBlocks(NamedTuple):
    """The states of a request in a layer: in so many blocks, or (0) in each block of the request; the tokens of a block
    are a multiple of `aligned`.
    """

    blocks: int = 1
    aligned: int = 16


ONE_STATE: Final = StateBlocks()


class GraphSizes(NamedTuple):
    """The CUDA graphs that vLLM captures: how many piecewise and how many full ones, and the tokens of the largest."""

    piecewise: int
    full: int
    largest: int
    largest_full: int


PLAIN: Final = ServedKind()
"""A dense model in the dtype of its config."""
Choice = Callable[[Card, Setting], Defaults]


@dataclass(frozen=True, slots=True)
class Rules:
    """One release of a server.

    `choose` gives its defaults, `torch` is the PyTorch that it pins. It profiles its largest step, or (`profiles`
    False) leaves the rest of the memory for it. Beside weights it counts what is allocated, or (`reserved`) the
    segments; and of what lies outside PyTorch all there is on the card, or its growth since the CUDA context was there.
    That is what is in use less what is allocated, or (`slack` False) less the segments. The sum of what cards computed
    that share a layer is a tensor of its own where `sums_beside`. The sampler sorts logits (in the model's dtype, or in
    float32), or searches for thresholds (with a row of logits on each multiprocessor, or without). Products with packed
    weights unpack them, copy their input, or do neither, with sums of 1,024 rows or of a tile on each multiprocessor
    (`products`). An MLP has the result of its first product (`gate`) until its end in each model or in those that do
    not share Llama's code; never where the model is compiled. `experts` have a buffer for each product or one for both,
    or a workspace of the server, which stays. Latent attention multiplies its projections beforehand where it `absorbs`
    them. The allocator splits no block above 20 MiB for weights where `unsplit`. A first start `benchmarks` combined
    kernels. Images are encoded in the step itself, one for each sequence, or before it (`encodes_first`), as many as
    the tokens of a step may stand for; it `holds_images` until the step ends. Where it `randomizes` the states that the
    head reads, they are a second tensor.

    Layers with a window have blocks of their own where `windows`; layers of two kinds are padded to equally many where
    one has less than `padding` times as many as the other. `states` tells how many blocks have the states of a request
    beside attention: where prefixes are cached, more than one. `in_flight` are the steps whose tokens a window waits
    for. Elsewhere `pools` tells for which models such layers have room for fewer tokens, and states take `of_states`
    times the memory of keys and values (None: not covered). The cache's size in tokens is that of as many whole
    requests as it holds where `by_requests`. An estimate of the memory of CUDA graphs is taken off where `graphs` says
    how it is made (or it is made and ignored): each but the first counts as the second does, or the piecewise ones are
    measured. Blocks are for `block` tokens by default. `second` tells which models the second model runner serves,
    whose counts of tokens are part of what is measured where `counts`. Adapters have slots in experts where it
    `adapts_experts`.
    """

    server: str
    version: Version
    choose: Choice
    torch: str
    block: int = 16
    profiles: bool = True
    reserved: bool = False
    outside: Counted = "growth"
    slack: bool = False
    sums_beside: bool = True
    sampler: Sampler = "sorts in float32"
    products: Products = "reads"
    gate: Held = "never"
    experts: Buffers = "of the server"
    absorbs: bool = False
    unsplit: bool = False
    benchmarks: bool = False
    encodes_first: bool = False
    holds_images: bool = False
    randomizes: bool = False
    windows: bool = False
    padding: float = 1
    pools: Callable[[ServedKind], bool] = lambda _: False
    of_states: float | None = None
    states: Callable[[ServedKind, Card], StateBlocks] = lambda *_: ONE_STATE
    in_flight: int = 1
    by_requests: bool = False
    graphs: GraphEstimate | None = None
    second: Callable[[ServedKind], bool] = lambda _: False
    counts: bool = False
    adapts_experts: bool = False
    unread: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        """``vLLM 0.9.2``."""
        return f"{self.server} {'.'.join(map(str, self.version))}"

    @property
    def compiled(self) -> bool:
        """Whether models are compiled: those of vLLM's engine V1."""
        return self.profiles and self.gate == "never"

    def holds_gate(self, model_type: str) -> bool:
        """Whether an MLP of such a model has the result of its first product until its end."""
        return self.gate == "always" or (self.gate == "but in Llama" and model_type not in ("llama", "mistral"))

    def serving(self, kind: ServedKind) -> Rules:
        """The rules of the model runner that serves such a model. The second one samples from a copy of the logits in
        float32, holds no images and no second states during a step, and at first did not estimate the memory of CUDA
        graphs (`profile_run` and `profile_cudagraph_memory` in v1/worker/gpu/model_runner.py). It has two counts of
        each token of the vocabulary for each sequence.
        """
        if not self.second(kind):
            return replace(self, counts=False)
        sampler: Sampler = self.sampler if self.version >= _SAMPLES_IN_FULL else "copies"
        graphs: GraphEstimate | None = "measured" if self.version >= _ESTIMATES_GRAPHS else None
        return replace(self, sampler=sampler, graphs=graphs, holds_images=False, randomizes=False)

    def graph_sizes(self, card: Card, tokens: int, seqs: int) -> GraphSizes:
        """The graphs of a server with steps of so many tokens and sequences (`_set_cudagraph_sizes` in config/vllm.py):
        full ones hold a token of each sequence, piecewise ones up to twice as many.
        """
        largest = 1024 if card.capability[0] == _DATACENTER_BLACKWELL and self.version >= _LARGER_GRAPHS else 512
        largest = min(2 * seqs, tokens, largest)
        sizes = (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16))
        piecewise, full = ([size for size in sizes if size <= most] for most in (largest, min(largest, seqs)))
        return GraphSizes(len(piecewise), len(full), piecewise[-1], full[-1])

    @property
    def assumed(self) -> Iterator[str]:
        """Assumptions for the report."""
        if self.unread:
            earlier, later = self.unread
            yield (
                f"{self.name} was not read: it follows {self.server} {earlier}, and what changed up to {later} may "
                "be in it already"
            )
        if self.graphs in (None, "ignored"):
            yield f"CUDA graphs need memory in addition to the share of {self.name}"
        if not self.profiles:
            yield f"{self.name} measures no step: it leaves the rest of the memory for steps and CUDA graphs"
        if self.by_requests:
            yield f"{self.name} gives the cache's size as the tokens of as many whole requests as it holds"


_ESTIMATES_GRAPHS: Final = (0, 29, 0)
_LARGER_GRAPHS: Final = (0, 28, 0)
_SAMPLES_IN_FULL: Final = (0, 33, 0)
_DATACENTER_BLACKWELL: Final = 10
"""The major number of the compute capability of B200 and B300."""


class Change(NamedTuple):
    """A release that changed some entries of `Rules`."""

    since: Version
    source: str
    rules: dict[str, Any]
