"""The memory of a process outside the caching allocator: the CUDA context, loaded kernels, library handles, and NCCL's
buffers if it is one of many.

It depends on the software stack, the card and how cards are connected, not on the model, and cannot be derived offline:
it is an interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from memsize.errors import InputError
from memsize.records.gpu import Card, Interval
from memsize.records.world import Collective
from memsize.spec.stack import release
from memsize.units import MiB, format_bytes


@dataclass(frozen=True, slots=True)
class ModuleLoading:
    """When CUDA loads its kernels, the size of the CUDA context that follows, and where the figures come from."""

    name: str
    context: Interval
    source: str


LAZY: Final = ModuleLoading(
    "CUDA 11.7 or newer, kernels loaded when first used",
    Interval(300 * MiB, 650 * MiB),
    "measured 274 MiB with one tensor (pytorch/pytorch#86509), about 300 MiB (#107667), about 400 MiB (#109888), "
    "426 MiB before any op with CUDA 13.0 (unslothai/unsloth-zoo#1053); cuBLAS, cuDNN and the kernels add to it",
)
EAGER: Final = ModuleLoading(
    "CUDA before 11.7, or CUDA_MODULE_LOADING=EAGER: every kernel loaded at start",
    Interval(1_000 * MiB, 1_450 * MiB),
    "more than 1,000 MB before CUDA 11.7 (pytorch/pytorch#107667); 1,429 MiB fits 200 training runs on an A100",
)
_LAZY_SINCE: Final = (11, 7)

COMMUNICATOR: Final = Interval(0, 2_048 * MiB)
"""What NCCL takes for each group of processes that communicate. Nothing where GPUs can only exchange through the
memory of the host, where the buffers are then. With NVLink, 544 and 688 MB were measured on A100s (NVIDIA/nccl#964),
about 1.6 GB for one group and 6 GB for "three or more" (#864), which is 2 GB each, 1.79 GiB for all groups of a server
on two GPUs (vllm-project/vllm#10511), and 958 MiB for those of one on eight (#46234). By NCCL's defaults each channel
has 9.19 MiB for each peer that it receives from: 4 MiB, 0.5 and 4.69 MiB for its three protocols.
"""
ALL_TO_ALL: Final = Interval(0, 3_360 * MiB)
"""What is added where such a group exchanges all to all, with channels to every peer: on eight H100s, what is taken
outside PyTorch grew from 1.06 to 4.34 GB (NVIDIA/nccl#1685).
"""
ALONE: Final = Interval(0, 512 * MiB)
"""What NCCL takes for a group of one process that communicates with itself: a buffer of 512 MiB on B300s, for peers on
other machines that it doesn't have (NVIDIA/nccl#2363), and nothing on an RTX 3090 (#2366).
"""
_ISSUES: Final = ("#864", "#1685", "#2363")
"""Where the three were measured."""


def context(cuda: str | None = None, module_loading: str | None = None) -> Interval:
    """Bytes that a process holds outside the caching allocator with CUDA `cuda` (``"12.8"``; None: a current version).

    `module_loading` is the value of `CUDA_MODULE_LOADING`, which overrides the version's default. Raises `InputError`
    when the version cannot be read.
    """
    if (module_loading or "").upper() == "EAGER":
        return EAGER.context
    version = _LAZY_SINCE if cuda is None else release(cuda)
    if version is None:
        raise InputError(f"cannot read {cuda!r} as a CUDA version: write it like 12.8")
    return (LAZY if version >= _LAZY_SINCE else EAGER).context


def context_on(where: Card, cuda: str | None = None, module_loading: str | None = None) -> Interval:
    """The `context` that comes out of a card's memory. Metal's recommendation for a process leaves its own out."""
    return Interval(0, 0) if where.platform == "MPS" else context(cuda, module_loading)


class Groups(NamedTuple):
    """How many groups of several processes communicate, how many of them all to all, and how many of one process."""

    several: int
    all_to_all: int = 0
    alone: int = 0

    @classmethod
    def of(cls, collectives: Sequence[Collective]) -> Groups:
        """The groups in which a process takes part."""
        among = [collective for collective in collectives if collective.group >= 0]
        several = {collective.group for collective in among if collective.ranks > 1}
        all_to_all = {collective.group for collective in among if collective.kind == "all-to-all"} & several
        return cls(len(several), len(all_to_all), len({collective.group for collective in among} - several))

    @property
    def taken(self) -> Interval:
        """Bytes that NCCL takes for them."""
        ends = zip(COMMUNICATOR, ALL_TO_ALL, ALONE, strict=True)
        low, high = (sum(count * collective for count, collective in zip(self, end, strict=True)) for end in ends)
        return Interval(low, high)

    def __str__(self) -> str:
        several = f"{self.several} group{'s' * (self.several != 1)} of processes" if self.several else ""
        alone = f"{self.alone} group{'s' * (self.alone != 1)} of one process" if self.alone else ""
        return " and ".join(filter(None, (several, alone)))


def nccl(collectives: Sequence[Collective]) -> Interval | None:
    """Bytes that NCCL takes on the GPU for the groups in which a process takes part; None where it is in none."""
    groups = Groups.of(collectives)
    return groups.taken if any(groups) else None


def nccl_notes(collectives: Sequence[Collective]) -> Iterator[str]:
    """A note on what `nccl` counts, and by which measurements."""
    groups = Groups.of(collectives)
    if any(groups):
        measured = [number for number, count in zip(_ISSUES, groups, strict=True) if count]
        yield (
            f"NCCL's buffers may take up to {format_bytes(groups.taken.high)} of the GPU outside PyTorch for {groups}, "
            f"as measured with NVLink (NVIDIA/nccl{' and '.join(measured)}), and none where GPUs cannot reach each "
            "other"
        )
