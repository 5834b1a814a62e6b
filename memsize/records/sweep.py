"""`Sweep`: what each cell of a grid of models and settings needs, and whether it fits; and the file of its results.

A results file has a line of JSON for each cell, added when it is done. A process that is killed while it writes leaves
a last line without an end; it is cut off when the file is opened again. A cell's line says what it was made with:
memsize, torch, and the model's code as far as it is one file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field as attribute
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, Literal

from memsize import files
from memsize.errors import OutputError
from memsize.records.answer import Answer, TableFrame
from memsize.records.codec import coder
from memsize.records.fields import (
    Cell,
    Field,
    Fields,
    FlatTable,
    Kind,
    Label,
    Missing,
    Path as LayerPath,
    field,
    shown,
)
from memsize.records.finding import Finding
from memsize.records.gpu import Interval
from memsize.records.roles import Role, noun

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
    roles: Mapping[Role, int] = attribute(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    gpus: int = 1

    def validate(self) -> None:
        """Raise ValueError unless the settings name a target and a GPU."""
        if missing := {"target", "gpu"} - self.settings.keys():
            raise ValueError(f"the settings of a cell lack {min(missing)!r}")

    @property
    def left(self) -> int | None:
        """The smallest number of bytes of the GPU that are free at the peak; below 0 where they do not suffice."""
        return None if self.device is None or self.gpu_bytes is None else self.gpu_bytes - self.device.high

    @property
    def place(self) -> str:
        """The GPU of the cell, with the number of GPUs where the training is spread (``8 x H100 80GB``)."""
        gpu = str(self.settings["gpu"])
        return f"{self.gpus} x {gpu}" if "parallel" in self.settings else gpu


def setting_text(value: object) -> object:
    """A setting as a cell of a table holds it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={item}" for name, item in value.items())
    return "; ".join(map(str, value)) if isinstance(value, list | tuple) else value


def setting_cell(key: str, row: SweepRow) -> str | int | None:
    """A setting of a cell as documents show it."""
    value = setting_text(row.settings.get(key))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, int) or value is None else str(value)


def _setting(key: str, title: str, kind: Kind, hint: str, nullable: bool = False) -> Field[SweepRow]:
    def cell(row: SweepRow, _: object) -> Cell:
        return Label(str(row.settings[key])) if key == "target" else setting_cell(key, row)

    def text(row: SweepRow) -> object:
        return setting_text(row.settings.get(key))

    return field(key, title, kind, 0, hint, get=text, cell=cell, nullable=nullable)


SETTING_FIELDS: Final = Fields[SweepRow](
    _setting("target", "target", "name", "the model"),
    _setting("arguments", "arguments", "text", "arguments of its constructor"),
    _setting("input", "input", "text", "the shape of its input"),
    _setting("inputs", "inputs", "text", "the function that makes its inputs"),
    _setting("lora", "LoRA", "text", "the options of its LoRA adapters"),
    _setting("adapter", "adapter", "text", "its adapters of another kind"),
    _setting("base", "base", "text", "the format of its quantized base"),
    _setting("freeze", "frozen", "text", "the patterns of what is frozen"),
    _setting("train", "train", "text", "the optimizer; none is inference"),
    _setting("loss", "loss", "text", "the loss"),
    _setting("gradient_accumulation_steps", "gradient_accumulation_steps", "count", "backward passes in each step"),
    _setting("ema", "EMA", "text", "whether an averaged copy of the parameters is kept"),
    _setting("scenario", "scenario", "text", "how the model is stored and run"),
    _setting("mode", "mode", "text", "training or evaluation mode"),
    _setting("stack", "stack", "text", "PyTorch and CUDA on the GPU"),
    _setting("allocator", "allocator", "text", "settings of the caching allocator"),
    _setting("execute", "execute", "text", "whether it was really computed"),
    _setting("parallel", "parallel", "text", "how a training is spread over several GPUs"),
    _setting("seq_len", "tokens", "count", "tokens of each text", nullable=True),
    _setting("batch_size", "batch", "count", "samples in each batch", nullable=True),
    _setting("gpu", "GPU", "text", "where it is run"),
)

_GPUS: Final[Field[SweepRow]] = field("gpus", kind="count")
"""The field of a training that is spread."""

COLUMNS: Final = tuple(column.name for column in SETTING_FIELDS.columns)
"""The settings in the order of their columns."""

OUTCOMES: Final[Mapping[Outcome, str]] = {"fits": "yes", "exceeds": "no", "unsure": "perhaps", "failed": "failed"}
"""What outcomes are called in tables."""


