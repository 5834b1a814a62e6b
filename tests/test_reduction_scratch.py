"""What PyTorch's reductions take beside their result (Reduce.cuh), computed by hand for shapes that cover its cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memsize
from tests.kernels import kernel_scratch

A100, T4, RTX_4090 = (108, 2048), (40, 1024), (128, 1536)
_aten = torch.ops.aten
GRADIENT, BIAS = (8192, 1024), [0]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("gpu", "blocks"),
    [
        # A block is 32 wide and 4 high, each thread has 4 outputs: 1,024 / 4 / 32 = 8 columns of blocks; each thread
        # would add up 8,192 / 4 = 2,048 numbers. At least 16 are left: up to 128 blocks for each column.
        pytest.param(A100, 128, id="108 × 16 blocks at once: 216 for each of 8 columns, more than 128"),
        pytest.param(T4, 40, id="40 × 8 blocks at once: 40 for each of 8 columns"),
        pytest.param(RTX_4090, 128, id="128 × 12 blocks at once: 192 for each of 8 columns"),
    ],
)
def test_a_gradient_of_a_bias_takes_partial_sums_for_every_thread_of_its_blocks(
    gpu: tuple[int, int], blocks: int
) -> None:
    taken = [4 * 1024 * blocks * 32 * 4, 4 * 8]
    assert kernel_scratch(gpu, _aten.sum.dim_IntList, meta(*GRADIENT), BIAS) == taken
    assert kernel_scratch(gpu, _aten.sum.dim_IntList, meta(*GRADIENT, dtype=torch.bfloat16), BIAS) == taken
    assert kernel_scratch(gpu, _aten.mean.dim, meta(*GRADIENT), [-2], True) == taken
    assert kernel_scratch(gpu, _aten.sum.dim_IntList, meta(8, 1024, 1024), [0, 1]) == taken  # two dimensions are one


def test_one_sum_of_all_is_split_among_as_many_blocks_as_run_at_once() -> None:
    # 512 threads in a row: 4 blocks on each multiprocessor, and one number of 4 bytes from each.
    assert kernel_scratch(A100, _aten.sum.default, meta(*GRADIENT)) == [4 * 108 * 4, 4]
    assert kernel_scratch(A100, _aten.mean.default, meta(*GRADIENT, dtype=torch.bfloat16)) == [4 * 108 * 4, 4]
    assert kernel_scratch(A100, _aten.linalg_vector_norm.default, meta(*GRADIENT)) == [4 * 108 * 4, 4]
    assert kernel_scratch(A100, _aten.amax.default, meta(*GRADIENT, dtype=torch.bfloat16)) == [2 * 108 * 4, 4]
    assert kernel_scratch(A100, _aten.var_mean.correction, meta(*GRADIENT)) == [16 * 108 * 4, 4]


def test_counts_are_sums_of_eight_bytes() -> None:
    # (2048, 8, 128) by expert: 32 × 4 threads with 4 outputs each, 16,384 / 4 / 16 = 256 blocks for one column.
    taken = [8 * 128 * 256 * 32 * 4, 4]
    assert kernel_scratch(A100, _aten.sum.dim_IntList, meta(2048, 8, 128, dtype=torch.int64), [0, 1]) == taken
    assert kernel_scratch(A100, _aten.sum.dim_IntList, meta(2048, 8, 128, dtype=torch.bool), [0, 1]) == taken
    permuted = meta(2048, 8, 128, dtype=torch.int64).permute(2, 1, 0)
    assert kernel_scratch(A100, _aten.sum.dim_IntList, permuted, (-1, -2)) == taken


def test_outputs_that_are_not_aligned_have_a_thread_each() -> None:
    # 1,022 = 2 × 511: 32 × 8 threads, 16 columns of blocks, and 108 × 8 / 16 = 54 blocks for each.
    assert kernel_scratch(A100, _aten.sum.dim_IntList, meta(8192, 1022), BIAS) == [4 * 1022 * 54 * 32 * 2, 4 * 16]
    # After one number of 4 bytes: 32 × 16 threads, 32 columns, and 108 × 4 / 32 = 13.5 blocks for each.
    odd = meta(8192 * 1024 + 1)[1:].view(8192, 1024)
    assert kernel_scratch(A100, _aten.sum.dim_IntList, odd, BIAS) == [4 * 1024 * 14 * 32, 4 * 32]


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        pytest.param((1020, 1024), BIAS, id="1,020 / 4 numbers for each thread, less than 256"),
        pytest.param((8192, 1024), [1], id="a row for each 32 threads"),
        pytest.param((8192, 2**18), BIAS, id="2,048 columns of blocks are more than run at once"),
        pytest.param((0, 1024), BIAS, id="nothing"),
    ],
)
def test_a_reduction_whose_blocks_share_no_output_takes_nothing(shape: tuple[int, ...], dims: list[int]) -> None:
    assert kernel_scratch(A100, _aten.sum.dim_IntList, meta(*shape), dims) == []


def test_beyond_two_gibibytes_halves_are_reduced_one_after_the_other() -> None:
    # Of 2^20 rows of 4 KiB, or 2^21 of 2 KiB, 2^19 or 2^20 at once: 2^17 or 2^18 numbers for each thread of 4 rows,
    # at most 256 of which are left. 16-bit numbers are added up over both halves in float32.
    taken = [4 * 1024 * 512 * 32 * 4, 4 * 8]
    assert kernel_scratch(A100, _aten.sum.dim_IntList, meta(2**20, 1024), BIAS) == taken
    taken = [4 * 1024, 4 * 1024 * 1024 * 32 * 4, 4 * 8]
    assert kernel_scratch(A100, _aten.sum.dim_IntList, meta(2**21, 1024, dtype=torch.half), BIAS) == taken


def test_a_bias_of_a_convolution_is_summed_over_pixels_in_the_format_of_the_convolution() -> None:
    last: Any = {"device": "meta", "memory_format": torch.channels_last}
    row_major: Any = {"device": "meta"}
    settings = [1024], [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    backward = _aten.convolution_backward.default
    for layout, bias, taken in (
        # 8 × 32 × 32 pixels of 1,024 channels are the 8,192 rows of the gradient above.
        (last, True, [4 * 1024 * 128 * 32 * 4, 4 * 8]),
        # 1,024 rows of 32 × 32 in each of 8 images: 1,024 blocks of one channel.
        (row_major, True, []),
        (last, False, []),
    ):
        grad, image = (torch.empty(8, channels, 32, 32, **layout) for channels in (1024, 4))
        kernel = torch.empty(1024, 4, 1, 1, **layout)
        assert kernel_scratch(A100, backward, grad, image, kernel, *settings, [True, True, bias]) == taken


def test_a_step_takes_it_on_a_gpu_with_as_many_multiprocessors() -> None:
    model = nn.Linear(16, 1024)
    for gpu, size in (("a100", 4 * 1024 * 128 * 128), ("t4", 4 * 1024 * 40 * 128)):
        step = memsize.trace(model, input_size=(16,), batch_size=8192, optimizer="sgd", gpu=gpu)
        taken = [s.bytes for s in step.trace.storages if s.role == "temporary" and s.op == "sum" and s.dtype == "uint8"]
        assert size in taken
