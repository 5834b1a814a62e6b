"""The stage of a run at which a stack allocates, and the line of the program that leads there.

A stack shows where a block was allocated, not its purpose: roles follow from the stack together with the lifetime of
the block (`memsize.analysis.explain.history`). Every rule is a name in PyTorch or in a library that trains with it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from memsize.analysis.explain.snapshot_file import Frame, Stack

Stage = Literal[
    "model", "data", "forward", "recomputation", "backward", "optimizer", "buckets", "workspace", "other", "unrecorded"
]
"""Where a run stands: ``other`` is a place that no rule knows, ``unrecorded`` a stack that was not recorded."""

_RULES: Final[tuple[tuple[Stage, str], ...]] = (
    ("workspace", r"at::cuda::(getNewWorkspace|getCUDABlasLtWorkspace)|\brun_conv_plan\b"),
    ("buckets", r"c10d::Reducer::|torch/nn/parallel/distributed\.py:(_ddp_init_helper|__init__)"),
    ("backward", r"torch::autograd::(Engine|generated|AccumulateGrad|AccumulateGradFunctor|PyNode)::"),
    ("backward", r"torch::autograd::accumulateGrad|torch/autograd/graph\.py:_engine_run_backward"),
    ("optimizer", r"torch/optim/\w+\.py:|(apex/optimizers|apex/contrib/optimizers|bitsandbytes/optim)/"),
    ("optimizer", r"deepspeed/(ops/\w+|runtime/zero|runtime/fp16)/\w*(optim|adam|stage|zero)\w*\.py:"),
    ("model", r"torch/nn/modules/module\.py:(_apply|load_state_dict|_load_from_state_dict)$"),
    ("model", r"torch/nn/modules/\w+\.py:(__init__|reset_parameters)$|torch/nn/(init|parameter)\.py:"),
    ("model", r"transformers/(modeling_utils|core_model_loading)\.py:|accelerate/utils/modeling\.py:"),
    ("model", r"torch/serialization\.py:|safetensors/\w+\.py:"),
    ("data", r"torch/utils/data/|accelerate/utils/operations\.py:|transformers/trainer\.py:_prepare_inputs?$"),
    ("data", r"lightning/\w+/utilities/apply_func\.py:|:(move_data_to_device|transfer_batch_to_device)$"),
    ("forward", r"torch/nn/modules/module\.py:(_call_impl|_wrapped_call_impl|_slow_forward|__call__)$"),
    ("forward", r"torch/nn/functional\.py:"),
)
"""A stage, and what a frame of it looks like as ``file:name``. The innermost frame that any rule knows decides."""

_STAGES: Final = re.compile("|".join(f"(?P<{stage}_{n}>{text})" for n, (stage, text) in enumerate(_RULES)))
_RECOMPUTED: Final = re.compile(r"torch/utils/checkpoint\.py:(backward|unpack_hook|recompute_fn|recompute)$")
_NODE: Final = re.compile(r"torch::autograd::generated::(\w+)::apply")
_PYTORCH: Final = re.compile(r"(^|/)(site-packages|dist-packages)/torch/|torchinductor_\w+/|^<")
_CELLS: Final = ("<ipython", "In [")
"""How a cell of a notebook begins that is named as a file: by IPython, by memsize."""
_LIBRARY: Final = re.compile(r"(^|/)(site-packages|dist-packages|lib/python3\.\d+|torchinductor_\w+)/|^<|^/usr/lib/")


class StackSummary(NamedTuple):
    """The stage of a stack, the line above PyTorch that allocates (``"modeling_llama.py:216"``), the function of that
    line, and the program's own line that led to it, if that is another one.
    """

    stage: Stage
    line: str | None
    function: str
    called_from: str | None = None


def summarize(stack: Stack) -> StackSummary:
    """Summarize `stack`. In backward there may be no Python call: the function is then autograd's node."""
    if not stack:
        return StackSummary("unrecorded", None, "")
    calls = python_calls(stack)
    if not calls:
        nodes = (_NODE.search(frame.name) for frame in stack)
        return StackSummary(_stage(stack), None, next((node[1] for node in nodes if node), ""))
    above = next((call for call in calls if not _call(call).pytorch), calls[0])
    own = next((call for call in calls if not _call(call).library), above)
    return StackSummary(
        _stage(stack), line=line_of(above), function=above.name, called_from=line_of(own) if own != above else None
    )


def python_calls(stack: Stack) -> tuple[Frame, ...]:
    """The calls of Python in a stack, innermost first."""
    return tuple(frame for frame in stack if _call(frame).python)


def line_of(frame: Frame) -> str:
    """A call as ``"train.py:41"``."""
    return f"{_path(frame).rpartition('/')[2]}:{frame.line}"


class _Call(NamedTuple):
    """The stage of the rule that matches a frame (None: no rule does), whether the frame recomputes a forward, and
    whether it is a call of Python, inside PyTorch, inside any library.
    """

    stage: Stage | None
    recomputes: bool
    python: bool
    pytorch: bool
    library: bool


@lru_cache(maxsize=1 << 14)
def _call(frame: Frame) -> _Call:
    """Classify `frame`. Cached: a snapshot has some hundred different frames, in ten thousands of stacks."""
    path = _path(frame)
    call = f"{path}:{frame.name}"
    match = _STAGES.search(call)
    stage = None if match is None or match.lastgroup is None else _RULES[int(match.lastgroup.rpartition("_")[2])][0]
    python = frame.filename.endswith(".py") or frame.filename.startswith(_CELLS)
    # A forward inside of a backward is that of activation checkpointing.
    recomputes = stage == "backward" or bool(_RECOMPUTED.search(call))
    return _Call(stage, recomputes, python, bool(_PYTORCH.search(path)), bool(_LIBRARY.search(path)))


def _path(frame: Frame) -> str:
    return frame.filename.replace("\\", "/")


def _stage(stack: Stack) -> Stage:
    stage: Stage = "other"
    for call in map(_call, stack):
        if stage == "forward":
            if call.recomputes:
                return "recomputation"
        elif call.stage is not None:
            stage = call.stage
            if stage != "forward":
                return stage
    return stage
