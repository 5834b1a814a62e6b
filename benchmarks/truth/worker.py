"""What the processes do that predict and measure: each reads its arguments, writes one file, and ends.

A workload is measured in a process of its own, so that neither segments nor workspaces nor loaded kernels of another
are in its figures.
"""

from __future__ import annotations

import gzip
import importlib
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from benchmarks.truth.outcomes import Outcome, outcome_of
from benchmarks.truth.suite import SUITE
from memsize.analysis.verify.cuda_memory import CudaMemory
from memsize.analysis.verify.measure import measure
from memsize.records.codec import plain
from memsize.records.measurement import SoftwareStack
from memsize.records.verification import Prediction, VerifiedRun

Predictions = dict[bool, Prediction]
"""Of one workload, by whether cuDNN's benchmark is on."""


def write_stack(memory: str, out: Path) -> None:
    """Read the GPU and its software."""
    _write(out, _device_memory(memory).stack())


def write_predictions(name: str, stack: Path, out: Path) -> None:
    """Predict a workload."""
    where: SoftwareStack = read(stack)
    case = SUITE[name].case
    said = {False: case.predict(where)}
    if said[False].convolutional:
        said[True] = case.predict(where, benchmark=True)
    _write(out, said)


def write_outcome(
    memory: str, name: str, benchmark: bool, predictions: Path | None, logs: Path | None, out: Path
) -> None:
    """Measure a workload, and set it beside its prediction where there is one. `logs` gets the whole log too."""
    where = _device_memory(memory)
    seen = measure(SUITE[name].case.plan(where.device, benchmark=benchmark), where)
    if predictions is None:
        _write(out, Outcome(name, benchmark, seen, failure="there is no prediction"))
        return
    said = cast(Predictions, read(predictions))[benchmark]
    checked = VerifiedRun(replace(seen, workspaces=said.workspaces), said)
    _write(out, outcome_of(name, checked))
    if logs is not None and seen.log is not None:
        with gzip.open(logs, "at", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, "measurements": [plain(checked.measurement)]}) + "\n")


def _device_memory(memory: str) -> CudaMemory:
    """The memory that ``module:name`` makes."""
    module, _, name = memory.partition(":")
    memory_source: CudaMemory = getattr(importlib.import_module(module), name)()
    return memory_source


def _write(path: Path, value: Any) -> None:
    path.with_suffix(".part").write_bytes(pickle.dumps(value))
    path.with_suffix(".part").replace(path)


def read(path: Path) -> Any:
    """What another process wrote to `path`; one of our own, in a folder of our own."""
    return pickle.loads(path.read_bytes())
