"""How quantized layers use their weights while they run: the copies that they make beside what is stored.

A storage layout only replaces what is stored; these forwards stand in for the library's kernels. Sources: torchao's
`Int8Tensor` and `Float8Tensor` (a weight-only linear multiplies by a copy of the weight in the input's dtype, which
autograd keeps for the input's gradient), bitsandbytes' `MatMul4Bit` (a copy in the forward and one in the backward,
none kept), torch.ao (int8 kernels without a gradient).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memsize.precision.layouts import Kernel


def run_as(kernel: Kernel, modules: Iterable[nn.Module]) -> None:
    """Let `modules` (of a copy that memsize may change) run as a library's quantized modules do."""
    for module in modules:
        if kernel == "no gradient":
            _without_gradient(module)
        elif kernel == "copy kept" and isinstance(module, nn.Linear):
            _with_copy(module)
        elif kernel == "copy freed" and isinstance(module, nn.Linear):
            _with_passing_copy(module)


def _with_copy(module: nn.Linear) -> None:
    def forward(x: Tensor) -> Tensor:
        return functional.linear(x, module.weight.to(x.dtype, copy=True), module.bias)

    vars(module)["forward"] = forward


def _with_passing_copy(module: nn.Linear) -> None:
    def forward(x: Tensor) -> Tensor:
        result: Tensor = _PassingCopy.apply(x, module.weight, module.bias)  # type: ignore[no-untyped-call]
        return result

    vars(module)["forward"] = forward


def _without_gradient(module: nn.Module) -> None:
    forward = module.forward

    def detached(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return forward(*args, **kwargs)

    vars(module)["forward"] = detached


class _PassingCopy(torch.autograd.Function):
    """A linear layer whose weight is unpacked for each product and dropped after it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.has_bias = bias is not None
        return functional.linear(x, weight.to(x.dtype, copy=True), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, None, Tensor | None]:
        (weight,) = ctx.saved_tensors
        gradient = gradients[0]
        back = gradient.matmul(weight.to(gradient.dtype, copy=True)) if ctx.needs_input_grad[0] else None
        return back, None, gradient.flatten(0, -2).sum(0) if ctx.has_bias else None
