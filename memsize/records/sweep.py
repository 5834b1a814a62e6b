"""`Sweep`: what each cell of a grid of models and settings needs, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from memsize import files
from memsize.errors import OutputError
from memsize.records.answer import Answer
from memsize.records.fields import FlatTable
from memsize.records.finding import Finding
from memsize.records.gpu import Interval
from memsize.records.roles import Role

if TYPE_CHECKING:
    from pandas import DataFrame

Outcome = Literal["fits", "exceeds", "unsure", "failed"]
"""Whether a cell fits its GPU. `unsure`: it depends on what the CUDA context and cuDNN's workspaces take. `failed`: it
could not be run."""


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One cell: its `settings` by the keys of the sweep's file, and its peak in bytes, as `GpuEstimate` has it.

    `reason` is why it failed, and every figure is None then. `gpu_bytes` are all of its GPU. `seconds` is what the run
    took, which cells of GPUs of one kind share. Where a training is spread over several `gpus`, all is that of one.
    """

    settings: Mapping[str, object]
    outcome: Outcome
    reason: str | None = None
    parameters: int | None = None
    stored: int | None = None
    requested: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    device: Interval | None = None
    gpu_bytes: int | None = None
    phase: str = ""
    layer: str = ""
    roles: Mapping[Role, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    gpus: int = 1

    @property
    def left(self) -> int | None:
        """Bytes of the GPU that are free at the peak at least, below 0 where they are too few."""
        return None if self.device is None or self.gpu_bytes is None else self.gpu_bytes - self.device.high

    @property
    def place(self) -> str:
        """Where it is run: its GPU, and how many of them where the training is spread (``8 x H100 80GB``)."""
        gpu = str(self.settings["gpu"])
        return f"{self.gpus} x {gpu}" if "parallel" in self.settings else gpu


COLUMNS = (
    *("target", "arguments", "input", "inputs", "train", "loss", "accumulate", "ema", "scenario", "mode", "stack"),
    *("allocator", "execute", "parallel", "seq_len", "batch_size", "gpu"),
)
"""The settings in the order of their columns."""


def varying(cells: Iterable[Mapping[str, object]]) -> tuple[str, ...]:
    """The settings in which cells differ."""
    found = tuple(cells)
    return tuple(key for key in COLUMNS if len({repr(settings.get(key)) for settings in found}) > 1)


def phrase_of(settings: Mapping[str, object], keys: Iterable[str]) -> str:
    """Those of `settings` that are named by `keys` in a few words: ``timm:resnet18, amp-fp16, batch 8, Tesla T4``."""
    words = {"batch_size": "batch {}", "seq_len": "{} tokens", "gpu": "on {}", "train": "training with {}"}
    told = (words.get(key, "{}").format(setting_text(settings[key])) for key in keys if settings.get(key) is not None)
    return ", ".join("inference" if part == "training with none" else part for part in told)


@dataclass(frozen=True, slots=True, repr=False)
class Sweep(Answer):
    """A sweep: its cells in their order, and what follows from them. `reused` were in the results file already."""

    kind: ClassVar = "sweep"

    name: str
    sweep_rows: tuple[SweepRow, ...]
    findings: tuple[Finding, ...] = ()
    reused: int = 0
    missing: tuple[str, ...] = ()
    """The cells that were not run since Ctrl-C ended it before, each in a few words; empty where it is complete."""

    @property
    def used(self) -> tuple[str, ...]:
        """The settings that some cell has."""
        return tuple(key for key in COLUMNS if any(key in row.settings for row in self.sweep_rows))

    @property
    def varying(self) -> tuple[str, ...]:
        """The settings in which cells differ."""
        return varying(row.settings for row in self.sweep_rows)

    def tables(self) -> dict[str, FlatTable]:
        """`rows`, as the property of this name has them."""
        return {"rows": FlatTable.of((_record(row, self.used) for row in self.sweep_rows), _SIZES)}

    @property
    def rows(self) -> DataFrame:
        """One row per cell, all sizes in bytes."""
        frame = self.tables()["rows"].frame()
        return frame.astype(
            {name: "Int64" for name in (*_SIZES, "parameters", "seq_len", "batch_size") if name in frame}
        )

    def to_parquet(self, path: str | Path) -> None:
        """Write the rows to a parquet file; a file that exists is replaced. Raises `OutputError` without pyarrow."""
        files.write(path, self.parquet(), overwrite=True)

    def parquet(self) -> bytes:
        """The rows as the content of a parquet file."""
        try:
            content: bytes = self.rows.to_parquet(None, engine="pyarrow", index=False)
        except ImportError:
            raise OutputError("parquet files need pyarrow: pip install 'memsize[parquet]'") from None
        return content


def setting_text(value: object) -> object:
    """A setting as a cell of a table holds it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={each}" for name, each in value.items())
    return "; ".join(map(str, value)) if isinstance(value, list | tuple) else value


_SIZES = ("stored", "requested", "allocated", "reserved", "device_from", "device_to", "gpu_bytes", "left")


def _record(row: SweepRow, settings: tuple[str, ...]) -> dict[str, object]:
    return {
        **{key: setting_text(row.settings.get(key)) for key in settings},
        **({"gpus": row.gpus} if "parallel" in settings else {}),
        "outcome": row.outcome,
        "parameters": row.parameters,
        "stored": row.stored,
        "requested": row.requested,
        "allocated": row.allocated,
        "reserved": row.reserved,
        "device_from": row.device and row.device.low,
        "device_to": row.device and row.device.high,
        "gpu_bytes": row.gpu_bytes,
        "left": row.left,
        "phase": row.phase or None,
        "layer": row.layer or None,
        "seconds": row.seconds,
        "reason": row.reason,
    }
