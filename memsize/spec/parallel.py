"""How a training is spread over several GPUs, in a few words: ``fsdp=8``, ``ddp=4``, ``hsdp=4x8``, ``pp=4``…"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from memsize.errors import InputError, UnknownInputError
from memsize.records.world import MOST_RANKS, World
from memsize.spec.scenario import Scenario
from memsize.spec.training import Training, parse_optimizer

Kind = Literal["ddp", "fsdp", "hsdp", "dp", "tp", "pp"]

_OPTION: Final = re.compile(r"(offload|views)|(rank|ep)\s*=\s*(\d+)")
_GROUPS: Final = re.compile(r"hsdp\s*=\s*x\s*\d+")
_OWN_LOOP: Final = "shard the model in a step= of your own instead, with memsize.trace(world=…)"
_REFUSED: Final = {
    "cp": f"context parallelism needs the loop's own context_parallel region: {_OWN_LOOP}",
    "ep": "experts divided over how many GPUs? write it like ep=8, or fsdp=64,ep=8",
}


@dataclass(frozen=True, slots=True)
class Parallel:
    """One strategy on `replicas` x `shards` x `tensor` x `stages` GPUs.

    ``ddp`` holds the whole model `replicas` times, ``fsdp`` shards it over `shards` GPUs, and ``hsdp`` does both:
    `replicas` groups of `shards` GPUs each. ``dp`` is one process with all GPUs, by `nn.DataParallel`. ``tp`` divides
    layers over `tensor` GPUs, alone or each of the shards of ``fsdp`` and ``hsdp``. ``pp`` is a pipeline of `stages`,
    each on one GPU, or spread by one of the others. ``ep`` divides the experts of a layer over `experts` of the GPUs
    that shards and divided layers are on, each of which has tokens of its own. With `offload`, shards are kept in the
    memory of the host, and
    updated there; with `views`, the gradients of ``ddp`` are views of the buckets in which they are reduced. `rank` is
    the process to show.
    """

    kind: Kind
    replicas: int = 1
    shards: int = 1
    tensor: int = 1
    stages: int = 1
    experts: int = 1
    offload: bool = False
    views: bool = False
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.offload and not self.shards_parameters:
            raise InputError(
                f"{self}: offload keeps the shards of fsdp and hsdp in the host's memory, such as fsdp=8,offload"
            )
        if self.views and self.kind != "ddp":
            raise InputError(f"{self}: views are those of ddp's gradients into its buckets, such as ddp=8,views")
        if self.experts != 1:
            self._check_experts()
        if min(self.replicas, self.shards, self.tensor, self.stages) < 1 or self.size > MOST_RANKS:
            raise InputError(f"{self} is on {self.size} GPUs: it has to be on 1 to {MOST_RANKS:,}")
        World(self.size, self.rank or 0)  # refuses a rank that is none of them

    def _check_experts(self) -> None:
        if not (self.shards_parameters or self.kind == "tp") or self.stages > 1:
            raise InputError(f"{self}: ep divides experts over the GPUs of fsdp, hsdp or tp, such as fsdp=8,ep=8")
        if self.experts < 1 or self.shards * self.tensor % self.experts or self.experts % self.tensor:
            raise InputError(
                f"{self}: ep has to divide the {self.shards * self.tensor} GPUs that share the model"
                + (f", and be a multiple of tp={self.tensor}" if self.tensor > 1 else "")
            )

    @property
    def size(self) -> int:
        """How many GPUs it is on."""
        return self.replicas * self.shards * self.tensor * self.stages

    @property
    def world(self) -> World:
        """The process to show, or the first. But for stages, no GPU holds more: shards are padded to the largest.

        Raises `InputError` for a rank that is none of them.
        """
        return World(self.size, self.rank or 0, one_process=self.kind == "dp")

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are sharded, by PyTorch's ``fully_shard``."""
        return self.kind in ("fsdp", "hsdp")

    @property
    def is_pipeline(self) -> bool:
        """Whether each GPU has one of several stages, which hold more or less than each other."""
        return self.kind == "pp" or self.stages > 1

    def worlds(self) -> tuple[World, ...]:
        """The process of each stage that has the place in it which the process to show has in its own."""
        stage_size = self.size // self.stages
        return tuple(
            World(self.size, stage * stage_size + self.world.rank % stage_size) for stage in range(self.stages)
        )

    def microbatches(self, training: Training) -> int:
        """How many batches go through the stages in a step: as many as its backwards, by default as there are stages.

        Raises `InputError` for fewer than there are stages, which PyTorch's schedules refuse.
        """
        if 1 < training.gradient_accumulation_steps < self.stages:
            raise InputError(
                f"{self.stages} stages need at least {self.stages} microbatches, and gradient_accumulation_steps="
                f"{training.gradient_accumulation_steps} "
                "are fewer: leave it out for as many as there are stages"
            )
        return max(training.gradient_accumulation_steps, self.stages)

    def trained(self, training: Training) -> Training:
        """`training` under ``tp``: multi-tensor updates refuse lists of divided and whole parameters."""
        optimizer = training.optimizer
        if self.kind != "tp" or not isinstance(optimizer, str):
            return training
        if {"foreach", "fused"} & set(parse_optimizer(optimizer).options):
            return training
        return replace(training, optimizer=f"{optimizer}{',' if ':' in optimizer else ':'}foreach=False")

    def refuses(self, scenario: Scenario) -> str | None:
        """Why `scenario` cannot be trained so; None where it can."""
        if scenario.compile and self.kind == "dp":
            return f"compiled code is not predicted under {self}, which breaks the graph: use ddp={self.size}"
        if scenario.recipe == "apex":
            return f"apex's own wrappers are older than PyTorch's {self.kind}: amp-fp16 and amp-bf16 take their place"
        if scenario.recipe == "quantized":
            return f"quantized weights cannot be trained, under {self.kind} as elsewhere"
        return None

    def __str__(self) -> str:
        own = _FIELDS[self.kind]
        within = {"tp": self.tensor, "pp": self.stages}
        parts = [f"{self.kind}={'x'.join(str(getattr(self, field)) for field in own)}"]
        parts += [f"{kind}={size}" for kind, size in within.items() if size > 1 and kind != self.kind]
        parts += [f"ep={self.experts}"] if self.experts != 1 else []
        parts += [option for option in ("offload", "views") if getattr(self, option)]
        return ",".join(parts if self.rank is None else [*parts, f"rank={self.rank}"])


