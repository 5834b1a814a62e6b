"""Products whose sizes are no multiple of 8, such as 50,257 words.

Inductor pads one that keeps the GPU busy, rather than its memory, if that turns out faster on the GPU. Here it always
does: kernels without padding cannot load whole vectors.

Source: torch/_inductor/fx_passes/pad_mm.py (`can_pad`, `is_mm_compute_bound`, `should_pad`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch._inductor import utils
from torch._inductor.fx_passes import pad_mm

from memsize.processes.patches import Patch


class _Throughput(NamedTuple):
    half: float
    single: float
    memory: float


_THROUGHPUTS: Final = {
    (7, 0): _Throughput(125, 15.7, 900),
    (7, 5): _Throughput(65, 8.1, 320),
    (8, 0): _Throughput(312, 19.5, 2039),
    (8, 6): _Throughput(125, 31.2, 600),
    (8, 9): _Throughput(181, 90.5, 864),
    (9, 0): _Throughput(989, 67, 3350),
    (10, 0): _Throughput(2250, 80, 8000),
}
"""TFLOPS in half and single precision, and GB/s, by compute capability, of its largest card (NVIDIA's data sheets of
V100, T4, A100, A10, L40, H100, B200)."""


def padding(capability: tuple[int, int]) -> Iterator[Patch]:
    """The patches by which products are padded as on a GPU of this capability, also in graphs traced on the CPU."""
    throughput = _THROUGHPUTS.get(capability, _THROUGHPUTS[8, 0])
    yield pad_mm, "check_device", lambda *_: True
    yield pad_mm, "has_triton", lambda: True
    yield pad_mm, "get_cached_should_pad", lambda key: True
    yield utils, "get_gpu_dram_gbps", lambda: throughput.memory
    yield (
        utils,
        "get_device_tflops",
        lambda dtype: throughput.single if dtype is torch.float32 else throughput.half,
    )
