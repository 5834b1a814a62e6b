"""PyTorch's out-of-memory errors in a text, such as the log of a training: where memory ran out, what the GPU held, and
what would have helped.

The message has had three forms: until PyTorch 1.3; until 2.0; and since 2.1, with the processes on the GPU, CUDA
graphs' pools and a limit of the program's own (c10/cuda/CUDACachingAllocator.cpp). It is raised after all whole free
segments have been returned, so what is reserved and not allocated lies between blocks in use.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from memsize import files
from memsize.analysis.explain.explanation import out_of_memory
from memsize.analysis.explain.history import summarize
from memsize.analysis.explain.snapshot_file import Frame, Stack
from memsize.device.allocator_config import SMALL_SEGMENT
from memsize.device.cards import CARDS
from memsize.errors import InputError
from memsize.printable import printable
from memsize.records.error import OutOfMemoryReport, Process
from memsize.records.explanation import FailedRequest
from memsize.records.finding import Finding, Rules, join_names, sizes
from memsize.units import MiB, parse_bytes

STDIN: Final = "-"
_MOST_TEXT: Final = 64 * MiB
"""What is read of a text: of a longer one its end."""

_SIZES: Final = ("total", "free", "tensors", "pieces", "pools", "allowed", "reserved")


def _pattern(text: str) -> re.Pattern[str]:
    """A form of the message, whose ``[name]`` is a size of that name, and whose blanks are any whitespace."""
    text = re.sub(r"\[(\w+)\]", r"(?P<\1>[\\d.]+ (?:bytes|[KMG]iB))", text)
    return re.compile(text.replace(" ", r"\s+"))


_REQUEST: Final = _pattern(r"out of memory\. Tried to allocate [bytes]")
_FORMS: Final = (
    _pattern(
        r"\. GPU (?P<gpu>\d+) has a total capaci?ty of [total] of which [free] is free\.(?P<processes>[\s\S]{0,4000}?)"
        r"(?: [allowed] allowed;)? Of the allocated memory [tensors] is allocated by PyTorch"
        r"(?:, with [pools] allocated in private pools \(e\.g\., CUDA Graphs\))?(?:,? and [pieces] is reserved)?"
    ),
    _pattern(
        r" \(GPU (?P<gpu>\d+); [total] total capacity; [tensors] already allocated; [free] free;"
        r"(?: [allowed] allowed;)? (?:[reserved] reserved|[pieces] cached)"
    ),
)
"""What follows on the request, since PyTorch 2.1 and before."""
_PROCESS: Final = _pattern(r"(?:Process (?P<number>\d+)|this process) has [bytes] memory in use")
_WITHOUT_FIGURES: Final = re.compile(r"out of memory|ALLOC_FAILED|cudaErrorMemoryAllocation", re.IGNORECASE)

_RANK: Final = re.compile(r"^\[rank\d+\]: ?")
_CALL: Final = re.compile(
    r'\bFile "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>\S+)'
    r"|^File (?P<path>\S+):(?P<at>\d+), in (?P<function>[^\s(]+)"
    r"|^Cell In\[(?P<cell>\d+)\], line (?P<number>\d+)(?:, in (?P<called>[^\s(]+))?",
    re.MULTILINE,
)
"""A call in a traceback of Python, or of IPython: in a file, in a cell."""
_TRACEBACK: Final = "Traceback (most recent call last)"


def is_message(text: str) -> bool:
    """Whether a text is such an error itself, and names no file with one."""
    return _REQUEST.search(text) is not None


def is_snapshot(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as a pickle does. One that cannot be read is left to the reader of snapshots."""
    if str(path) == STDIN or is_message(str(path)):
        return False
    try:
        with files.opened(Path(path).expanduser()) as file:
            return file.read(1) in (b"\x80", b"")
    except OSError:
        return True


def explain_errors(path: str | os.PathLike[str], device: int | None = None) -> OutOfMemoryReport:
    """Explain the last error on one GPU in the text at `path` (``-``: stdin), or in `path` itself, by default on the
    GPU that failed first.

    Raises `InputError` for a text without such an error.
    """
    name, text = "error", str(path)
    if not is_message(text):
        name, text = "stdin" if text == STDIN else printable(Path(path).name), _read(path)
    reports: dict[int, list[OutOfMemoryReport]] = {}
    for lines in _by_rank(text):
        for report in _errors(lines, name):
            reports.setdefault(report.device, []).append(report)
    if not reports:
        raise _no_error(name, text)
    number = next(iter(reports)) if device is None else device
    if number not in reports:
        raise InputError(f"{name} has no out-of-memory error on GPU {number}, but on {_gpus(reports)}")
    on_gpu = tuple(dict.fromkeys(reports.pop(number)))
    report = replace(on_gpu[-1], failed=on_gpu[-1].failed._replace(times=len(on_gpu)))
    if reports:
        report = replace(
            report, notes=(*report.notes, f"the text also has errors on {_gpus(reports)}: --device shows another")
        )
    return replace(report, findings=RULES.findings(report))


