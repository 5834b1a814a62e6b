"""The memory that a process takes of a GPU outside the caching allocator: the driver's for its CUDA context, and the
code of the libraries that the program calls.

The driver sets aside local memory for all threads that a card can run at once: multiprocessors × threads of each × 1
KiB, the default of `cudaLimitStackSize` (the formula: NVIDIA's developer forum, topic 289339).
Whole contexts grow with it. Measured before any op, beside that local memory: 105 MiB on a T4 (40 MiB; torch-preflight
0.4.0, tests/calibration/measured_cuda.json), 256 on an RTX 3090 (123; invoke-ai/InvokeAI#9413), 426 on an RTX 6000 Ada
(213; unslothai/unsloth-zoo#1053), 555 on an RTX PRO 6000 (282; ggml-org/llama.cpp#23604), 612 on a B200 (296;
unslothai/unsloth#8669), 475 to 531 on A100s (216). All lie between 1.9 times that, and 60 MiB and 2.2 times that. Of an
A100, which alone was measured with several drivers, the least is what was measured: 1.9 times come from other cards.

`cuda_code.csv` has the code: for each library of each release, as PyPI has it, what a card of a compute capability
loads if it loads everything, in MiB: without and with the sections that describe shared memory, of which it is not
known whether they take any; then the number of images (one for each source file) that this is in. It is read from the
wheels by `benchmarks/cuda_libraries.py`, which says how.

CUDA loads a library at its first call: all of it where loading is eager; where it is lazy, only kernels that run, which
is counted as nothing at least, and as an image of mean size for each kind of op at most. Lazy loading came with CUDA
11.7 and is Linux's default from 12.2 on (NVIDIA's CUDA programming guide, "Lazy loading"). Before, PyTorch asks for it
when it initializes CUDA (pytorch/pytorch#86509), which is too late where CUDA was asked anything before, such as
whether there is a GPU (#113326).

Known limits: the code of PyTorch is that of the build on PyPI, also beside another CUDA; kernels that are compiled when
they are needed (Triton's, PTX, cuBLASLt's archive from CUDA 12.4 on), and the local memory that the few kernels with a
stack of more than 1 KiB get when they run, are not counted.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from memsize.device.cards import card, multiprocessors, processors
from memsize.records.gpu import DEFAULT_GPU, Card, Interval
from memsize.spec.stack import INSTALLED, NEWEST, Loading, Release, Stack, release
from memsize.units import KiB, MiB

_STACK: Final = 1 * KiB
_LEAST: Final = 1.9
_MOST: Final = 2.2
_FIXED: Final = 60 * MiB
_LEAST_OF_A100: Final = 475 * MiB

_USED_BY: Final[dict[str, re.Pattern[str]]] = {
    "torch": re.compile(""),
    "cublas": re.compile(r"(?:mm|mv|dot)(?:_activation)?_?$"),
    "cudnn": re.compile("convolution|cudnn"),
    "cudnn_norm": re.compile("cudnn_batch_norm"),
    "cudnn_rnn": re.compile("cudnn_(?:rnn|ctc)"),
    "linalg": re.compile("linalg|cholesky|lu_solve|triangular_solve|geqrf|orgqr|ormqr|lstsq"),
    "cusparse": re.compile("sparse"),
}
"""The ops that call each library."""
_NVIDIA: Final = ("cublas", "cusparse")
"""Those that come with CUDA; PyTorch pins the others."""
_OWN: Final = {"cublas": 26 * MiB, "cudnn": 4 * MiB}
"""What they take at most beside code that is counted: measured with a first product and a first handle (T4, PyTorch
2.11; torch-preflight, as above), the code that these loaded included."""
_KINDS: Final = 100
_KINDS_OF_LIBRARY: Final = 4
"""Kinds of op where the program is not known: PyTorch's, and those of another library (forward, and three backward)."""

_NOTHING: Final = Interval(0, 0)
_LAZY_SINCE: Final = (11, 7)
_LAZY_BY_DEFAULT_SINCE: Final = (12, 2)


class Code(NamedTuple):
    """A whole library as a card loads it: bytes without and with shared memory's sections, in how many images."""

    least: int
    most: int
    images: int


Cells = Mapping[Release, Code]


class Build(NamedTuple):
    """A release of PyTorch on PyPI: its CUDA, and its libraries by compute capability."""

    cuda: Release
    libraries: dict[str, Cells]


