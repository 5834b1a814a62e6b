"""The fused encoder layer and attention: the same numbers as PyTorch's own operators, and what a GPU allocates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memsize
from memsize import Trace
from tests.kernels import encoder

BATCH, TOKENS, WIDTH, HEADS, INNER = 2, 5, 16, 4, 24


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    made = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, batch_first=True, dtype=torch.float64, **options)
    return made.eval().requires_grad_(False)


def arguments(made: nn.TransformerEncoderLayer, src: Tensor, *mask: Any) -> tuple[Any, ...]:
    """What `nn.TransformerEncoderLayer.forward` gives the fused operator."""
    attention = made.self_attn
    projections = attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight, attention.out_proj.bias
    norms = made.norm1.weight, made.norm1.bias, made.norm2.weight, made.norm2.bias
    feed_forward = made.linear1.weight, made.linear1.bias, made.linear2.weight, made.linear2.bias
    gelu = made.activation_relu_or_gelu == 2
    return (
        src, WIDTH, HEADS, *projections, gelu, made.norm_first, made.norm1.eps, *norms, *feed_forward, *mask
    )  # fmt: skip


def masks() -> dict[str, tuple[Any, ...]]:
    """No mask, one of (tokens, tokens), one of (batch, tokens), one of everything: with PyTorch's number for each."""
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    padding = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    padding[1, 3:] = True
    both = (padding.view(BATCH, 1, 1, TOKENS) | causal).expand(BATCH, HEADS, TOKENS, TOKENS)
    return {"none": (None, None), "causal": (causal, 0), "padding": (padding, 1), "both": (both, 2)}


@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
def test_the_layer_computes_what_pytorch_computes(options: dict[str, Any], mask: str) -> None:
    made = layer(**options)
    given = arguments(made, torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64), *masks()[mask])
    torch.testing.assert_close(encoder.encoder_layer(*given), torch._transformer_encoder_layer_fwd(*given))


def test_so_does_the_path_through_an_attention_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "_has_kernel", lambda query, heads: True)
    given = arguments(layer(), torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64))
    torch.testing.assert_close(encoder.encoder_layer(*given), torch._transformer_encoder_layer_fwd(*given))


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("averaged", [True, False])
def test_attention_and_its_weights_are_what_pytorch_computes(averaged: bool, same: bool) -> None:
    attention = layer().self_attn
    query = torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64)
    key = query if same else query.flip(1)
    projections = attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight, attention.out_proj.bias
    given: Any = (query, key, key, WIDTH, HEADS, *projections, None, True, averaged)
    torch.testing.assert_close(encoder.multi_head_attention(*given), torch._native_multi_head_attention(*given))


def traced(model: nn.Module, size: tuple[int, ...], **options: Any) -> Trace:
    return memsize.trace(model, size, optimizer=None, mode="eval", **options).trace


def allocated(trace: Trace) -> list[tuple[str, int]]:
    """What each op allocates for its results."""
    made = [event for event in trace.events if event.delta > 0 and trace.phases[event.phase] == "forward"]
    return [(event.op, event.delta) for event in made if trace.storages[event.storage].role != "workspace"]


def test_evaluation_takes_the_fused_path_with_the_memory_efficient_kernel() -> None:
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    made = allocated(traced(model, (16, 64), batch_size=4))
    rows = 4 * 16
    sums = [size for op, size in made if op.startswith("_scaled_dot_product")]
    assert sums[0] == rows * 64 * 4  # the output; no statistics are kept for a backward
    assert [entry for entry in made if not entry[0].startswith("_scaled_dot_product")] == [
        ("addmm", rows * 3 * 64 * 4),
        ("addmm", rows * 64 * 4),
        ("native_layer_norm", rows * 64 * 4),
        ("native_layer_norm", rows * 4),
        ("native_layer_norm", rows * 4),
        ("_addmm_activation", rows * 128 * 4),
        ("addmm", rows * 64 * 4),
        ("native_layer_norm", rows * 64 * 4),
        ("native_layer_norm", rows * 4),
        ("native_layer_norm", rows * 4),
    ]


def test_heads_that_no_kernel_takes_hold_all_scores() -> None:
    """Four heads of 5: the fused attention leaves those to the path that materialises."""
    made = allocated(traced(nn.TransformerEncoderLayer(20, 4, 32, batch_first=True), (16, 20), batch_size=4))
    assert made[:4] == [
        ("mm", 4 * 16 * 60 * 4),
        ("_transform_bias_rescale_qkv", 4 * 16 * 60 * 4),
        ("bmm", 4 * 4 * 16 * 16 * 4),  # softmax writes over it, and the product with the values over the queries
        ("clone", 4 * 16 * 20 * 4),
    ]


def test_asked_for_weights_materialise_and_are_averaged() -> None:
    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[1]

    trace = traced(Weighed(), (16, 64), batch_size=4)
    assert ("bmm", 4 * 4 * 16 * 16 * 4) in allocated(trace)
    assert ("sum", 4 * 16 * 16 * 4) in allocated(trace)
    assert [str(output.spec) for output in trace.layers[0].outputs] == ["float32[4,16,16]"]


@pytest.mark.parametrize("options", [{"mode": "train"}, {"scenario": "amp-bf16"}])
def test_training_mode_and_autocast_take_the_plain_path(options: dict[str, Any]) -> None:
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    trace = memsize.trace(model, (16, 64), **({"optimizer": None, "mode": "eval", "batch_size": 4} | options)).trace
    assert "_addmm_activation" not in {op for op, _ in allocated(trace)}


def test_a_padded_batch_is_computed_with_its_padding_and_says_so() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.encoder(x, src_key_padding_mask=mask)

    data = {"x": torch.randn(4, 16, 64), "mask": torch.arange(16) >= torch.tensor([[16], [9], [4], [12]])}
    trace = memsize.trace(Padded(), data, optimizer=None, mode="eval").trace
    assert [str(output.spec) for output in trace.layers[0].outputs] == ["float32[4,16,64]"]
    assert any("padding" in text for text in trace.assumptions)
    assert ("_masked_softmax", 4 * 4 * 16 * 16 * 4) in allocated(trace)


def test_the_name_of_the_private_backend_is_as_before() -> None:
    before = torch.utils.backend_registration._privateuse1_backend_name
    traced(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), (16, 64))
    assert torch.utils.backend_registration._privateuse1_backend_name is before
    assert before != "meta"
