"""Explain why a forward failed, with advice on what to change."""

from __future__ import annotations

import re
import traceback
from contextlib import suppress
from pathlib import Path

from memsize.errors import ForwardError, first_line, message_of
from memsize.processes.user_code import is_outside
from memsize.records.trace import Failure
from memsize.tracing.ledger import Ledger
from memsize.tracing.module_calls import ModuleCallRecorder, ModuleRecord


def explain(error: Exception, calls: ModuleCallRecorder, ledger: Ledger) -> tuple[str, Failure]:
    """Return a sentence on what failed, and its record: layer, inputs, and reason, with advice for common causes."""
    running = calls.failed if calls.failed and calls.failed.error == id(error) else None
    interrupted = ledger.clock.interrupted
    phase, layer = "forward", ledger.clock.layer
    if interrupted is not None and interrupted.error in (id(error), id(error.__cause__)):
        phase, layer = interrupted.phase, interrupted.layer
    phase = "forward" if running and phase not in _WITHOUT_LAYER else phase
    module = calls.seen[running.layer if running else max(0, layer)]
    failure = Failure(
        module.path,
        module.type,
        ledger.last_op or None,
        running.inputs if running else (),
        _reason(error, module, phase, running.inputs if running else ()),
    )
    where = f"{failure.layer} ({failure.type})" if failure.layer else failure.type
    if phase == "backward":  # an op of the user's own announces nothing
        return f"the backward failed in or after that of {where}", failure
    return _WITHOUT_LAYER.get(phase, f"the {phase} failed in {where}"), failure


_WITHOUT_LAYER = {
    "setup": "the training step cannot be set up",
    "step": "the training step failed",
    "zero_grad": "the optimizer failed",
    "optimizer": "the optimizer failed",
    "clip": "clipping the gradients failed",
    "ema": "averaging the parameters failed",
    "loss": "the loss failed",
}
"""What to call a failure in each phase in which no layer runs."""


def looked_up_length(error: ForwardError) -> int | None:
    """The size of the floating input, beside its batch, that an embedding was to look up; None for another failure."""
    failure = error.trace.failure if error.trace is not None else None
    if failure is None or _LOOK_UP not in message_of(error.__cause__ or error):
        return None
    sizes = re.search(r"\[\d+,(\d+)\]", failure.inputs[0] if failure.inputs else "")
    return int(sizes[1]) if sizes else None


def _reason(error: Exception, module: ModuleRecord, phase: str, inputs: tuple[str, ...]) -> str:
    message = message_of(error)
    text = first_line(error).partition(". This could be because")[0]
    plain = isinstance(error, (RuntimeError, ValueError, IndexError))
    kind = type(error).__name__
    parts = [text if plain or text == kind else f"{kind}: {text}"]
    if phase == "forward" and module.leaf:
        with suppress(Exception):  # the user's own, and not what is to be explained
            if described := module.module.extra_repr():
                parts.append(f"{module.path or module.type} is built as {module.type}({described})")
    match = _DIMENSIONS.search(message)
    if match and int(match["actual"] or match["sizes"].count(",") + 1) == int(match["most"]) + 1:
        parts.append(_NO_BATCH)
    elif _LOOK_UP in message and (shape := re.search(r"\[([\d,]+)\]", inputs[0] if inputs else "")):
        parts.append(_token_ids(*shape[1].split(",")))
    else:
        parts += [advice for pattern, advice in _ADVICE.items() if re.search(pattern, message)][:1]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_outside(frame.filename)]
    if frames:
        parts.append(f"at {Path(frames[-1].filename).name}:{frames[-1].lineno}")
    return "\n  ".join(parts)


def _token_ids(batch: str, *sizes: str) -> str:
    """The option for the input of an embedding that was floating, of the shape `batch`, `sizes`."""
    if len(sizes) == 2:  # the first is most often a batch, for which the input has a dimension already
        batch, sizes = sizes[0], sizes[1:]
    size = f"{','.join(sizes)}:int64"
    return f"an embedding looks up integers: --input {size} --batch-size {batch}"


_DIMENSIONS = re.compile(
    r"(?P<most>\d)D (\(batched\) )?input( to \w+, but got input of size: \[(?P<sizes>[^]]*)\]| \(got (?P<actual>\d)D)"
)
"""What a convolution and a batch norm say of an input with another number of dimensions."""
_LOOK_UP = "Expected tensor for argument #1 'indices'"
_NO_BATCH = "a size is given without the batch, which --batch-size sets (in Python: batch_size=8)"

_ADVICE: dict[str, str] = {
    "Expected more than 1 value per channel": (
        "a batch norm in training mode needs more than one value per channel: use --batch-size 2, or --mode eval "
        '(in Python: batch_size=2, or mode="eval")'
    ),
    "same dtype": "two dtypes meet here: a tensor that .half() or .to() does not reach, or an input of another dtype",
    "missing.* required positional argument": (
        "the forward takes more inputs: name each with --input name=SHAPE:DTYPE (in Python: give several sizes, or "
        "args and kwargs)"
    ),
    "object was expected, got builtin_function_or_method": (
        "PyTorch compiles rules at the first use of forward-mode gradients (jvp, hessian): "
        "import torch._decomp.decompositions_for_jvp at the top of the file"
    ),
    "expected device cpu but got meta": (
        "a tensor that the forward makes on the CPU takes part: make it where the input is (device=x.device)"
    ),
    # what PyTorch and `os.environ` say of a process that no launcher has started
    r"environment variable \w+ expected, but not set|process group has not been initialized|"
    r"^'(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)'$": (
        "it runs as one process of many: memsize.trace(..., step=..., world=memsize.World(8, rank=0)) makes it the "
        "first of 8"
    ),
    "support sparse gradients": (
        "sgd takes them, and in Python optimizer=lambda parameters: torch.optim.SparseAdam(parameters)"
    ),
    # what PyTorch says of an op without a kernel for sparse tensors: where it was tried here
    r"with arguments from the 'Sparse(CPU|Meta)' backend": (
        "PyTorch has no such kernel for sparse tensors, on a GPU neither: leave sparse gradients out of it"
    ),
    "is only available for these backends": (
        "say what the op returns with memsize.shape_rule, or compute it with memsize report --execute "
        "(in Python: execute=True)"
    ),
    "depends on the data|data-dependent": (
        "memsize runs the model without data and cannot know which way it goes: "
        "memsize report --execute computes it on the CPU (in Python: execute=True)"
    ),
}
"""Patterns in messages of common failures, and what to do about each; the first match counts."""