def cuda_context(where: Card | None = None, stack: Stack = INSTALLED, ops: Collection[str] | None = None) -> Interval:
    """Bytes that a process holds outside the caching allocator of a card (None: the usual one).

    `ops` are those that the program runs; None: not known, so that it may call every library. The ends are whole MiB.
    Metal's recommendation for a process leaves its own context out.
    """
    where = where or card(DEFAULT_GPU)
    if where.platform == "MPS":
        return _NOTHING
    threads = multiprocessors(where).threads * _STACK
    least, most = processors(where)
    low, high = round(_LEAST * least * threads), round(_MOST * most * threads) + _FIXED
    if "a100" in where.name.lower():
        low = _LEAST_OF_A100
    return code_of_libraries(where, stack, ops, beside=Interval(low, high))


def code_of_libraries(
    where: Card, stack: Stack = INSTALLED, ops: Collection[str] | None = None, *, beside: Interval = _NOTHING
) -> Interval:
    """The part of a CUDA context that comes with the first calls of libraries, after CUDA is initialized, and what is
    there `beside` it.
    """
    build = _build(stack)
    cuda = build.cuda if stack.cuda is None else release(stack.cuda) or build.cuda
    kinds = {name: _kinds(name, ops) for name in build.libraries}
    cells = {name: nearest_code(build.libraries[name], where.capability) for name, count in kinds.items() if count}
    if ops is None and "cudnn_norm" in cells:  # its kinds are among cuDNN's
        cells["cudnn"] = Code(*map(sum, zip(cells["cudnn"], cells.pop("cudnn_norm"), strict=True)))
    ends = []
    for loading in loadings(cuda, stack.loading):
        if loading == "eager":
            certain = [cell.least for name, cell in cells.items() if ops is not None or name == "torch"]
            ends.append(Interval(sum(certain), sum(cell.most for cell in cells.values())))
        else:
            images = ((cell, min(kinds[name], cell.images)) for name, cell in cells.items())
            ends.append(Interval(0, sum(round(cell.most / cell.images * count) for cell, count in images)))
    own = sum(_OWN.get(name, 0) for name in cells)
    low, high = beside.low + min(end.low for end in ends), beside.high + own + max(end.high for end in ends)
    return Interval(low // MiB * MiB, -(-high // MiB) * MiB)


def loadings(cuda: Release, module_loading: Loading | None = None) -> tuple[Loading, ...]:
    """How CUDA loads kernels, where it may do either in both ways; the argument is `CUDA_MODULE_LOADING`."""
    if cuda < _LAZY_SINCE:
        return ("eager",)
    if module_loading is not None:
        return (module_loading,)
    return ("lazy",) if cuda >= _LAZY_BY_DEFAULT_SINCE else ("lazy", "eager")


def _kinds(library: str, ops: Collection[str] | None) -> int:
    """How many kinds of op call a library."""
    if ops is None:
        return _KINDS if library == "torch" else _KINDS_OF_LIBRARY
    return sum(bool(_USED_BY[library].search(op)) for op in ops)


def nearest_code(cells: Cells, capability: Release) -> Code:
    """The code for a card: that of the nearest lower capability, as new cards run what was built for older ones."""
    return cells[max((at for at in cells if at <= capability), default=min(cells))]


def _build(stack: Stack) -> Build:
    """The libraries of a stack, where no release is named those of the newest PyTorch. NVIDIA's are its CUDA's, as the
    first release of PyTorch with it pinned them.
    """
    builds = _builds()
    build = builds[max((at for at in builds if at <= (stack.release or NEWEST)), default=min(builds))]
    cuda = stack.cuda and release(stack.cuda)
    if not cuda or cuda == build.cuda:
        return build
    order = cuda[0] * 100 + cuda[1]
    nearest = min(
        builds.values(), key=lambda other: (other.cuda > cuda, abs(other.cuda[0] * 100 + other.cuda[1] - order))
    )
    return Build(cuda, build.libraries | {name: nearest.libraries[name] for name in _NVIDIA if name in build.libraries})


@cache
def _builds() -> dict[Release, Build]:
    """The table, by the release of PyTorch."""
    builds: dict[Release, Build] = {}
    with Path(__file__).with_name("cuda_code.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            torch, cuda, library = (line.pop(name) for name in ("torch", "cuda", "library"))
            build = builds.setdefault(_release(torch), Build(_release(cuda), {}))
            cells = build.libraries[library] = {}
            for at, cell in line.items():
                if cell:
                    least, most, images = map(int, cell.split())
                    cells[_release(at)] = Code(least * MiB, most * MiB, images)
    return builds


def _release(text: str) -> Release:
    major, minor = text.split(".")
    return int(major), int(minor)
