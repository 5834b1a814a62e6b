"""bitsandbytes' ops: packed weights and their scales, the copies that products unpack, 8-bit optimizers' updates.

Source: bitsandbytes 0.45 to 0.50, `_ops.py` (what each op returns, as its fakes say), `backends/cuda/ops.py` and
`backends/default/ops.py` (what the kernels allocate). The library is not imported here: rules are found by name.
Activations are taken to have no outliers, so a mixed int8 product is an int8 product.

Known limit: from 5 rows on, whether `gemm_4bit` unpacks a small weight or multiplies in one kernel depends on the GPU's
model (`_gemm_4bit_use_custom_cuda`); it is taken to unpack, as every GPU does for the batches of a training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Final

import torch

from memsize.kernels.registry import Temporary, shape_rule, shape_rules, temporaries_of
from memsize.kernels.tensors import empty

FUSED_ROWS: Final = 4
"""Up to so many rows, `gemm_4bit` unpacks the weight in its kernel on every GPU (`_GEMM_4BIT_CUSTOM_FLOOR_M`)."""


@shape_rule("bitsandbytes::quantize_4bit")
def _quantize(tensor: Any, block: int, _kind: str, storage: torch.dtype) -> Any:
    size = tensor.numel()
    return empty(((size + 1) // (2 * storage.itemsize), 1), storage), empty((-(-size // block),), torch.float32)


@shape_rule("bitsandbytes::quantize_blockwise")
def _quantize_blockwise(tensor: Any, _code: Any, block: int) -> Any:
    return empty(tuple(tensor.shape), torch.uint8), empty((-(-tensor.numel() // block),), torch.float32)


@temporaries_of("bitsandbytes::gemm_4bit")
def _unpacked(
    rows: Any, _packed: Any, shape: Sequence[int], maxima: Any, block: int, *_: Any, **__: Any
) -> Iterator[Temporary]:
    """The weight in the input's dtype, and under double quantization the maxima in float32."""
    if rows.numel() > FUSED_ROWS * rows.shape[-1]:
        blocks = -(-prod(shape) // block)
        if maxima.numel() < blocks:
            yield Temporary((blocks,))
        yield Temporary(tuple(shape), rows.dtype)


@shape_rule("bitsandbytes::int8_vectorwise_quant")
def _quantize_rows(tensor: Any, threshold: float = 0.0) -> Any:
    rows = tensor.numel() // tensor.shape[-1]
    columns = empty((0,), torch.int64) if threshold else None
    return empty(tuple(tensor.shape), torch.int8), empty((rows,), torch.float32), columns


@temporaries_of("bitsandbytes::int8_vectorwise_quant")
def _outliers(tensor: Any, threshold: float = 0.0) -> Iterator[Temporary]:
    """``A.abs() >= threshold``."""
    if threshold:
        yield Temporary(tuple(tensor.shape), tensor.dtype)
        yield Temporary(tuple(tensor.shape), torch.bool)


@shape_rule("bitsandbytes::int8_double_quant")
def _quantize_both(tensor: Any, threshold: float = 0.0) -> Any:
    values, rows, columns = _quantize_rows(tensor, threshold)
    other, scales = empty(tuple(tensor.shape), torch.int8), empty((tensor.shape[-1],), torch.float32)
    return values, other, rows, scales, columns


@temporaries_of("bitsandbytes::int8_mm_dequant")
def _half_result(product: Any, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Iterator[Temporary]:
    """The result in float16, the only dtype of CUDA's kernel, where another one is asked for."""
    if dtype not in (None, torch.float16):
        yield Temporary(tuple(product.shape), torch.float16)


@temporaries_of("bitsandbytes::int8_scaled_mm")
def _scaled_product_temporaries(
    rows: Any, weight: Any, *_: Any, dtype: torch.dtype | None = None, **__: Any
) -> Iterator[Temporary]:
    """The product in int32, and what `int8_mm_dequant` takes."""
    product = empty((*rows.shape[:-1], weight.shape[0]), torch.int32)
    yield Temporary(tuple(product.shape), torch.int32)
    yield from _half_result(product, dtype=dtype)


@temporaries_of("bitsandbytes::int8_mixed_scaled_mm")
def _mixed_product_temporaries(rows: Any, values: Any, weight: Any, *_: Any, **__: Any) -> Iterator[Temporary]:
    """The temporaries of `int8_scaled_mm`, whose result has the dtype of the input here."""
    yield from _scaled_product_temporaries(values, weight, dtype=rows.dtype)


def _product(rows: Any, outputs: int, dtype: torch.dtype) -> Any:
    return empty((*rows.shape[:-1], outputs), dtype)


shape_rules(
    "bitsandbytes",
    {
        "dequantize_4bit": lambda weight, maxima, block, kind, shape, dtype: empty(tuple(shape), dtype),
        "dequantize_blockwise": lambda values, maxima, code, block, dtype: empty(tuple(values.shape), dtype),
        "int8_vectorwise_dequant": lambda values, scales: empty(tuple(values.shape), torch.float32),
        "gemm_4bit gemv_4bit": lambda rows, weight, shape, *_, **__: _product(rows, shape[0], rows.dtype),
        "int8_linear_matmul": lambda rows, weight: _product(rows, weight.shape[0], torch.int32),
        "int8_mm_dequant": lambda product, rows, columns, dtype=None, bias=None: empty(
            tuple(product.shape), dtype or torch.float16
        ),
        "int8_scaled_mm": lambda rows, weight, scales, columns, bias=None, dtype=None: _product(
            rows, weight.shape[0], dtype or torch.float16
        ),
        "int8_mixed_scaled_mm": lambda rows, values, weight, *_, **__: (
            (_product(rows, weight.shape[0], rows.dtype), empty((0,), rows.dtype))
        ),
        # Parameters and state are updated in place.
        "optimizer_update_32bit optimizer_update_8bit_blockwise": lambda *_, **__: None,
    },
)
