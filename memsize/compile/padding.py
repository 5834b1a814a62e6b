"""Products whose sizes are no multiple of 8, such as 50,257 words.

Inductor pads one that keeps the GPU busy, rather than its memory, if that turns out faster on the GPU. Here it always
does: kernels without padding cannot load whole vectors.

Source: torch/_inductor/fx_passes/pad_mm.py (`can_pad`, `is_mm_compute_bound`, `should_pad`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._inductor import utils
from torch._inductor.fx_passes import pad_mm

from memsize.compile.gpu_properties import GpuProperties
from memsize.processes.patches import Patch


def padding(properties: GpuProperties) -> Iterator[Patch]:
    """The patches by which products are padded as on a GPU of these properties, also in graphs traced on the CPU."""
    yield pad_mm, "check_device", lambda *_: True
    yield pad_mm, "has_triton", lambda: True
    yield pad_mm, "get_cached_should_pad", lambda key: True
    yield utils, "get_gpu_dram_gbps", lambda: properties.memory
    yield (
        utils,
        "get_device_tflops",
        lambda dtype: properties.single if dtype is torch.float32 else properties.half,
    )
