"""`GenerationReport`: what generating tokens holds, for each scenario and batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from memsize.records.answer import Answer
from memsize.records.fields import FlatTable
from memsize.records.finding import Finding
from memsize.records.fit import Remedied
from memsize.records.gpu import Card, GpuEstimate
from memsize.records.trace import InputTensor, Trace

if TYPE_CHECKING:
    from pandas import DataFrame


class CachedLayers(NamedTuple):
    """The layers of a cache that keep the same: of which `kind` they are, how many, and in bytes for one sequence what
    they hold at the end, and what one more token adds to that.
    """

    kind: str
    layers: int
    bytes: int
    per_token: int


class Phase(NamedTuple):
    """Bytes that tensors ask for: the most during a phase, and what is left at its end."""

    peak: int = 0
    end: int = 0


_NOTHING = Phase()


@dataclass(frozen=True, slots=True)
class GenerationRow:
    """One scenario at one batch and prompt.

    `weights` is what the model stores, `assistant` what of it is its assistant's. `prefill` reads the prompt, `decode`
    makes all further tokens. `cache` is the KV cache at the end, of all `batch` sequences, `per_token` what one more
    token of each of them adds. Of an offloaded cache `hosted` is on the host then, for which PyTorch keeps `pinned`
    bytes there. `transient` is the most that is alive at once during a decode step beside the weights, the workspaces
    and the cache at its end. `estimate` is what the GPU would show; None, with the `reason`, where the scenario could
    not be run.
    """

    scenario: str
    title: str
    batch: int
    prompt: int
    new: int
    weights: int = 0
    assistant: int = 0
    prefill: Phase = _NOTHING
    decode: Phase = _NOTHING
    cache: int = 0
    per_token: int = 0
    hosted: int = 0
    pinned: int = 0
    transient: int = 0
    layers: tuple[CachedLayers, ...] = ()
    estimate: GpuEstimate | None = None
    reason: str | None = None
    traced: tuple[int, ...] = ()
    """The numbers of tokens that were traced for it: the prompt, and those at the ends of some steps."""
    exact: bool = True
    """Whether every figure that was not traced itself lies on a polynomial that was checked to the byte."""

    @property
    def per_sequence(self) -> int:
        """Bytes of the cache for one sequence at the end."""
        return self.cache // self.batch

    @property
    def fits(self) -> bool | None:
        """Whether it fits the GPU; None where it could not be run."""
        return None if self.estimate is None else self.estimate.shortage is None


@dataclass(frozen=True, slots=True, repr=False)
class GenerationReport(Answer):
    """What generating tokens holds: one row per scenario, batch and prompt, and the run behind the largest of them."""

    kind: ClassVar = "generation"

    model: str
    card: Card
    inputs: tuple[InputTensor, ...]
    generation_rows: tuple[GenerationRow, ...]
    trace: Trace
    """The whole run of the row with the highest peak. Of decode steps between two that are alike but for their lengths,
    tensors of at most 1 MiB that a step makes and frees are left out."""
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    asked: Mapping[str, object] = field(default_factory=dict)
    """What `generate` was called with."""
    allocator: str = ""
    """The settings of the caching allocator as JSON data; empty where they are PyTorch's."""
    remedied: Remedied | None = None
    """What would make the first row fit that does not, of the first scenario; None where all of its rows do."""

    @property
    def ran(self) -> tuple[GenerationRow, ...]:
        """The rows that could be run."""
        return tuple(row for row in self.generation_rows if row.estimate is not None)

    def tables(self) -> dict[str, FlatTable]:
        """`rows`, and `cache`: the kinds of layers in each row's cache."""
        return {
            "rows": FlatTable.of(map(_record, self.generation_rows), _SIZES),
            "cache": FlatTable.of(
                (
                    {"scenario": row.scenario, "batch": row.batch, "prompt": row.prompt} | kind._asdict()
                    for row in self.generation_rows
                    for kind in row.layers
                ),
                ("per_token",),
            ),
        }

    @property
    def rows(self) -> DataFrame:
        """One row per scenario, batch and prompt; all sizes in bytes."""
        return self.tables()["rows"].frame()

    @property
    def cache(self) -> DataFrame:
        """One row per kind of layer in each row's cache: bytes for one sequence."""
        return self.tables()["cache"].frame()


_SIZES: Final = (
    *("weights", "assistant_weights", "prefill_peak", "after_prefill", "decode_peak", "after_decode"),
    *("kv_cache", "kv_per_token", "kv_per_sequence", "kv_on_host", "pinned", "transient"),
    *("requested", "allocated", "reserved", "device_from", "device_to"),
)


def _record(row: GenerationRow) -> dict[str, object]:
    peak = row.estimate
    return {
        "scenario": row.scenario,
        "batch": row.batch,
        "prompt": row.prompt,
        "new": row.new,
        "weights": row.weights,
        "assistant_weights": row.assistant,
        "prefill_peak": row.prefill.peak,
        "after_prefill": row.prefill.end,
        "decode_peak": row.decode.peak,
        "after_decode": row.decode.end,
        "kv_cache": row.cache,
        "kv_per_token": row.per_token,
        "kv_per_sequence": row.per_sequence,
        "kv_on_host": row.hosted,
        "pinned": row.pinned,
        "transient": row.transient,
        "requested": peak.requested if peak else None,
        "allocated": peak.allocated if peak else None,
        "reserved": peak.reserved if peak else None,
        "device_from": peak.device.low if peak else None,
        "device_to": peak.device.high if peak else None,
        "fits": row.fits,
        "exact": row.exact,
        "reason": row.reason,
    }
