"""Memory outside PyTorch, as vLLM logs it at its start: kernels, NCCL, and what the driver keeps of CUDA graphs."""

from __future__ import annotations

from typing import Final, NamedTuple

from memsize.records.gpu import Card, Interval
from memsize.spec.generation import ServerArguments
from memsize.spec.server_rules import Version
from memsize.units import GiB


class _Logged(NamedTuple):
    """Non-torch memory in vLLM's logs in public repositories, since a release, on GPUs of a `generation` or later that
    capture CUDA graphs (0: all): of one GPU, and on each of several with NVLink or that exchange over PCI Express.
    """

    since: Version
    generation: int
    alone: Interval
    linked: Interval
    unlinked: Interval


def _gib(low: int, high: int) -> Interval:
    """Hundredths of a GiB, the digits that logs have."""
    return Interval(low * GiB // 100, high * GiB // 100)


_HOPPER: Final = 9
_LOGGED: Final = (
    # Code of PyTorch's libraries and vLLM's own kernels, after the CUDA context: 0.01 to 0.08 GiB, 0.12 to 0.16 on
    # H100s (vllm-project/vllm#12126). With NVLink NCCL's communicators too, PyTorch's and vLLM's own
    # (`distributed/device_communicators`), and the buffers of vLLM's all-reduce: 0.93 to 2.15 on sixteen A100s, 2.10 on
    # eight, 1.38 on two H200s. Without, 0.20 on four RTX 2080 Ti and on sixteen RTX 3090 (#14447), 0.24 on sixteen
    # RTX 4090, 0.30 on two L40S (#15815), 0.36 on four cards of 44.4 GiB.
    _Logged((0, 4, 1), 0, _gib(1, 16), _gib(93, 215), _gib(20, 36)),
    # From after `init_distributed` on (v1/worker/gpu_worker.py): 0.54 and 0.55 on two H100s (llm-d-incubation/
    # llm-d-planner, docs/empirical-vllm-memory-results.md), 1.38 on two H200s; 0.18 to 0.21 on eight L40S.
    _Logged((0, 11, 0), 0, _gib(1, 16), _gib(54, 138), _gib(1, 21)),
    # Graphs are captured while it is measured (`profile_cudagraph_memory`), of which the driver keeps memory: 0.24 to
    # 0.27 on an H100, 0.46 for Granite, 2.06 to 2.21 on two and four, in 50 starts (jgchn/llm-d-planner, accuracy/
    # results/v0.19.0). 0.23 on a B200 and a B300, 0.26 on an RTX PRO 6000, 0.95 on four B200, 1.63 on B300s.
    _Logged((0, 18, 0), 0, _gib(1, 16), _gib(54, 221), _gib(1, 21)),
    _Logged((0, 18, 0), _HOPPER, _gib(24, 46), _gib(206, 221), _gib(24, 46)),
    _Logged((0, 18, 0), 10, _gib(1, 27), _gib(95, 221), _gib(1, 27)),
    # They are captured afterwards.
    _Logged((0, 27, 0), 0, _gib(1, 16), _gib(54, 221), _gib(1, 21)),
    _Logged((0, 27, 0), 10, _gib(1, 27), _gib(95, 221), _gib(1, 27)),
)
_NVLINK: Final = ("V100", "A100", "H100 80GB", "GH200", "H200", "B200", "B300")
"""Cards that have NVLink in most servers; an H100 NVL or an RTX 3090 has it where a bridge was added."""


def logged_memory(gpu: Card, served: ServerArguments) -> tuple[Interval, Interval]:
    """Return the memory that logs have for such a server on each GPU, and the part of it by which GPUs exchange."""
    generation = gpu.capability[0] if served.graphs else 0
    *_, entry = (entry for entry in _LOGGED if entry.since <= served.rules.version and entry.generation <= generation)
    if served.tp == 1:
        return entry.alone, Interval(0, 0)
    shared = entry.linked if any(name in gpu.name for name in _NVLINK) else entry.unlinked
    return shared, Interval(max(shared.low - entry.alone.high, 0), shared.high - entry.alone.low)
