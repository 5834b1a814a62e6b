"""Shape rules: what an op returns on CUDA, computed directly for `meta` tensors.

There are rules for two kinds of ops. Where CUDA's kernel returns something other than PyTorch's `meta` kernel, or where
PyTorch has none, the rule says so and names its source. The other rules cover what ordinary models are made of: most
`meta` kernels are written in Python, and the first use of one imports sympy or torch._dynamo, which takes as long as
importing torch. Everything else is left to PyTorch, whose results `memsize.torch_internals.meta_memo` remembers.

A rule gives shape, dtype and strides as the CUDA kernel does, in a few microseconds. It returns NotImplemented where it
isn't certain: for unusual arguments, and for wrong ones, so that PyTorch's kernel raises its own error.

Families for which CUDA decides more than shapes (attention, recurrent layers) are in `memsize.cuda`.

`strides` is the arithmetic, `tensors` makes results, `registry` holds the table; every other module is one family of
ops.
"""

from __future__ import annotations

from functools import cache

from memsize.meta_kernels.registry import RULES, SPARSE_RULES, Rule, Rules, shape_rule

__all__ = ["Rule", "rules", "shape_rule", "sparse_rules"]


@cache
def rules() -> Rules:
    """Every shape rule, by overload. The families are imported at the first call."""
    from memsize.meta_kernels import (  # noqa: F401
        factories,
        matmul,
        norms,
        optimizers,
        pointwise,
        reductions,
        sparse,
        spatial,
    )

    return RULES


def sparse_rules() -> Rules:
    """The rules for calls with sparse tensors that the others leave to PyTorch."""
    rules()
    return SPARSE_RULES
