"""The properties of GPUs that Inductor decides by: those of the largest card of a compute capability.

Source: NVIDIA's data sheets of V100, T4, A100, A10, L40, H100 and B200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_CARDS: Final[dict[tuple[int, int], tuple[int, int, float, float, float]]] = {
    (7, 0): (80, 6, 125, 15.7, 900),
    (7, 5): (40, 4, 65, 8.1, 320),
    (8, 0): (108, 40, 312, 19.5, 2039),
    (8, 6): (84, 6, 125, 31.2, 600),
    (8, 9): (142, 96, 181, 90.5, 864),
    (9, 0): (132, 50, 989, 67, 3350),
    (10, 0): (148, 126, 2250, 80, 8000),
}
"""Multiprocessors, MiB of L2 cache, TFLOPS in half and in single precision, and GB/s, by compute capability."""


@dataclass(frozen=True)
class GpuProperties:
    """The properties that Inductor reads, by the names of `torch.cuda.get_device_properties`, and its speeds."""

    major: int
    minor: int
    multi_processor_count: int
    L2_cache_size: int
    half: float
    single: float
    memory: float
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block_optin: int = 166912
    warp_size: int = 32
    gcnArchName: str = ""  # noqa: N815 - PyTorch's name
    name: str = "simulated"

    @classmethod
    def of(cls, capability: tuple[int, int]) -> GpuProperties:
        """Return the properties for a compute capability; the A100's are the default."""
        multiprocessors, l2_cache, half, single, memory = _CARDS.get(capability, _CARDS[8, 0])
        return cls(*capability, multiprocessors, l2_cache * 2**20, half, single, memory)
