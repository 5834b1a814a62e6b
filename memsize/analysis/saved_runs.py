"""Saved runs as answers: which record a file's kind is, and what of a run a command shows."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from memsize.analysis.step import StepTrace
from memsize.device.settings_of import config_of
from memsize.errors import InputError, UnknownScenarioError
from memsize.records.generation import GenerationReport
from memsize.records.gpu import DEFAULT_GPU
from memsize.records.program import ProgramRun
from memsize.records.report import Report
from memsize.records.run_file import read_run

KINDS = {
    "report": ("memsize.records.report", "Report"),
    "step": ("memsize.analysis.step", "StepTrace"),
    "program": ("memsize.records.program", "ProgramRun"),
    "ranks": ("memsize.records.ranks", "RankRuns"),
    "fit": ("memsize.records.fit", "Fit"),
    "generation": ("memsize.records.generation", "GenerationReport"),
    "serving": ("memsize.records.serving", "ServingReport"),
    "sweep": ("memsize.records.sweep", "Sweep"),
    "layout": ("memsize.records.layout", "LayoutReport"),
    "checkpoint": ("memsize.checkpoint.checkpoint_report", "CheckpointReport"),
    "verification": ("memsize.records.verification", "Verification"),
    "comparison": ("memsize.records.comparison", "Comparison"),
    "check": ("memsize.records.check", "Check"),
    "explanation": ("memsize.records.explanation", "Explanation"),
}
"""The record of each kind of saved run. It is imported when a file holds one."""

COMMANDS = {
    "step": "timeline",
    "program": "run",
    "ranks": "run",
    "generation": "generate",
    "serving": "serve",
    "verification": "verify",
    "explanation": "explain",
}
"""The commands that show a kind, where they have another name."""


def load(path: str | os.PathLike[str]) -> Any:
    """The answer in a saved run; raises `InputError` where the file is none, is damaged, or newer than this memsize."""
    return read_run(path, _record_of)


def load_kind(path: str | os.PathLike[str], *kinds: str) -> Any:
    """The answer in a saved run of one of these kinds; raises `InputError` also where it is of another."""
    found = load(path)
    if found.kind not in kinds:
        command = COMMANDS.get(found.kind, found.kind)
        hint = "memsize.load reads it" if found.kind == "comparison" else f"memsize {command} shows it"
        raise InputError(f"{path} holds a {found.kind}: {hint}")
    return found


def load_step(path: str | os.PathLike[str], scenario: str | None) -> StepTrace:
    """The step in a saved run: the one of a timeline or a program, a generation's largest, or of a report the run under
    `scenario` (None: its layers').

    Raises `InputError`, and `ScenarioError` where the report has no such run.
    """
    found = load(path)
    if isinstance(found, (ProgramRun, GenerationReport)):
        found = StepTrace(found.trace, found.card.name, config_of(found))
    if not isinstance(found, Report):
        return _only(found, path, scenario)
    runs = {result.name: result.trace for result in found.scenario_results if result.trace}
    runs.setdefault(found.trace.scenario, found.trace)
    if scenario is not None and scenario not in runs:
        raise UnknownScenarioError("scenario", scenario, runs)
    trace = found.trace if scenario is None else runs[scenario]
    return StepTrace(trace, found.gpu or DEFAULT_GPU, config_of(found))


def _only(found: Any, path: str | os.PathLike[str], scenario: str | None) -> StepTrace:
    step: StepTrace = found if isinstance(found, StepTrace) else load_kind(path, StepTrace.kind)
    if scenario is not None and step.trace.scenario != scenario:
        raise InputError(f"{path} was run under {step.trace.scenario}, and under no other scenario")
    return step


def _record_of(kind: str) -> type | None:
    if kind not in KINDS:
        return None
    module, name = KINDS[kind]
    record: type = getattr(import_module(module), name)
    return record
