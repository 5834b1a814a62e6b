"""What `memsize run` shows, from records built by hand: findings against arithmetic, then golden files.

`MEMSIZE_GOLDEN=write pytest tests/test_program_document.py` writes the golden files anew; read the difference before
keeping it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memsize import ProgramRun, Trace
from memsize.documents import document
from memsize.documents.sections import Findings
from memsize.records.trace import Event, Storage
from memsize.render import render
from tests import records
from tests.gpus import card, timeline
from tests.known_values import UNCOMPILED
from tests.pages import check_golden as check
from tests.records import (
    Assumed,
    ChildRun,
    GpuEstimate,
    Growth,
    Holder,
    Interval,
    KeptGradients,
    LiveTensor,
    ModuleShare,
    Refused,
    WentOn,
    peak_by_module,
    step_courses,
)
from tests.rules import PROGRAM_RULES

MiB = 2**20


def program() -> ProgramRun:
    """3 MiB of weights from the setup, 8 MiB of activations in the forward, 3 MiB of gradients in backward: 14 MiB.

    The activations end first, so that the peak is the first event of backward.
    """
    trace = Trace(
        model="train.py",
        scenario="as-given",
        training=True,
        batch_size=None,
        torch="2.13.0",
        inputs=(),
        layers=(records.layer("", "Net", leaf=False), records.layer("body", "Linear")),
        tensors=(),
        phases=("setup", "step 1", "forward 1", "backward 1"),
        storages=(
            Storage(3 * MiB, "parameter", 1, "_to_copy", "float32", (3, 262144), -1),
            Storage(8 * MiB, "activation", 1, "relu", "float32", (8, 262144), 1),
            Storage(3 * MiB, "gradient", 1, "mm", "float32", (3, 262144), -1),
        ),
        events=(
            Event(0, 3 * MiB, 0, -1, "_to_copy"),
            Event(1, 8 * MiB, 2, 1, "relu"),
            Event(2, 3 * MiB, 3, 1, "mm"),
            Event(1, -8 * MiB, 3, 1, "mm"),
        ),
    )
    peak = GpuEstimate(
        requested=14 * MiB,
        allocated=14 * MiB,
        reserved=40 * MiB,
        device=Interval(340 * MiB, 690 * MiB),
        fragmentation=26 / 40,
        peak_phase="backward",
        peak_step=1,
        peak_layer="body",
        peak_op="mm",
        roles={"activation": 8 * MiB, "parameter": 3 * MiB, "gradient": 3 * MiB},
        storages=(),
    )
    tensors = (
        LiveTensor(8 * MiB, "activation", "float32", (8, 262144), "body", "relu", "forward 1", "net.py:12"),
        LiveTensor(3 * MiB, "parameter", "float32", (3, 262144), "body", "_to_copy", "setup", "train.py:7"),
        LiveTensor(3 * MiB, "gradient", "float32", (3, 262144), "body", "mm", "backward 1", None),
    )
    found = ProgramRun(
        program="train.py --lr 1",
        trace=trace,
        card=card("t4"),
        capacity=14000 * MiB,
        peak=peak,
        steps=3,
        stopped=True,
        tensors=tensors,
        assumed=(Assumed("a number read from an activation (.item()) is assumed to be 1.0", ("train.py:20",)),),
        unwritten=("3.00 MiB to last.pt",),
    )
    return replace(found, findings=PROGRAM_RULES.findings(found))


def codes(run: ProgramRun) -> list[str]:
    return [finding.code for finding in PROGRAM_RULES.findings(run)]


@pytest.mark.parametrize(
    ("op", "gpu", "dtype", "purpose"),
    [
        ("_log_softmax", "t4", "float32", "_log_softmax (the log-probabilities of the loss) needs"),
        ("_safe_softmax", "t4", "bfloat16", "since no fused kernel supports bfloat16 on this GPU) needs"),
        ("_safe_softmax", "t4", "float32", "since no fused kernel supports this call) needs"),
        ("_safe_softmax", "a100", "bfloat16", "since no fused kernel supports this call) needs"),
        ("relu", "t4", "float32", ": relu needs"),
    ],
)
def test_what_memory_ran_out_for(op: str, gpu: str, dtype: str, purpose: str) -> None:
    """Before compute capability 8.0, neither flash nor memory-efficient attention takes bfloat16 (sdp_utils.cpp)."""
    run = replace(program(), card=card(gpu), failure="OutOfMemoryError: …")
    storages = tuple(storage._replace(dtype=dtype) for storage in run.trace.storages)
    refused = Refused(20 * MiB, 5 * MiB, 0, op, "body", "forward 1", "net.py:12")
    run = replace(run, trace=replace(run.trace, storages=storages), refused=(refused,))
    assert purpose in PROGRAM_RULES.findings(run)[0].in_brief()


def test_a_script_that_only_starts_another_gets_a_verdict() -> None:
    """As a command that a package installs: what it starts has the GPU, and the verdict is about that."""
    child = ChildRun("python sft.py --bf16", None, 3, 1 << 30, 2 << 30, 3 << 30, ran_out=False)
    starter = replace(program(), trace=replace(program().trace, events=()), children=(child,))
    assert [finding.text() for finding in PROGRAM_RULES.findings(starter)] == [
        "It fits on Tesla T4: python sft.py --bf16, which the script started, takes 2.00 to 3.00 GiB of 14.6 GiB at "
        "its peak. memsize run sft.py --bf16 shows its breakdown."
    ]
    ran_out = child._replace(ran_out=True, failure="OutOfMemoryError: …")
    assert codes(replace(starter, children=(ran_out,))) == ["run-child-out-of-memory", "run-children"]
    assert "not included in these figures" in PROGRAM_RULES.findings(replace(program(), children=(child,)))[0].text()


@pytest.mark.parametrize(
    ("program_line", "argument"),
    [
        ("train.py --batch-size 64", "batch-size"),
        ("train.py --per_device_train_batch_size=8 --lr 1", "per_device_train_batch_size"),
        ("train.py --batches-per-epoch all", None),
        ("train.py --lr 1", None),
    ],
)
def test_the_argument_of_the_batch_is_named(program_line: str, argument: str | None) -> None:
    refused = Refused(20 * MiB, 5 * MiB, 0, "relu", "body", "forward 1", "net.py:12")
    run = replace(program(), program=program_line, refused=(refused,), failure="OutOfMemoryError: …")
    advice = f"memsize fit-script --vary-argument {argument} finds the largest that fits."
    assert PROGRAM_RULES.findings(run)[0].in_brief().endswith(advice if argument else "is left.")


def test_a_program_that_fails_at_once_is_not_told_to_choose_a_device() -> None:
    run = replace(program(), trace=replace(program().trace, events=()), failure="KeyError: 'x'")
    (finding,) = PROGRAM_RULES.findings(replace(run, failed_at="train.py:87", growth=None, kept_gradients=None))
    assert finding.text() == "The script failed at train.py:87: KeyError: 'x'. Nothing was on the GPU yet."
    assert "--device" in PROGRAM_RULES.findings(replace(run, failure=None))[0].text()
    refused = Refused(20 * MiB, 5 * MiB, 0, "empty", None, "setup", "train.py:2")
    assert codes(replace(run, refused=(refused,), failure="OutOfMemoryError: …")) == ["run-out-of-memory"]


def test_a_script_that_failed_is_said_to_have_failed_first() -> None:
    run = program()
    run = replace(run, failure="KeyError: 'x'", failed_at="train.py:87")
    failed = PROGRAM_RULES.findings(run)[0]
    assert failed.code == "run-failed" and "run-fits" not in codes(run)
    assert failed.in_brief().startswith("The script failed at train.py:87: KeyError: 'x'. Until then it took ")
    assert failed.bytes == run.peak.device.high
    assert document(replace(run, findings=PROGRAM_RULES.findings(run))).verdict()[0] == failed
    assert (
        PROGRAM_RULES.findings(replace(run, failed_at=None))[0]
        .text()
        .startswith("The script failed: KeyError: 'x'. Until")
    )
    interrupted = replace(run, failure="KeyboardInterrupt: ", failed_at="train.py:9")
    assert PROGRAM_RULES.findings(interrupted)[0].text().startswith("The script was interrupted at train.py:9. Until")


def test_what_fits_is_said_with_its_largest_tensor() -> None:
    text = program().findings[0].text()
    assert "0.33 to 0.67 GiB of 14.6 GiB" in text and "8.00 MiB of activations, is allocated at net.py:12" in text


def test_what_does_not_fit_is_said_with_its_line() -> None:
    refused = Refused(20 * MiB, 5 * MiB, 100 * MiB, "relu", "body", "forward 2", "net.py:12")
    run = replace(program(), refused=(refused, refused), failure="OutOfMemoryError")
    assert codes(run) == ["run-out-of-memory"]
    (found,) = PROGRAM_RULES.findings(run)
    where = "at net.py:12, in forward 2 of body: relu needs 20.00 MiB, 5.00 MiB is left"
    assert found.in_brief() == f"Out of memory on Tesla T4 {where}."
    assert found.text() == f"Out of memory on Tesla T4 {where}. PyTorch raises OutOfMemoryError 2 times."
    (found,) = PROGRAM_RULES.findings(replace(run, trace=replace(run.trace, notes=(UNCOMPILED,))))
    assert found.in_brief() == f"Out of memory on Tesla T4 without torch.compile {where}."


@pytest.mark.parametrize(
    ("count", "steps", "after", "told"),
    [
        (2, 3, WentOn(3, Interval(340 * MiB, 690 * MiB)), "the rest fits (3 steps, {peak})"),
        (2, 3, WentOn(1, Interval(340 * MiB, 690 * MiB)), "the rest fits (one step, {peak})"),
        (1, 3, WentOn(0, Interval(340 * MiB, 690 * MiB)), "the rest fits (no step, {peak})"),
        (1, 0, WentOn(0, Interval(340 * MiB, 690 * MiB)), "the rest fits ({peak})"),
        (1, 3, WentOn(0, None), "it puts nothing more on the GPU"),
    ],
)
def test_a_program_that_goes_on_is_told_whether_the_rest_fits(count: int, steps: int, after: WentOn, told: str) -> None:
    refused = Refused(20 * MiB, 5 * MiB, 100 * MiB, "relu", "body", "forward 2", "net.py:12")
    run = replace(program(), refused=(refused,) * count, steps=steps, went_on=after)
    (found,) = (each for each in PROGRAM_RULES.findings(run) if each.code == "run-out-of-memory")
    told = told.format(peak="0.33 to 0.67 GiB of 14.6 GiB at the peak")
    times = "once, at net.py:12" if count == 1 else "2 times, first at net.py:12"
    assert found.in_brief() == f"The script runs out of memory on Tesla T4 {times}, and goes on: {told}."
    assert found.text() == f"{found.in_brief()} In forward 2 of body, relu needs 20.00 MiB, 5.00 MiB is left."


def test_a_layer_that_is_a_number_does_not_read_as_a_count() -> None:
    run = program()
    numbered = replace(run, peak=replace(run.peak, peak_layer="1", peak_step=6))
    assert ", in backward 6 of layer 1." in PROGRAM_RULES.findings(numbered)[0].in_brief()


def test_the_verdict_is_short_and_why_says_all() -> None:
    found = program()
    run = replace(found, growth=Growth(MiB, "net.py:12", None), kept_gradients=KeptGradients(MiB, "late", "train.py:9"))
    told = document(replace(run, findings=PROGRAM_RULES.findings(run)))
    assert [finding.in_brief() for finding in told.verdict()] == [
        "It fits on Tesla T4: 0.33 to 0.67 GiB of 14.6 GiB at the peak, in backward 1 of body.",
        "Every step leaves 1.00 MiB behind, made at net.py:12.",
        "zero_grad at train.py:9 comes after the forward, so 1.00 MiB of old gradients stay alive during it. Call it "
        "before.",
    ]
    (reasons,) = told.reasons()
    assert isinstance(reasons, Findings) and reasons.findings == PROGRAM_RULES.findings(run)
    # In 10,000 steps a hundredth of a T4, 156 MB, is 15,636 bytes each.
    for bytes_per_step, codes in ((16_000, {"run-fits", "run-grows"}), (15_000, {"run-fits"})):
        run = replace(found, growth=Growth(bytes_per_step, "net.py:12", None))
        told = document(replace(run, findings=PROGRAM_RULES.findings(run)))
        assert {finding.code for finding in told.verdict()} == codes
        assert {finding.code for finding in told.findings} == {"run-fits", "run-grows"}


@pytest.mark.parametrize(
    ("holder", "text"),
    [
        (
            Holder("losses", "train.py:9", 2, True),
            "losses keeps 2 tensors with their graphs (added to at train.py:9). Keep x.item() or x.detach() instead.",
        ),
        (
            Holder("total", "train.py:9", 1, True),
            "total keeps it with its graph (added to at train.py:9). Keep x.item() or x.detach() instead.",
        ),
        (Holder("self.seen", None, 1, False), "self.seen keeps it. Move it to the CPU."),
        (Holder("self.seen", None, 2, False), "self.seen keeps 2 tensors. Move them to the CPU."),
        (
            None,
            "No variable was found that keeps the tensors; often it is a list or a sum of losses, which keeps their "
            "graphs: add loss.item() or loss.detach() to it.",
        ),
    ],
)
def test_what_grows_is_said_with_what_keeps_it(holder: Holder | None, text: str) -> None:
    run = replace(program(), growth=Growth(MiB, "net.py:12", holder))
    told = next(finding for finding in PROGRAM_RULES.findings(run) if finding.code == "run-grows").text()
    assert told.startswith("Every step leaves 1.00 MiB behind, made at net.py:12") and told.endswith(text)


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("kept", "zero_grad(set_to_none=False) at train.py:9 keeps 1.00 MiB of gradients"),
        ("late", "zero_grad at train.py:9 comes after the forward"),
        ("none", "no zero_grad frees them"),
    ],
)
def test_gradients_that_stay_are_said_with_their_line(reason: Any, text: str) -> None:
    run = replace(program(), kept_gradients=KeptGradients(MiB, reason, "train.py:9"))
    assert text in next(f for f in PROGRAM_RULES.findings(run) if f.code == "run-gradients-kept").text()
    # under 2 % of the peak's 14 MiB: 0.28 MiB
    run = replace(program(), kept_gradients=KeptGradients(MiB // 4, reason, "train.py:9"))
    assert not any(f.code == "run-gradients-kept" for f in PROGRAM_RULES.findings(run))


def test_modules_share_the_peak() -> None:
    """All that is alive at the peak, 3 MiB of weights, 8 of activations and 3 of gradients, is the module's own."""
    assert peak_by_module(program().trace) == (
        ModuleShare("body", "Linear", {"parameter": 3 * MiB, "activation": 8 * MiB, "gradient": 3 * MiB}, 14 * MiB),
    )
    assert peak_by_module(program().trace, most_rows=0) == peak_by_module(program().trace)