SWEEP_FIELDS: Final = Fields[SweepRow](
    field("outcome", "fits", "text", 89, "whether it fits the GPU", cell=lambda row, _: OUTCOMES[row.outcome]),
    field("parameters", "parameters", "count", 60, "number of the model's parameters", nullable=True),
    field("stored", "stored", "bytes", 62, "bytes of parameters and buffers", nullable=True),
    field("requested", kind="bytes", nullable=True),
    field("allocated", kind="bytes", nullable=True),
    field("reserved", "reserved", "bytes", 88, "the caching allocator's segments at their peak", nullable=True),
    field("device_from", kind="bytes", get="device.low", nullable=True),
    field("device_to", "device", "bytes", 87, "upper bound of the figure in nvidia-smi", key="device", nullable=True),
    field("gpu_bytes", kind="bytes", nullable=True),
    field("left", "left", "bytes", 80, "lower bound of the GPU's free memory", nullable=True),
    shown("mostly", "mostly", "text", 70, "the role with most bytes at the peak"),
    field("phase", "in", "text", 68, "the phase of the peak", get=lambda row: row.phase or None, alone="phase"),
    field("layer", "at", "name", 50, "the layer of the peak", get=lambda row: row.layer or None, alone="layer"),
    field("seconds"),
    field("reason"),
    get={
        "device_to": "device.high",
        "mostly": lambda row: noun(max(row.roles, key=lambda role: row.roles[role])) if row.roles else None,
    },
    cell={"layer": lambda row, _: None if row.device is None else LayerPath(row.layer)},
    lacks=lambda row: row.device is None,
    missing=lambda row: Missing(row.reason or "failed"),
)
SWEEP_TABLE: Final = ("outcome", "reserved", "device_to", "left", "parameters", "stored", "mostly", "phase", "layer")
"""The fields of the table of cells, in the order in which documents show them."""


def varying(cells: Iterable[Mapping[str, object]]) -> tuple[str, ...]:
    """The settings in which cells differ."""
    settings_of_cells = tuple(cells)
    return tuple(key for key in COLUMNS if len({repr(settings.get(key)) for settings in settings_of_cells}) > 1)


def phrase_of(settings: Mapping[str, object], keys: Iterable[str]) -> str:
    """Describe the `settings` named by `keys` in a few words: ``timm:resnet18, amp-fp16, batch 8, on Tesla T4``."""
    words = {"batch_size": "batch {}", "seq_len": "{} tokens", "gpu": "on {}", "train": "training with {}"}
    parts = (words.get(key, "{}").format(setting_text(settings[key])) for key in keys if settings.get(key) is not None)
    return ", ".join("inference" if part == "training with none" else part for part in parts)


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
        gpus = [_GPUS] if "parallel" in self.used else []
        return {"rows": SWEEP_FIELDS.after(*SETTING_FIELDS.only(*self.used), *gpus).flat(self.sweep_rows)}

    rows = TableFrame("rows", "One row per cell, all sizes in bytes.")

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


# -- the file of results ---------------------------------------------------------------------------------------------

_SCHEMA: Final = "memsize.sweep-results/1"
_HEAD: Final = f'{{"schema": "{_SCHEMA}", '.encode()


class ResultsFile:
    """The lines that a file has, and a way to add some."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._rows: dict[str, SweepRow] = {}
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if not (rest := content[len(whole) :]).startswith(_HEAD) and not _HEAD.startswith(rest):
            raise _foreign(str(path))
        for number, line in enumerate(whole.splitlines(), 1):
            key, row = _read(line, f"{path}:{number}")
            self._rows[key] = row
        file.truncate(len(whole))
        file.seek(len(whole))

    def find(self, settings: Mapping[str, object], versions: Mapping[str, str]) -> SweepRow | None:
        """The row of a cell, if the file has one that was made with the same."""
        return self._rows.get(_key(settings, versions))

    def add(self, rows: Iterable[tuple[SweepRow, Mapping[str, str]]]) -> None:
        """Write rows, each with what it was made with, to the file's end. They are on the disk when this returns."""
        lines = (
            json.dumps({"schema": _SCHEMA, "made": {**versions}, "row": _CODER.write(row)}) for row, versions in rows
        )
        self._file.write("".join(f"{line}\n" for line in lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())


_CODER: Final = coder(SweepRow)


def _key(settings: Mapping[str, object], versions: Mapping[str, str]) -> str:
    return json.dumps([settings, versions], sort_keys=True, default=str)


def _read(line: bytes, where: str) -> tuple[str, SweepRow]:
    try:
        match json.loads(line):
            case {"schema": str(schema), "made": dict(versions), "row": dict(data)} if schema == _SCHEMA:
                row: SweepRow = _CODER.read(data)
                return _key(row.settings, versions), row
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise _foreign(where)


def _foreign(where: str) -> OutputError:
    return OutputError(f"{where} is not the result of a sweep: name another file with --results")


@contextmanager
def results_file(path: Path, *, fresh: bool = False) -> Iterator[ResultsFile]:
    """The file at `path`, made where there is none; `fresh` forgets what it has.

    Raises `OutputError` where it cannot be written, holds something else, or another sweep has it open.
    """
    try:
        file: Any = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666), "r+b")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from None
    with file:
        _lock(file, path)
        results = ResultsFile(file, path)
        if fresh:
            file.truncate(0)
            file.seek(0)
            results = ResultsFile(file, path)
        yield results


def _lock(file: BinaryIO, path: Path) -> None:
    """Lock the file against other sweeps until it is closed or the process ends, on systems that have such locks."""
    with suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(f"another sweep writes to {path}: wait for it, or name another file") from None
        except OSError:
            pass  # a file system without locks
