"""Kernels' facts: what an op returns on CUDA, what it keeps for backward, and what its kernel takes meanwhile.

Every module is one family of ops, but for the tools: `registry` holds the tables, `strides` is the arithmetic of
layouts, `tensors` makes results, `semantics` is the GPU that the current thread simulates, `multiply_adds` counts an
op's work. `memsize.cuda` decides which kernel runs.

There are shape rules for two kinds of ops. Where CUDA's kernel returns something other than PyTorch's `meta` kernel, or
where PyTorch has none, the rule says so and names its source. The other rules cover what ordinary models are made of:
most `meta` kernels are written in Python, and the first use of one imports sympy or torch._dynamo, which takes as long
as importing torch. Everything else is left to PyTorch, whose results `memsize.torch_internals.meta` remembers.

A rule gives shape, dtype and strides as the CUDA kernel does, in a few microseconds. It returns NotImplemented where it
isn't certain: for unusual arguments, and for wrong ones, so that PyTorch's kernel raises its own error.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from memsize.kernels.registry import COPIES, RULES, SPARSE_RULES, Copies, Rules


@cache
def rules() -> Rules:
    """Return every shape rule, by overload. The families are imported at the first call."""
    from memsize.kernels import (  # noqa: F401
        attention,
        bitsandbytes,
        convolution,
        factories,
        fft,
        matmul,
        norms,
        pointwise,
        quanto,
        reductions,
        rnn,
        sparse,
        windows,
    )

    return RULES


def sparse_rules() -> Rules:
    """Return the rules for calls with sparse tensors that the others leave to PyTorch."""
    rules()
    return SPARSE_RULES


def kernel_copies(func: Any, args: Any, kwargs: Any) -> Copies:
    """Yield the arguments that the kernel of `func` copies first, and the memory format of the copies."""
    rules()
    copies = COPIES.get(func)
    return iter(()) if copies is None else copies(args, kwargs)
