"""Ops of optimum-quanto, by hand."""

from __future__ import annotations

from typing import Any

import torch

from tests.kernels import TABLE, rules

INT = torch.int32


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def rule(name: str, *args: Any, **kwargs: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    rules()
    result = TABLE[name](*args, **kwargs)
    return result.dtype, tuple(result.shape)


def test_packed_values() -> None:
    # two values of 4 bits in a byte, four of 2
    packed = meta(150, 128, dtype=torch.uint8)
    assert rule("quanto::unpack", packed, 4) == (torch.uint8, (300, 128))
    assert rule("quanto::unpack", packed, 2) == (torch.uint8, (600, 128))
    # tiles of 16 x 16 bytes, four to an int32: 192 / 16 rows of 256 * 16 / 4
    packed = meta(48, 256, dtype=INT)
    assert rule("quanto::pack_fp8_marlin", packed, meta(0, dtype=INT), size_k=192, size_n=256, num_bits=8) == (
        INT,
        (12, 1024),
    )


def test_products() -> None:
    half, work = meta(7, 192, dtype=torch.float16), meta(64, dtype=INT)
    sizes = {"num_bits": 8, "size_m": 7, "size_n": 256, "size_k": 192}
    arguments = {"b_q_weight": meta(12, 1024, dtype=INT), "b_scales": meta(1, 256), "workspace": work, **sizes}
    assert rule("quanto::gemm_f16f8_marlin", meta(7, 192), **arguments) == (torch.bfloat16, (7, 256))
    scales = meta(2, 256, dtype=torch.float16)
    awq = (half, meta(64, 192, dtype=torch.int16), scales, scales, 7, 256, 192, 4, 128)
    assert rule("quanto::gemm_f16i4_awq", *awq) == (torch.float16, (7, 256))
    marlin = half, meta(12, 512, dtype=INT), scales, scales, work
    assert rule("quanto::gemm_f16i4_marlin", *marlin) == (torch.float16, (7, 256))


def test_a_product_with_tiles_of_int4() -> None:
    # 256 rows in tiles of eight; 192 columns in tiles of 2 x 16
    weight, scales = meta(32, 6, 32, 1, dtype=INT), meta(6, 256, 2)
    assert rule("aten::_weight_int4pack_mm", meta(7, 192), weight, 32, scales) == (torch.bfloat16, (7, 256))
