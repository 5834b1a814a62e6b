"""The figures of a fit: one row per scenario and GPU, and one per remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field as attribute
from typing import Annotated, ClassVar, Final, Literal, NamedTuple

from memsize.records.answer import Answer, TableFrame
from memsize.records.codec import Name
from memsize.records.fields import (
    SCENARIO,
    Fields,
    FlatTable,
    Label,
    Missing,
    Path,
    field,
)
from memsize.records.finding import Finding
from memsize.records.gpu import Card, GpuEstimate
from memsize.records.roles import Role
from memsize.records.trace import InputTensor, TensorSpec, Trace
from memsize.units import Bytes

Status = Literal["found", "open", "refused", "endless", "constant", "none", "fits", "exceeds", "unavailable"]
"""The kind of an answer.

`found`: a size fits and the next one was run and doesn't. `open`: the runs ended before the two met. `refused`: the
next size is one that the model does not run with. `endless`: every size that was looked at fits. `constant`: so does
every one, because nothing but the input grows with it. `none`: no size does.
`fits` and `exceeds` answer for the size that was asked about. `unavailable`: the scenario could not be run.
"""

ANSWERED: tuple[Status, ...] = ("found", "open", "refused", "endless", "constant", "fits")


@dataclass(frozen=True, slots=True)
class FitRow:
    """One scenario on one GPU.

    `size` is the largest size that fits (None: none does), or the one that the user asked about. `peak` is the smallest
    memory in which the allocator can run it, `headroom` the rest of the budget. `next_size` and `next_peak` belong to
    the next size that was run; `bind` is the request at which that size runs out of memory, or the peak of the run
    where no run that fits is beside it. `per_step` are the requested bytes that one more sample (or position …) adds at
    the peak of the next size, in the phase `grows_in`; `fixed` are the bytes there that do not depend on the size, and
    `standing` the part of `fixed` that the model and its training hold, by role. `looked` lists all sizes that were
    tried for the answer. Sizes have to be multiples of `step`. `refused` maps each size that the model failed with to
    the reason. `batch` is set in rows whose context length was searched for at several batches. `points` are the
    sizes that ran, each with the least memory that it needs; none are listed where `batch` is set.
    """

    scenario: str
    title: str
    gpu: Annotated[str, Name("budgets")]
    budget: int
    status: Status
    reason: str | None = None
    size: int | None = None
    peak: int | None = None
    next_size: int | None = None
    next_peak: int | None = None
    per_step: int | None = None
    fixed: int | None = None
    bind: Bind | None = None
    standing: Mapping[Role, int] = attribute(default_factory=dict)
    looked: tuple[int, ...] = ()
    step: int = 1
    refused: Mapping[int, str] = attribute(default_factory=dict)
    monotone: bool = True
    grows_in: str = ""
    batch: int | None = None
    points: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str:
        """The scenario, and the batch where it is one of several."""
        return self.scenario if self.batch is None else f"{self.scenario}, batch {self.batch:,}"

    @property
    def ran(self) -> tuple[int, ...]:
        """The sizes that were tried for the answer and that the model accepted, ascending."""
        return tuple(sorted(set(self.looked) - set(self.refused)))

    @property
    def headroom(self) -> int | None:
        """Bytes of the budget left at `size`: below 0 where it does not fit, None where there is no size."""
        return None if self.peak is None else self.budget - self.peak


FIT_FIELDS: Final = Fields[FitRow](
    SCENARIO,
    field("gpu", "GPU", "text", 99, "name of the GPU", is_key=True),
    field("batch", "batch", "count", 99, "number of sequences", is_key=True),
    field("budget", kind="bytes"),
    field("status"),
    field("size", "largest", "count", 98, "the largest size that fits"),
    field("peak", "needs", "bytes", 95, "smallest memory in which it fits"),
    field("headroom", "left", "bytes", 80, "memory that is still free for the allocator"),
    field("next_size", "next", "count", 84, "the next size, which does not fit", cell=lambda row, _: row.next_size),
    field(
        "next_peak", "would need", "bytes", 83, "smallest memory in which the next size would fit", beside="next_size"
    ),
    field("per_step", "per step", "bytes", 75, "growth of the tensors' peak per unit of size"),
    field("fixed", "fixed", "bytes", 70, "memory that does not depend on the size", alone="fixed memory"),
    field("grows_in", get=lambda row: row.grows_in or None),
    field("binds", "mostly", "text", 90, "the largest role where memory runs out", key="bind", drawn="role"),
    field("phase", "in", "text", 86, "the phase in which it runs out", alone="phase", get="bind.phase"),
    field("layer", "at", "name", 72, "the layer at which it runs out, or the op beside them", alone="layer"),
    field("op", get="bind.op"),
    field("runs", kind="count", get=lambda row: len(row.looked)),
    field("reason"),
    get={
        "size": lambda row: row.size if row.status in (*ANSWERED, "exceeds") else None,
        "binds": "bind.role",
        "layer": "bind.layer",
    },
    cell={"layer": lambda row, _: Path(row.bind.layer or row.bind.op) if row.bind else None},
    nullable=("budget", "size", "peak", "headroom", "next_size", "next_peak", "per_step", "fixed", "runs"),
    lacks=lambda row: row.status == "unavailable",
    missing=lambda row: Missing(row.reason or row.status),
)


@dataclass(frozen=True, slots=True)
class RemedyRow:
    """One remedy at the size that the user asked about: the `peak` with it, and the bytes `saved`.

    `changes` is its side effect: nothing, the speed, the numbers (by rounding), the training or the hardware.
    `outcome` is ``"fits"``, ``"saves"``, ``"no help"`` or ``"not here"``, the last with the `reason`. `recomputed` is
    the share of the forward's products that backward computes again; None for a remedy that recomputes nothing.
    """

    name: str
    title: str
    cost: str
    changes: Literal["nothing", "speed", "numbers", "training", "hardware"]
    outcome: Literal["fits", "saves", "no help", "not here"]
    peak: int | None = None
    saved: int | None = None
    reason: str | None = None
    recomputed: float | None = None


OUTCOMES: Final = {"fits": "fits", "saves": "helps", "no help": "no help", "not here": "not here"}
"""Titles of the outcomes of remedies in tables."""

REMEDY_FIELDS: Final = Fields[RemedyRow](
    field("name", "remedy", "name", 100, "the change", key="remedy"),
    field("title"),
    field("cost", "costs", "text", 96, "its price"),
    field("outcome", "result", "text", 95, "whether it fits with this remedy alone"),
    field("peak", "needs then", "bytes", 90, "smallest memory in which it fits with this remedy", nullable=True),
    field("saved", "saves", "bytes", 98, "memory saved by this remedy", nullable=True),
    field("recomputed", "recomputes", "share", 89, "share of the forward's products that it computes again"),
    field("reason"),
    cell={
        "name": lambda row, _: Label(row.name, hint=row.title),
        "outcome": lambda row, _: OUTCOMES[row.outcome],
        "peak": lambda row, _: Bytes(row.peak or 0),
        "saved": lambda row, _: Bytes(row.saved or 0),
    },
)


class SmallerSize(NamedTuple):
    """A `size` that fits; `largest` if the next one does not."""

    size: int
    largest: bool


@dataclass(frozen=True, slots=True)
class Remedied:
    """Remedies at one size of one scenario on one GPU, most bytes saved first.

    `peak` is the memory needed without any remedy. `combination` names a few remedies that fit when run together,
    `combined` is the memory needed with them. `combination` is empty where one remedy that does not change the training
    result is enough, or where no combination is. `smaller` is a size that fits without any, where one was searched for.
    """

    scenario: str
    gpu: str
    size: int
    budget: int
    peak: int
    rows: tuple[RemedyRow, ...]
    combination: tuple[str, ...] = ()
    combined: int | None = None
    smaller: SmallerSize | None = None


class FitRun(NamedTuple):
    """The key of one of a fit's runs: its scenario and size, and the first of the GPUs that run the same kernels.

    `batch` is set where a context length was searched for at several batches, else None.
    """

    scenario: str
    size: int
    gpu: str = ""
    batch: int | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Fit(Answer):
    """The answer of `memsize fit`: one row per scenario and GPU, findings, remedies, and the traces behind them.

    `vary` names the size that is searched (such as the batch), `asked` is the size that the user asked about (None: the
    largest that fits). `optimizer` is empty without training. `generation` holds the fields of
    `memsize.spec.generation.Generation`, and is empty where no tokens are generated.
    """

    kind: ClassVar = "fit"

    model: str
    inputs: tuple[InputTensor, ...]
    vary: str
    budgets: tuple[Budget, ...]
    fit_rows: tuple[FitRow, ...]
    asked: int | None = None
    optimizer: str = ""
    findings: tuple[Finding, ...] = ()
    remedied: Remedied | None = None
    notes: tuple[str, ...] = ()
    traces: Mapping[FitRun, Trace] = attribute(default_factory=dict)
    runs: int = 0
    generation: Mapping[str, object] = attribute(default_factory=dict)
    missing: tuple[str, ...] = ()
    """The parts of the answer that are missing because of Ctrl-C; empty where it is complete."""
    peak: GpuEstimate | None = None
    """The peak of the first answer; None where none fits without the allocator giving back what it cached."""

    def validate(self) -> None:
        """Raise ValueError unless a generation has its numbers of tokens."""
        if self.generation and not all(isinstance(self.generation.get(name), int) for name in ("prompt", "new")):
            raise ValueError("its generation has no numbers of tokens")

    @property
    def stack(self) -> str:
        """The PyTorch and CUDA on the GPUs; empty for the installed ones."""
        return next((trace.stack for trace in self.traces.values()), "")

    @property
    def largest(self) -> int | None:
        """The largest size that fits under the first scenario that has one; None where nothing fits."""
        return None if self.first_answer is None else self.first_answer.size

    @property
    def first_answer(self) -> FitRow | None:
        """The first row with a size that fits; None where there is none."""
        return next((row for row in self.fit_rows if row.size and row.status in ANSWERED), None)

    def trace_of(self, row: FitRow) -> Trace | None:
        """The run of a row's answer, or of the next size where there is none; None where it was not run."""
        own = next(budget for budget in self.budgets if budget.name == row.gpu)
        alike = next(candidate for candidate in self.budgets if candidate.runs_as(own))
        size = row.size or row.next_size
        # Runs of a script are each card's own, others are those of the first whose kernels they are.
        runs = () if size is None else (FitRun(row.scenario, size, name, row.batch) for name in (own.name, alike.name))
        return next((self.traces[run] for run in runs if run in self.traces), None)

    def tables(self) -> dict[str, FlatTable]:
        """`rows` and `remedies`, as the properties of these names have them."""
        return {
            "rows": self.row_fields.flat(self.fit_rows),
            "remedies": REMEDY_FIELDS.flat(self.remedied.rows if self.remedied else ()),
        }

    @property
    def row_fields(self) -> Fields[FitRow]:
        """The fields of its rows; the batch only where it was searched at several."""
        return FIT_FIELDS if any(row.batch is not None for row in self.fit_rows) else FIT_FIELDS.without("batch")

    rows = TableFrame("rows", "One row per scenario and GPU; sizes are counts, everything else is bytes.")
    remedies = TableFrame("remedies", "One row per remedy that was tried; empty where none was.")


