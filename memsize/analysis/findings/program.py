"""Rules about a program on a virtual GPU: whether it fits, where it runs out of memory, what grows."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Final

from memsize.analysis.findings.precision import no_fused_kernel
from memsize.analysis.findings.unfinished_runs import lagging
from memsize.device.allocator_config import config_of
from memsize.known_values.data_dependent import UNCOMPILED
from memsize.ranks.group import environment
from memsize.ranks.strategies import undivided
from memsize.records import aggregates
from memsize.records.finding import Finding, Moment, Rules, moment_in_words, sizes
from memsize.records.program import ProgramRun, Refused
from memsize.records.roles import noun
from memsize.records.world import ALONE
from memsize.units import Bytes

RULES: Final = Rules[ProgramRun]()
_LARGE_ON_HOST: Final = 1 << 30
"""From this many bytes of host memory on, a verdict names them."""
CAUSES: Final = (
    "run-needs-gpu",
    "run-missing-package",
    "run-missing-checkpoint",
    "run-missing-config",
    "run-needs-launcher",
    "run-needs-gpus",
    "run-divides-heads",
    "run-other-gpu",
)
"""Findings that say why a program failed, and what to change."""


@RULES.rule("run-failed")
def _failed(run: ProgramRun) -> Iterator[Finding]:
    if run.failure is None or run.ran_out:
        return
    where = " at {line}" if run.failed_at else ""
    interrupted = run.failure.startswith("KeyboardInterrupt")
    template = f"The script was interrupted{where}." if interrupted else f"The script failed{where}: {{failure}}."
    values: dict[str, object] = {"line": run.failed_at, "failure": run.failure.rstrip(".: ")}
    if run.trace.events:
        template += " Until then it took {low} to {high} of {card}'s {total} at the peak, in {where}."
        values |= {"card": run.card.name, **peak_in_words(run)}
    elif not run.refused and not run.gpu_children:
        template += " Nothing was on the GPU yet."
    high = run.peak.device.high if run.trace.events else None
    yield Finding("run-failed", template, values, bytes=high, layers=_layers(run.peak.peak_layer))


@RULES.rule("run-out-of-memory")
def _refused(run: ProgramRun) -> Iterator[Finding]:
    if not run.refused:
        return
    first, allowed = run.refused[0], _allowed(run)
    values: dict[str, object] = {"card": run.card.name, **request_in_words(run, first), "count": len(run.refused)}
    values |= {"total": Bytes(run.card.bytes)}
    limit = " (the allocator may take {allowed} of it)" if allowed else ""
    needs = "{op} needs {bytes}, {free} is left"
    template = brief = f"Out of memory on {{card}}{limit}{eagerly(run)} at {{line}}, in {{where}}: {needs}."
    if run.went_on is None:
        advice, more = _advice(run)
        template, brief, values = template + advice, brief + advice, values | more
    if len(run.refused) > 1:
        template += " PyTorch raises OutOfMemoryError {count} times."
    if (after := run.went_on) is not None:
        then = "it puts nothing more on the GPU"
        if after.device is not None:
            steps = "one step, " if after.steps == 1 else "{steps} steps, " if after.steps else ""
            steps = steps or ("no step, " if run.steps else "")
            then = f"the rest fits ({steps}{{low}} to {{high}} of {{total}} at the peak)"
            values |= {"steps": after.steps} | sizes(low=after.device.low, high=after.device.high)
        times = "once, at {line}" if len(run.refused) == 1 else "{count} times, first at {line}"
        brief = f"The script runs out of memory on {{card}}{limit} {times}, and goes on: {then}."
        template = f"{brief} In {{where}}, {needs}."
    values, layers = values | allowed, _layers(first.layer)
    yield Finding("run-out-of-memory", template, values, bytes=first.bytes, layers=layers, brief=brief)


def _advice(run: ProgramRun) -> tuple[str, dict[str, object]]:
    """Sentences on the need of the whole script and on the batch that fits, with their values."""
    batch, whole = BATCH.search(run.program), run.whole
    fitting = whole.batch if whole else None
    text, values = "", dict[str, object]()
    if whole is not None:
        what = "A whole step" if whole.steps else "The whole script"
        text = f" {what} needs {{needs}}, {{short}} more than PyTorch can use."
        values = dict(sizes(needs=whole.needs, short=whole.needs - run.capacity))
    if fitting is not None:
        text += " The largest {argument} that fits is {size}." if fitting.largest else " {argument} {size} fits."
        values |= {"argument": fitting.argument, "size": fitting.size}
    elif batch is not None:
        text += " memsize fit-script --vary-argument {argument} finds the largest that fits."
        values["argument"] = batch[1]
    return text, values


_NO_CHECKPOINT: Final = re.compile(
    r"FileNotFoundError: \[Errno 2\] No such file or directory: '([^']+\.(?:pt|pth|ckpt|bin|tar|safetensors))'"
)
_NO_CONFIG: Final = re.compile(
    r"OSError: (We couldn't connect to '[^']+' to load|Cannot load model (?P<name>[^\s:]+): the model is not)"
)
"""The error of transformers and of diffusers where neither the Hub nor its cache has a model's config."""
BATCH: Final = re.compile(r" --?([\w.-]*batch[\w-]*|bs|b)[ =]\d")
"""An argument of a program that sets its batch."""
_SMALL_PART: Final = 0.02
"""The part of the peak below which a waste is not worth a sentence."""
_PURPOSES: Final = {
    "_log_softmax": "the log-probabilities of the loss",
    "_log_softmax_backward_data": "the gradient of the logits",
    "nll_loss_backward": "the gradient of the log-probabilities",
    "_softmax": "the result of a softmax",
    "_softmax_backward_data": "the gradient of a softmax",
}
"""What an op allocates that its name does not tell."""