def _gpus(numbers: Iterable[int]) -> str:
    return f"GPU {join_names(tuple(sorted(numbers)))}"


def _read(path: str | os.PathLike[str]) -> str:
    if str(path) == STDIN:
        content = sys.stdin.buffer.read()[-_MOST_TEXT:]
    else:
        try:
            with files.opened(Path(path).expanduser()) as file:
                file.seek(max(os.fstat(file.fileno()).st_size - _MOST_TEXT, 0))
                content = file.read(_MOST_TEXT)
        except OSError as error:
            raise InputError(f"cannot read {printable(str(path))}: {error.strerror}") from error
    return content.decode("utf-8", "replace")


def _no_error(name: str, text: str) -> InputError:
    if _WITHOUT_FIGURES.search(text):
        return InputError(f"{name} lacks the figures of an out-of-memory error, from “Tried to allocate” on")
    return InputError(
        f"{name} is neither a memory snapshot of torch.cuda.memory._dump_snapshot nor a text with an out-of-memory "
        "error of PyTorch"
    )


def _by_rank(text: str) -> Iterable[str]:
    """Part the lines of each rank, which mix, from those that no rank's name begins."""
    lines: dict[str, list[str]] = {}
    for line in text.splitlines():
        rank = _RANK.match(line)
        lines.setdefault(rank[0].rstrip() if rank else "", []).append(line[rank.end() if rank else 0 :])
    return map("\n".join, lines.values())


def _errors(text: str, name: str) -> Iterator[OutOfMemoryReport]:
    end = 0
    for request in _REQUEST.finditer(text):
        match = next(filter(None, (form.match(text, request.end()) for form in _FORMS)), None)
        if match is not None:
            groups = {key: value for key, value in match.groupdict().items() if value}
            yield _report(name, request["bytes"], groups, _calls(text[end : request.start()]))
            end = match.end()


def _report(name: str, requested: str, groups: dict[str, str], stack: Stack) -> OutOfMemoryReport:
    size = {key: _size(groups[key]) for key in _SIZES if key in groups}
    pieces = size["pieces"] if "pieces" in size else max(size.get("reserved", 0) - size["tensors"], 0)
    processes = [
        Process(int(m["number"] or 0), _size(m["bytes"])) for m in _PROCESS.finditer(groups.get("processes", ""))
    ]
    own = _own(processes, size["tensors"] + pieces)
    summary, pools = summarize(stack), size.get("pools", 0)
    return OutOfMemoryReport(
        source=name,
        device=int(groups["gpu"]),
        failed=FailedRequest(
            _size(requested), size["free"], summary.line, summary.function, stage=summary.stage, times=1
        ),
        total=size["total"],
        tensors=size["tensors"] - pools,
        pieces=pieces,
        pools=pools,
        process=own and own.bytes,
        others=tuple(process for process in processes if process is not own),
        allowed=size.get("allowed"),
        notes=(_next_step(stack, size["total"]),),
    )


def _size(text: str) -> int:
    return parse_bytes(text.replace("bytes", "B"))


def _own(processes: list[Process], reserved: int) -> Process | None:
    """The process that raised the error. In a container PyTorch does not know its own number, which the host gave: then
    it is the smallest process that holds what PyTorch had reserved, to the digits of the message.
    """
    able = [process for process in processes if not process.number]
    able = able or sorted(filter(lambda process: process.bytes * 1.001 >= reserved, processes), key=lambda p: p.bytes)
    return next(iter(able), None)


def _calls(text: str) -> Stack:
    """The calls of the last traceback in a text, innermost first."""
    calls = []
    for call in _CALL.finditer(text, max(text.rfind(_TRACEBACK), 0)):
        if call["cell"]:
            calls.append(Frame(f"In [{call['cell']}]", int(call["number"]), call["called"] or "<module>"))
        else:
            line = int(call["line"] or call["at"])
            calls.append(Frame(call["file"] or call["path"], line, call["name"] or call["function"]))
    return tuple(reversed(calls))


def _next_step(stack: Stack, total: int) -> str:
    common = (card for card in CARDS.values() if card.platform == "CUDA" and card.aliases)
    gpu = min(common, key=lambda card: abs(card.bytes - total)).aliases[0]
    script = next(
        (call.filename for call in reversed(stack) if call.name == "<module>" and call.filename.endswith(".py")), ""
    )
    name = re.split(r"[/\\]", script)[-1] or "SCRIPT.py"
    command = shlex.join(("memsize", "run", "--gpu", gpu, name))
    return f"{command} simulates the run without a GPU: what is alive where memory runs out, and the batch that fits"


# -- findings ----------------------------------------------------------------------------------------------------------

