"""The buffers that CUDA's libraries take for a process, whatever the model: NCCL's outside the caching allocator, the
workspaces of cuBLAS and cuBLASLt inside it.

What NCCL takes depends on how cards are connected and cannot be derived offline: it is an interval.

cuBLAS: PyTorch allocates one workspace per handle and stream when a matrix product first runs there and keeps it. The
autograd thread has its own handle, so a training step has two workspaces. cuBLASLt, which computes products with a bias
or a float8 operand, had a workspace of its own until it came to share that of cuBLAS.

Source of the workspaces: PyTorch's aten/src/ATen/cuda/CublasHandlePool.cpp and CUDABlas.cpp, 2.0 to 2.14, and the pull
requests that changed them: 91564 (2.0), 156495 (2.9), 168175, 175344 and 175879 (2.12), 189312 (2.14). Which release
first had each was read in the compiled libraries of 2.0, 2.8 to 2.12 and 2.14.

Known limit: from PyTorch 2.15 on (194311), each op takes its workspace and gives it back unless
`TORCH_CUBLAS_WORKSPACE_CACHE` is 1; runs are simulated with workspaces that stay, as in releases up to 2.14.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from memsize.records.gpu import Interval
from memsize.records.world import Collective
from memsize.spec.stack import NEWEST, Release, release
from memsize.units import KiB, MiB, format_bytes

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
            f"as measured with NVLink (NVIDIA/nccl{' and '.join(measured)}), and nothing where GPUs cannot access each "
            "other"
        )


# -- workspaces of cuBLAS ----------------------------------------------------------------------------------------------

CUBLAS: Final = 2 * 4096 * KiB + 8 * 16 * KiB
"""``:4096:2:16:8``: two of 4 MiB and eight of 16 KiB, 8,519,680 B."""
CUBLAS_HOPPER: Final = 32 * MiB
CUBLASLT: Final = 1 * MiB
"""cuBLASLt's own workspace where it does not share that of cuBLAS (pytorch/pytorch issue 73328)."""
_LARGE_SINCE: Final[dict[int, Release]] = {9: (2, 12), 10: (2, 12), 12: (2, 12), 11: (2, 14)}
"""Since when a card has the large workspace that Hopper (9.0) always had, by its major compute capability."""
_KEPT_SINCE: Final = (2, 9)
"""Before, cuBLASLt's workspace was taken for each product and given back."""
_SHARED_SINCE: Final = (2, 12)


def cublas_workspace(
    capability: tuple[int, int], *, config: str | None = None, torch_version: str | None = None
) -> int:
    """The bytes of one cuBLAS workspace on a GPU of compute capability `capability`.

    `config` is the value of `CUBLAS_WORKSPACE_CONFIG`: pairs ``:SIZE:COUNT`` in KiB that are added up; PyTorch ignores
    what it cannot read. Without it, 32 MiB on Hopper, since 2.12 on Blackwell and since 2.14 on Thor; 8,519,680 B
    elsewhere.
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", config or "")
    if pairs:
        return sum(int(size) * KiB * int(count) for size, count in pairs)
    since = _LARGE_SINCE.get(capability[0])
    is_large = capability == (9, 0) or (since is not None and torch_release(torch_version) >= since)
    return CUBLAS_HOPPER if is_large else CUBLAS


def cublaslt_workspace(torch_version: str | None = None) -> int:
    """The bytes that cuBLASLt takes beside cuBLAS's workspace, per handle and stream: 0 where it shares that one, as
    since 2.12 unless the environment says otherwise.
    """
    return 0 if torch_release(torch_version) >= _SHARED_SINCE else CUBLASLT


def keeps_cublaslt_workspace(torch_version: str | None = None) -> bool:
    """Whether cuBLASLt's own workspace stays once a product took it, as since 2.9; before, each took and freed one."""
    return torch_release(torch_version) >= _KEPT_SINCE


def torch_release(torch_version: str | None) -> Release:
    """Major and minor of ``"2.13.0+cpu"``; those of the newest release that is known where None or unreadable."""
    return release(torch_version or "") or NEWEST
