"""The part of a program that needs a real GPU, identified from the error that ended it.

Kernels that PyTorch does not know run where there are values. Packages of such kernels often cannot even be imported
without CUDA, or are not installed on a machine without a GPU.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

import torch

from memsize.errors import message_of
from memsize.processes.user_code import is_library, is_outside, line_of
from memsize.records.program import NeedsGpu

_SDPA: Final = (
    "take torch.nn.functional.scaled_dot_product_attention, PyTorch's own in linear memory, which is "
    'attn_implementation="sdpa" in transformers'
)
_MAMBA: Final = "leave it out: transformers' Mamba then runs in PyTorch's own ops (use_mamba_kernels=False)"
_INSTEAD: Final = {
    "apex": "take torch.optim.AdamW for FusedAdam, torch.nn.LayerNorm for FusedLayerNorm, torch.autocast for amp",
    "bitsandbytes": 'set optim="adamw_torch", and load the model without a quantization_config',
    "causal_conv1d": _MAMBA,
    "deepspeed": 'set "torch_adam": true in the optimizer\'s params of its config: its ZeRO runs without a GPU then',
    "flash_attn": _SDPA,
    "flash_attn_interface": _SDPA,
    "fla": "take the model's implementation without it, or register fakes of its kernels",
    "liger_kernel": "set use_liger_kernel=False",
    "mamba_ssm": _MAMBA,
    "transformer_engine": "take torch.nn.Linear and torch.nn.LayerNorm, in bfloat16 instead of float8",
    "triton": "it comes with PyTorch's CUDA builds, and its kernels want a torch.library.custom_op around them",
    "unsloth": "load the model with transformers and peft themselves",
    "vllm": "memsize serve sizes its weights, KV cache and CUDA graphs without one",
    "xformers": "take torch.nn.functional.scaled_dot_product_attention, as diffusers and transformers do without it",
}
"""Packages of CUDA kernels, and what does the same, with about the same memory, in ops of PyTorch."""
_TRIED: Final = frozenset(("bitsandbytes", "fla", "liger_kernel"))
"""Those of them that train without a GPU once they are installed: where one is missing, that alone is the reason."""
_RAISED: Final = (ImportError, RuntimeError, OSError, AssertionError)
"""What such packages raise without a GPU; other errors are the program's own."""
_WITHOUT_RULE: Final = re.compile(
    r"Could not run '(\w+::\w+)[\w.]*' with arguments from the '(?:Meta|CPU)' backend"
    r"|no fake impl registered for <CustomOpDef\((\w+::\w+)\)>"
    r"|(\w+::\w+): attempted to run this operator with Meta tensors"
    r"|(\w+\.\w+)\.\w+ has no meta kernel"
)
_NATIVE: Final = re.compile(r"(must be|is not|[Ee]xpected)( to be)?( an?)? CUDA tensor|CUDA_HOME environment")
"""What extensions in C++ say of a tensor that is not on a GPU, and of a machine without a compiler for one."""


def needs_gpu(error: BaseException | None) -> NeedsGpu | None:
    """The part of the program that needs a real GPU, as `error` shows; None if the error has another cause."""
    needed = None
    while error is not None and needed is None:
        if isinstance(error, _RAISED) and not isinstance(error, torch.OutOfMemoryError):
            needed = _needed(error)
        error = error.__cause__
    return needed


def _needed(error: BaseException) -> NeedsGpu | None:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    roots = list(map(_root, frames))
    line, text = failing_line(error), message_of(error)
    match = _WITHOUT_RULE.search(text)
    op = next(filter(None, match.groups())).replace(".", "::") if match else None
    named = [op.partition("::")[0]] if op else []
    if isinstance(error, FileNotFoundError):
        named.append(str(error.filename))
    if isinstance(error, ImportError):
        named += [(error.name or "").partition(".")[0], *re.findall(r"\w+", text.replace("-", "_"))]
    named += [root for root in reversed(roots) if root not in ("torch", "memsize", "triton")][:1]
    tried = _TRIED if isinstance(error, ImportError) else frozenset()
    package = next((name for name in named if name in _INSTEAD and name not in tried), None)
    if package is not None and not (package == "triton" and "triton" in roots):
        return NeedsGpu("package", name=package, line=line, instead=_INSTEAD[package])
    if op is not None:
        return NeedsGpu("op", op, line)
    if "triton" in roots:
        launched: Iterator[Any] = (frame.f_locals.get("self") for frame in frames if _root(frame) == "triton")
        names = (getattr(getattr(kernel, "fn", None), "__name__", None) for kernel in launched)
        return NeedsGpu("triton", next(filter(None, names), None), line)
    return NeedsGpu("extension", None, line) if _NATIVE.search(text) else None


def _root(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def failing_line(error: BaseException) -> str | None:
    """Return the innermost line of the program's own that led to `error`, or else of a library."""
    calls = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    outside = [call for call in calls if is_outside(call[0])]
    own = [call for call in outside if not is_library(call[0])]
    return line_of(*(own or outside)[-1]) if outside else None
