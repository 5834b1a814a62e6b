"""PyTorch's out-of-memory errors in a text, in each form that they have had."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import memsize
from memsize import OutOfMemoryReport
from memsize.cli import run
from memsize.errors import InputError
from memsize.render import FORMATS, render
from tests.pages import check_golden

MiB, GiB = 2**20, 2**30

ADVICE = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
    "avoid fragmentation."
)


def message(
    request: str = "2.00 GiB",
    gpu: int = 0,
    total: str = "24.00 GiB",
    free: str = "1.00 GiB",
    uses: str = "Including non-PyTorch memory, this process has 23.00 GiB memory in use. ",
    tensors: str = "20.00 GiB",
    pools: str = "",
    pieces: str = "2.50 GiB",
) -> str:
    pools = f"with {pools} allocated in private pools (e.g., CUDA Graphs), " if pools else ""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {request}. GPU {gpu} has a total capacity of "
        f"{total} of which {free} is free. {uses}Of the allocated memory {tensors} is allocated by PyTorch, {pools}and "
        f"{pieces} is reserved by PyTorch but unallocated.{ADVICE}\n"
    )


def explained(text: str, tmp_path: Path, **options: int) -> OutOfMemoryReport:
    path = tmp_path / "train.log"
    path.write_text(text)
    report = memsize.explain(path, **options)
    assert isinstance(report, OutOfMemoryReport)
    assert sum(use.bytes for use in report.uses) == report.total
    return report


def codes(report: OutOfMemoryReport) -> list[str]:
    return [finding.code.removeprefix("error-") for finding in report.findings]


TRACEBACK = """\
epoch 0
Traceback (most recent call last):
  File "/home/me/run/train.py", line 90, in <module>
    main()
  File "/home/me/run/train.py", line 41, in main
    loss = model(batch)
  File "/opt/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1784, in _call_impl
    return forward_call(*args, **kwargs)
  File "/home/me/run/net.py", line 12, in forward
    return self.head(x)
  File "/opt/lib/python3.11/site-packages/torch/nn/functional.py", line 2859, in linear
