"""Measurements of a real step, and predictions of it, as tests of what compares the two use them."""

from __future__ import annotations

from memsize.analysis.verify import cuda_memory as cuda_memory
from memsize.analysis.verify.alignment import (
    Window as Window,
    _shortest_edit as _shortest_edit,
    align as align,
    gaps as gaps,
    levels_beside as levels_beside,
    matched as matched,
)
from memsize.analysis.verify.cuda_memory import (
    AllocationEvent as AllocationEvent,
    CudaMemory as CudaMemory,
    allocation_events as allocation_events,
)
from memsize.analysis.verify.measure import OpSpan as OpSpan, located as located, measure as measure
from memsize.analysis.verify.verification import (
    Experiment as Experiment,
    convolves as convolves,
    predict as predict,
    verification_of as verification_of,
    verify_measurements as verify_measurements,
    verify_step as verify_step,
    workspaces as workspaces,
)
from memsize.loading.weightless import SMALLEST as SMALLEST, Weightless as Weightless
from memsize.model.materialize import executable as executable, materialize as materialize
from memsize.records.measurement import (
    NO_LOCATION as NO_LOCATION,
    AllocationLog as AllocationLog,
    ConvolutionWorkspace as ConvolutionWorkspace,
    DeviceUse as DeviceUse,
    LogEntry as LogEntry,
    MeasuredWorkload as MeasuredWorkload,
    Measurement as Measurement,
    OpLocation as OpLocation,
    Peaks as Peaks,
    SoftwareStack as SoftwareStack,
    allocations as allocations,
    log_of as log_of,
)
