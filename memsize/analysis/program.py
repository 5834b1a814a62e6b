"""A program on a virtual GPU, from its command line to a `ProgramRun`."""

from __future__ import annotations

import json
import re
import runpy
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal

import torch

from memsize.analysis.findings.after_steps import AFTER_RULES
from memsize.analysis.findings.program import RULES
from memsize.analysis.model_setups import plans_of, workspaces
from memsize.analysis.timeline import snapshot
from memsize.device.gpu_estimate import device_since, estimate_gpu
from memsize.errors import InputError, causes, message_of
from memsize.loading.library_imports import torchvision_importable
from memsize.processes.user_code import is_library, is_outside, line_of
from memsize.records.aggregates import alive, live_bytes, split_phase, summit
from memsize.records.codec import plain
from memsize.records.finding import Finding
from memsize.records.program import (
    ChildRun,
    Growth,
    Holder,
    KeptGradients,
    LiveTensor,
    LoadedCheckpoint,
    NeedsGpu,
    ProgramRun,
    WentOn,
)
from memsize.records.trace import Trace
from memsize.torch_internals.isolation import default_device_kept, isolated
from memsize.virtual.gpu_tensors import CpuRestore
from memsize.virtual.guards.child_processes import ChildProcesses, Settings
from memsize.virtual.program_code import Held
from memsize.virtual.saved_weights import Files
from memsize.workloads.program import Program, StopProgram
from memsize.workloads.program_steps import Zeroed

_LARGEST: Final = 15
"""How many of the storages alive at the peak are listed."""
_OWN: Final = ("parameter", "buffer", "optimizer state", "gradient", "workspace", "communication")
"""Roles of what may stay from step to step."""
_ENOUGH: Final = 3
"""How many steps it takes to see that memory grows: the second may keep what the first had nothing of."""