def request_in_words(run: ProgramRun, request: Refused) -> dict[str, object]:
    """The values of a sentence on a request that the card refused."""
    line, where = request.line or "a line of PyTorch's own", moment_in_words(request.phase, request.layer)
    purpose = _PURPOSES.get(request.op, "")
    if request.op == "_safe_softmax":
        purpose = f"attention scores, since {no_fused_kernel(run.card.capability, _dtypes_of(run, request.layer))}"
    op = f"{request.op} ({purpose})" if purpose else request.op
    return {"line": line, "where": where, "op": op} | sizes(bytes=request.bytes, free=request.free)


def _dtypes_of(run: ProgramRun, path: str | None) -> set[str]:
    layers = {number for number, layer in enumerate(run.trace.layers) if layer.path == path}
    return {storage.dtype for storage in run.trace.storages if storage.layer in layers}


def peak_in_words(run: ProgramRun) -> dict[str, object]:
    peak = run.peak
    where = {"where": moment_in_words(peak.peak_phase, peak.peak_layer, peak.peak_step)}
    return sizes(low=peak.device.low, high=peak.device.high, total=run.card.bytes) | where


def eagerly(run: ProgramRun) -> str:
    """The words to add for a program that is too large in eager mode, but would be compiled."""
    return " without torch.compile" if UNCOMPILED in run.trace.notes else ""


@RULES.rule("run-needs-gpu")
def _needs(run: ProgramRun) -> Iterator[Finding]:
    needed = run.needs_gpu
    if needed is None:
        return
    fake = "wrap it in torch.library.custom_op and say what it returns with register_fake, or switch it off"
    templates = {
        "op": '{name} at {line} has no shape rule: write one with memsize.shape_rule("{name}"), or register a fake of '
        "it with torch.library.register_fake.",
        "triton": ("The Triton kernel {name}" if needed.name else "A Triton kernel")
        + f" that {{line}} launches needs a real GPU: {fake}.",
        "extension": f"The CUDA extension that {{line}} calls needs a real GPU: {fake}.",
        "package": "{line} needs {name}, which is made for a real GPU: {instead}.",
    }
    values = {"name": needed.name, "line": needed.line or "the script", "instead": needed.instead}
    yield Finding("run-needs-gpu", templates[needed.what], values)


@RULES.rule("run-missing-package")
def _missing(run: ProgramRun) -> Iterator[Finding]:
    match = re.fullmatch(r"ModuleNotFoundError: No module named '(\w+)'", run.failure or "")
    if match is None or run.needs_gpu is not None or match[1] in sys.stdlib_module_names:
        return
    template = "{name} is not installed in memsize's environment: install both in the same one."
    yield Finding("run-missing-package", template, {"name": match[1]})


@RULES.rule("run-missing-checkpoint")
def _missing_checkpoint(run: ProgramRun) -> Iterator[Finding]:
    match = _NO_CHECKPOINT.match(run.failure or "")
    if match is not None:
        template = (
            "{name} is not on this machine: run the script with --checkpoint stand-in, which has the model's shapes."
        )
        yield Finding("run-missing-checkpoint", template, {"name": match[1]})


