"""`ServingReport`: what a paged server holds, for each scenario."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from memsize.records.answer import Answer
from memsize.records.fields import FlatTable
from memsize.records.finding import Finding
from memsize.records.fit import Remedied
from memsize.records.gpu import Card, Interval

if TYPE_CHECKING:
    from pandas import DataFrame


class LayerGroup(NamedTuple):
    """Layers that share a table of blocks: of which `kind` they are, how many, and the `window` of sliding ones."""

    kind: str
    layers: int
    window: int | None = None


class Concurrency(NamedTuple):
    """Requests at once, from `low` to `high`."""

    low: float
    high: float

    def texts(self) -> tuple[str, str]:
        """Both as text, rounded down: from a hundred on without decimals, which no server reaches exactly."""
        return _requests(self.low), _requests(self.high)


def _requests(count: float) -> str:
    return f"{int(count):,}" if count >= 100 else f"{int(count * 100 + 1e-6) / 100:,.2f}"


@dataclass(frozen=True, slots=True)
class Paged:
    """A paged cache of `available` bytes: how many `blocks` of `block_bytes` it has, the `tokens` that they hold, and
    how many requests of the whole context it serves at once. `request_blocks` are those of one such request.
    """

    available: Interval
    block_bytes: int
    request_blocks: int
    blocks: Interval
    tokens: Interval
    concurrency: Concurrency


_NOTHING = Interval(0, 0)


@dataclass(frozen=True, slots=True)
class ServingRow:
    """One scenario on each card. `weights` is what the model stores there, `profile` what the largest step needs beyond
    them, `non_torch` what is taken outside PyTorch. `paged` is None where nothing is left, by `shortage` bytes at
    least, or where the scenario could not be run, for the `reason`.
    """

    scenario: str
    title: str
    weights: int = 0
    profile: int = 0
    non_torch: Interval = _NOTHING
    paged: Paged | None = None
    shortage: int = 0
    reason: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class ServingReport(Answer):
    """What a paged server holds: one row per scenario. All bytes are those of one card."""

    kind: ClassVar = "serving"

    model: str
    card: Card
    asked: Mapping[str, object]
    """The arguments of the server, `context` filled in."""
    budget: int
    """The bytes of the card that the server may take."""
    groups: tuple[LayerGroup, ...]
    serving_rows: tuple[ServingRow, ...]
    remedied: Remedied | None = None
    """Where the first scenario has no room for one request: what would make room, `peak` being what it needs."""
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = field(default=())

    @property
    def ran(self) -> tuple[ServingRow, ...]:
        """The rows that could be run."""
        return tuple(row for row in self.serving_rows if row.reason is None)

    def tables(self) -> dict[str, FlatTable]:
        """`rows`, and `groups`: the layers that share a table of blocks."""
        return {
            "rows": FlatTable.of(map(_record, self.serving_rows), _SIZES),
            "groups": FlatTable.of(group._asdict() for group in self.groups),
        }

    @property
    def rows(self) -> DataFrame:
        """One row per scenario; all sizes in bytes."""
        return self.tables()["rows"].frame()


_SIZES: Final = ("weights", "profile", "non_torch_from", "non_torch_to", "kv_cache_from", "kv_cache_to", "shortage")


def _record(row: ServingRow) -> dict[str, object]:
    paged = row.paged
    return {
        "scenario": row.scenario,
        "weights": row.weights,
        "profile": row.profile,
        "non_torch_from": row.non_torch.low,
        "non_torch_to": row.non_torch.high,
        "kv_cache_from": paged and paged.available.low,
        "kv_cache_to": paged and paged.available.high,
        "block_bytes": paged and paged.block_bytes,
        "blocks_from": paged and paged.blocks.low,
        "blocks_to": paged and paged.blocks.high,
        "tokens_from": paged and paged.tokens.low,
        "tokens_to": paged and paged.tokens.high,
        "concurrency_from": paged and paged.concurrency.low,
        "concurrency_to": paged and paged.concurrency.high,
        "shortage": row.shortage,
        "reason": row.reason,
    }
