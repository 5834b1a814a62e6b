"""Memory that cuBLAS and cuBLASLt take for themselves out of the caching allocator.

cuBLAS: PyTorch allocates one workspace per handle and stream when a matrix product first runs there and keeps it. The
autograd thread has its own handle, so a training step has two workspaces. Source: PyTorch's
aten/src/ATen/cuda/CublasHandlePool.cpp, pull requests 156495, 168175, 175344, 175879 and 194311; the release that first
contained each was inferred from its date.

Known limit: from PyTorch 2.15 on, each op takes its workspace and gives it back unless `TORCH_CUBLAS_WORKSPACE_CACHE`
is 1; runs are simulated with workspaces that stay, as in releases up to 2.14.
"""

from __future__ import annotations

import re
from typing import Final

from memsize.units import KiB, MiB

DEFAULT: Final = 2 * 4096 * KiB + 8 * 16 * KiB
"""``:4096:2:16:8``: two of 4 MiB and eight of 16 KiB, 8,519,680 B."""
HOPPER: Final = 32 * MiB
BLAS_LT: Final = 1 * MiB
"""cuBLASLt's own workspace where it does not share that of cuBLAS (pytorch/pytorch issue 73328)."""

_NEWEST: Final = (2, 14)
"""The release that is assumed where none is given."""
_BLACKWELL_SINCE: Final = (2, 12)
_SHARED_SINCE: Final = (2, 12)


def cublas_workspace(
    capability: tuple[int, int], *, config: str | None = None, torch_version: str | None = None
) -> int:
    """The bytes of one cuBLAS workspace on a GPU of compute capability `capability`.

    `config` is the value of `CUBLAS_WORKSPACE_CONFIG`: pairs ``:SIZE:COUNT`` in KiB that are added up; PyTorch ignores
    what it cannot read. Without it, 32 MiB on Hopper and, since 2.12, on Blackwell; 8,519,680 B elsewhere.
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", config or "")
    if pairs:
        return sum(int(size) * KiB * int(count) for size, count in pairs)
    large = capability == (9, 0) or (capability[0] >= 9 and release(torch_version) >= _BLACKWELL_SINCE)
    return HOPPER if large else DEFAULT


def cublaslt_workspace(*, size: str | None = None, unified: str | None = None, torch_version: str | None = None) -> int:
    """The bytes that cuBLASLt takes beside cuBLAS's workspace, per handle and stream: 0 where it shares that one.

    `size` is the value of `CUBLASLT_WORKSPACE_SIZE` in KiB, `unified` that of `TORCH_CUBLASLT_UNIFIED_WORKSPACE`:
    sharing is the default since 2.12 and opt-in before.
    """
    shared = unified == "1" if unified in ("0", "1") else release(torch_version) >= _SHARED_SINCE
    if shared:
        return 0
    return int(size) * KiB if size is not None and size.isdecimal() else BLAS_LT


def release(torch_version: str | None) -> tuple[int, int]:
    """Major and minor of ``"2.13.0+cpu"``; 2.14 where None or unreadable."""
    found = re.match(r"(\d+)\.(\d+)", torch_version or "")
    return (int(found[1]), int(found[2])) if found else _NEWEST
