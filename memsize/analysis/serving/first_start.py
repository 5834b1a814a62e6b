"""The memory that vLLM's first start measures beside a step: Inductor, which compiles the model then, times kernels.

Each that it made in two ways is timed where it first runs (`CachingAutotuner` in torch/_inductor/runtime/
triton_heuristics.py), beside a buffer as large as the GPU's cache, which is written between two calls
(`InductorBenchmarker` in torch/_inductor/runtime/benchmarking.py; up to PyTorch 2.6 Triton's, of 256 MB).

Kernels that it may combine are timed before (`benchmark_combo_kernel` in vLLM's `config/compilation.py`). The largest
one looks up the tokens. It gets a table of random numbers as large as that of the model, and writes the embeddings and,
on one GPU, what the first norm makes of them (`benchmark_codegened_module` in torch/_inductor/codegen/triton.py,
`rand_strided` in torch/_dynamo/testing.py). All is freed before the step runs, but the table's segment stays where the
step's first workspace of cuBLAS lies in it: it did for Qwen2.5-7B on an L4 (vLLM 0.27.1), and did not for Qwen3-14B, in
16 and four bits, on an L40S and on one and two L4s (0.28.0).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from memsize.device.allocator_config import SEGMENT_STEP
from memsize.records.gpu import Card, Interval
from memsize.spec.generation import ServerArguments
from memsize.units import MiB

_CACHES: Final = {
    (6, 0): (4, 4), (7, 0): (6, 6), (7, 5): (3, 6), (8, 0): (24, 40), (8, 6): (2, 6), (8, 9): (24, 96),
    (9, 0): (50, 60), (10, 0): (126, 126), (12, 0): (24, 128),
}  # fmt: skip
"""MiB of the second-level cache, by compute capability: NVIDIA's data sheets."""
_TRITONS: Final = 256_000_000
_UNSPLIT_SINCE: Final = (0, 31, 0)
_UNSPLIT: Final = 20 * MiB
"""A step splits no larger block (`determine_available_memory` there), so that it leaves the table's segment empty."""


class Benchmark(NamedTuple):
    """Bytes at the peak of the compilation, beside the weights, and of the segment that may stay."""

    peak: Interval
    segment: int


def flushed(served: ServerArguments, card: Card) -> Interval:
    """Bytes of the buffer that is written between two calls of a kernel that is timed."""
    if served.rules.torch == "2.6":
        return Interval(_TRITONS, _TRITONS)
    return Interval(*(end * MiB for end in _CACHES.get(card.capability, (2, 128))))


def benchmark(model: Any, served: ServerArguments, card: Card) -> Benchmark:
    """Return what combining the kernels of `model`, one GPU's part, takes."""
    if not served.rules.benchmarks:
        return Benchmark(Interval(0, 0), 0)
    table = model.get_input_embeddings().weight
    embeddings = served.tokens * table.shape[1] * table.itemsize
    size = table.nbytes + embeddings * (2 if served.tp == 1 else 1)
    version = served.rules.version
    stays = served.rules.slack and not (version >= _UNSPLIT_SINCE and table.nbytes > _UNSPLIT)
    segment = -(-table.nbytes // SEGMENT_STEP) * SEGMENT_STEP if stays else 0
    peak = Interval(*(size + end for end in flushed(served, card)))
    return Benchmark(peak, segment)
