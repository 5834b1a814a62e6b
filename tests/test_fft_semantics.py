"""What a Fourier transform copies and buffers on a GPU (SpectralOps.cpp), in bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fft

from tests.models import Ledger

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
        # Four dimensions: three, then one, from a second buffer
        (lambda: complex_numbers().view(2, 8, 4, 4), fft.fftn, COMPLEX, [COMPLEX]),
    ],
)
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
