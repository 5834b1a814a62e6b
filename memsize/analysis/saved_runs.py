"""Load answers from saved runs, and the step of a run that a command shows."""

from __future__ import annotations

import os
from typing import Any

from memsize.analysis.step import StepTrace
from memsize.device.allocator_config import config_of
from memsize.errors import InputError, UnknownScenarioError
from memsize.records.generation import GenerationReport
from memsize.records.gpu import DEFAULT_GPU
from memsize.records.kinds import KINDS, SAVED_KINDS
from memsize.records.program import ProgramRun
from memsize.records.report import Report
from memsize.records.run_file import read_run


def load(path: str | os.PathLike[str]) -> Any:
    """The answer in a saved run; raises `InputError` where the file is none, is damaged, or newer than this memsize."""
    return read_run(path, lambda kind: SAVED_KINDS[kind].record_type if kind in SAVED_KINDS else None)


def load_kind(path: str | os.PathLike[str], *kinds: str) -> Any:
    """The answer in a saved run of one of these kinds; raises `InputError` also where it is of another."""
    answer = load(path)
    if answer.kind not in kinds:
        raise InputError(f"{path} holds a {answer.kind}: {KINDS[answer.kind].reader}")
    return answer


def load_step(path: str | os.PathLike[str], scenario: str | None) -> StepTrace:
    """The step in a saved run: the one of a timeline or a program, a generation's largest, or of a report the run under
    `scenario` (None: its layers').

    Raises `InputError`, and `ScenarioError` where the report has no such run.
    """
    answer = load(path)
    if isinstance(answer, (ProgramRun, GenerationReport)):
        answer = StepTrace(answer.trace, answer.card.name, config_of(answer))
    if not isinstance(answer, Report):
        step: StepTrace = answer if isinstance(answer, StepTrace) else load_kind(path, StepTrace.kind)
        if scenario is not None and step.trace.scenario != scenario:
            raise InputError(f"{path} was run under {step.trace.scenario}, and under no other scenario")
        return step
    runs = {result.name: result.trace for result in answer.scenario_results if result.trace}
    runs.setdefault(answer.trace.scenario, answer.trace)
    if scenario is not None and scenario not in runs:
        raise UnknownScenarioError("scenario", scenario, runs)
    trace = answer.trace if scenario is None else runs[scenario]
    return StepTrace(trace, answer.gpu or DEFAULT_GPU, config_of(answer))
