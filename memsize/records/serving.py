"""`ServingReport`: the memory of a paged server, for each scenario."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field as attribute
from typing import Any, ClassVar, Final, NamedTuple, TypedDict

from memsize.records.answer import Answer, TableFrame
from memsize.records.fields import SCENARIO, Cell, Field, Fields, FlatTable, Kind, field
from memsize.records.finding import Finding
from memsize.records.fit import Remedied
from memsize.records.gpu import Card, Interval
from memsize.units import Bytes


class LayerGroup(NamedTuple):
    """Layers that share a table of blocks: of which `kind` they are, how many, and the `window` of sliding ones."""

    kind: str
    layers: int
    window: int | None = None


class LaterArguments(TypedDict, total=False):
    """Arguments of a server that older files lack: adapters in a step, their largest rank, the method of speculative
    decoding, and the tokens that it drafts."""

    loras: int
    lora_rank: int
    speculative: str | None
    drafted: int


class ServingArguments(LaterArguments):
    """The arguments of a server: `memsize.spec.generation.ServerArguments` by the names that answers have for them."""

    server: str
    utilization: float
    block: int
    batched_tokens: int
    seqs: int
    context: int | None
    tp: int
    kv_dtype: str | None
    kv_bytes: int | None


class Concurrency(NamedTuple):
    """Requests at once, from `low` to `high`."""

    low: float
    high: float

    @property
    def middle(self) -> str:
        """The number halfway between the ends, as text."""
        return _requests((self.low + self.high) / 2)


def _requests(count: float) -> str:
    """A number as text, rounded down: from a hundred on without decimals, which no server reaches exactly."""
    return f"{int(count):,}" if count >= 100 else f"{int(count * 100 + 1e-6) / 100:,.2f}"


_NOTHING = Interval(0, 0)


@dataclass(frozen=True, slots=True)
class Paged:
    """A paged cache of `available` bytes: how many `blocks` of `block_bytes` it has, the `tokens` that they hold, and
    how many requests of the whole context it serves at once. `request_blocks` are those of one such request, `longest`
    is the length of the longest request that fits.
    """

    available: Interval
    block_bytes: int
    request_blocks: int
    blocks: Interval
    tokens: Interval
    concurrency: Concurrency
    longest: Interval | None = None


@dataclass(frozen=True, slots=True)
class ServingRow:
    """One scenario on each card. `weights` is what the model stores there, `profile` what the largest step needs beyond
    them, `non_torch` what is taken outside PyTorch, `graphs` what is set aside for CUDA graphs. `paged` is None where
    nothing is left, by `shortage` bytes at least, or where the scenario could not be run, for the `reason`.
    """

    scenario: str
    title: str
    weights: int = 0
    profile: int = 0
    non_torch: Interval = _NOTHING
    graphs: Interval = _NOTHING
    paged: Paged | None = None
    shortage: int = 0
    reason: str | None = None


_NO_CACHE: Final = Paged(_NOTHING, 0, 0, _NOTHING, _NOTHING, Concurrency(0, 0))


def _interval(
    key: str,
    title: str,
    kind: Kind,
    weight: int,
    hint: str,
    *,
    figure: str = "",
    draw: Callable[[Any], Cell] = int,
    optional: bool = False,
) -> tuple[Field[ServingRow], Field[ServingRow]]:
    """Two fields for the ends of an interval of `Paged`; without an interval files have None, documents 0."""

    def getters(end: str) -> dict[str, Any]:
        def cell(row: ServingRow, _: object) -> Cell:
            interval = None if row.reason is not None else getattr(row.paged or _NO_CACHE, figure or key)
            return None if interval is None else draw(getattr(interval, end))

        return {"get": f"paged.{figure or key}.{end}", "cell": cell, "optional": optional}

    return (
        field(f"{key}_from", title, kind, weight, hint, key=key, **getters("low")),
        field(f"{key}_to", "to", kind, weight, "upper bound", key=f"{key}_high", beside=key, **getters("high")),
    )


_CACHE_HINT: Final = "memory left for the cache, at least"
_LONGEST_HINT: Final = "the longest request that the cache holds, at least"
_CONCURRENCY_HINT: Final = "requests of the whole context at once, at least"

SERVING_FIELDS: Final = Fields[ServingRow](
    SCENARIO,
    field("weights", "weights", "bytes", 98, "parameters and buffers"),
    field("profile", "step", "bytes", 97, "memory of the largest step, without the weights"),
    field("non_torch_from", kind="bytes", get="non_torch.low"),
    field("non_torch_to", kind="bytes", get="non_torch.high"),
    *_interval("kv_cache", "KV cache from", "bytes", 96, _CACHE_HINT, figure="available", draw=Bytes),
    field("block_bytes", kind="bytes", get="paged.block_bytes"),
    *_interval("blocks", "blocks from", "count", 80, "blocks of the cache, at least"),
    *_interval("tokens", "tokens from", "count", 95, "tokens that they hold, at least"),
    *_interval("concurrency", "requests from", "count", 93, _CONCURRENCY_HINT, draw=_requests),
    *_interval("longest", "longest from", "count", 70, _LONGEST_HINT, optional=True),
    field("graphs_from", kind="bytes", get="graphs.low"),
    field("graphs_to", kind="bytes", get="graphs.high"),
    field("shortage", kind="bytes"),
    field("reason"),
    lacks=lambda row: row.reason is not None,
)

GROUP_FIELDS: Final = Fields[LayerGroup](
    field("kind", "attention", "text", 100, "how the layer stores past tokens"),
    field("layers", "layers", "count", 99, "number of layers that share a table of blocks"),
    field("window", "window", "count", 98, "the tokens that a sliding window keeps"),
)


@dataclass(frozen=True, slots=True, repr=False)
class ServingReport(Answer):
    """The memory of a paged server: one row per scenario. All bytes are those of one card."""

    kind: ClassVar = "serving"

    model: str
    card: Card
    asked: ServingArguments
    """The arguments of the server, `context` filled in."""
    budget: int
    """The bytes of the card that the server may take."""
    groups: tuple[LayerGroup, ...]
    serving_rows: tuple[ServingRow, ...]
    remedied: Remedied | None = None
    """Remedies where the first scenario has no room for one request, else None; `peak` is the memory that it needs."""
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = attribute(default=())

    @property
    def ran(self) -> tuple[ServingRow, ...]:
        """The rows that could be run."""
        return tuple(row for row in self.serving_rows if row.reason is None)

    def tables(self) -> dict[str, FlatTable]:
        """`rows`, and `groups`: the layers that share a table of blocks."""
        return {"rows": SERVING_FIELDS.flat(self.serving_rows), "groups": GROUP_FIELDS.flat(self.groups)}

    rows = TableFrame("rows", "One row per scenario; all sizes in bytes.")
