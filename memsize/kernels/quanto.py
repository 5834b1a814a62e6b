"""Ops of optimum-quanto that are extensions in CUDA, which quanto compiles where they are first called.

Source: optimum-quanto 0.2.7, `library/extensions/cuda` (`unpack.cu`, `marlin`, `awq/v2`). The library's other ops are
written in PyTorch's own. The library is not imported here: rules are found by name.
"""

from __future__ import annotations

import torch

from memsize.kernels.registry import shape_rules
from memsize.kernels.tensors import empty

_TILE = 16
"""Rows and columns of the tiles that Marlin's kernels read."""


shape_rules(
    "quanto",
    {
        "unpack": lambda packed, bits: empty((packed.shape[0] * (8 // bits), *packed.shape[1:]), torch.uint8),
        "pack_fp8_marlin": lambda b_q_weight, perm, size_k, size_n, num_bits: empty(
            (size_k // _TILE, size_n * _TILE // (32 // num_bits)), torch.int32
        ),
        "gemm_f16f8_marlin": lambda a, b_q_weight, b_scales, workspace, num_bits, size_m, size_n, size_k: empty(
            (size_m, size_n), a.dtype
        ),
        "gemm_f16i4_awq": lambda input, other, scales, shift, rows, out_cols, in_cols, bits, group_size: empty(
            (*input.shape[:-1], out_cols), input.dtype
        ),
        "gemm_f16i4_marlin": lambda input, other, scales, zeropoint, workspace: empty(
            (*input.shape[:-1], scales.shape[1]), input.dtype
        ),
    },
)