@dataclass(frozen=True, slots=True)
class Budget:
    """The bytes that a process may use on a GPU: `device` is all memory, `context` the most that CUDA takes of it.

    `card` decides which kernels run. `parallel` is how a training is spread over several such GPUs (``"fsdp=8"``), of
    which this is the budget of one, and `gpus` is their number. `fraction` is the largest share of `device` that the
    allocator's settings let it hold, and `server` the share that a server on the same GPU takes. `notes` are remarks
    that a reader of the figures needs.
    """

    name: str
    card: Card
    device: int
    context: int
    margin: int = 0
    notes: tuple[str, ...] = ()
    fraction: float = 1.0
    parallel: str = ""
    gpus: int = 1
    server: float = 0.0

    def runs_as(self, other: Budget) -> bool:
        """Whether both GPUs run the same kernels with the same parallel strategy, whatever their memory."""
        return (self.card.kernels, self.parallel) == (other.card.kernels, other.parallel)

    @property
    def one(self) -> str:
        """One of the GPUs: ``Tesla T4`` of ``8 x Tesla T4 (fsdp=8)``."""
        return self.name.removeprefix(f"{self.gpus} x ").removesuffix(f" ({self.parallel})")

    @property
    def strategy(self) -> str:
        """The parallel strategy without numbers of GPUs: ``fsdp,offload`` of ``fsdp=8,offload``."""
        return ",".join(part.partition("=")[0] for part in self.parallel.split(","))

    @property
    def allocator(self) -> int:
        """Bytes left for PyTorch's caching allocator."""
        own = self.device - self.beside
        return min(own - self.context, int(self.fraction * self.device)) - self.margin

    @property
    def beside(self) -> int:
        """Bytes that a server on the same GPU takes, its CUDA context included."""
        return int(self.server * self.device)