def test_a_phase_of_a_step_is_told_once() -> None:
    """A loss after the forward belongs to it, a copy before the next forward to that one."""
    phases = (("setup", 0), ("forward", 1), ("step", 1), ("forward", 1), ("step", 1), ("backward", 1), ("step", 2))
    phases += (("evaluation", 2), ("forward", 2))
    names = tuple(dict.fromkeys(f"{name} {step}" if step else name for name, step in phases))
    events = tuple(
        Event(place, MiB, names.index(f"{name} {step}" if step else name), -1, "op")
        for place, (name, step) in enumerate(phases)
    )
    storages = tuple(Storage(MiB, "temporary", -1, "op", "uint8", (MiB,), -1) for _ in phases)
    trace = replace(program().trace, phases=names, storages=storages, events=events)
    told = [(each.name, each.steps, each.summit.bytes // MiB) for each in step_courses(timeline(trace, few=0))]
    assert told == [
        ("setup", (0,), 1),
        ("forward", (1,), 5),
        ("backward", (1,), 6),
        ("evaluation", (2,), 8),
        ("forward", (2,), 9),
    ]


@pytest.mark.parametrize(("format", "suffix"), [("text", "txt"), ("json", "json"), ("csv", "csv")])
def test_golden(format: str, suffix: str) -> None:
    check(f"run.{suffix}", render(program(), format))


def test_golden_at_a_terminals_width() -> None:
    check("run.80.txt", render(program(), "text", width=80))


def test_the_page_holds_every_line_and_tensor() -> None:
    page = render(program(), "html")
    assert "net.py:12" in page and "train.py:20" in page and "last.pt" in page