def run_program(
    path: str,
    arguments: Sequence[str],
    settings: Settings,
    *,
    module: bool = False,
    files: Files | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[ProgramRun, BaseException | None]:
    """Run a script (or a module) with its own arguments and return its run, with the error that ended it, if any.

    `files` are those of a run before, which it may write again. `progress` is called with what the program is doing.
    """
    program = program_on(path, settings, files)
    if not module and not Path(path).is_file():
        raise InputError(f"no such script: {path}")
    name = Path(path).name
    program.steps.progress = lambda stage: progress(f"{name}: {stage}")
    progress(f"{name}: starting")
    with isolated(), torchvision_importable():
        error = program.run(path, arguments, module)
    if module and isinstance(error, ImportError):
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        if innermost.f_code.co_filename == runpy.run_module.__code__.co_filename:  # and not code of its package
            raise InputError(f"cannot run the module {path}: {error}") from error
    progress(f"{name}: adding up what it held")
    return program_run(program, " ".join((path, *arguments)), error), error


def program_on(
    name: str, settings: Settings, files: Files | None = None, processes: ChildProcesses | None = None
) -> Program:
    """Return a program on such a machine, which has not begun, with the `files` and `processes` that it has already."""
    card, stack, files = settings.card, settings.stack, files or Files(settings.allowed)
    own = workspaces(card, plans_of(card, stack), stack)
    return Program(name, settings, own, files, processes or ChildProcesses(files, settings), snapshot)


class VirtualGpu:
    """A region with a virtual GPU, for as long as it is open, and what it showed once it is over."""

    def __init__(self) -> None:
        self._run: ProgramRun | None = None

    @property
    def run(self) -> ProgramRun:
        """The run of the program in the region; raises `InputError` while it is open."""
        if self._run is None:
            raise InputError("the virtual GPU is still in use: ask after the with block")
        return self._run

    @property
    def trace(self) -> Trace:
        """Every storage of the region."""
        return self.run.trace


@contextmanager
def virtual_gpu(settings: Settings, name: str = "this program") -> Iterator[VirtualGpu]:
    """Let the block have a virtual GPU.

    Modules that the block moves there are back on the CPU, with their values, when it is over, and so is what it makes
    the default device.
    """
    program = program_on(name, settings)
    region = VirtualGpu()
    error: BaseException | None = None
    restore = CpuRestore()
    try:
        with (
            default_device_kept(),
            torchvision_importable(),
            restore.restored(),
            program.open(restore.replacements()),
        ):
            yield region
    except StopProgram:
        pass
    except BaseException as failed:
        error = failed
        raise
    finally:
        region._run = program_run(program, program.name, error)


def program_run(program: Program, command: str, error: BaseException | None) -> ProgramRun:
    trace, memory = program.trace(error), program.memory
    rest = memory.total - memory.outside
    run = ProgramRun(
        program=command,
        trace=trace,
        card=program.card,
        capacity=rest if memory.allowed is None else min(rest, memory.allowed),
        peak=estimate_gpu(trace, program.card, config=memory.config),
        steps=program.steps.done,
        stopped=program.stopped,
        tensors=tuple(_largest(trace)),
        refused=program.refused,
        went_on=_went_on(program, trace, error),
        assumed=program.assumed,
        growth=_growth(program, trace),
        kept_gradients=_kept_gradients(trace, program.steps.zeroed),
        loaded_checkpoint=_loaded_checkpoint(program, trace),
        waits=program.waits.line,
        unused_checkpointing=program.unused_checkpointing,
        shares_first_gpu=program.ledger.devices.shares_first,
        unwritten=(*program.files.remarks, *program.processes.failures),
        children=tuple(ChildRun(**result) for result in program.processes.results),
        after=program.after.record(trace, failing_line),
        failure=None if trace.failure is None else trace.failure.reason,
        failed_at=None if error is None else failing_line(error),
        needs_gpu=needs_gpu(error),
        allocator=json.dumps(plain(memory.config)),
    )
    return replace(run, findings=findings_of(run))


def findings_of(run: ProgramRun) -> tuple[Finding, ...]:
    return (RULES + AFTER_RULES).findings(run)


def _went_on(program: Program, trace: Trace, error: BaseException | None) -> WentOn | None:
    """How the program goes on after the last refused request; None where that ended it."""
    refusal = program.last_refused
    if refusal is None or any(isinstance(cause, torch.OutOfMemoryError) for cause in causes(error)):
        return None
    if not any(event.delta > 0 for event in trace.events[refusal:]):
        return WentOn(0, None)
    device = device_since(trace, where=program.card, config=program.memory.config, event=refusal)
    return WentOn(sum(end > refusal for end in program.steps.ends), device)


def _largest(trace: Trace) -> Iterator[LiveTensor]:
    peak = summit(trace)
    live = alive(trace, peak) if peak >= 0 else {}
    born = {event.storage: event.phase for event in trace.events if event.delta > 0}
    for index in sorted(live, key=lambda index: (-live[index], index))[:_LARGEST]:
        storage = trace.storages[index]
        yield LiveTensor(
            bytes=live[index],
            role=storage.role,
            dtype=storage.dtype,
            shape=storage.shape,
            layer=trace.layers[storage.layer].path if storage.layer >= 0 else None,
            op=storage.op,
            phase=trace.phases[born[index]],
            line=trace.line_of(index),
        )


def _growth(program: Program, trace: Trace) -> Growth | None:
    at_ends = [_by_line(trace, end - 1) for end in program.steps.ends]
    if len(at_ends) < _ENOUGH:
        return None
    last, before = at_ends[-1], at_ends[-2]
    grown = [line for line in last if all(len(a[line]) < len(b[line]) for a, b in pairwise(at_ends))]
    sizes = {line: sum(trace.storages[index].bytes for index in last[line] - before[line]) for line in grown}
    if not sum(sizes.values()):
        return None
    storages = frozenset(index for line in grown for index in last[line] - at_ends[0][line])
    return Growth(sum(sizes.values()), max(sizes, key=sizes.__getitem__) or None, _holder(program, trace, storages))


def _holder(program: Program, trace: Trace, storages: frozenset[int]) -> Holder | None:
    """The variable that holds most bytes of `storages`, and the least else; None where none holds any."""

    def rank(candidate: Held) -> tuple[int, int]:
        return sum(trace.storages[index].bytes for index in candidate.storages & storages), -len(candidate.storages)

    most = max(program.gpu_variables, key=rank, default=None)
    return most.holder if most is not None and most.storages & storages else None


def _loaded_checkpoint(program: Program, trace: Trace) -> LoadedCheckpoint | None:
    """Measure what is left, at the peak of the steps, of loaded checkpoints that have become no part of the model."""
    end = program.steps.ends[-1] if program.steps.ends else 0
    if not program.loaded or not end:
        return None
    levels = live_bytes(trace.events[:end])
    live = alive(trace, levels.index(max(levels)))
    copies = {index: live[index] for index in program.loaded & live.keys() if trace.storages[index].role == "temporary"}
    if not copies:
        return None
    holder = _holder(program, trace, frozenset(copies))
    return LoadedCheckpoint(sum(copies.values()), holder and holder.name)


def _by_line(trace: Trace, last: int) -> defaultdict[str, set[int]]:
    """The storages alive after event `last` that have no reason to stay, by the line that made them.

    What an optimizer works with is let go of when its step is over, of which the last step's events may end short.
    """
    storages = defaultdict[str, set[int]](set)
    phases = {event.storage: trace.phases[event.phase] for event in trace.events[: last + 1] if event.delta > 0}
    for index in alive(trace, last):
        if trace.storages[index].role not in _OWN and split_phase(phases[index])[0] != "optimizer":
            storages[trace.line_of(index) or ""].add(index)
    return storages


def _kept_gradients(trace: Trace, zeroed: Sequence[Zeroed]) -> KeptGradients | None:
    """The gradients that are alive when the first forward after the first step begins, and why: those of the line that
    would free most.

    It begins with the first storage that it makes: FSDP1 lets go of gradients that were set to None at its beginning.
    """
    names = [split_phase(name) for name in trace.phases]
    phases = [*(names[event.phase] for event in trace.events)]
    first_storages = (
        index for index, event in enumerate(trace.events) if event.delta > 0 and phases[index] == ("forward", 2)
    )
    start = next(first_storages, None)
    if start is None:
        return None
    causes = defaultdict[tuple[Literal["kept", "late", "none"], str], set[int]](set)
    live = alive(trace, start)
    at = zip(trace.events, phases, strict=True)
    allocated = (event.storage for event, (phase, _) in at if event.delta > 0 and phase == "backward")
    left = {index for index in allocated if trace.storages[index].role == "gradient"} & live.keys()
    causes["none", ""] = left.difference(*(call.gradients for call in zeroed if call.keeps or call.event > start))
    untouched = _untouched(trace, start, phases)
    for call in zeroed:
        if call.keeps or call.event > start:
            freed = left & (call.gradients if call.keeps else call.freed)
            causes["kept" if call.keeps else "late", call.line].update(
                index for index in freed if call.event in untouched(trace.storages[index].layer)
            )
    sizes = {cause: sum(live[index] for index in storages) for cause, storages in causes.items()}
    reason, line = max(sizes, key=sizes.__getitem__)
    return KeptGradients(sizes[reason, line], reason, line or None) if sizes[reason, line] else None


def _untouched(trace: Trace, start: int, phases: Sequence[tuple[str, int]]) -> Callable[[int], range]:
    """For a layer, the events around `start` between which no backward makes anything for it, to add to its gradients.

    A zero_grad beyond them is wanted where it is: a GAN's discriminator gets gradients from its generator's loss too.
    """
    before, after = dict[int, int](), dict[int, int]()
    for index, event in enumerate(trace.events):
        if event.delta > 0 and phases[index][0] == "backward":
            layer = trace.storages[event.storage].layer
            if index < start:
                before[layer] = index
            else:
                after.setdefault(layer, index)
    return lambda layer: range(before.get(layer, -1) + 1, after.get(layer, len(phases)) + 1)


# -- the part of a program that needs a real GPU -----------------------------------------------------------------------

_SDPA: Final = (
    "torch.nn.functional.scaled_dot_product_attention, which takes linear memory too "
    '(attn_implementation="sdpa" in transformers)'
)
_MAMBA: Final = "install it and Triton: its CUDA kernels need not be built, they are simulated"
_INSTEAD: Final = {
    "apex": "use torch.optim.AdamW for FusedAdam, torch.nn.LayerNorm for FusedLayerNorm, torch.autocast for amp",
    "bitsandbytes": 'set optim="adamw_torch", and load the model without a quantization_config',
    "causal_conv1d": _MAMBA,
    "deepspeed": "use its Adam, Adagrad or Lion, whose kernels are simulated",
    "flash_attn": f"use its attention, apply_rotary_emb, RMSNorm or CrossEntropyLoss, which are simulated, or {_SDPA}",
    "flash_attn_interface": f"use {_SDPA}",
    "fla": "install Triton beside it: its own code runs, and its kernels are simulated",
    "liger_kernel": "set use_liger_kernel=False",
    "mamba_ssm": _MAMBA,
    "transformer_engine": "use its Linear, LayerNormLinear, LayerNormMLP, attention or TransformerLayer, simulated",
    "unsloth": "load the model with transformers and peft themselves",
    "vllm": "memsize serve sizes its weights, KV cache and CUDA graphs without one",
    "xformers": "use torch.nn.functional.scaled_dot_product_attention, as diffusers and transformers do without it",
}
"""Packages of CUDA kernels, and what does the same, with about the same memory, in ops of PyTorch."""
_TRIED: Final = frozenset(("bitsandbytes", "deepspeed", "fla", "liger_kernel"))
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
    if package is not None:
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
