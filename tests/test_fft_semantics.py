"""What a Fourier transform copies and buffers on a GPU (SpectralOps.cpp), in bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fft

from tests.kernels import permuted, rules
from tests.models import Ledger

RULES = rules()

REAL, COMPLEX = 4 * 2 * 8 * 16, 8 * 2 * 8 * 16
"""Of 2 × 8 × 16 numbers."""
HALF = 8 * 2 * 8 * 9
"""Of the nine frequencies of sixteen real numbers."""


def real() -> Tensor:
    return torch.empty(2, 8, 16, device="meta")


def complex_numbers() -> Tensor:
    return torch.empty(2, 8, 16, dtype=torch.complex64, device="meta")


@pytest.mark.parametrize(
    ("make", "transform", "result", "inside"),
    [
        (complex_numbers, fft.fft, COMPLEX, []),
        (complex_numbers, fft.fft2, COMPLEX, []),
        (complex_numbers, lambda x: fft.fft(x, dim=1), COMPLEX, [COMPLEX]),  # 2 and 16 are no single dimension
        (lambda: complex_numbers().transpose(1, 2), lambda x: fft.fft(x, dim=1), COMPLEX, []),
        (real, fft.rfft, HALF, []),
        (real, lambda x: fft.rfft(x, dim=1), 8 * 2 * 5 * 16, [REAL]),
        (lambda: torch.empty(2, 8, 9, dtype=torch.complex64, device="meta"), fft.irfft, REAL, [HALF]),
        # Four dimensions: three, then one, which now lies outermost, from a second buffer
        (lambda: complex_numbers().view(2, 8, 4, 4), fft.fftn, COMPLEX, [COMPLEX]),
        # Not at once: the last dimension, then the first two from a second buffer
        (real, lambda x: fft.rfftn(x, dim=(0, 1, 2)), HALF, [HALF]),
        # Strides of 40 and 16: of no row-major tensor's parts (`as_cufft_embed`)
        (
            lambda: torch.empty_strided((3, 2, 8), (40, 16, 1), dtype=torch.complex64, device="meta"),
            lambda x: fft.fft2(x, dim=(0, 1)), 8 * 3 * 2 * 8, [8 * 3 * 2 * 8],
        ),
    ],
)  # fmt: skip
def test_what_a_transform_takes(
    make: Callable[[], Tensor], transform: Callable[[Tensor], Tensor], result: int, inside: list[int]
) -> None:
    x = make()
    with Ledger() as ledger:
        y = transform(x)
    deltas = [event.delta for event in ledger.events]
    assert deltas == [result, *inside, *(-size for size in inside)]
    assert y.untyped_storage().nbytes() == result


@pytest.mark.parametrize("dim", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_a_copy_is_made_where_pytorch_cannot_view(dim: tuple[int, ...]) -> None:
    """The same question put to PyTorch, as `_exec_fft` puts it."""
    x = complex_numbers()
    rest = sorted((d for d in range(3) if d not in dim), key=x.stride, reverse=True)
    arranged = x.permute(*rest, *dim)
    try:
        arranged.view(-1, *arranged.shape[len(rest) :])
        copies = 0
    except RuntimeError:
        copies = 1
    with Ledger() as ledger:
        kept = fft.fftn(x, dim=dim)
    assert sum(event.delta > 0 for event in ledger.events) == 1 + copies
    del kept


ORDERS = list(itertools.permutations(range(4)))
SHAPE = (2, 3, 4, 6)


@pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="its meta kernels sort once")
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("transform", ["fftn", "rfftn", "irfftn", "fftn of real numbers"])
def test_results_lie_as_pytorch_lays_them_out(transform: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own meta kernels, told that their tensors are on a GPU, for every order of dimensions."""
    monkeypatch.setattr(torch._meta_registrations, "device_hint", lambda _: "cuda")
    dtype = torch.complex64 if transform in ("fftn", "irfftn") else torch.float32
    op = {"fftn": "_fft_c2c", "irfftn": "_fft_c2r"}.get(transform, "_fft_r2c")
    last: tuple[object, ...] = {"_fft_c2c": (True,), "_fft_c2r": (SHAPE[-1],)}.get(op, (transform == "rfftn",))
    for order in ORDERS:
        strides = permuted(SHAPE, order)
        for dims in itertools.permutations(range(4), count):
            x = torch.empty_strided(SHAPE, strides, dtype=dtype, device="meta")
            if op == "_fft_c2r":
                last = (2 * (SHAPE[dims[-1]] - 1),)
            overload = getattr(torch.ops.aten, op).default
            mine, theirs = RULES[overload](x, list(dims), 0, *last), overload(x, list(dims), 0, *last)
            assert mine.dtype is theirs.dtype
            assert (mine.shape, mine.stride()) == (theirs.shape, theirs.stride()), (order, dims)