def gpus_in_words(budgets: Iterable[Budget]) -> tuple[str, ...]:
    """Each kind of GPU, with the numbers of them: ``1 to 128 x H100 80GB``."""
    numbers: dict[str, list[int]] = {}
    for budget in budgets:
        name, gpus = (budget.one, budget.gpus) if budget.parallel else (budget.name, 0)
        numbers.setdefault(name, []).append(gpus)
    return tuple(
        f"{min(of):,} to {max(of):,} x {one}" if min(of) < max(of) else f"{of[0]:,} x {one}" if of[0] else one
        for one, of in numbers.items()
    )


class Alike(NamedTuple):
    """Tensors of one shape and dtype: their number, spec and total bytes.

    `logits` is true if they are as wide as the model's output, one column per word of the vocabulary.
    """

    tensors: int
    spec: TensorSpec
    bytes: int
    logits: bool = False


@dataclass(frozen=True, slots=True)
class Bind:
    """The reason why a size does not fit: the failed request, when and where, and the role with most live bytes.

    `roles` are the bytes alive at that moment by role, the request included; `largest` are the tensors of one shape
    that hold most of them. `frozen` is the share of the parameters without a gradient, where others have one. `scores`
    are the bytes of attention scores among them that no fused kernel avoids, and `score_dtypes` those of their layers.
    """

    phase: str
    layer: str
    op: str
    role: Role
    request: int
    roles: dict[Role, int]
    largest: Alike | None = None
    frozen: float = 0.0
    scores: int = 0
    score_dtypes: tuple[str, ...] = ()
