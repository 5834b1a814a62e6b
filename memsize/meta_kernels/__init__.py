"""Shape rules: what an op returns on CUDA, answered directly for `meta` tensors.

PyTorch's own `meta` kernels are mostly written in Python. They take 50 µs to 3 ms per call, and the first use of one
imports sympy or torch._dynamo, which takes as long as importing torch. A rule answers in a few microseconds, or returns
NotImplemented where it isn't certain: for unusual arguments, and for wrong ones, so that PyTorch's kernel raises its
own words. Rules give shape, dtype and strides as the CUDA kernels do; where CUDA differs from the `meta` kernel, the
rule says so and names its source.

`strides` is the arithmetic, `tensors` makes results, `registry` holds the table; every other file is one family of ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from torch._ops import OpOverload

from memsize.meta_kernels.registry import TABLE, Rule, Rules, shape_rule

__all__ = ["Rule", "rules", "shape_rule"]


@cache
def rules() -> Mapping[OpOverload, Rule]:
    """Every shape rule, by overload. The families are imported at the first call."""
    from memsize.meta_kernels import (  # noqa: F401
        activations,
        attention,
        convolution,
        factories,
        indexing,
        joining,
        losses,
        matmul,
        norms,
        optimizers,
        pointwise,
        pooling,
        recurrent,
        reductions,
        resampling,
    )

    return Rules(TABLE)
