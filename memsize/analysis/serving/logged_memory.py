"""Memory outside PyTorch, as vLLM logs it at its start: kernels, NCCL, and what the driver keeps of CUDA graphs.

A kernel whose threads have more than 1 KiB of local memory makes the driver set aside as much for all that a GPU can
run at once. On Ada those of CUTLASS for products in eight bits do: 1,984 bytes, 2,288 with a bias, for steps of more
than 256 tokens (`FRAME_SIZE` in the cubins of vLLM 0.11.0's `_C.abi3.so`; `sm89_fp8_config_default` in
csrc/quantization/cutlass_w8a8). On an L40S that is 0.19 or 0.26 GiB. Hopper's have none; with blocks of scales, Triton
multiplies.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from memsize.device.cards import multiprocessors, processors
from memsize.loading.hubs import checkpoint_config_of
from memsize.records.gpu import Card, Interval
from memsize.records.trace import Trace
from memsize.spec.generation import ServerArguments
from memsize.spec.server_rules import Version
from memsize.units import GiB, KiB


class _Logged(NamedTuple):
    """Non-torch memory in vLLM's logs in public repositories, since a release, on GPUs of a `generation` or later (0:
    all), which capture CUDA graphs where they are captured meanwhile: of one GPU, and on each of several with NVLink or
    that exchange over PCI Express; or on more than two with NVLink.
    """

    since: Version
    generation: int
    alone: Interval
    linked: Interval
    unlinked: Interval
    is_captured: bool = False
    many: Interval | None = None


def _gib(low: int, high: int) -> Interval:
    """Hundredths of a GiB, the digits that logs have."""
    return Interval(low * GiB // 100, high * GiB // 100)


_ADA: Final = (8, 9)
_EIGHT_BITS: Final = ("float8_e4m3fn", "int8")
_LOCAL: Final = {False: 1984, True: 2288}
"""Bytes of a thread, by whether a product adds a bias."""
_HOPPER: Final = 9
_BLACKWELL: Final = 10
_PAIR: Final = 2
_LOGGED: Final = (
    # Code of PyTorch's libraries and vLLM's own kernels, after the CUDA context: 0.01 to 0.10 GiB, 0.12 to 0.16 on
    # H100s (vllm-project/vllm#12126). With NVLink NCCL's communicators too, PyTorch's and vLLM's own
    # (`distributed/device_communicators`), and the buffers of vLLM's all-reduce: 0.93 to 2.15 on sixteen A100s, 2.10 on
    # eight, 1.38 on two H200s. Without, 0.20 on four RTX 2080 Ti and on sixteen RTX 3090 (#14447), 0.24 on sixteen
    # RTX 4090, 0.30 on two L40S (#15815), 0.36 on four cards of 44.4 GiB.
    _Logged((0, 4, 1), 0, _gib(1, 16), _gib(93, 215), _gib(20, 36)),
    # On H100s those buffers are larger: 2.34 and 2.43 on two of four (#21348), on eight 2.16 to 2.27 with two models
    # (vLLM 0.10.0, DaisukeTakai/eval_dataset); the GPU that takes most decides.
    _Logged((0, 4, 1), _HOPPER, _gib(1, 16), _gib(93, 215), _gib(20, 36), many=_gib(216, 245)),
    # From after `init_distributed` on (v1/worker/gpu_worker.py): 0.54 and 0.55 on two H100s (llm-d-incubation/
    # llm-d-planner, docs/empirical-vllm-memory-results.md), 1.38 on two H200s; 0.18 to 0.21 on eight L40S.
    _Logged((0, 11, 0), 0, _gib(1, 16), _gib(54, 138), _gib(1, 21)),
    # Graphs are captured while it is measured (`profile_cudagraph_memory`), of which the driver keeps memory: 0.24 to
    # 0.27 on an H100, 0.46 for Granite, 2.06 to 2.21 on two and four, in 50 starts (jgchn/llm-d-planner, accuracy/
    # results/v0.19.0). 0.23 on a B200 and a B300, 0.26 on an RTX PRO 6000, 0.95 on four B200, 1.63 on B300s.
    _Logged((0, 18, 0), 0, _gib(1, 16), _gib(54, 221), _gib(1, 21)),
    # On an RTX 4090 0.19, 0.19 and 0.27, as the cache and the estimate of graphs show; 0.10 where none are captured.
    _Logged((0, 20, 0), 0, _gib(10, 27), _gib(54, 221), _gib(1, 30), is_captured=True),
    _Logged((0, 18, 0), _HOPPER, _gib(24, 46), _gib(206, 221), _gib(24, 46), is_captured=True),
    _Logged((0, 18, 0), 10, _gib(1, 27), _gib(95, 221), _gib(1, 27), is_captured=True),
    # They are captured afterwards.
    _Logged((0, 27, 0), 0, _gib(1, 16), _gib(54, 221), _gib(1, 21)),
    _Logged((0, 27, 0), 10, _gib(1, 27), _gib(95, 221), _gib(1, 27), is_captured=True),
)
_NVLINK: Final = ("V100", "A100", "H100 80GB", "GH200", "H200", "B200", "B300")
"""Cards that have NVLink in most servers; an H100 NVL or an RTX 3090 has it where a bridge was added."""


_LARGE: Final = ((8, 0), (9, 0))
_OF_OTHERS: Final = _gib(0, 11).high
"""On one GPU other than an A100 or H100, up to Ada: 0.04 on an RTX 2060, 0.05 on an A10 and an RTX 6000 Ada, 0.09 on an
L4, 0.10 on an RTX 4090 and an L40S."""


def logged_memory(gpu: Card, served: ServerArguments) -> tuple[Interval, Interval]:
    """Return the memory that logs have for such a server on each GPU, and the part of it by which GPUs exchange."""
    version, generation = served.rules.version, gpu.capability[0] if served.rules.profiles else 0
    *_, entry = (
        entry
        for entry in _LOGGED
        if entry.since <= version and entry.generation <= generation and (served.graphs or not entry.is_captured)
    )
    alone = entry.alone
    if generation < _BLACKWELL and gpu.capability not in _LARGE and not entry.is_captured:
        alone = Interval(alone.low, min(alone.high, _OF_OTHERS))
    if served.tp == 1:
        return alone, Interval(0, 0)
    linked = entry.many or entry.linked if served.tp > _PAIR else entry.linked
    shared = linked if any(name in gpu.name for name in _NVLINK) else entry.unlinked
    return shared, Interval(max(shared.low - entry.alone.high, 0), shared.high - entry.alone.low)


def local_memory(model: Any, trace: Trace, gpu: Card) -> int:
    """Bytes that the kernels of a step take for local memory beyond the CUDA context's."""
    quantized = [t for t in trace.tensors if any(part.spec.dtype in _EIGHT_BITS for part in t.parts)]
    config = checkpoint_config_of(model)
    if gpu.capability != _ADA or not quantized or (isinstance(config, dict) and config.get("weight_block_size")):
        return 0
    adds = any(getattr(model.get_submodule(tensor.layer), "bias", None) is not None for tensor in quantized)
    return processors(gpu)[1] * multiprocessors(gpu).threads * (_LOCAL[adds] - KiB)