@RULES.rule("run-missing-config")
def _missing_config(run: ProgramRun) -> Iterator[Finding]:
    match = _NO_CONFIG.match(run.failure or "")
    if match is not None:
        template = (
            "The Hub cannot be reached, and its cache has no config of the model. Where there is a network, "
            'hf download {name} --exclude "*.safetensors" "*.bin" fetches config and tokenizer: weights are not needed.'
        )
        yield Finding("run-missing-config", template, {"name": match["name"] or "ORG/MODEL"})


@RULES.rule("run-needs-launcher")
def _needs_launcher(run: ProgramRun) -> Iterator[Finding]:
    words = re.findall(r"[A-Z_]+", run.failure or "")
    missing = next((name for name in environment(ALONE) if name in words), None)
    if missing is not None and run.trace.world == ALONE:
        template = "The script needs {name}, which torchrun sets: --gpus 8 runs it as one of 8 processes."
        yield Finding("run-needs-launcher", template, {"name": missing})


@RULES.rule("run-needs-gpus")
def _needs_gpus(run: ProgramRun) -> Iterator[Finding]:
    """Lightning names the GPUs that it asks for; CUDA's error and DataParallel's do not."""
    failure = run.failure or ""
    if match := re.search(r"You requested gpu: \[([\d, ]+)\]", failure):
        text = "The script trains on {count} GPUs: --gpus {count} simulates them."
        yield Finding("run-needs-gpus", text, {"count": match[1].count(",") + 1})
    elif "invalid device ordinal" in failure or failure == "AssertionError: Invalid device id":
        text = (
            "The script uses a GPU that is not simulated: "
            "--gpus {count} --one-process simulates {count} of them in one process."
        )
        yield Finding("run-needs-gpus", text, {"count": 2 * run.trace.world.local_size})


@RULES.rule("run-other-gpu")
def _other_gpu(run: ProgramRun) -> Iterator[Finding]:
    match = re.match(r"InputError: cuda:(\d+) is the GPU of another process", run.failure or "")
    if match is not None:
        text = (
            "Rank {rank} puts a tensor on cuda:{gpu}, the GPU of another rank, and creates a CUDA context there: call "
            "torch.cuda.set_device(local_rank) first, and pass map_location to torch.load."
        )
        yield Finding("run-other-gpu", text, {"rank": run.trace.world.rank, "gpu": match[1]})


@RULES.rule("run-shares-gpu")
def _shares_gpu(run: ProgramRun) -> Iterator[Finding]:
    """The sum of all ranks of a machine on its first GPU, of which this rank shows its own part."""
    if not run.shares_first_gpu or not run.trace.events or run.failure is not None:
        return
    ranks = run.trace.world.local_size
    text = (
        "The script chooses no GPU, so all {ranks} ranks put their tensors on cuda:0: {ranks} × {high} = {whole} "
        "of {total}; NCCL refuses two ranks on one GPU. Call torch.cuda.set_device(local_rank) first."
    )
    values = sizes(high=run.peak.device.high, whole=ranks * run.peak.device.high, total=run.card.bytes)
    yield Finding("run-shares-gpu", text, {"ranks": ranks, **values}, bytes=ranks * run.peak.device.high)


@RULES.rule("run-divides-heads")
def _divides_heads(run: ProgramRun) -> Iterator[Finding]:
    problem = undivided(run.failure or "", run.trace, run.trace.world.size)
    if problem is not None:
        template, shape = problem
        yield Finding("run-divides-heads", template, {"shape": shape})


@RULES.rule("run-child-out-of-memory")
def _child_ran_out(run: ProgramRun) -> Iterator[Finding]:
    for child in run.children:
        if child.ran_out:
            template = "Out of memory on {card} in a process that the script started: {command}."
            yield Finding("run-child-out-of-memory", template, {"card": run.card.name, "command": child.command})


@RULES.rule("run-child-failed")
def _child_failed(run: ProgramRun) -> Iterator[Finding]:
    """The first one's failure is often the cause of the others', as in ranks that wait for it."""
    # Out of memory has a rule of its own.
    failed = [child for child in run.children if child.failure and not child.failure.startswith("OutOfMemoryError")]
    if failed:
        several = "{count} processes that the script started failed, the first"
        what = "A process that the script started failed" if len(failed) == 1 else several
        failure = (failed[0].failure or "").rstrip(".: ")
        values = {"count": len(failed), "failure": failure, "command": failed[0].command}
        yield Finding("run-child-failed", f"{what} with {{failure}}: {{command}}.", values)


