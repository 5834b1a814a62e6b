"""What a process takes outside the allocator: what the driver takes, and the code of libraries, read from wheels."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest

import memsize
from benchmarks.cuda_libraries import Code as Read, chosen, code_of, containers, cuda_of, library
from memsize import InputError, Stack
from memsize.units import MiB
from tests.gpus import (
    CARDS,
    Build,
    Card,
    Code,
    Interval,
    budgets,
    card,
    cuda_context,
    loadings,
    nearest_code,
    processors,
)

# -- fat binaries ------------------------------------------------------------------------------------------------------


def elf(*parts: tuple[str, int, bytes]) -> bytes:
    """An ELF file of sections: name, flags, contents."""
    named = [("", 0, b""), *parts, (".shstrtab", 0, b"")]
    names = b"".join(name.encode() + b"\0" for name, _, _ in named)
    named[-1] = (".shstrtab", 0, names)
    body, headers, at = b"", b"", 0x40
    for name, flags, data in named:
        start = names.index(name.encode() + b"\0") if name else 0
        headers += struct.pack("<IIQQQQIIQQ", start, 1, flags, 0, at + len(body), len(data), 0, 0, 0, 0)
        body += data
    head = b"\x7fELF".ljust(0x28, b"\0") + struct.pack("<Q", at + len(body))
    return head.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, len(named), len(named) - 1) + body + headers


def image(architecture: int, contents: bytes, kind: int = 2) -> bytes:
    """An image of a container, not compressed."""
    head = struct.pack("<HHIQIIHHI", kind, 257, 64, len(contents), 0, 0, 7, 1, architecture)
    return head.ljust(64, b"\0") + contents


def container(*images: bytes) -> bytes:
    """The images of one source file."""
    body = b"".join(images)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def kernel(code: int, constants: int = 0) -> bytes:
    """A file of device code: a kernel that takes shared memory too, debugging information and names."""
    return elf(
        (".text.kernel", 6, b"c" * code),
        (".nv.constant0.kernel", 2, b"k" * constants),
        (".nv.shared.kernel", 3, b"s" * 100),
        (".nv.merc.debug", 2, b"m" * 1000),
        (".debug_frame", 0, b"d" * 1000),
    )


def fatbin(*parts: bytes) -> bytes:
    return elf((".text", 6, b"host"), (".nv_fatbin", 2, b"".join(parts)))


def test_code_and_constants_reach_the_card() -> None:
    # 800 + 50; of the 100 that describe shared memory it is not known; debugging information and names do not.
    assert code_of(kernel(800, 50)) == Read(bytes=950, shared=100, images=1)


def test_a_card_takes_one_image_of_each_source_file() -> None:
    first = container(image(80, kernel(800)), image(86, kernel(86)), image(90, kernel(900)), image(90, kernel(990)))
    second = container(image(75, kernel(75)), image(90, b"ptx", kind=1), image(80, kernel(10)))
    read = library(fatbin(first, b"\0" * 8, second))
    assert read[80] == Read(800 + 10 + 200, 200, 2)
    assert read[86] == Read(86 + 10 + 200, 200, 2) == read[89]  # 8.9 runs what is built for 8.6, and that for 8.0
    assert read[75] == Read(75 + 100, 100, 1)
    assert read[90] == Read(990 + 100, 100, 1)  # one of two variants, and no PTX
    assert read[100] == read[120] == Read()  # another major version


def test_images_are_found_where_containers_are_aligned() -> None:
    pieces = list(containers(fatbin(b"\0" * 16, container(image(80, b"x" * 8), image(70, b"y" * 16)))))
    assert [[(i.architecture, i.size) for i in images] for images in pieces] == [[(80, 8), (70, 16)]]
    assert [i.size for i in chosen(pieces[0], 89)] == [8] and chosen(pieces[0], 60) == []


def test_the_cuda_of_a_release_is_that_of_its_runtime() -> None:
    assert cuda_of(["filelock", "nvidia-cuda-runtime-cu12==12.1.105; platform_system == 'Linux'"]) == "12.1"
    assert cuda_of(["cuda-toolkit[cublas,cudart]==13.0.3; platform_system == 'Linux'"]) == "13.0"
    assert cuda_of(["nvidia-cuda-runtime-cu11 (==11.7.99) ; platform_system == 'Linux'"]) == "11.7"


# -- a context ---------------------------------------------------------------------------------------------------------


def cells(least: int, most: int, images: int) -> dict[tuple[int, int], Code]:
    return {(8, 0): Code(least * MiB, most * MiB, images)}


OLD = Build((12, 1), {"torch": cells(500, 520, 400), "cublas": cells(300, 400, 50), "cudnn": cells(200, 210, 70)})
NEW = Build((13, 0), {"torch": cells(600, 640, 640), "cublas": cells(100, 200, 50), "cudnn": cells(300, 310, 31)})
OPS = {"addmm", "relu", "sum", "_scaled_dot_product_efficient_attention"}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memsize.device.cuda_context._builds", lambda: {(2, 4): OLD, (2, 14): NEW})


def mib(low: float, high: float) -> Interval:
    return Interval(int(low) * MiB, -int(-high // 1) * MiB)


# Contexts of A100s had 475 MiB at least. 108 multiprocessors of 2,048 threads have 216 MiB of local memory: 475.2 + 60.
A100 = card("a100")


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("stack", "ops", "low", "high"),
    [
        # Lazy: an image of 1 MiB for each of four kinds of op, one of 4 MiB for the product, and cuBLAS's own 26.
        ("", OPS, 475, 535.2 + 4 + 4 + 26),
        ("cuda=12.2", OPS, 475, 535.2 + 4 + 8 + 26),  # the cuBLAS of 12.1, whose images have 8 MiB
        ("torch=2.14,loading=eager", OPS, 475 + 700, 535.2 + 840 + 26),
        ("torch=2.4,loading=eager", OPS, 475 + 800, 535.2 + 920 + 26),
        ("torch=2.4,loading=eager", OPS | {"convolution"}, 475 + 1000, 535.2 + 1130 + 30),
        ("torch=2.4,loading=lazy", OPS, 475, 535.2 + 4 * 1.3 + 8 + 26),
        ("torch=2.4", OPS, 475, 535.2 + 920 + 26),  # before CUDA 12.2 either is possible
        ("torch=2.4,cuda=11.6,loading=lazy", OPS, 475 + 800, 535.2 + 920 + 26),  # before 11.7 nothing is lazy
        # Not known what runs: a hundred kinds of op, four of other libraries, or all that there is.
        ("", None, 475, 535.2 + 100 + 16 + 40 + 30),
        ("loading=eager", None, 475 + 600, 535.2 + 640 + 200 + 310 + 30),
    ],
)
def test_context(stack: str, ops: set[str] | None, low: float, high: float) -> None:
    assert cuda_context(A100, Stack.parse(stack), ops) == mib(low, high)


@pytest.mark.usefixtures("table")
def test_a_library_has_no_more_images_than_there_are() -> None:
    many = {f"convolution_{number}" for number in range(50)}
    assert cuda_context(A100, ops=many).high == mib(0, 535.2 + 50 + 310 + 4).high


@pytest.mark.usefixtures("table")
def test_a_budget_leaves_room_for_the_largest_context() -> None:
    assert budgets("a100")[0].context == cuda_context(A100).high == cuda_context().high
    eager = budgets("a100", stack=Stack(loading="eager"))[0]
    assert eager.context - budgets("a100")[0].context == (640 - 100 + 200 - 16 + 310 - 40) * MiB


@pytest.mark.parametrize(
    ("cuda", "asked", "expected"),
    [
        ((11, 6), None, ("eager",)),
        ((11, 6), "lazy", ("eager",)),
        ((11, 7), None, ("lazy", "eager")),
        ((12, 1), "eager", ("eager",)),
        ((12, 1), "lazy", ("lazy",)),
        ((12, 2), None, ("lazy",)),
        ((13, 0), "eager", ("eager",)),
    ],
)
def test_when_kernels_are_loaded(cuda: tuple[int, int], asked: str | None, expected: Sequence[str]) -> None:
    assert loadings(cuda, asked) == expected  # type: ignore[arg-type]


def test_code_for_an_architecture_that_has_none_of_its_own() -> None:
    old, new = Code(1, 1, 1), Code(2, 2, 2)
    built = {(7, 5): old, (9, 0): new}
    assert [nearest_code(built, at) for at in ((7, 5), (8, 9), (9, 0), (12, 0), (6, 0))] == [old, old, new, new, old]


# -- cards -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "measured"),
    [("t4", 105), ("rtx 3090", 256), ("6000 ada", 426), ("pro 6000", 555), ("b200", 612), ("a100", 475), ("a100", 531)],
)
def test_measured_contexts_lie_between_the_ends(name: str, measured: int) -> None:
    low, high = cuda_context(card(name), ops=())
    assert low <= measured * MiB <= high
    assert high - low < 160 * MiB


def test_multiprocessors() -> None:
    assert processors(card("t4")) == (40, 40)
    assert processors(Card("NVIDIA A100-SXM4-80GB (local)", (8, 0), 1, "asked")) == (108, 108)
    assert processors(Card("unheard of", (9, 0), 1, "asked")) == (132, 132)
    assert processors(Card("unheard of", (8, 9), 1, "asked")) == (10, 142)  # as any of its generation
    assert processors(card("mi300x")) == (108, 108)  # the card whose kernels stand in
    assert all(processors(gpu)[0] == processors(gpu)[1] for gpu in CARDS.values())


def test_every_release_has_its_code() -> None:
    for minor in range(15):
        for capability in ((7, 5), (8, 0), (8, 9), (9, 0)):
            where = Card("X", capability, 1, "made up")
            lazy = cuda_context(where, Stack(f"2.{minor}", loading="lazy"), {"addmm"})
            eager = cuda_context(where, Stack(f"2.{minor}", loading="eager"), {"addmm"})
            assert 300 * MiB < eager.low - lazy.low < 1500 * MiB
            assert eager.high - eager.low - (lazy.high - lazy.low) < 200 * MiB


@pytest.mark.parametrize(("torch", "code"), [("2.4", (37, 38)), ("2.3", (0, 0))])
def test_batch_norms_of_cudnn_9_are_in_a_library_of_their_own(torch: str, code: tuple[int, int]) -> None:
    # 40 MiB more were measured on A100s with batch norm, PyTorch 2.4 or 2.5 (GPUMemNet).
    stack, ops = Stack(torch, loading="eager"), {"convolution", "addmm"}
    plain, normalized = cuda_context(A100, stack, ops), cuda_context(A100, stack, ops | {"cudnn_batch_norm"})
    assert (normalized.low - plain.low, normalized.high - plain.high) == (code[0] * MiB, code[1] * MiB)


def test_metal_keeps_its_own_apart() -> None:
    assert cuda_context(card("m2 16gb")) == (0, 0)


# -- what a script sets ------------------------------------------------------------------------------------------------

SCRIPT = """
import os
os.environ["CUDA_MODULE_LOADING"] = "{}"
import torch
x = torch.ones(64, 64, device="cuda", requires_grad=True)
(x @ x).sum().backward()
"""


@pytest.mark.parametrize(("value", "stack"), [("EAGER", "loading=eager"), ("LAZY", "loading=lazy"), ("DEFAULT", "")])
def test_a_script_says_how_cuda_loads(tmp_path, value: str, stack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(value))
    run = memsize.run(script, gpu="t4")
    assert run.trace.stack == stack
    beside = run.peak.device.low - run.peak.reserved
    assert (beside > 500 * MiB) == (value == "EAGER")
    told = memsize.run(script, gpu="t4", stack="loading=lazy")
    assert told.trace.stack == "loading=lazy"


def test_a_loading_that_there_is_not() -> None:
    with pytest.raises(InputError, match="CUDA loads its modules lazy or eager, not slowly"):
        Stack.parse("torch=2.6,loading=slowly")
    assert str(Stack("2.6", loading="eager")) == "torch=2.6,loading=eager"
    assert Stack(loading="eager").note("2.13.0") is None