def spread_of(
    strategy: Parallel | str | None, training: Training | None, *, loop: bool = False, execute: bool = False
) -> Parallel | None:
    """The strategy by which `training` is spread; None where none is asked for.

    Raises `InputError` where there is no usual loop that could be: an inference, a `loop` of one's own, a step of the
    target's own, or a run that really computes (`execute`).
    """
    parallel = parse_parallel(strategy) if isinstance(strategy, str) else strategy
    if parallel is None:
        return None
    if training is None:
        raise InputError(f"{parallel} distributes a training: name an optimizer, such as adamw")
    if loop or training.is_own:
        raise InputError(f"{parallel} distributes the usual training loop: your own loop has to do that itself")
    if execute:
        raise InputError(f"{parallel} is one process of {parallel.size}: it cannot really compute alone")
    parallel.microbatches(training)
    return parallel


def parse_parallel(text: str) -> Parallel:
    """The strategy that ``ddp=8``, ``fsdp=8``, ``hsdp=4x8``, ``dp=4``, ``tp=8``, ``pp=4``, ``fsdp=32,tp=8``,
    ``fsdp=8,pp=4``, ``fsdp=8,offload``, ``ddp=8,views`` or ``pp=4,rank=3`` names, in any order.
    ``fsdp=64,ep=8`` divides experts over 8 of the GPUs, and ``ep=8`` alone is ``fsdp=8,ep=8``.

    Raises `InputError` for one that is unknown, or whose numbers cannot be.
    """
    text, options = _options_of(text)
    if options:
        return replace(parse_parallel(text), **options)
    parts = {_kind(part.partition("=")[0].strip()): part.strip() for part in text.split(",")}
    first, *within = sorted(parts, key=get_args(Kind).index)
    if len(parts) < text.count(",") + 1 or not set(within) <= {*_WITHIN.get(first, ())}:
        raise InputError(
            f"no such combination, {text!r}: fsdp=32,tp=8 shards and divides, hsdp=4x8 has copies too, and fsdp=8,pp=4 "
            "shards each of four stages; fit compares strategies that are given apart, --parallel ddp --parallel fsdp"
        )
    sizes: dict[str, Any] = {}
    for kind, part in parts.items():
        _, equals, numbers = map(str.strip, part.partition("="))
        if not equals:
            raise InputError(f"on how many GPUs? write it like {_EXAMPLES[kind]}")
        match = re.fullmatch(r"(\d+)x(\d+)" if kind == "hsdp" else r"(\d+)", numbers)
        if match is None:
            raise InputError(f"cannot read --parallel {part!r}: write it like {_EXAMPLES[kind]}")
        sizes |= zip(_FIELDS[kind], map(int, match.groups()), strict=True)
    return Parallel(first, **sizes)


