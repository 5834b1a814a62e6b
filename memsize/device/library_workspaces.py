"""The workspaces of CUDA's libraries, which the caching allocator serves: cuBLAS, cuBLASLt, and cuDNN's convolutions.

cuBLAS: PyTorch allocates one workspace per handle and stream when a matrix product first runs there and keeps it. The
autograd thread has its own handle, so a training step has two workspaces. cuBLASLt, which computes products with a bias
or a float8 operand, had a workspace of its own until it came to share that of cuBLAS.

Source: PyTorch's aten/src/ATen/cuda/CublasHandlePool.cpp and CUDABlas.cpp, 2.0 to 2.14, and the pull requests that
changed them: 91564 (2.0), 156495 (2.9), 168175, 175344 and 175879 (2.12), 189312 (2.14). Which release first had each
was read in the compiled libraries of 2.0, 2.8 to 2.12 and 2.14.

Known limit: from PyTorch 2.15 on (194311), each op takes its workspace and gives it back unless
`TORCH_CUBLAS_WORKSPACE_CACHE` is 1; runs are simulated with workspaces that stay, as in releases up to 2.14.

cuDNN: the workspaces of convolutions may be estimates, with a lower and an upper bound.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from memsize.device.allocation_events import AllocationEvents, flow_of
from memsize.device.replay import OMITTED
from memsize.records.columns import places
from memsize.records.trace import Trace
from memsize.spec.stack import NEWEST, Release, release as read_release
from memsize.units import KiB, MiB

DEFAULT: Final = 2 * 4096 * KiB + 8 * 16 * KiB
"""``:4096:2:16:8``: two of 4 MiB and eight of 16 KiB, 8,519,680 B."""
HOPPER: Final = 32 * MiB
BLAS_LT: Final = 1 * MiB
"""cuBLASLt's own workspace where it does not share that of cuBLAS (pytorch/pytorch issue 73328)."""

CONVOLUTIONS: Final = frozenset({"convolution", "convolution_backward"})
"""Ops that cuDNN computes with a workspace."""
DOUBLED: Final = 2
"""An estimated workspace may be up to this many times as large (`python -m benchmarks.workspaces` says how often it
is).
"""

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
    is_large = capability == (9, 0) or (since is not None and release(torch_version) >= since)
    return HOPPER if is_large else DEFAULT


def cublaslt_workspace(*, size: str | None = None, unified: str | None = None, torch_version: str | None = None) -> int:
    """The bytes that cuBLASLt takes beside cuBLAS's workspace, per handle and stream: 0 where it shares that one.

    `size` is the value of `CUBLASLT_WORKSPACE_SIZE` in KiB, `unified` that of `TORCH_CUBLASLT_UNIFIED_WORKSPACE`:
    sharing is the default since 2.12 and opt-in before.
    """
    shared = unified == "1" if unified in ("0", "1") else release(torch_version) >= _SHARED_SINCE
    if shared:
        return 0
    return int(size) * KiB if size is not None and size.isdecimal() else BLAS_LT


def keeps_cublaslt_workspace(torch_version: str | None = None) -> bool:
    """Whether cuBLASLt's own workspace stays once a product took it, as since 2.9; before, each took and freed one."""
    return release(torch_version) >= _KEPT_SINCE


def release(torch_version: str | None) -> Release:
    """Major and minor of ``"2.13.0+cpu"``; those of the newest release that is known where None or unreadable."""
    return read_release(torch_version or "") or NEWEST


def requests(trace: Trace, factor: int = 1) -> AllocationEvents:
    """The events of a trace, with the workspaces of its convolutions `factor` times as large; 0 leaves them out."""
    import numpy as np

    flow = flow_of(trace)
    if factor == 1:
        return flow
    scaled = np.isin(flow.storages, list(dispensable(trace)))
    storages = flow.storages if factor else np.where(scaled, OMITTED[0], flow.storages)
    return replace(flow, storages=storages, deltas=np.where(scaled, factor * flow.deltas, flow.deltas))


def is_estimated(trace: Trace) -> bool:
    """Whether any convolution workspace in the trace is an estimate."""
    workspaces = dispensable(trace) if trace.cudnn is None else frozenset()
    return bool(workspaces) and any(event.storage in workspaces for event in trace.events)


def factors(trace: Trace) -> tuple[int, ...]:
    """By how much workspaces may be larger: 1; where they are estimates, also 0 and `DOUBLED`."""
    return (1, 0, DOUBLED) if is_estimated(trace) else (1,)


def variants(trace: Trace) -> list[AllocationEvents]:
    """The events as they are; where workspaces are estimates, also without those and with twice as much (`DOUBLED`)."""
    return [requests(trace, factor) for factor in factors(trace)]


def dispensable(trace: Trace) -> frozenset[int]:
    """The workspaces that a run can do without: where one does not fit, PyTorch tries the next of cuDNN's plans, and
    most convolutions have a plan that needs little.
    """
    storages = trace.storages
    return frozenset(index for index in places(storages, "role", {"workspace"}) if storages[index].op in CONVOLUTIONS)