RULES: Final = Rules[OutOfMemoryReport]()
_WORTH_TELLING: Final = 0.05
"""The part of the GPU from which on something is told."""
_SEGMENTS: Final = {SMALL_SEGMENT: "up to 1 MiB", 20 * MiB: "1 to 10 MiB"}
"""The segments that PyTorch reserves for small blocks, and the sizes of these (c10/core/AllocatorConfig.h)."""


@RULES.rule("error-out-of-memory")
def _what_happened(report: OutOfMemoryReport) -> Iterator[Finding]:
    values = sizes(requested=report.tensors, reserved=report.reserved)
    yield out_of_memory("error-out-of-memory", report.failed, values)


@RULES.rule("error-limit")
def _limit(report: OutOfMemoryReport) -> Iterator[Finding]:
    """Say that the GPU had room."""
    failed = report.failed
    values = sizes(free=failed.free, wanted=failed.bytes, allowed=report.allowed, reserved=report.reserved)
    if report.allowed is not None and report.reserved + failed.bytes > report.allowed:
        text = (
            "The process may reserve only {allowed}, and {reserved} were reserved: "
            "torch.cuda.set_per_process_memory_fraction or PYTORCH_CUDA_ALLOC_CONF sets that limit."
        )
        yield Finding("error-limit", text, values, bytes=report.allowed)
    elif failed.free >= failed.bytes:
        text = (
            "The GPU was not full: {free} were free, and the request was for {wanted}. Either the process has a limit "
            "(torch.cuda.set_per_process_memory_fraction), or the driver refused, as when the host runs out of memory."
        )
        yield Finding("error-limit", text, values, bytes=failed.free)


@RULES.rule("error-fragmented", "error-not-fragmented")
def _fragmentation(report: OutOfMemoryReport) -> Iterator[Finding]:
    wanted, room = report.failed.bytes, report.failed.free
    if report.allowed is not None:
        room = min(room, max(report.allowed - report.reserved, 0))
    if room >= wanted or wanted == SMALL_SEGMENT:  # small tensors use no pieces of large blocks
        return
    short = wanted - room - report.pieces
    values = sizes(free=report.pieces, wanted=wanted, short=short)
    if short <= 0:
        text = (
            "Fragmentation is the cause: {free} are free inside reserved segments, but in pieces that are too small. "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets PyTorch use them."
        )
        yield Finding("error-fragmented", text, values, bytes=report.pieces)
    else:
        text = (
            "Fragmentation is not the cause: only {free} are free inside reserved segments, and even with them the "
            "request is {short} short."
        )
        yield Finding("error-not-fragmented", text, values, bytes=short)


@RULES.rule("error-other-processes")
def _other_processes(report: OutOfMemoryReport) -> Iterator[Finding]:
    of_others = sum(process.bytes for process in report.others)
    unseen = report.rest if report.process else 0
    short = report.failed.bytes - report.failed.free
    if report.allowed is not None or max(of_others, unseen) < report.total * _WORTH_TELLING:
        return
    values = sizes(sum=of_others, unseen=unseen)
    values["processes"] = tuple(str(process.number) for process in report.others)
    if unseen > of_others:
        text = "Processes that PyTorch cannot see hold {unseen} of the GPU, such as those of other containers."
    elif of_others >= short > 0:
        text = "Other processes ({processes}) hold {sum} of the GPU; without them the request would fit."
    else:
        text = "Other processes ({processes}) hold {sum} of the GPU."
    yield Finding("error-other-processes", text, values, bytes=max(of_others, unseen))


@RULES.rule("error-outside-pytorch", "error-graph-pools")
def _without_tensors(report: OutOfMemoryReport) -> Iterator[Finding]:
    texts = {
        "outside-pytorch": "This process holds {bytes} outside PyTorch's allocator: the CUDA context and kernels, "
        "NCCL's buffers, CUDA graphs, and libraries that allocate memory themselves.",
        "graph-pools": "{bytes} are free in the private pools of CUDA graphs, where only the graphs can use them; "
        "PyTorch's message counts them as allocated.",
    }
    for (code, text), size in zip(texts.items(), (report.outside, report.pools), strict=True):
        if size >= report.total * _WORTH_TELLING:
            yield Finding(f"error-{code}", text, sizes(bytes=size), bytes=size)


@RULES.rule("error-small-request")
def _small_request(report: OutOfMemoryReport) -> Iterator[Finding]:
    tensor = _SEGMENTS.get(report.failed.bytes)
    if tensor is not None and report.failed.free < report.failed.bytes:
        text = (
            "PyTorch reserves {bytes} for any tensor of {tensor}: the GPU was full, so the line that failed is not "
            "necessarily the one that needs the memory."
        )
        values = sizes(bytes=report.failed.bytes) | {"tensor": tensor}
        yield Finding("error-small-request", text, values, bytes=report.failed.bytes)