def _options_of(text: str) -> tuple[str, dict[str, Any]]:
    """`text` without the parts that change no number of GPUs, and these parts."""
    options: dict[str, Any] = {}
    parts = [part.strip() for part in text.split(",")]
    if all(_OPTION.fullmatch(part) for part in parts):
        parts = [*(part.replace("ep", "fsdp") for part in parts if part.startswith("ep")), *parts]
    rest = [part for part in parts if not _OPTION.fullmatch(part)]
    for match in filter(None, map(_OPTION.fullmatch, parts if rest else ())):
        options |= {match[1]: True} if match[1] else {"experts" if match[2] == "ep" else "rank": int(match[3])}
    return ",".join(rest) if rest else text, options


_FIELDS: Final[dict[Kind, tuple[str, ...]]] = {
    "ddp": ("replicas",),
    "fsdp": ("shards",),
    "hsdp": ("replicas", "shards"),
    "dp": ("replicas",),
    "tp": ("tensor",),
    "pp": ("stages",),
}
_WITHIN: Final[dict[Kind, tuple[Kind, ...]]] = {
    "ddp": ("pp",),
    "fsdp": ("tp", "pp"),
    "hsdp": ("tp", "pp"),
    "tp": ("pp",),
}
"""What each may be combined with: layers that are divided, and stages that are spread by it."""
_EXAMPLES: Final = {kind: f"{kind}=8" for kind in _FIELDS} | {
    "hsdp": "hsdp=4x8 (4 groups, each of 8 shards)",
    "dp": "dp=4",
    "pp": "pp=4",
}


def _kind(name: str) -> Kind:
    kinds = get_args(Kind)
    if name in _REFUSED:
        raise InputError(f"--parallel {name}: {_REFUSED[name]}")
    if name not in kinds:
        raise UnknownInputError("strategy", name, kinds)
    return name  # type: ignore[return-value]


def on_each(
    strategies: str | Iterable[str] | None, gpus: int | str | Iterable[int] | None
) -> tuple[Parallel | None, ...]:
    """The strategies to compare: each that is `strategies` on each of the numbers of GPUs; just itself where none are.

    ``"1..128"`` doubles from 1 to 128, ``"6,12"`` are two numbers. Without a number of its own, ``fsdp`` and ``ddp``
    take any; ``hsdp=x8`` and ``fsdp,tp=8`` have groups of 8 GPUs. With one, it has to be the number that is asked
    about. ``fsdp,pp=4`` has four stages on any, ``fsdp,offload`` is offloaded on each, ``ddp,views`` has views on each.
    """
    texts = [strategies] if isinstance(strategies, str) else list(strategies or ())
    counts = () if gpus is None else _counts(gpus)
    if not texts:
        if counts:
            raise InputError("--gpus goes with --parallel: how should the model be spread over them? (--parallel fsdp)")
        return (None,)
    if gpus is None:
        return tuple(dict.fromkeys(map(parse_parallel, texts)))
    return tuple(dict.fromkeys(_on(text, number) for text in texts for number in counts))


def _on(text: str, gpus: int) -> Parallel:
    text, options = _options_of(text)
    if options:
        return replace(_on(text, gpus), **options)
    parts = [part.strip() for part in text.split(",")]
    free = next((part for part in parts if "=" not in part or _GROUPS.fullmatch(part)), None)
    if free is None:
        strategy = parse_parallel(text)
        if strategy.size != gpus:
            raise InputError(f"{strategy} is on {strategy.size} GPUs, not on {gpus}: leave out one of the two numbers")
        return strategy
    name, equals, groups = map(str.strip, free.partition("="))
    kind = _kind(name)
    if kind == "hsdp" and not equals:
        raise InputError("hsdp shards over groups of how many GPUs? write it like hsdp=x8 with --gpus")
    parts[parts.index(free)] = f"{kind}=1{groups}"
    one = parse_parallel(",".join(parts))
    if gpus % one.size:
        raise InputError(f"{gpus} GPUs do not divide into groups of {one.size}, which {text} needs")
    grown: Any = {_FIELDS[kind][0]: gpus // one.size}
    return replace(one, **grown)


def _counts(gpus: int | str | Iterable[int]) -> tuple[int, ...]:
    parts = str(gpus).split(",") if isinstance(gpus, int | str) else list(map(str, gpus))
    counts: list[int] = []
    for text in map(str.strip, parts):
        match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last <= MOST_RANKS:
            how = "write it like 8, 1..128 (doubling) or 6,12; --gpu names the kind of GPU"
            raise InputError(f"cannot read the number of GPUs {text!r}: {how}")
        while first < last:
            counts.append(first)
            first *= 2
        counts.append(last)
    if not counts:
        raise InputError("no number of GPUs given: write it like 8, 1..128 or 6,12")
    return tuple(dict.fromkeys(counts))