@RULES.rule("run-children")
def _children(run: ProgramRun) -> Iterator[Finding]:
    if not run.gpu_children:
        return
    largest = max(run.gpu_children, key=lambda child: child.high)
    values: dict[str, object] = {"count": len(run.gpu_children), "command": largest.command, "card": run.card.name}
    values |= sizes(low=largest.low, high=largest.high, total=run.card.bytes)
    if not run.trace.events and len(run.gpu_children) == 1 and largest.failure is None and largest.rank is None:
        template = (
            "It fits on {card}: {command}, which the script started, takes {low} to {high} of {total} at its peak."
        )
        values |= {"program": largest.command.removeprefix("python ")}
        more = " memsize run {program} shows its breakdown."
        if not largest.command.startswith("python "):  # a process of multiprocessing
            more = " For its breakdown, run a script that calls the function of this process directly."
        yield Finding("run-children", template + more, values, bytes=largest.high)
        return
    what = "A process" if len(run.gpu_children) == 1 else "The largest of {count} processes"
    template = f"{what} that the script started takes {{low}} to {{high}} of {{total}} at its peak, "
    template += "not included in these figures: {command}" if run.trace.events else "{command}"
    ranks = {child.rank for child in run.gpu_children if child.rank is not None}
    if largest.rank is not None:
        template += " (rank {rank}). To see each rank, run its script: memsize run --gpus {ranks} --rank all"
    elif not run.trace.events:
        template += ". To see all of it, give that script to memsize run"
    values |= {"ranks": len(ranks), "rank": largest.rank}
    yield Finding("run-children", f"{template}.", values, bytes=largest.high)


@RULES.rule("run-nothing-on-gpu")
def _nothing(run: ProgramRun) -> Iterator[Finding]:
    if not (run.trace.events or run.refused or run.failure is not None or run.gpu_children):
        template = "Nothing was put on the GPU. Scripts often choose their device by an option, such as --device cuda "
        yield Finding("run-nothing-on-gpu", f"{template}or --accel.")


@RULES.rule("run-fits")
def _fits(run: ProgramRun) -> Iterator[Finding]:
    if run.refused or not run.trace.events or run.failure is not None:
        return
    peak, allowed = run.peak, _allowed(run)
    template = brief = "It fits on {card}: {low} to {high} of {total} at the peak, in {where}."
    template += " The allocator may take {allowed} of the GPU." if allowed else ""
    template += " Tensors hold {requested} at the peak"
    values = {"card": run.card.name, **peak_in_words(run), **sizes(requested=peak.requested), **allowed}
    largest = next((tensor for tensor in run.tensors if tensor.line and tensor.role != "workspace"), None)
    if largest is not None:
        template += "; the largest, {bytes} of {role}, is allocated at {line}"
        values |= {"bytes": Bytes(largest.bytes), "role": noun(largest.role), "line": largest.line}
    layers, moment = _layers(peak.peak_layer), Moment(run.trace.scenario, aggregates.summit(run.trace))
    text = f"{template}."
    yield Finding("run-fits", text, values, bytes=peak.device.high, layers=layers, brief=brief, moment=moment)


@RULES.rule("run-host")
def _host(run: ProgramRun) -> Iterator[Finding]:
    """The memory of the host, which a verdict names from 1 GiB on."""
    host = run.trace.host
    if max(host.needs, host.process + host.workers) < _LARGE_ON_HOST:
        return
    values = sizes(memory=host.memory, needs=host.needs, process=host.process, workers=host.workers, more=host.shared)
    text = "The script also needs {needs} of host memory, besides that of Python and PyTorch."
    if not host.process:
        yield Finding("run-host", text, values, bytes=host.memory, brief=text)
        return
    brief = "The script also needs {memory} of RAM."
    text = (
        "The script also needs {memory} of RAM: {process} for Python, its libraries and data, {workers} for workers of "
        "data loaders, and {needs} for copies from the GPU, pinned memory and prefetched batches."
    )
    if host.shared > host.memory // 10:
        brief = (
            "The script also needs {memory} of RAM, and up to {more} more as the workers of its data loaders copy the "
            "Python objects of the dataset that they read."
        )
    yield Finding("run-host", text, values, bytes=host.memory, brief=brief)


@RULES.rule("run-no-step")
def _no_step(run: ProgramRun) -> Iterator[Finding]:
    if run.trace.events and not run.steps and not run.refused and run.failure is None:
        template = "No optimizer stepped, so the script ran to its end."
        yield Finding("run-no-step", template)


