"""`GenerationReport`: the memory of token generation, for each scenario and batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field as attribute
from typing import ClassVar, Final, NamedTuple

from memsize.records.answer import Answer, TableFrame
from memsize.records.fields import SCENARIO, Fields, FlatTable, field
from memsize.records.finding import Finding
from memsize.records.fit import Remedied
from memsize.records.gpu import Card, GpuEstimate
from memsize.records.trace import InputTensor, Trace


class CachedLayers(NamedTuple):
    """Cached layers of one size: the `bytes` of one sequence at the end, and those that one more token adds."""

    kind: str
    layers: int
    bytes: int
    per_token: int


class Phase(NamedTuple):
    """Requested bytes: the peak during a phase, and the bytes alive at its end."""

    peak: int = 0
    end: int = 0


_NOTHING = Phase()


@dataclass(frozen=True, slots=True)
class GenerationRow:
    """One scenario at one batch and prompt.

    `weights` is the size of the model, `assistant` the part of it that belongs to its assistant. `prefill` reads the
    prompt, `decode` makes all further tokens. `cache` is the KV cache at the end, of all `batch` sequences, `per_token`
    what one more token of each of them adds. Of an offloaded cache `hosted` is on the host then, for which PyTorch
    keeps `pinned` bytes there. `transient` is the most that is alive at once during a decode step beside the weights,
    the workspaces and the cache at its end. `estimate` is what the GPU would show; None, with the `reason`, where the
    scenario could not be run.
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
        """True if the run fits the GPU; None where it could not be run."""
        return None if self.estimate is None else self.estimate.shortage is None


GENERATION_FIELDS: Final = Fields[GenerationRow](
    SCENARIO,
    field("batch", "batch", "count", 99, "sequences at once", is_key=True),
    field("prompt", "prompt", "count", 98, "tokens of each prompt", is_key=True),
    field("new", "new", "count", 60, "tokens that are generated after it", is_key=True, alone="new tokens"),
    field("weights", "weights", "bytes", 90, "parameters and buffers"),
    field("assistant_weights", kind="bytes", get="assistant"),
    field("prefill_peak", "prefill", "bytes", 92, "peak of live memory while the prompt is read", key="prefill"),
    field("after_prefill", kind="bytes", get="prefill.end"),
    field("decode_peak", "decode", "bytes", 91, "peak of live memory in the steps after the prompt", key="decode"),
    field("after_decode", kind="bytes", get="decode.end"),
    field("kv_cache", "KV cache", "bytes", 95, "the cache of all sequences at the end", get="cache"),
    field("kv_per_token", "bytes per token", "bytes", 85, "growth of the cache per token of a sequence", drawn="count"),
    field("kv_per_sequence", kind="bytes", get="per_sequence"),
    field("kv_on_host", "on the host", "bytes", 94, "part of the cache in host memory at the end", key="hosted"),
    field("pinned", kind="bytes"),
    field("transient", "temporary", "bytes", 70, "memory that a decode step takes and gives back"),
    field("requested", kind="bytes", get="estimate.requested"),
    field("allocated", kind="bytes", get="estimate.allocated"),
    field("reserved", "reserved", "bytes", 88, "the allocator's segments at their peak", get="estimate.reserved"),
    field("device_from", "nvidia-smi from", "bytes", 75, "lower bound of the figure in nvidia-smi", key="device_low"),
    field("device_to", "to", "bytes", 75, "upper bound of that figure", key="device_high", beside="device_low"),
    field("fits", "fits", "text", 97, "whether it fits the GPU"),
    field("exact"),
    field("reason"),
    get={
        "prefill_peak": "prefill.peak",
        "decode_peak": "decode.peak",
        "kv_per_token": "per_token",
        "kv_on_host": "hosted",
        "device_from": "estimate.device.low",
        "device_to": "estimate.device.high",
    },
    cell={
        "kv_per_token": lambda row, _: None if row.estimate is None else row.per_token // row.batch,
        "fits": lambda row, _: None if row.fits is None else "yes" if row.fits else "no",
    },
    key={"kv_per_token": "per_token"},
    lacks=lambda row: row.estimate is None,
)

GENERATION_TABLE: Final = (
    *("scenario", "batch", "prompt", "new", "weights", "kv_cache", "kv_per_token", "kv_on_host", "prefill_peak"),
    *("decode_peak", "transient", "reserved", "device_from", "device_to", "fits"),
)
"""The fields of the table that documents show, in their order."""


class CachedRow(NamedTuple):
    """One kind of layer in the cache of a row."""

    row: GenerationRow
    cached: CachedLayers


CACHE_FIELDS: Final = Fields[CachedRow](
    field("scenario", get="row.scenario"),
    field("batch", kind="count", get="row.batch"),
    field("prompt", "prompt", "count", 90, "tokens of the prompt", get="row.prompt"),
    field("kind", "kind of layer", "text", 100, "how the layer stores past tokens", get="cached.kind"),
    field("layers", "layers", "count", 95, "number of such layers", get="cached.layers"),
    field("bytes", "KV cache", "bytes", 98, "bytes for one sequence at the end", get="cached.bytes"),
    field("per_token", "bytes per token", "bytes", 97, "growth per token", drawn="count", get="cached.per_token"),
)


def decisive_row(rows: Sequence[GenerationRow]) -> GenerationRow | None:
    """The row that a verdict is about: the first scenario's first row that does not fit, else its highest peak."""
    first = [row for row in rows if row.estimate and row.scenario == rows[0].scenario]
    if (exceeds := next((row for row in first if not row.fits), None)) is not None:
        return exceeds
    return max(first, key=lambda row: row.estimate.requested if row.estimate else 0, default=None)


@dataclass(frozen=True, slots=True, repr=False)
class GenerationReport(Answer):
    """The memory of token generation: one row per scenario, batch and prompt, and the run with the highest peak."""

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
    asked: Mapping[str, object] = attribute(default_factory=dict)
    """The arguments of `generate`."""
    allocator: str = ""
    """The settings of the caching allocator as JSON data; empty where they are PyTorch's."""
    remedied: Remedied | None = None
    """Remedies for the first row of the first scenario that does not fit; None where all of its rows fit."""

    @property
    def ran(self) -> tuple[GenerationRow, ...]:
        """The rows that could be run."""
        return tuple(row for row in self.generation_rows if row.estimate is not None)

    def tables(self) -> dict[str, FlatTable]:
        """`rows`, and `cache`: the kinds of layers in each row's cache."""
        layers = (CachedRow(row, kind) for row in self.generation_rows for kind in row.layers)
        return {"rows": GENERATION_FIELDS.flat(self.generation_rows), "cache": CACHE_FIELDS.flat(layers)}

    rows = TableFrame("rows", "One row per scenario, batch and prompt; all sizes in bytes.")
    cache = TableFrame("cache", "One row per kind of layer in each row's cache: bytes for one sequence.")