"""


def test_the_memory_by_its_use(tmp_path: Path) -> None:
    """24 = 20 of tensors + 2.5 between them + 0.5 outside PyTorch + 1 free; with the 2.5, the request fits."""
    report = explained(TRACEBACK + message(), tmp_path)
    assert [(use.use, use.bytes / GiB) for use in report.uses] == [
        ("tensors", 20),
        ("free between blocks in use", 2.5),
        ("outside PyTorch, in this process", 0.5),
        ("free", 1),
    ]
    assert codes(report) == ["out-of-memory", "fragmented"]
    first, second = (finding.text() for finding in report.findings)
    assert first == (
        "Out of memory at net.py:12: PyTorch requested 2.00 GiB and 1.00 GiB were free on the GPU. Tensors held 20.0 "
        "GiB of the 22.5 GiB that PyTorch had reserved."
    )
    assert second.startswith(
        "Fragmentation is the cause: 2.50 GiB are free inside reserved segments, but in pieces that"
    )
    assert report.failed.function == "forward" and report.failed.stage == "forward"
    assert report.notes == (
        "memsize run --gpu rtx3090 train.py simulates the run without a GPU: what is alive where memory runs out, and "
        "the batch that fits",
    )


def test_a_request_that_no_packing_would_serve(tmp_path: Path) -> None:
    """Of 8 GiB, 1 is free and 2.5 lie between blocks: 4.5 are lacking."""
    report = explained(message(request="8.00 GiB"), tmp_path)
    assert codes(report) == ["out-of-memory", "not-fragmented"]
    assert report.findings[1].text().endswith("even with them the request is 4.50 GiB short.")
    assert report.findings[1].bytes == 4.5 * GiB


@pytest.mark.parametrize(
    ("uses", "process", "others", "rest"),
    [
        ("Including non-PyTorch memory, this process has 10.00 GiB memory in use. ", 10, [], 13),
        ("", None, [], 14),
        # In a container PyTorch does not know its own number: it is the process that can hold what PyTorch reserved.
        ("Process 7 has 10.00 GiB memory in use. ", 10, [], 13),
        ("Process 7 has 12.00 GiB memory in use. Process 8 has 10.50 GiB memory in use. ", 10.5, [(7, 12)], 0.5),
        ("Process 7 has 4.00 GiB memory in use. ", None, [(7, 4)], 10),
        (
            "Process 7 has 12.50 GiB memory in use. Including non-PyTorch memory, this process has 9.50 GiB memory in "
            "use. ",
            9.5,
            [(7, 12.5)],
            1,
        ),
    ],
)
def test_who_uses_the_gpu(
    uses: str, process: float | None, others: list[tuple[int, float]], rest: float, tmp_path: Path
) -> None:
    """PyTorch has reserved 9 of 24 GiB, 1 is free."""
    report = explained(message(uses=uses, tensors="8.00 GiB", pieces="1.00 GiB"), tmp_path)
    assert report.process == (process and process * GiB)
    assert [(other.number, other.bytes / GiB) for other in report.others] == others
    assert report.rest == rest * GiB
    told = "other-processes" in codes(report)
    assert told == (any(size >= 1.2 for _, size in others) or (process is not None and rest >= 1.2))


def test_another_process_that_takes_the_room(tmp_path: Path) -> None:
    uses = (
        "Process 7 has 13.00 GiB memory in use. Including non-PyTorch memory, this process has 9.50 GiB memory in use. "
    )
    report = explained(message(request="4.00 GiB", uses=uses, tensors="8.00 GiB", pieces="1.00 GiB"), tmp_path)
    text = next(finding.text() for finding in report.findings if finding.code == "error-other-processes")
    assert text == "Other processes (7) hold 13.0 GiB of the GPU; without them the request would fit."


def test_the_pools_of_cuda_graphs_are_no_tensors(tmp_path: Path) -> None:
    """PyTorch counts their free blocks as allocated: of 20 GiB, 15 are."""
    report = explained(message(pools="15.00 GiB"), tmp_path)
    assert (report.tensors, report.pools, report.reserved) == (5 * GiB, 15 * GiB, 22.5 * GiB)
    assert "graph-pools" in codes(report)


def test_what_lies_outside_pytorch(tmp_path: Path) -> None:
    report = explained(message(tensors="16.00 GiB", pieces="0 bytes"), tmp_path)
    assert report.outside == 7 * GiB and codes(report)[-1] == "outside-pytorch"


@pytest.mark.parametrize(("request_", "tensor"), [("2.00 MiB", "up to 1 MiB"), ("20.00 MiB", "1 to 10 MiB")])
def test_the_smallest_segments(request_: str, tensor: str, tmp_path: Path) -> None:
    report = explained(message(request=request_, free="896.00 KiB", pieces="0 bytes"), tmp_path)
    assert f"for any tensor of {tensor}: the GPU was full" in report.findings[-1].text()


@pytest.mark.parametrize(
    ("allowed", "free", "expected"),
    [
        ("23.00 GiB allowed; ", "1.00 GiB", ["out-of-memory", "limit", "fragmented"]),
        ("", "3.00 GiB", ["out-of-memory", "limit"]),
        ("23.00 GiB allowed; ", "1.00 KiB", ["out-of-memory", "limit", "fragmented"]),
    ],
)
def test_a_limit_of_the_program(allowed: str, free: str, expected: list[str], tmp_path: Path) -> None:
    """22.5 GiB are reserved: 0.5 of 23 are left, and with 2.5 between blocks the request of 2 would fit."""
    report = explained(message(free=free, uses=allowed, total="26.00 GiB"), tmp_path)
    assert codes(report) == expected
    assert report.allowed == (23 * GiB if allowed else None)


OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 1; 4.00 GiB total capacity; 3.00 GiB already "
    "allocated; 0 bytes free; {}3.25 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory\n"
)
OLDEST = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 1; 4.00 GiB total capacity; 3.00 GiB already "
    "allocated; 0 bytes free; 256.00 MiB cached)\n"
)


@pytest.mark.parametrize("text", [OLD.format(""), OLDEST, OLD.format("3.50 GiB allowed; ")])
def test_the_forms_until_pytorch_2_0(text: str, tmp_path: Path) -> None:
    report = explained(text, tmp_path)
    assert (report.device, report.tensors, report.pieces, report.rest) == (1, 3 * GiB, 256 * MiB, 768 * MiB)
    assert report.process is None and report.findings[0].text().count("and 0 GiB were free") == 1


def test_the_error_of_a_simulated_gpu_is_read_back(tmp_path: Path) -> None:
    """Its figures have two digits: half a hundredth of a GiB is 5.12 MiB."""
    with memsize.virtual_gpu("t4"):
        keep = [torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(3)]
        small = torch.empty(3 * MiB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError) as error:
            torch.empty(2**34, dtype=torch.uint8, device="cuda")
        free, total = torch.cuda.mem_get_info()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    report = explained(str(error.value), tmp_path)
    assert report.failed.bytes == 16 * GiB
    assert len(keep) * 2**30 + small.nbytes == allocated
    for read, real in [
        (report.total, total),
        (report.failed.free, free),
        (report.tensors, allocated),
        (report.reserved, reserved),
        (report.process, total - free),
    ]:
        assert read == pytest.approx(real, abs=0.0051 * GiB)


def test_each_gpu_by_its_last_error(tmp_path: Path) -> None:
    """A script that tries smaller batches fails three times on GPU 0; torchrun repeats the last of GPU 1."""
    text = (
        message(request="8.00 GiB")
        + message(request="4.00 GiB")
        + message(request="2.00 GiB")
        + f"[rank1]: {message(gpu=1, request='5.00 GiB')}" * 2
    )
    report = explained(text, tmp_path)
    assert (report.device, report.failed.bytes, report.failed.times) == (0, 2 * GiB, 3)
    assert report.findings[0].text().endswith("This was the last of 3 failed requests.")
    assert report.notes[-1] == "the text also has errors on GPU 1: --device shows another"
    other = explained(text, tmp_path, device=1)
    assert (other.failed.bytes, other.failed.times) == (5 * GiB, 1)
    with pytest.raises(InputError, match="no out-of-memory error on GPU 5, but on GPU 0 and 1"):
        explained(text, tmp_path, device=5)


def test_the_lines_of_ranks_mix(tmp_path: Path) -> None:
    one = TRACEBACK.replace("net.py", "first.py").splitlines()
    two = TRACEBACK.replace("net.py", "second.py").splitlines()
    mixed = "\n".join(f"[rank0]: {a}\n[rank1]: {b}" for a, b in zip(one, two, strict=True))
    text = f"{mixed}\n[rank1]: {message(gpu=1)}[rank0]: {message()}"
    assert explained(text, tmp_path, device=0).failed.line == "first.py:12"
    assert explained(text, tmp_path, device=1).failed.line == "second.py:12"


def test_a_traceback_of_a_notebook(tmp_path: Path) -> None:
    text = (
        "OutOfMemoryError                          Traceback (most recent call last)\n"
        "Cell In[4], line 7\n      5 \n----> 7 train(model)\n\n"
        "Cell In[3], line 2, in train(model)\n----> 2 model(x)\n\n"
        "File /opt/lib/python3.11/site-packages/torch/nn/modules/module.py:1784, in Module._call_impl(self, *args)\n\n"
    )
    assert explained(text + message(), tmp_path).failed.line == "In [3]:2"


def test_a_message_that_is_wrapped(tmp_path: Path) -> None:
    text = message(pools="1.00 GiB").replace(" is ", "\nis ").replace(" GiB", "\nGiB")
    assert explained(text, tmp_path).tensors == 19 * GiB


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("all is well\n", "train.log is neither a memory snapshot of torch.cuda.memory._dump_snapshot nor a text with"),
        ("RuntimeError: CUDA error: out of memory\n", "train.log lacks the figures of an out-of-memory error"),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "train.log lacks the figures"),
    ],
)
def test_a_text_without_such_an_error(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        explained(text, tmp_path)


def test_a_text_is_compared_with_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(message())
    with pytest.raises(InputError, match="against compares with a snapshot"):
        memsize.explain(tmp_path / "train.log", against=tmp_path / "other.pickle")


def test_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(message().encode())))
    assert run(["explain", "-"]) == 0
    assert capsys.readouterr().out.startswith("stdin   GPU 0, of 24.0 GiB\n")


def test_the_message_itself(capsys: pytest.CaptureFixture[str]) -> None:
    text = message().removeprefix("torch.OutOfMemoryError: ")
    assert memsize.explain(text).total == 24 * GiB
    assert run(["explain", text]) == 0
    assert capsys.readouterr().out.startswith("error   GPU 0, of 24.0 GiB\n")


def test_a_saved_report_is_the_same(tmp_path: Path) -> None:
    report = explained(TRACEBACK + message(), tmp_path)
    report.save(tmp_path / "error.memsize")
    assert memsize.load(tmp_path / "error.memsize") == report
    assert run(["explain", str(tmp_path / "error.memsize"), "-o", str(tmp_path / "e.json")]) == 0


@given(before=st.text(max_size=300), between=st.text(max_size=60), at=st.integers(0, 300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_read_or_refused(before: str, between: str, at: int, tmp_path: Path) -> None:
    whole = message()
    (tmp_path / "train.log").write_text(f"x{before}{whole[:at]}{between}{whole[at:]}", encoding="utf-8")
    try:
        report = memsize.explain(tmp_path / "train.log")
    except InputError:
        assert between
    else:
        assert isinstance(report, OutOfMemoryReport) and (between or report.total == 24 * GiB)


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "markdown"])
def test_golden(format: str, tmp_path: Path) -> None:
    check_golden(f"error{FORMATS[format][0]}", render(explained(TRACEBACK + message(), tmp_path), format))