@RULES.rule("run-sends-nothing")
def _sends_nothing(run: ProgramRun) -> Iterator[Finding]:
    world = run.trace.world
    if world.size == 1 or world.one_process or run.trace.collectives or run.refused or run.failure is not None:
        return
    template = (
        "The script sends nothing to the other {others}, as if it ran alone. Call "
        "torch.distributed.init_process_group, or use a library that does."
    )
    others = "process" if world.size == 2 else f"{world.size - 1} processes"
    yield Finding("run-sends-nothing", template, {"others": others})


@RULES.rule("run-waits")
def _waits(run: ProgramRun) -> Iterator[Finding]:
    if run.waits:
        template = (
            "The loop at {line} waits for a number that only a real GPU computes, so memsize ended the script there."
        )
        yield Finding("run-waits", template, {"line": run.waits})


@RULES.rule("run-grows")
def _grows(run: ProgramRun) -> Iterator[Finding]:
    growth = run.growth
    if growth is None:
        return
    values: dict[str, object] = {"bytes": Bytes(growth.bytes), "line": growth.line}
    template = "Every step leaves {bytes} behind" + (", made at {line}" if growth.line else "")
    holder, brief = growth.holder, ""
    if holder is None:
        brief = f"{template}."
        template += (
            ". No variable was found that keeps the tensors; often it is a list or a sum of losses, which keeps their "
            "graphs: add loss.item() or loss.detach() to it."
        )
    else:
        values |= {"name": holder.name, "tensors": holder.tensors, "place": holder.line}
        one = holder.tensors == 1
        template += ": {name} keeps " + ("it" if one else "{tensors} tensors")
        template += (" with its graph" if one else " with their graphs") if holder.graphs else ""
        template += " (added to at {place})" if holder.line else ""
        moves = f". Move {'it' if one else 'them'} to the CPU."
        template += ". Keep x.item() or x.detach() instead." if holder.graphs else moves
    yield Finding("run-grows", template, values, bytes=growth.bytes, brief=brief)


@RULES.rule("run-checkpoints-nothing")
def _checkpoints_nothing(run: ProgramRun) -> Iterator[Finding]:
    if run.unused_checkpointing:
        text = "Activation checkpointing is on ({name}), but no backward recomputed a module: its blocks are in "
        text += "evaluation mode, the condition matches none of them, or another library replaced their forward."
        yield Finding("run-checkpoints-nothing", text, {"name": run.unused_checkpointing})


@RULES.rule("run-lags")
def _lags(run: ProgramRun) -> Iterator[Finding]:
    if run.peak.lag is not None:
        yield lagging(run.peak.lag, run.peak.reserved, "run-lags")


@RULES.rule("run-gradients-kept")
def _gradients(run: ProgramRun) -> Iterator[Finding]:
    gradients = run.kept_gradients
    if gradients is None or gradients.bytes < run.peak.requested * _SMALL_PART:
        return
    template = {
        "kept": (
            "zero_grad(set_to_none=False) at {line} keeps {bytes} of gradients alive during every forward: drop the "
            "argument to free them."
        ),
        "late": (
            "zero_grad at {line} comes after the forward, so {bytes} of old gradients stay alive during it. Call it "
            "before."
        ),
        "none": "{bytes} of gradients stay alive during the next step's forward: no zero_grad frees them.",
    }[gradients.reason]
    values = {"bytes": Bytes(gradients.bytes), "line": gradients.line or "a line of a library"}
    yield Finding("run-gradients-kept", template, values, bytes=gradients.bytes)


@RULES.rule("run-checkpoint-stays")
def _checkpoint_stays(run: ProgramRun) -> Iterator[Finding]:
    loaded = run.loaded_checkpoint
    if loaded is None or loaded.bytes < run.peak.requested * _SMALL_PART:
        return
    template = "A loaded checkpoint keeps {bytes} on the GPU during training, beside the model that has its own copy"
    template += ". Load it with map_location='cpu'" + (", or del {name} after load_state_dict." if loaded.name else ".")
    values = {"bytes": Bytes(loaded.bytes), "name": loaded.name}
    yield Finding("run-checkpoint-stays", template, values, bytes=loaded.bytes, brief=template)


def _allowed(run: ProgramRun) -> dict[str, Bytes]:
    """The bytes that the allocator may take of the card; empty if it may take the whole card."""
    allowed = config_of(run).allowed(run.card.bytes)
    return {} if allowed is None else {"allowed": Bytes(allowed)}


def _layers(path: str | None) -> tuple[str, ...]:
    return (path,) if path else ()
