"""bitsandbytes on a GPU that is not there: ops by hand and by their fakes, its layers, a paged optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memsize
from tests.kernels import TABLE, TEMPORARIES, rules

HALF = torch.float16


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def rule(name: str, *args: Any, **kwargs: Any) -> list[tuple[torch.dtype, tuple[int, ...]] | None]:
    rules()
    result = TABLE[f"bitsandbytes::{name}"](*args, **kwargs)
    results = result if isinstance(result, tuple) else (result,)
    return [None if tensor is None else (tensor.dtype, tuple(tensor.shape)) for tensor in results]


def temporary_bytes(name: str, *args: Any, **kwargs: Any) -> list[int]:
    rules()
    return [temporary.bytes for temporary in TEMPORARIES[f"bitsandbytes::{name}"](*args, **kwargs)]


def test_packed_weights() -> None:
    # 300·200 values in half bytes, a maximum for each 64; in bfloat16 storage a fourth as many elements
    assert rule("quantize_4bit", meta(300, 200), 64, "nf4", torch.uint8) == [
        (torch.uint8, (30_000, 1)),
        (torch.float32, (938,)),
    ]
    assert rule("quantize_4bit", meta(300, 200), 64, "nf4", torch.bfloat16)[0] == (torch.bfloat16, (15_000, 1))
    # the maxima themselves, a byte each and a float32 for each 256
    assert rule("quantize_blockwise", meta(938, dtype=torch.float32), meta(256), 256) == [
        (torch.uint8, (938,)),
        (torch.float32, (4,)),
    ]
    packed, maxima = meta(30_000, 1, dtype=torch.uint8), meta(938, dtype=torch.float32)
    assert rule("dequantize_4bit", packed, maxima, 64, "nf4", [300, 200], HALF) == [(HALF, (300, 200))]


def test_a_product_unpacks_the_weight_from_five_rows_on() -> None:
    packed, maxima = meta(30_000, 1, dtype=torch.uint8), meta(938, dtype=torch.float32)
    arguments = packed, [300, 200], maxima, 64, "nf4"
    assert rule("gemm_4bit", meta(2, 8, 200), *arguments) == [(torch.bfloat16, (2, 8, 300))]
    assert temporary_bytes("gemm_4bit", meta(2, 8, 200), *arguments) == [2 * 300 * 200]
    assert temporary_bytes("gemm_4bit", meta(4, 1, 200), *arguments) == []
    # under double quantization the 938 maxima become float32 first
    nested = packed, [300, 200], meta(4, dtype=torch.float32), 64, "nf4"
    assert temporary_bytes("gemm_4bit", meta(2, 8, 200), *nested) == [4 * 938, 2 * 300 * 200]


def test_products_in_int8() -> None:
    rows, weight = meta(16, 200, dtype=HALF), meta(300, 200, dtype=torch.int8)
    assert rule("int8_vectorwise_quant", rows, 6.0) == [
        (torch.int8, (16, 200)),
        (torch.float32, (16,)),
        (torch.int64, (0,)),
    ]
    assert rule("int8_vectorwise_quant", rows) == [(torch.int8, (16, 200)), (torch.float32, (16,)), None]
    assert temporary_bytes("int8_vectorwise_quant", rows, 6.0) == [2 * 16 * 200, 16 * 200]
    values = meta(16, 200, dtype=torch.int8)
    assert rule("int8_scaled_mm", values, weight, None, None, dtype=torch.bfloat16) == [(torch.bfloat16, (16, 300))]
    assert temporary_bytes("int8_scaled_mm", values, weight, None, None) == [4 * 16 * 300]
    assert rule("int8_mixed_scaled_mm", rows, values, weight, None, None) == [(HALF, (16, 300)), (HALF, (0,))]
    assert temporary_bytes("int8_mixed_scaled_mm", rows, values, weight, None, None) == [4 * 16 * 300]
    # CUDA's kernel turns the product into float16, which is copied for another dtype
    both = [4 * 16 * 300, 2 * 16 * 300]
    assert temporary_bytes("int8_scaled_mm", values, weight, None, None, dtype=torch.bfloat16) == both
    assert temporary_bytes("int8_mixed_scaled_mm", meta(16, 200), values, weight, None, None) == both
    product = meta(16, 300, dtype=torch.int32)
    assert temporary_bytes("int8_mm_dequant", product, None, None) == []
    assert temporary_bytes("int8_mm_dequant", product, None, None, dtype=torch.bfloat16) == [2 * 16 * 300]


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("bitsandbytes")


def test_the_rules_return_what_the_fakes_do(library: Any) -> None:
    weight, rows = meta(300, 200), meta(16, 200, dtype=HALF)
    packed, maxima = torch.ops.bitsandbytes.quantize_4bit(weight, 64, "nf4", torch.uint8)
    calls: Iterator[tuple[str, tuple[Any, ...]]] = iter(
        [
            ("quantize_4bit", (weight, 64, "nf4", torch.uint8)),
            ("dequantize_4bit", (packed, maxima, 64, "nf4", [300, 200], HALF)),
            ("gemm_4bit", (rows, packed, [300, 200], maxima, 64, "nf4")),
            ("quantize_blockwise", (maxima, meta(256, dtype=torch.float32), 256)),
            ("int8_vectorwise_quant", (rows,)),
            ("int8_scaled_mm", (meta(16, 200, dtype=torch.int8), meta(300, 200, dtype=torch.int8), maxima, maxima)),
        ]
    )
    for name, arguments in calls:
        fake = getattr(torch.ops.bitsandbytes, name)(*arguments)
        results = fake if isinstance(fake, tuple | list) else (fake,)
        expected = [None if tensor is None else (tensor.dtype, tuple(tensor.shape)) for tensor in results]
        assert rule(name, *arguments) == expected, name


def test_layers_and_a_paged_optimizer_on_a_gpu(library: Any) -> None:
    with memsize.virtual_gpu("a100"):
        base = library.nn.Linear4bit(512, 512, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4",
                                     compress_statistics=False)  # fmt: skip
        head = torch.nn.Linear(512, 512, bias=False)
        base, head = base.cuda(), head.cuda()
        packed = 512 * 512 // 2
        # maxima and the 16 codes, which take a block of 512 bytes
        assert torch.cuda.memory_allocated() == packed + 4 * 512 * 512 // 64 + 512 + 4 * 512 * 512
        optimizer = library.optim.PagedAdamW8bit(head.parameters())
        base(head(torch.randn(64, 512, device="cuda"))).sum().backward()
        optimizer.step()
        state = optimizer.state[head.weight]
        # two moments of a byte, in the host's pages; their scales on the GPU
        assert [(state[key].device.type, state[key].nbytes) for key in ("state1", "state2")] == [("cpu", 512 * 512)] * 2
        assert state["absmax1"].device.type == "cuda" and state["absmax1"].nbytes == 4 * 512 * 512 // 256


def test_kernels_that_a_program_calls_itself_do_nothing(library: Any) -> None:
    """As axolotl's and Unsloth's LoRA do, with addresses of tensors that they have allocated."""
    native = library.functional.lib
    with memsize.virtual_gpu("a100"):
        weight = library.nn.Params4bit(torch.randn(64, 64), requires_grad=False).cuda()
        out = torch.empty(64, 64, dtype=torch.bfloat16, device="cuda")
        before = torch.cuda.memory_allocated()
        pointers = [None, *(library.functional.get_ptr(part) for part in (weight, weight.quant_state.absmax, out))]
        assert native.cdequantize_blockwise_bf16_nf4(*pointers, 64, out.numel(), None) == 0
        assert torch.cuda.memory_allocated() == before
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="cdequantize_blockwise_bf16_nf4"):
            native.cdequantize_blockwise_bf16_nf4()
