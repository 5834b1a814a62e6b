"""Rules about what follows a program's steps: peaks of an evaluation and a checkpoint, growth with batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from memsize.records.finding import Finding, Rules, sizes
from memsize.records.program import AfterSteps, ProgramRun
from memsize.units import Bytes

AFTER_RULES: Final = Rules[ProgramRun]()
_TRAINER: Final = "trainer_pt_utils.py"
"""Where the `Trainer` of transformers gathers what each batch returns (`EvalLoopContainer`, transformers 4.46)."""

_SMALL: Final = 0.01
"""Which part of an evaluation's peak all batches together must leave behind to matter."""


@AFTER_RULES.rule("run-after-steps")
def _peaks(run: ProgramRun) -> Iterator[Finding]:
    """The peaks of an evaluation and a checkpoint beside that of training."""
    after = run.after
    if after is None or (run.failure is not None and not run.ran_out):
        return
    peaks = {"evaluation": after.evaluation, "checkpoint": after.checkpoint}
    values = {name: Bytes(size) for name, size in peaks.items() if size is not None}
    if not values:
        return
    names = {"evaluation": "the evaluation {evaluation}", "checkpoint": "the checkpoint {checkpoint}"}
    parts = ("training holds {training} of tensors", *(names[name] for name in values))
    text = f"At their peaks, {', '.join(parts[:-1])} and {parts[-1]}."
    brief = f"Training fits, the code after it does not: {text[0].lower()}{text[1:]}" if run.ran_out else ""
    figures = values | sizes(training=after.training)
    yield Finding("run-after-steps", brief or text, figures, bytes=max(values.values()), brief=brief)


@AFTER_RULES.rule("run-evaluation-grows")
def _grows(run: ProgramRun) -> Iterator[Finding]:
    """Growth of an evaluation with each batch; a verdict says so where all together are too many."""
    after = run.after
    if (
        after is None
        or not after.per_batch
        or after.per_batch * (after.of or after.batches) < _SMALL * (after.evaluation or 0)
    ):
        return
    remedy = f"{_remedy(after)}."
    whole, more = after.whole_evaluation or 0, (after.of or 0) - after.batches
    growth = "each batch leaves {per_batch} on the GPU" + (", made at {line}" if after.line else "")
    text, verdict = f"During evaluation, {growth}", ""
    if more > 0:
        text += ": the peak is {seen} after {batches} of {of} batches, and {whole} after all"
        if whole > run.capacity and not run.refused:
            verdict = f"Training fits, evaluation does not: {growth}, so all {{of}} batches need {{whole}}. {remedy}"
    values: dict[str, object] = {"line": after.line, "batches": after.batches, "of": after.of}
    values |= sizes(per_batch=after.per_batch, seen=after.evaluation, whole=whole)
    yield Finding("run-evaluation-grows", verdict or f"{text}. {remedy}", values, bytes=whole, brief=verdict)


@AFTER_RULES.rule("run-evaluation-with-gradients")
def _with_gradients(run: ProgramRun) -> Iterator[Finding]:
    """Activations that an evaluation keeps for a backward that never comes."""
    after = run.after
    if after is not None and after.graph_bytes >= _SMALL * (after.evaluation or 0) and after.graph_bytes:
        text = (
            "The evaluation runs with gradients enabled: {graph} of its peak of {evaluation} are activations for a "
            "backward that never runs" + (", made at {line}" if after.graph_line else "")
        )
        text += ". Wrap it in torch.no_grad() or torch.inference_mode()."
        values = sizes(graph=after.graph_bytes, evaluation=after.evaluation) | {"line": after.graph_line}
        yield Finding("run-evaluation-with-gradients", text, values, bytes=after.graph_bytes, brief=text)


def _remedy(after: AfterSteps) -> str:
    if _TRAINER in (after.line or ""):
        return "Set eval_accumulation_steps=1 in TrainingArguments to move them to the CPU"
    return "Move them to the CPU after each batch, or accumulate the metric instead"


@AFTER_RULES.rule("run-after-steps-failed")
def _failed(run: ProgramRun) -> Iterator[Finding]:
    if run.after is not None and run.after.failure:
        where = " at {line}" if run.after.failed_at else ""
        text = f"The code after the training steps failed{where}: {{failure}}. The figures cover it up to that point."
        values = {"line": run.after.failed_at, "failure": run.after.failure.rstrip(".: ")}
        yield Finding("run-after-steps-failed", text, values)
